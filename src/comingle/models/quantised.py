"""Base models whose linear weights are stored in 8 or 4 bits, to train adapters in less memory.

8 bits are the dynamic 8-bit type with one scale per 256 weights (Dettmers et al. 2022, arXiv:2110.02861); 4 bits are
NF4 with one scale per 64 weights (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). The stored bytes are those of the
package bitsandbytes. Weights are unpacked for each product in the forward and the backward pass and freed afterwards;
products are computed in the base's dtype, and gradients flow through them to the adapters. Embeddings, norms, biases
and the head are not quantised.

To generate text there is a third format, :data:`INTEGERS`: native code multiplies its weights without unpacking them,
and the head has it too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from comingle.models.kernels import cpu, expert_mlp
from comingle.models.layouts import decoder_layers, linear_names
from comingle.models.lora import base_weight

Bits = Literal["8bit", "4bit", "integers"]
"""Formats of weights: those of recipes, and ``"integers"`` to generate text."""
PACKED: Bits = "integers"
"""The format to generate text, :data:`INTEGERS`."""


def _dynamic_values() -> list[float]:
    """Return the 256 values of the dynamic 8-bit type (Dettmers et al. 2022), ascending.

    They are 0, 1, and values of 7 decades with both signs. Decade e, from 0 to 6, has the centres of ``2^e`` equal
    parts of the interval from ``0.1 * 10^(e - 6)`` to ``10^(e - 6)``.
    """
    values = [0.0, 1.0]
    for e in range(7):
        borders = torch.linspace(0.1, 1, 2**e + 1)
        centres = (10 ** (e - 6) * ((borders[:-1] + borders[1:]) / 2)).tolist()
        values += centres
        values += [-centre for centre in centres]
    return sorted(values)


# Quantiles of the normal distribution (QLoRA, appendix E).
_NF4_VALUES = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


@dataclass(frozen=True, eq=False)
class Code:
    """A format of quantised weights: each weight is a value of a table times the scale of its block.

    The scale of a block is its largest magnitude, so the table has values from -1 to 1.

    Args:
        values: The table, ascending.
        block: Number of consecutive weights that share a scale.
        per_byte: Number of weights in a byte; the first one is in the highest bits.
    """

    values: Float[Tensor, " values"]
    block: int
    per_byte: int
    _tables: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def table(self, device: torch.device) -> Float[Tensor, "256 per_byte"]:
        """Return the values of the weights in each possible byte, on a device; made once for each device."""
        if device not in self._tables:
            is_single = self.per_byte == 1
            table = self.values[:, None] if is_single else torch.cartesian_prod(self.values, self.values)
            self._tables[device] = table.to(device)
        return self._tables[device]

    def num_bytes(self, weights: int) -> int:
        """Return the number of bytes of ``weights`` packed weights, without their scales."""
        return math.ceil(weights / self.per_byte)

    def num_scales(self, weights: int) -> int:
        """Return the number of blocks of ``weights`` weights; the last one may be shorter."""
        return math.ceil(weights / self.block)

    def pack(self, weight: Float[Tensor, "d_out d_in"]) -> tuple[UInt8[Tensor, " bytes"], Float[Tensor, " scales"]]:
        """Quantise a weight.

        Returns:
            Bytes with the index of each weight's nearest value in ``self.values``, and the scale of each block.
        """
        flat = weight.detach().float().flatten()
        num_padding = self.num_scales(len(flat)) * self.block - len(flat)  # zeros that complete the last block
        blocks = nn.functional.pad(flat, (0, num_padding)).view(-1, self.block)
        scales = blocks.abs().amax(1)
        divisors = torch.where(scales > 0, scales, 1.0)
        normalised = blocks * (1 / divisors)[:, None]  # not `blocks / divisors`, to round as bitsandbytes does
        borders = (self.values[1:] + self.values[:-1]) / 2
        indices = torch.bucketize(normalised, borders.to(flat.device))
        num_indices = self.num_bytes(len(flat)) * self.per_byte  # without padding, except half a byte
        codes = indices.flatten()[:num_indices].to(torch.uint8)
        if self.per_byte == 1:
            return codes.contiguous(), scales
        high_bits, low_bits = codes[::2], codes[1::2]
        return high_bits << 4 | low_bits, scales

    def unpack(
        self, packed: UInt8[Tensor, " bytes"], scales: Float[Tensor, " scales"], shape: torch.Size, dtype: torch.dtype
    ) -> Float[Tensor, "d_out d_in"]:
        """Return a packed weight as a new tensor, unpacked with native code if that is in use.

        Args:
            packed: The bytes, from :meth:`pack`.
            scales: The blocks' scales.
            shape: Shape of the weight.
            dtype: Number format of the result.
        """
        num_weights = shape.numel()
        unpacked = cpu.look_up(packed, scales, self.values, num_weights, self.block, dtype)  # with native code
        if unpacked is not None:
            return unpacked.view(shape)
        values_by_byte = self.table(packed.device)
        values = values_by_byte.index_select(0, packed.int()).flatten()
        num_padding = len(scales) * self.block - len(values)  # of the last block
        blocks = nn.functional.pad(values, (0, num_padding)).view(-1, self.block)
        weights = (blocks * scales[:, None]).to(dtype).flatten()
        return weights[:num_weights].view(shape)

    def empty(
        self, shape: torch.Size, device: torch.device
    ) -> tuple[UInt8[Tensor, " bytes"], Float[Tensor, " scales"]]:
        """Return bytes and scales of undefined values for a weight of a shape."""
        num_weights = shape.numel()
        packed = torch.empty(self.num_bytes(num_weights), dtype=torch.uint8, device=device)
        return packed, torch.empty(self.num_scales(num_weights), device=device)


@dataclass(frozen=True, eq=False)
class Integers:
    """Integers from -127 to 127, with a scale for ``span`` consecutive inputs of an output, as in llama.cpp's Q8_0.

    Weights of ``group`` outputs are interleaved, four inputs of each at a time, and their scales
    too: dot-product instructions of processors read them in this order (``mixture_packed.h``). Shapes are padded.
    """

    span: int = 32
    group: int = 16
    _rows_at_once: int = 1024

    def pack(self, weight: Float[Tensor, "d_out d_in"]) -> tuple[UInt8[Tensor, " bytes"], Float[Tensor, " scales"]]:
        """Quantise a weight, some rows at a time; return the bytes and the scales."""
        packed, scales = self.empty(weight.shape, weight.device)
        levels, all_scales = packed.view(torch.int8).view(*self._interleaved(weight.shape)), scales.view(-1, self.group)
        for start in range(0, len(weight), self._rows_at_once):
            rows = weight[start : start + self._rows_at_once].detach().float()
            padding = (0, -rows.shape[1] % self.span, 0, -len(rows) % self.group)
            blocks = nn.functional.pad(rows, padding).unflatten(1, (-1, self.span))
            of_blocks = blocks.abs().amax(2) / 127
            divisors = of_blocks.where(of_blocks > 0, 1.0)
            whole = (blocks / divisors.unsqueeze(2)).round().clamp(-127, 127).to(torch.int8)
            groups = slice(start // self.group, (start + len(blocks)) // self.group)
            levels[groups] = whole.view(-1, self.group, blocks.shape[1] * self.span // 4, 4).transpose(1, 2)
            spans = blocks.shape[1]
            all_scales[groups.start * spans : groups.stop * spans] = (
                of_blocks.view(-1, self.group, spans).transpose(1, 2).reshape(-1, self.group)
            )
        return packed, scales

    def unpack(
        self, packed: UInt8[Tensor, " bytes"], scales: Float[Tensor, " scales"], shape: torch.Size, dtype: torch.dtype
    ) -> Float[Tensor, "d_out d_in"]:
        """Return a packed weight as a new tensor.

        Args:
            packed: The bytes, from :meth:`pack`.
            scales: The blocks' scales.
            shape: Shape of the weight.
            dtype: Number format of the result.
        """
        groups, fours, group, _four = self._interleaved(shape)
        levels = packed.view(torch.int8).view(groups, fours, group, 4).transpose(1, 2).reshape(groups, group, -1)
        factors = scales.view(groups, -1, group).transpose(1, 2)  # (groups, group, blocks)
        weights = levels.unflatten(2, (-1, self.span)) * factors.unsqueeze(3)
        return weights.reshape(groups * group, -1)[: shape[0], : shape[1]].to(dtype).contiguous()

    def empty(
        self, shape: torch.Size, device: torch.device
    ) -> tuple[UInt8[Tensor, " bytes"], Float[Tensor, " scales"]]:
        """Return bytes and scales of undefined values for a weight of a shape."""
        num_bytes = math.prod(self._interleaved(shape))
        packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return packed, torch.empty(num_bytes // self.span, device=device)

    def _interleaved(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """Return the shape of the bytes: ``(groups, fours, group, 4)``."""
        d_out, d_in = shape
        return math.ceil(d_out / self.group), math.ceil(d_in / self.span) * self.span // 4, self.group, 4


CODES: dict[Bits, Code] = {
    "8bit": Code(torch.tensor(_dynamic_values()), block=256, per_byte=1),
    "4bit": Code(torch.tensor(_NF4_VALUES), block=64, per_byte=2),
}
"""The formats, by their names in recipes."""

INTEGERS = Integers()
"""The format to generate text."""


def code_of(bits: Bits) -> Code | Integers:
    """Return a format of weights by its name."""
    return INTEGERS if bits == PACKED else CODES[bits]


_layer_by_storage: dict[int, tuple[Any, QuantisedLinear]] = {}
"""Layer of each live unpacked weight, by the weight's storage."""


