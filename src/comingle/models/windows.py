"""Windows over a token stream: random ones to train on, consecutive ones to measure on.

A window has ``context + 1`` tokens: its first ``context`` are the inputs, its last ``context`` the targets.

Where a base's tokenizer begins every text with a token, ``begin``, every window begins with it, also those from the
middle of a document. It takes one of the ``context`` inputs and is never a target. The token behind it is predicted
from it where the stream begins; elsewhere it stands for the text before it, and is read and not predicted
(:func:`hide`), since what follows ``begin`` is the beginning of a text.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

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
