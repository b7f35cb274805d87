"""LoRA on frozen linear layers, one pair of factors per user.

``y = W x + b + s B (A x)`` with the rank-stabilised scale ``s = alpha / sqrt(rank)`` (CoMiGS eq. 9; Kalajdzievski
2023). A is drawn from kaiming_uniform(a = sqrt 5) and B starts at zero, so an adapted model starts equal to its base.

Residuals are frozen changes ``O^T I`` that a server adds permanently to adapted weights. I ``(rank, d_in)`` and O
``(rank, d_out)`` are in units of the weight itself: LoRA's scale does not apply to them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.models.kernels import expert_mlp
from comingle.utils.errors import BaseModelError
from comingle.utils.trees import Context, Slot, Tree


def lora_scale(alpha: float, rank: int) -> float:
    """Return the rank-stabilised scale ``alpha / sqrt(rank)``."""
    return alpha / math.sqrt(rank)


def init_a(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from ``kaiming_uniform(a = sqrt 5)`` over the last axis: uniform in +-1/sqrt(d_in)."""
    bound = 1 / math.sqrt(shape[-1])
    return torch.rand(shape, generator=generator) * (2 * bound) - bound


def init_zero(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return zeros without drawing from ``generator``."""
    return torch.zeros(shape)


def base_weight(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight ``(d_out, d_in)`` and bias of an ``nn.Linear`` or of GPT-2's ``Conv1D`` (a transposed view)."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    is_conv1d = not isinstance(linear, nn.Linear)
    return (weight.t() if is_conv1d else weight), bias


def weight_shape(linear: nn.Module) -> torch.Size:
    """Return the shape ``(d_out, d_in)`` of a linear's weight, without unpacking a quantised one."""
    if isinstance(linear, nn.Linear):
        return torch.Size([linear.out_features, linear.in_features])
    weight, _bias = base_weight(linear)
    return weight.shape


def multiplies_packed(linear: nn.Module, x: Tensor) -> bool:
    """Return whether ``linear(x)`` is a product with packed weights, without unpacking them.

    Args:
        linear: A linear of the base.
        x: Its input.
    """
    return getattr(linear, "is_packed", False) and expert_mlp.can_multiply_packed(x)


def contiguous_transpose(x: Float[Tensor, "batch n rank"]) -> Float[Tensor, "batch rank n"]:
    """Return the transpose as a contiguous copy, which speeds up products of a thin matrix with a tall one."""
    return x.mT.contiguous()


def low_rank(
    x: Float[Tensor, "users n d_in"],
    a: Float[Tensor, "users rank d_in"],
    b: Float[Tensor, "users rank d_out"],
    scale: float,
    gates: Float[Tensor, "users n rank"] | None = None,
) -> Float[Tensor, "users n d_out"]:
    """Return the low-rank term ``scale * (gates * (x A^T)) B``.

    Args:
        x: Inputs, ``n`` positions per user.
        a: Each user's factor A.
        b: Each user's factor B, transposed.
        scale: LoRA scale.
        gates: Factor of each rank at each position; None for ones.
    """
    if gates is None:
        return cast(Tensor, _LowRank.apply(x, a, b, scale))
    z = scale * torch.bmm(x, a.mT)
    return torch.bmm(gates * z, b)


class _LowRank(torch.autograd.Function):
    """``scale * (x A^T) B`` with a backward pass that is fast for a small rank."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return ``scale * (x A^T) B`` for each user.

        Args:
            ctx: Autograd context.
            x: Inputs, ``(users, n, d_in)``.
            a: Factor A, ``(users, rank, d_in)``.
            b: Factor B, transposed, ``(users, rank, d_out)``.
            scale: LoRA scale.
        """
        z = scale * torch.bmm(x, a.mT)
        ctx.save_for_backward(x, a, b, z)
        ctx.scale = scale
        return torch.bmm(z, b)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of ``x``, A and B that are needed, and None for the scale.

        Args:
            ctx: Autograd context.
            dy: Gradient of the output.
        """
        x, a, b, z = ctx.saved_tensors  # z is scale * x A^T
        d_z = ctx.scale * torch.bmm(dy, b.mT)
        wants_x, wants_a, wants_b = ctx.needs_input_grad[:3]
        d_x = torch.bmm(d_z, a) if wants_x else None
        d_a = torch.bmm(contiguous_transpose(d_z), x) if wants_a else None
        d_b = torch.bmm(contiguous_transpose(z), dy) if wants_b else None
        return d_x, d_a, d_b, None


class LoraLinear(nn.Module):
    """A frozen linear plus each user's LoRA.

    ``factors`` is ``(A, B)`` with shapes ``(users, rank, d_in)`` and ``(users, rank, d_out)``. Set it before each
    forward pass.
    """

    factors: tuple[Tensor, Tensor]

    def __init__(self, linear: nn.Module, *, scale: float):
        """Keep the base's linear; the users' factors are bound later.

        Args:
            linear: The frozen linear of the base.
            scale: LoRA scale.
        """
        super().__init__()
        self.linear = linear
        self.scale = scale

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``W x + b + s B_u (A_u x)`` with the LoRA of each row's user u; rows of ``x`` are ordered by user."""
        a, b = (factor.to(x.dtype) for factor in self.factors)
        users, d_in = a.shape[0], x.shape[-1]
        if multiplies_packed(self.linear, x):
            return self.linear(x) + low_rank(x.reshape(users, -1, d_in), a, b, self.scale).view(*x.shape[:-1], -1)
        weight, bias = base_weight(self.linear)
        if expert_mlp.fits_rows(x, users) and expert_mlp.fits_weight(weight, x):  # generation on a CPU
            return expert_mlp.linear((weight, bias), x, (a, b), self.scale)
        # Not `self.linear(x)` for an nn.Linear, which would unpack a quantised weight again.
        is_conv1d = not isinstance(self.linear, nn.Linear)
        y = self.linear(x) if is_conv1d else nn.functional.linear(x, weight, bias)
        x_by_user = x.reshape(users, -1, d_in)
        return y + low_rank(x_by_user, a, b, self.scale).view(y.shape)


RESIDUAL = "residual"
"""Role of residuals."""

IN, OUT = "residual_in", "residual_out"
"""Suffixes of the names of a residual's factors I and O."""


def residual_slots(linears: Sequence[tuple[str, nn.Module, int]], rank: int) -> list[Slot]:
    """Return the slots (name, shape and role of a tensor) of all residuals' factors I, then of all factors O.

    A residual is a frozen change ``O^T I`` of a linear's weight, which the server adds beside the LoRA.

    Args:
        linears: ``(name, module, experts)`` of each linear; ``experts`` is 0 without an expert axis.
        rank: Rank of the residuals; 0 for the largest full rank of a weight, ``min(d_in, d_out)``.
    """
    weight_shapes = [weight_shape(module) for _name, module, _experts in linears]
    if rank == 0:
        rank = max(min(shape) for shape in weight_shapes)
    slots_of_i, slots_of_o = [], []
    for (name, _, experts), (d_out, d_in) in zip(linears, weight_shapes, strict=True):
        leading = (experts, rank) if experts else (rank,)
        roles = (RESIDUAL,) * max(experts, 1)
        slots_of_i.append(Slot(name=f"{name}.{IN}", shape=(*leading, d_in), roles=roles, init=init_zero))
        slots_of_o.append(Slot(name=f"{name}.{OUT}", shape=(*leading, d_out), roles=roles, init=init_zero))
    return [*slots_of_i, *slots_of_o]


MIDDLE = "r"
"""Suffix of the name of a LoRA's middle matrix R, as in ``W x + s B R A x``, and of roles that name it."""


def factors_of(
    tensors: Tree, name: str, scale: float
) -> tuple[Float[Tensor, "users ... rank d_in"], Float[Tensor, "users ... rank d_out"]]:
    """Return the factors A and B of a linear's LoRA; a residual's factors I and O are appended along the rank axis.

    If the LoRA has a middle matrix R, the first factor is ``R A``.

    The residual ``O^T I`` is a frozen change of the weight. So ``scale * B^T A`` with the returned factors is the sum
    of the LoRA's change and the residual. I is divided by the scale, because the scale does not apply to residuals.

    Args:
        tensors: The users' tensors by name.
        name: Name of the linear.
        scale: LoRA scale, by which the caller multiplies the product of the factors.
    """
    a, b = tensors[f"{name}.a"], tensors[f"{name}.b"]
    if f"{name}.{MIDDLE}" in tensors:
        a = tensors[f"{name}.{MIDDLE}"] @ a
    has_residual = f"{name}.{IN}" in tensors
    if not has_residual:
        return a, b
    i, o = tensors[f"{name}.{IN}"], tensors[f"{name}.{OUT}"]
    return torch.cat([a, i / scale], -2), torch.cat([b, o], -2)


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a PEFT adapter."""

_PLAIN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base's weights
}
"""Settings in the configuration of a PEFT adapter that is ``W + s B A`` with one rank and one scale."""


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """A LoRA in the format of PEFT: ``W + scale * B A`` for some linears of a base model.

    Args:
        name: Folder of the adapter, for errors.
        rank: LoRA rank.
        scale: LoRA scale.
        factors: A ``(rank, d_in)`` and B ``(d_out, rank)`` by name of the linear in the base.
    """

    name: str
    rank: int
    scale: float
    factors: Mapping[str, tuple[Tensor, Tensor]]


def read_peft(folder: Path) -> PeftAdapter:
    """Read a PEFT adapter from its folder.

    Raises:
        BaseModelError: A file is damaged, or the adapter is not a LoRA with one rank and one scale.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BaseModelError(f"{folder}: cannot be read as a PEFT adapter: {type(error).__name__}: {error}") from None
    for key, allowed in _PLAIN_SETTINGS.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise BaseModelError(f"{folder / ADAPTER_CONFIG}: {key}: got {value!r}; allowed: {allowed[0]!r}")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    prefix, a_suffix, b_suffix = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
    for name, a in tensors.items():
        b = tensors.get(f"{name.removesuffix(a_suffix)}{b_suffix}")
        is_a = name.startswith(prefix) and name.endswith(a_suffix)
        if is_a and b is not None and a.shape[:1] == b.shape[1:] == (rank,):
            factors[name.removeprefix(prefix).removesuffix(a_suffix)] = (a.float(), b.float())
    strange = [name for name in tensors if name.removeprefix(prefix).rpartition(".lora_")[0] not in factors]
    if strange or not factors:
        got = repr(min(strange)) if strange else "no tensors"
        allowed = f"pairs {prefix}LAYER{a_suffix} and {b_suffix} of rank {rank}"
        raise BaseModelError(f"{folder / ADAPTER_WEIGHTS}: got {got}; allowed: {allowed}")
    return PeftAdapter(name=str(folder), rank=rank, scale=scale, factors=factors)