class QuantisedLinear(nn.Linear):
    """A frozen linear with a packed weight; each access to ``weight`` unpacks it."""

    packed: Tensor
    scales: Tensor

    def __init__(
        self, shape: torch.Size, bias: nn.Parameter | None, bits: Bits, dtype: torch.dtype, device: torch.device
    ):
        """Create a layer with the buffers ``packed`` and ``scales``, whose values are undefined.

        Args:
            shape: Shape of the weight, ``(d_out, d_in)``.
            bias: The bias, which is not packed.
            bits: Format of the weight.
            dtype: Number format of the unpacked weight.
            device: Device of the buffers.
        """
        nn.Module.__init__(self)  # not nn.Linear's, which would allocate the weight
        self.out_features, self.in_features = shape
        self.code, self.dtype, self.bias = code_of(bits), dtype, bias
        packed, scales = self.code.empty(shape, device)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)

    @property
    def is_packed(self) -> bool:
        """True if native code can multiply the weight without unpacking it."""
        return isinstance(self.code, Integers)

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:  # type: ignore[override]
        """The unpacked weight, a new tensor at each access.

        It is registered while it is alive, so that :func:`unpack_in_backward` knows from which layer it comes.
        """
        unpacked = self.unpack()
        storage = unpacked.untyped_storage()
        key = storage._cdata  # the address of the storage, the same for all views of the weight

        def unregister(_reference: object) -> None:
            _layer_by_storage.pop(key, None)

        _layer_by_storage[key] = (weakref.ref(storage, unregister), self)
        return unpacked

    def forward(self, input: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``W x + b``; the weight stays packed if its format and native code allow it, without gradients."""
        return self.multiply(input, fine=True)

    def multiply(self, x: Float[Tensor, "*batch d_in"], *, fine: bool) -> Float[Tensor, "*batch d_out"]:
        """Return :meth:`forward`, with inputs rounded to 15 bits if ``fine``, else to 8, if the weight stays packed.

        Attention and the head need 15 bits: with 8 they add as much to the loss as the rounding of all weights.
        """
        if self.is_packed and expert_mlp.can_multiply_packed(x):
            shape = torch.Size([self.out_features, self.in_features])
            return expert_mlp.packed_linear(self.packed, self.scales, self.bias, shape, x, fine=fine)
        return super().forward(x)

    def unpack(self) -> Float[Tensor, "d_out d_in"]:
        """Return the weight as a new tensor in the base's dtype."""
        shape = torch.Size([self.out_features, self.in_features])
        return self.code.unpack(self.packed, self.scales, shape, self.dtype)


def quantise(model: nn.Module, bits: Bits, device: torch.device) -> None:
    """Quantise the linears of a model's decoder layers, in place.

    Args:
        model: The model.
        bits: Format of the packed weights.
        device: Device on which the weights are packed, and stay.
    """

    replace_linears(model, lambda weight, bias: quantise_linear(weight, bias, bits, device))


def quantise_linear(weight: Tensor, bias: nn.Parameter | None, bits: Bits, device: torch.device) -> QuantisedLinear:
    """Return a linear layer with a packed copy of a weight.

    Args:
        weight: The weight, ``(d_out, d_in)``.
        bias: The bias, which is shared.
        bits: Format of the packed weight.
        device: Device on which the weight is packed, and stays.
    """
    linear = QuantisedLinear(weight.shape, bias, bits, weight.dtype, device)
    linear.packed, linear.scales = linear.code.pack(weight.to(device))
    return linear


def quantise_shapes(model: nn.Module, bits: Bits, device: torch.device) -> None:
    """Replace the linears of a model's decoder layers by quantised ones whose values are undefined, in place.

    Callers then load the values from a file, or only estimate memory.

    Args:
        model: The model.
        bits: Format of the packed weights.
        device: Device of the packed weights.
    """

    def make_empty(weight: Tensor, bias: nn.Parameter | None) -> QuantisedLinear:
        return QuantisedLinear(weight.shape, bias, bits, weight.dtype, device)

    replace_linears(model, make_empty)


@torch.no_grad()
def replace_linears(model: nn.Module, make: Callable[[Tensor, Any], nn.Module]) -> None:
    """Replace the linears of a model's decoder layers, in place.

    Args:
        model: The model.
        make: Function that returns the new module for a weight ``(d_out, d_in)`` and a bias.
    """
    for layer in decoder_layers(model):
        for name in list(linear_names(layer)):  # such as "mlp.up_proj"
            weight, bias = base_weight(layer.get_submodule(name))
            parent_name, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(parent_name), attribute, make(weight, bias))


