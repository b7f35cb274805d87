"""Kernels for the hidden layer of a mixture of LoRA experts: PyTorch, and C++ for CPUs.

With ``E`` experts per block the hidden activations are the largest tensors of a step, and passes over them are the main
cost of a routed block besides its base. So the forward pass also returns the derivative (one exponential instead of
two), and the backward pass needs no transcendental functions.

There are three implementations:

- :func:`activate` and :func:`activate_backward` in PyTorch. :func:`fused` compiles them with ``torch.compile`` if that
  is on and possible.
- ``mixture.cpp``, which fuses these functions and the narrow products around them, so that few passes over tensors
  ``(users, experts, n, hidden)`` remain. The formulas are at its top.
- ``mixture_rows.h`` for decoding, that is for a few rows without gradients, where time goes to reading weights. It
  reads each weight once for all rows and adds the adapters in the same pass. PyTorch's products take twice as long for
  eight rows as for one and need a dozen small operations more.

:func:`enable` compiles the C++ code with the machine's compiler, once per machine. :func:`supports` returns False, and
PyTorch is used, if there is no compiler, if compilation fails, or for other devices, number formats and ranks.

Compiled libraries are cached in a folder that only the current user can write to. A library is loaded only if no other
user could have written it and its digest matches.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from comingle.utils.files import open_private
from comingle.utils.records import logger

# No flag that changes values: the sources round on purpose, and NaN must propagate.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
COMPILE_SECONDS = 300.0


def load_library(cache: Path, name: str, sources: Sequence[Path]) -> ctypes.CDLL | None:
    """Load a native library from the cache; compile it first if it is missing or damaged.

    Args:
        cache: Folder of compiled libraries.
        name: Name of the library.
        sources: The file to compile, then the files that it includes.

    Returns:
        The library; None if there is no compiler, compilation fails, or the system is not Linux.
    """
    compiler = _compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    name = f"{name}-{_fingerprint(compiler, sources)}"
    compiled_source, *_ = sources
    try:
        descriptor = _open_cached(cache, name)
        if descriptor is None:
            descriptor = _compile(compiler, cache, name, compiled_source)
        # Loading by descriptor instead of name: the file cannot be replaced after it was checked. It stays open.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except (OSError, subprocess.SubprocessError):
        return None


def _compiler() -> str | None:
    """Return the path of the C++ compiler in the variable CXX, or else of a common one; None if there is none."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    return None


