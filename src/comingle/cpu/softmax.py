"""Cross-entropy of rows of logits, and their softmax in the logits' own memory."""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from comingle.cpu import native


class _Softmax(ctypes.Structure):
    """``struct Softmax`` of softmax.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "columns", "bf16", "keep", "threads")],
        *[(n, ctypes.c_void_p) for n in ("logits", "targets", "losses", "totals")],
    )


def softmax(
    logits: Float[Tensor, "n vocab"], targets: Integer[Tensor, " n"], keep: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """As :func:`comingle.models.loss.softmax_parts`, where native code is made for it; the logits are gone afterwards.

    Without ``keep`` they stay, and what stands for the softmax are they.

    Raises:
        IndexError: a target is none of the columns.
    """
    if isinstance(logits, FakeTensor) or not native.supports(logits) or not logits.is_contiguous():
        return None
    losses, totals = logits.new_empty((2, len(logits)), dtype=torch.float32)
    targets = targets.to(torch.int64).contiguous()
    call = _Softmax(
        *logits.shape,
        logits.dtype == torch.bfloat16,
        keep,
        torch.get_num_threads(),
        *(t.data_ptr() for t in (logits, targets, losses, totals)),
    )
    if not native.library().softmax_forward(ctypes.byref(call)):
        raise IndexError(f"a target is none of {logits.shape[1]} tokens")
    return losses, logits, totals
