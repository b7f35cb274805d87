"""A population's recipe for one user of it, or for some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import Aggregation

PerUser = Callable[[list[Any]], Any]
"""What of a list with a value for each user of a population counts."""


def of_one_user(recipe: Recipe, value: PerUser) -> Recipe:
    """The recipe of somebody alone: ``value`` takes what counts of lists of ranks and specialists.

    Nobody else takes part in a round: no mean over others selects one, nobody is there to be summed with, or hostile.
    """
    alone = {"evaluation.select": "last", "aggregation": Aggregation.rule}
    return without_sums(recipe).with_changes({**per_user(recipe, value), **alone})


def without_sums(recipe: Recipe) -> Recipe:
    """The recipe with nothing that a user alone cannot do: of one upload there is no sum that hides it.

    Nor does it hide examples in steps of which nothing is sent.
    """
    privacy = recipe.privacy
    without = privacy is not None and (privacy.secure_aggregation is not None or privacy.mechanism == "example")
    return recipe.with_changes({"privacy": None}) if without else recipe


def per_user(recipe: Recipe, value: PerUser) -> dict[str, Any]:
    """Changes of what a recipe lists user by user; who takes part when is everybody, always."""
    changes: dict[str, Any] = {}
    if isinstance(recipe.adapters.rank, list):
        changes["adapters.rank"] = value(recipe.adapters.rank)
    specialists = recipe.method.settings.get("specialists")
    if isinstance(specialists, list):
        changes["method.settings.specialists"] = value(specialists)
    if isinstance(recipe.training.participation, list):
        changes["training.participation"] = 1.0
    return changes
