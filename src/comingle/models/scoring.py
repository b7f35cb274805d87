"""Scores of language models and nets on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from comingle.models.windows import PAD, evaluation_windows
from comingle.utils.errors import PluginError, RecipeError
from comingle.utils.registry import Registry

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


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Losses ``(n,)`` of outputs ``(n, outputs)`` and targets: class numbers ``(n,)`` or real numbers ``(n, d)``."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss and its name; of ``classes``, outputs are logits and targets class numbers, so there is an accuracy."""

    name: str
    function: LossFunction
    classes: bool
    paired: bool = False
    """Whether it takes an output for each class, or for each number of a target."""

    def __call__(self, outputs: Float[Tensor, "*batch outputs"], targets: Tensor) -> Float[Tensor, "*batch"]:
        """Loss of every sample.

        Raises:
            RecipeError: the function gave something else than one number a sample.
        """
        batch = outputs.shape[:-1]
        losses: Any = self.function(outputs.flatten(0, -2), targets.flatten(0, len(batch) - 1))
        count = batch.numel()
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if got != (count,):
            hint = "; use reduction='none'" if got == () else ""
            raise RecipeError(f"loss {self.name!r}: got {got} for {count} samples; allowed: one loss for each{hint}")
        return losses.view(batch)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """``torch.nn.MSELoss``'s mean over the outputs.

    FLoRAL's text has half the sum of squares (appendix G.1), its code and its reference numbers this.
    """
    return (outputs - targets).square().mean(-1)


def _of_outputs(name: str, loss: Callable[..., Tensor]) -> Loss:
    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets, reduction="none").mean(-1)

    return Loss(name=name, function=mean, classes=False, paired=True)


CROSS_ENTROPY = Loss(name="cross_entropy", function=_cross_entropy, classes=True, paired=True)
"""In nats."""
MSE = Loss(name="mse", function=_mse, classes=False, paired=True)

_OWN: Mapping[str, Any] = {
    "cross_entropy": CROSS_ENTROPY,
    "mse": MSE,
    "l1": _of_outputs("l1", F.l1_loss),
    "smooth_l1": _of_outputs("smooth_l1", F.smooth_l1_loss),
    "bce": _of_outputs("bce", F.binary_cross_entropy_with_logits),
}

LOSSES: Registry[Any] = Registry("comingle.losses", _OWN)
"""By name: a :class:`Loss`, or a function of outputs and targets; real ones are means over the outputs of a sample."""


def find_loss(named: str | Loss | LossFunction, *, classes: bool) -> Loss:
    """A loss by name, or made of a function, of which ``classes`` says whether targets are class numbers.

    Raises:
        RecipeError: no such loss.
        PluginError: a plug-in's is no function.
    """
    found: Any = named
    if isinstance(named, str):
        if named not in LOSSES:
            raise RecipeError(f"no loss {named!r}.{LOSSES.hint(named)} Allowed: {', '.join(LOSSES)}")
        found = LOSSES[named]
    if isinstance(found, Loss):
        return found
    name = named if isinstance(named, str) else getattr(named, "__name__", type(named).__name__)
    if not callable(found):
        raise PluginError(f"loss {name!r}: got {type(found).__name__}; allowed: a function of outputs and targets")
    function: Any = found
    return Loss(name=name, function=function, classes=classes)


@dataclass(frozen=True, kw_only=True)
class SampleScore:
    """A user's mean loss over ``samples`` samples, in nats for classes; accuracy is in [0, 1], None for a regression.

    Both are NaN without samples.
    """

    mean_loss: float
    accuracy: float | None
    samples: int

    expert_scores = ()
    """There are no experts."""

    @property
    def measures(self) -> dict[str, float]:
        """What is reported; the first is what models are compared by."""
        return (
            {"loss": self.mean_loss} if self.accuracy is None else {"accuracy": self.accuracy, "loss": self.mean_loss}
        )
