"""Files of fixed-size records, and tables with the number of each row's record.

``params`` has the parameters of a user and the tensors of its client hooks, ``moments`` the optimizer moments of users
who took steps. A record starts with its CRC-32 and the number of its row. Checkpoints store the CRC-32 too, because a
valid record may belong to another round or run.

Between two snapshots a record is overwritten only by the same row, and never while a kept checkpoint or the best round
refers to it. So the records of the last checkpoint are intact whenever a process is killed. A checkpoint that was
copied elsewhere may refer to records that have been overwritten since; the CRC-32 detects this.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt32
from safetensors.torch import load_file
from torch import Tensor

from comingle.training.checkpoints import write_tensors
from comingle.training.state import MOMENTS, State
from comingle.utils.errors import RunError
from comingle.utils.records import resume_command

P = ParamSpec("P")
T = TypeVar("T")

HEAD = 16
"""Size in bytes of the head of a record: the CRC-32 of the rest and the number of the row, 8 bytes each."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of a record.

    Attributes:
        name: Name of the tensor.
        shape: Shape, without users.
        dtype: Dtype in memory.
        stored_dtype: Dtype in the record, which may have fewer bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in bytes in a record."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.stored_dtype.itemsize

    @property
    def description(self) -> list[object]:
        """Name, shape and dtype for JSON."""
        return [self.name, list(self.shape), str(self.stored_dtype).removeprefix("torch.")]


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """Layout of a record: its CRC-32 (8 bytes), the number of its row (8 bytes), then the values of each tensor."""

    fields: tuple[Field, ...]

    @property
    def bytes(self) -> int:
        """Size of a record in bytes; 0 without fields."""
        size = sum(field.bytes for field in self.fields)
        return HEAD + size if size else 0

    def pack(self, rows: Sequence[int], tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Return users' tensors as the bytes of records ``(rows, bytes)``, without the CRC-32, which is added later.

        A record begins with 8 bytes for the CRC-32 and 8 for the number of its row.

        Args:
            rows: Number of the row of each record in the whole run.
            tensors: Tensors of the rows ``(rows, *shape)``, by name.
        """
        records = np.zeros((len(rows), self.bytes), dtype=np.uint8)
        # Bytes 0 to 7 are left for the CRC-32.
        records[:, 8:HEAD] = np.array(rows, dtype=np.int64).view(np.uint8).reshape(-1, 8)
        start = HEAD
        for field in self.fields:
            values = tensors[field.name].detach().to("cpu", field.stored_dtype).contiguous().view(len(rows), -1)
            records[:, start : start + field.bytes] = values.view(torch.uint8).numpy()
            start += field.bytes
        return records

    def unpack(self, records: np.ndarray) -> dict[str, Tensor]:
        """Return the tensors of records by name, ``(rows, *shape)``, in the dtypes that they have during training."""
        tensors: dict[str, Tensor] = {}
        start = HEAD
        for field in self.fields:
            # Values in a record are not aligned in memory, which may change the rounding of later products: copy them.
            values = torch.empty(len(records), *field.shape, dtype=field.stored_dtype)
            if len(records):
                stored = torch.from_numpy(records[:, start : start + field.bytes])
                values.view(len(records), -1).view(torch.uint8).copy_(stored)
            tensors[field.name] = values.to(field.dtype)
            start += field.bytes
        return tensors


UNKNOWN = 0
"""CRC-32 of records for which a checkpoint of an older version stores none."""


def write_crc(record: np.ndarray) -> int:
    """Write the CRC-32 of a record into its first 8 bytes and return it."""
    crc = zlib.crc32(record[8:].data)  # of all bytes after the CRC-32 itself
    record[:8] = np.array([crc], dtype=np.int64).view(np.uint8)
    return crc


def check_record(record: np.ndarray, row: int, expected_crc: int, path: object) -> None:
    """Check that a record, which was read from disk, is intact and is the expected one.

    A record begins with the CRC-32 of the rest and the number of its row, 8 bytes each.

    Args:
        record: The bytes of the record.
        row: Expected number of its row, counted in the whole run.
        expected_crc: Expected CRC-32, from a checkpoint; :data:`UNKNOWN` if an old checkpoint has none.
        path: File, for the error.

    Raises:
        RunError: The record is damaged, or belongs to another row, round or run.
    """
    stored_crc, stored_row = record[:HEAD].view(np.int64).tolist()
    actual_crc = zlib.crc32(record[8:].data)  # of all bytes after the CRC-32 itself
    if stored_crc != actual_crc:
        raise RunError(
            f"{path}: damaged, the record of row {row} has a wrong checksum; restore the file from a backup, or start "
            "a new run with another --out"
        )
    if stored_row != row or expected_crc not in (stored_crc, UNKNOWN):
        raise RunError(
            f"{path}: the record of row {row} belongs to another round or run than the checkpoint; restore the "
            "matching store, or start a new run with another --out"
        )


def record_layouts(sample: State, moments: torch.dtype | None) -> dict[str, RecordLayout]:
    """Return the layout of the records of each group: "moments" of optimizers, and "params" for all other tensors.

    Args:
        sample: State of any row, with the names, shapes and dtypes of the tensors.
        moments: Dtype of moments in records; None for their dtype in memory.
    """
    fields_by_group: dict[str, list[Field]] = {"params": [], "moments": []}
    for name, t in sample.tensors().items():
        is_moment = name in MOMENTS
        stored_dtype = moments if is_moment and moments is not None else t.dtype
        field = Field(name=name, shape=tuple(t.shape[1:]), dtype=t.dtype, stored_dtype=stored_dtype)
        group = "moments" if is_moment else "params"
        fields_by_group[group].append(field)
    return {group: RecordLayout(fields=tuple(group_fields)) for group, group_fields in fields_by_group.items()}


_CACHE_LINE = 64
"""Size in bytes of a cache line, to which torch aligns new tensors."""


def copy_fields(state: State, template: State) -> None:
    """Set all fields of a state to those of another one, the template.

    For subclasses of :class:`State` whose constructor does not call that of the class.
    """
    for field in fields(State):
        vars(state)[field.name] = getattr(template, field.name)


def align(state: State, rows: Sequence[int]) -> State:
    """Return a state whose tensors start at the same offset from a cache line as in a run with users in memory.

    The last bit of a matrix product may depend on this offset. With the same offset, runs with users on disk and in
    memory are equal.

    Args:
        state: State of some rows, without a best round.
        rows: Numbers of these rows.
    """
    first = rows[0]
    is_consecutive = list(rows) == list(range(first, first + len(rows)))
    if not is_consecutive:  # in memory, too, such rows are copied, and a copy starts at a cache line
        return state
    aligned = {name: _at_offset_of_row(t, first) for name, t in state.tensors().items()}
    return state.filled(aligned, best={})


def _at_offset_of_row(t: Tensor, row: int) -> Tensor:
    """Return users' rows at the offset from a cache line that they would have in a matrix of all users.

    The last bit of a matrix product may depend on this offset; so a run with users on disk equals one in memory. For
    example, row 3 of a matrix with rows of 40 bytes starts 120 bytes after a cache line, that is 56 bytes after the
    next one of 64 bytes.

    Args:
        t: The rows; copied only if they must be moved.
        row: Number of the first of them in the matrix.
    """
    row_bytes = t[0].numel() * t.element_size()
    bytes_after_cache_line = row * row_bytes % _CACHE_LINE
    entries_after_cache_line = bytes_after_cache_line // t.element_size()
    if entries_after_cache_line == 0 or t.device.type != "cpu":
        return t
    new_memory = t.new_empty(entries_after_cache_line + t.numel())  # starts at a cache line
    return new_memory[entries_after_cache_line:].view(t.shape).copy_(t)


FOLDER, ABOUT = "store", "store.json"
"""Folder of the records in a run folder, and the file that describes their layout."""

TABLE = "places"
"""Prefix of the names of tables in a checkpoint."""


@dataclass(frozen=True)
class Process:
    """Process ``number`` of ``count``, whose records are in files of its own, such as ``params-0-of-2.bin``."""

    number: int = 0
    count: int = 1

    @property
    def _suffix(self) -> str:
        """Suffix of the names of the process's files; empty for a single process."""
        return f"-{self.number}-of-{self.count}" if self.count > 1 else ""

    def records_path(self, run: Path, group: str) -> Path:
        """Return the path of the file in which the process stores a group of users' tensors.

        Args:
            run: Run folder.
            group: "params", or "moments" of optimizers.
        """
        return run / FOLDER / f"{group}{self._suffix}.bin"

    def table_path(self, checkpoint: Path) -> Path:
        """Return the path of the process's table in a checkpoint: it says in which record each user's tensors are."""
        return checkpoint / f"{TABLE}{self._suffix}.safetensors"


def processes_of(checkpoint: Path) -> list[Process]:
    """Return the processes of the run that wrote a checkpoint, from the names of its files.

    With ``runtime.store: disk`` each process writes a file such as ``places-0-of-4.safetensors``, a table of the
    records that have its users' tensors. The list is empty if users are stored in memory.
    """
    suffixes = sorted(path.stem.removeprefix(TABLE) for path in checkpoint.glob(f"{TABLE}*.safetensors"))
    counts: set[int] = set()  # a complete checkpoint has one number of processes
    for suffix in suffixes:  # "-0-of-4", or empty for a single process
        _before, _separator, count = suffix.rpartition("-")
        counts.add(int(count) if suffix else 1)
    return [Process(number, count) for count in counts for number in range(count)]


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a file.

    Raises:
        RunError: The file cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); restore it, or start a new run with another --out") from None


