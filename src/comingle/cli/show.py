"""``comingle show``: what a run found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comingle.cli.options import Everybody


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of a comparison.")],
    everybody: Everybody = False,
) -> None:
    """Print the results of a run or of a comparison."""
    from comingle.cli.progress import console
    from comingle.records import read_events, read_metrics
    from comingle.reports.comparisons import read_comparison
    from comingle.reports.tables import render_curve, render_run, tables_of

    if (run / "table.json").exists():
        for part in tables_of(read_comparison(run), everybody=everybody):
            console.print(part)
        return
    console.print(render_run(read_metrics(run), everybody=everybody))
    console.print(render_curve(list(read_events(run))))
