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
from comingle.runs import METHODS, METHODS_FOR_NETS, SEEDS
from comingle.runs.api import changes_for_users
from comingle.runs.compare import recipes_of
from comingle.runs.given import NOTHING, Given
from comingle.runs.progress import Reporter, loading
from comingle.runs.session import prepare, run_in
from comingle.training.kinds.base import RunData, kind_of
from comingle.utils.errors import RecipeError, list_names
from comingle.utils.records import JsonObject, logger

_MANY_SEEDS = 5
"""Number of seeds where three would give wide intervals, which hold jointly for all users."""

_FEW_TESTED = {"tokens": 2_000, "conversations": 100, "samples": 100}
"""Test data below which a user's result differs more between seeds than between methods."""

_EQUAL_SHARE = 0.9
"""Two users count as equal if they have at least this share of the smaller one's data in common."""

_MAX_COMPARED = 50
"""Largest number of users whose pairs are compared, which takes quadratic time."""

_MIN_SHARE_READ = 0.25
"""Share of the training data that short runs must read to predict full ones."""


def choose_seeds(recipe: Recipe, run_data: RunData, unit: str) -> tuple[int, ...]:
    """Return the seeds that advice needs: three for two users with enough test data, else five.

    A single seed is returned if every seed would evaluate other users, or skip other users with too little data: such
    runs cannot be compared. (With ``data.seed`` every seed skips the same users.)

    Args:
        recipe: The recipe of the short runs.
        run_data: The base model and the users' data.
        unit: The unit of the users' data, ``tokens``, ``conversations`` or ``samples``.
    """
    if recipe.evaluation.users or (run_data.skipped and recipe.data.seed is None):
        return SEEDS[:1]
    has_small_user = any(len(user.test) < _FEW_TESTED.get(unit, 0) for user in run_data.users)
    return SEEDS if len(run_data.users) == 2 and not has_small_user else tuple(range(_MANY_SEEDS))


def warnings_before_advice(recipe: Recipe, run_data: RunData, seeds: Sequence[int], unit: str) -> Iterator[str]:
    """Yield warnings about what will make the advice weak or wrong, one line each, before any training.

    Args:
        recipe: The recipe of the short runs.
        run_data: The base model and the users' data.
        seeds: The seeds of the runs.
        unit: The unit of the users' data, ``tokens``, ``conversations`` or ``samples``.
    """
    if len(seeds) == 1:
        yield "one seed gives no intervals, so no user can be shown to gain or be harmed; give --seeds 0,1,2"
    yield from _warn_of_equal_users(run_data)
    small = [user.name for user in run_data.users if len(user.test) < _FEW_TESTED.get(unit, 0)]
    if small:
        smallest_test = min(len(user.test) for user in run_data.users)
        yield (
            f"little test data (from {smallest_test:,} {unit}): {list_names(small)}; intervals will be wide; give more "
            "test data or more --seeds to narrow them"
        )
    yield from _warn_of_short_runs(recipe, run_data, unit)
    for overlap in run_data.overlaps():
        yield (
            f"user {overlap.user}: {overlap.test} of {overlap.test_documents} test {run_data.documents} are "
            f"{REPEATED}, so local training will look better than it is"
        )


def _warn_of_equal_users(run_data: RunData) -> Iterator[str]:
    """Yield a warning for each pair of users with mostly the same data.

    Together they take more steps on this data, so they gain even though neither has data that the other lacks. With
    more than 50 users nothing is compared.
    """
    hashes = _hashes_of_users(run_data)
    if len(hashes) > _MAX_COMPARED:  # the number of pairs grows quadratically
        return
    what = "documents" if run_data.texts else "samples"
    for (one, hashes_of_one), (other, hashes_of_other) in combinations(hashes.items(), 2):
        smaller = min(len(hashes_of_one), len(hashes_of_other))
        common = len(hashes_of_one & hashes_of_other)
        if smaller and common >= _EQUAL_SHARE * smaller:
            yield (
                f"users {one} and {other} have {common:,} of {smaller:,} {what} in common, so their gain is not "
                "a gain from another user's data; give each user different data, or leave one out"
            )


