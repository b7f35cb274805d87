"""Users' tensors in the run folder, of one process or of one among several.

``store/params.bin`` and ``store/moments.bin`` have a record of each user who took part
(:mod:`comingle.training.storage.files`); of several processes each has files of its own. Who never did has none: what
it begins with follows from the seed and its name. A checkpoint has a table of places, and of the sums of what lies
there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comingle.training.state import State
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
    Table,
    batched,
    check_store,
    parts_of,
    places_of,
    read_json,
    read_table,
    remove_files,
    require_files,
    told,
    within,
    write_table,
)
from comingle.training.storage.population import Names
from comingle.training.storage.rows import FILE, Records
from comingle.utils.files import list_checkpoints, verify
from comingle.utils.records import to_disk, write_json

_AT_ONCE = 256
"""So many records are copied at once."""


class OnDisk(Records):
    """Rows that outlive their process."""

    # ---------------------------------------------------------------- the best round

    def remember(self, done: int) -> None:
        """What everybody has now is the best: where it lies is written over by nothing."""
        self._written(0)
        self._best = Table(places={n: p.copy() for n, p in self._places.items()}, versions=self._versions.copy())
        self.best = {"round": torch.tensor(done)}
        for name in self._groups:
            for number, file in enumerate(self._files[name]):
                if file is not None and self._run is None and self._into.get(name) == number:
                    file.keep([within(table, number, FILE) for table in self._tables(name)])
                elif file is not None:
                    file.snapshot()

    def recalled(self) -> State:
        """As it was in the best round."""
        other = self.copy()
        assert isinstance(other, OnDisk)
        assert self._best is not None
        other._places = {name: places.copy() for name, places in self._best.places.items()}
        other._versions = self._best.versions.copy()
        return other

    def _tables(self, group: str) -> list[np.ndarray]:
        """Places that are referred to now."""
        return [self._places[group], *([] if self._best is None else [self._best.places[group]])]

    # ---------------------------------------------------------------- the run folder

    def share_out(self, number: int, processes: int, users: range, everybody: int) -> None:
        """Be the rows of some of all users, who follow one another, in one of several processes."""
        copies = np.arange(self.count // len(users), dtype=np.int64) * everybody
        self._part = Part(number, processes)
        self._ids = (copies[:, None] + np.array(users, dtype=np.int64)).flatten().astype(np.int32)
        self._everybody = len(copies) * everybody

    def open(self, run: Path, *, anew: bool) -> None:
        """Write to ``store/`` in the run's folder from now on; of several processes, the first one first."""
        folder, self._run, leads = run / FOLDER, run, self._part.number == 0
        if not anew:
            require_files(run, list_checkpoints(run)[-1], self._groups)
        with told(run):
            if anew and leads:
                folder.mkdir(exist_ok=True)
                for path in folder.glob("*.bin"):
                    path.unlink()
                if isinstance(self._names, Names):
                    self._names.copy_to(folder)
                write_json(folder / ABOUT, self._about | {"id": secrets.token_hex(8)})
            for name in self._groups:
                path = self._part.records(run, name)
                self._files[name][0] = RecordFile(path, self._forms[name].bytes, writes=True)
            to_disk(folder)
        self._into = dict.fromkeys(self._groups, 0)

    @property
    def _about(self) -> dict[str, Any]:
        return {"rows": self._everybody, **{name: [f.told for f in self._forms[name].fields] for name in self._groups}}

    def save(self, draft: Path, checkpoints: Sequence[Path]) -> list[str]:
        """Records on disk, then a table of where they are; returns the names of the files."""
        self._written(0)
        assert self._run is not None
        files = {name: file for name in self._groups if (file := self._files[name][0]) is not None}
        for file in files.values():
            self._worker.submit(file.to_disk).result()
        table = self._part.table(draft)
        now = Table(places=self._places, versions=self._versions)
        best_round, sums = int(self.best["round"]) if self.best else None, {n: file.sums for n, file in files.items()}
        write_table(table, self._ids, now, self._best, best_round, sums)
        if self._part.number == 0:
            write_json(draft / ABOUT, read_json(self._run / FOLDER / ABOUT))
            remove_files(self._run, [*checkpoints, draft])
        older = [read_table(self._part.table(path)) for path in checkpoints if self._part in parts_of(path)]
        for name, file in files.items():
            file.keep([within(places, 0, FILE) for places in (*self._tables(name), *places_of(older, name))])
        return [table.name, *([ABOUT] if self._part.number == 0 else [])]

    def load(self, checkpoint: Path) -> None:
        """Be as at a checkpoint, whichever processes have written it, and write where no checkpoint's records are.

        Raises:
            RunError: the store is of another recipe, run or round, or lacks what the checkpoint names.
        """
        run = checkpoint.parent.parent
        check_store(run, checkpoint, self._about, self._groups)
        best, rounds = Table.of_nobody(self._groups, self._versions), set[int]()
        for part in parts_of(checkpoint):
            verify(checkpoint, part.table(checkpoint).name)
            found = read_table(part.table(checkpoint))
            rounds |= set(found[BEST_ROUND].tolist() if BEST_ROUND in found else ())
            numbers = self._attached(run, part)
            self._place(found, "", Table(places=self._places, versions=self._versions), numbers)
            if self.best:
                self._place(found, BEST, best, numbers)
        if self.best:
            self._best, self.best = best, {"round": torch.tensor(rounds.pop())}
        others = [path for path in checkpoint.parent.glob("round-*") if self._part in parts_of(path)]
        for name in self._groups:
            if (file := self._files[name][0]) is not None:
                tables = [read_table(self._part.table(path)) for path in others]
                file.keep([within(places, 0, FILE) for places in (*self._tables(name), *places_of(tables, name))])
        if self._run is not None:
            self._adopt()

    def _attached(self, run: Path, part: Part) -> dict[str, int]:
        """By which numbers places in the files of some process's users are known here."""
        numbers: dict[str, int] = {}
        for name in self._groups:
            files = self._files[name]
            if part == self._part and files[0] is not None:
                numbers[name] = 0
                continue
            file = RecordFile(part.records(run, name), self._forms[name].bytes, writes=False)
            if part == self._part:
                numbers[name], files[0] = 0, file
            else:
                numbers[name] = len(files)
                files.append(file)
        return numbers

    def _place(self, found: dict[str, np.ndarray], prefix: str, into: Table, numbers: dict[str, int]) -> None:
        """Take over where the rows are of those who are here."""
        rows = found.get(prefix + ROWS, np.zeros(0, dtype=np.int64))
        here = np.isin(rows, self._ids)
        order = np.argsort(self._ids)
        own = order[np.searchsorted(self._ids, rows[here], sorter=order)]
        into.versions[own] = found[prefix + VERSIONS][here] if len(own) else 0
        for name in self._groups if len(own) else ():
            places = found[prefix + name][here].astype(np.int64)
            into.places[name][own] = np.where(places >= 0, places + numbers[name] * FILE, -1)
            if (sums := found.get(prefix + SUMS + name)) is not None:  # tables of before have none
                there, file = places >= 0, self._files[name][numbers[name]]
                assert file is not None
                file.expect(places[there], rows[here][there].astype(np.int64), sums[here][there].view(np.uint32))

    def _adopt(self) -> None:
        """Have in the file of this process what is in those of others, which may go."""
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
