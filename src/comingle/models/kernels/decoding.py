"""Native code for what generates: one token for each of a few rows, every user's rows with its own adapters.

A step of a few rows reads all weights for little arithmetic. ``mixture_rows.h`` reads each of them once for all rows
and does what the adapters add on the way, where PyTorch's products take twice as long for eight rows as for one, and a
dozen small operations follow each. It is in use wherever :mod:`comingle.models.kernels.expert_mlp` is and nobody wants
gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.models.kernels import expert_mlp

Factors = tuple[Tensor, Tensor]
"""A ``(users, ..., rank, d_in)`` and B ``(users, ..., rank, d_out)``; rows are user-major, as many of each."""
Weights = tuple[Tensor, Tensor | None]
"""A linear's weight ``(d_out, d_in)``, which may lie turned in memory, and bias."""

MOST_ROWS = 64
"""With more, PyTorch's products are faster."""


class _Linear(ctypes.Structure):
    """``struct RowsLinear`` of mixture_rows.h."""

    _fields_ = (
        *[(n, ctypes.c_void_p) for n in ("weight", "bias", "a", "b")],
        *[(n, ctypes.c_int64) for n in ("d_in", "d_out", "ranks", "turned")],
    )


class _Rows(ctypes.Structure):
    """``struct Rows``."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "share", "experts", "firsts", "act", "bf16", "threads")],
        ("scale", ctypes.c_float),
        ("first", _Linear * 2),
        ("last", _Linear),
        *[(n, ctypes.c_void_p) for n in ("x", "gates", "y")],
    )


def fits(x: Float[Tensor, "*batch width"], users: int, *weights: Tensor) -> bool:
    """Whether ``x`` is one token for each of a few rows, and the native code is in use and made for such tensors.

    In bfloat16 a user's rows are one: of more, PyTorch's products are as fast.
    """
    rows = x.shape[:-1].numel()
    return (
        (rows == users or (x.shape[-2] == 1 and x.dtype == torch.float32))
        and 0 < rows <= MOST_ROWS
        and expert_mlp.is_enabled()
        and not torch.is_grad_enabled()
        and expert_mlp.fits(x.device, x.dtype)
        and all((w.is_contiguous() or w.t().is_contiguous()) and w.dtype == x.dtype for w in weights)
    )


def linear(
    weights: Weights, x: Float[Tensor, "*batch d_in"], factors: Factors | None = None, scale: float = 1.0
) -> Float[Tensor, "*batch d_out"]:
    """``W x_r + b + s B_r (A_r x_r)`` for each row r."""
    call, x = _Rows(scale=scale), x.contiguous()
    kept = _describe(call.last, weights, factors)
    y = x.new_empty(*x.shape[:-1], weights[0].shape[0])
    _run(call, x, y, 0 if factors is None else len(factors[0]))
    del kept
    return y


def experts(
    act: expert_mlp.Activation,
    scale: float,
    x: Float[Tensor, "users n width"],
    gates: Float[Tensor, "users n experts"],
    first: Sequence[tuple[Weights, Factors]],
    last: tuple[Weights, Factors],
) -> Float[Tensor, "users n width"]:
    """The mixture of :mod:`comingle.models.experts` (``mix: output``) for each row."""
    call, x, gates = _Rows(scale=scale), x.contiguous(), gates.contiguous()
    assert gates.dtype == torch.float32
    kept = [_describe(call.first[i], *one) for i, one in enumerate(first)], _describe(call.last, *last)
    call.firsts, call.experts, call.act = len(first), gates.shape[-1], expert_mlp.ACTIVATION_CODES[act]
    call.gates = gates.data_ptr()
    y = torch.empty_like(x)
    _run(call, x, y, len(last[1][0]))
    del kept
    return y


def _describe(to: _Linear, weights: Weights, factors: Factors | None) -> list[Tensor]:
    """Fill in a linear; what is returned has to live until the call is over."""
    (weight, bias), kept = weights, []
    to.weight, to.bias = weight.data_ptr(), None if bias is None else bias.data_ptr()
    (to.d_out, to.d_in), to.turned = weight.shape, not weight.is_contiguous()
    if factors is not None:
        kept = [factor.contiguous() for factor in factors]
        to.a, to.b = (factor.data_ptr() for factor in kept)
        to.ranks = kept[0].shape[1:-1].numel()
    return kept


def _run(call: _Rows, x: Tensor, y: Tensor, users: int) -> None:
    call.rows, call.threads, call.bf16 = x.shape[:-1].numel(), torch.get_num_threads(), x.dtype == torch.bfloat16
    call.share = call.rows // (users or call.rows)
    call.x, call.y = x.data_ptr(), y.data_ptr()
    library = expert_mlp.library()
    assert library is not None
    library.rows_forward(ctypes.byref(call))


class RowsLinear(nn.Linear):
    """A frozen linear over the very weights of another, for rows of one token as for any."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, bias=False, device="meta")
        self.weight, self.bias = like.weight, like.bias

    def forward(self, input: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """``W x + b``."""
        if fits(input, input.shape[:-1].numel(), self.weight):
            return linear((self.weight, self.bias), input)
        return super().forward(input)