def _hashes_of_users(run_data: RunData) -> dict[str, frozenset[int]]:
    """Return hashes of each user's documents or samples, of all splits together."""
    hashes: dict[str, frozenset[int]] = {}
    if run_data.texts:
        for text in run_data.texts:
            documents = (*text.train, *text.valid, *text.test)
            hashes[text.name] = frozenset(hash(document) for document in documents)
        return hashes
    for user in run_data.present:
        hashes_of_user: set[int] = set()
        for split in SPLITS:
            samples = getattr(user, split)
            if not isinstance(samples, Samples):
                continue
            for x, y in zip(samples.inputs, samples.targets, strict=True):
                hashes_of_user.add(hash((x.numpy().tobytes(), y.numpy().tobytes())))
        hashes[user.name] = frozenset(hashes_of_user)
    return hashes


def _warn_of_short_runs(recipe: Recipe, run_data: RunData, unit: str) -> Iterator[str]:
    """Yield a warning if all rounds together read too little of the training text of a typical user.

    Runs that train in epochs read all of it in each round, so there is nothing to warn of.
    """
    training = recipe.training
    trains_in_epochs = "training.local_steps" in recipe.data.unread  # such data ignores the number of local steps
    if unit != "tokens" or trains_in_epochs:
        return
    tokens_read = training.rounds * training.most_local_steps * training.largest_batch_size * training.context
    train_tokens = median(len(user.train) for user in run_data.users)
    if tokens_read < _MIN_SHARE_READ * train_tokens:
        tokens_per_round = tokens_read / training.rounds
        rounds = -(-train_tokens * _MIN_SHARE_READ // tokens_per_round)  # rounded up
        percent = 100 * tokens_read / train_tokens
        yield (
            f"{training.rounds} rounds read {tokens_read:,} tokens of each user, {percent:.0f}% of "
            f"{train_tokens:,.0f}: too few to see who gains; give --rounds {rounds:.0f} or more"
        )


PAIRS_UP_TO = 5
"""Up to this number of users every pair trains; with more users, each group of all users but one."""
OTHERS_UP_TO = 12
"""Above this number of users no smaller groups train, which would take too many runs."""
LOCAL = "local"

ByMethod = dict[str, dict[int, dict[str, Any]]]
"""Metrics of each run, by method and seed."""


def advise_runs(
    recipe: Recipe,
    methods: Sequence[str] | None,
    seeds: Sequence[int] | None,
    reporter: Reporter,
    *,
    grouped_by: str | None = None,
    given: Given = NOTHING,
) -> Advice:
    """Run ``local`` and ``methods`` with all users, and one method with smaller groups of users; return advice.

    Results of smaller groups show which users gain from which. Nothing is written. Problems that are visible before
    training are logged as warnings.

    Args:
        recipe: The recipe of the short runs.
        methods: Names of methods to compare with ``local``. None: ``METHODS``, or ``METHODS_FOR_NETS`` for samples.
        seeds: The seeds of the runs. None: as many as the data needs (:func:`choose_seeds`).
        reporter: The progress reporter.
        grouped_by: The method that also trains smaller groups. None: the first of ``methods``.
        given: Objects that a program passes instead of names and paths in the recipe.

    Raises:
        RecipeError: There are fewer than two users, no method shares anything, or a setting is wrong.
        ComingleError: The base or the users' data cannot be used.
    """
    if methods is None:
        methods = METHODS if kind_of(recipe).needs_base else METHODS_FOR_NETS
    names = [LOCAL, *(name for name in dict.fromkeys(methods) if name != LOCAL)]
    # Keys are pairs of a method's label (its name, or NAME:KEY=VALUE) and a seed. One seed suffices to check the
    # recipes; the number of seeds that the data needs is known only once the data is read.
    recipes = recipes_of(recipe, names, seeds or SEEDS[:1])
    compared = list(dict.fromkeys(label for label, _ in recipes if label != LOCAL))
    first_seed = next(seed for _, seed in recipes)
    _check_methods(compared, {name: recipes[name, first_seed] for name in compared})
    group_method = grouped_by or compared[0]
    metrics: ByMethod = {name: {} for name in [LOCAL, *compared]}
    group_metrics: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}  # by the group's user names and seed
    # All runs of a seed share the data, so it has validation data if any of the methods needs some.
    validates = any(make(run.method.name, **run.method.settings).client.needs_validation for run in recipes.values())
    with reporter.waiting(loading(recipe)):
        run_data = prepare(recipes[LOCAL, first_seed], validates=validates, given=given)
    if len(run_data.users) < 2:
        raise RecipeError(f"data: got {len(run_data.users)} user; allowed: 2 or more")
    unit = {"text": "tokens", "conversations": "conversations"}.get(run_data.kind.name, "samples")
    chosen_seeds = choose_seeds(recipe, run_data, unit) if seeds is None else seeds
    recipes = recipes_of(recipe, names, chosen_seeds)
    for line in warnings_before_advice(recipe, run_data, chosen_seeds, unit):
        logger.warning("advise: %s", line)
    for seed in chosen_seeds:
        if seed != first_seed:
            with reporter.waiting(loading(recipe)):
                run_data = prepare(recipes[LOCAL, seed], base=run_data.base, validates=validates, given=given)
        for name in (LOCAL, *compared):
            metrics[name][seed] = _run_and_measure(recipes[name, seed], run_data, reporter, f"{name}, seed {seed}")
        group_recipe_of_all = recipes[group_method, seed].for_users(run_data.users.names)
        for numbers in groups_of(len(run_data.users)):
            group_data = of_users(run_data, numbers)
            user_names = tuple(user.name for user in group_data.users)
            group_recipe = _recipe_of_group(group_recipe_of_all, numbers)
            title = f"{group_method} of {len(user_names)} users, seed {seed}"
            result = _run_and_measure(group_recipe, group_data, reporter, title)
            group_metrics.setdefault(user_names, {})[seed] = result
    return advise_on(metrics.pop(LOCAL), metrics, group_metrics, group_method)