def _fingerprint(compiler: str, sources: Sequence[Path]) -> str:
    """Return a digest of the compiler, its flags, the processor, the version of torch and the sources.

    A compiled library can only be reused if all of these are the same.

    Args:
        compiler: Path of the compiler.
        sources: The source files.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    processor = sorted({line for line in lines if line.lower().startswith(("flags", "features", "model name"))})
    texts = [source.read_text() for source in sources]
    parts = [compiler, *FLAGS, platform.machine(), torch.__version__, *processor, *texts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _open_cached(cache: Path, name: str) -> int | None:
    """Return a file descriptor of a cached library, or None if there is none.

    A file is skipped if another user could have written it, or if its content does not match the digest in its name.

    Args:
        cache: Folder of compiled libraries, with files such as ``"mixture-FINGERPRINT-DIGEST.so"``.
        name: Name of the library with its fingerprint.
    """
    folder = open_private(cache)
    if folder is None:  # missing, or others can write to it
        return None
    try:
        for file in sorted(os.listdir(folder)):
            if not (file.startswith(f"{name}-") and file.endswith(".so")):
                continue
            descriptor = open_private(file, folder=folder)
            if descriptor is None:
                continue
            if file == f"{name}-{_digest(descriptor)}.so":
                return descriptor
            os.close(descriptor)
    finally:
        os.close(folder)
    return None


def _digest(descriptor: int) -> str:
    """Return a digest of an open file's content; the descriptor stays open."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _run_compiler(command: Sequence[str]) -> None:
    """Run a compiler; on a timeout or an interrupt kill it with its subprocesses.

    Raises:
        subprocess.SubprocessError: It fails, or takes longer than 300 seconds.
    """
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    try:
        exit_code = process.wait(COMPILE_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # the process group of the new session
        process.wait()
        raise
    if exit_code != 0:
        raise subprocess.CalledProcessError(exit_code, command)


def _check_private(cache: Path) -> bool:
    """Return whether only this user can write to the cache folder; log a warning otherwise."""
    descriptor = open_private(cache)
    if descriptor is not None:
        os.close(descriptor)
        return True
    logger.warning(
        "%s: owned by another user, a link, or writable by others; compiling native code for this process only; "
        "set COMINGLE_CACHE to a folder that only you can write to, or remove the others' write permission",
        cache,
    )
    return False


def _compile(compiler: str, cache: Path, name: str, source: Path) -> int:
    """Compile a library and return a file descriptor of it; cache it if only this user can write to the folder.

    Args:
        compiler: Path of the compiler.
        cache: Folder of compiled libraries.
        name: Name of the library, to which the file name adds a digest of the content.
        source: The file to compile.

    Raises:
        PermissionError: Another user has replaced the compiled file.
    """
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_cache_private = _check_private(cache)
    parent = cache if is_cache_private else None  # None: the system's folder for temporary files
    with tempfile.TemporaryDirectory(prefix=f"{name}.partial-", dir=parent) as folder:
        compiled = Path(folder) / "made.so"
        _run_compiler([compiler, *FLAGS, str(source), "-o", str(compiled)])
        compiled.chmod(0o700)  # independent of the umask
        descriptor = open_private(compiled)
        if descriptor is None:
            raise PermissionError(f"{compiled}: replaced by another user")
        if is_cache_private:
            compiled.replace(cache / f"{name}-{_digest(descriptor)}.so")
    return descriptor


P = ParamSpec("P")
R = TypeVar("R")

Activation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from pre-activations to (value, derivative)."""

Hidden = Float[Tensor, "users experts n hidden"]
Shared = Float[Tensor, "users n hidden"]
Gates = Float[Tensor, "users n experts"]


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its ``torch.compile``d version is called while :func:`set_fusing` is on."""

    @functools.cache
    def compile_once() -> Callable[P, R]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _fusing:
            return compile_once()(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def set_fusing(on: bool) -> None:
    """Switch torch.compile on or off for all functions with the decorator :func:`fused`.

    A function that cannot be compiled runs as plain PyTorch, without an error.
    """
    global _fusing
    _fusing = on
    if on:
        torch._dynamo.config.suppress_errors = True


def is_fusing() -> bool:
    """Return whether :func:`fused` functions are compiled."""
    return _fusing


_fusing = False


def gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU in its tanh form (GPT-2's ``gelu_new``) and its derivative.

    It is ``x sigmoid(c (x + 0.044715 x^3))`` with ``c = 2 sqrt(2 / pi)``, as ``(1 + tanh t) / 2 = sigmoid(2t)``.
    """
    c = 2 * math.sqrt(2 / math.pi)
    square = x * x
    s = torch.sigmoid(c * x * (1 + 0.044715 * square))
    y = x * s
    derivative = s + y * (1 - s) * c * (1 + 3 * 0.044715 * square)
    return y, derivative


def gelu_erf(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU, ``x`` times the normal distribution function, and its derivative."""
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    derivative = cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * cdf, derivative


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return SiLU (swish), ``x sigmoid(x)``, and its derivative."""
    s = torch.sigmoid(x)
    y = x * s
    derivative = s + y * (1 - s)
    return y, derivative


def relu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ReLU and its derivative, which is 0 at 0 as in PyTorch."""
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
"""Activations by their names in transformers' configurations."""


SHORT = (torch.bfloat16, torch.float16)
"""Number formats of 16 bits."""


def wide(x: Tensor) -> Tensor:
    """Return a tensor in at least float32: 16-bit formats are converted, float64 is unchanged."""
    return x.float() if x.dtype in SHORT else x


@fused
def activate(
    act: Activation, bases: Sequence[Shared], loras: Sequence[Hidden], gates: Gates, wants_slopes: bool
) -> tuple[Hidden, list[Hidden], Shared]:
    """Return the experts' hidden activations ``h_j``, their slopes and their mixture ``mixed = sum_j p_j h_j``.

    A plain MLP has the pre-activation ``up``: ``h_j = act(up_j)`` with the slope ``act'(up_j)``. A gated MLP has
    ``gate`` and ``up``: ``h_j = act(gate_j) up_j`` with the slopes ``act'(gate_j) up_j`` and ``act(gate_j)``.

    Args:
        act: The activation.
        bases: The base's part of each pre-activation.
        loras: The adapters' part of each pre-activation; overwritten with ``h`` and ``act(gate)`` to save memory.
        gates: The experts' probabilities ``p_j``.
        wants_slopes: Return the slopes, which the backward pass needs; otherwise their list is empty.

    Returns:
        ``(h, slopes, mixed)``.
    """
    dtype = bases[0].dtype
    # The base's part is the same for all experts: (users, 1, n, hidden) + (users, experts, n, hidden).
    pre_activations = [wide(base).unsqueeze(1) + wide(lora) for base, lora in zip(bases, loras, strict=True)]
    first, *up = pre_activations  # gate and [up], or up and []
    value, derivative = act(first)
    is_gated = len(up) == 1
    h = value * up[0] if is_gated else value
    mixed = (gates.mT.unsqueeze(-1) * h).sum(1).to(dtype)  # over experts
    slopes = []
    if wants_slopes:
        first_slope = derivative * up[0] if is_gated else derivative
        slopes.append(first_slope.to(dtype).contiguous())
        if is_gated:
            slopes.append(loras[1].copy_(value))
    return loras[0].copy_(h), slopes, mixed


@fused
def activate_backward(
    h: Hidden, slopes: Sequence[Hidden], gates: Gates, d_mixed: Shared, d_h: Hidden
) -> tuple[list[Hidden], list[Shared], Gates]:
    """Return the gradients of :func:`activate` with respect to ``loras``, ``bases`` and ``gates``.

    For each pre-activation, with its slope and the probability p_j of expert j::

        d_lora_j  = (p_j d_mixed + d_h_j) slope_j
        d_base    = sum_j d_lora_j
        d_gates_j = <d_mixed, h_j>

    Args:
        h: Hidden activations from :func:`activate`.
        slopes: Slopes from :func:`activate`.
        gates: The experts' probabilities p_j.
        d_mixed: Gradient of the mixture.
        d_h: Gradient of ``h`` through the last layer's LoRA; overwritten with the first of ``d_loras``.
    """
    d_mixture = wide(d_mixed).unsqueeze(1)  # (users, 1, n, hidden)
    d_hidden = gates.mT.unsqueeze(-1) * d_mixture + wide(d_h)
    d_pre = [d_hidden * wide(slope) for slope in slopes]
    d_bases = [d.sum(1).to(h.dtype) for d in d_pre]  # over experts
    d_gates = (d_mixture * wide(h)).sum(-1).mT  # (users, n, experts)
    first, *others = d_pre
    d_loras = [d_h.copy_(first)]  # in place, to save memory
    d_loras += [d.to(h.dtype).contiguous() for d in others]
    return d_loras, d_bases, d_gates


SOURCES = sorted(Path(__file__).parent.glob("mixture*"), key=lambda path: path.suffix)  # the .cpp first

RANKS = (4, 8, 16)
ACTIVATION_CODES: dict[Activation, int] = {
    gelu_tanh: 0,
    gelu_erf: 1,
    silu: 2,
    relu: 3,
}
DTYPES = (torch.bfloat16, torch.float32)

SharedHidden = Float[Tensor, "users n hidden"]
First = Float[Tensor, "users n first_experts_rank"]
Last = Float[Tensor, "users n experts_rank"]
Factor = Float[Tensor, "users experts rank hidden"]

_library: ctypes.CDLL | None = None  # None while disabled
_loaded: ctypes.CDLL | None = None
_other_backend: Any = None  # backend for other devices


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
    """Use native code for mixtures of experts and for generation from now on; return whether it could be loaded.

    Args:
        cache: Folder of compiled libraries; the code is compiled if it is not there.
    """
    global _library
    _library = load(cache)
    return _library is not None


def load(cache: Path) -> ctypes.CDLL | None:
    """Load the native library once, without using it for mixtures; None if it cannot be compiled.

    Args:
        cache: Folder of compiled libraries; the code is compiled if it is not there.
    """
    global _loaded
    if _loaded is None:
        _loaded = _load(cache)
    return _loaded


def disable() -> None:
    """Stop using native code and the second backend: mixtures of experts run in plain PyTorch from now on."""
    global _library, _other_backend
    _library = _other_backend = None


def set_backend(backend: object) -> None:
    """Set a second backend for expert mixtures, for tensors that this module's C++ code does not support.

    Args:
        backend: An object with functions ``supports``, ``forward`` and ``backward`` like this module; None removes the
            present one.
    """
    global _other_backend
    _other_backend = backend


def backend_for(x: Tensor, act: Activation, rank: int) -> object:
    """Return the backend that runs a mixture of experts; None for plain PyTorch.

    It is this module (C++) or the backend of :func:`set_backend`, whichever first supports the arguments.

    Args:
        x: Input of the MLP.
        act: Activation of the MLP.
        rank: LoRA rank.
    """
    if supports(x, act, rank):
        return sys.modules[__name__]
    if _other_backend is not None and _other_backend.supports(x, act, rank):
        return _other_backend
    return None


def is_enabled() -> bool:
    """Return whether native code is in use."""
    return _library is not None


def library() -> ctypes.CDLL | None:
    """Return the native library; None if it is not in use."""
    return _library


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether native code supports a base with this device and number format."""
    return device.type == "cpu" and dtype in DTYPES


def supports(x: Tensor, act: Activation, rank: int) -> bool:
    """Return whether the native code is in use and supports an MLP's input, activation and rank.

    Args:
        x: Input of the MLP.
        act: Activation of the MLP.
        rank: LoRA rank.
    """
    is_in_use = _library is not None
    supports_input = fits(x.device, x.dtype) and x.numel() > 0
    return is_in_use and supports_input and act in ACTIVATION_CODES and rank in RANKS


def _load(cache: Path) -> ctypes.CDLL | None:
    """Load the native library and declare the types of its functions; None if it cannot be compiled."""
    library = load_library(cache, "mixture", SOURCES)
    if library is None:
        return None
    for function in (library.mixture_forward, library.mixture_backward):
        function.argtypes, function.restype = [ctypes.POINTER(_Mixture)], ctypes.c_bool
    for function in (library.rows_forward, library.decode_step, library.packed_forward):
        function.restype = None
    return library


# ---------------------------------------------------------------- the two calls


def forward(
    act: Activation,
    scale: float,
    bases: Sequence[SharedHidden],
    biases: Sequence[Float[Tensor, " hidden"] | None],
    z: First,
    gates: Float[Tensor, "users n experts"],
    b: Sequence[Factor],
    a: Factor,
) -> tuple[SharedHidden, Last, Last]:
    """Compute the hidden activations h_j of all experts j with native code, and return their mixture.

    The first layers are those that read the MLP's input: gate and up, or up alone. The last layer is down.

    Args:
        act: The activation.
        scale: LoRA scale s.
        bases: ``W x`` for each first layer, with the MLP's input x and the layer's base weight W.
        biases: Biases of the first layers.
        z: Products of the input with A of the first layers, ordered by layer and expert.
        gates: The experts' probabilities ``p_j``, in float32.
        b: B of each first layer.
        a: A of the last layer.

    Returns:
        ``mixed = sum_j p_j h_j``, ``z_last_j = s A_j h_j`` and ``gated_j = p_j z_last_j``, the last two with the ranks
        of all experts side by side.
    """
    users, n = z.shape[:2]
    num_experts, rank = a.shape[1:3]
    mixed = torch.empty_like(bases[0])
    z_last = z.new_empty(users, n, num_experts * rank)
    gated = torch.empty_like(z_last)
    if isinstance(z, FakeTensor):  # shapes only, to count memory
        return mixed, z_last, gated
    call = _mixture_struct(act, scale, bases, biases, z, gates, b, a)
    call.mixed = mixed.data_ptr()
    call.z_last = z_last.data_ptr()
    call.gated = gated.data_ptr()
    assert _library is not None
    assert _library.mixture_forward(ctypes.byref(call))
    return mixed, z_last, gated


def backward(
    act: Activation,
    scale: float,
    bases: Sequence[SharedHidden],
    biases: Sequence[Float[Tensor, " hidden"] | None],
    z: First,
    gates: Float[Tensor, "users n experts"],
    b: Sequence[Factor],
    a: Factor,
    z_last: Last,
    d_mixed: SharedHidden,
    d_gated: Last,
    wants_factors: bool,
) -> tuple[list[SharedHidden], First, Float[Tensor, "users n experts"], list[Factor], Factor | None]:
    """Return the gradients of :func:`forward` with respect to ``bases``, ``z``, ``gates``, ``b`` and ``a``.

    The first layers are those that read the MLP's input: gate and up, or up alone. With the hidden activations h_j of
    expert j and its pre-activation pre_j of each first layer::

        d_h_j     = p_j (d_mixed + s d_gated_j A_j)
        d_pre_j   = d_h_j dh_j/dpre_j
        d_base    = sum_j d_pre_j,                         d_z_j = s d_pre_j B_j^T
        d_gates_j = <d_mixed, h_j> + <d_gated_j, z_last_j>
        d_B_j     = s z_j^T d_pre_j,                       d_A_j = s p_j d_gated_j^T h_j

    Args:
        act: The activation.
        scale: LoRA scale s.
        bases: ``W x`` for each first layer, with the MLP's input x and the layer's base weight W.
        biases: Biases of the first layers.
        z: Products of the input with A of the first layers.
        gates: The experts' probabilities ``p_j``.
        b: B of each first layer.
        a: A of the last layer.
        z_last: ``z_last_j = s A_j h_j`` from :func:`forward`.
        d_mixed: Gradient of the mixture ``sum_j p_j h_j``.
        d_gated: Gradient of ``p_j z_last_j``.
        wants_factors: Compute the gradients of ``b`` and ``a``; otherwise they are an empty list and None.
    """
    d_bases = [torch.empty_like(base) for base in bases]
    d_z = z.new_empty(z.shape)
    d_gates = torch.empty_like(gates)
    d_b = [torch.empty_like(factor) for factor in b] if wants_factors else []
    d_a = torch.empty_like(a) if wants_factors else None
    if isinstance(z, FakeTensor):  # shapes only, to count memory
        return d_bases, d_z, d_gates, d_b, d_a
    call = _mixture_struct(act, scale, bases, biases, z, gates, b, a)
    call.z_last, call.d_mixed, call.d_gated = z_last.data_ptr(), d_mixed.data_ptr(), d_gated.data_ptr()
    call.d_z, call.d_gates = d_z.data_ptr(), d_gates.data_ptr()
    call.d_base[: len(d_bases)] = [gradient.data_ptr() for gradient in d_bases]
    call.d_b[: len(d_b)] = [gradient.data_ptr() for gradient in d_b]
    call.d_a = None if d_a is None else d_a.data_ptr()
    assert _library is not None
    assert _library.mixture_backward(ctypes.byref(call))
    return d_bases, d_z, d_gates, d_b, d_a


def _mixture_struct(
    act: Activation,
    scale: float,
    bases: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    z: Tensor,
    gates: Tensor,
    b: Sequence[Tensor],
    a: Tensor,
) -> _Mixture:
    """Return the C struct of a native call with the inputs' sizes and addresses; the caller adds those of the outputs.

    The caller must keep the tensors alive during the call.

    Args:
        act: The activation.
        scale: LoRA scale.
        bases: ``W x`` for each layer that reads the MLP's input x, with the layer's base weight W.
        biases: Biases of these layers.
        z: Products of the input with A of these layers.
        gates: The experts' probabilities.
        b: B of these layers.
        a: A of the last layer.
    """
    assert all(t.is_contiguous() for t in (*bases, gates, *b, a))
    row_stride = z.stride(1)  # larger than a row if z is a slice of columns
    assert z.stride() == (z.shape[1] * row_stride, row_stride, 1)
    assert gates.dtype == torch.float32
    users, n, hidden = bases[0].shape
    call = _Mixture(
        users=users, n=n, hidden=hidden, experts=a.shape[1], rank=a.shape[2], first=len(bases), scale=scale,
        act=ACTIVATION_CODES[act], bf16=z.dtype == torch.bfloat16, threads=torch.get_num_threads(),
        z_stride=row_stride, z=z.data_ptr(), gates=gates.data_ptr(), a=a.data_ptr(),
    )  # fmt: skip
    for i, (base, bias, factor) in enumerate(zip(bases, biases, b, strict=True)):
        call.base[i] = base.data_ptr()
        call.bias[i] = None if bias is None else bias.data_ptr()
        call.b[i] = factor.data_ptr()
    return call


Factors = tuple[Tensor, Tensor]
"""A ``(users, ..., rank, d_in)`` and B ``(users, ..., rank, d_out)``; rows are ordered by user, equally many each."""
Weights = tuple[Tensor, Tensor | None]
"""Weight ``(d_out, d_in)``, which may be a transposed view, and bias of a linear layer."""

MOST_ROWS = 64
"""The largest number of rows of the kernels for generation; with more rows PyTorch is faster."""


class LinearStruct(ctypes.Structure):
    """``struct RowsLinear`` of mixture_rows.h."""

    _fields_ = (
        *[(n, ctypes.c_void_p) for n in ("weight", "bias", "a", "b")],
        *[(n, ctypes.c_int64) for n in ("d_in", "d_out", "ranks", "turned")],
        ("scales", ctypes.c_void_p),
    )


class _Rows(ctypes.Structure):
    """``struct Rows`` of mixture_rows.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "share", "experts", "firsts", "act", "bf16", "threads")],
        ("scale", ctypes.c_float),
        ("first", LinearStruct * 2),
        ("last", LinearStruct),
        *[(n, ctypes.c_void_p) for n in ("x", "gates", "y")],
    )


