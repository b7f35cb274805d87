"""Advice from short runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from comingle.config import Recipe
from comingle.data.samples.samples import SPLITS, Samples
from comingle.data.splits import OVERLAP_PHRASE
from comingle.methods import make
from comingle.reports.advice import Advice, advise_on
from comingle.runs import METHODS, METHODS_FOR_NETS, SEEDS
from comingle.runs.api import changes_for_users
from comingle.runs.compare import recipes_of
from comingle.runs.given import NOTHING, Given
from comingle.runs.progress import Reporter, loading
from comingle.runs.session import prepare, run_in
from comingle.training.client import Clients
from comingle.training.events import Observer
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

    Only one seed is returned if runs with several seeds could not be compared, because each seed draws the users to
    evaluate, or because each seed splits the data anew, and so skips other users for too little data.

    Args:
        recipe: The recipe of the short runs.
        run_data: The base model and the users' data.
        unit: The unit of the users' data, ``tokens``, ``conversations`` or ``samples``.
    """
    draws_evaluated_users = recipe.evaluation.users is not None
    skips_by_seed = len(run_data.skipped) > 0 and recipe.data.seed is None
    if draws_evaluated_users or skips_by_seed:
        return SEEDS[:1]
    enough_test_data = _FEW_TESTED.get(unit, 0)
    has_small_user = any(len(user.test) < enough_test_data for user in run_data.users)
    if len(run_data.users) == 2 and not has_small_user:
        return SEEDS
    return tuple(range(_MANY_SEEDS))


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
    enough_test_data = _FEW_TESTED.get(unit, 0)
    small_users = [user.name for user in run_data.users if len(user.test) < enough_test_data]
    if small_users:
        smallest_test = min(len(user.test) for user in run_data.users)
        yield (
            f"little test data (from {smallest_test:,} {unit}): {list_names(small_users)}; intervals will be wide; "
            "give more test data or more --seeds to narrow them"
        )
    yield from _warn_of_short_runs(recipe, run_data, unit)
    for overlap in run_data.overlaps():
        yield (
            f"user {overlap.user}: {overlap.test} of {overlap.test_documents} test {run_data.documents} are "
            f"{OVERLAP_PHRASE}, so local training will look better than it is"
        )


def _warn_of_equal_users(run_data: RunData) -> Iterator[str]:
    """Yield a warning for each pair of users with mostly the same data, unless there are more than 50 users.

    Such users gain from each other only because together they take more steps on this data.
    """
    hashes_by_user = _hashes_of_users(run_data)
    if len(hashes_by_user) > _MAX_COMPARED:  # the number of pairs grows quadratically
        return
    items = "documents" if run_data.texts else "samples"
    for one, other in combinations(hashes_by_user, 2):
        num_items = min(len(hashes_by_user[one]), len(hashes_by_user[other]))  # of the smaller user
        num_common = len(hashes_by_user[one] & hashes_by_user[other])
        if num_items > 0 and num_common >= _EQUAL_SHARE * num_items:
            yield (
                f"users {one} and {other} have {num_common:,} of {num_items:,} {items} in common, so their gain is "
                "not a gain from another user's data; give each user different data, or leave one out"
            )


def _hashes_of_users(run_data: RunData) -> dict[str, frozenset[int]]:
    """Return hashes of each user's documents or samples, of all splits together, by user name.

    They show how much data two users have in common. Data that is neither text nor samples has no hashes.

    Args:
        run_data: The data of the users, as texts if they have texts.
    """
    hashes_by_user: dict[str, frozenset[int]] = {}
    if run_data.texts:
        for text in run_data.texts:
            documents = (*text.train, *text.valid, *text.test)
            hashes_by_user[text.name] = frozenset(hash(document) for document in documents)
        return hashes_by_user
    for user in run_data.present:  # users whose data is on this machine
        hashes_of_user: set[int] = set()
        for split in SPLITS:
            samples = getattr(user, split)
            if not isinstance(samples, Samples):  # other kinds of data are not compared
                continue
            for x, y in zip(samples.inputs, samples.targets, strict=True):
                hashes_of_user.add(hash((x.numpy().tobytes(), y.numpy().tobytes())))
        hashes_by_user[user.name] = frozenset(hashes_of_user)
    return hashes_by_user


