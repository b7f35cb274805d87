"""Softmax, causal attention and the unpacking of quantised weights in C++ for CPUs.

Attention falls back to the family's ``eager`` attention for other masks (padding, sliding windows), with cached tokens,
for soft-capped or otherwise changed scores, dropout and float64. The backward pass recomputes the scores, so no tensor
of tokens by tokens is saved.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Integer, UInt8
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import load_library
from comingle.models.pretrained import PreTrainedModel
from comingle.models.random_bases import FAMILIES
from comingle.utils.trees import Context

SOURCES = [Path(__file__).with_name(n) for n in ("cpu.cpp", "attention.h", "softmax.h", "unpack.h", "mixture_vector.h")]

_library: ctypes.CDLL | None = None


def enable(cache: Path) -> bool:
    """Load the native softmax, attention and unpacking of quantised weights; return whether this succeeded.

    Softmax and attention are used only while the kernels of :mod:`comingle.models.kernels.expert_mlp` are enabled.

    Args:
        cache: Folder of compiled libraries; the code is compiled if it is not there.
    """
    global _library
    _library = _library or _load(cache)
    return _library is not None


def _load(cache: Path) -> ctypes.CDLL | None:
    """Load the native library and declare its functions' result types; None if it cannot be compiled."""
    loaded = load_library(cache, "cpu", SOURCES)
    if loaded is None:
        return None
    loaded.softmax_forward.restype = ctypes.c_bool
    for function in (loaded.attention_forward, loaded.attention_backward, loaded.unpack_weights):
        function.restype = None
    return loaded


def supports(*tensors: Tensor) -> bool:
    """Return whether the native code is in use and supports the tensors: not empty, on a CPU, of a known dtype."""
    is_in_use = _library is not None and expert_mlp.is_enabled()
    return is_in_use and all(expert_mlp.fits(t.device, t.dtype) and t.numel() > 0 for t in tensors)


def library() -> ctypes.CDLL:
    """Return the native library, which must be loaded."""
    assert _library is not None
    return _library


class _Softmax(ctypes.Structure):
    """``struct Softmax`` of softmax.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "columns", "bf16", "keep", "threads")],
        *[(n, ctypes.c_void_p) for n in ("logits", "targets", "losses", "totals")],
    )


def softmax(
    logits: Float[Tensor, "n vocab"], targets: Integer[Tensor, " n"], wants_softmax: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the cross-entropy of each row in nats, and numerators and denominators of the softmax.

    Args:
        logits: Overwritten with the unnormalised softmax ``exp(logit - max)`` if ``wants_softmax``, else unchanged.
        targets: Column of each row's target.
        wants_softmax: Compute the unnormalised softmax, for the backward pass.

    Returns:
        The losses ``(n,)``, ``logits``, and the sums ``(n,)`` of the unnormalised softmax over the vocabulary; None if
        native code does not support the tensors.

    Raises:
        IndexError: A target is not a column of the logits.
    """
    if not supports(logits) or not logits.is_contiguous():
        return None
    losses, totals = logits.new_empty((2, len(logits)), dtype=torch.float32)
    targets = targets.to(torch.int64).contiguous()
    if isinstance(logits, FakeTensor):  # shapes only, to count memory
        return losses, logits, totals
    rows, columns = logits.shape
    call = _Softmax(
        rows=rows,
        columns=columns,
        bf16=logits.dtype == torch.bfloat16,
        keep=wants_softmax,
        threads=torch.get_num_threads(),
        logits=logits.data_ptr(),
        targets=targets.data_ptr(),
        losses=losses.data_ptr(),
        totals=totals.data_ptr(),
    )
    if not library().softmax_forward(ctypes.byref(call)):
        raise IndexError(f"a target is outside of the vocabulary of {logits.shape[1]} tokens")
    return losses, logits, totals


