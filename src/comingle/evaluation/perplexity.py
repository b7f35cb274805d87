"""Test perplexity in one exact pass: every token of a stream but the first is predicted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.data.batches import PAD, evaluation_windows

Losses = Callable[[Sequence[int], Int[Tensor, "slots batch window"]], Float[Tensor, "slots batch context"]]
"""Loss in nats of every position; entry s of the first dimension uses model number ``models[s]``."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sum of losses over ``tokens`` predicted tokens."""

    loss_nats: float
    tokens: int

    @property
    def mean_nats(self) -> float:
        """Mean loss per token."""
        return self.loss_nats / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean loss; infinite where that overflows."""
        return math.exp(self.mean_nats) if self.mean_nats < 700 else math.inf


@dataclass(frozen=True)
class _Job:
    """Windows of one stream for one pass through one slot."""

    stream: int
    windows: Int[Tensor, "batch window"]


@torch.no_grad()
def score_streams(
    losses: Losses,
    streams: Sequence[Int[Tensor, " _"]],
    models: Sequence[int],
    *,
    context: int,
    batch: int,
    slots: int,
) -> list[Score]:
    """Score stream i with model ``models[i]``.

    Each stream is cut into jobs of at most ``batch`` windows; any ``slots`` jobs share a pass, whosever they are, so
    users with long and short tests waste nothing on each other.
    """
    sums = [0.0] * len(streams)
    counts = [0] * len(streams)
    jobs = [j for i, s in enumerate(streams) for j in _jobs(i, s, context, batch)]
    jobs.sort(key=lambda job: -len(job.windows))  # equal sizes together; the order is deterministic
    for start in range(0, len(jobs), slots):
        group = jobs[start : start + slots]
        windows = torch.full((len(group), len(group[0].windows), context + 1), PAD, dtype=torch.int64)
        for slot, job in enumerate(group):
            windows[slot, : len(job.windows)] = job.windows
        found = losses([models[job.stream] for job in group], windows).double().sum((1, 2)).cpu()
        for slot, job in enumerate(group):
            sums[job.stream] += float(found[slot])
            counts[job.stream] += int((job.windows[:, 1:] != PAD).sum())
    return [Score(loss_nats=s, tokens=c) for s, c in zip(sums, counts, strict=True)]


def _jobs(stream: int, tokens: Int[Tensor, " tokens"], context: int, batch: int) -> Iterator[_Job]:
    for windows in evaluation_windows(tokens, context=context).split(batch):
        yield _Job(stream, windows)
