"""The plan of a run, made from its recipe: privacy noise, secure sums and the privacy mechanisms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from comingle.config import Recipe
from comingle.config.settings import KEY, MEMORY, AggregationSection, Terms, TrainingSection, largest, values_in
from comingle.methods.base import Method
from comingle.privacy.accounting import most_releases
from comingle.privacy.base import PrivacyMechanism
from comingle.privacy.mechanisms import calibrate, make_mechanisms, release_of
from comingle.privacy.noise import load_or_create_key, new_key
from comingle.privacy.secure_sum import Sums
from comingle.training.settings import RunPlan, exchanged_after, participants
from comingle.utils.errors import RecipeError, list_names


def make_plan(recipe: Recipe, method: Method, names: Sequence[str]) -> RunPlan:
    """Return the plan of a recipe for its users, with the noise and the secure sums that its privacy section requires.

    Args:
        recipe: Settings of the run.
        method: Method of the recipe.
        names: Names of all users, in order.

    Raises:
        RecipeError: ``participation`` names an unknown user, or no amount of noise is enough.
    """
    recipe = recipe.for_users(names)
    # The method was made before all names were known; some settings list values by user.
    placement = method.placement.for_users(names, known=recipe.data.names)
    if placement is not method.placement:
        method = replace(method, placement=placement)
    participation = recipe.training.participation
    if isinstance(participation, list):  # names of the participants of each round
        participation = _numbers_of_participants(participation, names)
    plan = RunPlan(
        method=method,
        training=training_by_name(recipe.training, names, pooled=placement.pooled),
        evaluation=recipe.evaluation,
        checkpoints=recipe.checkpoints,
        runtime=recipe.runtime,
        privacy=recipe.privacy,
        aggregation=aggregation_of(recipe),
        seed=recipe.seed,
        participation=participation,
        test_limit=test_limit_of(recipe),
    )
    plan = with_noise(plan, names)
    return with_sums(plan, names)


def _numbers_of_participants(
    participation: Sequence[Sequence[str]], names: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return the participants of each round by number, such as ``((0, 2), (1,))`` for ``[["ann", "cem"], ["bob"]]``.

    Args:
        participation: Names of the participants of each round.
        names: Names of all users, in order.

    Raises:
        RecipeError: A participant is not a user.
    """
    numbers_by_round = []
    for names_of_round in participation:
        for name in names_of_round:
            if name not in names:
                raise RecipeError(f"training.participation: no user {name!r}; allowed: {list_names(names)}")
        numbers_by_round.append(tuple(names.index(name) for name in names_of_round))
    return tuple(numbers_by_round)


def training_by_name(training: TrainingSection, names: Sequence[str], *, pooled: bool) -> TrainingSection:
    """Return the section with users' values by name instead of in their order.

    For example ``local_steps: [5, 10]`` becomes ``{"ann": 5, "bob": 10}``. The one trainer of pooled data has the
    largest number of local steps and the longest time.

    Args:
        training: The section, in which a value is one for all users or a list.
        names: Names of the users, in order.
        pooled: Whether the method pools all users' data.

    Raises:
        RecipeError: A list is not as long as there are users.
    """
    changed_values: dict[str, object] = {}
    for key in ("local_steps", "batch_size", "max_seconds_per_round"):
        values = getattr(training, key)
        if not isinstance(values, list):
            continue
        if len(values) != len(names):
            raise RecipeError(
                f"training.{key}: {len(values)} numbers for {len(names)} users; give one, or one per user"
            )
        if pooled and key != "batch_size":
            changed_values[key] = largest(values)
        else:
            changed_values[key] = dict(zip(names, values, strict=True))
    return training.model_copy(update=changed_values) if changed_values else training


def check_normalisation(recipe: Recipe, method: Method) -> None:
    """Check that uploads can be normalised by users' numbers of local steps, if ``training.normalise_steps`` is true.

    Args:
        recipe: Settings of the run.
        method: Method of the recipe.

    Raises:
        RecipeError: The recipe has privacy or a robust aggregation rule, or the method's server uses more of an upload
            than its change since the download.
    """
    if not recipe.training.normalise_steps:
        return
    setting = "training.normalise_steps: got true"
    if recipe.privacy is not None:
        raise RecipeError(f"{setting} with privacy, which hides users' numbers of local steps; allowed: false")
    if not recipe.aggregation.is_mean:
        rule = recipe.aggregation.rule
        raise RecipeError(f"{setting} with aggregation {rule}, as a hostile user may report any number; allowed: false")
    if not method.server.knows_starts:
        raise RecipeError(
            f"{setting} for {method.name}, whose server uses more of uploads than their change; allowed: false"
        )