class _Unpack(ctypes.Structure):
    """``struct Unpack`` of unpack.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("count", "block", "bits", "bf16", "threads")],
        *[(n, ctypes.c_void_p) for n in ("packed", "scales", "table", "out")],
    )


def look_up(
    packed: UInt8[Tensor, " bytes"],
    scales: Float[Tensor, " blocks"],
    values: Float[Tensor, " values"],
    count: int,
    block: int,
    dtype: torch.dtype,
) -> Float[Tensor, " count"] | None:
    """Unpack quantised weights with native code: return ``values[code] * scale`` for the code of each weight.

    Args:
        packed: Codes of the weights: a byte holds one code of 8 bits or two of 4 bits.
        scales: Factor of each block.
        values: Value of each code before it is scaled: 256 values (8 bits) or 16 (4 bits).
        count: Number of weights.
        block: Number of consecutive weights that share a scale.
        dtype: Number format of the result.

    Returns:
        The weights; None if native code is not loaded (:func:`enable`) or does not support the tensors.
    """
    if _library is None or not expert_mlp.fits(packed.device, dtype) or count == 0:
        return None
    out = packed.new_empty(count, dtype=dtype)
    if isinstance(packed, FakeTensor):  # shapes only, to count memory
        return out
    call = _Unpack(
        count=count,
        block=block,
        bits=8 if len(values) == 256 else 4,
        bf16=dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
        packed=packed.data_ptr(),
        scales=scales.data_ptr(),
        table=values.data_ptr(),
        out=out.data_ptr(),
    )
    library().unpack_weights(ctypes.byref(call))
    return out


NAME = "comingle"
KNOWN_FAMILIES = {family.model_type for family in FAMILIES.values()}
"""Model types of transformers whose attention is tested against this one."""
HARMLESS_OPTIONS = ("sliding_window", "position_ids", "use_cache", "cache_position")
"""Options of transformers' attention functions that change nothing, or only the mask."""

Heads = Float[Tensor, "batch heads n width"]
Grouped = Float[Tensor, "batch groups n width"]


class _Attention(ctypes.Structure):
    """``struct Attention`` of attention.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("batch", "heads", "groups", "tokens", "width", "bf16", "threads")],
        ("scale", ctypes.c_float),
        *[(n, ctypes.c_void_p) for n in ("q", "k", "v", "out", "d_out")],
        *[(f"{n}_steps", ctypes.c_int64 * 3) for n in ("q", "k", "v", "out", "d_out")],
        *[(n, ctypes.c_void_p) for n in ("sums", "d_q", "d_k", "d_v")],
        *[(f"{n}_steps", ctypes.c_int64 * 3) for n in ("d_q", "d_k", "d_v")],
    )


def use_attention(network: PreTrainedModel) -> None:
    """Let ``network`` use :func:`attend`, native causal attention for CPUs, if it is of a tested family.

    Nothing changes if it does not use transformers' ``eager`` attention.
    """
    config: Any = network.config
    uses_eager_attention = config._attn_implementation == "eager"
    if not uses_eager_attention or config.model_type not in KNOWN_FAMILIES:
        return
    if getattr(config, "reorder_and_upcast_attn", False):  # an option of GPT-2 that only "eager" supports
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    network.set_attn_implementation(NAME)


def mask(*args: Any, **options: Any) -> Tensor | None:
    """Return the additive mask of transformers' ``eager`` attention, or None if the mask is purely causal.

    :func:`attend` can use native code only without a mask.

    Args:
        *args: Arguments with which transformers calls its mask functions, such as sizes and positions.
        **options: Further arguments by name.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    is_purely_causal = sdpa_mask(*args, **options) is None  # transformers skips masks that SDPA does not need
    return None if is_purely_causal else eager_mask(*args, **options)


