"""Where users' records are: as a run has it in memory, and as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt32
from safetensors.torch import load_file

from comingle.engines.checkpoints import write_tensors

ROWS, VERSIONS, SUMS = "rows", "versions", "sums/"
"""Columns besides places, which have the name of their group; so begin the names of those of records' sums."""

BEST, BEST_ROUND = "best/", "best/round"
"""So begin the names of what belongs to the best round, and the number of that round."""

SumsOf = Mapping[str, Callable[[Int64[np.ndarray, " some"]], UInt32[np.ndarray, " some"]]]
"""By group what tells the sums of the records at some places."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Table:
    """By group where each row's record is, -1 where there is none; ``versions`` is what users last downloaded."""

    places: dict[str, Int64[np.ndarray, " rows"]]
    versions: Int[np.ndarray, " rows"]

    @classmethod
    def of_nobody(cls, groups: Iterable[str], versions: Int[np.ndarray, " rows"]) -> Table:
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