@contextmanager
def disk_errors(run: Path | None) -> Iterator[None]:
    """Convert disk errors in the block to a run error.

    Args:
        run: Run folder; None for a store without one, whose files are temporary.

    Raises:
        RunError: The disk cannot be written to; says how to resume the run.
    """
    try:
        yield
    except OSError as error:
        problem = f"cannot be written to: {error.strerror or error}"
        if run is None:
            path = Path(error.filename or Path(tempfile.gettempdir()) / FOLDER)
            raise RunError(f"{path.parent}: {problem}") from None
        path = Path(error.filename or run / FOLDER)
        is_in_run_folder = run in path.parents
        where = run / FOLDER if is_in_run_folder else path.parent  # of a temporary file
        raise RunError(f"{where}: {problem}; once this is fixed, {resume_command(run)} resumes the run") from None


def require_files(run: Path, checkpoint: Path, groups: Sequence[str]) -> None:
    """Check that all record files of a checkpoint exist.

    Args:
        run: Run folder.
        checkpoint: Folder of the checkpoint.
        groups: Groups of tensors that have record files of their own: "params" and, if stored, "moments".

    Raises:
        RunError: A file is missing.
    """
    paths = [run / FOLDER / ABOUT]
    for process in processes_of(checkpoint):
        paths += [process.records_path(run, group) for group in groups]
    for path in paths:
        if not path.is_file():
            raise RunError(f"{path}: no such file; restore it, or start a new run with another --out")


