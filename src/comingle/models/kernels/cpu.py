"""Softmax and causal attention as native code for CPUs.

Attention falls back to the family's own (``eager``) for other masks (padding, windows shorter than the text), for
tokens after cached ones, for capped or otherwise changed scores, dropout and float64. The backward pass recomputes
scores, so no tensor of tokens by tokens is kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from comingle.models.hardware import cpu_features
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import load_library
from comingle.models.pretrained import PreTrainedModel
from comingle.models.random_bases import FAMILIES
from comingle.utils.trees import Context

SOURCES = [Path(__file__).with_name(n) for n in ("cpu.cpp", "attention.h", "softmax.h", "mixture_vector.h")]

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
        and expert_mlp.is_enabled()
        and all(expert_mlp.fits(t.device, t.dtype) and t.numel() > 0 for t in tensors)
    )


def library() -> ctypes.CDLL:
    """The code, where it is in use."""
    assert _library is not None
    return _library


class _Softmax(ctypes.Structure):
    """``struct Softmax`` of softmax.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "columns", "bf16", "keep", "threads")],
        *[(n, ctypes.c_void_p) for n in ("logits", "targets", "losses", "totals")],
    )


def softmax(
    logits: Float[Tensor, "n vocab"], targets: Integer[Tensor, " n"], keep: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """As :func:`comingle.models.loss.softmax_parts`, where native code is made for it; the logits are gone afterwards.

    Without ``keep`` they stay, and what stands for the softmax are they.

    Raises:
        IndexError: a target is none of the columns.
    """
    if isinstance(logits, FakeTensor) or not supports(logits) or not logits.is_contiguous():
        return None
    losses, totals = logits.new_empty((2, len(logits)), dtype=torch.float32)
    targets = targets.to(torch.int64).contiguous()
    call = _Softmax(
        *logits.shape,
        logits.dtype == torch.bfloat16,
        keep,
        torch.get_num_threads(),
        *(t.data_ptr() for t in (logits, targets, losses, totals)),
    )
    if not library().softmax_forward(ctypes.byref(call)):
        raise IndexError(f"a target is none of {logits.shape[1]} tokens")
    return losses, logits, totals


NAME = "comingle"
KNOWN = {family.model_type for family in FAMILIES.values()}
"""Families, as transformers calls them, that are compared with their own attention."""
PLAIN = ("sliding_window", "position_ids", "use_cache", "cache_position")
"""Options that change nothing, or only the mask."""

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


def use(network: PreTrainedModel) -> None:
    """Have the attention of ``network`` computed here, if it is of a family that is known to allow it.

    Some families look at the name of their attention and leave to "eager" what they do themselves under others (sparse
    attention), or say that theirs is not causal where the mask makes it so. Which ones do not, tests say.
    """
    config: Any = network.config
    if config._attn_implementation != "eager" or config.model_type not in KNOWN:
        return
    if getattr(config, "reorder_and_upcast_attn", False):  # GPT-2's, which only "eager" has
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    network.set_attn_implementation(NAME)


def mask(*args: Any, **options: Any) -> Tensor | None:
    """The mask of ``eager``, or None where it is causal and nothing else."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    return None if sdpa_mask(*args, **options) is None else eager_mask(*args, **options)


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
    """As an attention function of transformers; weights are given only where the family's own computes."""
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    plain = dropout == 0.0 and all(value is None or name in PLAIN for name, value in options.items())
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if causal and plain and scale > 0 and fits(query, key, value):
        return causal_attention(query, key, value, scale)[0].transpose(1, 2), None
    if causal and query.shape[2] > 1:
        behind = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
        attention_mask = query.new_zeros(()).where(~behind, torch.finfo(query.dtype).min)[None, None]
    own = sys.modules[type(module).__module__].eager_attention_forward
    return own(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether native code is made for such heads: as many keys as queries, all of one width.

    Where there are matrix units PyTorch uses them for bfloat16 and this code does not; which is faster is not known.
    """
    return (
        query.shape[2] == key.shape[2] > 1
        and key.shape == value.shape
        and key.shape[3] == query.shape[3]
        and query.shape[1] % key.shape[1] == 0
        and query.dtype == key.dtype == value.dtype
        and supports(query, key, value)
        and not (query.dtype == torch.bfloat16 and _MATRIX_UNITS)
    )


_MATRIX_UNITS = "amx_bf16" in cpu_features()

# PyTorch keeps compiled code from process to process and knows an operator by its name alone, not by what it takes.
_OPERATOR = f"comingle::causal_attention_{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"


@torch.library.custom_op(
    _OPERATOR,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)",
)
def causal_attention(q: Heads, k: Grouped, v: Grouped, scale: float) -> tuple[Heads, Float[Tensor, "batch heads n 2"]]:
    """``softmax(scale q k^T) v`` over the tokens up to each; the largest score and the sum of exponentials."""
    q, k, v = (_rows(t) for t in (q, k, v))
    out, sums = _like(q), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)
    _run("forward", scale, sums, q=q, k=k, v=v, out=out)
    return out, sums


@torch.library.custom_op(
    f"{_OPERATOR}_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor sums, Tensor d_out, float scale) -> (Tensor, Tensor, Tensor)",
)
def causal_attention_backward(
    q: Heads, k: Grouped, v: Grouped, sums: Float[Tensor, "batch heads n 2"], d_out: Heads, scale: float
) -> tuple[Heads, Grouped, Grouped]:
    """Gradients of :func:`causal_attention` with respect to ``q``, ``k`` and ``v``."""
    q, k, v, d_out = (_rows(t) for t in (q, k, v, d_out))
    d_q, d_k, d_v = (_like(t) for t in (q, k, v))
    _run("backward", scale, sums, q=q, k=k, v=v, d_out=d_out, d_q=d_q, d_k=d_k, d_v=d_v)
    return d_q, d_k, d_v


@causal_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)


@causal_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, d_out: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Context, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *causal_attention_backward(*ctx.saved_tensors, d_out, ctx.scale), None


causal_attention.register_autograd(_gradients, setup_context=_keep)


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(3) == 1 else t.contiguous()


def _like(t: Tensor) -> Tensor:
    """Room for heads that lie as projections give them: token by token."""
    batch, heads, n, width = t.shape
    return t.new_empty(batch, n, heads, width).transpose(1, 2)


def _run(name: str, scale: float, sums: Tensor, **tensors: Tensor) -> None:
    (batch, heads, n, width), bf16 = tensors["q"].shape, tensors["q"].dtype == torch.bfloat16
    groups, threads = tensors["k"].shape[1], torch.get_num_threads()
    call = _Attention(batch, heads, groups, n, width, bf16, threads, scale, sums=sums.data_ptr())
    for key, t in tensors.items():
        setattr(call, key, t.data_ptr())
        setattr(call, f"{key}_steps", (ctypes.c_int64 * 3)(*t.stride()[:3]))
    getattr(library(), f"attention_{name}")(ctypes.byref(call))
