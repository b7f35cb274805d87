"""Windows over token streams, and scores of language models and nets on held-out data.

A window has ``context + 1`` tokens: its first ``context`` are the inputs, its last ``context`` the targets.

If a base's tokenizer begins every text with a token, ``begin``, then every window begins with it, also windows from the
middle of a document. It takes one of the ``context`` inputs and is never a target. The next token is a target if it is
the first of the stream. Elsewhere it is an input but not a target (:func:`hide`), because the model expects the
beginning of a text after ``begin``.
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
"""Padding of the last evaluation window; never a token id."""


def hide(tokens: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Encode tokens that are inputs but not targets as ``-2 - token``, which is negative too.

    Hiding twice restores the tokens.
    """
    return PAD - 1 - tokens  # PAD is -1


def inputs_of(windows: Int[Tensor, "*batch window"]) -> Int[Tensor, "*batch context"]:
    """Return the token ids that a model reads: without the last position, hidden tokens decoded, and 0 for ``PAD``."""
    tokens = windows[..., :-1]
    return torch.where(tokens < 0, hide(tokens), tokens).clamp(min=0)


def prompt_ends(windows: Int[Tensor, "*batch window"]) -> Int64[Tensor, "*batch"]:
    """Return the position of the prompt's end in each window: the input from which the first target is predicted.

    Tokens of a prompt are inputs but no targets, and negative (:func:`hide`).

    Plain text has no prompt: its first target is at position 0, or at 1 after a begin-of-text token, which is not
    negative. For plain text the last position with a target is returned: its state has read the whole window.
    """
    has_target = (windows[..., 1:] >= 0).long()  # of each input position
    positions = torch.arange(has_target.shape[-1], device=windows.device)
    first, last = has_target.argmax(-1), (has_target * positions).amax(-1)
    follows_begin = (first == 1) & (windows[..., 0] >= 0)  # plain text after a begin-of-text token
    has_prompt = (first > 0) & ~follows_begin
    return torch.where(has_prompt, first, last)


def random_windows(
    stream: Int[Tensor, " tokens"],
    *,
    count: int,
    context: int,
    generator: torch.Generator,
    begin: int | None = None,
) -> Int64[Tensor, "count window"]:
    """Draw windows of ``context + 1`` tokens at random places of a stream, with replacement.

    All ``tokens - context`` starts are equally likely. A begin-of-text token takes one of the inputs, so there is one
    more start. Starts are drawn on the generator's device, so a CPU generator gives the same windows on every device.

    Args:
        stream: Token ids of at least one window (see :func:`comingle.data.text.streams.check`).
        count: Number of windows.
        context: Inputs per window.
        generator: Generator of the starts.
        begin: Begin-of-text token (BOS) that every window begins with; None if the base has no such token.
    """
    width = context if begin is not None else context + 1  # tokens from the stream; `begin` is one more
    starts = torch.randint(len(stream) - width + 1, (count, 1), generator=generator, device=generator.device)
    starts = starts.to(stream.device)
    windows = stream[starts + torch.arange(width, device=stream.device)].long()
    return windows if begin is None else begin_windows(windows, begin, at_start=starts == 0)