def fits_rows(x: Float[Tensor, "*batch width"], users: int) -> bool:
    """Return whether the kernels for generation, :func:`linear` and :func:`experts`, are in use and support an input.

    A row is one token's vector. The kernels support at most 64 rows without gradients: one row per user, or in float32
    one token per text.

    Args:
        x: Input, ``(texts, tokens, width)`` as a rule.
        users: Number of users, with equally many texts each.
    """
    num_rows = x.shape[:-1].numel()
    has_one_row_per_user = num_rows == users
    has_one_token_per_text = x.shape[-2] == 1
    has_supported_rows = has_one_row_per_user or (has_one_token_per_text and x.dtype == torch.float32)
    return (
        has_supported_rows
        and 0 < num_rows <= MOST_ROWS
        and is_enabled()
        and not torch.is_grad_enabled()
        and fits(x.device, x.dtype)
    )


def fits_weight(weight: Float[Tensor, "d_out d_in"], x: Float[Tensor, "*batch width"]) -> bool:
    """Return whether the kernels for generation support a weight: of the dtype of ``x``, contiguous or transposed."""
    is_contiguous_or_transposed = weight.is_contiguous() or weight.t().is_contiguous()
    return weight.dtype == x.dtype and is_contiguous_or_transposed


def linear(
    weights: Weights, x: Float[Tensor, "*batch d_in"], factors: Factors | None = None, scale: float = 1.0
) -> Float[Tensor, "*batch d_out"]:
    """Return ``W x + bias + s B (A x)`` for each row (token), with the native kernel for generation.

    Args:
        weights: Weight W and bias.
        x: The input.
        factors: A and B of each user; a row has those of its user. None for no adapter.
        scale: LoRA scale s.
    """
    x = x.contiguous()
    call = _Rows(scale=scale)
    kept_alive = fill_linear_struct(call.last, weights, factors)  # tensors that the call reads by address
    weight, _ = weights
    d_out = weight.shape[0]
    y = x.new_empty(*x.shape[:-1], d_out)
    num_users = 0
    if factors is not None:
        a, _ = factors
        num_users = len(a)
    _run_rows(call, x, y, num_users)
    del kept_alive
    return y


