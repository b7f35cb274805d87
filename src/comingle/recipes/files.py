"""Recipe files: read, checked, and their mistakes said in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comingle.recipes.reading import MAX_BYTES, read_text, too_large
from comingle.recipes.sections import Recipe, complete_older, parse_recipe
from comingle.utils.errors import RecipeError
from comingle.utils.names import is_named


def load_recipe(path: str | Path, *, change: Callable[[Any], Any] = lambda content: content) -> Recipe:
    """Read a recipe file, or the recipe of a run folder. Relative paths in it are relative to the file.

    What is checked is what ``change`` makes of the file's content.

    Raises:
        RecipeError: no such file, not YAML, or a wrong recipe.
    """
    path = Path(path)
    written = path.is_dir()  # by a run, and not by a user
    if written:
        path = path / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe.{_shipped_hint(path)}")
    content = complete_older(read_yaml(path)) if written else read_yaml(path)
    return _anchor(parse_recipe(change(content), where=str(path)), path.parent)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        RecipeError: as :func:`comingle.recipes.reading.read_text`, or it cannot be read.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise too_large(size, str(path))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    return read_text(text, str(path))


def shipped_recipes() -> Path:
    """The folder of the recipes that come with comingle."""
    installed = Path(__file__).parents[1] / "shipped_recipes"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "recipes"


def _shipped_hint(path: Path) -> str:
    shipped = shipped_recipes() / path.name
    return f" Did you mean {str(shipped)!r}?" if shipped.is_file() else ""


def _anchor(recipe: Recipe, folder: Path) -> Recipe:
    """Make relative paths of the data absolute where they exist below ``folder``; leave hub names alone."""
    content = recipe.model_dump(mode="json", exclude_unset=True)

    def anchored(source: Any) -> Any:
        if isinstance(source, list):
            return [anchored(s) for s in source]
        if not isinstance(source, str) or is_named(source):
            return source
        source = os.path.expandvars(os.path.expanduser(source))
        return str((folder / source).resolve()) if os.path.exists(folder / source) else source

    content["data"] |= recipe.data.anchored(anchored)
    if os.path.exists(folder / recipe.base):
        content["base"] = anchored(recipe.base)
    return Recipe.model_validate(content)