def _check_methods(chosen: Sequence[str], recipes: Mapping[str, Recipe]) -> None:
    """Check that the methods can show a gain from other users.

    Args:
        chosen: The methods without ``local``.
        recipes: The recipe of each of them.

    Raises:
        RecipeError: There are no methods, a method shares no parameters, or a method shares them only after the only
            evaluation of a run of one round.
    """
    if not chosen:
        raise RecipeError("--methods: got only local; give a method that shares parameters, such as fedavg")
    for name, recipe in recipes.items():
        method = make(recipe.method.name, **recipe.method.settings)
        if not method.shared:
            raise RecipeError(f"--methods: {name} shares nothing, so users cannot gain from each other; leave it out")
        # `ends_exchanged`: the last evaluation is after the exchange, whatever `evaluation.model` says.
        if recipe.training.rounds == 1 and recipe.evaluation.model == "local" and not method.client.ends_exchanged:
            raise RecipeError(
                "--rounds: got 1; allowed: whole numbers from 2, because with evaluation.model: local nothing is "
                "exchanged after the last round"
            )


def groups_of(num_users: int) -> list[tuple[int, ...]]:
    """Return the groups of users that train in addition to the run of all users, as tuples of user numbers.

    With three to five users, every pair is a group. With six to twelve users, each group leaves out one user. With
    fewer or more users there are no groups.
    """
    numbers = range(num_users)
    if num_users < 3 or num_users > OTHERS_UP_TO:
        return []
    if num_users <= PAIRS_UP_TO:
        return list(combinations(numbers, 2))
    return [tuple(other for other in numbers if other != left_out) for left_out in numbers]


def of_users(run_data: RunData, numbers: Sequence[int]) -> RunData:
    """Return the data with some of the users."""
    return run_data.with_users(run_data.users.select(numbers))


def _recipe_of_group(recipe: Recipe, numbers: Sequence[int]) -> Recipe:
    """Return the recipe with values for these users only in its lists with a value per user."""
    changes = changes_for_users(recipe, lambda values: [values[number] for number in numbers])
    return recipe.with_changes(changes) if changes else recipe


def _run_and_measure(recipe: Recipe, run_data: RunData, reporter: Reporter, title: str) -> JsonObject:
    """Train a recipe's method without a run folder and return the metrics; ``title`` is shown with the progress."""
    return run_in(
        None, recipe, run_data, resume=False, force=False, observers=lambda clients: [reporter.watch(clients, title)]
    ).metrics
