"""Cross-entropy against a frozen head without the whole logits tensor or a second pass over it.

The head has no gradient, so the gradient with respect to the hidden states is computed in the forward pass, chunk by
chunk, while the logits of a chunk exist. For one position with hidden state h, head W and target t:

    loss = log sum_v exp(W_v h) - W_t h          d loss / d h = sum_v softmax(W h)_v W_v - W_t

Memory is one chunk of logits, independent of the batch size. Positions without a target (prompts, padding) have no
logits. Scale, bias and soft cap of the head are included.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from comingle.models.kernels import cpu
from comingle.models.kernels.expert_mlp import fused, wide
from comingle.models.loading import Head
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.files import cache_folder
from comingle.utils.trees import Context

CHUNK_BYTES = 64 << 20
"""Size of one chunk of logits: large enough for efficient products, small enough for the processor's caches."""


native_softmax_parts: Any = None
"""Native replacement of :func:`softmax_parts` that may overwrite the logits; None when there is none.

Its third argument says whether the weights are needed. It returns None for logits that it does not support.
"""


def cross_entropy(
    hidden: Float[Tensor, "*batch width"], head: Head, targets: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Return the loss of each position in nats, in float32 or wider; 0 where the target is negative.

    Differentiable only with respect to ``hidden``.

    Args:
        hidden: Hidden states.
        head: The frozen output layer, from hidden states to logits.
        targets: Token ids; negative where there is no target.
    """
    states, ids = hidden.flatten(0, -2), targets.flatten()
    estimates_memory = isinstance(ids, FakeTensor)  # without values, so count all as targets
    if estimates_memory or bool((ids >= 0).all()):
        return cast(Tensor, _HeadLoss.apply(states, ids, head)).view(targets.shape)
    (positions,) = torch.nonzero(ids >= 0, as_tuple=True)
    losses = cast(Tensor, _HeadLoss.apply(states[positions], ids[positions], head))
    all_losses = losses.new_zeros(len(ids)).index_put((positions,), losses)
    return all_losses.view(targets.shape)


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy of positions that all have a target, whose gradient is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Context, hidden: Float[Tensor, "n width"], targets: Int[Tensor, " n"], head: Head) -> Tensor:
        """Return the loss of each position in nats, ``(n,)``, and save the gradients of ``hidden`` if they are needed.

        Positions are processed in chunks, so that the logits of all positions are never in memory at once.

        Args:
            ctx: Autograd context.
            hidden: Hidden states.
            targets: Token ID that each position predicts.
            head: The frozen output layer, from hidden states to logits.
        """
        n, vocabulary_size = len(targets), head.weight.shape[0]
        losses = hidden.new_empty(n, dtype=torch.promote_types(hidden.dtype, torch.float32))
        needs_gradient = ctx.needs_input_grad[0]
        gradients = torch.empty_like(hidden) if needs_gradient else None
        logits_bytes = n * vocabulary_size * hidden.element_size()
        num_chunks = max(1, math.ceil(logits_bytes / CHUNK_BYTES))
        chunk_size = max(1, math.ceil(n / num_chunks))  # chunks of equal size, as each size compiles a kernel
        for start in range(0, n, chunk_size):
            chunk = slice(start, start + chunk_size)
            losses[chunk], gradient = _chunk_loss(hidden[chunk], targets[chunk], head, needs_gradient)
            if gradients is not None and gradient is not None:
                gradients[chunk] = gradient
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    def backward(ctx: Context, d_losses: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Return the gradient of ``hidden``; None for targets and head, which have no gradient.

        Args:
            ctx: Autograd context.
            d_losses: Gradient of the loss of each position, ``(n,)``.
        """
        (gradients,) = ctx.saved_tensors  # (n, width): d loss / d hidden of each position, from the forward pass
        d_hidden = gradients * d_losses.unsqueeze(1).to(gradients.dtype)
        return d_hidden, None, None


def _chunk_loss(hidden: Tensor, ids: Tensor, head: Head, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return the losses of one chunk of positions and, if wanted, their gradient with respect to ``hidden``.

    For one position with hidden state h, target t, and logits ``f(W h)`` with the head's weight W (f scales and caps)::

        loss = log sum_v exp(logit_v) - logit_t      d loss / d h = sum_v (softmax_v - [v = t]) f'(W_v h) W_v

    Without scale and cap the gradient is ``sum_v softmax_v W_v - W_t``.

    Args:
        hidden: Hidden states ``(n, width)``.
        ids: Target of each position.
        head: The frozen output layer, from hidden states to logits.
        needs_gradient: Compute the gradient; otherwise it is None.
    """
    logits = F.linear(hidden, head.weight, head.bias)
    slope = None  # f'(W_v h), or None for 1
    scales_or_caps = head.softcap is not None or head.scale != 1.0
    if scales_or_caps:
        logits, slope = _scale_and_cap(logits, head)
    loss_and_softmax = None
    if native_softmax_parts is not None:
        loss_and_softmax = native_softmax_parts(logits, ids, needs_gradient)
    if loss_and_softmax is None:  # no native code, or it does not support these logits
        loss_and_softmax = softmax_parts(logits, ids)
    loss, exponentials, total = loss_and_softmax  # softmax = exponentials / total
    if not needs_gradient:
        return loss, None
    if slope is None:
        expected_row = (exponentials @ head.weight) / total.unsqueeze(1)  # sum_v softmax_v W_v
        return loss, (expected_row - head.weight[ids]).to(hidden.dtype)
    d_logits = exponentials / total.unsqueeze(1).to(exponentials.dtype)  # softmax_v - [v = t]
    d_logits[torch.arange(len(ids), device=ids.device), ids] -= 1
    return loss, (d_logits * slope) @ head.weight


@fused
def softmax_parts(logits: Float[Tensor, "n vocab"], ids: Int[Tensor, " n"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropy and softmax, the latter as numerator and denominator, computed in float32 or wider.

    Args:
        logits: Logits of ``n`` positions; not modified.
        ids: Target of each position.

    Returns:
        The losses ``(n,)`` in nats, the unnormalised softmax ``exp(logit - max)`` ``(n, vocab)`` in the logits' dtype,
        and its sum ``(n,)``.
    """
    wide_logits = wide(logits)
    largest = wide_logits.amax(1)
    target_logits = wide_logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    is_copy = wide_logits is not logits  # which can be overwritten, to save memory
    shifted = wide_logits.sub_(largest.unsqueeze(1)) if is_copy else wide_logits - largest.unsqueeze(1)
    exponentials = shifted.exp_()
    total = exponentials.sum(1)
    losses = largest + torch.log(total) - target_logits
    return losses, exponentials.to(logits.dtype), total


def _scale_and_cap(raw: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return the scaled and soft-capped logits, and their derivative with respect to ``raw``.

    Args:
        raw: Products of the hidden states and the head's weight, ``(n, vocab)``.
        head: The head, with its scale and perhaps a soft cap.
    """
    scaled = raw * head.scale
    if head.softcap is None:
        derivative = torch.full_like(raw[:, :1], head.scale)  # (n, 1), equal for the whole vocabulary
        return scaled, derivative
    tanh = torch.tanh(scaled / head.softcap)
    derivative = (1 - tanh * tanh) * head.scale
    return tanh * head.softcap, derivative


def use_native_code(network: PreTrainedModel, *, attention: bool) -> None:
    """Use C++ code for losses, and perhaps for attention, from now on; do nothing if the code cannot be compiled.

    Args:
        network: The model whose attention is replaced.
        attention: Replace the attention too.
    """
    global native_softmax_parts
    is_compiled = cpu.enable(cache_folder() / "native")
    if not is_compiled:
        return
    native_softmax_parts = cpu.softmax
    if attention:
        cpu.use_attention(network)
