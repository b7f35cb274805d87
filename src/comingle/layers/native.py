"""A convolution of every user's own and what stands behind it, as one call of native code.

``layers.cpp`` and its headers have the formulas and say why. Maps are ``(users, height, width, channels, lanes)``: an
image is a lane, and lanes behind the images fill vectors up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from comingle.adapters.compiling import load_library

SOURCES = sorted(Path(__file__).parent.glob("layers*"), key=lambda path: path.suffix)  # the .cpp first
DTYPES = {torch.float32: "float", torch.float64: "double"}
LANES = {torch.float32: 16, torch.float64: 8}
"""What the number of lanes is a multiple of."""
LARGEST_POOL = 15
"""Places of a window are numbered in a byte."""
NO_NORM, BATCH_NORM, GROUP_NORM = range(3)

_library: ctypes.CDLL | None = None
_tells = False


class StepStruct(ctypes.Structure):
    """``struct Step`` of layers.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("users", "images", "lanes", "threads")],
        *[(n, ctypes.c_int64) for n in ("height", "width", "channels", "high", "wide", "outputs")],
        *[(n, ctypes.c_int64 * 2) for n in ("kernel", "stride", "padding", "dilation")],
        *[(n, ctypes.c_int64) for n in ("norm", "groups", "given", "relu", "pool")],
        *[(f"{n}_stride", ctypes.c_int64) for n in ("weight", "bias", "gamma", "beta")],
        ("eps", ctypes.c_double),
        *[
            (n, ctypes.c_void_p)
            for n in ("x", "weight", "bias", "gamma", "beta", "added", "y", "mean", "rstd", "z", "taken")
        ],
        *[(n, ctypes.c_void_p) for n in ("dz", "passed", "dx", "d_weight", "d_bias", "d_gamma", "d_beta", "d_added")],
    )


def enable(cache: Path) -> bool:
    """Compile (or find in ``cache``) the native code; returns whether that worked."""
    global _library
    _library = _library or load_library(cache, "layers", SOURCES)
    return _library is not None


def fits(tensor: Tensor) -> bool:
    """Whether native code is made for such tensors."""
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES


def supports(x: Tensor) -> bool:
    """Whether the native code is there, and made for such samples."""
    plain = _tells or type(x) is Tensor  # one that stands for another has no memory to read
    return _library is not None and plain and fits(x)


@contextmanager
def telling() -> Iterator[None]:
    """Within, tensors that stand for others are taken too: nothing is computed, all that a step takes is taken."""
    global _tells
    before, _tells = _tells, True
    try:
        yield
    finally:
        _tells = before


def run(name: str, step: StepStruct, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """``forward`` or ``backward`` of a step, on tensors that lie as its structure says."""
    assert _library is not None
    if _tells:
        step.d_weight = int(tensors.get("d_weight") is not None)  # whether there is one is all that is asked
        _room(step, next(t for t in tensors.values() if t is not None))
        return
    for key, tensor in tensors.items():
        setattr(step, key, None if tensor is None else tensor.data_ptr())
    getattr(_library, f"{name}_{DTYPES[dtype]}")(ctypes.byref(step))


def _room(step: StepStruct, like: Tensor) -> None:
    """Take and leave what native code takes besides, at most: ``Needs`` of layers.cpp for each thread."""
    assert _library is not None
    room = getattr(_library, f"room_{DTYPES[like.dtype]}")
    room.restype = ctypes.c_int64
    like.new_empty(min(step.threads, step.users), room(ctypes.byref(step)))
