"""The settings of a training run that are not the method's: rounds, batches, optimisers, memory, participation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from comingle.config.settings import RunPlan
from comingle.data.populations import drawn
from comingle.methods.base import Method
from comingle.privacy.accounting import sample_size
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Layout


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
    """Which of the users take part in this round (from 0), by number, in ascending order.

    They are :func:`comingle.data.populations.drawn`.

    Raises:
        RecipeError: a list names a user who does not exist.
    """
    if isinstance(plan.participation, float | int):
        count = sample_size(plan.participation, len(users))
        return drawn(users, count, plan.seed, round_number, "participation")
    chosen = plan.participation[round_number % len(plan.participation)]
    if wrong := [u for u in chosen if not 0 <= u < len(users)]:
        raise RecipeError(f"training.participation: user {wrong[0]}; allowed: 0 to {len(users) - 1}")
    return sorted(set(chosen))


def round_sizes(plan: RunPlan, users: Sequence[str]) -> set[int]:
    """How many of the users take part in a round: the numbers that occur."""
    listed = plan.participation
    if isinstance(listed, float | int):
        return {sample_size(listed, len(users))}
    return {len(participants(plan, number, users)) for number in range(len(listed))}


def counts_exchanged(method: Method, plan: RunPlan) -> bool:
    """Whether the models that count are those behind the exchange that ends a round, not the local ones before it."""
    return plan.evaluation.model == "exchanged" or method.client.ends_exchanged


def exchanged_after(method: Method, plan: RunPlan, shares: bool, done: int) -> bool:
    """Whether there is an exchange after round ``done`` of a run: none after the last where local models count."""
    wanted = done < plan.training.rounds or counts_exchanged(method, plan)
    return wanted and shares and method.server.exchanges(done)


T = TypeVar("T")


def cohorts(members: Sequence[T], size: int) -> list[list[T]]:
    """Members in groups of at most ``size``."""
    return [list(members[i : i + size]) for i in range(0, len(members), size)]
