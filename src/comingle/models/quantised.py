"""A frozen base whose weights take 8 or 4 bits each: the linears of its decoder layers, by bitsandbytes.

8 bits are a dynamic floating-point code with one scale for 256 weights (Dettmers et al. 2022, arXiv:2110.02861), 4 bits
are NF4 with one for 64 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). Products are computed in the base's format on
weights that are unpacked when they are needed and given back at once, in the forward and in the backward pass;
gradients flow through them to the adapters. Embeddings, norms, biases and the head stay as they are.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.models.layouts import decoder_layers, linear_names
from comingle.models.lora import base_weight
from comingle.utils.errors import BaseModelError

Bits = Literal["8bit", "4bit"]
BLOCKS = {"8bit": 256, "4bit": 64}

_sources: dict[int, tuple[Any, QuantisedLinear]] = {}
"""By the storage of each unpacked weight that is alive, whose it is."""


class QuantisedLinear(nn.Linear):
    """A frozen linear that keeps its weight packed; ``weight`` unpacks it anew each time."""

    def __init__(self, weight: Float[Tensor, "d_out d_in"], bias: nn.Parameter | None, bits: Bits):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.bits, self.dtype, self.bias = bits, weight.dtype, bias
        functional = _functional()
        pack = functional.quantize_nf4 if bits == "4bit" else functional.quantize_blockwise
        packed, state = pack(weight.contiguous(), blocksize=BLOCKS[bits])
        for name, t in {"packed": packed, "scales": state.absmax, "code": state.code}.items():
            self.register_buffer(name, t)

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:  # type: ignore[override]
        """The weight as products take it."""
        unpacked = self.unpack()
        storage = unpacked.untyped_storage()
        key = storage._cdata
        _sources[key] = (weakref.ref(storage, lambda _: _sources.pop(key, None)), self)
        return unpacked

    def unpack(self) -> Float[Tensor, "d_out d_in"]:
        """A new tensor with the weight in the base's format."""
        functional = _functional()
        shape = torch.Size([self.out_features, self.in_features])
        kept: dict[str, Any] = {"code": self.code, "blocksize": BLOCKS[self.bits], "dtype": self.dtype}
        if self.bits == "4bit":
            state = functional.QuantState(self.scales, shape=shape, quant_type="nf4", **kept)
            return functional.dequantize_4bit(self.packed, state)
        return functional.dequantize_blockwise(self.packed, functional.QuantState(self.scales, **kept))


def quantise(model: nn.Module, bits: Bits, device: torch.device) -> None:
    """Pack the linears of a model's decoder layers, in place; each is packed on ``device``.

    Raises:
        BaseModelError: bitsandbytes is not installed, or cannot be used here.
    """
    _functional()
    replace_linears(model, lambda weight, bias: QuantisedLinear(weight.to(device), bias, bits))


@torch.no_grad()
def replace_linears(model: nn.Module, make: Callable[[Tensor, Any], nn.Module]) -> None:
    """Put what ``make`` makes of weight ``(d_out, d_in)`` and bias in the place of the decoder layers' linears."""
    for layer in decoder_layers(model):
        for name in list(linear_names(layer)):
            linear = layer.get_submodule(name)
            setattr(layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], make(*base_weight(linear)))


def packed_parameters(model: nn.Module) -> int:
    """How many weights of a model are packed."""
    return sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantisedLinear))


@contextmanager
def giving_back() -> Iterator[None]:
    """Within, no unpacked weight is kept for the backward pass: it is unpacked once more there."""
    with torch.autograd.graph.saved_tensors_hooks(_put_away, _bring_back):
        yield


def _put_away(t: Tensor) -> Any:
    source = _sources.get(t.untyped_storage()._cdata)
    return t if source is None else (source[1], t.shape, t.stride(), t.storage_offset())


def _bring_back(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    linear, *place = kept
    return linear.weight.as_strided(*place)


def _functional() -> Any:
    try:
        return importlib.import_module("bitsandbytes.functional")
    except Exception as error:  # a library that looks for GPUs, compilers and kernels as it is imported
        raise BaseModelError(
            f"quantise: needs the package bitsandbytes (pip install 'comingle[quantised]'): {error}"
        ) from error
