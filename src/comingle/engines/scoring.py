"""How users' models are scored: losses, perplexities, what they answer, and how much each of their experts said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from jaxtyping import Float, Int64
from torch import Tensor

from comingle.data.conversations.scoring import AnswerScore
from comingle.engines.faults import within_memory
from comingle.engines.steps import Steps
from comingle.models.scoring import Gates, SampleScore, Score

AnyScore = Score | SampleScore | AnswerScore
"""Text, samples and answers are scored alike: ``mean_loss`` and ``measures``."""

Rows = Callable[[Sequence[int]], Float[Tensor, "slots columns"]]
"""The tensors of some models, by number."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Models to be scored: the tensors of each, by number, and the trainer whose experts and rank it has."""

    rows: Rows
    owners: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores models with what trains them."""

    steps: Steps

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return self.steps.model.routed

    def examine(self, models: Models, sets: Sequence[Any], numbers: Sequence[int]) -> Sequence[AnyScore]:
        """The final score of test set i with model ``numbers[i]``, and how much each of its experts said."""
        feed = self.steps.feed
        score = partial(feed.examine, partial(self.predict, models), partial(self.generate, models), sets, numbers)
        if not self.routed:
            return score(self.steps.portions, None)
        with self.steps.model.watched() as gates:
            return score(self.steps.portions, gates)

    def score(
        self, models: Models, sets: Sequence[Any], numbers: Sequence[int], gates: Gates | None = None
    ) -> Sequence[AnyScore]:
        """Score set i, a token stream or samples, with model ``numbers[i]``."""
        return self.steps.feed.score(partial(self.predict, models), sets, numbers, self.steps.portions, gates)

    def mean_loss(self, models: Models, sets: Sequence[Any], numbers: Sequence[int]) -> float:
        """Mean loss in nats over sets."""
        return fmean(score.mean_loss for score in self.score(models, sets, numbers))

    def predict(self, models: Models, numbers: Sequence[int], batch: Tensor) -> Float[Tensor, "slots batch ..."]:
        """What model ``numbers[slot]`` makes of each slot's batch.

        Raises:
            RecipeError: there is not enough memory for it.
        """
        device, owners = self.steps.model.device, [models.owners[number] for number in numbers]
        with within_memory(self.steps.portions, len(numbers), device):
            return self.steps.model.predict(self.steps.tensors(models.rows(numbers)), owners, batch.to(device))

    def generate(
        self, models: Models, numbers: Sequence[int], prompts: Tensor, limit: int
    ) -> Int64[Tensor, "slots batch new"]:
        """How model ``numbers[slot]`` goes on after each slot's prompts."""
        tensors = self.steps.tensors(models.rows(numbers))
        return self.steps.model.generate(tensors, [models.owners[n] for n in numbers], prompts, limit)
