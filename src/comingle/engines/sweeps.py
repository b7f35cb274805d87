"""What users' training data says as a whole, without a step being taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.engines.feeds import Feed
from comingle.engines.training import Portions
from comingle.models.windows import PAD

Losses = Callable[[Any], Float[Tensor, "users models batch ..."]]
"""Maps a batch of each user to its losses under several models."""


@dataclass(frozen=True)
class TrainSweep:
    """Batches that stand for the training data of a cohort, to be asked about again and again."""

    feed: Feed
    users: Sequence[int]
    round_number: int
    portions: Portions
    device: torch.device

    @cached_property
    def _batches(self) -> list[Int[Tensor, "users batch ..."]]:
        drawn = self.feed.sweep(self.users, self.round_number)
        return [part for batch in drawn for part in batch.split(self.portions.sequences, dim=1)]

    def answers(self, losses: Losses) -> list[Float[Tensor, "users models batch ..."]]:
        """Losses batch after batch, 0 where there is nothing."""
        return [losses(self.feed.read("train", self.users, drawn.to(self.device))) for drawn in self._batches]

    def responsibilities(
        self, prior: Float[Tensor, "users models"], losses: Losses
    ) -> list[Float[Tensor, "models samples"]]:
        """``q_m(s) ~ prior_m exp(-loss_m(s))`` of every training sample of each user, in their order."""
        shares = (prior.log().unsqueeze(2) - torch.cat(self.answers(losses), 2)).softmax(1)
        counts = torch.cat([drawn != PAD for drawn in self._batches], 1).sum(1).tolist()
        return [of_user[:, :count] for of_user, count in zip(shares, counts, strict=True)]

    def means(self, losses: Losses) -> Float[Tensor, "users models"]:
        """Mean losses."""
        total = torch.stack([batch_losses.flatten(2).sum(2) for batch_losses in self.answers(losses)]).sum(0)
        counts = torch.stack([self.feed.counted(drawn).cpu() for drawn in self._batches]).sum(0)
        return total / counts.to(total).unsqueeze(1)
