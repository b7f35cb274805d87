"""``comingle join``: somebody comes when a federation is over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comingle.cli.options import Force, Out, Quiet, console, status


def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; it is only read.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The newcomer's name.")],
    data: Annotated[
        str,
        typer.Option("--data", metavar="<path>", help="The newcomer's data, of the kind that the run's users have."),
    ],
    out: Out = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Rounds of training alone (default: as many as the run had).")
    ] = None,
    local_step: Annotated[
        bool, typer.Option("--local-step", help="One round more, in which what was taken is trained too.")
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Give a newcomer a model out of a finished federation, without anybody else training again.

    What is shared is taken as it is; what a user has of its own is trained on the newcomer's data alone.
    """
    from comingle.reports.tables import render_joined
    from comingle.runs.api import load
    from comingle.runs.given import NOTHING
    from comingle.runs.join import join_run, newcomer
    from comingle.runs.progress import reporting
    from comingle.utils.names import as_folder
    from comingle.utils.terminal import words

    with status("opening the run"):
        opened = load(run)
    folder = out or Path("runs") / f"{run.resolve().name}-{as_folder(name)}"
    who = newcomer(opened, name, data, rounds=rounds, local_step=local_step)
    with reporting(quiet=quiet) as reporter:
        done = join_run(opened, who, folder, reporter, given=NOTHING, force=force)
    console.print(render_joined(name, done.measure, done.rows))
    console.print(words(f"{folder}/  a run of {name} alone, for export, chat and serve", "dim"))