def check_store(run: Path, checkpoint: Path, description: Mapping[str, object], groups: Sequence[str]) -> None:
    """Check that a checkpoint and the store belong to one run and to this recipe.

    Args:
        run: Run folder.
        checkpoint: Folder of the checkpoint.
        description: Number of rows, and names, shapes and dtypes of the tensors in a record, as this recipe has them.
        groups: Groups of tensors that have record files of their own: "params" and, if stored, "moments".

    Raises:
        RunError: Checkpoint and store belong to different runs or to another recipe, or a file is missing.
    """
    description_in_checkpoint = read_json(checkpoint / ABOUT)  # has also an "id" of the run
    without_id = {key: value for key, value in description_in_checkpoint.items() if key != "id"}
    if without_id != description:
        raise RunError(
            f"{checkpoint}: user records were written with another recipe, runtime.store or runtime.dtype; use another "
            "--out"
        )
    require_files(run, checkpoint, groups)
    if read_json(run / FOLDER / ABOUT) != description_in_checkpoint:
        raise RunError(f"{run / FOLDER}: belongs to another run than {checkpoint.name}; restore the matching store")


def remove_files(run: Path, checkpoints: Sequence[Path]) -> None:
    """Delete record files that were written with a number of processes that no checkpoint has.

    For example, "params-0-of-2.bin" if all checkpoints were written by 4 processes.

    Args:
        run: Run folder.
        checkpoints: Folders of all checkpoints, and of the draft of a new one.
    """
    counts_in_use = {process.count for checkpoint in checkpoints for process in processes_of(checkpoint)}
    for path in (run / FOLDER).glob("*.bin"):
        _group_and_number, separator, count = path.stem.rpartition("-of-")  # "params-0", "-of-", "2"
        num_processes = int(count) if separator else 1  # a single process writes "params.bin"
        if num_processes not in counts_in_use:
            path.unlink()