def attend(
    module: nn.Module,
    query: Heads,
    key: Float[Tensor, "batch groups keys width"],
    value: Float[Tensor, "batch groups keys values"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: object,
) -> tuple[Float[Tensor, "batch n heads values"], Tensor | None]:
    """Compute attention with native code if it supports the arguments, else with the family's ``eager`` attention.

    The arguments and results are those of transformers' attention functions.

    Args:
        module: The attention module.
        query: Queries.
        key: Keys.
        value: Values.
        attention_mask: Additive mask; None for causal or full attention.
        scaling: Factor of the scores; None: 1 / sqrt(width).
        dropout: Dropout of the attention weights.
        is_causal: Whether attention is causal if there is no mask; None: as the module says.
        **options: Other options of the family, which native code supports only if they are harmless.

    Returns:
        The output, and the attention weights (None unless the family's ``eager`` attention returns them).
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_purely_causal = attention_mask is None and is_causal
    has_only_harmless_options = all(value is None or name in HARMLESS_OPTIONS for name, value in options.items())
    is_plain = dropout == 0.0 and has_only_harmless_options
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_purely_causal and is_plain and scale > 0 and supports_attention(query, key, value):
        output, _statistics = causal_attention(query, key, value, scale)
        return output.transpose(1, 2), None
    has_several_queries = query.shape[2] > 1  # a single one may attend to all keys
    if is_purely_causal and has_several_queries:  # `eager` needs an explicit mask
        attention_mask = _causal_mask(query, key)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)


def _causal_mask(query: Tensor, key: Tensor) -> Float[Tensor, "1 1 queries keys"]:
    """Return an additive causal mask: 0, and the dtype's lowest number where a key is later than the query."""
    is_future = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    lowest = torch.finfo(query.dtype).min
    causal_mask = query.new_zeros(()).where(~is_future, lowest)  # (queries, keys)
    return causal_mask[None, None]


def supports_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether native causal attention supports queries, keys and values of these shapes, dtype and device.

    Args:
        query: Queries ``(batch, heads, tokens, width)``.
        key: Keys ``(batch, groups, tokens, width)``.
        value: Values, of the shape of the keys.
    """
    has_no_cached_tokens = query.shape[2] == key.shape[2] > 1
    has_equal_widths = key.shape == value.shape and key.shape[3] == query.shape[3]
    has_whole_groups = query.shape[1] % key.shape[1] == 0  # each key is for equally many query heads
    has_equal_dtypes = query.dtype == key.dtype == value.dtype
    return (
        has_no_cached_tokens
        and has_equal_widths
        and has_whole_groups
        and has_equal_dtypes
        and supports(query, key, value)
    )


# PyTorch caches compiled code across processes by an operator's name, not by its schema: so the name has a digest.
_OPERATOR = f"causal_attention_{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"


def _operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as an operator of PyTorch for the CPU, and returns the operator.

    Unlike ``torch.library.custom_op`` it does not import torch's compiler at the first call.

    Args:
        name: Name of the operator.
        schema: Types of its arguments and results, such as ``"(Tensor q, float scale) -> Tensor"``.
    """

    def register(function: Callable[..., Any]) -> Any:
        full_name = f"comingle::{name}"
        torch.library.define(full_name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(full_name, "cpu", function)
        return getattr(torch.ops.comingle, name).default

    return register


@_operator(_OPERATOR, "(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
def causal_attention(q: Heads, k: Grouped, v: Grouped, scale: float) -> tuple[Heads, Float[Tensor, "batch heads n 2"]]:
    """Return ``softmax(scale q k^T) v`` with a causal mask, and the softmax statistics for the backward pass.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        scale: Factor of the scores.

    Returns:
        The output, and the largest score and the sum of exponentials of each query.
    """
    q, k, v = (_contiguous_rows(t) for t in (q, k, v))
    batch, heads, n, _width = q.shape
    out = _empty_heads(q)
    softmax_statistics = q.new_empty(batch, heads, n, 2, dtype=torch.float32)
    _run_attention("forward", scale, softmax_statistics, q=q, k=k, v=v, out=out)
    return out, softmax_statistics


@_operator(
    f"{_OPERATOR}_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor softmax_statistics, Tensor d_out, float scale) -> (Tensor, Tensor, Tensor)",
)
def causal_attention_backward(
    q: Heads, k: Grouped, v: Grouped, softmax_statistics: Float[Tensor, "batch heads n 2"], d_out: Heads, scale: float
) -> tuple[Heads, Grouped, Grouped]:
    """Return the gradients of :func:`causal_attention` with respect to ``q``, ``k`` and ``v``.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        softmax_statistics: The second result of :func:`causal_attention`.
        d_out: Gradient of the output.
        scale: Factor of the scores.
    """
    q, k, v, d_out = (_contiguous_rows(t) for t in (q, k, v, d_out))
    d_q, d_k, d_v = (_empty_heads(t) for t in (q, k, v))
    _run_attention("backward", scale, softmax_statistics, q=q, k=k, v=v, d_out=d_out, d_q=d_q, d_k=d_k, d_v=d_v)
    return d_q, d_k, d_v


@torch.library.register_fake(f"comingle::{_OPERATOR}")
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return empty results with shapes and layout of the real ones, for torch.compile."""
    return _empty_heads(q), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)


@torch.library.register_fake(f"comingle::{_OPERATOR}_backward")
def _(
    q: Tensor, k: Tensor, v: Tensor, softmax_statistics: Tensor, d_out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty gradients of q, k and v with shapes and layout of the real ones, for torch.compile."""
    return _empty_heads(q), _empty_heads(k), _empty_heads(v)


def _setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save queries, keys, values and softmax statistics for :func:`_backward`.

    Args:
        ctx: Autograd context.
        inputs: Arguments of :func:`causal_attention`.
        output: Its results: the output and the softmax statistics.
    """
    q, k, v, scale = inputs
    _out, softmax_statistics = output
    ctx.save_for_backward(q, k, v, softmax_statistics)
    ctx.scale = scale


def _backward(ctx: Context, d_out: Tensor, _d_statistics: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of :func:`causal_attention`; that of the scale is None."""
    q, k, v, softmax_statistics = ctx.saved_tensors
    d_q, d_k, d_v = causal_attention_backward(q, k, v, softmax_statistics, d_out, ctx.scale)
    return d_q, d_k, d_v, None


torch.library.register_autograd(f"comingle::{_OPERATOR}", _backward, setup_context=_setup_context)


def _contiguous_rows(t: Tensor) -> Tensor:
    """Return the tensor with a contiguous last axis, as native code requires; copied if necessary."""
    return t if t.stride(3) == 1 else t.contiguous()


def _empty_heads(t: Tensor) -> Tensor:
    """Return an empty tensor of the same shape ``(batch, heads, n, width)``, stored as ``(batch, n, heads, width)``.

    So the projections before and after attention find all heads of a token side by side in memory.
    """
    batch, heads, n, width = t.shape
    return t.new_empty(batch, n, heads, width).transpose(1, 2)


def _run_attention(name: str, scale: float, softmax_statistics: Tensor, **tensors: Tensor) -> None:
    """Run the native forward or backward pass of attention.

    Args:
        name: "forward" or "backward".
        scale: Factor of the scores.
        softmax_statistics: Maximum and sum of the softmax of each query, ``(batch, heads, n, 2)``. The forward pass
            writes them for the backward pass.
        **tensors: Inputs and outputs ``(batch, heads, n, width)`` by their field in ``struct Attention``; "k" and "v"
            have fewer heads (``groups``) in grouped-query attention.
    """
    q, k = tensors["q"], tensors["k"]
    batch, heads, n, width = q.shape
    call = _Attention(
        batch=batch,
        heads=heads,
        groups=k.shape[1],
        tokens=n,
        width=width,
        bf16=q.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
        scale=scale,
        sums=softmax_statistics.data_ptr(),
    )
    for field, t in tensors.items():
        setattr(call, field, t.data_ptr())
        strides = t.stride()[:3]  # of batch, heads and tokens; the last axis is contiguous
        setattr(call, f"{field}_steps", (ctypes.c_int64 * 3)(*strides))
    native_pass = getattr(library(), f"attention_{name}")
    native_pass(ctypes.byref(call))
