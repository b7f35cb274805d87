"""``comingle data`` and ``comingle methods``: users of a recipe and methods, before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from comingle.cli.options import RecipePath, Sets, console, read_recipe, status
from comingle.utils.errors import DataError
from comingle.utils.terminal import words

if TYPE_CHECKING:
    from comingle.methods.base import Method


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
    from comingle.data.row_files import BAD_ROWS_ADVICE, BadRowsError
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


def _describe_placement(method: Method) -> str:
    """Return the roles of a user's model that are shared, local and frozen, as text.

    Roles are the parts of a model. A method that works for language models is described with their roles, such as
    "attention" and "router". Other methods and mixtures are described with the roles that they train or share.
    """
    placement, trained, shared = method.placement, method.client.trained, method.shared
    if "language" not in method.applies_to or placement.mixture is not None or not trained | shared:
        existing = sorted({role.partition(".")[0] for role in trained | shared})
    else:
        roles_of_language_model = {
            "attention": True,
            "generalist": placement.generalists > 0,
            "specialist": placement.specialists != 0,
            "router": placement.routed,
        }
        existing = [role for role, exists in roles_of_language_model.items() if exists]
    # A name such as "attention.a" is a part of the role "attention", here the LoRA factor A.
    shared_texts = [role for role in sorted(shared) if role.partition(".")[0] in existing]
    partly_shared = {role.partition(".")[0] for role in shared if "." in role}
    trained_roles = {role.partition(".")[0] for role in trained}
    local = [role for role in existing if role in trained_roles and role not in shared | partly_shared]
    local += [f"other parts of {role}" for role in existing if role in partly_shared - shared]
    frozen = [role for role in existing if role not in trained_roles and role not in shared | partly_shared]
    frozen += [] if "base" in existing else ["base"]
    parts = {"shared": shared_texts, "local": local, "frozen": frozen}
    return "; ".join(f"{name}: {', '.join(of_kind) or 'none'}" for name, of_kind in parts.items())


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method in full.")] = None,
) -> None:
    """List the methods, or print a method's source, placement, client, server and deviations."""
    import inspect

    from rich.table import Table

    from comingle.cli.options import console
    from comingle.methods import REGISTRY, make, settings_of
    from comingle.methods.settings import allowed_values
    from comingle.utils.errors import PluginError
    from comingle.utils.terminal import words

    if name is not None:
        settings = settings_of(name)  # raises for an unknown name
        console.print(name, style="bold", highlight=False)
        console.print(inspect.getdoc(REGISTRY[name]) or "", highlight=False)
        console.print(f"Placement: {_describe_placement(make(name))}", highlight=False, soft_wrap=True)
        allowed = allowed_values(REGISTRY[name])
        ranges = "; ".join(f"{key}: {allowed[key][0]}" for key in settings if key in allowed)
        if ranges:
            console.print(f"Allowed: {ranges}", highlight=False, soft_wrap=True)
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
