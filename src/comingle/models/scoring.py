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
    """Encode tokens that are inputs but not targets as negative numbers: 0, 1, 2 become -2, -3, -4.

    Such a token has no loss, for example because it is a target in another window. Hiding twice restores the tokens.
    """
    return -2 - tokens  # -1 is PAD


def inputs_of(windows: Int[Tensor, "*batch window"]) -> Int[Tensor, "*batch context"]:
    """Return the token ids that a model reads: each window without its last token, which is only a target.

    Tokens without a loss are stored as negative numbers (:func:`hide`) and read as the tokens that they were. Padding
    is read as token 0.
    """
    tokens = windows[..., :-1]
    restored = hide(tokens)  # it is its own inverse; PAD stays negative
    return torch.where(tokens < 0, restored, tokens).clamp(min=0)


def prompt_ends(windows: Int[Tensor, "*batch window"]) -> Int64[Tensor, "*batch"]:
    """Return the position of the prompt's last token in each window.

    Tokens of a prompt are hidden (:func:`hide`): [-7, -8, 3, 4] has the result 1, as 3 is the first token to predict.
    For a window without a prompt, the last position whose next token is predicted is returned.
    """
    has_target = (windows[..., 1:] >= 0).long()  # of each position: whether the next token is predicted
    positions = torch.arange(has_target.shape[-1], device=windows.device)
    first_with_target = has_target.argmax(-1)
    last_with_target = (has_target * positions).amax(-1)
    # Plain text after a begin-of-text token has its first target at position 1; that token is not hidden.
    starts_plain_text = (first_with_target == 1) & (windows[..., 0] >= 0)
    has_prompt = (first_with_target > 0) & ~starts_plain_text
    return torch.where(has_prompt, first_with_target, last_with_target)


def random_windows(
    stream: Int[Tensor, " tokens"],
    *,
    count: int,
    context: int,
    generator: torch.Generator,
    begin: int | None = None,
) -> Int64[Tensor, "count window"]:
    """Draw windows of ``context + 1`` tokens that start at random positions of a stream, with replacement.

    Args:
        stream: Token ids of at least one window (see :func:`comingle.data.text.streams.check`).
        count: Number of windows.
        context: Inputs per window.
        generator: Generator of the starts.
        begin: Begin-of-text token (BOS) that every window begins with; None if the base has no such token.
    """
    tokens_from_stream = context + 1 if begin is None else context
    num_starts = len(stream) - tokens_from_stream + 1
    starts = torch.randint(num_starts, (count, 1), generator=generator, device=generator.device).to(stream.device)
    positions = starts + torch.arange(tokens_from_stream, device=stream.device)  # (count, tokens_from_stream)
    windows = stream[positions].long()
    if begin is None:
        return windows
    return begin_windows(windows, begin, begins_stream=starts == 0)


def evaluation_windows(
    stream: Int[Tensor, " tokens"], *, context: int, begin: int | None = None
) -> Int64[Tensor, "windows window"]:
    """Cut a stream into consecutive windows so that every token is a target exactly once.

    Without ``begin`` the first token is an exception: it is no target. For example, with a context of 2 the stream
    5 6 7 8 becomes ``[5, 6, 7]`` and ``[7, 8, PAD]``. With ``begin`` it becomes ``[begin, 5, 6]``, ``[begin, (6), 7]``
    and ``[begin, (7), 8]``, in which the tokens in parentheses are inputs but no targets (:func:`hide`), as they are
    targets in the window before.

    Args:
        stream: Token ids.
        context: Inputs per window.
        begin: Begin-of-text token (BOS) that every window begins with; None if the base has no such token.
    """
    if begin is None:
        count = math.ceil(count_targets(stream) / context)
        return _cut_windows(stream, width=context + 1, stride=context, count=count)
    stride = max(1, context - 1)  # windows overlap by one token, which is a target in the earlier one only
    count = 0
    if len(stream) > 0:
        num_after_first_window = max(0, len(stream) - context)
        count = 1 + math.ceil(num_after_first_window / stride)
    windows = _cut_windows(stream, width=context, stride=stride, count=count)
    begins_stream = _is_first(windows)
    if context == 1:  # windows do not overlap: hide no first token
        begins_stream = torch.ones_like(begins_stream)
    return begin_windows(windows, begin, begins_stream=begins_stream)


