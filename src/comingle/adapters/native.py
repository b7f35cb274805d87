"""The compiled form of a mixture's hidden part, for bf16 and float32 on a CPU.

``mixture.cpp`` fuses what :mod:`comingle.adapters.kernels` does in several passes over tensors of the size
(users, experts, n, hidden), and the thin products around them; its head has the formulas. :func:`enable` compiles it
with the C++ compiler that it finds, once for each machine, into a cache folder. Where there is no compiler, or it
fails, or the tensors are of another kind, :func:`supports` says no and the PyTorch path does the work.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.adapters import kernels
from comingle.adapters.compiling import load_library

SOURCES = sorted(Path(__file__).parent.glob("mixture*"), key=lambda path: path.suffix)  # the .cpp first

RANKS = (4, 8, 16)
ACTIVATION_CODES: dict[kernels.Activation, int] = {
    kernels.gelu_tanh: 0,
    kernels.gelu_erf: 1,
    kernels.silu: 2,
    kernels.relu: 3,
}
DTYPES = (torch.bfloat16, torch.float32)

SharedHidden = Float[Tensor, "users n hidden"]
First = Float[Tensor, "users n first_experts_rank"]
Last = Float[Tensor, "users n experts_rank"]
Factor = Float[Tensor, "users experts rank hidden"]

_library: ctypes.CDLL | None = None  # in use
_loaded: ctypes.CDLL | None = None
_elsewhere: Any = None  # what does the same for other devices


class _Mixture(ctypes.Structure):
    """``struct Mixture`` of mixture.cpp."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("users", "n", "hidden", "experts", "rank", "first")],
        *[(n, ctypes.c_int64) for n in ("act", "bf16", "threads", "z_stride")],
        ("scale", ctypes.c_float),
        ("base", ctypes.c_void_p * 2),
        ("bias", ctypes.c_void_p * 2),
        ("z", ctypes.c_void_p),
        ("b", ctypes.c_void_p * 2),
        *[(n, ctypes.c_void_p) for n in ("a", "gates", "mixed", "z_last", "gated", "d_mixed", "d_gated")],
        ("d_base", ctypes.c_void_p * 2),
        ("d_z", ctypes.c_void_p),
        ("d_b", ctypes.c_void_p * 2),
        *[(n, ctypes.c_void_p) for n in ("d_a", "d_gates")],
    )


def enable(cache: Path) -> bool:
    """Compile (or find in ``cache``) the native code and use it from now on; returns whether that worked."""
    global _library, _loaded
    _library = _loaded = _loaded or _load(cache)
    return _library is not None


def disable() -> None:
    """Use the PyTorch path from now on."""
    global _library, _elsewhere
    _library = _elsewhere = None


def use(part: Any) -> None:
    """Have another one of this module's ``supports``, ``forward`` and ``backward`` do what this one does not."""
    global _elsewhere
    _elsewhere = part


def part_for(x: Tensor, act: kernels.Activation, rank: int) -> Any:
    """What has :func:`forward` and :func:`backward` for such tensors, this module or another; None: PyTorch has."""
    parts = (sys.modules[__name__], _elsewhere)
    return next((part for part in parts if part is not None and part.supports(x, act, rank)), None)


def is_enabled() -> bool:
    """Whether native code is in use."""
    return _library is not None


