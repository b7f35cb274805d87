"""Files of fixed-size records, and tables of where each record is.

``params`` has all that a user's model and its method's parts are made of, ``moments`` what optimisers remember, which
only those have who took steps. A record begins with its CRC-32 and the number of its row. Checkpoints keep that sum
too: a record that is whole may be of another round, or of another run.

A place is never written twice between two snapshots unless by the same row, and not at all while a checkpoint that is
kept, or the best round, refers to it: so whatever a process is doing when it is killed, what the last checkpoint says
is there. What others say that were put aside need not be: sums tell.
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
"""Bytes of a record's head: the CRC-32 of what follows it, and the number of the row, 8 bytes each."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of a user: its shape without the users, its dtype, and how it is written down."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes in a record."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.kept.itemsize

    @property
    def description(self) -> list[object]:
        """As JSON has it."""
        return [self.name, list(self.shape), str(self.kept).removeprefix("torch.")]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a record of a group has."""

    fields: tuple[Field, ...]

    @property
    def bytes(self) -> int:
        """Bytes of a record; 0 where there is nothing to keep."""
        size = sum(one.bytes for one in self.fields)
        return HEAD + size if size else 0

    def pack(self, rows: Sequence[int], tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Records ``(rows, bytes)``."""
        records = np.zeros((len(rows), self.bytes), dtype=np.uint8)
        at = HEAD
        for one in self.fields:
            whole = tensors[one.name].detach().to("cpu", one.kept).contiguous().view(len(rows), -1)
            records[:, at : at + one.bytes] = whole.view(torch.uint8).numpy()
            at += one.bytes
        records[:, 8:HEAD] = np.array(rows, dtype=np.int64).view(np.uint8).reshape(-1, 8)
        return records

    def unpack(self, records: np.ndarray) -> dict[str, Tensor]:
        """Tensors by name, ``(rows, *shape)``."""
        found, at = {}, HEAD
        for one in self.fields:
            # Made by torch, so that it is aligned alike wherever it comes from: roundings may depend on that.
            whole = torch.empty(len(records), *one.shape, dtype=one.kept)
            if len(records):
                part = torch.from_numpy(records[:, at : at + one.bytes])
                whole.view(len(records), -1).view(torch.uint8).copy_(part)
            found[one.name] = whole.to(one.dtype)
            at += one.bytes
        return found


UNKNOWN = 0
"""The sum of a record of which none was kept, as versions of before did not."""


def seal(record: np.ndarray) -> int:
    """Write the sum of a record into its head; returns it."""
    found = zlib.crc32(record[8:].data)
    record[:8] = np.array([found], dtype=np.int64).view(np.uint8)
    return found


def check(record: np.ndarray, row: int, known: int, path: object) -> None:
    """Whether a record is what was written, of this row, and that of which this sum is known.

    Raises:
        RunError: it is not.
    """
    crc, owner = record[:HEAD].view(np.int64).tolist()
    if crc != zlib.crc32(record[8:].data):
        raise RunError(
            f"{path}: damaged, the record of row {row} is not what was written; restore the file from a copy, or begin "
            "anew with another --out"
        )
    if owner != row or known not in (crc, UNKNOWN):
        raise RunError(
            f"{path}: the record of row {row} is of another round or run than the checkpoint; restore the store that "
            "belongs to it, or begin anew with another --out"
        )


def forms_of(sample: State, moments: torch.dtype | None) -> dict[str, Form]:
    """What the groups have, out of the state of some users; ``moments`` in another dtype if one is given."""
    groups: dict[str, list[Field]] = {"params": [], "moments": []}
    for name, t in sample.tensors().items():
        group = "moments" if name in MOMENTS else "params"
        kept = moments if group == "moments" and moments is not None else t.dtype
        groups[group].append(Field(name=name, shape=tuple(t.shape[1:]), dtype=t.dtype, kept=kept))
    return {name: Form(fields=tuple(fields)) for name, fields in groups.items()}


_LINE = 64
"""Bytes that processors read at once, to which new tensors are aligned."""


def copy_fields(state: State, nobody: State) -> None:
    """Give a state that is elsewhere the fields of one of nobody, which say of what shape and dtype it is."""
    vars(state).update({one.name: getattr(nobody, one.name) for one in fields(State)})


