"""A recipe's settings of training, as the inside has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import AUTO, OptimizerSettings, Privacy, Secure, Training
from comingle.methods import make
from comingle.runs.defending import aggregation_of
from comingle.training.kinds.base import Materials, as_settings
from comingle.training.privacy import with_noise, with_sums
from comingle.utils.errors import RecipeError, list_names
from comingle.utils.registry import load_object

_FIT = "comingle.costing.fitting:fit"
"""The search for the largest pass that fits; costs are counted on runs, so it is imported by name."""


def fitted(recipe: Recipe, materials: Materials) -> Recipe:
    """The recipe with a pass that fits, where ``runtime.users_per_step: auto`` asks for one.

    Raises:
        RecipeError: none does.
    """
    if recipe.runtime.users_per_step != AUTO:
        return recipe
    chosen = load_object(_FIT)(recipe, materials)
    return recipe.with_changes(
        {"runtime.users_per_step": chosen.users, "runtime.micro_batch": chosen.sequences}, where="runtime"
    )


def training_settings(recipe: Recipe, names: Sequence[str]) -> Training:
    """The engine's settings, with users named in ``participation`` turned into numbers.

    Raises:
        RecipeError: ``participation`` names somebody who is not a user.
    """
    section = recipe.training
    participation: Any = section.participation
    if isinstance(participation, list):
        for name in (n for members in participation for n in members):
            if name not in names:
                raise RecipeError(f"training.participation: no user {name!r}; there are: {list_names(names)}")
        participation = tuple(tuple(names.index(n) for n in members) for members in participation)
    plain = {f.name: getattr(section, f.name) for f in fields(Training) if hasattr(section, f.name)}
    training = Training(
        **{
            **plain,
            "experts": OptimizerSettings(**as_settings(section.experts, OptimizerSettings)),
            "router": OptimizerSettings(**as_settings(section.router, OptimizerSettings)),
            "participation": participation,
        },
        seed=recipe.seed,
        users_per_step=None if recipe.runtime.users_per_step == AUTO else recipe.runtime.users_per_step,
        micro_batch=recipe.runtime.micro_batch,
        evaluate=recipe.evaluation.model,
        evaluate_every=recipe.evaluation.every,
        evaluate_first=recipe.evaluation.first,
        select=recipe.evaluation.select,
        checkpoint_every=recipe.checkpoints.every,
        evaluate_users=recipe.evaluation.users,
        test_limit=test_limit_of(recipe),
        privacy=privacy_of(recipe),
        aggregation=aggregation_of(recipe),
    )
    return with_sums(with_noise(training, make(recipe.method.name, **recipe.method.settings), names), names)


def test_limit_of(recipe: Recipe) -> str:
    """Return the recipe key that limits each user's test data; empty where the kind of data has none."""
    return "data.max_test_tokens" if hasattr(recipe.data, "max_test_tokens") else ""


def privacy_of(recipe: Recipe) -> Privacy | None:
    """The recipe's section, if it has one."""
    if recipe.privacy is None:
        return None
    secure = recipe.privacy.secure_aggregation
    inner = None if secure is None else Secure(**as_settings(secure, Secure))
    return Privacy(**{**as_settings(recipe.privacy, Privacy), "secure_aggregation": inner})