def experts(
    act: Activation,
    scale: float,
    x: Float[Tensor, "users n width"],
    gates: Float[Tensor, "users n experts"],
    first: Sequence[tuple[Weights, Factors]],
    last: tuple[Weights, Factors],
) -> Float[Tensor, "users n width"]:
    """Return the mixture of the experts' outputs ``sum_j p_j MLP_j(x)``, with the native kernel for generation.

    MLP_j is the base's MLP with the LoRA of expert j on each linear layer.

    Args:
        act: The activation.
        scale: LoRA scale.
        x: The input.
        gates: The experts' probabilities, in float32.
        first: Weights and factors of the layers that read the input: gate and up, or up alone.
        last: Weights and factors of the layer that writes the output.
    """
    assert gates.dtype == torch.float32
    x, gates = x.contiguous(), gates.contiguous()
    call = _Rows(
        scale=scale,
        firsts=len(first),
        experts=gates.shape[-1],
        act=ACTIVATION_CODES[act],
        gates=gates.data_ptr(),
    )
    kept_alive: list[Tensor] = []  # tensors that the call reads by address
    for index, (weights, factors) in enumerate(first):
        kept_alive += fill_linear_struct(call.first[index], weights, factors)
    last_weights, last_factors = last
    kept_alive += fill_linear_struct(call.last, last_weights, last_factors)
    y = torch.empty_like(x)
    _run_rows(call, x, y, num_users=len(x))
    del kept_alive
    return y


