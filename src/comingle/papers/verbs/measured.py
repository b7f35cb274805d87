"""``comingle reproduce --measured FILE``: a table out of a file, some of its runs made again, more runs into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from comingle.utils.errors import RunError

if TYPE_CHECKING:
    from comingle.papers.reproduce.plan import Wanted


def show_measured(path: Path, name: str, wanted: Wanted, out: Path, *, baseline: str | None) -> None:
    """Print and write a table whose runs are in a file; needs neither the data nor a run."""
    from comingle.cli.options import console
    from comingle.papers.reproduce.archive import plan_of, read_archive, take
    from comingle.papers.reproduce.tables import write_tables
    from comingle.papers.verbs.tables import print_table, table_of
    from comingle.utils.terminal import words

    records = read_archive(path)
    planned, outcomes, told = take(plan_of(records, name, wanted), records, path)
    table = {**table_of(planned, outcomes, baseline), "measured": told}
    folder = out / f"{name.partition('/')[2]}-measured"
    write_tables(folder, table)
    print_table(table)
    console.print(words(f"{folder}/  table.md · table.json", "dim"))


def check_measured(
    path: Path, name: str, wanted: Wanted, out: Path, most: int, jobs: int | None, *, force: bool, quiet: bool
) -> None:
    """Make some of a file's runs here, and print both results of each.

    Raises:
        RunError: the data or the base are not what the file's runs have read, or a result is another one.
    """
    from comingle.cli.options import console
    from comingle.papers.reproduce.archive import ROUNDING, choose, compare, read_archive
    from comingle.papers.reproduce.plan import plan
    from comingle.papers.verbs.tables import run_all

    planned, records, others = plan(name, wanted), read_archive(path), 0
    cells = choose(planned, records, path, most)
    for outcome in run_all(cells, out, jobs or planned.jobs, force=force, quiet=quiet):
        told, same = compare(records[outcome.cell.folder], outcome)
        others += not same
        console.print(told, highlight=False)
    if others:
        told = f"{others} of {len(cells)} runs came out otherwise, by more than {ROUNDING:.1%}"
        raise RunError(f"--check {path}: {told}")


def add_measured(path: Path, name: str, wanted: Wanted, out: Path, *, quiet: bool) -> None:
    """Put finished runs into a file."""
    from comingle.cli.options import console
    from comingle.papers.reproduce.archive import add_runs
    from comingle.runs.progress import reporting

    with reporting(quiet=quiet) as reporter:
        told = add_runs(path, name, wanted, out, reporter.waiting)
    console.print(told, highlight=False)