MAX_RECORDS_VERIFIED_AT_LOAD = 1024
"""Largest number of records that are verified when a checkpoint is loaded; all are when they are read."""


class RecordFile:
    """File of fixed-size records: record p starts at byte ``p * size_bytes``.

    Args:
        path: Path of the file.
        size_bytes: Size of a record.
        writable: Whether to open the file for writing, too.
        temporary: Whether the file ends with this process.
    """

    def __init__(self, path: Path, size_bytes: int, *, writable: bool, temporary: bool = False):
        """Open the file.

        Args:
            path: Path of the file; made if it is missing and ``writable``.
            size_bytes: Size of a record.
            writable: Whether to open the file for writing, too.
            temporary: Whether the file is deleted when it is closed or the process ends.
        """
        self.path, self.size_bytes = path, size_bytes
        access = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        no_symbolic_link = getattr(os, "O_NOFOLLOW", 0)  # not all systems have it
        self._handle = os.open(path, access | no_symbolic_link, 0o600)
        if temporary:
            os.unlink(path)  # the open file stays usable, and its space is freed when it is closed
        self.end = 0
        """Number of records that the file has room for; the next new record gets this number."""
        self.num_snapshots = 0
        """Number of snapshots (checkpoints and best rounds), which refer to records by number."""
        self._first_written = np.zeros(0, dtype=np.int64)
        """For each record, number of the first snapshot, counted from 1, that can refer to it."""
        self._crcs = np.zeros(0, dtype=np.uint32)
        """CRC-32 of each record; accessed by the store thread, and by others only while it is idle."""
        self._free: deque[int] = deque()
        """Numbers of records that no table refers to, which may be overwritten."""

    # ---------------------------------------------------------------- which records may be overwritten

    def record_to_write(self, current: int) -> int:
        """Return the number of the record to write a user's tensors to: its current one, or a free or new one.

        A snapshot (a checkpoint or the best round) refers to records by number. So the current record may only be
        overwritten if it was written after the last snapshot.

        Args:
            current: Number of the user's current record in this file; -1 for none.
        """
        next_snapshot = self.num_snapshots + 1
        # ``_first_written[p]`` is the number of the first snapshot that can refer to record p.
        is_newer_than_snapshots = current >= 0 and self._first_written[current] == next_snapshot
        if is_newer_than_snapshots:
            return current
        record_number = self._free.popleft() if self._free else self.end
        self.end = max(self.end, record_number + 1)
        self._first_written = _grown(self._first_written, record_number + 1)
        self._first_written[record_number] = next_snapshot
        return record_number

    def free_all_except(self, used: Sequence[Int64[np.ndarray, " _"]]) -> None:
        """Mark all records as free to be overwritten except those in use, which are protected from it.

        Args:
            used: Numbers of the records that the current state, the best round or a checkpoint refers to, as one array
                for each; a number may be in several.
        """
        for record_numbers in used:
            last_number = int(record_numbers.max(initial=-1))
            self.end = max(self.end, last_number + 1)  # a file that was opened again does not know its records yet
        is_used = np.zeros(self.end, dtype=bool)
        for record_numbers in used:
            is_used[record_numbers] = True
        self._first_written = _grown(self._first_written, self.end)
        self._free = deque(np.flatnonzero(~is_used).tolist())
        self.protect_records()

    def protect_records(self) -> None:
        """Protect all current records from being overwritten until :meth:`free_all_except` frees them."""
        self.num_snapshots += 1  # :meth:`record_to_write` rewrites only records that are newer than all snapshots

    # ---------------------------------------------------------------- checksums

    def crcs(self, record_numbers: Int64[np.ndarray, " some"]) -> UInt32[np.ndarray, " some"]:
        """Return the CRC-32 of some records.

        Args:
            record_numbers: Numbers of the records in the file; -1, for no record, gives 0 (:data:`UNKNOWN`).
        """
        last_number = int(record_numbers.max(initial=-1))
        self._crcs = _grown(self._crcs, last_number + 1)
        crcs = np.full(len(record_numbers), UNKNOWN, dtype=np.uint32)
        has_record = record_numbers >= 0
        crcs[has_record] = self._crcs[record_numbers[has_record]]
        return crcs

    def expect(
        self,
        record_numbers: Int64[np.ndarray, " some"],
        rows: Int64[np.ndarray, " some"],
        crcs: UInt32[np.ndarray, " some"],
    ) -> None:
        """Set the CRC-32 that records must have when they are read, as a checkpoint says; called to resume a run.

        At most 1024 records are verified now, so that a store of another run is found early.

        Args:
            record_numbers: Numbers of the records in the file.
            rows: Number of the row in the whole run that each record must contain.
            crcs: Their CRC-32, from a checkpoint; :data:`UNKNOWN` if an old checkpoint has none.

        Raises:
            RunError: A record has another CRC-32 or belongs to another row.
        """
        last_number = int(record_numbers.max(initial=-1))
        self._crcs = _grown(self._crcs, last_number + 1)
        self._crcs[record_numbers] = crcs
        stride = max(1, math.ceil(len(record_numbers) / MAX_RECORDS_VERIFIED_AT_LOAD))  # verify every stride-th record
        for index in range(0, len(record_numbers), stride):
            record_number, row, expected_crc = int(record_numbers[index]), int(rows[index]), int(crcs[index])
            first_bytes = os.pread(self._handle, 8, record_number * self.size_bytes)  # a record begins with its CRC-32
            stored_crc = int.from_bytes(first_bytes, sys.byteorder)
            if expected_crc not in (stored_crc, UNKNOWN):
                buffer = np.empty(self.size_bytes, dtype=np.uint8)
                self.read([record_number], [row], [buffer])  # raises an error that says what is wrong

    # ---------------------------------------------------------------- bytes

    def write(self, record_numbers: Sequence[int], records: np.ndarray) -> None:
        """Write records into the file, each with its CRC-32 in front.

        Args:
            record_numbers: Numbers that the records get in the file.
            records: The records ``(records, bytes)``.

        Raises:
            OSError: The disk cannot be written to.
        """
        self._crcs = _grown(self._crcs, max(record_numbers, default=-1) + 1)
        try:
            for record_number, record in zip(record_numbers, records, strict=True):
                self._crcs[record_number] = write_crc(record)
                content = record.data
                start = record_number * self.size_bytes
                written_bytes = 0
                while written_bytes < self.size_bytes:  # a call may write only a part
                    written_bytes += os.pwrite(self._handle, content[written_bytes:], start + written_bytes)
        except OSError as error:
            error.filename = str(self.path)  # a write to an open handle names no file; the message needs the name
            raise

    def read(self, record_numbers: Sequence[int], rows: Sequence[int], into: Sequence[np.ndarray]) -> None:
        """Read records and check that they are intact and those of the expected rows.

        Args:
            record_numbers: Numbers of the records in the file.
            rows: For each record, the number of the row that it must contain, counted in the whole run.
            into: For each record, a buffer of ``self.size_bytes`` bytes to read it into.

        Raises:
            RunError: A record is damaged or not the expected one.
        """
        self._crcs = _grown(self._crcs, max(record_numbers, default=-1) + 1)
        for record_number, row, record in zip(record_numbers, rows, into, strict=True):
            num_read_bytes = os.preadv(self._handle, [record.data], record_number * self.size_bytes)
            record[num_read_bytes:] = 0  # a truncated file leaves uninitialised memory
            check_record(record, row, int(self._crcs[record_number]), self.path)

    def to_disk(self) -> None:
        """Flush all records to disk, so that they survive a power failure."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


class StoreThread:
    """Thread that reads and writes records in order, and its pending writes."""

    def __init__(self) -> None:
        """Make the thread, which starts with the first submitted call."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="comingle-store")
        self._pending: deque[Future[None]] = deque()

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in the thread, after all calls that were submitted before; return a future of its result."""
        return self._pool.submit(work, *args, **kwargs)

    def write(self, file: RecordFile, record_numbers: Sequence[int], records: np.ndarray) -> None:
        """Let the thread write users' tensors to a file, after all reads and writes that were submitted before.

        Args:
            file: File to write to.
            record_numbers: Numbers that the records get in the file.
            records: The records ``(records, bytes)``.
        """
        self._pending.append(self.submit(file.write, record_numbers, records))

    def wait(self, most: int) -> None:
        """Wait until at most ``most`` writes are pending.

        Raises:
            OSError: The disk cannot be written to.
        """
        while len(self._pending) > most:
            self._pending.popleft().result()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows of one process.

    Args:
        process: The process.
        ids: Number of each row among those of all processes.
        total_rows: Number of rows of all processes.
    """

    process: Process
    ids: Int[np.ndarray, " rows"]
    total_rows: int


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    """Return the array with at least ``size`` entries; new ones are zero."""
    num_missing = size - len(array)
    if num_missing <= 0:
        return array
    num_added = max(1024, len(array), num_missing)  # doubles at least, so that appending one by one stays linear
    return np.concatenate([array, np.zeros(num_added, array.dtype)])


