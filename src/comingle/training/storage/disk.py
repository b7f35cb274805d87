"""Stores that keep the tensors of users in the run folder, for one or several processes.

``store/params.bin`` and ``store/moments.bin`` have a record of each user that took part
(:mod:`comingle.training.storage.files`); each process has files of its own. A user that never took part has no record:
its initial values follow from the seed and its name. A checkpoint stores a table with the places and CRC-32 of records.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
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
    Part,
    RecordFile,
    Shard,
    StoreThread,
    Table,
    align,
    batched,
    check_store,
    copy_fields,
    disk_errors,
    forms_of,
    parts_of,
    places_in_file,
    places_of,
    read_json,
    read_table,
    remove_files,
    require_files,
    write_table,
)
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import list_checkpoints, verify
from comingle.utils.records import to_disk, write_json

_COPIED_AT_ONCE = 256
"""Number of records that are copied at a time."""

PLACES_PER_FILE = 2**40
"""Number of places per file: place p of file k has number ``k * PLACES_PER_FILE + p``.

File 0 is the run's own; others are read-only or end with this process.
"""

MAX_PENDING_WRITES = 2
"""Largest number of cohorts with pending writes."""


class OnDisk(State):
    """State of users in record files.

    A row is one copy of a user's tensors. Most methods have one copy, so that each user has one row. A table has the
    place of each row's record, which is a position in one of the files.
    """

    in_memory = False

    def __init__(
        self,
        initial_state: Callable[[Sequence[int]], State],
        num_rows: int,
        moments: torch.dtype | None = None,
        names: Sequence[str] = (),
    ):
        """Start a store in which no row has a record yet; files are made at the first write.

        Args:
            initial_state: Function that returns the initial state of rows, which are given by number.
            num_rows: Number of users times number of copies of the tensors that the method keeps for each user.
            moments: Dtype of optimizer moments in records; None for their dtype in memory.
            names: Names of the users. If the names are in files (:class:`StoredNames`), these files are copied to the
                run folder. Other names are not used.
        """
        self._initial_state = initial_state
        self._num_rows = num_rows
        self._names = names
        first_row = initial_state([0])
        self._device = first_row.rows.device
        # Tensors without rows, which tell shapes and dtypes; this object has the same ones, as its rows are on disk.
        tensors_without_rows = {name: t[:0] for name, t in first_row.tensors().items()}
        self._template = first_row.filled(tensors_without_rows, best={})
        copy_fields(self, self._template)
        # A record's layout: name, shape and dtype of each tensor. Groups are "params" and, if used, "moments".
        self._layouts = forms_of(first_row, moments)
        self._groups = [group for group, layout in self._layouts.items() if layout.bytes]
        # The table has the place of each row's record, none so far, and the version of each row's last download.
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
        # The shard has the rows of this process: all, with process 0 of 1, until :meth:`shard` divides them.
        only_process = Part(number=0, count=1)
        self._shard = Shard(part=only_process, ids=np.arange(num_rows, dtype=np.int32), total_rows=num_rows)

    # ---------------------------------------------------------------- what State does

    def take(self, users: Sequence[int]) -> State:
        """Return a copy of the rows of some users."""
        return align(self._read_rows(list(users), self._groups), users)

    def put(self, users: Sequence[int], part: State) -> None:
        """Write the rows of some users back, asynchronously.

        A row gets a record of moments only once one of its moments is not zero. If ``part`` has no moments, those that
        are stored are kept.
        """
        rows, tensors = list(users), part.tensors()
        if self._prefetched is not None and not set(self._prefetched[0]).isdisjoint(rows):
            self._prefetched = None  # it has the old records
        self._table.versions[rows] = part.versions.cpu().numpy()
        self._write("params", rows, tensors)
        if "moments" in self._groups and part.first.shape[1] + part.second.shape[1]:
            has_record = torch.from_numpy(self._table.places["moments"][rows] >= 0)
            is_needed = has_record | (part.first != 0).any(1).cpu() | (part.second != 0).any(1).cpu()
            needed = is_needed.nonzero().flatten().tolist()
            moments = {name: tensors[name][needed] for name in ("first", "second")}
            if needed:  # none if all gradients were zero so far, as for a user whose samples have a single class
                self._write("moments", [rows[i] for i in needed], moments)

    @property
    def versions(self) -> Int[Tensor, " users"]:  # type: ignore[override] (a view of the table)
        """Server version that each user last downloaded, as the number of rounds done."""
        return torch.from_numpy(self._table.versions)

    def rows_of(self, users: Sequence[int]) -> Float[Tensor, "some columns"]:
        """Return the parameters of some users, without moments."""
        return self._read_rows(list(users), ["params"]).rows

    def prefetch(self, users: Sequence[int]) -> None:
        """Start to read the rows of some users."""
        rows = list(users)
        self._prefetched = (rows, {name: self._start_read(name, rows) for name in self._groups}) if rows else None

    def without_moments(self) -> State:
        """Return a view of this store that neither reads nor writes moments."""
        return _WithoutMoments(self)

    def copy(self, *, compact: bool = False) -> OnDisk:
        """Return a copy that reads the same files but writes its changes to temporary ones.

        Args:
            compact: Ignored; the tensors are not in memory.
        """
        other = object.__new__(type(self))  # the constructor would compute an initial state and start a thread
        vars(other).update(vars(self))
        other._table, other._prefetched = self._table.copy(), None
        other._write_numbers = {}  # no file to write to, so the first write makes a temporary one
        other._files = {name: list(files) for name, files in self._files.items()}
        return other

    def release(self) -> None:
        """Close the temporary files of a copy made by :meth:`copy`, after all pending writes."""
        self._wait_for_writes(most=0)  # until none is pending
        for name, number in self._write_numbers.items():  # a copy writes only to temporary files
            if (file := self._files[name][number]) is not None:
                file.close()

    # ---------------------------------------------------------------- rows

    def _read_rows(self, rows: list[int], groups: Sequence[str]) -> State:
        """Return the state of some rows: from their records, or for rows without a record their initial state.

        Args:
            rows: Numbers of the rows.
            groups: Groups of records to read: "params", and "moments" if the caller needs the moments of optimizers;
                otherwise moments have no columns.
        """
        prefetched: Mapping[str, Future[np.ndarray]] = {}
        if self._prefetched is not None and self._prefetched[0] == rows:
            prefetched, self._prefetched = self._prefetched[1], None
        reads = {name: prefetched.get(name) or self._start_read(name, rows) for name in groups}
        has_record = self._table.places["params"][rows] >= 0
        tensors = self._layouts["params"].unpack(self._result(reads["params"]))  # of rows with a record
        new_rows = [row for row, is_stored in zip(rows, has_record.tolist(), strict=True) if not is_stored]
        if new_rows:
            stored, initial = tensors, self._initial_state(new_rows).tensors()
            tensors = {name: t.new_empty(len(rows), *t.shape[1:]) for name, t in stored.items()}
            stored_places = torch.from_numpy(np.flatnonzero(has_record))
            new_places = torch.from_numpy(np.flatnonzero(~has_record))
            for name, t in tensors.items():
                t[stored_places], t[new_places] = stored[name], initial[name].to(t.device)
        tensors |= self._unpack_moments(rows, reads.get("moments"))
        return self._template.filled({name: t.to(self._device) for name, t in tensors.items()}, best={})

    def _unpack_moments(self, rows: list[int], read: Future[np.ndarray] | None) -> dict[str, Tensor]:
        """Return the moments of some rows, ``first`` and ``second``; zero for rows without a record.

        Args:
            rows: Numbers of the rows.
            read: Pending read of their records of moments. If None, the caller needs no moments, and the result has no
                columns.
        """
        templates = {"first": self.first, "second": self.second}  # of no rows, with the columns and the dtype
        if read is None:
            return {name: t.new_zeros(len(rows), 0) for name, t in templates.items()}
        moments = {name: t.new_zeros(len(rows), t.shape[1]) for name, t in templates.items()}
        stored = self._layouts["moments"].unpack(self._result(read))
        places = self._table.places["moments"][rows]  # -1 for rows without a record
        recorded = torch.from_numpy(np.flatnonzero(places >= 0))
        for name, t in stored.items():
            moments[name][recorded] = t.to(moments[name])
        return moments

    def _result(self, read: Future[np.ndarray]) -> np.ndarray:
        """Wait for records to be read and return them, ``(records, bytes)``.

        Raises:
            RunError: The disk fails, or a record is damaged.
        """
        try:
            with disk_errors(self._run):
                return read.result()
        except RunError:
            self._wait_for_writes(most=0)  # raises the error of an earlier write, if one failed
            raise

    def _start_read(self, group: str, rows: list[int], places: Sequence[int] | None = None) -> Future[np.ndarray]:
        """Start to read the records of rows, after all pending writes; rows without a record are left out.

        Args:
            group: Group of tensors to read, "params" or "moments"; each group has record files of its own.
            rows: Numbers of the rows in this process.
            places: Place of the record of each row, -1 for none; taken from the current table if None. Place p of file
                k has the number ``k * PLACES_PER_FILE + p``.

        Returns:
            A future of the records ``(records, bytes)``.
        """
        places_of_rows = self._table.places[group][rows].tolist() if places is None else places
        ids = self._shard.ids[rows].tolist()  # row numbers in the whole run, which records contain
        located = [(place, row_id) for place, row_id in zip(places_of_rows, ids, strict=True) if place >= 0]
        files, size_bytes = self._files[group], self._layouts[group].bytes

        def read() -> np.ndarray:
            """Read the records, file after file; runs in the store's thread."""
            records = np.empty((len(located), size_bytes), dtype=np.uint8)
            for file_number in {place // PLACES_PER_FILE for place, _ in located}:
                in_file = [i for i, (place, _) in enumerate(located) if place // PLACES_PER_FILE == file_number]
                file_places = [located[i][0] % PLACES_PER_FILE for i in in_file]
                ids_in_file = [located[i][1] for i in in_file]
                file = files[file_number]
                assert file is not None
                file.read(file_places, ids_in_file, into=[records[i] for i in in_file])
            return records

        return self._worker.submit(read)

    def _write(self, group: str, rows: list[int], tensors: Mapping[str, Tensor]) -> None:
        """Write the records of rows asynchronously, and enter their places in the table.

        Waits if too many writes are pending. In the table, place p of file k has the number
        ``k * PLACES_PER_FILE + p``.

        Args:
            group: Group of tensors to write, "params" or "moments"; each group has record files of its own.
            rows: Numbers of the rows in this process.
            tensors: Tensors of these rows ``(rows, *shape)`` by name; those of other groups are ignored.
        """
        file_number, file = self._file_to_write(group)
        table, new_places = self._table.places[group], []
        for row in rows:
            old_place = int(table[row])  # -1 without a record
            is_in_file = old_place >= 0 and old_place // PLACES_PER_FILE == file_number
            old_place_in_file = old_place % PLACES_PER_FILE if is_in_file else -1
            new_places.append(file.place_to_write(old_place_in_file))
        table[rows] = file_number * PLACES_PER_FILE + np.array(new_places, dtype=np.int64)
        records = self._layouts[group].pack(self._shard.ids[rows].tolist(), tensors)
        self._worker.write(file, new_places, records)
        self._wait_for_writes(MAX_PENDING_WRITES)

    def _wait_for_writes(self, most: int) -> None:
        """Wait until at most ``most`` cohorts have pending writes."""
        with disk_errors(self._run):
            self._worker.wait(most)

    def _file_to_write(self, group: str) -> tuple[int, RecordFile]:
        """Return the file that new records of a group go to, and its number in the table of places.

        A store with an open run folder writes to its file in that folder. A copy of a store, and a store without a run
        folder, write to a temporary file, which is made here.
        """
        files = self._files[group]
        if group not in self._write_numbers:
            with disk_errors(self._run):
                handle, name = tempfile.mkstemp(prefix="comingle-", suffix=".rows")
            with open(handle, "rb"):  # only to close this handle; RecordFile opens the file again
                files.append(RecordFile(Path(name), self._layouts[group].bytes, writes=True, lives=False))
            self._write_numbers[group] = len(files) - 1
        number = self._write_numbers[group]
        file = files[number]
        assert file is not None
        return number, file

    # ---------------------------------------------------------------- the best round

    def remember(self, done: int) -> None:
        """Store the current rows as those of the best round; their records are protected from being overwritten.

        Only the table of places is copied, no record. The records of the previous best round become free when the next
        checkpoint is saved. Without a run folder there are no checkpoints, and they become free at once.

        Args:
            done: Number of rounds that are done.
        """
        self._wait_for_writes(most=0)  # until none is pending
        self._best = self._table.copy()
        self.best = {"round": torch.tensor(done)}
        for name in self._groups:
            for number, file in enumerate(self._files[name]):
                if file is None:
                    continue
                is_written = self._write_numbers.get(name) == number  # other files are only read
                if self._run is None and is_written:  # no checkpoint refers to it: free all that is not in use
                    in_use = self._places_in_use(name)
                    file.keep([places_in_file(places, number, PLACES_PER_FILE) for places in in_use])
                else:
                    file.snapshot()

    def restored_best(self) -> State:
        """Return a store with the state after the best round, which reads the same files."""
        store = self.copy()
        assert self._best is not None
        store._table = self._best.copy()  # the places of the records of that round
        return store

    def _places_in_use(self, group: str) -> list[np.ndarray]:
        """Return the places of all rows in the current table and, if there is one, in that of the best round."""
        return [self._table.places[group], *([] if self._best is None else [self._best.places[group]])]

    # ---------------------------------------------------------------- the run folder

    def shard(self, number: int, processes: int, users: range, population: int) -> None:
        """Restrict the state to the rows of consecutive users, in one of several processes."""
        num_copies = self._num_rows // len(users)
        first_ids = np.arange(num_copies, dtype=np.int64) * population  # of each copy, in the whole run
        ids = (first_ids[:, None] + np.array(users, dtype=np.int64)).flatten().astype(np.int32)
        self._shard = Shard(part=Part(number, processes), ids=ids, total_rows=len(first_ids) * population)

    def open(self, run: Path, *, anew: bool) -> None:
        """Open the record files in ``store/`` of a run folder, to which rows are written from now on.

        The first process must call this before the others, as it makes the folder.

        Args:
            run: Run folder.
            anew: True for a new run: existing records are deleted, and the names of the users and a random identifier
                are written. False for a resumed run: the record files must exist.

        Raises:
            RunError: A record file is missing, or the disk cannot be written to.
        """
        folder, self._run, is_first = run / FOLDER, run, self._shard.part.number == 0
        if not anew:
            require_files(run, list_checkpoints(run)[-1], self._groups)
        with disk_errors(run):
            if anew and is_first:
                folder.mkdir(exist_ok=True)
                for path in folder.glob("*.bin"):
                    path.unlink()
                if isinstance(self._names, StoredNames):
                    self._names.copy_to(folder)
                write_json(folder / ABOUT, self._about | {"id": secrets.token_hex(8)})
            for name in self._groups:
                path = self._shard.part.records(run, name)
                own_file = RecordFile(path, self._layouts[name].bytes, writes=True)
                self._files[name][0] = own_file  # file 0 is this process's own; other files are only read
            to_disk(folder)  # the folder's entries, so that new files survive a power failure
        self._write_numbers = dict.fromkeys(self._groups, 0)  # new records go to file 0

    @property
    def _about(self) -> dict[str, Any]:
        """Description of the records of all processes, to compare with that of a checkpoint."""
        return {
            "rows": self._shard.total_rows,
            **{name: [f.description for f in self._layouts[name].fields] for name in self._groups},
        }

    def save(self, draft: Path, checkpoints: Sequence[Path], write: Callable[[], list[str]]) -> list[str]:
        """Write the records to disk, then a table of their places; return the names of the files in the checkpoint.

        Records stay in ``store/``; places that neither this nor an older checkpoint refers to become free.

        Args:
            draft: Folder of the new checkpoint.
            checkpoints: Folders of the older ones.
            write: Writes users that are in memory; not called, as these are on disk.
        """
        self._wait_for_writes(most=0)  # until none is pending
        assert self._run is not None
        own_part = self._shard.part
        # File 0 of each group is this process's own. When a checkpoint is written, it has the records of all its users.
        files = {name: file for name in self._groups if (file := self._files[name][0]) is not None}
        for file in files.values():
            self._worker.submit(file.to_disk).result()
        table_path = own_part.table(draft)
        best_round = int(self.best["round"]) if self.best else None
        crcs = {name: file.crcs for name, file in files.items()}
        write_table(table_path, self._shard.ids, self._table, self._best, best_round, crcs)
        written = [table_path.name]
        if own_part.number == 0:
            write_json(draft / ABOUT, read_json(self._run / FOLDER / ABOUT))
            remove_files(self._run, [*checkpoints, draft])
            written.append(ABOUT)
        older_tables = [read_table(own_part.table(path)) for path in checkpoints if own_part in parts_of(path)]
        for name, file in files.items():  # protect the places in use; the others become free
            used = (*self._places_in_use(name), *places_of(older_tables, name))
            file.keep([places_in_file(places, 0, PLACES_PER_FILE) for places in used])
        return written

    def load(self, checkpoint: Path, read: Callable[[], State]) -> OnDisk:
        """Restore this store, in place, from a checkpoint that any number of processes has written; return the store.

        It is returned because a state in memory, which has the same method, returns a new state. Only the tables of
        places are read; records are read when they are needed. New records go to places that no checkpoint uses.

        Args:
            checkpoint: Folder of the checkpoint.
            read: Reads tensors that are in memory; not called, as these are on disk.

        Raises:
            RunError: The store belongs to another recipe, run or round, or lacks records of the checkpoint.
        """
        run = checkpoint.parent.parent
        check_store(run, checkpoint, self._about, self._groups)
        # If the recipe selects the best round, `best` has the key "round" from the start of the run; else it is empty.
        has_best_round = bool(self.best)
        best_table, best_rounds = Table.without_records(self._groups, self._table.versions), set[int]()
        for part in parts_of(checkpoint):
            verify(checkpoint, part.table(checkpoint).name)
            columns = read_table(part.table(checkpoint))
            best_rounds |= set(columns[BEST_ROUND].tolist() if BEST_ROUND in columns else ())
            file_numbers = self._open_files(run, part)
            self._load_places(columns, "", self._table, file_numbers)  # columns of the current round have no prefix
            if has_best_round:
                self._load_places(columns, BEST, best_table, file_numbers)
        if has_best_round:
            best_round = best_rounds.pop()  # the only one: all processes wrote the same number
            # The tensors of the best round are in the records, so `best` has only its number.
            self._best, self.best = best_table, {"round": torch.tensor(best_round)}
        # Protect the places in file 0, this process's own, that this or another checkpoint uses; the others are free.
        own_part = self._shard.part
        checkpoints = [path for path in checkpoint.parent.glob("round-*") if own_part in parts_of(path)]
        for name in self._groups:
            if (own_file := self._files[name][0]) is not None:
                tables = [read_table(own_part.table(path)) for path in checkpoints]
                used = (*self._places_in_use(name), *places_of(tables, name))
                own_file.keep([places_in_file(places, 0, PLACES_PER_FILE) for places in used])
        if self._run is not None:
            self._copy_other_records()
        return self

    def _open_files(self, run: Path, part: Part) -> dict[str, int]:
        """Open the record files that a process of the checkpoint wrote, and return their numbers, by group.

        A file of this process itself has number 0, and may be open already. Files of other processes are only read.

        Args:
            run: Run folder.
            part: Process that wrote the files.
        """
        numbers: dict[str, int] = {}
        for name in self._groups:
            files = self._files[name]
            is_own = part == self._shard.part
            numbers[name] = 0 if is_own else len(files)
            if is_own and files[0] is not None:
                continue
            file = RecordFile(part.records(run, name), self._layouts[name].bytes, writes=False)
            if is_own:
                files[0] = file
            else:
                files.append(file)
        return numbers

    def _load_places(
        self, columns: dict[str, np.ndarray], prefix: str, into: Table, file_numbers: dict[str, int]
    ) -> None:
        """Copy versions and places of this process's rows from the table of a checkpoint.

        Also sets the checksums that records must have when they are read.

        Args:
            columns: Columns of the table; ``ROWS`` has the numbers of the rows in the whole run.
            prefix: Prefix of the columns: empty, or ``BEST`` for the best round.
            into: Table to update.
            file_numbers: Number of the file with the records, by group.
        """
        ids = columns.get(prefix + ROWS, np.zeros(0, dtype=np.int64))  # row numbers in the whole run
        is_here = np.isin(ids, self._shard.ids)
        if not is_here.any():
            return
        # Find the rows of this process by their numbers in the whole run, ``self._shard.ids``, by binary search.
        order = np.argsort(self._shard.ids)
        rows = order[np.searchsorted(self._shard.ids, ids[is_here], sorter=order)]  # numbers in this process
        into.versions[rows] = columns[prefix + VERSIONS][is_here]
        for name in self._groups:
            places = columns[prefix + name][is_here].astype(np.int64)
            has_record = places >= 0
            into.places[name][rows] = np.where(has_record, places + file_numbers[name] * PLACES_PER_FILE, -1)
            if (crcs := columns.get(prefix + SUMS + name)) is not None:  # tables of older versions have none
                file = self._files[name][file_numbers[name]]
                assert file is not None
                stored_ids = ids[is_here][has_record].astype(np.int64)
                file.expect(places[has_record], stored_ids, crcs[is_here][has_record].view(np.uint32))

    def _copy_other_records(self) -> None:
        """Copy records of this process's users from files of other processes to its own files, and update all tables.

        If a run is resumed with another number of processes, users may move to another process. Their records are then
        in a file that another process wrote.
        """
        for name in self._groups:
            # File 0 is this process's own; places from ``PLACES_PER_FILE`` on are in files of other processes.
            tables, file = self._places_in_use(name), self._files[name][0]
            assert file is not None
            # The rows to copy, by place. The current table and that of the best round may refer to the same record,
            # which is then copied once.
            row_at_place: dict[int, int] = {}
            for table in tables:
                row_at_place |= {int(table[row]): row for row in np.flatnonzero(table >= PLACES_PER_FILE).tolist()}
            new_places: dict[int, int] = {}
            for batch in batched(row_at_place.items(), _COPIED_AT_ONCE):
                old_places, rows = [place for place, _ in batch], [row for _, row in batch]
                records = self._start_read(name, rows, old_places).result()
                places = [file.place_to_write(-1) for _ in batch]  # -1: none of these rows is in this file yet
                self._worker.submit(file.write, places, records).result()
                new_places |= dict(zip(old_places, places, strict=True))
            for table in tables:
                for row in np.flatnonzero(table >= PLACES_PER_FILE).tolist():
                    table[row] = new_places[int(table[row])]
            del self._files[name][1:]  # no table refers to the other files any more


class _WithoutMoments(State):
    """View of a store that neither reads nor writes moments."""

    in_memory = False

    def __init__(self, store: OnDisk):
        copy_fields(self, replace(store._template, first=store.first[:, :0], second=store.second[:, :0]))
        self._store = store

    def take(self, users: Sequence[int]) -> State:
        """Return a copy of the rows of some users."""
        return align(self._store._read_rows(list(users), ["params"]), users)

    def put(self, users: Sequence[int], part: State) -> None:
        """Write the rows of some users back, asynchronously."""
        self._store.put(users, part)


class DiskStore(Store):
    """Store in a folder on disk; it is exact except for rounded moments."""

    def begin(self, clients: Users) -> OnDisk:
        """Return the state of all users before the first round; no record is written yet.

        Raises:
            RecipeError: The method trains one pooled model, or there are no moments to round.
            DataError: The best round is selected and no user has validation data.
        """
        check_storable(clients)
        used_moments = clients.plan.training.experts.moments | clients.plan.training.router.moments
        if self.moments is not None and not MOMENTS & used_moments:
            raise RecipeError("runtime.store: disk-bf16 rounds moments, but no optimizer here has any; allowed: disk")
        return OnDisk(clients.begin, clients.rows, self.moments, names=clients.names)

    def read(self, kind: Kind, request: DataRequest) -> RunData:
        """Return users whose data is stored in a cache file and read from there on access.

        All users are in memory for a kind of data without a reader.

        Raises:
            ComingleError: See :meth:`comingle.training.kinds.base.Kind.read`.
        """
        if (reader := kind.reader(request)) is None:
            return super().read(kind, request)
        users, about, skipped = read_cached(reader)
        return RunData(
            kind=kind,
            base=reader.base,
            users=users,
            common=reader.common(users, about),
            unread=True,
            skipped=skipped,
            skipped_rows=about.get("skipped_rows", 0),
        )

    def names(self, folder: Path) -> StoredNames | None:
        """Return the names of the users in a run folder; None if they are not stored there."""
        return StoredNames(folder / FOLDER) if (folder / FOLDER / NAMES).is_file() else None


on_disk = DiskStore()
on_disk_bf16 = DiskStore(moments=torch.bfloat16)


def check_storable(clients: Users) -> None:
    """Check that a run can keep its users on disk, and that the best round can be selected if the recipe wants that.

    Raises:
        RecipeError: The method trains one pooled model.
        DataError: The best round is selected and no user has validation data.
    """
    if clients.method.placement.pooled:
        raise RecipeError(f"method {clients.method.name}: trains a single model; allowed: runtime.store: memory")
    if clients.plan.evaluation.select == "best":
        # Users with validation data were counted when the users were stored; without a count, some are assumed.
        num_validating = clients.users.about.get("valid", 1)
        clients.require_validation(num_validating > 0)
