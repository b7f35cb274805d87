"""``comingle cost``: what a recipe will cost, before any training."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from comingle.cli.options import RecipePath, Sets, method_settings, read_recipe


def cost(
    recipe: RecipePath,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="A method; repeat it, or separate several by commas.")
    ] = None,
    users: Annotated[
        int | None, typer.Option("--users", help="Number of users, where their text is out of reach.")
    ] = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count parameters, bytes, FLOPs and memory of a recipe before any training, and say whether it fits."""
    read = read_recipe(recipe, sets)
    from comingle.cli.compare import split_names
    from comingle.cli.progress import console, status
    from comingle.costing import plan
    from comingle.reports.costs import render_plan, verdicts

    names = split_names(",".join(method)) if method else []
    with status("counting"):
        planned = plan(read, names, users=users, for_all=method_settings(sets, names or [read.method.name])).as_dict()
    if as_json:
        print(json.dumps(planned, indent=2))
        return
    for part in render_plan(planned):
        console.print(part, highlight=False)
    for line, fits in verdicts(planned):
        console.print(line, style="green" if fits else "bold red", highlight=False)