def fixed_windows(
    stream: Int[Tensor, " tokens"], *, context: int, begin: int | None = None
) -> Int64[Tensor, "windows window"]:
    """Cut a stream into disjoint windows, the training examples of methods that protect or select single examples.

    The last window is padded on the right with ``PAD``, or omitted if it would hold a single token.

    Args:
        stream: Token ids.
        context: Inputs per window.
        begin: Begin-of-text token (BOS) that every window begins with; None if the base has no such token.
    """
    tokens_from_stream = context + 1 if begin is None else context
    count = math.ceil(len(stream) / tokens_from_stream)
    last_has_single_token = len(stream) % tokens_from_stream == 1
    if last_has_single_token:
        count -= 1
    windows = _cut_windows(stream, width=tokens_from_stream, stride=tokens_from_stream, count=count)
    if begin is None:
        return windows
    return begin_windows(windows, begin, begins_stream=_is_first(windows))


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
    if count == 0:
        return torch.empty((0, width), dtype=torch.int64, device=stream.device)
    length = (count - 1) * stride + width
    padded = torch.full((length,), PAD, dtype=torch.int64, device=stream.device)
    padded[: len(stream)] = stream[:length]
    windows = padded.unfold(0, width, stride)  # views, which overlap if the stride is smaller than the width
    return windows.contiguous()


def _is_first(windows: Int64[Tensor, "windows width"]) -> Bool[Tensor, "windows 1"]:
    """Return True for the first window, which begins at the stream's start."""
    return torch.arange(len(windows), device=windows.device).unsqueeze(1) == 0


