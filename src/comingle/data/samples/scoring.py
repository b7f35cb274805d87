"""Exact test loss and accuracy of every user in one pass over its samples."""

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
"""Function from users and inputs to outputs; slot s uses the model of user ``users[s]``. A user may have several."""


@torch.no_grad()
def score_samples(
    forward: Forward, bank: SampleBank, rows: Sequence[int], *, loss: Loss, batch: int, slots: int | None = None
) -> list[SampleScore]:
    """Return the mean loss and accuracy of users of the bank, each with the user's own model.

    Each user's samples are cut into jobs of at most ``batch`` samples. Jobs of similar size share a forward pass, also
    if they belong to different users, so that little computation is spent on padding. Each job takes a slot, one row of
    the batch, in which it is padded to the longest job.

    Args:
        forward: Models of all users, in evaluation mode.
        bank: Test samples of all users.
        rows: Numbers of the users to score; a user's number is its row in the bank and in the batched models.
        loss: Loss of outputs and targets.
        batch: Largest number of samples in a slot.
        slots: Largest number of jobs in a forward pass; the number of users by default.
    """
    jobs: list[_Job] = []
    for position, row in enumerate(rows):
        jobs += _split_into_jobs(position, row, int(bank.counts[row]), batch)
    jobs.sort(key=lambda job: -job.count)  # stable, hence deterministic
    loss_sums = torch.zeros(len(rows), dtype=torch.float64)  # of each user
    num_correct = torch.zeros_like(loss_sums)
    jobs_per_pass = slots or max(1, len(rows))
    for start in range(0, len(jobs), jobs_per_pass):
        jobs_of_pass = jobs[start : start + jobs_per_pass]
        job_loss_sums, job_num_correct = _score_jobs(forward, bank, jobs_of_pass, loss)
        # Add them up by user, which may have several jobs.
        positions = torch.tensor([job.position for job in jobs_of_pass])
        loss_sums.index_add_(0, positions, job_loss_sums)
        num_correct.index_add_(0, positions, job_num_correct)

    counts = bank.counts[list(rows)]
    has_accuracy = loss.classes
    scores: list[SampleScore] = []
    for loss_sum, correct, count in zip(loss_sums.tolist(), num_correct.tolist(), counts.tolist(), strict=True):
        scores.append(_mean_score(loss_sum, correct if has_accuracy else None, count))
    return scores


@dataclass(frozen=True)
class _Job:
    """Consecutive samples of one user that are scored together.

    Args:
        position: Position of the user among the users that are scored, and of its score in the result.
        row: Number of the user among all users: its row in the batched models and in the bank of samples.
        first: Index of the first sample.
        count: Number of samples.
    """

    position: int
    row: int
    first: int
    count: int


def _split_into_jobs(position: int, row: int, count: int, batch: int) -> Iterator[_Job]:
    """Split a user's samples into jobs, each of up to ``batch`` consecutive samples that are scored together.

    Args:
        position: Position of the user among the users that are scored, and of its score in the result.
        row: Number of the user among all users: its row in the batched models and in the bank of samples.
        count: Number of the user's samples.
        batch: Largest number of samples in a job.
    """
    for first in range(0, count, batch):
        yield _Job(position, row, first, min(batch, count - first))


def _score_jobs(
    forward: Forward, bank: SampleBank, jobs: Sequence[_Job], loss: Loss
) -> tuple[Float64[Tensor, " slots"], Float64[Tensor, " slots"]]:
    """Return the sum of losses and the number of correct predictions of each job, on the CPU.

    A job is a range of one user's samples. In the forward pass it is one row ("slot") of the batch, padded to the
    longest job, and goes through the model of its user.

    Args:
        forward: Models of all users, called with the user number of each slot and the inputs.
        bank: Samples of all users.
        jobs: The jobs of one forward pass, the longest first.
        loss: Loss of outputs and targets; ``loss.classes`` is true for a classification.
    """
    users = [job.row for job in jobs]  # user numbers: rows of the bank and of the batched models
    inputs, targets, is_present = bank.take(users, _sample_indices(jobs))
    outputs = forward(users, inputs)
    loss_sums = _sum_present(loss(outputs, targets).double(), is_present)
    if loss.classes:
        is_correct = outputs.argmax(-1) == targets
        num_correct = _sum_present(is_correct.double(), is_present)
    else:  # a regression, which has no correct predictions
        num_correct = torch.zeros(len(jobs), dtype=torch.float64)
    return loss_sums, num_correct


def _sum_present(
    values: Float64[Tensor, "slots batch"], is_present: Bool[Tensor, "slots batch"]
) -> Float64[Tensor, " slots"]:
    """Return each job's sum over its samples; values of padding, even NaN, are ignored.

    A job is a slot of the batch: some samples of one user, padded to the longest job.

    Args:
        values: A value for each sample of each job, such as its loss.
        is_present: False for padding.
    """
    return values.masked_fill(~is_present, 0).sum(1).cpu()


def _sample_indices(group: Sequence[_Job]) -> Int64[Tensor, "slots batch"]:
    """Return the indices of each job's samples, padded to the longest job: ``[[4, 5, 6], [0, PAD, PAD]]``.

    Args:
        group: Jobs that are scored in one pass, the longest first. Each is a range of one user's samples: ``count``
            samples from ``first`` on.
    """
    longest_count = group[0].count
    first = torch.tensor([job.first for job in group])[:, None]  # one row per job
    count = torch.tensor([job.count for job in group])[:, None]
    offsets = torch.arange(longest_count)
    return torch.where(offsets < count, first + offsets, PAD)


def _mean_score(loss_sum: float, num_correct: float | None, count: int) -> SampleScore:
    """Return the mean loss and accuracy over ``count`` samples; NaN without samples.

    Args:
        loss_sum: Sum of the losses.
        num_correct: Number of correct predictions; None for a regression, which has no accuracy.
        count: Number of samples.
    """
    mean_loss = loss_sum / count if count > 0 else math.nan
    if num_correct is None:
        return SampleScore(mean_loss=mean_loss, accuracy=None, samples=count)
    accuracy = num_correct / count if count > 0 else math.nan
    return SampleScore(mean_loss=mean_loss, accuracy=accuracy, samples=count)
