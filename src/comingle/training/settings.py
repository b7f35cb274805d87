"""The plan of a run, and what follows from it: participants, exchanges, and how much goes through a model at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import torch

from comingle.config.settings import (
    AUTO,
    EVERYBODY,
    SHORTEST,
    AggregationSection,
    CheckpointSection,
    EvaluationSection,
    PrivacySection,
    RuntimeSection,
    TrainingSection,
)
from comingle.data.populations import draw_users
from comingle.methods.base import Method
from comingle.privacy.accounting import Work, sample_size
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Layout

if TYPE_CHECKING:
    from comingle.privacy.secure_sum import Sums


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Settings of a run for its users: sections of the recipe, and what follows from them and from the users.

    Args:
        method: Method of the recipe, made once.
        training: Section of the recipe.
        evaluation: Section of the recipe; ``every`` is a number once the users' data is known.
        checkpoints: Section of the recipe.
        runtime: Section of the recipe.
        privacy: Section of the recipe, with the noise multiplier that its budget allows.
        aggregation: Section of the recipe; None where uploads are combined as the method says.
        seed: Seed of all random streams.
        participation: Fraction of the users drawn each round, or the users of each round by number.
        users: Names of all users, where the noise on single examples follows from how many rounds each takes part in.
        sums: Settings of secure sums; None where the server sees single uploads.
        test_limit: Recipe key that limits each user's test data; empty where the kind of data has none.
    """

    method: Method
    training: TrainingSection = field(default_factory=TrainingSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoints: CheckpointSection = field(default_factory=CheckpointSection)
    runtime: RuntimeSection = field(default_factory=RuntimeSection)
    privacy: PrivacySection | None = None
    aggregation: AggregationSection | None = None
    seed: int = 0
    participation: float | tuple[tuple[int, ...], ...] = EVERYBODY
    users: tuple[str, ...] = ()
    sums: Sums | None = None
    test_limit: str = ""

    @property
    def period(self) -> int:
        """Rounds between evaluations; the least, while the interval is not resolved."""
        return SHORTEST if self.evaluation.every == AUTO else self.evaluation.every

    @property
    def users_per_step(self) -> int | None:
        """Number of users in one pass; None for as many as fit its number of tokens."""
        return None if self.runtime.users_per_step == AUTO else self.runtime.users_per_step

    @property
    def iterations(self) -> int:
        """Local steps of a user who takes part in every round."""
        return self.training.rounds * self.training.local_steps

    def updated(self, section: str, **values: object) -> RunPlan:
        """Return a copy with values of one section replaced."""
        return replace(self, **{section: getattr(self, section).model_copy(update=values)})


def check_needs(method: Method, name: str, layout: Layout) -> None:
    """Whether the model called ``name`` has all that the method is about.

    Raises:
        RecipeError: it has not.
    """
    for role in sorted(method.placement.needs):
        if not layout.count({role}):
            raise RecipeError(f"method {method.name}: is about {role}, of which {name} has nothing that is trained")


TOKENS_PER_PASS = {"cpu": 2048, "cuda": 65536}
"""How many tokens one forward and backward pass takes by default: more does not run faster, it only needs memory."""


@dataclass(frozen=True, kw_only=True)
class Portions:
    """How many users, and how many sequences or samples of each, go through the model at once."""

    users: int
    sequences: int

    def slots(self, most: int) -> tuple[int, int]:
        """For scoring, up to ``most`` sequences in a slot, and how many slots go through at once."""
        room = self.users * self.sequences
        batch = min(most, room)
        return batch, max(1, room // batch)


def portions(plan: RunPlan, device: torch.device, batch_size: int) -> Portions:
    """Fill in what the settings leave open: whole batches of as many users as a pass takes.

    The number of sequences does not depend on ``users_per_step``, so that results do not either.
    """
    room = max(1, TOKENS_PER_PASS.get(device.type, TOKENS_PER_PASS["cpu"]) // plan.training.context)
    sequences = min(plan.runtime.micro_batch or room, batch_size)
    return Portions(users=plan.users_per_step or max(1, room // sequences), sequences=sequences)


def participants(plan: RunPlan, round_number: int, users: Sequence[str]) -> list[int]:
    """Return the numbers of the users who take part in a round (from 0), in ascending order; see :func:`selected`."""
    return selected(plan.participation, plan.seed, round_number, users)


def selected(
    participation: float | tuple[tuple[int, ...], ...], seed: int, round_number: int, users: Sequence[str]
) -> list[int]:
    """Return the numbers of the users whom a fraction or a list for each round selects, in ascending order.

    A fraction of them is :func:`comingle.data.populations.draw_users`.

    Raises:
        RecipeError: A list names a user who does not exist.
    """
    if isinstance(participation, float | int):
        count = sample_size(participation, len(users))
        return draw_users(users, count, seed, round_number, "participation")
    chosen = participation[round_number % len(participation)]
    if wrong := [u for u in chosen if not 0 <= u < len(users)]:
        raise RecipeError(f"training.participation: user {wrong[0]}; allowed: 0 to {len(users) - 1}")
    return sorted(set(chosen))


def work_of(plan: RunPlan, name: str, *, examples: int, iterations: int) -> Work:
    """Return what a user with so many examples, and so many local steps in a round, does in a whole run."""
    steps = [phase.steps * -(-iterations // phase.every) for phase in plan.method.sharing]
    rounds = _rounds_of_users(plan.participation, plan.seed, plan.training.rounds, plan.users)[name]
    return Work(examples=examples, batch=plan.training.batch_size, steps=sum(steps), rounds=rounds)


@lru_cache(maxsize=16)
def _rounds_of_users(
    participation: float | tuple[tuple[int, ...], ...], seed: int, rounds: int, users: tuple[str, ...]
) -> Counter[str]:
    """Return the number of rounds in which each user takes part."""
    taking_part = (selected(participation, seed, number, users) for number in range(rounds))
    return Counter(users[user] for chosen in taking_part for user in chosen)


def round_sizes(plan: RunPlan, users: Sequence[str]) -> set[int]:
    """How many of the users take part in a round: the numbers that occur."""
    listed = plan.participation
    if isinstance(listed, float | int):
        return {sample_size(listed, len(users))}
    return {len(participants(plan, number, users)) for number in range(len(listed))}


def counts_exchanged(plan: RunPlan) -> bool:
    """Return whether a run is judged by the models after the exchange that ends a round, not by the local ones."""
    return plan.evaluation.model == "exchanged" or plan.method.client.ends_exchanged


def exchanged_after(plan: RunPlan, shares: bool, done: int) -> bool:
    """Return whether there is an exchange after round ``done``: none after the last where local models count."""
    wanted = done < plan.training.rounds or counts_exchanged(plan)
    return wanted and shares and plan.method.server.exchanges(done)


T = TypeVar("T")


def cohorts(members: Sequence[T], size: int) -> list[list[T]]:
    """Members in groups of at most ``size``."""
    return [list(members[i : i + size]) for i in range(0, len(members), size)]