ROWS, VERSIONS, SUMS = "rows", "versions", "sums/"
"""Names of columns of a table besides record numbers, which have the name of their group; ``SUMS`` is a prefix."""

BEST, BEST_ROUND = "best/", "best/round"
"""Prefix of the columns of the best round, and the column with its number."""

CrcsOf = Mapping[str, Callable[[Int64[np.ndarray, " some"]], UInt32[np.ndarray, " some"]]]
"""Maps each group to a function that returns the CRC-32 of records, given their numbers."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Table of where the record of each row is.

    Attributes:
        record_numbers: Number of the record of each row, by group ("params", "moments"): record p of file k has the
            number ``k * RECORDS_PER_FILE + p``, which is p in the file of this process; -1 stands for no record.
        versions: Server version that each row last downloaded.
    """

    record_numbers: dict[str, Int64[np.ndarray, " rows"]]
    versions: Int[np.ndarray, " rows"]

    def copy(self) -> Table:
        """Return a deep copy."""
        record_numbers = {group: numbers_of_group.copy() for group, numbers_of_group in self.record_numbers.items()}
        return Table(record_numbers=record_numbers, versions=self.versions.copy())

    @classmethod
    def without_records(cls, groups: Iterable[str], versions: Int[np.ndarray, " rows"]) -> Table:
        """Return the table of a new run, in which no user has tensors on disk yet.

        Args:
            groups: Groups of a user's tensors that are stored together: the model, and optimiser moments.
            versions: Version of the server's model that each user last downloaded.
        """
        record_numbers = {group: np.full(len(versions), -1, dtype=np.int64) for group in groups}
        return cls(record_numbers=record_numbers, versions=versions.copy())


