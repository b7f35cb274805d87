"""Native code for what generates: one token for each of a few rows, every row with adapters of its own.

A step of a few rows reads all weights for little arithmetic. ``mixture_rows.h`` reads each of them once for all rows
and does what the adapters add on the way, where PyTorch's products take twice as long for eight rows as for one, and a
dozen small operations follow each. It is in use wherever :mod:`comingle.adapters.native` is and nobody wants gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.adapters import kernels, native

Factors = tuple[Tensor, Tensor]
"""A ``(rows, ..., rank, d_in)`` and B ``(rows, ..., rank, d_out)``."""
Weights = tuple[Tensor, Tensor | None]
"""A linear's weight ``(d_out, d_in)`` and bias."""

MOST_ROWS = 64
"""With more, PyTorch's products are faster."""


class _Linear(ctypes.Structure):
    """``struct RowsLinear`` of mixture_rows.h."""

    _fields_ = (
        *[(n, ctypes.c_void_p) for n in ("weight", "bias", "a", "b")],
        *[(n, ctypes.c_int64) for n in ("d_in", "d_out", "ranks")],
    )


class _Rows(ctypes.Structure):
    """``struct Rows``."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "experts", "firsts", "act", "bf16", "threads")],
        ("scale", ctypes.c_float),
        ("first", _Linear * 2),
        ("last", _Linear),
        *[(n, ctypes.c_void_p) for n in ("x", "gates", "y")],
    )


def fits(x: Float[Tensor, "*batch width"], rows: int, *weights: Tensor) -> bool:
    """Whether ``x`` is one token for each of a few rows, and the native code is in use and made for such tensors."""
    return (
        x.numel() == rows * x.shape[-1]
        and 0 < rows <= MOST_ROWS
        and native.is_enabled()
        and not torch.is_grad_enabled()
        and native.fits(x.device, x.dtype)
        and all(weight.is_contiguous() and weight.dtype == x.dtype for weight in weights)
    )


def linear(
    weights: Weights, x: Float[Tensor, "*batch d_in"], rows: int, factors: Factors | None = None, scale: float = 1.0
) -> Float[Tensor, "*batch d_out"]:
    """``W x_r + b + s B_r (A_r x_r)`` for each row r."""
    call, x = _Rows(scale=scale), x.contiguous()
    kept = _describe(call.last, weights, factors)
    y = x.new_empty(*x.shape[:-1], weights[0].shape[0])
    _run(call, x, y, rows)
    del kept
    return y


def experts(
    act: kernels.Activation,
    scale: float,
    x: Float[Tensor, "rows 1 width"],
    gates: Float[Tensor, "rows 1 experts"],
    first: Sequence[tuple[Weights, Factors]],
    last: tuple[Weights, Factors],
) -> Float[Tensor, "rows 1 width"]:
    """The mixture of :mod:`comingle.adapters.experts` (``mix: output``) for each row."""
    call, x, gates = _Rows(scale=scale), x.contiguous(), gates.contiguous()
    assert gates.dtype == torch.float32
    kept = [_describe(call.first[i], *one) for i, one in enumerate(first)], _describe(call.last, *last)
    call.firsts, call.experts, call.act = len(first), gates.shape[-1], native.ACTIVATIONS[act]
    call.gates = gates.data_ptr()
    y = torch.empty_like(x)
    _run(call, x, y, len(x))
    del kept
    return y


def _describe(to: _Linear, weights: Weights, factors: Factors | None) -> list[Tensor]:
    """Fill in a linear; what is returned has to live until the call is over."""
    (weight, bias), kept = weights, []
    to.weight, to.bias = weight.data_ptr(), None if bias is None else bias.data_ptr()
    to.d_out, to.d_in = weight.shape
    if factors is not None:
        kept = [factor.contiguous() for factor in factors]
        to.a, to.b = (factor.data_ptr() for factor in kept)
        to.ranks = kept[0].shape[1:-1].numel()
    return kept


def _run(call: _Rows, x: Tensor, y: Tensor, rows: int) -> None:
    call.rows, call.threads, call.bf16 = rows, torch.get_num_threads(), x.dtype == torch.bfloat16
    call.x, call.y = x.data_ptr(), y.data_ptr()
    library = native.library()
    assert library is not None
    library.rows_forward(ctypes.byref(call))


class RowsLinear(nn.Linear):
    """A frozen linear over the very weights of another, for rows of one token as for any."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, bias=False, device="meta")
        self.weight, self.bias = like.weight, like.bias

    def forward(self, input: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """``W x + b``."""
        rows = input.shape[:-1].numel()
        if fits(input, rows, self.weight):
            return linear((self.weight, self.bias), input, rows)
        return super().forward(input)
