"""The plan of a run, and values that follow from it: participants, exchanges and the size of a pass."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from comingle.config.settings import (
    ALL_USERS,
    AUTO,
    SHORTEST,
    AggregationSection,
    CheckpointSection,
    EvaluationSection,
    OptimizerSection,
    PrivacySection,
    RuntimeSection,
    TrainingSection,
)
from comingle.data.populations import draw_users
from comingle.methods.base import ROUTERS, Method, Phase
from comingle.models.lora import PeftAdapter
from comingle.privacy.accounting import Work, sample_size
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Layout

if TYPE_CHECKING:
    from comingle.privacy.secure_sum import Sums

logger = logging.getLogger("comingle")


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Settings of a run: sections of the recipe, and values that follow from them and from the users.

    Args:
        method: Method of the recipe, made once.
        training: Section of the recipe; values of users are by name.
        evaluation: Section of the recipe; ``every`` is a number once the users' data is known.
        checkpoints: Section of the recipe.
        runtime: Section of the recipe.
        privacy: Section of the recipe, with the noise multiplier that its budget allows.
        aggregation: Section of the recipe; None if the method decides how uploads are aggregated.
        seed: Seed of all random streams.
        participation: Fraction of the users drawn each round, or the users of each round by number.
        users: Names of all users, if the noise on single examples depends on the number of rounds of each user.
        sums: Settings of secure sums; None if the server sees single uploads.
        start: PEFT adapter from which all users start, or by name those from which users' local tensors start; None for
            random initial values.
        test_limit: Recipe key that limits the test data of a user; empty if the kind of data has none.
    """

    method: Method
    training: TrainingSection = field(default_factory=TrainingSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoints: CheckpointSection = field(default_factory=CheckpointSection)
    runtime: RuntimeSection = field(default_factory=RuntimeSection)
    privacy: PrivacySection | None = None
    aggregation: AggregationSection | None = None
    seed: int = 0
    participation: float | tuple[tuple[int, ...], ...] = ALL_USERS
    users: tuple[str, ...] = ()
    sums: Sums | None = None
    start: PeftAdapter | Mapping[str, PeftAdapter] | None = None
    test_limit: str = ""

    @property
    def evaluation_interval(self) -> int:
        """Number of rounds between evaluations; 5 as long as ``evaluation.every: auto`` is not resolved yet."""
        return SHORTEST if self.evaluation.every == AUTO else self.evaluation.every

    @property
    def users_per_step(self) -> int | None:
        """Number of users computed together in a pass; None to take as many as the default tokens of a pass allow."""
        return None if self.runtime.users_per_step == AUTO else self.runtime.users_per_step

    @cached_property
    def router(self) -> OptimizerSection:
        """Optimiser of routers, with the method's learning rate if ``training.router.learning_rate`` is auto."""
        settings = self.training.router
        if settings.learning_rate != AUTO:
            return settings
        return settings.model_copy(update={"learning_rate": self.method.router_rate})

    @property
    def iterations(self) -> int:
        """Largest number of local steps of a user who takes part in every round."""
        return self.training.rounds * self.training.most_local_steps

    def local_steps_of(self, user: str) -> int:
        """Return the number of local steps of a trainer, by name, in one round of training on text.

        For other data the number follows from the local epochs.
        """
        return _value_of(self.training.local_steps, user)

    def batch_size_of(self, user: str) -> int:
        """Return the number of sequences or samples of a user, by name, in one step."""
        return _value_of(self.training.batch_size, user)

    def updated(self, section: str, **values: object) -> RunPlan:
        """Return a copy with values of one section replaced, as in ``plan.updated("training", rounds=3)``."""
        new_section = getattr(self, section).model_copy(update=values)
        return replace(self, **{section: new_section})

    def max_seconds_of(self, user: str) -> float:
        """Return the seconds after which a trainer, by name, ends its local steps; infinite without limit."""
        seconds = _value_of(self.training.max_seconds_per_round, user)
        return math.inf if seconds is None else seconds

    @property
    def reports_steps(self) -> bool:
        """True if users report how many local steps they took; never with privacy."""
        if self.privacy is not None:
            return False
        has_time_limit = self.training.max_seconds_per_round is not None
        return has_time_limit or self.training.normalise_steps


def _value_of(setting: T | Sequence[T] | Mapping[str, T], user: str) -> T:
    """Return a user's value of a setting of a plan: one value for all users, or a mapping by name."""
    assert not isinstance(setting, list), "a plan has values by name: see make_plan"
    if isinstance(setting, Mapping):
        return setting[user]
    return cast(T, setting)


def check_needs(method: Method, name: str, layout: Layout) -> None:
    """Check that a model has all roles that a method needs.

    Args:
        method: The federated method of the run.
        name: Name of the model, for the error.
        layout: Layout of the trainable tensors of the model.

    Raises:
        RecipeError: A role is missing.
    """
    for role in sorted(method.placement.needs):
        if not layout.count({role}):
            raise RecipeError(f"method {method.name}: needs trainable tensors of role {role}, but {name} has none")


TOKENS_PER_PASS = {"cpu": 2048, "cuda": 65536}
"""Default number of tokens in a forward and backward pass; more tokens take more memory and no less time."""


@dataclass(frozen=True, kw_only=True)
class PassSize:
    """Number of users, and of sequences or samples of each, in one forward and backward pass."""

    users: int
    sequences: int

    def slots(self, most: int) -> tuple[int, int]:
        """Return the shape of a scoring pass that has as many sequences as a training pass.

        For example ``(16, 4)`` for a training pass of 8 users with 8 sequences each and ``most=16``.

        Args:
            most: Largest number of sequences per slot; a slot is a place for the sequences of one model.

        Returns:
            Number of sequences per slot, and number of slots.
        """
        sequences_of_pass = self.users * self.sequences
        sequences_per_slot = min(most, sequences_of_pass)
        num_slots = max(1, sequences_of_pass // sequences_per_slot)
        return sequences_per_slot, num_slots


def pass_size(plan: RunPlan, device: torch.device, batch_size: int) -> PassSize:
    """Return how many users are trained at once in a forward and backward pass, and how many sequences of each.

    By default these are whole batches of as many users as :data:`TOKENS_PER_PASS` allows. A batch that does not fit is
    split into micro-batches. The number of sequences does not depend on ``users_per_step``, so neither do results.

    Args:
        plan: Plan of the run; ``runtime.micro_batch`` and ``runtime.users_per_step`` replace the defaults.
        device: Device of the model.
        batch_size: Sequences in a batch of one user.
    """
    tokens_of_pass = TOKENS_PER_PASS.get(device.type, TOKENS_PER_PASS["cpu"])
    sequences_of_pass = max(1, tokens_of_pass // plan.training.context)
    most_sequences = plan.runtime.micro_batch or sequences_of_pass
    sequences_per_user = min(most_sequences, batch_size)
    users = plan.users_per_step or max(1, sequences_of_pass // sequences_per_user)
    return PassSize(users=users, sequences=sequences_per_user)


def participants(plan: RunPlan, round_number: int, users: Sequence[str]) -> list[int]:
    """Return the participants of a round by number, in ascending order.

    Args:
        plan: Settings of the run, in the form that training uses.
        round_number: The round, counted from 0.
        users: Names of all users.
    """
    return selected(plan.participation, plan.seed, round_number, users)


def selected(
    participation: float | tuple[tuple[int, ...], ...], seed: int, round_number: int, users: Sequence[str]
) -> list[int]:
    """Return the users that a fraction or a list per round selects, by number, in ascending order.

    A fraction is drawn by :func:`comingle.data.populations.draw_users`.

    Args:
        participation: Fraction of the users, or the numbers of the users of each round; lists are cycled.
        seed: Seed of the run.
        round_number: The round, counted from 0.
        users: Names of all users.

    Raises:
        RecipeError: A list contains a user that does not exist.
    """
    if isinstance(participation, float | int):
        count = sample_size(participation, len(users))
        return draw_users(users, count, seed, round_number, "participation")
    users_of_round = participation[round_number % len(participation)]
    for user in users_of_round:
        if not 0 <= user < len(users):
            raise RecipeError(f"training.participation: got user {user}; allowed: 0 to {len(users) - 1}")
    return sorted(set(users_of_round))


def work_of(plan: RunPlan, name: str, *, examples: int, local_steps: int) -> Work:
    """Return a user's numbers of examples, noisy steps and rounds in a run, from which its privacy loss follows.

    Args:
        plan: Settings of the run, in the form that training uses.
        name: Name of the user.
        examples: Number of its training examples.
        local_steps: Number of its local steps in a round.
    """
    steps_per_round = 0  # optimizer steps on shared tensors
    for phase in plan.method.sharing:  # the phases that train shared tensors
        # A phase with ``every=3`` is in at most 4 of 10 local steps: round up.
        local_steps_of_phase = -(-local_steps // phase.every)
        steps_per_round += phase.steps * local_steps_of_phase
    rounds_by_user = _rounds_of_users(plan.participation, plan.seed, plan.training.rounds, plan.users)
    return Work(examples=examples, batch=plan.batch_size_of(name), steps=steps_per_round, rounds=rounds_by_user[name])


def warn_of_untrained(plan: RunPlan, local_steps: int) -> None:
    """Warn, once per process, of each phase that no user reaches in the whole run (:func:`untrained_phases`).

    Args:
        plan: Settings of the run, in the form that training uses.
        local_steps: Largest number of local steps of a user in one round.
    """
    for phase in untrained_phases(plan, local_steps):
        _warn_once(plan.method.name, _names_of(phase), phase.every, plan.training.rounds, local_steps)


def untrained_entry(plan: RunPlan, local_steps: int) -> dict[str, list[str]]:
    """Return the roles that no phase of the run reaches, to merge into its metrics.

    Args:
        plan: Settings of the run, in the form that training uses.
        local_steps: Largest number of local steps of a user in one round.

    Returns:
        For example ``{"untrained": ["router"]}``; empty if all roles are trained, or the method trains none.
    """
    if not plan.method.trains:
        return {}
    roles = [_names_of(phase) for phase in untrained_phases(plan, local_steps)]
    return {"untrained": roles} if roles else {}


def _names_of(phase: Phase) -> str:
    """Return the roles that a phase trains, such as ``"generalist, specialist"``."""
    return ", ".join(sorted(phase.roles))


def untrained_phases(plan: RunPlan, local_steps: int) -> list[Phase]:
    """Return the phases that no user reaches in the whole run.

    For example, a phase in every 100th local step is not reached in 5 rounds of 10 local steps.

    Args:
        plan: Settings of the run, in the form that training uses.
        local_steps: Largest number of local steps of a user in one round.
    """
    steps_of_run = plan.training.rounds * local_steps
    if steps_of_run <= 0:  # nothing to report
        return []
    placement = plan.method.placement
    has_single_expert = placement.routed and placement.generalists + placement.most_specialists < 2
    phases = []
    for phase in plan.method.client.phases:
        if has_single_expert and phase.roles <= ROUTERS:  # a single expert has no router
            continue
        if phase.every > steps_of_run:
            phases.append(phase)
    return phases


@cache
def _warn_once(method: str, roles: str, every: int, rounds: int, local_steps: int) -> None:
    """Log a warning about roles that are never trained; once per process, even if several seeds are compared."""
    steps = rounds * local_steps
    logger.warning(
        "method %s: this run has %d local steps of a user (%d rounds x %d), but %s trains only after every %d local "
        "steps, so it stays untrained; set method.router_every (in a method of your own, `Phase.every`) to at most %d, "
        "or train longer",
        method, steps, rounds, local_steps, roles, every, steps,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _rounds_of_users(
    participation: float | tuple[tuple[int, ...], ...], seed: int, rounds: int, users: tuple[str, ...]
) -> Counter[str]:
    """Return the number of rounds in which each user takes part, by name; cached, as it is needed for every user.

    Args:
        participation: Fraction of the users, or the numbers of the users of each round; lists are cycled.
        seed: Seed of the run.
        rounds: Number of rounds.
        users: Names of all users.
    """
    num_rounds_by_name: Counter[str] = Counter()
    for round_number in range(rounds):
        for user in selected(participation, seed, round_number, users):
            num_rounds_by_name[users[user]] += 1
    return num_rounds_by_name


def round_sizes(plan: RunPlan, users: Sequence[str]) -> set[int]:
    """Return the set of all numbers of participants that a round may have, such as ``{3, 5}``.

    Privacy mechanisms check with it that every round has enough participants.

    Args:
        plan: Settings of the run, in the form that training uses.
        users: Names of all users.
    """
    participation = plan.participation
    if isinstance(participation, float | int):
        return {sample_size(participation, len(users))}
    one_cycle = range(len(participation))  # lists of participants repeat after this many rounds
    return {len(participants(plan, round_number, users)) for round_number in one_cycle}


def evaluates_aggregated(plan: RunPlan) -> bool:
    """Return whether users are evaluated with their models after aggregation, not with their local models before it.

    Then the users of the last round also upload, and download the aggregated model before the final evaluation.

    Args:
        plan: Plan of the run; the recipe chooses with ``evaluation.model``, unless the method needs aggregated models.
    """
    return plan.evaluation.model == "exchanged" or plan.method.client.ends_exchanged


def exchanged_after(plan: RunPlan, shares: bool, done: int) -> bool:
    """Return whether users upload after a round and the server aggregates.

    There is no exchange if users share nothing, in rounds that the method trains without one, and after the last round
    if local models are evaluated.

    Args:
        plan: Settings of the run, in the form that training uses.
        shares: Whether users share any tensors.
        done: Number of rounds that are done.
    """
    is_last = done >= plan.training.rounds
    if is_last and not evaluates_aggregated(plan):
        return False
    return shares and plan.method.server.exchanges(done)


def cohorts(items: Sequence[T], size: int) -> list[list[T]]:
    """Return the items in groups of at most ``size``: ``[[1, 2], [3]]`` for ``[1, 2, 3]`` and size 2."""
    groups = []
    for first in range(0, len(items), size):
        groups.append(list(items[first : first + size]))
    return groups