def library() -> ctypes.CDLL | None:
    """The native code, where it is in use."""
    return _library


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether native code is made for such a base."""
    return device.type == "cpu" and dtype in DTYPES


def supports(x: Tensor, act: kernels.Activation, rank: int) -> bool:
    """Whether the native code is enabled and made for such tensors."""
    return (
        _library is not None and fits(x.device, x.dtype) and act in ACTIVATION_CODES and rank in RANKS and x.numel() > 0
    )


def _load(cache: Path) -> ctypes.CDLL | None:
    library = load_library(cache, "mixture", SOURCES)
    if library is None:
        return None
    for function in (library.mixture_forward, library.mixture_backward):
        function.argtypes, function.restype = [ctypes.POINTER(_Mixture)], ctypes.c_bool
    library.rows_forward.restype = None
    return library


# ---------------------------------------------------------------- the two calls


def forward(
    act: kernels.Activation,
    scale: float,
    bases: Sequence[SharedHidden],
    biases: Sequence[Float[Tensor, " hidden"] | None],
    z: First,
    gates: Float[Tensor, "users n experts"],
    b: Sequence[Factor],
    a: Factor,
) -> tuple[SharedHidden, Last, Last]:
    """``mixed = sum_j p_j h_j``, ``z_last_j = s A_j h_j`` and ``p_j z_last_j``, the latter two side by side.

    ``bases`` are the base's pre-activations before their ``biases``, ``z`` the products of the input with the first
    linears' A (linear by linear, expert by expert; rows may lie apart), ``b`` their B, ``a`` the last linear's A. All
    else is contiguous, gates are float32.
    """
    mixed, last = torch.empty_like(bases[0]), z.new_empty(*z.shape[:2], a.shape[1] * a.shape[2])
    gated = torch.empty_like(last)
    call = _describe(act, scale, bases, biases, z, gates, b, a)
    call.mixed, call.z_last, call.gated = (t.data_ptr() for t in (mixed, last, gated))
    assert _library is not None
    assert _library.mixture_forward(ctypes.byref(call))
    return mixed, last, gated


def backward(
    act: kernels.Activation,
    scale: float,
    bases: Sequence[SharedHidden],
    biases: Sequence[Float[Tensor, " hidden"] | None],
    z: First,
    gates: Float[Tensor, "users n experts"],
    b: Sequence[Factor],
    a: Factor,
    last: Last,
    d_mixed: SharedHidden,
    d_gated: Last,
    factors: bool,
) -> tuple[list[SharedHidden], First, Float[Tensor, "users n experts"], list[Factor], Factor | None]:
    """Gradients of the base's pre-activations, of ``z``, of gates, of ``b`` and of ``a``.

    ``d_gated`` is what reaches ``p_j z_last_j``; without ``factors`` the last two are left out.
    """
    d_bases, d_z = [torch.empty_like(t) for t in bases], z.new_empty(z.shape)
    d_gates = torch.empty_like(gates)
    d_b, d_a = ([torch.empty_like(t) for t in b], torch.empty_like(a)) if factors else ([], None)
    call = _describe(act, scale, bases, biases, z, gates, b, a)
    call.z_last, call.d_mixed, call.d_gated = last.data_ptr(), d_mixed.data_ptr(), d_gated.data_ptr()
    call.d_z, call.d_gates = d_z.data_ptr(), d_gates.data_ptr()
    for to, gradients in ((call.d_base, d_bases), (call.d_b, d_b)):
        to[: len(gradients)] = [t.data_ptr() for t in gradients]
    call.d_a = None if d_a is None else d_a.data_ptr()
    assert _library is not None
    assert _library.mixture_backward(ctypes.byref(call))
    return d_bases, d_z, d_gates, d_b, d_a


def _describe(
    act: kernels.Activation,
    scale: float,
    bases: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    z: Tensor,
    gates: Tensor,
    b: Sequence[Tensor],
    a: Tensor,
) -> _Mixture:
    assert all(t.is_contiguous() for t in (*bases, gates, *b, a))
    assert z.stride() == (z.shape[1] * z.stride(1), z.stride(1), 1)
    assert gates.dtype == torch.float32
    users, n, hidden = bases[0].shape
    call = _Mixture(
        users=users, n=n, hidden=hidden, experts=a.shape[1], rank=a.shape[2], first=len(bases), scale=scale,
        act=ACTIVATION_CODES[act], bf16=z.dtype == torch.bfloat16, threads=torch.get_num_threads(),
        z_stride=z.stride(1),        z=z.data_ptr(), gates=gates.data_ptr(), a=a.data_ptr(),
    )  # fmt: skip
    for i, (base, bias, factor) in enumerate(zip(bases, biases, b, strict=True)):
        call.base[i], call.b[i] = base.data_ptr(), factor.data_ptr()
        call.bias[i] = None if bias is None else bias.data_ptr()
    return call
