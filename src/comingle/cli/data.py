"""``comingle data`` and ``comingle methods``: users of a recipe and methods, before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from comingle.cli.options import RecipePath, Sets, console, read_recipe, status
from comingle.utils.errors import DataError
from comingle.utils.terminal import literal_text

if TYPE_CHECKING:
    from comingle.methods.base import Method, Placement


def data(
    recipe: RecipePath,
    sets: Sets = None,
    all_users: Annotated[bool, typer.Option("--all", help="Show all users, even if there are more than 24.")] = False,
) -> None:
    """Preview a recipe's users.

    Text and conversations: token counts, split sizes, overlaps and two excerpts per user. Samples: the number in each
    split. For more than 24 users the table has quantiles, and the users with the least and the most data.
    """
    loaded_recipe = read_recipe(recipe, sets)
    from comingle.cli.training import preview, warn_overlaps
    from comingle.data.conversations.encoding import UserAnswers, check_nonempty
    from comingle.data.row_files import BAD_ROWS_ADVICE, BadRowsError
    from comingle.runs.session import prepare

    try:
        with status("reading and tokenising"):
            run_data = prepare(loaded_recipe)
    except BadRowsError as error:
        for problem in error.problems:
            console.print(literal_text(problem), highlight=False, soft_wrap=True)
        raise DataError(f"{len(error.problems)} rows cannot be used; {BAD_ROWS_ADVICE}") from None
    for part in preview(loaded_recipe, run_data, all_users=all_users):
        console.print(part, highlight=False)
    warn_overlaps(run_data)
    if run_data.users.sizes is None and issubclass(run_data.kind.user, UserAnswers):
        check_nonempty(run_data.users)


def _describe_placement(method: Method) -> str:
    """Return the placement of a method: "shared: attention, generalist; local: router, specialist; frozen: base".

    Shared parts of a role are named as "attention.a", the LoRA factor A.
    """
    trained, shared = method.client.trained, method.shared  # names such as "router" or "attention.a"
    trained_roles = {_role_of(name) for name in trained}
    shared_roles = {_role_of(name) for name in shared}  # wholly or in parts
    partly_shared_roles = {_role_of(name) for name in shared if "." in name}
    is_language_model = "language" in method.applies_to and method.placement.mixture is None
    if is_language_model and (trained or shared):
        roles = _roles_of_language_model(method.placement)
    else:
        roles = sorted(trained_roles | shared_roles)

    shared_texts = [name for name in sorted(shared) if _role_of(name) in roles]
    unshared_roles = [role for role in roles if role not in shared_roles]
    local_texts = [role for role in unshared_roles if role in trained_roles]
    local_texts += [f"other parts of {role}" for role in roles if role in partly_shared_roles and role not in shared]
    frozen_texts = [role for role in unshared_roles if role not in trained_roles]
    if "base" not in roles:
        frozen_texts.append("base")
    texts_by_placement = {"shared": shared_texts, "local": local_texts, "frozen": frozen_texts}
    return "; ".join(f"{name}: {', '.join(texts) or 'none'}" for name, texts in texts_by_placement.items())


def _roles_of_language_model(placement: Placement) -> list[str]:
    """Return the roles of adapters in a language model, such as ``["attention", "generalist", "router"]``."""
    roles = ["attention"]
    if placement.generalists > 0:
        roles.append("generalist")
    if placement.specialists != 0:  # one number for all users, or one for each
        roles.append("specialist")
    if placement.routed:
        roles.append("router")
    return roles


def _role_of(name: str) -> str:
    """Return the role of a tensor name: "attention" for "attention.a"."""
    return name.partition(".")[0]


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method in full.")] = None,
) -> None:
    """List the methods, or print a method's source, placement, client, server and deviations."""
    import inspect

    from rich.table import Table

    from comingle.methods import REGISTRY, make, settings_of
    from comingle.methods.settings import allowed_values
    from comingle.utils.errors import PluginError

    if name is not None:
        settings = settings_of(name)  # raises for an unknown name
        console.print(name, style="bold", highlight=False)
        console.print(inspect.getdoc(REGISTRY[name]) or "", highlight=False)
        console.print(f"Placement: {_describe_placement(make(name))}", highlight=False, soft_wrap=True)
        allowed = allowed_values(REGISTRY[name])
        ranges = [f"{key}: {allowed[key][0]}" for key in settings if key in allowed]
        if ranges:
            console.print(f"Allowed: {'; '.join(ranges)}", highlight=False, soft_wrap=True)
        defaults = [f"{key}: {value}" for key, value in settings.items()]
        console.print(f"Settings: {', '.join(defaults) or 'none'}", highlight=False, soft_wrap=True)
        return
    table = Table("method", "description", box=None, pad_edge=False)
    for method_name in REGISTRY:
        try:
            docstring = inspect.getdoc(REGISTRY[method_name]) or ""
            table.add_row(method_name, docstring.partition("\n")[0])
        except PluginError as error:
            table.add_row(method_name, literal_text(str(error), "red"))
    console.print(table)
