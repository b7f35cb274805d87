"""A base that a program hands over: a loaded model of transformers and its tokenizer."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comingle.models.base import Base, freeze
from comingle.models.folders import check_config, require_finite
from comingle.models.hardware import DTYPES, resolve_attention, resolve_device, resolve_dtype
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import BaseModelError

GIVEN = "given"
"""How a recipe's ``base`` says that a program hands it over."""

_ALLOWED = "allowed: (model, tokenizer) of transformers, a name, or a function that makes an nn.Module"


def given_base(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
) -> Base:
    """A loaded causal language model as a base: frozen, with its weights shared and the model itself left as it is.

    It stays where it is, in the number format that it has; other ones than "auto" have to agree with that. It is known
    again by the digest of its tensors, and called as it was when it was loaded.

    Raises:
        BaseModelError: not a plain causal language model (adapted, quantised, encoder-decoder), or one that is
            elsewhere or in another format than asked for.
    """
    _check(model)
    shared = _share(model)
    tensors = list(shared.parameters())
    base = Base(
        model=shared,
        tokenizer=tokenizer,
        name=getattr(model.config, "_name_or_path", "") or GIVEN,
        dtype=tensors[0].dtype,
        device=tensors[0].device,
        attention=attention,
    )
    _check_place(base, dtype=dtype, device=device)
    if (style := resolve_attention(attention, base.device)) is not None:
        shared.set_attn_implementation(style)
    ends = freeze(shared, tokenizer)
    require_finite(Path(base.name), shared)
    return replace(base, ends=ends)


def _check(model: Any) -> None:
    """Whether it is a model whose layers can be adapted, as far as can be seen from outside."""
    from transformers import PreTrainedModel as Pretrained

    got = type(model).__name__
    if not isinstance(model, Pretrained):
        adapted = "; of an adapted model give model.merge_and_unload()" if hasattr(model, "peft_config") else ""
        raise BaseModelError(f"base: got {got}, which is no model of transformers; {_ALLOWED}{adapted}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise BaseModelError(f"base: {got} has adapters in it; give the model without them")
    config = model.config.to_dict()
    check_config(Path(config.get("_name_or_path") or GIVEN), {**config, "architectures": [got]})
    formats = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    if len(formats) != 1 or not formats <= set(DTYPES.values()):
        told = ", ".join(sorted(str(one).removeprefix("torch.") for one in formats)) or "none"
        raise BaseModelError(f"base: {got} has weights in {told}; allowed: one of {', '.join(DTYPES)} for all")
    places = {tensor.device.type for tensor in model.parameters()}
    if len(places) != 1 or places & {"meta"}:
        raise BaseModelError(f"base: {got} is on {', '.join(sorted(places))}; load it onto one device")


def _check_place(base: Base, *, dtype: str, device: str) -> None:
    """Whether a recipe that names a format or a device names those of the model."""
    if device != "auto" and (wanted := resolve_device(device)).type != base.device.type:
        raise BaseModelError(f"runtime.device: got {device!r}, and the base is on {base.device}; move it to {wanted}")
    if dtype != "auto" and resolve_dtype(dtype, base.device) != base.dtype:
        is_in = str(base.dtype).removeprefix("torch.")
        raise BaseModelError(f"runtime.dtype: got {dtype!r}, and the base is in {is_in}; load it in {dtype}")


def _share(model: PreTrainedModel) -> PreTrainedModel:
    """Modules and configuration of our own around the same numbers: freezing them changes nothing of the model's."""
    memo: dict[int, Any] = {id(t): nn.Parameter(_plain(t), requires_grad=False) for t in model.parameters()}
    memo |= {id(t): _plain(t) for t in model.buffers()}
    with torch.no_grad():
        return copy.deepcopy(model, memo)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that autograd can keep where it was loaded in ``torch.inference_mode``."""
    return tensor.detach().clone() if tensor.is_inference() else tensor.detach()
