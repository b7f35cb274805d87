"""An ordinary recipe, taken apart: what the server may know, and what each user has."""

from __future__ import annotations

from typing import Any

from comingle.config import Recipe
from comingle.federation.own import Own
from comingle.federation.patience import Patience
from comingle.federation.public import check_possible
from comingle.federation.running import Plan
from comingle.runs.session import prepare
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import RecipeError
from comingle.utils.records import expand_home


def split_recipe(recipe: Recipe, patience: Patience | None = None) -> tuple[Plan, list[Own]]:
    """The server's plan, and each user's own part; users are those whom the recipe names or its data set holds.

    Raises:
        RecipeError: users who are elsewhere cannot do what the recipe asks for.
        DataError: it cannot be found out who they are.
    """
    check_possible(recipe)
    kind = kind_of(recipe)
    names = kind.names_of(recipe)
    settings = {} if kind.needs_base else kind.settings(prepare(recipe))  # shapes and labels are all users' together
    plan = Plan(recipe=recipe, users=names, settings=settings, patience=patience or Patience())
    # Nobody takes a path from a server; on this machine it is the same for all.
    base = recipe.base if kind.needs_base and expand_home(recipe.base).exists() else None
    # Here one person has everybody's data, and may see how well it goes also with privacy.
    return plan, [Own(name=name, data=_data(recipe, name), base=base, tells="all") for name in names]


def _data(recipe: Recipe, name: str) -> Any:
    content = recipe.data.model_dump(mode="json", exclude_unset=True)
    if content.get("dataset") is not None:
        return {"dataset": content["dataset"]}
    if (content.get("users") or {}).get(name) is None:
        raise RecipeError(f"data: nothing says where user {name!r} has its own; allowed: users, dataset")
    return content["users"][name]
