"""The elementwise work of a mixture of experts: one pass forward, one backward, with the activation's derivative kept.

With ``E`` experts per block the hidden activations are the largest tensors of a step, so passes over them are what a
routed block costs beyond its base. The forward pass therefore emits the derivative (one exponential instead of two),
and the backward pass is free of transcendental functions. Each function is plain PyTorch; :func:`fused` lets
``torch.compile`` turn it into one loop where that is possible and runs it as it stands where not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

Activation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps pre-activations to (value, derivative)."""

Hidden = Float[Tensor, "users experts n hidden"]
Shared = Float[Tensor, "users n hidden"]
Gates = Float[Tensor, "users n experts"]


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``torch.compile`` turn ``function`` into one loop while :func:`fusing` is on.

    The compiler is loaded at the first such call: it takes seconds, which a run without it need not pay.
    """
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (compiled() if _fusing else function)(*args, **kwargs)

    return call


def fusing(on: bool) -> None:
    """Switch compilation of every :func:`fused` function on or off; off at import.

    A failure of the compiler (no C++ toolchain, say) is not an error: the function then runs as it is written.
    """
    global _fusing
    _fusing = on
    if on:
        torch._dynamo.config.suppress_errors = True


def is_fusing() -> bool:
    """Whether :func:`fused` functions are compiled."""
    return _fusing


_fusing = False


def gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """GELU in its tanh form (GPT-2's ``gelu_new``), as ``x sigmoid(2c(x + 0.044715 x^3))``, c = sqrt(2/pi).

    ``(1 + tanh t) / 2 = sigmoid(2t)`` exactly; the sigmoid vectorises better than tanh.
    """
    c = 2 * math.sqrt(2 / math.pi)
    square = x * x
    s = torch.sigmoid(c * x * (1 + 0.044715 * square))
    y = x * s
    return y, s + y * (1 - s) * c * (1 + 3 * 0.044715 * square)


def gelu_erf(x: Tensor) -> tuple[Tensor, Tensor]:
    """GELU with the exact normal distribution function."""
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return x * cdf, cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU (swish), ``x sigmoid(x)``."""
    s = torch.sigmoid(x)
    y = x * s
    return y, s + y * (1 - s)


def relu(x: Tensor) -> tuple[Tensor, Tensor]:
    """ReLU; the derivative at 0 is 0, as in PyTorch."""
    return torch.relu(x), (x > 0).to(x.dtype)


ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu": gelu_erf,
    "silu": silu,
    "swish": silu,
    "relu": relu,
}
"""By the names that transformers' configurations use."""


SHORT = (torch.bfloat16, torch.float16)
"""Formats of 16 bits, whose rounding shows."""


def wide(x: Tensor) -> Tensor:
    """At least float32: what has 16 bits is computed in float32, float64 stays."""
    return x.float() if x.dtype in SHORT else x


@fused
def activate(
    act: Activation, bases: Sequence[Shared], loras: Sequence[Hidden], gates: Gates, keep: bool
) -> tuple[Hidden, list[Hidden], Shared]:
    """Experts' hidden activations ``h_j``, their mixture ``m = sum_j p_j h_j`` and, with ``keep``, slopes for later.

    ``bases`` and ``loras`` hold the two parts of each pre-activation: of ``up`` alone in a plain MLP, with
    ``h_j = act(up_j)`` and slope ``dh_j/dup_j``; of ``gate`` and ``up`` in a gated one, with ``h_j = act(gate_j) up_j``
    and slopes ``dh_j/dgate_j``, ``dh_j/dup_j``. Results take the place of ``loras`` in memory.
    """
    dtype = bases[0].dtype
    pre = [wide(base).unsqueeze(1) + wide(lora) for base, lora in zip(bases, loras, strict=True)]
    value, slope = act(pre[0])
    gated = len(pre) == 2
    h = value * pre[1] if gated else value
    mixed = (gates.mT.unsqueeze(-1) * h).sum(1).to(dtype)
    slopes = []
    if keep:
        slopes.append((slope * pre[1] if gated else slope).to(dtype).contiguous())
        slopes += [loras[1].copy_(value)] if gated else []
    return loras[0].copy_(h), slopes, mixed


@fused
def activate_backward(
    h: Hidden, slopes: Sequence[Hidden], gates: Gates, d_mixed: Shared, d_h: Hidden
) -> tuple[list[Hidden], list[Shared], Gates]:
    """Gradients of :func:`activate` with respect to ``loras``, ``bases`` and ``gates``.

    ``d_h`` is what reaches ``h`` besides the mixture (through the last linear's LoRA); the first result takes its
    place in memory.
    """
    reached = wide(d_mixed).unsqueeze(1)
    d_hidden = gates.mT.unsqueeze(-1) * reached + wide(d_h)
    d_pre = [d_hidden * wide(slope) for slope in slopes]
    d_bases = [d.sum(1).to(h.dtype) for d in d_pre]
    d_gates = (reached * wide(h)).sum(-1).mT
    d_loras = [d_h.copy_(d_pre[0]), *(d.to(h.dtype).contiguous() for d in d_pre[1:])]
    return d_loras, d_bases, d_gates
