"""Runs the cells of a plan, each once: what is finished is kept, what was interrupted goes on."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from comingle.config import load_recipe
from comingle.models.base import Base
from comingle.papers.reproduce.measured import (
    DIVERGED,
    MEASURED,
    check_same,
    is_measured,
    read_diverged,
    said,
    write_measured,
)
from comingle.papers.reproduce.plan import Cell
from comingle.runs.progress import LOADING
from comingle.runs.session import describe, prepare, run_in
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import Materials
from comingle.utils.errors import DivergenceError, RunError
from comingle.utils.inputs import read_inputs
from comingle.utils.records import read_metrics, write_text

RUNS = "runs"

Waiting = Callable[[str], AbstractContextManager[Any]]
"""Says what is being waited for, while it lasts."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a cell: its run folder, and whether it ran now, was there before, or left the real numbers.

    ``published`` are the metrics of a run that somebody else has made, of which there is no folder.
    """

    cell: Cell
    folder: Path
    seconds: float
    ran: bool
    diverged: str = ""
    published: dict[str, Any] | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """The result, of a run that did not diverge."""
        return read_metrics(self.folder) if self.published is None else self.published


@dataclass(kw_only=True)
class Estimate:
    """Time left for the whole table, from what the finished runs took for each unit of work, base by base."""

    seconds: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)

    def learn(self, outcome: Outcome) -> None:
        """Take a run that was really done."""
        if outcome.ran:
            base = outcome.cell.recipe.base
            self.seconds[base] = self.seconds.get(base, 0.0) + outcome.seconds
            self.work[base] = self.work.get(base, 0.0) + outcome.cell.weight

    def left(self, cells: Sequence[Cell]) -> float | None:
        """Seconds that some cells will take; None before anything is known. A new base counts as those before it."""
        if not self.work:
            return None
        mean = sum(self.seconds.values()) / sum(self.work.values())
        pace = {base: self.seconds[base] / work for base, work in self.work.items()}
        return sum(cell.weight * pace.get(cell.recipe.base, mean) for cell in cells)


def unique(cells: Sequence[Cell]) -> list[Cell]:
    """The cells to run: of several that compute the same, the first."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.folder, cell)
    return list(first.values())


def title_of(cell: Cell) -> str:
    """What a run of a table is called."""
    return f"{cell.column} · {cell.row}, seed {cell.seed}"


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    force: bool = False,
    observers: Callable[[Cell, Clients], Sequence[Observer]] = lambda cell, clients: (),
    waiting: Waiting = nullcontext,
) -> Iterator[Outcome]:
    """Run every cell below ``out/runs``, in order; text and base are loaded once for neighbours that share them.

    A run whose training diverges is written down as such and does not stop the others. Checkpoints of tasks are deleted
    at the end: everybody's copies of nets that are trained whole would fill the disk, and no report reads them.

    Raises:
        RunError: a run folder belongs to something else, or was made with other text or another base.
    """
    shelf = Shelf(waiting)
    for cell in unique(cells):
        folder = out / RUNS / cell.folder
        if not force and is_measured(folder):
            check_same(folder, said(read_inputs(folder)), shelf.said(cell))
            yield Outcome(cell=cell, folder=folder, seconds=0.0, ran=False, diverged=read_diverged(folder))
            continue
        begun = (folder / "recipe.yaml").exists()
        # What was begun with text at another place begins anew: so do its checkpoints' names.
        resume = begun and not force and load_recipe(folder).fingerprint == cell.recipe.fingerprint
        materials = shelf.materials(cell)
        started = time.perf_counter()
        for name in (DIVERGED, MEASURED):
            (folder / name).unlink(missing_ok=True)
        watch, anew = partial(observers, cell), force or (begun and not resume)
        try:
            run_in(folder, cell.recipe, materials, resume=resume, force=anew, observers=watch)
        except DivergenceError as error:
            write_text(folder / DIVERGED, f"{error.__cause__ or error}\n")  # the cause names no checkpoint
        if not materials.kind.needs_base:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        write_measured(folder, cell)
        yield Outcome(
            cell=cell, folder=folder, seconds=time.perf_counter() - started, ran=True, diverged=read_diverged(folder)
        )


def check_out(out: Path, name: str, *, resume: bool, force: bool) -> Path:
    """The folder of one table below ``out``; refused where it has been made already, unless told what to do.

    Raises:
        RunError: it exists and neither ``resume`` nor ``force`` is given.
    """
    folder = out / name.partition("/")[2]
    if folder.exists() and not (resume or force):
        raise RunError(f"{folder}: exists; --resume goes on with it, --force runs all again, --out names another")
    return folder


def scores(outcomes: Mapping[str, Outcome], cells: Sequence[Cell], metric: str) -> dict[tuple[str, str], list[float]]:
    """The metric of every run of a cell, by (row, column); runs that are missing or diverged have none.

    Accuracies are in per cent, as papers print them. A metric that models are not compared by is the mean over users.
    """
    factor = 100 if metric.endswith("_accuracy") else 1
    by_cell: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        outcome = outcomes.get(cell.folder)
        if outcome is None or outcome.diverged:
            continue
        by_cell.setdefault((cell.row, cell.column), []).append(factor * _read(outcome.metrics, metric))
    return by_cell


def results(outcomes: Mapping[str, Outcome], cells: Sequence[Cell], metric: str) -> dict[str, dict[str, Any]]:
    """Each user's metric, by column, row, seed and user; runs that are missing or diverged have none."""
    by_column: dict[str, dict[str, Any]] = {}
    for cell in cells:
        outcome = outcomes.get(cell.folder)
        if outcome is None or outcome.diverged:
            continue
        users = {name: user.get(metric.removeprefix("mean_")) for name, user in outcome.metrics["users"].items()}
        by_column.setdefault(cell.column, {}).setdefault(cell.row, {})[cell.seed] = users
    return by_column


def _read(metrics: Mapping[str, Any], metric: str) -> float:
    """A metric of a run, or the mean of what it has of every user: ROUGE-1 where models are compared by accuracy."""
    key = metric.removeprefix("mean_")
    return metrics[metric] if metric in metrics else statistics.fmean(user[key] for user in metrics["users"].values())


class Shelf:
    """The base and the text that were loaded last."""

    def __init__(self, waiting: Waiting = nullcontext) -> None:
        self._waiting = waiting
        self._base: tuple[str, Base] | None = None
        self._materials: tuple[str, Materials] | None = None
        self._said: tuple[Materials, dict[str, str]] | None = None

    def said(self, cell: Cell) -> dict[str, str]:
        """Digests of what a cell would read."""
        materials = self.materials(cell)
        if self._said is None or self._said[0] is not materials:
            self._said = materials, said(describe(materials, cell.recipe))
        return self._said[1]

    def materials(self, cell: Cell) -> Materials:
        """What a cell needs, from the shelf where it lies there already."""
        recipe = cell.recipe
        runtime = recipe.runtime.model_dump_json()
        base_key = f"{recipe.base} {runtime}"
        key = f"{base_key} {recipe.seed} {recipe.data.model_dump_json()}"
        if self._materials is None or self._materials[0] != key:
            base = self._base[1] if self._base is not None and self._base[0] == base_key else None
            self._materials = None  # so that two bases never lie side by side
            with self._waiting(LOADING):
                self._materials = (key, prepare(recipe, base=base))
            self._base = (base_key, loaded) if (loaded := self._materials[1].base) is not None else None
        return self._materials[1]