def align(part: State, users: Sequence[int]) -> State:
    """The same where each tensor begins as it would in memory, among everybody's.

    There the rows of consecutive users are a view of all, and the last bit of a product may depend on whether its
    factors begin at a multiple of 64 bytes.
    """
    first = users[0]
    if list(users) != list(range(first, first + len(users))):
        return part
    return part.filled({name: _shifted(t, first) for name, t in part.tensors().items()}, {})


def _shifted(t: Tensor, row: int) -> Tensor:
    shift = row * t[0].numel() * t.element_size() % _LINE // t.element_size()
    if not shift or t.device.type != "cpu":
        return t
    return t.new_empty(shift + t.numel())[shift:].view(t.shape).copy_(t)


FOLDER, ABOUT = "store", "store.json"


TABLE = "places"
"""So begin the names of a checkpoint's tables of where records are."""


@dataclass(frozen=True)
class Part:
    """The users of process ``number`` of ``count``: whose records are in files of their own."""

    number: int = 0
    count: int = 1

    @property
    def _suffix(self) -> str:
        return f"-{self.number}-of-{self.count}" if self.count > 1 else ""

    def records(self, run: Path, group: str) -> Path:
        """The file of a group's records."""
        return run / FOLDER / f"{group}{self._suffix}.bin"

    def table(self, checkpoint: Path) -> Path:
        """A checkpoint's table of their places."""
        return checkpoint / f"{TABLE}{self._suffix}.safetensors"


def parts_of(checkpoint: Path) -> list[Part]:
    """Whose tables a checkpoint has; those of none where it has no store."""
    found = sorted(path.stem.removeprefix(TABLE) for path in checkpoint.glob(f"{TABLE}*.safetensors"))
    counts = {int(name.rpartition("-")[2]) if name else 1 for name in found}
    return [Part(number, count) for count in counts for number in range(count)]


