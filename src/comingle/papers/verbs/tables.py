"""Tables as the verbs make and print them: runs as they end, what is known so far, the table in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comingle.papers.reproduce.plan import Cell, Plan
    from comingle.papers.reproduce.runner import Outcome
    from comingle.training.client import Clients
    from comingle.training.events import Observer


def run_all(cells: list[Cell], out: Path, jobs: int, *, force: bool, quiet: bool) -> Iterator[Outcome]:
    """The runs as they end, one after another or several at a time."""
    from comingle.papers.reproduce.parallel import run_parallel
    from comingle.papers.reproduce.runner import run_cells, title_of
    from comingle.runs.progress import reporting

    if jobs > 1 and len(cells) > 1:
        yield from run_parallel(cells, out, jobs=jobs, force=force, quiet=quiet)
        return
    with reporting(quiet=quiet) as reporter:

        def observers(cell: Cell, clients: Clients) -> list[Observer]:
            reporter.clear()  # one bar at a time; a run that has ended has its line
            return [reporter.watch(clients, title_of(cell))]

        yield from run_cells(cells, out, force=force, observers=observers, waiting=reporter.waiting)


def table_of(planned: Plan, outcomes: dict[str, Outcome], baseline: str | None) -> dict[str, Any]:
    """What is known of a table, so far."""
    from comingle.papers.reproduce.runner import results, scores
    from comingle.papers.reproduce.tables import build_table

    failed = [f"{o.cell.column}, {o.cell.row}: {o.diverged}" for o in outcomes.values() if o.diverged]
    metric, cells = planned.experiment.metric, planned.cells
    users = results(outcomes, cells, metric)
    return build_table(planned, scores(outcomes, cells, metric), diverged=failed, results=users, baseline=baseline)


def print_table(table: dict[str, Any]) -> None:
    """A table with what it says in words, in the terminal."""
    from comingle.cli.options import console
    from comingle.papers.reproduce.tables import held, remarks, render
    from comingle.reports.comparisons import render as render_verdicts
    from comingle.utils.terminal import words

    console.print(render(table))
    for one in remarks(table):
        console.print(f"· {one}", highlight=False)
    for label, found in held(table):
        console.print()
        console.print(words(label, "bold"))
        for part in render_verdicts(found):
            console.print(part)
