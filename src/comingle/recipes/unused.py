"""Settings that the users' data leave unread: refused, so that nothing is ignored in silence.

Text is read in windows by adapters on a language model, questions in passes; a task's samples are read in passes by
nets that are trained whole. A setting that only another kind reads must be left at its default, which recipes of run
folders spell out.
"""

from __future__ import annotations

from typing import Any

from comingle.recipes.sections import Recipe
from comingle.utils.errors import RecipeError


def check_used(recipe: Recipe) -> None:
    """Whether the recipe's users have the kind of data that its settings are for.

    Raises:
        RecipeError: a setting that would not be read, or a word of the other kind.
    """
    data = recipe.data
    for place, instead in data.unread.items():
        for key, value in changed(recipe, place) if not place.startswith("data.") else ():
            raise RecipeError(f"{key}: got {value!r}, which is not read for {data.label}; {instead}")
    if (got := recipe.training.weighting) not in data.weightings:
        raise RecipeError(f"training.weighting: got {got!r} for {data.label}; allowed: {', '.join(data.weightings)}")


def changed(recipe: Recipe, place: str) -> list[tuple[str, Any]]:
    """The values at a dotted key, or below it, that are not the defaults."""
    section: Any = recipe
    *path, last = place.split(".")
    for part in path:
        section = getattr(section, part)
    value, default = getattr(section, last), type(section).model_fields[last].get_default(call_default_factory=True)
    if not hasattr(value, "model_fields_set"):
        return [(place, value)] if value != default else []
    return [place_changed for name in type(value).model_fields for place_changed in changed(recipe, f"{place}.{name}")]