def evaluation_windows(
    stream: Int[Tensor, " tokens"], *, context: int, begin: int | None = None
) -> Int64[Tensor, "windows window"]:
    """Cut a stream into consecutive windows so that every token is a target exactly once.

    Without ``begin`` a window starts ``context`` tokens after the previous one, and the stream's first token is no
    target. With ``begin`` the first token is a target too. Every window then starts with ``begin`` and overlaps the
    previous window by one token, which is only an input: the model would expect the start of a text after ``begin``.

    The last window is padded on the right with ``PAD``. A position whose target is ``PAD`` has no loss. Inputs must be
    valid token ids, so :func:`inputs_of` replaces the pads::

        inputs, targets = inputs_of(windows), windows[:, 1:]
        loss_nats = cross_entropy(logits(inputs), targets.clamp(min=PAD), ignore_index=PAD)

    Under causal attention the pads do not affect a position with a target. A stream without targets gives no windows.

    Args:
        stream: Token ids.
        context: Inputs per window.
        begin: Begin-of-text token (BOS) that every window begins with; None if the base has no such token.
    """
    if begin is None:
        count = -(-count_targets(stream) // context)  # rounded up
        return _cut_windows(stream, width=context + 1, stride=context, count=count)
    stride = max(1, context - 1)
    # One window for the first `context` tokens, and one more for each `stride` tokens after them, rounded up.
    count = min(1, len(stream)) + -(-max(0, len(stream) - context) // stride)
    windows = _cut_windows(stream, width=context, stride=stride, count=count)
    # With a context of 1, windows do not overlap: each predicts its only token from `begin`, as at a text's start.
    return begin_windows(windows, begin, at_start=_is_first(windows) | (context == 1))


def fixed_windows(
    stream: Int[Tensor, " tokens"], *, context: int, begin: int | None = None
) -> Int64[Tensor, "windows window"]:
    """Cut a stream into disjoint windows, the training examples of methods that protect or select single examples.

    Unlike windows at random places they have no token in common. The last window is padded on the right with ``PAD``,
    and omitted if it would hold a single token, which leaves nothing to predict.

    Args:
        stream: Token ids.
        context: Inputs per window.
        begin: Begin-of-text token (BOS) that every window begins with; None if the base has no such token.
    """
    width = context if begin is not None else context + 1  # tokens from the stream; `begin` is one more
    is_last_single = len(stream) % width == 1
    count = -(-len(stream) // width) - int(is_last_single)  # rounded up
    windows = _cut_windows(stream, width=width, stride=width, count=count)
    return windows if begin is None else begin_windows(windows, begin, at_start=_is_first(windows))


def _cut_windows(
    stream: Int[Tensor, " tokens"], *, width: int, stride: int, count: int
) -> Int64[Tensor, "windows width"]:
    """Cut a stream into windows, padded on the right with ``PAD``.

    Args:
        stream: Token ids.
        width: Tokens per window.
        stride: Distance between the starts of two windows.
        count: Number of windows.
    """
    if not count:
        return torch.empty((0, width), dtype=torch.int64, device=stream.device)
    padded = torch.full(((count - 1) * stride + width,), PAD, dtype=torch.int64, device=stream.device)
    padded[: len(stream)] = stream[: len(padded)]
    # Copied, because overlapping views must not be written to.
    return padded.unfold(0, width, stride).contiguous()


def _is_first(windows: Int64[Tensor, "windows width"]) -> Bool[Tensor, "windows 1"]:
    """Return True for the first window, which begins at the stream's start."""
    return torch.arange(len(windows), device=windows.device).unsqueeze(1) == 0


def begin_windows(
    windows: Int64[Tensor, "*batch width"], begin: int, *, at_start: Bool[Tensor, "*batch 1"]
) -> Int64[Tensor, "*batch window"]:
    """Prepend ``begin`` to pieces of a stream, and hide the first token of pieces from its middle.

    A hidden token is an input but not a target (:func:`hide`): in the middle of a text it does not follow ``begin``.

    Args:
        windows: Pieces of a stream.
        begin: Begin-of-text token.
        at_start: Mask of the pieces from the stream's start.
    """
    first = torch.where(at_start, windows[..., :1], hide(windows[..., :1]))
    return torch.cat([torch.full_like(first, begin), first, windows[..., 1:]], dim=-1)


def count_targets(stream: Int[Tensor, " tokens"]) -> int:
    """Return the number of tokens with a predecessor: all but the first."""
    return max(0, len(stream) - 1)


Losses = Callable[[Sequence[int], Int[Tensor, "slots batch window"]], Float[Tensor, "slots batch context"]]
"""Function that returns the loss in nats of every position; slot s uses model number ``models[s]``."""

Gates = Callable[[], Float[Tensor, "layers slots n experts"]]
"""Function that returns the routers' gates in the last pass of :data:`Losses`.

``n`` is batch times context, batch first.
"""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sum of losses over ``tokens`` targets.

    ``expert_scores`` holds for each layer each expert's mean gate over the positions with a target (CoMiGS, Figures 4
    and 10); it is empty without routers.
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
        """Reported values by name; models are compared by the first."""
        return {"perplexity": self.perplexity, "loss_nats": self.mean_loss}

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean loss; infinite if that overflows."""
        return perplexity_of(self.mean_loss)


def perplexity_of(mean_loss: float) -> float:
    """Return ``exp`` of a mean loss in nats; infinite if that overflows."""
    return math.inf if mean_loss >= 700 else math.exp(mean_loss)  # exp(710) overflows


@dataclass(frozen=True)
class _ScoringJob:
    """Windows of one set that one slot processes in one pass; ``owner`` is the index of the set."""

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
    """Return the sum of losses on each token stream.

    Streams are cut into windows. A forward pass has ``slots`` slots, each with up to ``batch`` windows of one stream.

    Args:
        losses: Function that runs a pass and returns its losses.
        streams: Token ids of each stream.
        models: For each stream the number of the model to score it with.
        context: Inputs per window.
        batch: Largest number of windows in a slot.
        slots: Largest number of slots in a pass.
        gates: Function that returns the routers' gates in the last pass, to average them; None without routers.
        begin: Begin-of-text token, if the base has one.
    """
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
    """Return the sum of losses on each of several sets of windows, such as the users' test sets.

    A set is split into parts. A forward pass processes up to ``slots`` parts of any sets, so that long and short sets
    fill passes together.

    Args:
        losses: Function that runs a pass and returns its losses.
        parts: For each set a list of parts, each a tensor of windows.
        models: For each set the number of the model to score it with.
        slots: Largest number of parts in a pass.
        gates: Function that returns the routers' gates in the last pass, to average them; None without routers.
    """
    sums = [0.0] * len(parts)
    counts = [0] * len(parts)
    gate_sums: list[Tensor | float] = [0.0] * len(parts)
    jobs = [
        _ScoringJob(i, windows) for i, windows_of_set in enumerate(parts) for windows in windows_of_set if len(windows)
    ]
    # Widest and largest parts first: passes of jobs of equal size need no padding.
    jobs.sort(key=lambda job: (-job.windows.shape[1], -len(job.windows)))
    for start in range(0, len(jobs), slots):
        group = jobs[start : start + slots]
        windows = _stack_padded([job.windows for job in group])
        slot_losses = losses([models[job.owner] for job in group], windows).double().sum((1, 2)).cpu()
        slot_gates = _sum_gates(gates(), windows) if gates else [0.0] * len(group)
        for slot, job in enumerate(group):
            sums[job.owner] += float(slot_losses[slot])
            counts[job.owner] += int((job.windows[:, 1:] >= 0).sum())  # tokens with a loss: not PAD, not hidden
            gate_sums[job.owner] = gate_sums[job.owner] + slot_gates[slot]
    scored = zip(sums, counts, gate_sums, strict=True)
    return [Score(loss_nats=s, tokens=c, expert_scores=_mean_gates(g, c)) for s, c, g in scored]


def _stack_padded(parts: Sequence[Int[Tensor, "_ _"]]) -> Int[Tensor, "slots batch window"]:
    """Stack the windows of several jobs, padded with ``PAD``."""
    rows, width = max(len(part) for part in parts), max(part.shape[1] for part in parts)
    windows = torch.full((len(parts), rows, width), PAD, dtype=torch.int64)
    for slot, part in enumerate(parts):
        windows[slot, : len(part), : part.shape[1]] = part
    return windows


def _sum_gates(
    gates: Float[Tensor, "layers slots n experts"], windows: Int[Tensor, "slots batch window"]
) -> list[Float[Tensor, "layers experts"]]:
    """Return for each slot the sum of its gates over all positions that have a target.

    Args:
        gates: Gates of one forward pass, with ``n = batch * context`` positions per slot.
        windows: Token ids of the pass; a negative id is not a target.
    """
    targets = windows[..., 1:]  # (slots, batch, context)
    has_target = (targets >= 0).flatten(start_dim=1).to(gates)  # (slots, n)
    gate_sums = torch.einsum("lsne,sn->sle", gates, has_target)  # over n
    return list(gate_sums.double().cpu())


def _mean_gates(total: Tensor | float, tokens: int) -> tuple[tuple[float, ...], ...]:
    """Return each layer's mean gates over ``tokens`` tokens; empty if no gates were summed.

    Args:
        total: Sums of gates ``(layers, experts)``; the number 0.0 if none were summed.
        tokens: Number of tokens.
    """
    return tuple(tuple(layer) for layer in (total / tokens).tolist()) if isinstance(total, Tensor) else ()


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Function that returns losses ``(n,)`` for outputs ``(n, outputs)`` and targets.

Targets are class numbers ``(n,)`` or real numbers ``(n, d)``.
"""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss and its name.

    With ``classes``, outputs are logits and targets are class numbers, so accuracy is defined.
    """

    name: str
    function: LossFunction
    classes: bool
    paired: bool = False
    """Whether outputs correspond to classes, or to the numbers of a target."""

    def __call__(self, outputs: Float[Tensor, "*batch outputs"], targets: Tensor) -> Float[Tensor, "*batch"]:
        """Return the loss of every sample.

        Args:
            outputs: Outputs of the net, with any leading axes such as users and batch.
            targets: Class numbers or real targets, with the same leading axes.

        Raises:
            RecipeError: The function did not return one number per sample.
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
    """Return the cross-entropy of each sample in nats; outputs are logits ``(n, classes)``."""
    return F.cross_entropy(outputs, targets, reduction="none")


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of each sample, averaged over its outputs, as in ``torch.nn.MSELoss``.

    FLoRAL's text defines half the sum of squares (appendix G.1); its code and reported numbers use the mean.
    """
    return (outputs - targets).square().mean(-1)


def _mean_over_outputs(name: str, loss: Callable[..., Tensor]) -> Loss:
    """Return a loss for regression: the mean of an elementwise loss of torch over a sample's outputs.

    The loss is ``paired``: output i is compared with the i-th number of the sample's target.

    Args:
        name: Name of the loss in recipes.
        loss: Elementwise loss of torch that accepts ``reduction="none"``.
    """

    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets, reduction="none").mean(-1)

    return Loss(name=name, function=mean, classes=False, paired=True)


CROSS_ENTROPY = Loss(name="cross_entropy", function=_cross_entropy, classes=True, paired=True)
"""Cross-entropy in nats."""
MSE = Loss(name="mse", function=_mse, classes=False, paired=True)

_BUILT_IN: Mapping[str, Any] = {
    "cross_entropy": CROSS_ENTROPY,
    "mse": MSE,
    "l1": _mean_over_outputs("l1", F.l1_loss),
    "smooth_l1": _mean_over_outputs("smooth_l1", F.smooth_l1_loss),
    "bce": _mean_over_outputs("bce", F.binary_cross_entropy_with_logits),
}

LOSSES: Registry[Any] = Registry("comingle.losses", _BUILT_IN)
"""Losses by name: a :class:`Loss`, or a function of outputs and targets.

Losses of real targets are means over a sample's outputs.
"""


def find_loss(named: str | Loss | LossFunction, *, classes: bool) -> Loss:
    """Return a loss by name, or wrap a function.

    Args:
        named: A key of :data:`LOSSES`, a loss, or a function.
        classes: Whether a function's targets are class numbers.

    Raises:
        RecipeError: No loss has this name.
        PluginError: The plug-in's loss is not a function.
    """
    loss: Any = named
    if isinstance(named, str):
        if named not in LOSSES:
            raise RecipeError(f"data.loss: no loss {named!r}.{LOSSES.hint(named)} Allowed: {', '.join(LOSSES)}")
        loss = LOSSES[named]
    if isinstance(loss, Loss):
        return loss
    name = named if isinstance(named, str) else getattr(named, "__name__", type(named).__name__)
    if not callable(loss):
        raise PluginError(f"loss {name!r}: got {type(loss).__name__}; allowed: a function of outputs and targets")
    function: Any = loss
    return Loss(name=name, function=function, classes=classes)


@dataclass(frozen=True, kw_only=True)
class SampleScore:
    """A user's mean loss over ``samples`` samples, in nats for classes; accuracy in [0, 1], or None for regression.

    Both are NaN without samples.
    """

    mean_loss: float
    accuracy: float | None
    samples: int

    expert_scores = ()
    """Empty, because nets have no routers."""

    @property
    def measures(self) -> dict[str, float]:
        """Reported values by name; models are compared by the first."""
        return (
            {"loss": self.mean_loss} if self.accuracy is None else {"accuracy": self.accuracy, "loss": self.mean_loss}
        )
