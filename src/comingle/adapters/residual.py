"""What is added to adapted weights for good, beside their LoRA: of each a frozen change ``O^T I`` that a server makes.

I ``(rank, d_in)`` and O ``(rank, d_out)`` are in units of the weight itself: LoRA's scale does not apply to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.adapters.lora import base_weight, init_zero
from comingle.utils.trees import Slot, Tree

RESIDUAL = "residual"
"""The role of such changes."""

IN, OUT = "residual_in", "residual_out"
"""How the names of its factors end."""


def residual_slots(linears: Sequence[tuple[str, nn.Module, int]], rank: int) -> list[Slot]:
    """Of linears ``(name, module, experts)``, 0 where there is no axis of experts; rank 0 is as high as a change's."""
    shapes = [base_weight(module)[0].shape for _, module, _ in linears]
    rank = rank or max(min(shape) for shape in shapes)
    return [
        Slot(
            name=f"{name}.{end}",
            shape=(*[experts] * (experts > 0), rank, shape[side]),
            roles=(RESIDUAL,) * max(experts, 1),
            init=init_zero,
        )
        for end, side in ((IN, 1), (OUT, 0))
        for (name, _, experts), shape in zip(linears, shapes, strict=True)
    ]


def factors_of(
    tensors: Tree, name: str, scale: float
) -> tuple[Float[Tensor, "users ... rank d_in"], Float[Tensor, "users ... rank d_out"]]:
    """A linear's A and B, with the change that stands beside them as further ranks, where there is one."""
    a, b = tensors[f"{name}.a"], tensors[f"{name}.b"]
    if f"{name}.{IN}" not in tensors:
        return a, b
    wide = torch.cat([a, tensors[f"{name}.{IN}"] / scale], -2)
    return wide, torch.cat([b, tensors[f"{name}.{OUT}"]], -2)