def check_start(recipe: Recipe, method: Method) -> None:
    """Check that users of a method can start from the adapters of ``adapters.start``, which are not read.

    Args:
        recipe: The recipe.
        method: Method of the recipe.

    Raises:
        RecipeError: The method has LoRAs of clusters, or does not keep what users start from; users are on disk; one
            adapter is for users of different ranks; or adapters are for single users of a method without local LoRAs.
    """
    start, rank = recipe.adapters.start, recipe.adapters.rank
    if start is None:
        return
    if method.placement.mixture is not None:
        raise RecipeError(f"adapters.start: got it for {method.name}, whose LoRAs belong to clusters; allowed: null")
    if not method.server.keeps_adapters:
        raise RecipeError(f"adapters.start: got it for {method.name}, which makes users' LoRAs anew; allowed: null")
    if recipe.runtime.store != MEMORY:
        raise RecipeError(f"adapters.start: got it with runtime.store: {recipe.runtime.store}; allowed: {MEMORY}")
    if isinstance(start, str):
        if not isinstance(rank, int) and len(set(values_in(rank))) > 1:
            raise RecipeError(f"adapters.rank: got {rank}; allowed with one adapters.start: one for all users")
    elif method.client.trained <= method.starts_equal:
        allowed = "one adapter for all users, or a method with local LoRAs"
        raise RecipeError(f"adapters.start: got adapters by user; {method.name} shares all LoRAs; allowed: {allowed}")


def test_limit_of(recipe: Recipe) -> str:
    """Return the recipe key that limits the test data of a user, to name it in advice; empty without such a key."""
    return "data.max_test_tokens" if hasattr(recipe.data, "max_test_tokens") else ""


def aggregation_of(recipe: Recipe) -> AggregationSection | None:
    """Return the recipe's section on robust aggregation; None if uploads are averaged."""
    return None if recipe.aggregation.is_mean else recipe.aggregation


def with_noise(plan: RunPlan, users: Sequence[str]) -> RunPlan:
    """Return a plan with a noise multiplier: the given one, or the smallest with which all rounds keep to epsilon.

    With privacy of single examples each user has a multiplier of its own, which is computed later, as it depends on the
    user's number of examples. Here the plan only gets the names of the users.

    Args:
        plan: Settings of the run in the form that training uses.
        users: Names of all users.

    Raises:
        RecipeError: The accountant's package is not installed, or no amount of noise is enough.
    """
    privacy = plan.privacy
    if privacy is None:
        return plan
    if privacy.protects == "example":
        return replace(plan, users=tuple(users))
    if not privacy.noisy or privacy.noise_multiplier is not None:
        return plan
    num_releases = planned_releases(plan, users)
    multiplier = calibrate(privacy, plan.participation, len(users), num_releases)
    return replace(plan, privacy=privacy.model_copy(update={"noise_multiplier": multiplier}))


def planned_releases(plan: RunPlan, users: Sequence[str]) -> int:
    """Return how many uploads of one user the privacy noise must cover: the largest number over all users.

    If participants are drawn in secret, every round with an exchange counts for every user, as the accountant allows
    for the sampling. Otherwise only the rounds in which a user takes part count for it.

    Args:
        plan: The plan; its privacy section is not None.
        users: Names of all users.
    """
    privacy = plan.privacy
    assert privacy is not None
    num_rounds = plan.training.rounds if plan.method.trains else 0
    shares_tensors = bool(plan.method.shared)
    rounds_with_exchange = []
    for round_number in range(num_rounds):
        if exchanged_after(plan, shares_tensors, done=round_number + 1):
            rounds_with_exchange.append(round_number)
    # ``release_of`` needs a noise multiplier, which may not be known yet; ``sampled`` does not depend on it.
    any_multiplier = 1.0
    with_multiplier = privacy.model_copy(update={"noise_multiplier": privacy.noise_multiplier or any_multiplier})
    release = release_of(with_multiplier, plan.participation, len(users))
    if release.sampled:  # participants are drawn in secret
        return len(rounds_with_exchange)
    participants_by_round = [participants(plan, round_number, users) for round_number in rounds_with_exchange]
    return most_releases(participants_by_round)


