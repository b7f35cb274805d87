"""``comingle audit``: measure a run's leakage with attacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comingle.cli.options import Force, Quiet, console, out_option, status
from comingle.utils.errors import RecipeError


def _check_shadows(context: object, option: object, num_runs: int) -> int:
    """Check the number of reference runs that ``--shadows`` gives, and return it unchanged; the option's callback.

    Args:
        context: Not used; click passes it.
        option: Not used; click passes it.
        num_runs: Number of reference runs, whose models membership inference needs; 0 for no membership inference with
            reference models.

    Raises:
        RecipeError: The number is not 0, but less than membership inference needs.
    """
    if num_runs == 0:
        return num_runs
    from comingle.audits.canaries import MIN_REFERENCE_RUNS

    if num_runs < MIN_REFERENCE_RUNS:
        raise RecipeError(f"--shadows: got {num_runs}; allowed: 0, or a whole number from {MIN_REFERENCE_RUNS}")
    return num_runs


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Start N runs with canaries (default: enough for about 40 canaries)."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Train N rounds in each of these runs.")] = 3,
    shadows: Annotated[
        int,
        typer.Option(
            "--shadows",
            min=0,
            callback=_check_shadows,
            help="Start N reference runs on half of each user's data, at least 3; 0 for none.",
        ),
    ] = 8,
    out: Annotated[Path | None, out_option("Write to this folder (default: RUN).")] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Attack a run with the messages that the server and other users see, and report what leaks.

    Text and conversations: bound epsilon from below with canaries, and guess which texts a user's model was trained on.
    Text: recover tokens from one upload. Samples: reconstruct an input from one upload. Write audit.json and audit.md.
    """
    from comingle.audits import auditing
    from comingle.reports.audit import check_targets, conclusions, render_audit
    from comingle.runs.api import load
    from comingle.utils.terminal import literal_text

    folder = out or run
    if run.is_dir():
        check_targets(folder, force=force)  # before the run is opened, which takes a while
    with status("opening the run"):
        opened = load(run)
    results = auditing.audit(
        opened, trials=trials, rounds=rounds, shadows=shadows, out=folder, force=force, progress=not quiet
    )
    for sentence in conclusions(results):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    for table in render_audit(results):
        console.print()
        console.print(table)
    console.print(literal_text(f"{folder / 'audit.md'}  {folder / 'audit.json'}", "dim"))
