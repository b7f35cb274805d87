"""``comingle show``: what a run found."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.cli.options import Everybody, console, named
from comingle.cli.report import Replace
from comingle.utils.files import check_target

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of a comparison.")],
    everybody: Everybody = False,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="METHODS", help="Another baseline for a comparison: the best of these."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="<path>", parser=named, help="Write a row for each user of each run here."),
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="<path>", parser=named, help="The same rows as Parquet.")
    ] = None,
    latex: Annotated[
        Path | None,
        typer.Option("--latex", metavar="<path>", parser=named, help="Write the table for LaTeX (booktabs) here."),
    ] = None,
    force: Replace = False,
) -> None:
    """Print the results of a run or of a comparison, or write every user's."""

    targets = {"--csv": csv, "--parquet": parquet, "--latex": latex}
    for option, path in targets.items():
        if path is not None:
            check_target(path, force=force, option=option)
    if any(path is not None for path in targets.values()):
        if csv is not None or parquet is not None:
            _write(run, csv, parquet)
        if latex is not None:
            _write_latex(run, latex, everybody=everybody)
        return
    for part in _shown(run, against, everybody=everybody):
        console.print(part)
    return


def _shown(run: Path, against: str | None, *, everybody: bool) -> list[RenderableType]:
    from comingle.reports.comparisons import hold_against, read_comparison
    from comingle.reports.tables import render_curve, render_run, tables_of
    from comingle.utils.errors import RecipeError
    from comingle.utils.records import read_events, read_metrics

    if (run / "table.json").exists():
        table = read_comparison(run)
        table = table if against is None else hold_against(table, against)
        return list(tables_of(table, everybody=everybody))
    if against is not None:
        raise RecipeError(f"--against {against!r}: {run} is not the folder of a comparison")
    return [render_run(read_metrics(run), everybody=everybody), render_curve(list(read_events(run)))]


def _write(run: Path, csv: Path | None, parquet: Path | None) -> None:
    from comingle.reports.page import csv_text, sheet_of, user_records
    from comingle.reports.runs import find_runs
    from comingle.utils.records import write_bytes, write_text

    records = user_records(find_runs([run]))
    if csv is not None:
        write_text(csv, csv_text(sheet_of(records)))
        console.print(f"{csv}  {len(records)} rows", highlight=False)
    if parquet is not None:
        write_bytes(parquet, _parquet(records))
        console.print(f"{parquet}  {len(records)} rows", highlight=False)


def _write_latex(run: Path, path: Path, *, everybody: bool) -> None:
    from comingle.reports.comparisons import compare_metrics, read_comparison
    from comingle.reports.tables import latex
    from comingle.utils.records import read_metrics, write_text

    if (run / "table.json").exists():
        table = read_comparison(run)
    else:
        metrics = read_metrics(run)
        table = compare_metrics([(metrics["method"], metrics)])
    write_text(path, latex(table, everybody=everybody))
    console.print(f"{path}  {len(table['methods'])} rows", highlight=False)


def _parquet(records: list[dict[str, Any]]) -> bytes:
    """The file's bytes.

    Raises:
        RunError: pandas or what it writes Parquet with is not installed.
    """
    from comingle.utils.errors import RunError

    try:
        return importlib.import_module("pandas").DataFrame.from_records(records).to_parquet(index=False)
    except ImportError:
        told = "--parquet needs the packages pandas and pyarrow: pip install pandas pyarrow; --csv needs neither"
        raise RunError(told) from None
