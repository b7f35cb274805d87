"""``comingle show``: what a run found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of a comparison.")],
) -> None:
    """Print the results of a run or of a comparison."""
    from comingle.cli.progress import console
    from comingle.records import read_events, read_metrics
    from comingle.reports.tables import read_comparison, render_comparison, render_curve, render_run

    if (run / "table.json").exists():
        console.print(render_comparison(read_comparison(run)))
        return
    console.print(render_run(read_metrics(run)))
    console.print(render_curve(list(read_events(run))))
