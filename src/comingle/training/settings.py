"""The settings of a training run that are not the method's: rounds, batches, optimisers, memory, participation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from comingle.config.settings import Training
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


def portions(training: Training, device: torch.device, batch_size: int) -> Portions:
    """Fill in what the settings leave open: whole batches of as many users as a pass takes.

    The number of sequences does not depend on ``users_per_step``, so that results do not either.
    """
    room = max(1, TOKENS_PER_PASS.get(device.type, TOKENS_PER_PASS["cpu"]) // training.context)
    sequences = min(training.micro_batch or room, batch_size)
    return Portions(users=training.users_per_step or max(1, room // sequences), sequences=sequences)


def participants(training: Training, round_number: int, users: Sequence[str]) -> list[int]:
    """Which of the users take part in this round (from 0), by number, in ascending order.

    They are :func:`comingle.data.populations.drawn`.

    Raises:
        RecipeError: a list names a user who does not exist.
    """
    if isinstance(training.participation, float | int):
        count = sample_size(training.participation, len(users))
        return drawn(users, count, training.seed, round_number, "participation")
    chosen = training.participation[round_number % len(training.participation)]
    if wrong := [u for u in chosen if not 0 <= u < len(users)]:
        raise RecipeError(f"training.participation: user {wrong[0]}; allowed: 0 to {len(users) - 1}")
    return sorted(set(chosen))


def round_sizes(training: Training, users: Sequence[str]) -> set[int]:
    """How many of the users take part in a round: the numbers that occur."""
    listed = training.participation
    if isinstance(listed, float | int):
        return {sample_size(listed, len(users))}
    return {len(participants(training, number, users)) for number in range(len(listed))}


def counts_exchanged(method: Method, training: Training) -> bool:
    """Whether the models that count are those behind the exchange that ends a round, not the local ones before it."""
    return training.evaluate == "exchanged" or method.client.ends_exchanged


def exchanged_after(method: Method, training: Training, shares: bool, done: int) -> bool:
    """Whether there is an exchange after round ``done`` of a run: none after the last where local models count."""
    wanted = done < training.rounds or counts_exchanged(method, training)
    return wanted and shares and method.server.exchanges(done)


T = TypeVar("T")


def cohorts(members: Sequence[T], size: int) -> list[list[T]]:
    """Members in groups of at most ``size``."""
    return [list(members[i : i + size]) for i in range(0, len(members), size)]
