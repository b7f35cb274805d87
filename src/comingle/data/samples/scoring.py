"""Test loss and accuracy of every user in one exact pass: every sample is counted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from comingle.data.samples.samples import SampleBank
from comingle.models.scoring import PAD, Loss, SampleScore

Forward = Callable[[Sequence[int], Float[Tensor, "slots batch *shape"]], Float[Tensor, "slots batch outputs"]]
"""Outputs for inputs; slot s uses the model of user ``rows[s]``. A user may hold several slots."""


@torch.no_grad()
def score_samples(
    forward: Forward, bank: SampleBank, rows: Sequence[int], *, loss: Loss, batch: int, slots: int | None = None
) -> list[SampleScore]:
    """Score the users ``rows`` of the bank, each with the model of the same number.

    Each user's samples are cut into jobs of at most ``batch``; ``slots`` jobs (as many as users, unless given) of about
    equal size share a pass, whosever they are, so users with long and short tests waste little on each other.

    Args:
        forward: the models, in evaluation mode.
        bank: everybody's test samples.
        rows: the users wanted; the scores come in this order.
        loss: of outputs and targets.
        batch: samples in a slot, at most.
        slots: jobs in a pass, at most.
    """
    jobs = [job for place, row in enumerate(rows) for job in _jobs(place, row, int(bank.counts[row]), batch)]
    jobs.sort(key=lambda job: -job.count)  # equal sizes together; the order is deterministic
    losses = torch.zeros(len(rows), dtype=torch.float64)
    hits = torch.zeros_like(losses)
    width = slots or max(1, len(rows))
    for start in range(0, len(jobs), width):
        group = jobs[start : start + width]
        places = torch.tensor([job.place for job in group])
        lost, hit = _score(forward, bank, group, loss)
        losses.index_add_(0, places, lost)
        hits.index_add_(0, places, hit)
    scored = zip(losses.tolist(), hits.tolist(), bank.counts[list(rows)].tolist(), strict=True)
    return [_mean(total, hit if loss.classes else None, count) for total, hit, count in scored]


@dataclass(frozen=True)
class _Job:
    """``count`` consecutive samples of a user for one slot."""

    place: int
    row: int
    first: int
    count: int


def _jobs(place: int, row: int, count: int, batch: int) -> Iterator[_Job]:
    for first in range(0, count, batch):
        yield _Job(place, row, first, min(batch, count - first))


def _score(
    forward: Forward, bank: SampleBank, group: Sequence[_Job], loss: Loss
) -> tuple[Float64[Tensor, " slots"], Float64[Tensor, " slots"]]:
    """Sums of losses and of right answers of each job, on the CPU."""
    owners = [job.row for job in group]
    inputs, targets, present = bank.take(owners, _indices(group))
    outputs = forward(owners, inputs)
    lost = loss(outputs, targets).double()
    if not loss.classes:
        return _sum(lost, present), torch.zeros(len(group), dtype=torch.float64)
    return _sum(lost, present), _sum((outputs.argmax(-1) == targets).double(), present)


def _sum(values: Float64[Tensor, "slots batch"], present: Bool[Tensor, "slots batch"]) -> Float64[Tensor, " slots"]:
    """Over the samples that are present; whatever a padded one gave, NaN too, does not count."""
    return values.masked_fill(~present, 0).sum(1).cpu()


def _indices(group: Sequence[_Job]) -> Int64[Tensor, "slots batch"]:
    """Consecutive samples of each job, filled with ``PAD`` to the longest, which comes first."""
    steps = torch.arange(group[0].count)
    first = torch.tensor([job.first for job in group])[:, None]
    count = torch.tensor([job.count for job in group])[:, None]
    return torch.where(steps < count, first + steps, PAD)


def _mean(loss: float, hits: float | None, count: int) -> SampleScore:
    if not count:
        return SampleScore(mean_loss=math.nan, accuracy=None if hits is None else math.nan, samples=0)
    return SampleScore(mean_loss=loss / count, accuracy=None if hits is None else hits / count, samples=count)
