"""Stores that keep the tensors of users in the run folder, for one or several processes.

``store/params.bin`` and ``store/moments.bin`` have a record of each user that took part
(:mod:`comingle.training.storage.files`); each process has files of its own. A user that never took part has no record:
its initial values follow from the seed and its name. A checkpoint stores a table with the number and CRC-32 of each
record.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.data.population_files import read_cached
from comingle.data.populations import NAMES, StoredNames
from comingle.training.client import Store, Users
from comingle.training.kinds.base import DataRequest, Kind, RunData
from comingle.training.state import MOMENTS, State
from comingle.training.storage.files import (
    ABOUT,
    BEST,
    BEST_ROUND,
    FOLDER,
    ROWS,
    SUMS,
    VERSIONS,
    Process,
    RecordFile,
    Shard,
    StoreThread,
    Table,
    align,
    batched,
    check_store,
    copy_fields,
    disk_errors,
    processes_of,
    read_json,
    read_table,
    record_layouts,
    record_numbers_in_file,
    record_numbers_in_tables,
    remove_files,
    require_files,
    write_table,
)
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import list_checkpoints, verify
from comingle.utils.records import to_disk, write_json

_COPIED_AT_ONCE = 256
"""Number of records that are copied at a time."""

RECORDS_PER_FILE = 2**40
"""Largest number of records per file: in tables, record p of file k has the number ``k * RECORDS_PER_FILE + p``.

