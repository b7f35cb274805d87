"""Test perplexity in one exact pass: every token that something stands before is predicted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.data.batches import PAD, evaluation_windows

Losses = Callable[[Sequence[int], Int[Tensor, "slots batch window"]], Float[Tensor, "slots batch context"]]
"""Loss in nats of every position; entry s of the first dimension uses model number ``models[s]``."""

Gates = Callable[[], Float[Tensor, "layers slots n experts"]]
"""The routers' output in the pass that :data:`Losses` made last; ``n`` is batch times context, batch first."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sum of losses over ``tokens`` predicted tokens.

    ``expert_scores``: for each layer the mean gate of each expert over the tokens that were predicted from (CoMiGS,
    Figures 4 and 10); empty without routers.
    """

    loss_nats: float
    tokens: int
    expert_scores: tuple[tuple[float, ...], ...] = ()

    @property
    def mean_loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.loss_nats / self.tokens

    @property
    def measures(self) -> dict[str, float]:
        """What is reported; the first is what models are compared by."""
        return {"perplexity": self.perplexity, "loss_nats": self.mean_loss}

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean loss; infinite where that overflows."""
        return perplexity_of(self.mean_loss)


def perplexity_of(mean_loss: float) -> float:
    """``exp`` of a mean loss in nats; infinite where that overflows."""
    return math.inf if mean_loss >= 700 else math.exp(mean_loss)


@dataclass(frozen=True)
class _Job:
    """Windows of one set for one pass through one slot."""

    owner: int
    windows: Int[Tensor, "batch window"]


def score_streams(
    losses: Losses,
    streams: Sequence[Int[Tensor, " _"]],
    models: Sequence[int],
    *,
    context: int,
    batch: int,
    slots: int,
    gates: Gates | None = None,
    begin: int | None = None,
) -> list[Score]:
    """Score stream i with model ``models[i]``, each cut into windows of which at most ``batch`` are in a slot."""
    parts = [evaluation_windows(stream, context=context, begin=begin).split(batch) for stream in streams]
    return score_windows(losses, parts, models, slots=slots, gates=gates)


@torch.no_grad()
def score_windows(
    losses: Losses,
    parts: Sequence[Sequence[Int[Tensor, "_ _"]]],
    models: Sequence[int],
    *,
    slots: int,
    gates: Gates | None = None,
) -> list[Score]:
    """Score set i, ``parts[i]``, with model ``models[i]``; with ``gates``, also how much each expert said.

    Each part is a job; any ``slots`` jobs share a pass, whosever they are, so users with long and short tests waste
    nothing on each other.
    """
    sums = [0.0] * len(parts)
    counts = [0] * len(parts)
    said: list[Tensor | float] = [0.0] * len(parts)
    jobs = [_Job(i, windows) for i, parts_of_one in enumerate(parts) for windows in parts_of_one if len(windows)]
    jobs.sort(key=lambda job: (-job.windows.shape[1], -len(job.windows)))  # equal sizes together, always in one order
    for start in range(0, len(jobs), slots):
        group = jobs[start : start + slots]
        windows = _together([job.windows for job in group])
        lost = losses([models[job.owner] for job in group], windows).double().sum((1, 2)).cpu()
        pieces = _sum_gates(gates(), windows) if gates else [0.0] * len(group)
        for slot, job in enumerate(group):
            sums[job.owner] += float(lost[slot])
            counts[job.owner] += int((job.windows[:, 1:] >= 0).sum())
            said[job.owner] = said[job.owner] + pieces[slot]
    scored = zip(sums, counts, said, strict=True)
    return [Score(loss_nats=s, tokens=c, expert_scores=_mean_gates(g, c)) for s, c, g in scored]


def _together(parts: Sequence[Int[Tensor, "_ _"]]) -> Int[Tensor, "slots batch window"]:
    """Parts of several jobs in one tensor, filled with ``PAD``."""
    rows, width = max(len(part) for part in parts), max(part.shape[1] for part in parts)
    windows = torch.full((len(parts), rows, width), PAD, dtype=torch.int64)
    for slot, part in enumerate(parts):
        windows[slot, : len(part), : part.shape[1]] = part
    return windows


def _sum_gates(
    gates: Float[Tensor, "layers slots n experts"], windows: Int[Tensor, "slots batch window"]
) -> list[Float[Tensor, "layers experts"]]:
    """Each slot's gates, summed over the positions that have a target."""
    counted = (windows[..., 1:] >= 0).flatten(1).to(gates)
    return list(torch.einsum("lsne,sn->sle", gates, counted).double().cpu())


def _mean_gates(total: Tensor | float, tokens: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(layer) for layer in (total / tokens).tolist()) if isinstance(total, Tensor) else ()
