"""What a recipe says of hostile users, and whether its method can do so."""

from __future__ import annotations

from comingle.config import Recipe
from comingle.config.settings import Aggregation, Privacy
from comingle.methods.base import Method
from comingle.privacy.robust import check_robust
from comingle.training.kinds.base import as_settings


def aggregation_of(recipe: Recipe) -> Aggregation | None:
    """The recipe's rule; None where it is the mean."""
    if recipe.aggregation.rule == Aggregation.rule:
        return None
    return Aggregation(**as_settings(recipe.aggregation, Aggregation))


def check_aggregation(recipe: Recipe, method: Method, privacy: Privacy | None) -> None:
    """Whether the rule is one for the method and the other settings.

    Raises:
        RecipeError: it is not.
    """
    if (aggregation := aggregation_of(recipe)) is not None:
        settings = {"weighting": recipe.training.weighting, "select": recipe.evaluation.select}
        check_robust(method, aggregation, privacy=privacy, **settings)
