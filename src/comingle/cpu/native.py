"""The compiled code of this room, and which tensors it is made for."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from comingle.adapters import native
from comingle.adapters.compiling import load_library

_HERE = Path(__file__).parent
_SHARED = Path(native.__file__).parent / "mixture_vector.h"
SOURCES = [_HERE / "cpu.cpp", *sorted(_HERE.glob("*.h")), _SHARED]

_library: ctypes.CDLL | None = None


def enable(cache: Path) -> bool:
    """Compile (or find in ``cache``) the code; returns whether that worked. It is in use where that of mixtures is."""
    global _library
    _library = _library or _load(cache)
    return _library is not None


def _load(cache: Path) -> ctypes.CDLL | None:
    found = load_library(cache, "cpu", SOURCES)
    if found is not None:
        found.softmax_forward.restype = ctypes.c_bool
        found.attention_forward.restype = found.attention_backward.restype = None
    return found


def supports(*tensors: Tensor) -> bool:
    """Whether the code is in use and made for such tensors."""
    return (
        _library is not None
        and native.is_enabled()
        and all(native.fits(t.device, t.dtype) and t.numel() > 0 for t in tensors)
    )


def library() -> ctypes.CDLL:
    """The code, where it is in use."""
    assert _library is not None
    return _library