def read_json(path: Path) -> dict[str, object]:
    """A mapping.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); restore it, or begin anew with another --out") from None


@contextmanager
def disk_errors(run: Path | None) -> Iterator[None]:
    """Within, the disk may take no more.

    Raises:
        RunError: it does not; says how the run goes on.
    """
    try:
        yield
    except OSError as error:
        path = Path(error.filename or (run or Path(tempfile.gettempdir())) / FOLDER)
        where = path.parent if run is None or run not in path.parents else run / FOLDER
        goes_on = "" if run is None else f"; once it can be, {resume_command(run)} goes on"
        raise RunError(f"{where}: cannot be written to: {error.strerror or error}{goes_on}") from None


def require_files(run: Path, checkpoint: Path, groups: Sequence[str]) -> None:
    """Whether everything is there that a checkpoint names.

    Raises:
        RunError: it is not.
    """
    parts = [part.records(run, group) for part in parts_of(checkpoint) for group in groups]
    for path in (run / FOLDER / ABOUT, *parts):
        if not path.is_file():
            raise RunError(f"{path}: no such file; restore it, or begin anew with another --out")


def check_store(run: Path, checkpoint: Path, about: Mapping[str, object], groups: Sequence[str]) -> None:
    """Whether a checkpoint and the store beside it are of one run, and of a recipe whose store is ``about`` this.

    Raises:
        RunError: they are not, or something is missing.
    """
    kept = read_json(checkpoint / ABOUT)
    if {key: value for key, value in kept.items() if key != "id"} != about:
        raise RunError(
            f"{checkpoint}: its users' records are of another recipe, runtime.store or runtime.dtype; use another --out"
        )
    require_files(run, checkpoint, groups)
    if read_json(run / FOLDER / ABOUT) != kept:
        raise RunError(f"{run / FOLDER}: of another run than {checkpoint.name}; restore the one that belongs to it")


def remove_files(run: Path, checkpoints: Sequence[Path]) -> None:
    """Delete records that none of these checkpoints names, as of as many processes as there are no more."""
    counts = {part.count for checkpoint in checkpoints for part in parts_of(checkpoint)}
    for path in (run / FOLDER).glob("*.bin"):
        count = path.stem.rpartition("-of-")[2] if "-of-" in path.stem else "1"
        if int(count) not in counts:
            path.unlink()


MAX_CHECKED_HEADS = 1024
"""Up to so many records are looked at when a checkpoint is loaded; the others when they are read."""


class RecordFile:
    """Records ``size_bytes`` long; ``path`` may be of a file that no folder has any more."""

    def __init__(self, path: Path, size_bytes: int, *, writes: bool, lives: bool = True):
        self.path, self.size_bytes = path, size_bytes
        flags = (os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY) | getattr(os, "O_NOFOLLOW", 0)
        self._handle = os.open(path, flags, 0o600)
        if not lives:
            os.unlink(path)
        self.end = 0
        self.since = 0
        """Which snapshot was the last; places that were first written after it may be written again."""
        self._born = np.zeros(0, dtype=np.int64)
        self._sums = np.zeros(0, dtype=np.uint32)
        """Of the records by place; touched by the thread that reads and writes, by others while it does neither."""
        self._free: deque[int] = deque()

    # ---------------------------------------------------------------- places

    def place(self, before: int) -> int:
        """Where a row is to be written that was at ``before``, -1 for nowhere."""
        if before >= 0 and self._born[before] > self.since:
            return before
        at = self._free.popleft() if self._free else self.end
        self.end = max(self.end, at + 1)
        self._born = _grown(self._born, at + 1)
        self._born[at] = self.since + 1
        return at

    def keep(self, used: Sequence[Int64[np.ndarray, " _"]]) -> None:
        """Only these places are referred to, and not written over from now on."""
        self.end = max(self.end, *(int(places.max(initial=-1)) + 1 for places in used))
        taken = np.zeros(self.end, dtype=bool)
        for places in used:
            taken[places] = True
        self._born, self._free = _grown(self._born, self.end), deque(np.flatnonzero(~taken).tolist())
        self.snapshot()

    def snapshot(self) -> None:
        """What is there now is not written over before :meth:`keep` is told that nobody refers to it."""
        self.since += 1

    # ---------------------------------------------------------------- sums

    def sums(self, places: Int64[np.ndarray, " some"]) -> UInt32[np.ndarray, " some"]:
        """Of the records at these places, -1 for nowhere."""
        self._sums = _grown(self._sums, int(places.max(initial=-1)) + 1)
        found, there = np.full(len(places), UNKNOWN, dtype=np.uint32), places >= 0
        found[there] = self._sums[places[there]]
        return found

    def expect(
        self, places: Int64[np.ndarray, " some"], rows: Int64[np.ndarray, " some"], sums: UInt32[np.ndarray, " some"]
    ) -> None:
        """Records of these rows are to have these sums, says a checkpoint; the heads of some are looked at now.

        Raises:
            RunError: one of them is another.
        """
        self._sums = _grown(self._sums, int(places.max(initial=-1)) + 1)
        self._sums[places] = sums
        some = slice(None, None, max(1, math.ceil(len(places) / MAX_CHECKED_HEADS)))
        for at, row, known in zip(places[some].tolist(), rows[some].tolist(), sums[some].tolist(), strict=True):
            head = os.pread(self._handle, 8, at * self.size_bytes)
            if known not in (int.from_bytes(head, sys.byteorder), UNKNOWN):
                self.read([at], [row], [np.empty(self.size_bytes, dtype=np.uint8)])  # says what is wrong

    # ---------------------------------------------------------------- bytes

    def write(self, places: Sequence[int], records: np.ndarray) -> None:
        """Records to places.

        Raises:
            OSError: the disk does not take it.
        """
        self._sums = _grown(self._sums, max(places, default=-1) + 1)
        try:
            for at, record in zip(places, records, strict=True):
                self._sums[at] = seal(record)
                content, done = record.data, 0
                while done < self.size_bytes:
                    done += os.pwrite(self._handle, content[done:], at * self.size_bytes + done)
        except OSError as error:
            error.filename = str(self.path)  # it need not be the run's
            raise

    def read(self, places: Sequence[int], rows: Sequence[int], into: Sequence[np.ndarray]) -> None:
        """Records of these rows.

        Raises:
            RunError: one is not what was written, or another than is expected.
        """
        self._sums = _grown(self._sums, max(places, default=-1) + 1)
        for at, row, record in zip(places, rows, into, strict=True):
            got = os.preadv(self._handle, [record.data], at * self.size_bytes)
            record[got:] = 0  # of a file that was cut off, else what happened to be in memory
            check(record, row, int(self._sums[at]), self.path)

    def to_disk(self) -> None:
        """Return when everything would outlive a power cut."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