def with_sums(plan: RunPlan, users: Sequence[str]) -> RunPlan:
    """Return a plan with the settings of secure sums, if the server sees only sums.

    Args:
        plan: Settings of the run in the form that training uses.
        users: Names of all users.

    Raises:
        RecipeError: A round has too few users for a sum, or the grid to which secure sums round their terms is too
            coarse for the noise.
    """
    privacy = plan.privacy
    if privacy is None or privacy.secure_aggregation is None:
        return plan
    # With noise all users have equal weights: their amounts of data would reveal something about the data.
    weighted = plan.training.weighting != "uniform" and not privacy.noisy
    sums = Sums(privacy=privacy, participation=plan.participation, users=tuple(users), weighted=weighted)
    sums.check()
    return replace(plan, sums=sums)


def client_mechanisms(plan: RunPlan) -> tuple[PrivacyMechanism, ...]:
    """Return the privacy mechanisms that a client applies, such as clipping and noising its uploads."""
    return make_mechanisms(plan.privacy, sums=plan.sums, participation=plan.participation, key=_key(plan))


def server_mechanisms(plan: RunPlan, users: Sequence[str]) -> tuple[PrivacyMechanism, ...]:
    """Return the mechanisms that the server applies to uploads: privacy noise, secure sums, robust aggregation.

    Args:
        plan: Settings of the run, in the form that training uses.
        users: Names of all users.
    """
    return make_mechanisms(
        plan.privacy,
        plan.aggregation,
        sums=plan.sums,
        participation=plan.participation,
        users=users,
        key=_key(plan),
    )


def terms_of(plan: RunPlan, run: str, done: int, size: int) -> Terms:
    """Return the public parameters of the secure sum of a round, on which users and server agree before it begins.

    Args:
        plan: Settings of the run, in the form that training uses.
        run: Identifier of the run.
        done: Number of the round, counted from 1.
        size: Number of entries of the sum, which is the number of parameters that each user shares.
    """
    assert plan.sums is not None
    names = plan.sums.users
    participants_of_round = tuple(names[user] for user in participants(plan, done - 1, names))
    return plan.sums.terms(run, done, size, participants_of_round)


def keep_key(folder: Path, *mechanisms: PrivacyMechanism, overwrite: bool = False, begun: bool = False) -> None:
    """Set the key of privacy mechanisms, which seeds their noise, to that in a folder; store a new one if it has none.

    Args:
        folder: Run folder.
        *mechanisms: Mechanisms of the client, the server or both.
        overwrite: Whether to replace the key, for a new run. Two runs with one key would draw the same users.
        begun: Whether the run has drawn noise from the key before. A missing key is then an error: a repeated round
            with other noise would reveal more.

    Raises:
        RunError: The key is damaged or missing.
    """
    if overwrite:
        key_file = folder / KEY
        key_file.unlink(missing_ok=True)
    for mechanism in mechanisms:
        if mechanism.needs_key:
            mechanism.key = load_or_create_key(folder, begun=begun)


def key_of(*mechanisms: PrivacyMechanism) -> str:
    """Return the key that seeds the noise of a run; an empty string without mechanisms.

    Args:
        *mechanisms: Privacy mechanisms of the run, which all have the same key.
    """
    if not mechanisms:
        return ""
    return mechanisms[0].key


def set_key(key: str, *mechanisms: PrivacyMechanism) -> None:
    """Set the key that seeds the noise of mechanisms, so that all processes of a run draw the same noise.

    Args:
        key: Key of the first process.
        *mechanisms: Privacy mechanisms of this process.
    """
    for mechanism in mechanisms:
        mechanism.key = key


def _key(plan: RunPlan) -> str:
    """Return a new key, which seeds the noise; derived from the seed in reproducible simulations.

    A run with a folder replaces it by the stored key (:func:`keep_key`).
    """
    is_reproducible = plan.privacy is not None and plan.privacy.noise == "reproducible"
    if is_reproducible:
        return f"seed {plan.seed}"
    return new_key()