def begin_windows(
    windows: Int64[Tensor, "*batch width"], begin: int, *, begins_stream: Bool[Tensor, "*batch 1"]
) -> Int64[Tensor, "*batch window"]:
    """Prepend the begin-of-text token to windows, so that each forward pass starts with it, as the base expects.

    The first token of a window, so far only an input, thereby becomes a target. That is right at the start of a stream.
    In the middle of a stream, where the begin-of-text token does not precede it, the token is hidden (:func:`hide`): an
    input without a loss.

    Args:
        windows: Windows of consecutive tokens of a stream.
        begin: Begin-of-text token.
        begins_stream: True for windows from the stream's start, whose first token is not hidden.
    """
    first, others = windows[..., :1], windows[..., 1:]
    first = torch.where(begins_stream, first, hide(first))
    return torch.cat([torch.full_like(first, begin), first, others], dim=-1)


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
    """One batch of a set of windows; a slot of a forward pass processes it with the set's model.

    Args:
        set_index: Index of the set among all sets to score.
        windows: The batch.
    """

    set_index: int
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

    Streams are cut into windows, and these into batches of one stream each. A forward pass processes up to ``slots``
    batches, each with the model of its stream.

    Args:
        losses: Function that runs a pass for the models and windows of its batches, and returns the loss of each token.
        streams: Token ids of each stream.
        models: For each stream the index of the model to score it with; passed to ``losses``.
        context: Inputs per window.
        batch: Largest number of windows in a batch.
        slots: Largest number of batches in a pass.
        gates: Function that returns the routers' gates in the last pass, to average them; None without routers.
        begin: Begin-of-text token, if the base has one.

    Returns:
        A score for each stream, in their order.
    """
    batches_by_stream = []
    for stream in streams:
        windows = evaluation_windows(stream, context=context, begin=begin)
        batches_by_stream.append(windows.split(batch))
    return score_windows(losses, batches_by_stream, models, slots=slots, gates=gates)


@torch.no_grad()
def score_windows(
    losses: Losses,
    batches_by_set: Sequence[Sequence[Int[Tensor, "_ _"]]],
    models: Sequence[int],
    *,
    slots: int,
    gates: Gates | None = None,
) -> list[Score]:
    """Return the sum of losses on each of several sets of windows, such as the users' test sets.

    A forward pass processes up to ``slots`` batches, each with the model of its set, so that a pass may score batches
    of several sets.

    Args:
        losses: Function that runs a pass for the models and windows of its batches, and returns the loss of each token.
        batches_by_set: For each set its batches, each a tensor ``(batch, window)`` of windows.
        models: For each set the index of the model to score it with; passed to ``losses``.
        slots: Largest number of batches in a pass.
        gates: Function that returns the routers' gates in the last pass, to average them; None without routers.

    Returns:
        A score for each set, in their order.
    """
    num_sets = len(batches_by_set)
    loss_sums = [0.0] * num_sets  # of each set
    target_counts = [0] * num_sets
    gate_sums: list[Tensor | float] = [0.0] * num_sets
    jobs = []
    for set_index, batches in enumerate(batches_by_set):
        jobs += [_ScoringJob(set_index, windows) for windows in batches if len(windows)]
    # Widest windows first, then most windows, so that the batches of a pass need little padding.
    jobs.sort(key=lambda job: (-job.windows.shape[1], -len(job.windows)))
    for start in range(0, len(jobs), slots):
        jobs_of_pass = jobs[start : start + slots]
        windows = _stack_padded([job.windows for job in jobs_of_pass])
        models_of_slots = [models[job.set_index] for job in jobs_of_pass]
        slot_losses = losses(models_of_slots, windows).double().sum((1, 2)).cpu()
        slot_gates = _sum_gates(gates(), windows) if gates else [0.0] * len(jobs_of_pass)
        for slot, job in enumerate(jobs_of_pass):
            is_target = job.windows[:, 1:] >= 0  # negative: padding, or an input without a loss
            loss_sums[job.set_index] += float(slot_losses[slot])
            target_counts[job.set_index] += int(is_target.sum())
            gate_sums[job.set_index] = gate_sums[job.set_index] + slot_gates[slot]
    scores = []
    for loss_sum, count, gate_sum in zip(loss_sums, target_counts, gate_sums, strict=True):
        scores.append(Score(loss_nats=loss_sum, tokens=count, expert_scores=_mean_gates(gate_sum, count)))
    return scores


def _stack_padded(batches: Sequence[Int[Tensor, "_ _"]]) -> Int[Tensor, "slots batch window"]:
    """Stack batches of different sizes, padded with ``PAD``, for one forward pass.

    Args:
        batches: The batches, each with windows ``(batch, window)``; the result has one slot for each.
    """
    most_windows = max(len(batch) for batch in batches)
    largest_width = max(batch.shape[1] for batch in batches)
    stacked = torch.full((len(batches), most_windows, largest_width), PAD, dtype=torch.int64)
    for slot, batch in enumerate(batches):
        num_windows, width = batch.shape
        stacked[slot, :num_windows, :width] = batch
    return stacked


def _sum_gates(
    gates: Float[Tensor, "layers slots n experts"], windows: Int[Tensor, "slots batch window"]
) -> list[Float[Tensor, "layers experts"]]:
    """Return each slot's sum of gates over positions with a target; a slot holds windows that one model reads.

    Args:
        gates: Gates of one forward pass, with ``n = batch * context`` positions per slot.
        windows: Token ids of the pass, ``context + 1`` per window; a negative id is not a target.
    """
    targets = windows[..., 1:]  # (slots, batch, context)
    has_target = (targets >= 0).flatten(start_dim=1).to(gates)  # (slots, n)
    gate_sums = torch.einsum("lsne,sn->sle", gates, has_target)  # over n
    return list(gate_sums.double().cpu())


def _mean_gates(total: Tensor | float, tokens: int) -> tuple[tuple[float, ...], ...]:
    """Return each layer's mean gate of each expert over ``tokens`` tokens; empty if no gates were summed.

    Args:
        total: Sums of gates ``(layers, experts)``; the number 0.0 if none were summed.
        tokens: Number of tokens.
    """
    if not isinstance(total, Tensor):
        return ()
    means = total / tokens
    return tuple(tuple(layer) for layer in means.tolist())


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Function that returns losses ``(n,)`` for outputs ``(n, outputs)`` and targets.

Targets are class numbers ``(n,)`` or real numbers ``(n, d)``.
"""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss and its name.

    If ``classes`` is true, outputs are logits and targets are class numbers, so accuracy is defined. Otherwise targets
    are real numbers.
    """

    name: str
    function: LossFunction
    classes: bool
    paired: bool = False
    """Whether a net needs one output per class, or one per number of a target; unknown for a user's own function."""

    def __call__(self, outputs: Float[Tensor, "*batch outputs"], targets: Tensor) -> Float[Tensor, "*batch"]:
        """Return the loss of every sample.

        Args:
            outputs: Outputs of the net, with any leading axes such as users and batch.
            targets: Class numbers or real targets, with the same leading axes.

        Raises:
            RecipeError: The function did not return one number per sample.
        """
        batch_shape = outputs.shape[:-1]
        num_samples, num_batch_axes = batch_shape.numel(), len(batch_shape)
        # One axis of samples: (samples, outputs) and (samples, ...).
        losses: Any = self.function(outputs.flatten(0, -2), targets.flatten(0, num_batch_axes - 1))
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if got != (num_samples,):
            hint = "; use reduction='none'" if got == () else ""
            raise RecipeError(
                f"loss {self.name!r}: got {got} for {num_samples} samples; allowed: one loss for each{hint}"
            )
        return losses.view(batch_shape)


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

    The net must have one output per number of the target (``paired``).

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


def find_loss(name_or_loss: str | Loss | LossFunction, *, classes: bool) -> Loss:
    """Return the loss of a name, or wrap a function as a loss.

    Args:
        name_or_loss: A key of :data:`LOSSES`, a loss (returned unchanged), or a function.
        classes: Whether a function's targets are class numbers.

    Raises:
        RecipeError: No loss has this name.
        PluginError: The plug-in's loss is not a function.
    """
    if isinstance(name_or_loss, str):
        name = name_or_loss
        if name not in LOSSES:
            raise RecipeError(f"data.loss: no loss {name!r}.{LOSSES.hint(name)} Allowed: {', '.join(LOSSES)}")
        loss: Any = LOSSES[name]
    else:
        name = getattr(name_or_loss, "__name__", type(name_or_loss).__name__)
        loss = name_or_loss
    if isinstance(loss, Loss):
        return loss
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
        if self.accuracy is None:
            return {"loss": self.mean_loss}
        return {"accuracy": self.accuracy, "loss": self.mean_loss}
