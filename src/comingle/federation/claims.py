"""How much a user may say that it has: on what a user claims depends how fast everybody's learning rate decays."""

from __future__ import annotations

from collections.abc import Mapping

from comingle.config import Recipe
from comingle.federation.public import House
from comingle.privacy.noise import Work
from comingle.training.privacy import work_of
from comingle.utils.errors import MessageError


def counts_samples(recipe: Recipe) -> bool:
    """Whether users pass over what they have; else all take the iterations that the recipe says."""
    return "training.local_steps" in type(recipe.data).unread


def most_steps(house: House, max_samples: int) -> int:
    """Local iterations of a round that a user may have: ``local_epochs`` passes over at most so many samples."""
    training = house.training
    if not counts_samples(house.recipe):
        return training.local_steps
    return training.local_epochs * max(1, -(-max_samples // training.batch_size))


def works_of(house: House, examples: Mapping[str, int]) -> dict[str, Work]:
    """What each user does, where privacy hides examples, of which these have said that they have so many."""
    training, method = house.training, house.method
    return {
        name: work_of(training, method, name, examples=count, iterations=most_steps(house, count))
        for name, count in examples.items()
    }


def check_steps(steps: int, house: House, max_samples: int) -> None:
    """Whether a user may have so many local iterations in a round.

    Raises:
        MessageError: it may not.
    """
    most = most_steps(house, max_samples)
    if not counts_samples(house.recipe) and steps != most:
        raise MessageError(f"answer: says that it takes {steps:,} local steps; the recipe's are {most:,}")
    if not steps <= most:
        why = f"allowed: up to {most:,} (network.max_samples is {max_samples:,})"
        raise MessageError(f"answer: says that it takes {steps:,} local steps; {why}")