def fill_linear_struct(struct: LinearStruct, weights: Weights, factors: Factors | None) -> list[Tensor]:
    """Write addresses and sizes of a linear layer and its factors into a C struct.

    Args:
        struct: The struct, overwritten.
        weights: Weight and bias.
        factors: A and B of each user; None for no adapter.

    Returns:
        Contiguous factors, which the caller must keep alive until the native call has returned.
    """
    weight, bias = weights
    struct.weight = weight.data_ptr()
    struct.bias = None if bias is None else bias.data_ptr()
    struct.d_out, struct.d_in = weight.shape
    is_transposed = not weight.is_contiguous()  # stored as (d_in, d_out)
    struct.turned = is_transposed
    return fill_factors(struct, factors)


def fill_factors(struct: LinearStruct, factors: Factors | None) -> list[Tensor]:
    """Write addresses and sizes of a linear layer's factors into a C struct.

    Args:
        struct: The struct; its other fields are not changed.
        factors: A and B of each user; None for no adapter.

    Returns:
        Contiguous factors, which the caller must keep alive until the native call has returned.
    """
    if factors is None:
        return []
    a, b = (factor.contiguous() for factor in factors)
    struct.a, struct.b = a.data_ptr(), b.data_ptr()
    struct.ranks = a.shape[1:-1].numel()  # the ranks of all experts together
    return [a, b]