class StoreThread:
    """One thread that reads and writes records in order, and what it has still to write."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="comingle-store")
        self._waiting: deque[Future[None]] = deque()

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function behind all that was submitted before."""
        return self._pool.submit(work, *args, **kwargs)

    def write(self, file: RecordFile, places: Sequence[int], records: np.ndarray) -> None:
        """Write records behind all that was submitted before."""
        self._waiting.append(self.submit(file.write, places, records))

    def wait(self, most: int) -> None:
        """Return when at most so many writes wait.

        Raises:
            OSError: The disk does not take what was written.
        """
        while len(self._waiting) > most:
            self._waiting.popleft().result()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The rows of one process.

    Args:
        part: Names the files of the process.
        ids: The number of each row among those of all processes.
        total_rows: Number of rows of all processes.
    """

    part: Part
    ids: Int[np.ndarray, " rows"]
    total_rows: int


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    """The same with room for so many, zeros at first."""
    more = size - len(array)
    return np.concatenate([array, np.zeros(max(1024, len(array), more), array.dtype)]) if more > 0 else array


ROWS, VERSIONS, SUMS = "rows", "versions", "sums/"
"""Columns besides places, which have the name of their group; so begin the names of those of records' sums."""

BEST, BEST_ROUND = "best/", "best/round"
"""So begin the names of what belongs to the best round, and the number of that round."""

SumsOf = Mapping[str, Callable[[Int64[np.ndarray, " some"]], UInt32[np.ndarray, " some"]]]
"""By group what tells the sums of the records at some places."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """By group where each row's record is, -1 where there is none; ``versions`` is what users last downloaded."""

    places: dict[str, Int64[np.ndarray, " rows"]]
    versions: Int[np.ndarray, " rows"]

    def copy(self) -> Table:
        """Return a deep copy."""
        return Table(
            places={name: places.copy() for name, places in self.places.items()}, versions=self.versions.copy()
        )

    @classmethod
    def without_records(cls, groups: Iterable[str], versions: Int[np.ndarray, " rows"]) -> Table:
        """Where nobody has a record."""
        return cls(places={n: np.full(len(versions), -1, dtype=np.int64) for n in groups}, versions=versions.copy())


def write_table(
    path: Path, ids: Int[np.ndarray, " rows"], now: Table, best: Table | None, best_round: int | None, sums: SumsOf
) -> None:
    """Write a checkpoint's table of those who have records: whoever never took part is as at the beginning."""
    content = _columns("", ids, now, sums)
    if best is not None:
        content |= _columns(BEST, ids, best, sums) | {BEST_ROUND: torch.tensor([best_round])}
    write_tensors(path, content)


def _columns(prefix: str, ids: np.ndarray, table: Table, sums: SumsOf) -> dict[str, torch.Tensor]:
    rows = np.flatnonzero(table.places["params"] >= 0)
    columns = {name: torch.from_numpy(places[rows]).int() for name, places in table.places.items()}
    known = {SUMS + name: sums[name](places[rows]) for name, places in table.places.items()}
    columns |= {name: torch.from_numpy(found.view(np.int32)) for name, found in known.items()}
    columns |= {ROWS: torch.from_numpy(ids[rows]).int(), VERSIONS: torch.from_numpy(table.versions[rows])}
    return {prefix + name: column for name, column in columns.items()}


def read_table(path: Path) -> dict[str, np.ndarray]:
    """The columns of a checkpoint's table."""
    return {name: t.numpy() for name, t in load_file(path).items()}


def places_of(tables: Sequence[dict[str, np.ndarray]], group: str) -> list[np.ndarray]:
    """All places that some checkpoints name, of a best round too."""
    return [table[name].astype(np.int64) for table in tables for name in (group, BEST + group) if name in table]


def within(places: Int64[np.ndarray, " rows"], number: int, size: int) -> Int64[np.ndarray, " some"]:
    """Those of a file, as it knows them; places are numbered by files of so many."""
    known = places[places >= 0]  # few of a large population's
    return known[known // size == number] % size


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """So many at a time."""
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
