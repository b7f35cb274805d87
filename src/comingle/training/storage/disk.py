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
    places_of,
    read_json,
    read_table,
    remove_files,
    require_files,
    within,
    write_table,
)
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import list_checkpoints, verify
from comingle.utils.records import to_disk, write_json

_AT_ONCE = 256
"""Number of records that are copied at a time."""

FILE = 2**40
"""Number of places per file: file 0 is the run's own, others are read-only or end with this process."""

MAX_PENDING_WRITES = 2
"""Largest number of cohorts with pending writes."""


class OnDisk(State):
    """State of users in files.

    Args:
        begin: Returns the initial state of some rows.
        count: Number of rows: users times copies.
        moments: Dtype of moments in records; None for their own.
        names: Names of the users.
    """

    in_memory = False

    def __init__(
        self,
        begin: Callable[[Sequence[int]], State],
        count: int,
        moments: torch.dtype | None = None,
        names: Sequence[str] = (),
    ):
        sample = begin([0])
        self._empty = sample.filled({name: t[:0] for name, t in sample.tensors().items()}, {})
        copy_fields(self, self._empty)
        self._begin, self.count, self._names = begin, count, names
        self._device = sample.rows.device
        self._forms = forms_of(sample, moments)
        self._groups = [name for name, form in self._forms.items() if form.bytes]
        self._now = Table.without_records(self._groups, np.full(count, int(sample.versions[0]), dtype=np.int32))
        self._files: dict[str, list[RecordFile | None]] = {name: [None] for name in self._groups}
        self._into: dict[str, int] = {}
        self._worker = StoreThread()
        self._next: tuple[list[int], Mapping[str, Future[np.ndarray]]] | None = None
        self._run: Path | None = None
        self._best: Table | None = None
        self._shard = Shard(part=Part(), ids=np.arange(count, dtype=np.int32), total_rows=count)

    # ---------------------------------------------------------------- what State does

    def take(self, users: Sequence[int]) -> State:
        """Return a copy of the rows of some users."""
        return align(self._taken(list(users), self._groups), users)

    def put(self, users: Sequence[int], part: State) -> None:
        """Write the rows of some users back, asynchronously."""
        rows, tensors = list(users), part.tensors()
        if self._next is not None and not set(self._next[0]).isdisjoint(rows):
            self._next = None
        self._now.versions[rows] = part.versions.cpu().numpy()
        self._write("params", rows, tensors)
        if "moments" in self._groups and part.first.shape[1] + part.second.shape[1]:
            known = torch.from_numpy(self._now.places["moments"][rows] >= 0)
            stepped = known | (part.first != 0).any(1).cpu() | (part.second != 0).any(1).cpu()
            at = stepped.nonzero().flatten().tolist()
            some = {name: tensors[name][at] for name in ("first", "second")}
            if at:  # samples of a single class may have no gradient
                self._write("moments", [rows[i] for i in at], some)

    @property
    def versions(self) -> Int[Tensor, " users"]:  # type: ignore[override] (a view of the table)
        """Server version that each user last downloaded, as the number of rounds done."""
        return torch.from_numpy(self._now.versions)

    def rows_of(self, users: Sequence[int]) -> Float[Tensor, "some columns"]:
        """Return the parameters of some users, without moments."""
        return self._taken(list(users), ["params"]).rows

    def prefetch(self, users: Sequence[int]) -> None:
        """Start to read the rows of some users."""
        rows = list(users)
        self._next = (rows, {name: self._reading(name, rows) for name in self._groups}) if rows else None

    def without_moments(self) -> State:
        """Return a view of this store that neither reads nor writes moments."""
        return _WithoutMoments(self)

    def copy(self) -> OnDisk:
        """Return a copy-on-write copy: its changes go to a temporary file."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._now, other._into, other._next = self._now.copy(), {}, None
        other._files = {name: list(files) for name, files in self._files.items()}
        return other

    def release(self) -> None:
        """Close the temporary files of a copy."""
        self._written(0)
        for name, number in self._into.items():
            if (file := self._files[name][number]) is not None:
                file.close()

    # ---------------------------------------------------------------- rows

    def _taken(self, rows: list[int], groups: Sequence[str]) -> State:
        ahead = self._next[1] if self._next is not None and self._next[0] == rows else {}
        reading = {name: ahead.get(name) or self._reading(name, rows) for name in groups}
        self._next = None if ahead else self._next
        known = self._now.places["params"][rows] >= 0
        found = self._forms["params"].unpack(self._got(reading["params"]))
        new = [row for row, there in zip(rows, known.tolist(), strict=True) if not there]
        if new:
            started = self._begin(new).tensors()
            whole = {name: t.new_empty(len(rows), *t.shape[1:]) for name, t in found.items()}
            there, missing = (torch.from_numpy(np.flatnonzero(at)) for at in (known, ~known))
            for name, t in whole.items():
                t[there], t[missing] = found[name], started[name].to(t.device)
            found = whole
        found |= self._moments(rows, reading.get("moments"))
        return self._empty.filled({name: t.to(self._device) for name, t in found.items()}, {})

    def _moments(self, rows: list[int], reading: Future[np.ndarray] | None) -> dict[str, Tensor]:
        like = {"first": self.first, "second": self.second}
        if reading is None:
            return {name: t.new_zeros(len(rows), 0) for name, t in like.items()}
        whole = {name: t.new_zeros(len(rows), t.shape[1]) for name, t in like.items()}
        found = self._forms["moments"].unpack(self._got(reading))
        there = torch.from_numpy(np.flatnonzero(self._now.places["moments"][rows] >= 0))
        for name, t in found.items():
            whole[name][there] = t.to(whole[name])
        return whole

    def _got(self, reading: Future[np.ndarray]) -> np.ndarray:
        try:
            with disk_errors(self._run):
                return reading.result()
        except RunError:
            self._written(0)  # raise the error of a failed write first
            raise

    def _reading(self, group: str, rows: list[int], places: Sequence[int] | None = None) -> Future[np.ndarray]:
        """Start to read the records of those rows that have one, after all pending writes."""
        where = self._now.places[group][rows].tolist() if places is None else places
        ids = self._shard.ids[rows].tolist()
        at = [(place, row) for place, row in zip(where, ids, strict=True) if place >= 0]
        files, size = self._files[group], self._forms[group].bytes

        def read() -> np.ndarray:
            records = np.empty((len(at), size), dtype=np.uint8)
            for number in {place // FILE for place, _ in at}:
                chosen = [i for i, (place, _) in enumerate(at) if place // FILE == number]
                file = files[number]
                assert file is not None
                file.read([at[i][0] % FILE for i in chosen], [at[i][1] for i in chosen], [records[i] for i in chosen])
            return records

        return self._worker.submit(read)

    def _write(self, group: str, rows: list[int], tensors: Mapping[str, Tensor]) -> None:
        number, file = self._writable(group)
        table, places = self._now.places[group], []
        for row in rows:
            before = int(table[row])
            places.append(file.place(before % FILE if before >= 0 and before // FILE == number else -1))
        table[rows] = number * FILE + np.array(places, dtype=np.int64)
        records = self._forms[group].pack(self._shard.ids[rows].tolist(), tensors)
        self._worker.write(file, places, records)
        self._written(MAX_PENDING_WRITES)

    def _written(self, most: int) -> None:
        """Wait until at most ``most`` cohorts have pending writes."""
        with disk_errors(self._run):
            self._worker.wait(most)

    def _writable(self, group: str) -> tuple[int, RecordFile]:
        """Return the number and the file to write to: the run's own, or one that ends with this process."""
        files = self._files[group]
        if group not in self._into:
            with disk_errors(self._run):
                handle, name = tempfile.mkstemp(prefix="comingle-", suffix=".rows")
            with open(handle, "rb"):
                files.append(RecordFile(Path(name), self._forms[group].bytes, writes=True, lives=False))
            self._into[group] = len(files) - 1
        number = self._into[group]
        file = files[number]
        assert file is not None
        return number, file

    # ---------------------------------------------------------------- the best round

    def remember(self, done: int) -> None:
        """Store the current rows as those of the best round; their records are protected from being overwritten."""
        self._written(0)
        self._best = self._now.copy()
        self.best = {"round": torch.tensor(done)}
        for name in self._groups:
            for number, file in enumerate(self._files[name]):
                if file is not None and self._run is None and self._into.get(name) == number:
                    file.keep([within(table, number, FILE) for table in self._tables(name)])
                elif file is not None:
                    file.snapshot()

    def restored_best(self) -> State:
        """Return the state as it was after the best round."""
        other = self.copy()
        assert self._best is not None
        other._now = self._best.copy()
        return other

    def _tables(self, group: str) -> list[np.ndarray]:
        """Return the places that are in use, for the best round too."""
        return [self._now.places[group], *([] if self._best is None else [self._best.places[group]])]

    # ---------------------------------------------------------------- the run folder

    def shard(self, number: int, processes: int, users: range, population: int) -> None:
        """Restrict the state to the rows of consecutive users, in one of several processes."""
        copies = np.arange(self.count // len(users), dtype=np.int64) * population
        ids = (copies[:, None] + np.array(users, dtype=np.int64)).flatten().astype(np.int32)
        self._shard = Shard(part=Part(number, processes), ids=ids, total_rows=len(copies) * population)

    def open(self, run: Path, *, anew: bool) -> None:
        """Write to ``store/`` in the run's folder from now on; the first process does so before the others."""
        folder, self._run, leads = run / FOLDER, run, self._shard.part.number == 0
        if not anew:
            require_files(run, list_checkpoints(run)[-1], self._groups)
        with disk_errors(run):
            if anew and leads:
                folder.mkdir(exist_ok=True)
                for path in folder.glob("*.bin"):
                    path.unlink()
                if isinstance(self._names, StoredNames):
                    self._names.copy_to(folder)
                write_json(folder / ABOUT, self._about | {"id": secrets.token_hex(8)})
            for name in self._groups:
                path = self._shard.part.records(run, name)
                self._files[name][0] = RecordFile(path, self._forms[name].bytes, writes=True)
            to_disk(folder)
        self._into = dict.fromkeys(self._groups, 0)

    @property
    def _about(self) -> dict[str, Any]:
        return {
            "rows": self._shard.total_rows,
            **{name: [f.description for f in self._forms[name].fields] for name in self._groups},
        }

    def save(self, draft: Path, checkpoints: Sequence[Path], write: Callable[[], list[str]]) -> list[str]:
        """Write the records to disk, then a table of their places; return the names of the files."""
        self._written(0)
        assert self._run is not None
        files = {name: file for name in self._groups if (file := self._files[name][0]) is not None}
        for file in files.values():
            self._worker.submit(file.to_disk).result()
        table = self._shard.part.table(draft)
        best_round, sums = int(self.best["round"]) if self.best else None, {n: file.sums for n, file in files.items()}
        write_table(table, self._shard.ids, self._now, self._best, best_round, sums)
        if self._shard.part.number == 0:
            write_json(draft / ABOUT, read_json(self._run / FOLDER / ABOUT))
            remove_files(self._run, [*checkpoints, draft])
        older = [read_table(self._shard.part.table(path)) for path in checkpoints if self._shard.part in parts_of(path)]
        for name, file in files.items():
            file.keep([within(places, 0, FILE) for places in (*self._tables(name), *places_of(older, name))])
        return [table.name, *([ABOUT] if self._shard.part.number == 0 else [])]

    def load(self, checkpoint: Path, read: Callable[[], State]) -> OnDisk:
        """Return this store at a checkpoint that any number of processes has written.

        New records go to places that no checkpoint uses.

        Raises:
            RunError: The store belongs to another recipe, run or round, or lacks records of the checkpoint.
        """
        run = checkpoint.parent.parent
        check_store(run, checkpoint, self._about, self._groups)
        best, rounds = Table.without_records(self._groups, self._now.versions), set[int]()
        for part in parts_of(checkpoint):
            verify(checkpoint, part.table(checkpoint).name)
            found = read_table(part.table(checkpoint))
            rounds |= set(found[BEST_ROUND].tolist() if BEST_ROUND in found else ())
            numbers = self._attached(run, part)
            self._place(found, "", self._now, numbers)
            if self.best:
                self._place(found, BEST, best, numbers)
        if self.best:
            self._best, self.best = best, {"round": torch.tensor(rounds.pop())}
        others = [path for path in checkpoint.parent.glob("round-*") if self._shard.part in parts_of(path)]
        for name in self._groups:
            if (file := self._files[name][0]) is not None:
                tables = [read_table(self._shard.part.table(path)) for path in others]
                file.keep([within(places, 0, FILE) for places in (*self._tables(name), *places_of(tables, name))])
        if self._run is not None:
            self._adopt()
        return self

    def _attached(self, run: Path, part: Part) -> dict[str, int]:
        """Open the files of a process of the checkpoint and return their numbers, by group."""
        numbers: dict[str, int] = {}
        for name in self._groups:
            files = self._files[name]
            if part == self._shard.part and files[0] is not None:
                numbers[name] = 0
                continue
            file = RecordFile(part.records(run, name), self._forms[name].bytes, writes=False)
            if part == self._shard.part:
                numbers[name], files[0] = 0, file
            else:
                numbers[name] = len(files)
                files.append(file)
        return numbers

    def _place(self, found: dict[str, np.ndarray], prefix: str, into: Table, numbers: dict[str, int]) -> None:
        """Copy the places of the rows of this process from a table of a checkpoint."""
        rows = found.get(prefix + ROWS, np.zeros(0, dtype=np.int64))
        here = np.isin(rows, self._shard.ids)
        order = np.argsort(self._shard.ids)
        own = order[np.searchsorted(self._shard.ids, rows[here], sorter=order)]
        into.versions[own] = found[prefix + VERSIONS][here] if len(own) else 0
        for name in self._groups if len(own) else ():
            places = found[prefix + name][here].astype(np.int64)
            into.places[name][own] = np.where(places >= 0, places + numbers[name] * FILE, -1)
            if (sums := found.get(prefix + SUMS + name)) is not None:  # tables of older versions have none
                there, file = places >= 0, self._files[name][numbers[name]]
                assert file is not None
                file.expect(places[there], rows[here][there].astype(np.int64), sums[here][there].view(np.uint32))

    def _adopt(self) -> None:
        """Copy records from the files of other processes to this process's own."""
        for name in self._groups:
            tables, file = self._tables(name), self._files[name][0]
            assert file is not None
            moved: dict[int, int] = {}
            rows = {int(t[row]): row for t in tables for row in np.flatnonzero(t >= FILE).tolist()}
            for some in batched(rows.items(), _AT_ONCE):
                records = self._reading(name, [row for _, row in some], [place for place, _ in some]).result()
                places = [file.place(-1) for _ in some]
                self._worker.submit(file.write, places, records).result()
                moved |= {place: at for (place, _), at in zip(some, places, strict=True)}
            for table in tables:
                for row in np.flatnonzero(table >= FILE).tolist():
                    table[row] = moved[int(table[row])]
            del self._files[name][1:]


class _WithoutMoments(State):
    """View of a store that neither reads nor writes moments."""

    in_memory = False

    def __init__(self, store: OnDisk):
        copy_fields(self, replace(store._empty, first=store.first[:, :0], second=store.second[:, :0]))
        self._store = store

    def take(self, users: Sequence[int]) -> State:
        """Return a copy of the rows of some users."""
        return align(self._store._taken(list(users), ["params"]), users)

    def put(self, users: Sequence[int], part: State) -> None:
        """Write the rows of some users back, asynchronously."""
        self._store.put(users, part)


class DiskStore(Store):
    """Store in a folder on disk; it is exact except for rounded moments."""

    def begin(self, clients: Users) -> OnDisk:
        """Return the state of some users before the first round.

        Raises:
            RecipeError: The recipe needs all users at once, or there are no moments to round.
        """
        check_storable(clients)
        remembered = clients.plan.training.experts.moments | clients.plan.training.router.moments
        if self.moments is not None and not MOMENTS & remembered:
            raise RecipeError("runtime.store: disk-bf16 rounds moments, but no optimizer here has any; allowed: disk")
        return OnDisk(clients.begin, clients.rows, self.moments, names=clients.names)

    def read(self, kind: Kind, request: DataRequest) -> RunData:
        """Return users in a file that are read one after another; all at once for a kind without a reader.

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
    """Check that nothing in the recipe needs all users at once.

    Raises:
        RecipeError: The method trains one pooled model.
        DataError: The best round is selected and no user has validation data.
    """
    if clients.method.placement.pooled:
        raise RecipeError(f"method {clients.method.name}: trains a single model; allowed: runtime.store: memory")
    if clients.plan.evaluation.select == "best":
        clients.require_validation(clients.users.about.get("valid", 1) > 0)
