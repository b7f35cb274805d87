"""The hidden part of a mixture of experts by Triton kernels: what :mod:`comingle.models.kernels.expert_mlp` is on a
CPU.

Used where ``runtime.gpu`` names ``triton``; ranks up to 32, bf16 and float32. No tensor with both an expert and a
hidden axis exists, and the backward pass recomputes activations instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from comingle.models.adapted import AdaptedModel
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import ACTIVATION_CODES, DTYPES, Factor, First, Gates, Last, SharedHidden
from comingle.utils.errors import RecipeError

MOST_RANKS = 32
TOKENS, COLUMNS, SPAN = 32, 64, 2048
"""A tile, and the tokens whose gradients of factors are summed by one program."""
LEAST = 16
"""The smallest inner dimension of a product of tiles."""


def with_triton(model: AdaptedModel) -> AdaptedModel:
    """``runtime.gpu: [triton]``: the model, with Triton kernels for the hidden part of mixtures from now on.

    Raises:
        RecipeError: it is on no NVIDIA GPU, or there is no Triton.
    """
    expert_mlp.use(part_on(model.device))
    return model


def part_on(device: torch.device) -> Part:
    """What computes the hidden part of mixtures on a device.

    Raises:
        RecipeError: as :func:`with_triton`.
    """
    if find_spec("triton") is None:
        raise RecipeError("runtime.gpu: got 'triton', which is not installed here; pip install triton, or leave it out")
    from comingle.models.kernels import triton_kernels as programs

    if device.type != "cuda" and not programs.INTERPRETED:
        raise RecipeError(f"runtime.gpu: got 'triton' on device {device.type!r}; allowed: a CUDA GPU")
    return Part(programs)


class Part:
    """The passes of :mod:`comingle.models.kernels.expert_mlp` on a GPU, and which tensors they accept."""

    def __init__(self, programs: ModuleType):
        self.programs = programs

    def supports(self, x: Tensor, act: expert_mlp.Activation, rank: int) -> bool:
        """Whether the kernels are made for such tensors; they are asked for bases on CPUs too, as they are in use."""
        real = x.numel() > 0 and not isinstance(x, FakeTensor) and (x.is_cuda or self.programs.INTERPRETED)
        return real and x.dtype in DTYPES and act in ACTIVATION_CODES and rank <= MOST_RANKS

    def forward(
        self,
        act: expert_mlp.Activation,
        scale: float,
        bases: Sequence[SharedHidden],
        biases: Sequence[Tensor | None],
        z: First,
        gates: Gates,
        b: Sequence[Factor],
        a: Factor,
    ) -> tuple[SharedHidden, Last, Last]:
        """As :func:`comingle.models.kernels.expert_mlp.forward`."""
        users, n, hidden = bases[0].shape
        experts, rank = a.shape[1:3]
        chunks = -(-hidden // COLUMNS)
        mixed = torch.empty_like(bases[0])
        parts = a.new_empty(chunks, users, n, experts * rank, dtype=torch.float32)
        given = _given(bases, biases, z, gates, b, a)
        sizes = _sizes(act, biases, a)
        with torch.cuda.device_of(mixed):  # Triton launches on the current device
            self.programs.forward[chunks, -(-n // TOKENS), users](
                *given, mixed, parts, n, hidden, scale, *z.stride()[:2], **sizes
            )
        last = parts.sum(0).mul_(scale)
        gated = last.view(users, n, experts, rank) * gates.unsqueeze(-1)
        return mixed, last.to(z.dtype), gated.flatten(2).to(z.dtype)

    def backward(
        self,
        act: expert_mlp.Activation,
        scale: float,
        bases: Sequence[SharedHidden],
        biases: Sequence[Tensor | None],
        z: First,
        gates: Gates,
        b: Sequence[Factor],
        a: Factor,
        last: Last,
        d_mixed: SharedHidden,
        d_gated: Last,
        factors: bool,
    ) -> tuple[list[SharedHidden], First, Gates, list[Factor], Factor | None]:
        """As :func:`comingle.models.kernels.expert_mlp.backward`."""
        users, n, hidden = bases[0].shape
        experts, rank = a.shape[1:3]
        chunks = -(-hidden // COLUMNS)
        d_mixed, d_gated = d_mixed.contiguous(), d_gated.contiguous()
        d_bases = [torch.empty_like(base) for base in bases]
        d_z = a.new_empty(chunks, users, n, len(b) * experts * rank, dtype=torch.float32)
        d_gates = a.new_empty(chunks, *gates.shape, dtype=torch.float32)
        given = (*_given(bases, biases, z, gates, b, a), d_mixed, d_gated)
        numbers, sizes = (n, hidden, scale, *z.stride()[:2]), _sizes(act, biases, a)
        with torch.cuda.device_of(d_mixed):
            self.programs.backward[chunks, -(-n // TOKENS), users](
                *given, d_bases[0], d_bases[-1], d_z, d_gates, *numbers, **sizes
            )
        found: list[Factor] = []
        if factors:
            ranges = -(-n // SPAN)
            parts = [a.new_empty(ranges, *a.shape, dtype=torch.float32) for _ in (*b, a)]
            with torch.cuda.device_of(d_mixed):
                self.programs.backward_factors[chunks, ranges, users * experts](
                    *given, parts[0], parts[-2], parts[-1], *numbers, SPAN, **sizes
                )
            found = [part.sum(0).to(a.dtype) for part in parts]
        thin = (d_gated.float() * last.float()).view(users, n, experts, rank).sum(-1)
        *d_b, d_a = found or [None]
        return d_bases, d_z.sum(0).mul_(scale).to(z.dtype), d_gates.sum(0) + thin, d_b, d_a  # type: ignore[return-value]


def _given(
    bases: Sequence[Tensor], biases: Sequence[Tensor | None], z: Tensor, gates: Tensor, b: Sequence[Tensor], a: Tensor
) -> tuple[Any, ...]:
    """The kernels' first arguments; of what a plain MLP has once, the same twice, and any address for no bias."""
    assert all(t.is_contiguous() for t in (*bases, gates, *b, a))
    assert z.stride(2) == 1
    addresses = [bases[0] if bias is None else bias for bias in biases]
    return bases[0], bases[-1], addresses[0], addresses[-1], z, gates, b[0], b[-1], a


def _sizes(act: expert_mlp.Activation, biases: Sequence[Tensor | None], a: Tensor) -> dict[str, Any]:
    rank = a.shape[2]
    return {
        "ACT": ACTIVATION_CODES[act],
        "FIRST": len(biases),
        "BIASED_0": biases[0] is not None,
        "BIASED_1": biases[-1] is not None,
        "EXPERTS": a.shape[1],
        "RANK": rank,
        "WIDE": max(LEAST, 1 << (rank - 1).bit_length()),
        "TOKENS": TOKENS,
        "COLUMNS": COLUMNS,
        "PRECISION": "ieee" if a.dtype == torch.float32 else "tf32",
    }
