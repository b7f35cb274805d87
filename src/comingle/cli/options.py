"""What several verbs have in common: their options and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.errors import RecipeError

if TYPE_CHECKING:
    from comingle.recipes import Recipe

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, or a run folder.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key, as training.rounds=3.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing of progress.")]
Everybody = Annotated[bool, typer.Option("--all", help="Show every user, however many there are.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write to (default: below runs/).")]


def _not_both(context: Any, given: bool) -> bool:
    """Called for each of the two; the first that was read is among the parameters by then."""
    if given and (context.params.get("resume") or context.params.get("force")):
        raise RecipeError("--resume and --force: got both; --resume keeps what is there, --force replaces it")
    return given


Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.", callback=_not_both)]
Force = Annotated[bool, typer.Option("--force", help="Replace what is in the folder.", callback=_not_both)]


def changes(sets: list[str] | None) -> dict[str, Any]:
    """``--set`` options as a mapping; values are read as YAML.

    Raises:
        RecipeError: not of the form KEY=VALUE.
    """
    import yaml

    found: dict[str, Any] = {}
    for item in sets or []:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--set {item!r}: give KEY=VALUE, as training.rounds=3")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise RecipeError(f"--set {item!r}: the value is not YAML") from None
    return found


def read_recipe(path: Path, sets: list[str] | None, seed: int | None = None) -> Recipe:
    """A recipe with the options' changes.

    Raises:
        RecipeError: the recipe or a change is wrong.
    """
    from comingle.recipes import load_recipe

    wanted = changes(sets) | ({} if seed is None else {"seed": seed})
    recipe = load_recipe(path)
    return recipe.with_changes(wanted) if wanted else recipe


def default_folder(path: Path, method: str, seed: int) -> Path:
    """Where a run of a recipe goes: ``runs/RECIPE-METHOD-seedN``; a run folder is its own place."""
    return path if path.is_dir() else Path("runs") / f"{path.stem}-{method}-seed{seed}"
