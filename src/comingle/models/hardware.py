"""Devices, number formats, attention implementations and memory, and torch's global settings during a run."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from comingle.utils.errors import BaseModelError, RecipeError

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
"""Number formats of ``runtime.dtype``, by name."""

ATTENTIONS = ("eager", "sdpa")
"""Implementations of attention in transformers that can be chosen."""


def without_compiling() -> AbstractContextManager[object]:
    """Return a context that runs compiled modules eagerly, for inputs whose shapes would each be compiled anew.

    It does nothing if torch's compiler is not imported: no module is compiled, and the import takes 60 MB.
    """
    is_compiler_imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_compiler_imported else nullcontext()


class _CgroupFiles(NamedTuple):
    """Root of the control groups that limit memory, and the names of their files and of a statistic.

    Args:
        root: Folder of the root group.
        limit: File with the largest memory.
        used: File with the memory in use, cached files included.
        cached: Name in ``memory.stat`` of the bytes of cached files that were not read lately.
    """

    root: Path
    limit: str
    used: str
    cached: str


_OWN_CGROUPS = Path("/proc/self/cgroup")
"""File with the control groups of this process."""

# By the version of control groups.
_CGROUP_FILES = {
    2: _CgroupFiles(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    1: _CgroupFiles(
        Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Reset torch's modes, such as ``no_grad``, to those of a new process; restore the caller's on exit.

    Public methods run in it, also as a decorator, so that results do not depend on modes that the caller has set.
    """
    caller_dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in _AUTOCAST_DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":  # only then, as the context slows down every call
            stack.enter_context(torch.device("cpu"))
        if caller_dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, caller_dtype)
        yield


_AUTOCAST_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
"""Device types whose autocast is switched off."""


def resolve_device(device: str = "auto") -> torch.device:
    """Return the device for "auto" (CUDA if available, else the CPU), "cpu", "cuda", "cuda:N" or "mps".

    Raises:
        BaseModelError: The name is unknown, or this machine has no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = None
    with suppress(RuntimeError):  # not a device of torch
        resolved = torch.device(device)
    if resolved is None or resolved.type not in ("cpu", "cuda", "mps"):
        raise BaseModelError(f"device: got {device!r}; allowed: auto, cpu, cuda, cuda:N, mps.")
    if resolved.type == "cuda":
        _raise_unless_cuda(resolved)
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise BaseModelError("device: got 'mps', but this machine has no Apple GPU; use auto or cpu.")
    return resolved


def _raise_unless_cuda(device: torch.device) -> None:
    """Raise a :class:`BaseModelError` if this machine has no CUDA GPU with the device's index."""
    if not torch.cuda.is_available():
        raise BaseModelError(f"device: got {str(device)!r}, but torch finds no CUDA GPU here; use auto or cpu.")
    index = device.index or 0  # None for "cuda"
    if index >= torch.cuda.device_count():
        raise BaseModelError(f"device: got {str(device)!r}, but torch finds {torch.cuda.device_count()} CUDA GPUs.")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name.

    Args:
        dtype: Name of the dtype, or "auto": bfloat16 if the device multiplies it fast, else float32.
        device: Device of the computations.

    Raises:
        BaseModelError: The name is not auto, bfloat16, float16, float32 or float64.
    """
    if dtype == "auto":
        return torch.bfloat16 if fast_bf16(device) else torch.float32
    if dtype in DTYPES:
        return DTYPES[dtype]
    raise BaseModelError(f"dtype: got {dtype!r}; allowed: auto, {', '.join(DTYPES)}.")


def resolve_attention(attention: str, device: torch.device) -> str | None:
    """Return transformers' attention implementation for a setting.

    Args:
        attention: "auto", "eager" or "sdpa".
        device: The device that computes attention, on which "auto" depends.

    Returns:
        "eager" or "sdpa"; None leaves the choice to transformers.

    Raises:
        BaseModelError: The name is unknown.
    """
    if attention == "auto":
        # On CPUs a backward pass with sdpa takes twice as long (measured with 128 tokens in bfloat16).
        return "eager" if device.type == "cpu" else None
    if attention not in ATTENTIONS:
        raise BaseModelError(f"attention: got {attention!r}; allowed: auto, {', '.join(ATTENTIONS)}.")
    return attention


def require_room(what: str, count: int, parameters: int, kind: str = "models") -> None:
    """Raise an error if models in float32 do not fit into this machine's total memory.

    Args:
        what: The setting that requires them, for the message.
        count: Number of models.
        parameters: Number of parameters of one model.
        kind: Plural noun in the message, such as "models".

    Raises:
        RecipeError: They do not fit.
    """
    bytes_per_model = 4 * parameters
    needed, total = count * bytes_per_model, psutil.virtual_memory().total
    if needed > total:
        raise RecipeError(
            f"{what}: {count:,} {kind} of {parameters:,} parameters need {needed / 2**30:,.0f} GiB; this machine has "
            f"{total / 2**30:,.0f} GiB; allowed: up to {total // bytes_per_model:,}"
        )


def require_bytes(what: str, needed: int, advice: str = "") -> None:
    """Raise an error if data does not fit into this machine's total memory.

    Args:
        what: The data, in the plural, for the message.
        needed: Bytes of the data.
        advice: Appended to the message.

    Raises:
        RecipeError: The data does not fit.
    """
    total = psutil.virtual_memory().total
    if needed > total:
        raise RecipeError(f"{what} need {needed / 2**30:,.0f} GiB; this machine has {total / 2**30:,.0f} GiB{advice}")


def fast_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 matrices faster than float32 ones."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    features = cpu_features()
    if "amx_bf16" in features:
        return True
    # Processors with avx512_fp16 have AMX, too. In a virtual machine that hides AMX their bfloat16 is slow.
    hides_amx = "avx512_fp16" in features
    return "avx512_bf16" in features and not hides_amx


def cpu_features() -> set[str]:
    """Return the processor's features, such as "amx_bf16", by their names in PyTorch or else in Linux."""
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)  # absent from older torch
    if get_capabilities is not None:
        return {name for name, is_present in get_capabilities().items() if is_present is True}
    cpuinfo = Path("/proc/cpuinfo")
    features: set[str] = set()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                features.update(line.split())
    return features


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a process can still allocate on a device; on CPUs within the limits of a container."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    free = int(psutil.virtual_memory().available)
    for folder, names in _cgroups():
        with suppress(OSError, ValueError):  # no such file, or "max": no limit
            limit = int((folder / names.limit).read_text())
            used = int((folder / names.used).read_text())
            droppable = _droppable_bytes(folder / "memory.stat", names.cached)
            free = min(free, limit - used + droppable)
    return free