def write_table(
    path: Path,
    ids: Int[np.ndarray, " rows"],
    now: Table,
    *,
    best: Table | None,
    best_round: int | None,
    crcs: CrcsOf,
) -> None:
    """Write the table of a checkpoint: in which record of a file the tensors of each user are.

    A row of the table is one copy of a user's tensors. Rows without a record are left out: they were never trained, so
    their initial values follow from the seed.

    Args:
        path: Path of the table.
        ids: Number of each row in the whole run, as this process may have only some of them.
        now: Current table.
        best: Table of the best round; None without one.
        best_round: Number of the best round; None without one.
        crcs: For each group, a function that returns the CRC-32 of records, given their numbers.
    """
    columns = _columns(ids, now, crcs)
    if best is not None:
        for name, column in _columns(ids, best, crcs).items():
            columns[BEST + name] = column
        columns[BEST_ROUND] = torch.tensor([best_round])
    write_tensors(path, columns)


def _columns(ids: np.ndarray, table: Table, crcs: CrcsOf) -> dict[str, torch.Tensor]:
    """Return the table that a checkpoint stores: where each user's tensors are in the record files, as columns by name.

    Each column has one entry for each row (a copy of a user's tensors) that has a record. Users who have never taken
    part have none.

    Columns are ``"params"`` and ``"moments"`` (record numbers), ``"sums/params"`` and ``"sums/moments"`` (CRC-32),
    ``"rows"`` (numbers of the rows) and ``"versions"`` (server version that a row last downloaded).

    Args:
        ids: Number of each row among those of all processes.
        table: The table.
        crcs: For each group, a function that returns the CRC-32 of records, given their numbers.
    """
    has_record = table.record_numbers["params"] >= 0  # a row without a record in "params" has none in "moments"
    rows = np.flatnonzero(has_record)
    columns: dict[str, torch.Tensor] = {}
    for group, record_numbers in table.record_numbers.items():
        columns[group] = torch.from_numpy(record_numbers[rows]).int()
    for group, record_numbers in table.record_numbers.items():
        crcs_of_rows = crcs[group](record_numbers[rows])
        columns[SUMS + group] = torch.from_numpy(crcs_of_rows.view(np.int32))  # the file format has no uint32
    columns[ROWS] = torch.from_numpy(ids[rows]).int()
    columns[VERSIONS] = torch.from_numpy(table.versions[rows])
    return columns


def read_table(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a table that :func:`write_table` has written in a checkpoint, by name."""
    return {name: t.numpy() for name, t in load_file(path).items()}


def record_numbers_in_tables(tables: Sequence[dict[str, np.ndarray]], group: str) -> list[np.ndarray]:
    """Return the numbers of the records of a group that tables of checkpoints refer to, as one array per column.

    Args:
        tables: Columns of each table. A table has a column for the current round and may have one for the best round.
        group: Group of tensors, "params" or "moments".
    """
    columns = []
    for table in tables:
        for name in (group, BEST + group):
            if name in table:
                columns.append(table[name].astype(np.int64))
    return columns


def record_numbers_in_file(
    record_numbers: Int64[np.ndarray, " rows"], file_number: int, size: int
) -> Int64[np.ndarray, " some"]:
    """Return the numbers of those records that are in one file, counted from the start of this file.

    Args:
        record_numbers: Numbers of records: ``k * size + p`` for record p of file k; -1 for rows without a record.
        file_number: Number of the file.
        size: Step between the numbers of two files, larger than any file.
    """
    stored_numbers = record_numbers[record_numbers >= 0]
    is_in_file = stored_numbers // size == file_number
    return stored_numbers[is_in_file] % size


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most ``size`` items."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