File 0 is that of this process in the run folder; others are temporary, or written by other processes.
"""

_OWN_FILE = 0
"""Number of the file in the run folder that this process writes, in :attr:`OnDisk._files` of a group."""


MAX_PENDING_WRITES = 2
"""Largest number of pending writes, each of which has the records of a cohort in memory."""


class OnDisk(State):
    """State of users in record files; a table has the number of each row's record.

    A row is one copy of a user's tensors; most methods have one copy, so that each user has one row.
    """

    in_memory = False

    def __init__(
        self,
        initial_state: Callable[[Sequence[int]], State],
        num_rows: int,
        moments: torch.dtype | None = None,
        names: Sequence[str] = (),
    ):
        """Start a store in which no user is on disk yet; a user's tensors are written after it has trained.

        Args:
            initial_state: Returns the state of rows that are not on disk, given their numbers. A row is one copy of a
                user's tensors.
            num_rows: Number of users times number of copies of the tensors that the method keeps for each user.
            moments: Dtype of optimizer moments on disk; None for their dtype in memory.
            names: Names of the users. If they are in files (:class:`StoredNames`), these are copied to the run folder.
        """
        self._initial_state = initial_state
        self._num_rows = num_rows
        self._names = names
        first_row = initial_state([0])
        self._device = first_row.rows.device
        # Rows are on disk; the tensors of this state have 0 rows, only the right shapes and dtypes.
        tensors_without_rows = {name: t[:0] for name, t in first_row.tensors().items()}
        self._template = first_row.filled(tensors_without_rows, best={})
        copy_fields(self, self._template)  # self is a State, too
        self._layouts = record_layouts(first_row, moments)
        self._groups = [group for group, layout in self._layouts.items() if layout.bytes]
        """Groups of tensors with record files of their own: "params" and, if there are any, "moments"."""
        versions = np.full(num_rows, int(first_row.versions[0]), dtype=np.int32)
        self._table = Table.without_records(self._groups, versions)
        self._files: dict[str, list[RecordFile | None]] = {name: [None] for name in self._groups}
        """Open files of each group: first the one in the run folder, None until :meth:`open`; then files that are
        temporary or only read.
        """
        self._write_numbers: dict[str, int] = {}
        """Number of the file of each group that new records go to."""
        self._worker = StoreThread()
        self._prefetched: tuple[list[int], Mapping[str, Future[np.ndarray]]] | None = None
        """Rows that are being read ahead, and their records by group."""
        self._run: Path | None = None
        """Run folder, once it is open."""
        self._best: Table | None = None
        """Table of the best round, if there is one."""
        # All rows belong to this process, until :meth:`shard` divides them among several.
        only_process = Process(number=0, count=1)
        self._shard = Shard(process=only_process, ids=np.arange(num_rows, dtype=np.int32), total_rows=num_rows)

    # ---------------------------------------------------------------- what State does

    def take(self, users: Sequence[int]) -> State:
        """Return the state of some users, read from disk.

        Args:
            users: Numbers of their rows; if a method keeps several copies of a user's tensors, each is a row.
        """
        return align(self._read_rows(list(users), self._groups), users)

    def put(self, users: Sequence[int], taken: State) -> None:
        """Write the state of some users to disk after a round, asynchronously.

        Args:
            users: Numbers of their rows; if a method keeps several copies of a user's tensors, each is a row.
            taken: Their state, from :meth:`take`. If it has no moments, those on disk stay.
        """
        rows = list(users)
        tensors = taken.tensors()
        if self._prefetched is not None:
            prefetched_rows, _reads = self._prefetched
            if not set(prefetched_rows).isdisjoint(rows):
                self._prefetched = None  # these records are about to change
        self._table.versions[rows] = taken.versions.cpu().numpy()
        self._write("params", rows, tensors)
        num_moments = taken.first.shape[1] + taken.second.shape[1]
        if "moments" in self._groups and num_moments:
            # A row whose moments are all zero gets no record, unless it has one already.
            has_record = torch.from_numpy(self._table.record_numbers["moments"][rows] >= 0)
            has_nonzero_moments = (taken.first != 0).any(1).cpu() | (taken.second != 0).any(1).cpu()
            indices = (has_record | has_nonzero_moments).nonzero().flatten().tolist()  # of rows to write
            if indices:
                moments = {name: tensors[name][indices] for name in ("first", "second")}
                self._write("moments", [rows[i] for i in indices], moments)

    @property
    def versions(self) -> Int[Tensor, " users"]:  # type: ignore[override] (a view of the table)
        """Server version that each user last downloaded, as the number of rounds done."""
        return torch.from_numpy(self._table.versions)

    def rows_of(self, users: Sequence[int]) -> Float[Tensor, "some columns"]:
        """Return the parameters of some users, read from disk.

        Args:
            users: Numbers of their rows; a row may occur twice.
        """
        return self._read_rows(list(users), ["params"]).rows

    def prefetch(self, users: Sequence[int]) -> None:
        """Start to read users from disk that :meth:`take` will need next, while others train.

        Args:
            users: Numbers of their rows; they replace those that were prefetched before.
        """
        rows = list(users)
        if not rows:
            self._prefetched = None
            return
        reads = {group: self._start_read(group, rows) for group in self._groups}
        self._prefetched = (rows, reads)

    def without_moments(self) -> State:
        """Return a view of this store that neither reads nor writes moments, for work without optimizer steps."""
        return _WithoutMoments(self)

    def copy(self, *, compact: bool = False) -> OnDisk:
        """Return a copy that reads the same files but writes its changes to temporary ones.

        So models can be fine-tuned and scored without a change to the run.

        Args:
            compact: Ignored; the tensors are not in memory.
        """
        other = object.__new__(type(self))  # the constructor would compute an initial state and start a thread
        vars(other).update(vars(self))
        other._table = self._table.copy()
        other._prefetched = None
        other._files = {group: list(files) for group, files in self._files.items()}
        other._write_numbers = {}  # no file to write to, so the first write makes a temporary one
        return other

    def release(self) -> None:
        """Close the temporary files of a copy made by :meth:`copy`, after all pending writes."""
        self._wait_for_writes(most=0)
        for group, number in self._write_numbers.items():  # a copy writes only to temporary files
            temporary_file = self._files[group][number]
            if temporary_file is not None:
                temporary_file.close()

    # ---------------------------------------------------------------- rows

    def _read_rows(self, rows: list[int], groups: Sequence[str]) -> State:
        """Return the state of some rows, read from disk, or their initial state if they have never been trained.

        Args:
            rows: Numbers of the rows; a row has one copy of a user's tensors.
            groups: What to read: "params" and, if needed, "moments". Without it the moments have no columns.
        """
        prefetched: Mapping[str, Future[np.ndarray]] = {}
        if self._prefetched is not None:
            prefetched_rows, reads_of_rows = self._prefetched
            if prefetched_rows == rows:
                prefetched = reads_of_rows
                self._prefetched = None
        reads: dict[str, Future[np.ndarray]] = {}
        for group in groups:
            reads[group] = prefetched[group] if group in prefetched else self._start_read(group, rows)
        tensors = self._unpack_params(rows, reads["params"])
        tensors.update(self._unpack_moments(rows, reads.get("moments")))
        return self._template.filled({name: t.to(self._device) for name, t in tensors.items()}, best={})

    def _unpack_params(self, rows: list[int], read: Future[np.ndarray]) -> dict[str, Tensor]:
        """Return the tensors of some users, except moments, from what was read from disk.

        Users who have never been trained are not on disk; they get their initial tensors.

        Args:
            rows: Numbers of the users' rows; a row is one copy of a user's tensors.
            read: Pending read of those rows that are on disk, in order.
        """
        has_record = self._table.record_numbers["params"][rows] >= 0
        stored = self._layouts["params"].unpack(self._wait_for_records(read))  # of the rows with a record
        new_rows = [row for row, is_stored in zip(rows, has_record.tolist(), strict=True) if not is_stored]
        if not new_rows:
            return stored
        initial = self._initial_state(new_rows).tensors()
        stored_indices = torch.from_numpy(np.flatnonzero(has_record))
        new_indices = torch.from_numpy(np.flatnonzero(~has_record))
        tensors: dict[str, Tensor] = {}
        for name, stored_t in stored.items():
            t = stored_t.new_empty(len(rows), *stored_t.shape[1:])
            t[stored_indices] = stored_t
            t[new_indices] = initial[name].to(t.device)
            tensors[name] = t
        return tensors

    def _unpack_moments(self, rows: list[int], read: Future[np.ndarray] | None) -> dict[str, Tensor]:
        """Return the optimizer moments of some rows, ``first`` and ``second``, from what was read from the disk.

        Args:
            rows: Numbers of the rows. A row is not on disk as long as its moments are zero.
            read: Pending read of the rows that are on disk; None if moments are not needed, to return 0 columns.
        """
        if read is None:
            return {"first": self.first.new_zeros(len(rows), 0), "second": self.second.new_zeros(len(rows), 0)}
        moments = {
            "first": self.first.new_zeros(len(rows), self.first.shape[1]),
            "second": self.second.new_zeros(len(rows), self.second.shape[1]),
        }
        stored = self._layouts["moments"].unpack(self._wait_for_records(read))  # of the rows on disk
        is_on_disk = self._table.record_numbers["moments"][rows] >= 0  # -1: no record
        stored_indices = torch.from_numpy(np.flatnonzero(is_on_disk))
        for name, t in stored.items():
            moments[name][stored_indices] = t.to(moments[name])  # the others stay zero
        return moments

    def _wait_for_records(self, read: Future[np.ndarray]) -> np.ndarray:
        """Wait for records to be read and return them, ``(records, bytes)``.

        Raises:
            RunError: The disk fails, or a record is damaged.
        """
        try:
            with disk_errors(self._run):
                return read.result()
        except RunError:
            self._wait_for_writes(most=0)  # raises the error of an earlier write, if that failed: it says more
            raise

    def _start_read(
        self, group: str, rows: list[int], record_numbers: Sequence[int] | None = None
    ) -> Future[np.ndarray]:
        """Start to read tensors of some users, after all pending writes; rows without a record are left out.

        Args:
            group: Group of tensors to read, "params" or "moments"; each group has record files of its own.
            rows: Numbers of the rows in this process; a row has one copy of a user's tensors.
            record_numbers: Number of the record of each row: ``k * RECORDS_PER_FILE + p`` for record p of file k, -1
                without a record. By default those in the current table.

        Returns:
            A future of the records ``(records, bytes)``.
        """
        numbers: Sequence[int] = self._table.record_numbers[group][rows].tolist()
        if record_numbers is not None:
            numbers = record_numbers
        ids_of_rows = self._shard.ids[rows].tolist()  # row numbers in the whole run, which records contain
        has_record = [number >= 0 for number in numbers]
        stored_numbers = list(compress(numbers, has_record))
        stored_ids = list(compress(ids_of_rows, has_record))
        files = self._files[group]
        record_bytes = self._layouts[group].bytes

        def read() -> np.ndarray:
            """Read the records, file after file; runs in the store's thread."""
            records = np.empty((len(stored_numbers), record_bytes), dtype=np.uint8)
            indices_by_file: dict[int, list[int]] = {}
            for index, record_number in enumerate(stored_numbers):
                file_number = record_number // RECORDS_PER_FILE
                indices_by_file.setdefault(file_number, []).append(index)
            for file_number, indices in indices_by_file.items():
                file = files[file_number]
                assert file is not None
                file.read(
                    record_numbers=[stored_numbers[i] % RECORDS_PER_FILE for i in indices],
                    rows=[stored_ids[i] for i in indices],
                    into=[records[i] for i in indices],
                )
            return records

        return self._worker.submit(read)

    def _write(self, group: str, rows: list[int], tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of some users to their records in a file, asynchronously, and enter the numbers of the records.

        A record that a checkpoint or the best round refers to is not overwritten: the row gets another record.

        Args:
            group: Group of tensors to write, "params" or "moments"; each group has files of its own.
            rows: Numbers of the rows in this process; a row has one copy of a user's tensors.
            tensors: Tensors of these rows ``(rows, *shape)`` by name; those of other groups are ignored.
        """
        file_number, file = self._file_to_write(group)
        record_numbers = self._table.record_numbers[group]
        new_numbers_in_file: list[int] = []
        for row in rows:
            old_number = int(record_numbers[row])
            has_record_in_file = old_number >= 0 and old_number // RECORDS_PER_FILE == file_number
            old_number_in_file = old_number % RECORDS_PER_FILE if has_record_in_file else -1
            new_numbers_in_file.append(file.record_to_write(old_number_in_file))
        record_numbers[rows] = file_number * RECORDS_PER_FILE + np.array(new_numbers_in_file, dtype=np.int64)
        records = self._layouts[group].pack(self._shard.ids[rows].tolist(), tensors)
        self._worker.write(file, new_numbers_in_file, records)
        self._wait_for_writes(MAX_PENDING_WRITES)  # more would need too much memory

    def _wait_for_writes(self, most: int) -> None:
        """Wait until at most ``most`` calls of :meth:`_write` are pending.

        Raises:
            RunError: The disk cannot be written to.
        """
        with disk_errors(self._run):
            self._worker.wait(most)

    def _file_to_write(self, group: str) -> tuple[int, RecordFile]:
        """Return the file to which the next trained tensors of users are written, and its index among the files.

        It is this process's file in the run folder; other files are only read. A store without a run folder, or a copy
        of a store, gets a temporary file.

        Args:
            group: Group of tensors, "params" or "moments".
        """
        files = self._files[group]
        if group not in self._write_numbers:
            with disk_errors(self._run):
                handle, path = tempfile.mkstemp(prefix="comingle-", suffix=".rows")
            os.close(handle)  # RecordFile opens the file itself
            files.append(RecordFile(Path(path), self._layouts[group].bytes, writable=True, temporary=True))
            self._write_numbers[group] = len(files) - 1
        number = self._write_numbers[group]
        file = files[number]
        assert file is not None
        return number, file

    # ---------------------------------------------------------------- the best round

    def remember(self, done: int) -> None:
        """Remember the users' current tensors as those of the best round, and keep them from being overwritten on disk.

        No tensors are copied, only the table of which record in a file has those of which user.

        Args:
            done: Number of rounds that are done.
        """
        self._wait_for_writes(most=0)
        self._best = self._table.copy()
        self.best = {"round": torch.tensor(done)}
        may_have_checkpoints = self._run is not None
        for group in self._groups:
            for number, file in enumerate(self._files[group]):
                if file is None:
                    continue
                is_only_read = self._write_numbers.get(group) != number
                if may_have_checkpoints or is_only_read:
                    # A checkpoint may need any record. :meth:`save` frees the others, as it knows the checkpoints.
                    file.protect_records()
                else:  # free the records of the previous best round
                    file.free_all_except(_restrict_to_file(self._record_numbers_in_use(group), number))

    def restored_best(self) -> State:
        """Return a store with the state after the round with the lowest validation loss; it reads the same files."""
        store = self.copy()
        assert self._best is not None
        store._table = self._best.copy()  # which records had the users' tensors after that round
        return store

    def _record_numbers_in_use(self, group: str) -> list[np.ndarray]:
        """Return the number of each row's record in the current table and, if there is one, in that of the best round.

        Args:
            group: Group of tensors, "params" or "moments".

        Returns:
            One or two arrays of the tables themselves, not copies.
        """
        record_numbers = [self._table.record_numbers[group]]
        if self._best is not None:
            record_numbers.append(self._best.record_numbers[group])
        return record_numbers

    # ---------------------------------------------------------------- the run folder

    def shard(self, number: int, processes: int, users: range, population: int) -> None:
        """Restrict the state to consecutive users, if the users of a run are divided among several processes.

        Each user has one row of tensors, or several if the method keeps several copies of a user's model. Records
        contain the number of the row in the whole run, ``copy * population + user``, which is computed here.

        Args:
            number: Number of this process.
            processes: Number of processes.
            users: Numbers of the users of this process in the whole run.
            population: Number of users of the whole run.
        """
        num_copies = self._num_rows // len(users)
        ids_of_copies = []
        for copy in range(num_copies):
            ids_of_copies.append(copy * population + np.array(users, dtype=np.int64))
        self._shard = Shard(
            process=Process(number, processes),
            ids=np.concatenate(ids_of_copies).astype(np.int32),
            total_rows=num_copies * population,
        )

    def open(self, run: Path, *, new_run: bool) -> None:
        """Open the files in ``store/`` of a run folder, to which users' tensors are written from now on.

        The first process must call this before the others: for a new run it makes the folder.

        Args:
            run: Run folder.
            new_run: Whether to delete existing files. False for a resumed run, whose files must exist.

        Raises:
            RunError: A file is missing, or the disk cannot be written to.
        """
        self._run = run
        if not new_run:
            newest_checkpoint = list_checkpoints(run)[-1]
            require_files(run, newest_checkpoint, self._groups)
        is_first_process = self._shard.process.number == 0
        with disk_errors(run):
            if new_run and is_first_process:
                self._make_folder(run / FOLDER)  # deletes existing records
            for group in self._groups:
                path = self._shard.process.records_path(run, group)
                self._files[group][_OWN_FILE] = RecordFile(path, self._layouts[group].bytes, writable=True)
                self._write_numbers[group] = _OWN_FILE
            to_disk(run / FOLDER)  # the folder's entries, so that new files survive a power failure

    def _make_folder(self, folder: Path) -> None:
        """Make the folder in which users' tensors are stored, for a new run; delete the files of an earlier run in it.

        A random identifier in it, which checkpoints contain too, shows later if it belongs to another run.
        """
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*.bin"):
            path.unlink()
        if isinstance(self._names, StoredNames):
            self._names.copy_to(folder)
        run_id = secrets.token_hex(8)
        write_json(folder / ABOUT, {**self._description, "id": run_id})

    @property
    def _description(self) -> dict[str, Any]:
        """Facts about the files with users' tensors, which must be the same when a run is resumed.

        They are the number of rows (models of users) in the whole run, and name, shape and dtype of each tensor of a
        row, by group: "params", or "moments" of optimizers.
        """
        description: dict[str, Any] = {"rows": self._shard.total_rows}
        for group in self._groups:
            description[group] = [field.description for field in self._layouts[group].fields]
        return description

    def save(self, draft: Path, checkpoints: Sequence[Path], write: Callable[[], list[str]]) -> list[str]:
        """Flush users' tensors to disk, write a table of where they are, and return the names of the files.

        A checkpoint has only this table: the tensors stay in the record files in ``store/``, one record per user.
        Records that no checkpoint needs may be overwritten from now on.

        Args:
            draft: Folder to which the new checkpoint is written; it is renamed once complete.
            checkpoints: Folders of the older ones.
            write: Not called; it writes users that are in memory.
        """
        self._wait_for_writes(most=0)
        assert self._run is not None
        own_files = self._own_files()
        for file in own_files.values():
            self._worker.submit(file.to_disk).result()
        process = self._shard.process
        table_path = process.table_path(draft)
        write_table(
            table_path,
            self._shard.ids,
            self._table,
            best=self._best,
            best_round=int(self.best["round"]) if self.best else None,
            crcs={group: file.crcs for group, file in own_files.items()},
        )
        written = [table_path.name]
        is_first_process = process.number == 0
        if is_first_process:
            write_json(draft / ABOUT, read_json(self._run / FOLDER / ABOUT))
            remove_files(self._run, [*checkpoints, draft])  # record files that none of these checkpoints uses
            written.append(ABOUT)
        self._free_unused_records(checkpoints)
        return written

    def _own_files(self) -> dict[str, RecordFile]:
        """Return the open files with users' tensors that this process writes in the run folder.

        By group of tensors: "params" and, if an optimizer uses them, "moments". Empty without a run folder.
        """
        own_files: dict[str, RecordFile] = {}
        for group in self._groups:
            file_in_run_folder = self._files[group][_OWN_FILE]
            if file_in_run_folder is not None:
                own_files[group] = file_in_run_folder
        return own_files

    def _free_unused_records(self, checkpoints: Sequence[Path]) -> None:
        """Let records that neither this store nor a checkpoint uses be overwritten; protect all others of this process.

        Args:
            checkpoints: Folders of checkpoints.
        """
        own_files = self._own_files()
        if not own_files:
            return
        process = self._shard.process
        tables = [read_table(process.table_path(path)) for path in checkpoints if process in processes_of(path)]
        for group, file in own_files.items():
            used = [*self._record_numbers_in_use(group), *record_numbers_in_tables(tables, group)]
            file.free_all_except(_restrict_to_file(used, file_number=0))

    def load(self, checkpoint: Path, read: Callable[[], State]) -> OnDisk:
        """Restore this store, in place, from a checkpoint that any number of processes has written; return the store.

        Only tables are read, which say in which record of a file the tensors of a user are. Records are read when they
        are needed.

        Args:
            checkpoint: Folder of the checkpoint.
            read: Not called; it reads tensors that are in memory.

        Raises:
            RunError: The store belongs to another recipe, run or round, or lacks records of the checkpoint.
        """
        run = checkpoint.parent.parent
        check_store(run, checkpoint, self._description, self._groups)
        selects_best_round = bool(self.best)
        best_table = Table.without_records(self._groups, self._table.versions)  # filled below
        best_rounds: set[int] = set()
        for process in processes_of(checkpoint):
            table_path = process.table_path(checkpoint)
            verify(checkpoint, table_path.name)
            columns = read_table(table_path)
            file_numbers = self._open_files(run, process)
            current_round = ""  # columns without a prefix
            self._load_record_numbers(columns, prefix=current_round, into=self._table, file_numbers=file_numbers)
            if selects_best_round:
                self._load_record_numbers(columns, prefix=BEST, into=best_table, file_numbers=file_numbers)
            if BEST_ROUND in columns:
                best_rounds.update(columns[BEST_ROUND].tolist())
        if selects_best_round:
            best_round = best_rounds.pop()  # the only one: all processes wrote the same number
            self._best = best_table
            self.best = {"round": torch.tensor(best_round)}
        self._free_unused_records(list(checkpoint.parent.glob("round-*")))
        if self._run is not None:
            self._copy_other_records()
        return self

    def _open_files(self, run: Path, process: Process) -> dict[str, int]:
        """Open the files with users' tensors that a process wrote before a checkpoint, for reading.

        A resumed run may have other processes than the run that wrote them, so it needs the files of all.

        Args:
            run: Run folder.
            process: Process that wrote the files.

        Returns:
            Index of the file in ``self._files[group]``, by group of tensors: "params" and, if there are any, "moments".
        """
        is_this_process = process == self._shard.process
        file_numbers: dict[str, int] = {}
        for group in self._groups:
            files = self._files[group]  # files[0] is that of this process
            if is_this_process and files[0] is not None:  # open already
                file_numbers[group] = 0
                continue
            file = RecordFile(process.records_path(run, group), self._layouts[group].bytes, writable=False)
            if is_this_process:
                files[0] = file
                file_numbers[group] = 0
            else:
                files.append(file)
                file_numbers[group] = len(files) - 1
        return file_numbers

    def _load_record_numbers(
        self, columns: dict[str, np.ndarray], *, prefix: str, into: Table, file_numbers: dict[str, int]
    ) -> None:
        """Copy versions and record numbers of this process's rows from the table of a checkpoint, on resuming.

        Records stay in their files and are read when a user is trained; this sets the checksums that they must have.

        Args:
            columns: Columns of the table, which one process wrote. ``ROWS`` has the numbers of its rows in the whole
                run; some or all of these rows may belong to other processes now.
            prefix: Prefix of the names of columns: empty for the current round, ``BEST`` for the best one.
            into: Table to update.
            file_numbers: Index in ``self._files[group]`` of the file with the records, by group ("params", "moments").
        """
        if prefix + ROWS not in columns:
            return
        ids = columns[prefix + ROWS]
        is_here = np.isin(ids, self._shard.ids)
        if not is_here.any():
            return
        ids_here = ids[is_here]
        # Number in this process of each row, such that ``self._shard.ids[rows] == ids_here``.
        sorted_order = np.argsort(self._shard.ids)
        rows = sorted_order[np.searchsorted(self._shard.ids, ids_here, sorter=sorted_order)]
        into.versions[rows] = columns[prefix + VERSIONS][is_here]
        for group in self._groups:
            numbers_in_file = columns[prefix + group][is_here].astype(np.int64)
            has_record = numbers_in_file >= 0
            first_number = file_numbers[group] * RECORDS_PER_FILE  # of the file
            into.record_numbers[group][rows] = np.where(has_record, first_number + numbers_in_file, -1)
            all_crcs = columns.get(prefix + SUMS + group)
            if all_crcs is not None:  # tables of older versions have none
                crcs_here = all_crcs[is_here]
                file = self._files[group][file_numbers[group]]
                assert file is not None
                file.expect(
                    numbers_in_file[has_record],
                    rows=ids_here[has_record].astype(np.int64),
                    crcs=crcs_here[has_record].view(np.uint32),
                )

    def _copy_other_records(self) -> None:
        """Copy users' tensors that are in files of other processes to files of this one, and update the tables.

        If a run is resumed with another number of processes, users may move to a process that lacks their records.
        """
        for group in self._groups:
            # Record numbers of all rows, now and in the best round: the arrays of the tables, which are updated below.
            numbers_by_table = self._record_numbers_in_use(group)  # one or two arrays
            own_file = self._files[group][_OWN_FILE]
            assert own_file is not None
            row_by_number: dict[int, int] = {}  # each record once, also if both tables refer to it
            for record_numbers in numbers_by_table:
                for row in _rows_elsewhere(record_numbers):
                    row_by_number[int(record_numbers[row])] = row
            new_numbers: dict[int, int] = {}
            for batch in batched(row_by_number.items(), _COPIED_AT_ONCE):
                old_numbers_of_batch = [record_number for record_number, _row in batch]
                rows = [row for _number, row in batch]
                records = self._start_read(group, rows, old_numbers_of_batch).result()
                no_record = -1  # the rows have no record in this file yet
                new_numbers_of_batch = [own_file.record_to_write(no_record) for _ in batch]
                self._worker.submit(own_file.write, new_numbers_of_batch, records).result()
                new_numbers.update(zip(old_numbers_of_batch, new_numbers_of_batch, strict=True))
            for record_numbers in numbers_by_table:
                for row in _rows_elsewhere(record_numbers):
                    record_numbers[row] = new_numbers[int(record_numbers[row])]
            del self._files[group][1:]  # no table refers to the other files any more


def _restrict_to_file(record_numbers: Sequence[np.ndarray], file_number: int) -> list[np.ndarray]:
    """Return the numbers of those records that are in one file, counted from the start of this file.

    Args:
        record_numbers: Arrays of numbers ``k * RECORDS_PER_FILE + p`` for record p of file k; -1 for no record.
        file_number: Number k of the file.
    """
    return [record_numbers_in_file(numbers, file_number, RECORDS_PER_FILE) for numbers in record_numbers]


def _rows_elsewhere(record_numbers: np.ndarray) -> list[int]:
    """Return the rows whose records a resumed run must copy, as they are in files that another process wrote.

    File 0 is that of this process; the numbers of its records are the lowest.

    Args:
        record_numbers: Number of the record of each row, ``k * RECORDS_PER_FILE + p`` for record p of file k.
    """
    return np.flatnonzero(record_numbers >= RECORDS_PER_FILE).tolist()


class _WithoutMoments(State):
    """View of a store that neither reads nor writes optimizer moments, for work without optimizer steps."""

    in_memory = False

    def __init__(self, store: OnDisk):
        """Make a view of a store, for work that needs no optimizer moments, such as making downloads.

        Its tensors have the shapes of those of the store, but the moments have no columns.
        """
        copy_fields(self, replace(store._template, first=store.first[:, :0], second=store.second[:, :0]))
        self._store = store

    def take(self, users: Sequence[int]) -> State:
        """Return the state of some users without moments, read from disk; see :meth:`OnDisk.take`."""
        return align(self._store._read_rows(list(users), ["params"]), users)

    def put(self, users: Sequence[int], taken: State) -> None:
        """Write the models of some users to disk, and leave their optimizer moments there as they are.

        Args:
            users: Numbers of the users.
            taken: State of these users, in this order, as :meth:`take` returned it.
        """
        self._store.put(users, taken)


class DiskStore(Store):
    """Store that keeps users' tensors and data on disk.

    With ``runtime.store: disk-bf16`` it rounds optimizer moments; otherwise it is exact.
    """

    def begin(self, clients: Users) -> OnDisk:
        """Return an object that reads and writes the users' tensors on disk, before the first round.

        Nothing is written yet, as initial tensors follow from the seed.

        Args:
            clients: The users, and the method and plan of the run.

        Raises:
            RecipeError: The method trains a single model for all users; or the store is to round the moments of
                optimizers to bfloat16, but no optimizer of the run has moments.
            DataError: The best round is selected and no user has validation data.
        """
        check_storable(clients)
        rounds_moments = self.moments is not None
        used_moments = clients.plan.training.experts.moments | clients.plan.training.router.moments
        if rounds_moments and not MOMENTS & used_moments:
            raise RecipeError("runtime.store: disk-bf16 rounds moments, but no optimizer here has any; allowed: disk")
        return OnDisk(clients.begin, clients.num_rows, self.moments, names=clients.names)

    def read(self, kind: Kind, request: DataRequest) -> RunData:
        """Return users whose data is stored in a cache file and read from there on access.

        A kind of data without a reader of single users is read into memory.

        Args:
            kind: Kind of the data: text, conversations or samples.
            request: The recipe, and any data that the program passes instead of files.

        Raises:
            ComingleError: See :meth:`comingle.training.kinds.base.Kind.read`.
        """
        reader = kind.reader(request)
        if reader is None:
            return super().read(kind, request)
        # ``totals`` are facts about all users that are stored with the cache, such as numbers of tokens.
        users, totals, skipped = read_cached(reader)
        return RunData(
            kind=kind,
            base=reader.base,
            users=users,
            common=reader.common(users, totals),
            unread=True,  # users' data is read on demand
            skipped=skipped,
            skipped_rows=totals.get("skipped_rows", 0),
        )

    def names(self, folder: Path) -> StoredNames | None:
        """Return the names of the users in a run folder; None if they are not stored there."""
        store = folder / FOLDER
        if not (store / NAMES).is_file():
            return None
        return StoredNames(store)


on_disk = DiskStore()
on_disk_bf16 = DiskStore(moments=torch.bfloat16)


def check_storable(clients: Users) -> None:
    """Check that a run can keep its users on disk, and has validation data if it selects the best round.

    Raises:
        RecipeError: The method trains one pooled model.
        DataError: The best round is selected and no user has validation data.
    """
    if clients.method.placement.pooled:
        raise RecipeError(f"method {clients.method.name}: trains a single model; allowed: runtime.store: memory")
    if clients.plan.evaluation.select == "best":
        # Counted when the users' data was cached on disk; None in a cache of an older version.
        num_users_with_validation = clients.users.about.get("valid")
        clients.require_validation(num_users_with_validation is None or num_users_with_validation > 0)