def private_bytes() -> int:
    """Return the bytes of memory that only this process uses: resident memory without, say, mapped libraries."""
    info = psutil.Process().memory_info()
    shared = getattr(info, "shared", 0)  # some systems do not tell it
    return info.rss - shared


def _cgroups() -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the folders of this process's memory control groups, from its own to the root, and their files' names.

    A line of ``/proc/self/cgroup`` is "4:memory:/a/b" in version 1 of control groups, and "0::/a/b" in version 2.
    """
    with suppress(OSError):
        for line in _OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            version = 1 if controllers else 2
            if version == 1 and "memory" not in controllers.split(","):
                continue
            files = _CGROUP_FILES[version]
            own_folder = files.root / path.lstrip("/")
            for folder in (own_folder, *own_folder.parents):
                if folder.is_relative_to(files.root):
                    yield folder, files


def _droppable_bytes(path: Path, key: str) -> int:
    """Return the bytes of cached files that the system drops when memory is needed.

    Args:
        path: File with the statistics of a control group.
        key: Name of the number of these bytes, such as "inactive_file".
    """
    number_by_name = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())  # such as "cache 4096"
    return int(number_by_name.get(key, 0))


# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8


def keep_buffers() -> bool:
    """Make glibc keep large freed buffers for the next training step, instead of returning them to the system.

    Returns:
        Whether the allocator accepted the settings.
    """
    return _set_malloc_options(
        {
            _M_MMAP_MAX: 0,  # no separate mappings for large blocks
            _M_TRIM_THRESHOLD: 2**31 - 1,  # no trimming of the heap
            _M_TOP_PAD: 64 << 20,  # growth in steps of 64 MiB
        }
    )


def return_buffers() -> bool:
    """Make glibc return large freed buffers to the system at once, which takes less memory and more time.

    Called when the recipe limits memory (``runtime.memory``).

    Returns:
        Whether the allocator accepted the settings.
    """
    return _set_malloc_options(
        {
            _M_MMAP_MAX: 1 << 20,  # up to a million separate mappings, which are unmapped when they are freed
            _M_MMAP_THRESHOLD: 64 << 10,  # blocks from 64 KiB get one
            _M_TRIM_THRESHOLD: 1 << 20,  # the heap keeps at most 1 MiB of free memory at its end
            _M_ARENA_MAX: 1,  # one heap for all threads, as each one keeps free memory
        }
    )


def _set_malloc_options(options: Mapping[int, int]) -> bool:
    """Set options of glibc's memory allocator; return whether it accepted all of them.

    Args:
        options: Values by parameter of mallopt.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # musl has no mallopt
        return False
    return all(mallopt(key, value) == 1 for key, value in options.items())


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process plus the peak memory that it has allocated on each GPU."""
    peak = _peak_resident_bytes()
    if torch.cuda.is_available():
        for gpu in range(torch.cuda.device_count()):
            peak += torch.cuda.max_memory_allocated(gpu)
    return peak


def _peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    # On Linux: not `ru_maxrss`, which a process inherits from its parent.
    with suppress(OSError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        _, _, after_key = status.partition("VmHWM:")  # such as "  8192 kB ..."
        peak_kib, *_ = after_key.split()
        return int(peak_kib) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # which Windows does not have

    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_freed_memory() -> None:
    """Make glibc return the memory that is free now to the system, also between blocks in use; does nothing elsewhere.

    With :func:`keep_buffers` it would stay with the process, for example after users' data was read and converted.
    """
    with suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