def _run_rows(call: _Rows, x: Tensor, y: Tensor, num_users: int) -> None:
    """Run the native kernel for generation: a linear with LoRA, or a mixture of experts, on a few rows of tokens.

    Args:
        call: C struct that holds the layers; sizes and addresses of input and output are added here.
        x: Contiguous input ``(..., d_in)``; each row is a token.
        y: Output, overwritten.
        num_users: Number of users, with equally many rows each; 0 without adapters.
    """
    call.rows = x.shape[:-1].numel()
    rows_per_user = call.rows // num_users if num_users else 1
    call.share = rows_per_user  # that many consecutive rows share the adapters of one user; 1 without adapters
    call.threads = torch.get_num_threads()
    call.bf16 = x.dtype == torch.bfloat16
    call.x, call.y = x.data_ptr(), y.data_ptr()
    native = library()
    assert native is not None
    native.rows_forward(ctypes.byref(call))


class _PackedProduct(ctypes.Structure):
    """``struct PackedProduct`` of mixture_packed.h."""

    _fields_ = (
        ("linear", LinearStruct),
        *[(n, ctypes.c_int64) for n in ("n", "fine", "threads")],
        *[(n, ctypes.c_void_p) for n in ("x", "y")],
    )


def can_multiply_packed(x: Tensor) -> bool:
    """Return whether native code is in use and can multiply packed weights with ``x``: on a CPU, without gradients."""
    return is_enabled() and fits(x.device, x.dtype) and x.numel() > 0 and not torch.is_grad_enabled()


