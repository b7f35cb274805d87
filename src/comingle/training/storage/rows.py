"""Rows of users in files: read ahead of whoever works on them, written behind."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from comingle.training.state import State, Stored
from comingle.training.storage.files import Part, RecordFile, Table, aligned, blank, forms_of, told
from comingle.utils.errors import RunError

FILE = 2**40
"""Places are numbered by file: that of the run first, then others that are read or end with this process."""

BEHIND = 2
"""So many cohorts may wait to be written."""


class Records(Stored):
    """Rows of ``count`` users and copies; ``begin`` makes what some of them have before any training."""

    def __init__(
        self,
        begin: Callable[[Sequence[int]], State],
        count: int,
        moments: torch.dtype | None = None,
        names: Sequence[str] = (),
    ):
        sample = begin([0])
        self._nobody = sample.filled({name: t[:0] for name, t in sample.tensors().items()}, {})
        blank(self, self._nobody)
        self._begin, self.count, self._names = begin, count, names
        self._device = sample.rows.device
        self._forms = forms_of(sample, moments)
        self._groups = [name for name, form in self._forms.items() if form.bytes]
        self._places = {name: np.full(count, -1, dtype=np.int64) for name in self._groups}
        self._versions = np.full(count, int(sample.versions[0]), dtype=np.int32)
        self._files: dict[str, list[RecordFile | None]] = {name: [None] for name in self._groups}
        self._into: dict[str, int] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="comingle-store")
        self._waiting: deque[Future[None]] = deque()
        self._next: tuple[list[int], Mapping[str, Future[np.ndarray]]] | None = None
        self._run: Path | None = None
        self._best: Table | None = None
        self._part, self._ids, self._everybody = Part(), np.arange(count, dtype=np.int32), count

    # ---------------------------------------------------------------- what State does

    def take(self, users: Sequence[int]) -> State:
        """Copies of these users' tensors."""
        return aligned(self._taken(list(users), self._groups), users)

    def put(self, users: Sequence[int], part: State) -> None:
        """Write them back, soon."""
        rows, tensors = list(users), part.tensors()
        if self._next is not None and not set(self._next[0]).isdisjoint(rows):
            self._next = None
        self._versions[rows] = part.versions.cpu().numpy()
        self._write("params", rows, tensors)
        if "moments" in self._groups and part.first.shape[1] + part.second.shape[1]:
            known = torch.from_numpy(self._places["moments"][rows] >= 0)
            stepped = known | (part.first != 0).any(1).cpu() | (part.second != 0).any(1).cpu()
            at = stepped.nonzero().flatten().tolist()
            some = {name: tensors[name][at] for name in ("first", "second")}
            if at:  # of one class there is no gradient
                self._write("moments", [rows[i] for i in at], some)

    def received(self, users: Sequence[int]) -> list[int]:
        """After how many rounds the server had what each of these last downloaded."""
        return self._versions[list(users)].tolist()

    def rows_of(self, users: Sequence[int]) -> Float[Tensor, "some columns"]:
        """Tensors without what optimisers remember."""
        return self._taken(list(users), ["params"]).rows

    def ahead(self, users: Sequence[int]) -> None:
        """Begin to read."""
        rows = list(users)
        self._next = (rows, {name: self._reading(name, rows) for name in self._groups}) if rows else None

    def without_moments(self) -> State:
        """The same store, in which these stay as they are."""
        return _WithoutMoments(self)

    def copy(self) -> State:
        """The same, to be changed without changing this: what changes lies in a file of its own."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._places = {name: places.copy() for name, places in self._places.items()}
        other._versions, other._into, other._next = self._versions.copy(), {}, None
        other._files = {name: list(files) for name, files in self._files.items()}
        return other

    def release(self) -> None:
        """Close the files that are this one's own."""
        self._written(0)
        for name, number in self._into.items():
            if (file := self._files[name][number]) is not None:
                file.close()

    # ---------------------------------------------------------------- rows

    def _taken(self, rows: list[int], groups: Sequence[str]) -> State:
        ahead = self._next[1] if self._next is not None and self._next[0] == rows else {}
        reading = {name: ahead.get(name) or self._reading(name, rows) for name in groups}
        self._next = None if ahead else self._next
        known = self._places["params"][rows] >= 0
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
        return self._nobody.filled({name: t.to(self._device) for name, t in found.items()}, {})

    def _moments(self, rows: list[int], reading: Future[np.ndarray] | None) -> dict[str, Tensor]:
        like = {"first": self.first, "second": self.second}
        if reading is None:
            return {name: t.new_zeros(len(rows), 0) for name, t in like.items()}
        whole = {name: t.new_zeros(len(rows), t.shape[1]) for name, t in like.items()}
        found = self._forms["moments"].unpack(self._got(reading))
        there = torch.from_numpy(np.flatnonzero(self._places["moments"][rows] >= 0))
        for name, t in found.items():
            whole[name][there] = t.to(whole[name])
        return whole

    def _got(self, reading: Future[np.ndarray]) -> np.ndarray:
        try:
            with told(self._run):
                return reading.result()
        except RunError:
            self._written(0)  # what was not written cannot be read: that is said first
            raise

    def _reading(self, group: str, rows: list[int], places: Sequence[int] | None = None) -> Future[np.ndarray]:
        """Records of those of these rows that have one; behind all that is to be written before."""
        where = self._places[group][rows].tolist() if places is None else places
        ids = self._ids[rows].tolist()
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
        table, places = self._places[group], []
        for row in rows:
            before = int(table[row])
            places.append(file.place(before % FILE if before >= 0 and before // FILE == number else -1))
        table[rows] = number * FILE + np.array(places, dtype=np.int64)
        records = self._forms[group].pack(self._ids[rows].tolist(), tensors)
        self._waiting.append(self._worker.submit(file.write, places, records))
        self._written(BEHIND)

    def _written(self, most: int) -> None:
        """Return when at most so many cohorts wait to be written."""
        while len(self._waiting) > most:
            with told(self._run):
                self._waiting.popleft().result()

    def _writable(self, group: str) -> tuple[int, RecordFile]:
        """Where to write: the run's own file, or one that ends with this process."""
        files = self._files[group]
        if group not in self._into:
            with told(self._run):
                handle, name = tempfile.mkstemp(prefix="comingle-", suffix=".rows")
            with open(handle, "rb"):
                files.append(RecordFile(Path(name), self._forms[group].bytes, writes=True, lives=False))
            self._into[group] = len(files) - 1
        number = self._into[group]
        file = files[number]
        assert file is not None
        return number, file


class _WithoutMoments(State):
    """A store in which what optimisers remember is neither read nor written."""

    def __init__(self, store: Records):
        blank(self, replace(store._nobody, first=store.first[:, :0], second=store.second[:, :0]))
        self._store = store

    def take(self, users: Sequence[int]) -> State:
        """Copies of these users' tensors."""
        return aligned(self._store._taken(list(users), ["params"]), users)

    def put(self, users: Sequence[int], part: State) -> None:
        """Write them back."""
        self._store.put(users, part)