def _warn_of_short_runs(recipe: Recipe, run_data: RunData, unit: str) -> Iterator[str]:
    """Yield a warning if all rounds together read less than a quarter of a typical user's training text.

    Runs that train in epochs read all of it in each round.

    Args:
        recipe: The recipe of the runs.
        run_data: The users' data.
        unit: The unit of the data; without tokens there is no warning.
    """
    training = recipe.training
    trains_in_epochs = "training.local_steps" in recipe.data.unread  # only training in epochs ignores this key
    if unit != "tokens" or trains_in_epochs:
        return
    tokens_read = training.rounds * training.most_local_steps * training.largest_batch_size * training.context
    train_tokens = median(len(user.train) for user in run_data.users)
    if tokens_read < _MIN_SHARE_READ * train_tokens:  # less than a quarter
        tokens_per_round = tokens_read / training.rounds
        rounds_needed = math.ceil(train_tokens * _MIN_SHARE_READ / tokens_per_round)
        percent = 100 * tokens_read / train_tokens
        yield (
            f"{training.rounds} rounds read {tokens_read:,} tokens of each user, {percent:.0f}% of "
            f"{train_tokens:,.0f}: too few to see who gains; give --rounds {rounds_needed} or more"
        )


PAIRS_UP_TO = 5
"""Up to this number of users every pair trains; with more users, each group of all users but one."""
OTHERS_UP_TO = 12
"""Above this number of users no smaller groups train, which would take too many runs."""
LOCAL = "local"
"""Method with which others are compared: each user trains alone."""

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

    The smaller groups (:func:`groups_of`) show which users gain from which others. Nothing is written.

    Args:
        recipe: The recipe of the short runs.
        methods: Names of methods to compare with ``local``. None: ``METHODS``, or ``METHODS_FOR_NETS`` for samples.
        seeds: The seeds of the runs. None: as many as the data needs (:func:`choose_seeds`).
        reporter: Shows progress to the user of the command.
        grouped_by: The method that also trains smaller groups. None: the first of ``methods``.
        given: Objects that a program passes instead of names and paths in the recipe.

    Raises:
        RecipeError: There are fewer than two users, no method shares anything, or a setting is wrong.
        ComingleError: The base or the users' data cannot be used.
    """
    if methods is None:
        methods = METHODS if kind_of(recipe).needs_base else METHODS_FOR_NETS
    names = list(dict.fromkeys([LOCAL, *methods]))
    # Recipes by method and seed. One seed suffices to check them before the data is read; the data then determines
    # how many seeds are needed.
    recipes = recipes_of(recipe, names, seeds or SEEDS[:1])
    compared = list(dict.fromkeys(method for method, _seed in recipes if method != LOCAL))
    first_seed = next(seed for _method, seed in recipes)
    _check_methods({method: recipes[method, first_seed] for method in compared})
    group_method = grouped_by or compared[0]
    metrics: ByMethod = {method: {} for method in [LOCAL, *compared]}
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
        for method in [LOCAL, *compared]:
            title = f"{method}, seed {seed}"
            metrics[method][seed] = _run_and_measure(recipes[method, seed], run_data, reporter, title)
        recipe_for_all_users = recipes[group_method, seed].for_users(run_data.users.names)
        for user_names, result in _run_groups(recipe_for_all_users, run_data, reporter, group_method):
            group_metrics.setdefault(user_names, {})[seed] = result
    metrics_of_local = metrics.pop(LOCAL)
    return advise_on(metrics_of_local, metrics, group_metrics, group_method)


def _run_groups(
    recipe: Recipe, run_data: RunData, reporter: Reporter, method: str
) -> Iterator[tuple[tuple[str, ...], JsonObject]]:
    """Train groups of some of the users, such as each pair; yield the users' names and the metrics of each run.

    The advice compares them with the run of all users, to tell which users help which others. :func:`groups_of` chooses
    the groups.

    Args:
        recipe: The recipe of all users, with values by user as lists, such as ``adapters.rank: [8, 4, 8]``.
        run_data: The base model and the data of all users.
        reporter: Shows progress to the user of the command.
        method: Label of the recipe's method, which is shown with the progress.
    """
    for user_numbers in groups_of(len(run_data.users)):
        group_data = select_users(run_data, user_numbers)
        user_names = tuple(user.name for user in group_data.users)
        group_recipe = _recipe_of_group(recipe, user_numbers)
        title = f"{method} of {len(user_names)} users, seed {recipe.seed}"
        yield user_names, _run_and_measure(group_recipe, group_data, reporter, title)


def _check_methods(recipes: Mapping[str, Recipe]) -> None:
    """Check that methods can show a gain from other users.

    Args:
        recipes: The recipe of each method other than ``local``.

    Raises:
        RecipeError: There are no methods, a method shares no parameters, or with a single round a method is evaluated
            before its first exchange.
    """
    if not recipes:
        raise RecipeError("--methods: got only local; give a method that shares parameters, such as fedavg")
    for name, recipe in recipes.items():
        method = make(recipe.method.name, **recipe.method.settings)
        if not method.shared:
            raise RecipeError(f"--methods: {name} shares nothing, so users cannot gain from each other; leave it out")
        # With `ends_exchanged`, the last evaluation is after the exchange, whatever `evaluation.model` says.
        is_evaluated_before_exchange = recipe.evaluation.model == "local" and not method.client.ends_exchanged
        if recipe.training.rounds == 1 and is_evaluated_before_exchange:
            raise RecipeError(
                "--rounds: got 1; allowed: whole numbers from 2, because with evaluation.model: local nothing is "
                "exchanged after the last round"
            )


def groups_of(num_users: int) -> list[tuple[int, ...]]:
    """Return the groups of users that train in addition to the run of all users, as tuples of user numbers.

    With three to five users, every pair is a group: ``[(0, 1), (0, 2), (1, 2)]``. With six to twelve users, each group
    leaves out one user. With fewer or more users there are no groups.
    """
    numbers = range(num_users)
    if num_users < 3 or num_users > OTHERS_UP_TO:
        return []
    if num_users <= PAIRS_UP_TO:
        return list(combinations(numbers, 2))
    groups: list[tuple[int, ...]] = []
    for left_out in numbers:
        groups.append(tuple(number for number in numbers if number != left_out))
    return groups


def select_users(run_data: RunData, numbers: Sequence[int]) -> RunData:
    """Return the data of the users with these numbers."""
    return run_data.with_users(run_data.users.select(numbers))


def _recipe_of_group(recipe: Recipe, numbers: Sequence[int]) -> Recipe:
    """Return the recipe for a run of some of its users.

    Args:
        recipe: The recipe of all users, with values by user as lists, such as ``adapters.rank: [8, 4, 8]``.
        numbers: The numbers of the users of the group, such as ``(0, 2)``, which gives ``adapters.rank: [8, 8]``.
    """

    def values_of_group(values: list[Any]) -> list[Any]:
        return [values[number] for number in numbers]

    changes = changes_for_users(recipe, values_of_group)
    return recipe.with_changes(changes) if changes else recipe


def _run_and_measure(recipe: Recipe, run_data: RunData, reporter: Reporter, title: str) -> JsonObject:
    """Train a recipe's method without a run folder, and return the content of a run's ``metrics.json``.

    Args:
        recipe: The recipe of the run.
        run_data: The base model and the users' data.
        reporter: Shows progress to the user of the command.
        title: Name of the run, which is shown with its progress.
    """

    def make_observers(clients: Clients) -> list[Observer]:
        return [reporter.watch(clients, title)]

    run = run_in(None, recipe, run_data, resume=False, force=False, observers=make_observers)
    return run.metrics
