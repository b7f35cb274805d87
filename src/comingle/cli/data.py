"""``comingle data`` and ``comingle methods``: users of a recipe and methods, before training."""

from __future__ import annotations

from typing import Annotated

import typer

from comingle.cli.options import RecipePath, Sets, console, read_recipe, status
from comingle.data.row_files import BAD_ROWS_ADVICE, BadRowsError
from comingle.utils.errors import DataError
from comingle.utils.terminal import words


def data(
    recipe: RecipePath,
    sets: Sets = None,
    all_users: Annotated[bool, typer.Option("--all", help="Show all users, even if there are more than 24.")] = False,
) -> None:
    """Preview a recipe's users.

    Text and conversations: token counts, split sizes, overlaps and two excerpts per user. Samples: the number in each
    split. For more than 24 users the table has quantiles, and the users with the least and the most data.
    """
    read = read_recipe(recipe, sets)
    from comingle.cli.training import preview, warn_overlaps
    from comingle.data.conversations.encoding import UserAnswers, check_nonempty
    from comingle.runs.session import prepare

    try:
        with status("reading and tokenising"):
            run_data = prepare(read)
    except BadRowsError as error:
        for problem in error.problems:
            console.print(words(problem), highlight=False, soft_wrap=True)
        raise DataError(f"{len(error.problems)} rows cannot be used; {BAD_ROWS_ADVICE}") from None
    for part in preview(read, run_data, all_users=all_users):
        console.print(part, highlight=False)
    warn_overlaps(run_data)
    if run_data.users.sizes is None and issubclass(run_data.kind.user, UserAnswers):
        check_nonempty(run_data.users)


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method in full.")] = None,
) -> None:
    """List the methods, or print a method's source, placement, client, server and deviations."""
    import inspect

    from rich.table import Table

    from comingle.cli.options import console
    from comingle.methods import REGISTRY, settings_of
    from comingle.utils.errors import PluginError
    from comingle.utils.terminal import words

    if name is not None:
        settings = settings_of(name)  # raises for an unknown name
        console.print(name, style="bold", highlight=False)
        console.print(inspect.getdoc(REGISTRY[name]) or "", highlight=False)
        shown = ", ".join(f"{key}: {value}" for key, value in settings.items()) or "none"
        console.print(f"Settings: {shown}", highlight=False, soft_wrap=True)
        return
    table = Table("method", "description", box=None, pad_edge=False)
    for key in REGISTRY:
        try:
            table.add_row(key, (inspect.getdoc(REGISTRY[key]) or "").partition("\n")[0])
        except PluginError as error:
            table.add_row(key, words(str(error), "red"))
    console.print(table)
