"""``comingle advise``: whether training together pays, for whom and how, out of short runs."""

from __future__ import annotations

from typing import Annotated

import typer

from comingle.cli.compare import split_names, split_seeds
from comingle.cli.options import Quiet, RecipePath, Sets, console, read_recipe
from comingle.runs import METHODS, ROUNDS, shortened


def advise(
    recipe: RecipePath,
    methods: Annotated[
        str, typer.Option("--methods", help="Methods to hold against local, separated by commas.")
    ] = ",".join(METHODS),
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="Seeds, separated by commas; intervals need two (default: 3 or 5, by the data)."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of each run.")] = ROUNDS,
    sets: Sets = None,
    quiet: Quiet = False,
) -> None:
    """Say who should train alone, who gains from whom and by which method, as far as short runs show it.

    Runs local and the methods with everybody, and the first method with smaller groups: every pair of up to five users,
    all but one of up to twelve. Nothing is written.
    """
    read, names = read_recipe(recipe, sets), split_names(methods)
    numbers = None if seeds is None else split_seeds(seeds)
    from comingle.reports.advice import paragraph, render_advice
    from comingle.runs.advise import advise_runs
    from comingle.runs.progress import reporting

    short = read.with_changes(shortened(rounds))
    with reporting(quiet=quiet) as reporter:
        advice = advise_runs(short, names, numbers, reporter)
    console.print(paragraph(advice), highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(render_advice(advice))