def packed_linear(
    packed: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    shape: torch.Size,
    x: Float[Tensor, "*batch d_in"],
    *,
    fine: bool,
) -> Float[Tensor, "*batch d_out"]:
    """Return ``W x + b`` for packed weights; the inputs of each token are rounded, too.

    Args:
        packed: Integers of the weight (:class:`comingle.models.quantised.Integers`).
        scales: Their scales.
        bias: The bias.
        shape: Shape of the weight, ``(d_out, d_in)``.
        x: The inputs.
        fine: Round inputs to 15 bits instead of 8.
    """
    d_out, d_in = shape
    inputs = x.float().contiguous()
    y = inputs.new_empty(*x.shape[:-1], d_out)
    call = _PackedProduct(
        n=x.shape[:-1].numel(), fine=fine, threads=torch.get_num_threads(), x=inputs.data_ptr(), y=y.data_ptr()
    )
    call.linear.weight, call.linear.scales = packed.data_ptr(), scales.data_ptr()
    call.linear.d_out, call.linear.d_in = d_out, d_in
    wide_bias = None if bias is None else bias.float().contiguous()
    call.linear.bias = None if wide_bias is None else wide_bias.data_ptr()
    native = library()
    assert native is not None
    native.packed_forward(ctypes.byref(call))
    return y.to(x.dtype)


class RowsLinear(nn.Linear):
    """A frozen linear layer that shares the weights of another and uses the kernel for generation where it fits."""

    def __init__(self, like: nn.Linear) -> None:
        """Create a layer that replaces ``like``, such as the output head, to generate text faster on a CPU.

        Args:
            like: A frozen layer, whose weight and bias are shared, not copied. So the weight that ``nn.Linear`` creates
                is on the meta device, where it takes no memory.
        """
        super().__init__(like.in_features, like.out_features, bias=False, device="meta")
        self.weight, self.bias = like.weight, like.bias

    def forward(self, input: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``W x + b``: with native code for the few vectors of a generation step, else with PyTorch."""
        num_rows = input.shape[:-1].numel()
        # The kernel accepts one vector per user. A layer without adapters is the same for all users, so each vector
        # can count as a user.
        if fits_rows(input, users=num_rows) and fits_weight(self.weight, input):
            return linear((self.weight, self.bias), input)
        return super().forward(input)
