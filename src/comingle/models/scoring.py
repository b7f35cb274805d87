"""Windows over token streams, and scores of language models and nets on held-out data.

A window has ``context + 1`` tokens: its first ``context`` are the inputs, its last ``context`` the targets.

Where a base's tokenizer begins every text with a token, ``begin``, every window begins with it, also those from the
middle of a document. It takes one of the ``context`` inputs and is never a target. The token behind it is predicted
from it where the stream begins; elsewhere it stands for the text before it, and is read and not predicted
(:func:`hide`), since what follows ``begin`` is the beginning of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn import functional as F

from comingle.utils.errors import PluginError, RecipeError
from comingle.utils.registry import Registry

PAD = -1
"""Fills the last evaluation window; never a token."""


def hide(tokens: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Tokens as they stand in a window where they are read but not predicted: ``-2 - token``, which is negative too.

    Hiding twice gives the tokens back.
    """
    return PAD - 1 - tokens


def inputs_of(windows: Int[Tensor, "*batch window"]) -> Int[Tensor, "*batch context"]:
    """What a model reads of windows: all but the last place, hidden tokens shown, and 0 for ``PAD``."""
    tokens = windows[..., :-1]
    return torch.where(tokens < 0, hide(tokens), tokens).clamp(min=0)


def prompt_ends(windows: Int[Tensor, "*batch window"]) -> Int64[Tensor, "*batch"]:
    """The place among the inputs of the last token before all that is predicted; where that is the first of all, as in
    plain text, of the last token from which something is predicted."""
    predicted = (windows[..., 1:] >= 0).long()
    first, places = predicted.argmax(-1), torch.arange(predicted.shape[-1], device=windows.device)
    begun = (first == 1) & (windows[..., 0] >= 0)  # plain text behind a begin-of-text token
    return torch.where((first > 0) & ~begun, first, (predicted * places).amax(-1))


def random_windows(
    stream: Int[Tensor, " tokens"],
    *,
    count: int,
    context: int,
    generator: torch.Generator,
    begin: int | None = None,
) -> Int64[Tensor, "count window"]:
    """Draw windows with replacement, uniform over all starts: ``tokens - context``, with ``begin`` one more.

    The starts are drawn where the generator lives and used where the stream lives, so a CPU generator gives the same
    windows on every device. The stream must hold one window (see :func:`comingle.data.text.streams.check`).
    """
    width = context + (begin is None)
    starts = torch.randint(len(stream) - width + 1, (count, 1), generator=generator, device=generator.device)
    starts = starts.to(stream.device)
    windows = stream[starts + torch.arange(width, device=stream.device)].long()
    return windows if begin is None else begin_windows(windows, begin, at_start=starts == 0)


def evaluation_windows(
    stream: Int[Tensor, " tokens"], *, context: int, begin: int | None = None
) -> Int64[Tensor, "windows window"]:
    """Cut consecutive windows so that every token is a target exactly once.

    Their stride is ``context``, and the first token of the stream is no target. With ``begin`` it is one, and the
    stride is ``context - 1``, so that the token that is read and not predicted is the last target of the window before.

    The last window is filled on the right with ``PAD``. A position whose target is ``PAD`` carries no loss; as inputs
    the pads must be valid ids, which :func:`inputs_of` sees to::

        inputs, targets = inputs_of(windows), windows[:, 1:]
        loss_nats = cross_entropy(logits(inputs), targets.clamp(min=PAD), ignore_index=PAD)

    Under causal attention no counted target sees such a pad. A stream without targets gives no window.
    """
    if begin is None:
        return _cut(stream, width=context + 1, stride=context, count=-(-count_targets(stream) // context))
    stride = max(1, context - 1)
    count = -(-max(0, len(stream) - context) // stride) + min(1, len(stream))
    windows = _cut(stream, width=context, stride=stride, count=count)
    return begin_windows(windows, begin, at_start=_is_first(windows) | (context == 1))


def fixed_windows(
    stream: Int[Tensor, " tokens"], *, context: int, begin: int | None = None
) -> Int64[Tensor, "windows window"]:
    """Cut a stream into windows that have no token in common: each token is in one of them, always in the same.

    The last one is filled on the right with ``PAD``, and left out where a single token would be all of it.
    """
    width = context + (begin is None)
    count = -(-len(stream) // width) - (len(stream) % width == 1)
    windows = _cut(stream, width=width, stride=width, count=count)
    return windows if begin is None else begin_windows(windows, begin, at_start=_is_first(windows))


def _cut(stream: Int[Tensor, " tokens"], *, width: int, stride: int, count: int) -> Int64[Tensor, "windows width"]:
    if not count:
        return torch.empty((0, width), dtype=torch.int64, device=stream.device)
    padded = torch.full(((count - 1) * stride + width,), PAD, dtype=torch.int64, device=stream.device)
    padded[: len(stream)] = stream[: len(padded)]
    # Copied, because windows that share their border tokens in memory must not be written to.
    return padded.unfold(0, width, stride).contiguous()


def _is_first(windows: Int64[Tensor, "windows width"]) -> Bool[Tensor, "windows 1"]:
    return torch.arange(len(windows), device=windows.device).unsqueeze(1) == 0


def begin_windows(
    windows: Int64[Tensor, "*batch width"], begin: int, *, at_start: Bool[Tensor, "*batch 1"]
) -> Int64[Tensor, "*batch window"]:
    """Put ``begin`` before pieces of a stream, and hide the first token of those that are not from its start."""
    first = torch.where(at_start, windows[..., :1], hide(windows[..., :1]))
    return torch.cat([torch.full_like(first, begin), first, windows[..., 1:]], dim=-1)


def count_targets(stream: Int[Tensor, " tokens"]) -> int:
    """Tokens that are predicted from at least one before them: all but the first."""
    return max(0, len(stream) - 1)


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
