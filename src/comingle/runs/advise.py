"""Advice from short runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from comingle.config import Recipe
from comingle.data.samples.samples import SPLITS, Samples
from comingle.data.splits import REPEATED
from comingle.methods import make
from comingle.reports.advice import Advice, advise_on
from comingle.runs import SEEDS
from comingle.runs.api import per_user
from comingle.runs.compare import recipes_of
from comingle.runs.given import NOTHING, Given
from comingle.runs.progress import LOADING, Reporter
from comingle.runs.session import prepare, run_in
from comingle.training.events import JsonObject
from comingle.training.kinds.base import RunData
from comingle.utils.errors import RecipeError, list_names
from comingle.utils.records import logger

_MANY = 5
"""Seeds where intervals would be wide with three: they hold together over all users."""

_FEW_TESTED = {"tokens": 2_000, "samples": 100}
"""With less test data a user's result differs between seeds more than methods do."""

_ALIKE, _PAIRS_UP_TO = 0.9, 50
"""Share of the smaller user's data from which on two users are alike, and for how many users pairs are compared."""

_LEAST_READ = 0.25
"""Share of the training data below which short runs say little about whole ones."""


def choose_seeds(recipe: Recipe, materials: RunData, unit: str) -> tuple[int, ...]:
    """Return the seeds that advice needs: three for two users with enough test data, else five.

    One where each seed would evaluate other users, or leave others out, which cannot be compared; with ``data.seed``
    the same are left out.
    """
    if recipe.evaluation.users or (materials.skipped and recipe.data.seed is None):
        return SEEDS[:1]
    small = any(len(user.test) < _FEW_TESTED.get(unit, 0) for user in materials.users)
    return SEEDS if len(materials.users) == 2 and not small else tuple(range(_MANY))


def foresee(recipe: Recipe, materials: RunData, seeds: Sequence[int], unit: str) -> Iterator[str]:
    """Yield what will make the advice weak or wrong, one line each.

    Args:
        recipe: of the short runs.
        materials: what the users have.
        seeds: of the runs.
        unit: what the users' data is counted in.
    """
    if len(seeds) == 1:
        yield "one seed gives no intervals, so no user can be shown to gain or be harmed; give --seeds 0,1,2"
    yield from _equal(materials)
    small = [user.name for user in materials.users if len(user.test) < _FEW_TESTED.get(unit, 0)]
    if small:
        least = min(len(user.test) for user in materials.users)
        yield (
            f"little test data ({least:,} {unit} at least): {list_names(small)}; intervals will be wide, which more "
            "test data or more --seeds narrow"
        )
    yield from _barely_read(recipe, materials, unit)
    for overlap in materials.overlaps():
        yield (
            f"user {overlap.user}: {overlap.test} of {overlap.test_documents} test {materials.documents} are "
            f"{REPEATED}, so training alone will look better than it is"
        )


def _equal(materials: RunData) -> Iterator[str]:
    """Look for users with the same data, whose gain from each other is that of more steps on it."""
    pieces = _pieces(materials)
    if len(pieces) > _PAIRS_UP_TO:
        return
    what = "documents" if materials.texts else "samples"
    for (one, its), (other, theirs) in combinations(pieces.items(), 2):
        fewest = min(len(its), len(theirs))
        if fewest and (common := len(its & theirs)) >= _ALIKE * fewest:
            yield (
                f"users {one} and {other} have {common:,} of {fewest:,} {what} in common: their gain from each other "
                "is not that of another user; give each data of its own, or leave one out"
            )


def _pieces(materials: RunData) -> dict[str, frozenset[int]]:
    """Return hashes of each user's documents or samples, of all splits together: each user's are split differently."""
    if materials.texts:
        return {t.name: frozenset(map(hash, (*t.train, *t.valid, *t.test))) for t in materials.texts}
    return {
        user.name: frozenset(
            hash((one.numpy().tobytes(), target.numpy().tobytes()))
            for split in SPLITS
            if isinstance(samples := getattr(user, split), Samples)
            for one, target in zip(samples.inputs, samples.targets, strict=True)
        )
        for user in materials.present
    }


def _barely_read(recipe: Recipe, materials: RunData, unit: str) -> Iterator[str]:
    """Compare the tokens of all rounds with the training text; passes read everything in each round."""
    training = recipe.training
    if unit != "tokens" or "training.local_steps" in recipe.data.unread:
        return
    read = training.rounds * training.local_steps * training.batch_size * training.context
    typical = median(len(user.train) for user in materials.users)
    if read < _LEAST_READ * typical:
        rounds = -(-typical * _LEAST_READ // (read / training.rounds))
        yield (
            f"{training.rounds} rounds read {read:,} tokens of each user, {100 * read / typical:.0f}% of "
            f"{typical:,.0f}: too few to tell who gains; give --rounds {rounds:.0f} or more"
        )


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
    recipes = recipes_of(recipe, names, seeds or SEEDS[:1])
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


def of_users(materials: RunData, numbers: Sequence[int]) -> RunData:
    """The same materials with some of the users."""
    return materials.with_users(tuple(materials.users[number] for number in numbers))


def _recipe_of(recipe: Recipe, numbers: Sequence[int]) -> Recipe:
    changes = per_user(recipe, lambda values: [values[number] for number in numbers])
    return recipe.with_changes(changes) if changes else recipe


def _run(recipe: Recipe, materials: RunData, reporter: Reporter, title: str) -> JsonObject:
    return run_in(
        None, recipe, materials, resume=False, force=False, observers=lambda clients: [reporter.watch(clients, title)]
    ).metrics
