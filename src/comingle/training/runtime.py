"""The process that a run lives in: memory allocator, threads, peak memory."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import torch

# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_buffers() -> bool:
    """Keep glibc from returning every large buffer to the system, only to page it in again at the next step.

    A training step frees and allocates the same hundreds of megabytes over and over; by default each large block is
    mapped and unmapped by the kernel, which zeroes it page by page. Returns whether the allocator took the settings.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # musl has no mallopt
        return False
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 << 20}
    return all(mallopt(key, value) == 1 for key, value in settings.items())


def peak_memory_bytes() -> int:
    """Peak resident memory of this process, plus the peaks of what it has allocated on GPUs; a run need not be on the
    one that is current."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return _peak_resident() + sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)


def _peak_resident() -> int:
    """Linux hands ``ru_maxrss`` on from the process that started this one, so there the kernel's own mark is read."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
