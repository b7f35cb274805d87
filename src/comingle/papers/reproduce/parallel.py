"""Several runs of a table at a time: for bases so small that one run cannot use two cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from comingle.papers.reproduce.plan import Cell
from comingle.papers.reproduce.runner import Outcome, run_cells, title_of, unique
from comingle.runs.compare import in_processes
from comingle.runs.progress import reporting
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.utils.terminal import errors


def run_parallel(
    cells: Sequence[Cell], out: Path, *, jobs: int, force: bool = False, quiet: bool = True
) -> Iterator[Outcome]:
    """Like :func:`comingle.papers.reproduce.runner.run_cells`, ``jobs`` runs at a time, in the order in which they end.

    Cells of one column and seed stay together, since they share their text. Unless ``quiet``, and where stderr is no
    terminal, each tells of its rounds. Where there are GPUs each job has one of its own, as far as they suffice.

    Raises:
        ComingleError: whatever a worker raises, when the others are done.
    """
    groups = [list(group) for _, group in groupby(unique(cells), key=lambda cell: (cell.column, cell.seed))]
    silent = quiet or errors.is_terminal  # several bars would write over each other
    yield from in_processes(groups, partial(_work, out=out, force=force, quiet=silent), jobs=jobs, told=_told)


def _told(group: Sequence[Cell]) -> str:
    return f"{group[0].column}, seed {group[0].seed}"


def _work(cells: Sequence[Cell], out: Path, force: bool, quiet: bool) -> Iterator[Outcome]:
    with reporting(quiet=quiet) as reporter:

        def observers(cell: Cell, clients: Clients) -> list[Observer]:
            return [reporter.watch(clients, title_of(cell))]

        yield from run_cells(cells, out, force=force, observers=observers, waiting=reporter.waiting)
