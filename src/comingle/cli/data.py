"""``comingle data``: users of a recipe, before training."""

from __future__ import annotations

from typing import Annotated

import typer

from comingle.cli.options import RecipePath, Sets, console, read_recipe, status
from comingle.data.row_files import ADVICE, BadRowsError
from comingle.utils.errors import DataError
from comingle.utils.terminal import words


def data(
    recipe: RecipePath,
    sets: Sets = None,
    everybody: Annotated[bool, typer.Option("--all", help="List everybody, also beyond 24 users.")] = False,
) -> None:
    """Preview a recipe's users: token counts, split sizes, overlaps and two samples each; or how many samples.

    Beyond 24 users the table has the distribution, and the users with least and most.
    """
    read = read_recipe(recipe, sets)
    from comingle.cli.training import preview, warn_overlaps
    from comingle.runs.session import prepare

    try:
        with status("reading and tokenising"):
            materials = prepare(read)
    except BadRowsError as error:
        for problem in error.problems:
            console.print(words(problem), highlight=False, soft_wrap=True)
        raise DataError(f"{len(error.problems)} rows cannot be used; {ADVICE}") from None
    for part in preview(read, materials, everybody=everybody):
        console.print(part, highlight=False)
    warn_overlaps(materials)
