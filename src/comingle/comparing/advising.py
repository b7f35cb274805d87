"""Short runs on given users: alone, together by several methods, and in smaller groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from comingle.alone import per_user
from comingle.comparing import trials
from comingle.comparing.comparing import recipes_of
from comingle.comparing.foresight import choose_seeds, foresee
from comingle.config import Recipe
from comingle.methods import make
from comingle.progress import LOADING, Reporter
from comingle.reports.advice import Advice, advise_on
from comingle.runs.given import NOTHING, Given
from comingle.runs.session import prepare, run_in
from comingle.training.kinds.base import Materials
from comingle.utils.errors import RecipeError
from comingle.utils.records import logger

PAIRS_UP_TO = 5
"""Of so many users every pair is tried; of more, everybody but one."""
OTHERS_UP_TO = 12
"""Of so many users each is left out once; of more nobody is."""
LOCAL = "local"

ByMethod = dict[str, dict[int, dict[str, Any]]]


def advise_runs(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int] | None,
    reporter: Reporter,
    *,
    grouped_by: str | None = None,
    given: Given = NOTHING,
) -> Advice:
    """What runs of the recipe say: ``local`` and ``methods`` with everybody, and ``grouped_by`` (the first of them)
    with smaller groups. Nothing is written. Without ``seeds`` there are as many as the data needs; what can be told
    before training is logged as warnings.

    Raises:
        RecipeError: fewer than two users, no method that shares anything, or a wrong setting.
        ComingleError: as :func:`comingle.runs.session.prepare`.
    """
    names = [LOCAL, *(name for name in dict.fromkeys(methods) if name != LOCAL)]
    recipes = recipes_of(recipe, names, seeds or trials.SEEDS[:1])
    chosen = list(dict.fromkeys(label for label, _ in recipes if label != LOCAL))
    first = next(seed for _, seed in recipes)
    _check(chosen, {name: recipes[name, first] for name in chosen})
    grouped = grouped_by or chosen[0]
    metrics: ByMethod = {name: {} for name in [LOCAL, *chosen]}
    groups: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    validates = any(make(one.method.name, **one.method.settings).client.needs_validation for one in recipes.values())
    with reporter.waiting(LOADING):
        materials = prepare(recipes[LOCAL, first], validates=validates, given=given)
    if len(materials.users) < 2:
        raise RecipeError(f"data: {len(materials.users)} user; advice is for two or more")
    unit = "tokens" if materials.kind.needs_base else "samples"
    chosen_seeds = choose_seeds(recipe, materials, unit) if seeds is None else seeds
    recipes = recipes_of(recipe, names, chosen_seeds)
    for line in foresee(recipe, materials, chosen_seeds, unit):
        logger.warning("advise: %s", line)
    for seed in chosen_seeds:
        if seed != first:
            with reporter.waiting(LOADING):
                materials = prepare(recipes[LOCAL, seed], base=materials.base, validates=validates, given=given)
        for name in (LOCAL, *chosen):
            metrics[name][seed] = _run(recipes[name, seed], materials, reporter, f"{name}, seed {seed}")
        for numbers in groups_of(len(materials.users)):
            some = of_users(materials, numbers)
            names = tuple(user.name for user in some.users)
            smaller = _recipe_of(recipes[grouped, seed], numbers)
            title = f"{grouped} of {len(names)} users, seed {seed}"
            groups.setdefault(names, {})[seed] = _run(smaller, some, reporter, title)
    return advise_on(metrics.pop(LOCAL), metrics, groups, grouped)


def _check(chosen: Sequence[str], recipes: Mapping[str, Recipe]) -> None:
    if not chosen:
        raise RecipeError("--methods: nothing but local; give a method that shares something, as fedavg")
    for name, recipe in recipes.items():
        method = make(recipe.method.name, **recipe.method.settings)
        if not method.shared:
            raise RecipeError(f"--methods: {name} shares nothing, so nobody could gain from anybody")
        if recipe.training.rounds == 1 and recipe.evaluation.model == "local" and not method.client.ends_exchanged:
            raise RecipeError(
                "--rounds: got 1, and with evaluation.model: local nothing is exchanged after the last round, so "
                "nobody would hear from anybody; allowed: whole numbers from 2"
            )


def groups_of(users: int) -> list[tuple[int, ...]]:
    """By their numbers, the smaller groups that are tried: pairs, or all but one."""
    everybody = range(users)
    if users < 3 or users > OTHERS_UP_TO:
        return []
    if users <= PAIRS_UP_TO:
        return list(combinations(everybody, 2))
    return [tuple(other for other in everybody if other != one) for one in everybody]


def of_users(materials: Materials, numbers: Sequence[int]) -> Materials:
    """The same materials with some of the users."""
    return materials.with_users(tuple(materials.users[number] for number in numbers))


def _recipe_of(recipe: Recipe, numbers: Sequence[int]) -> Recipe:
    changes = per_user(recipe, lambda values: [values[number] for number in numbers])
    return recipe.with_changes(changes) if changes else recipe


def _run(recipe: Recipe, materials: Materials, reporter: Reporter, title: str) -> dict[str, Any]:
    return run_in(
        None, recipe, materials, resume=False, force=False, observers=lambda clients: [reporter.watch(clients, title)]
    ).metrics