def packed_parameters(model: nn.Module) -> int:
    """Return the number of quantised weights of a model."""
    return sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantisedLinear))


@contextmanager
def unpack_in_backward() -> Iterator[None]:
    """Let autograd save quantised weights for the backward pass in the context, and unpack them again there.

    Otherwise it would keep the unpacked, larger copies of all layers' weights until the backward pass.
    """
    with torch.autograd.graph.saved_tensors_hooks(_pack_saved, _restore_saved):
        yield


_PackedView = tuple["QuantisedLinear", torch.Size, tuple[int, ...], int | torch.SymInt]
"""A packed linear, and shape, strides and offset of a view of its weight."""


def _pack_saved(t: Tensor) -> Tensor | _PackedView:
    """Return what autograd saves for a tensor, normally the tensor itself.

    For a view of the unpacked weight of a quantised layer it is the layer and the view's position in the weight, so
    that the weight can be unpacked again in the backward pass instead of staying in memory.
    """
    storage_and_linear = _layer_by_storage.get(t.untyped_storage()._cdata)
    if storage_and_linear is None:  # not an unpacked weight
        return t
    _, linear = storage_and_linear
    return linear, t.shape, t.stride(), t.storage_offset()


def _restore_saved(saved: Tensor | _PackedView) -> Tensor:
    """Return a saved tensor of the forward pass to autograd's backward pass.

    Args:
        saved: What :func:`_pack_saved` returned: the tensor itself, or a view of a packed linear's weight, which is
            unpacked again.
    """
    if isinstance(saved, Tensor):
        return saved
    linear, shape, strides, offset = saved
    return linear.weight.as_strided(shape, strides, offset)
