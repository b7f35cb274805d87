"""A block's MLP as a mixture of LoRA experts, for all users of a cohort at once.

An expert is the whole MLP with its own LoRA on every linear; the outputs are mixed after the last one::

    y = sum_j p_j MLP_j(x)                                     with sum_j p_j = 1

Since the probabilities sum to one, every product with a base weight is shared exactly (W1, W2 base weights; s the LoRA
scale; A_j, B_j expert j's factors)::

    h_j = act(W1 x + b1 + s B1_j A1_j x)                       gated MLPs: h_j = act(gate_j x) * up_j x
    y   = W2 (sum_j p_j h_j) + b2 + s sum_j p_j B2_j A2_j h_j

so W1 x and the product with W2 are computed once, not once per expert. ``mix: linear`` is cheaper still and a
*different* function: the gates multiply in rank space at each linear, ``W x + s B_cat (p * (A_cat x))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from comingle.models.kernels import decoding, expert_mlp
from comingle.models.lora import base_weight, low_rank, turn
from comingle.models.routers import Router

Tokens = Float[Tensor, "users n width"]


class RoutedMLP(nn.Module):
    """Takes the place of a block's MLP; ``factors`` and ``router`` are bound before each forward pass.

    ``first`` holds the linears that read the MLP's input (one, or gate and up), ``last`` the linear that writes its
    output. ``factors[name]`` is ``(A, B)`` with shapes ``(users, experts, rank, d_in)`` and
    ``(users, experts, rank, d_out)`` for the keys ``up``, ``down`` and, in gated MLPs, ``gate``.
    """

    factors: dict[str, tuple[Tensor, Tensor]]

    def __init__(self, *, first: dict[str, nn.Module], last: nn.Module, act: str, scale: float, mix: str):
        super().__init__()
        self.first = nn.ModuleDict(first)
        self.last = last
        self.act = expert_mlp.ACTIVATIONS[act]
        self.scale = scale
        self.mix = mix
        self.router = Router()
        self.factors = {}

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Mixture of the users' experts; rows of ``x`` are user-major."""
        users = self.factors["down"][0].shape[0]
        tokens = x.reshape(users, -1, x.shape[-1])
        if self.mix == "output" and self._decodes(x, users):
            return self._mix_rows(tokens).view(x.shape)
        part = expert_mlp.part_for(tokens, self.act, self.factors["down"][0].shape[-2])
        if self.mix == "output" and part is not None:
            return self._mix_natively(part, tokens).view(x.shape)
        gates = self.router(tokens)
        mixed = self._mix_linears(tokens, gates) if self.mix == "linear" else self._mix_outputs(tokens, gates)
        return mixed.view(x.shape)

    def _decodes(self, x: Float[Tensor, "*batch width"], users: int) -> bool:
        linears = (*self.first.values(), self.last)
        known = self.act in expert_mlp.ACTIVATION_CODES
        return known and decoding.fits(x, users, *(base_weight(linear)[0] for linear in linears))

    def _mix_rows(self, x: Tokens) -> Tokens:
        """:meth:`_mix_outputs` of one token for each of a few texts."""
        a_and_b = {name: (a.to(x.dtype), b.to(x.dtype)) for name, (a, b) in self.factors.items()}
        first = [(base_weight(linear), a_and_b[name]) for name, linear in self.first.items()]
        return decoding.experts(
            self.act, self.scale, x, self.router(x), first, (base_weight(self.last), a_and_b["down"])
        )

    def _mix_outputs(self, x: Tokens, gates: Float[Tensor, "users n experts"]) -> Tokens:
        names = ["gate", "up"] if "gate" in self.first else ["up"]
        factors = [f.to(x.dtype) for name in [*names, "down"] for f in self.factors[name]]
        bases = [base_weight(self.first[name]) for name in names] + [base_weight(self.last)]
        weights = [t for pair in bases for t in pair]
        return cast(Tensor, _Mixture.apply(self.act, self.scale, x, gates, len(names), *factors, *weights))

    def _mix_natively(self, part: Any, x: Tokens) -> Tokens:
        """:meth:`_mix_outputs` with :class:`_NativeMixture`; the router's logits are part of the first thin product."""
        names = [*self.first, "down"]
        a, b = zip(*((f.to(x.dtype).contiguous() for f in self.factors[name]) for name in names), strict=True)
        router = [] if self.router.weight is None else [self.router.weight.to(x.dtype)]
        alias, thin = _Enter.apply(x, torch.cat([*(factor.flatten(1, 2) for factor in a[:-1]), *router], 1))
        z, logits = thin.tensor_split([sum(factor.shape[1] * factor.shape[2] for factor in a[:-1])], -1)
        # Native code reads plain memory: uniform gates are one row that repeats.
        gates = (self.router.choose(logits.float(), x) if router else self.router(x)).contiguous()
        weights = [t for linear in (*self.first.values(), self.last) for t in base_weight(linear)]
        x = alias if x.requires_grad else x
        rest = (*b[:-1], a[-1], b[-1], *weights)
        return cast(Tensor, _NativeMixture.apply(part, self.act, self.scale, x, z, gates, len(names) - 1, *rest))

    def _mix_linears(self, x: Tokens, gates: Float[Tensor, "users n experts"]) -> Tokens:
        pre = {name: self._mix_linear(linear, name, x, gates) for name, linear in self.first.items()}
        hidden = self.act(pre.get("gate", pre["up"]))[0]
        if "gate" in pre:
            hidden = hidden * pre["up"]
        return self._mix_linear(self.last, "down", hidden, gates)

    def _mix_linear(self, linear: nn.Module, name: str, x: Tokens, gates: Tensor) -> Float[Tensor, "users n d_out"]:
        a, b = (f.to(x.dtype) for f in self.factors[name])
        rank = a.shape[-2]
        wide = gates.to(x.dtype).repeat_interleave(rank, dim=-1)  # (users, n, experts * rank)
        return linear(x) + low_rank(x, a.flatten(1, 2), b.flatten(1, 2), self.scale, gates=wide)


class _Mixture(torch.autograd.Function):
    """The equations of the module docstring with a hand-written backward pass.

    Arguments after ``first``: (A, B) of each first linear and of the last, then (W, b) of the same linears.
    """

    @staticmethod
    def forward(ctx: Any, act: Any, scale: float, x: Tokens, gates: Tensor, first: int, *rest: Any) -> Tokens:
        (a_first, b_first, a_last, b_last), bases = _sort(rest, first)
        u, experts, rank = a_last.shape[:3]
        n = x.shape[1]
        # One product for all first linears and experts: (u, n, first * experts * rank) -> (first, u * experts, n, rank)
        z = torch.bmm(x, _side_by_side(a_first).mT).mul_(scale)
        z = z.view(u, n, first, experts, rank).permute(2, 0, 3, 1, 4).reshape(first, u * experts, n, rank)
        products = [F.linear(x, *base) for base in bases[:-1]]
        loras = [torch.bmm(z[i], b.flatten(0, 1)).view(u, experts, n, -1) for i, b in enumerate(b_first)]
        h, slopes, mixed = expert_mlp.activate(act, products, loras, gates, any(ctx.needs_input_grad))
        z_last = torch.bmm(h.flatten(0, 1), a_last.flatten(0, 1).mT).view(u, experts, n, rank).mul_(scale)
        gated = (gates.mT.unsqueeze(-1).to(x.dtype) * z_last).transpose(1, 2).reshape(u, n, experts * rank)
        y = F.linear(mixed, *bases[-1]).baddbmm_(gated, b_last.flatten(1, 2))
        ctx.first, ctx.scale = first, scale
        ctx.save_for_backward(x, gates, z, h, z_last, gated, *slopes, *rest)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tokens) -> tuple[Any, ...]:  # type: ignore[override]
        first, scale = ctx.first, ctx.scale
        x, gates, z, h, z_last, gated, *saved = ctx.saved_tensors
        slopes, rest = saved[:first], saved[first:]
        (a_first, b_first, a_last, b_last), bases = _sort(rest, first)
        u, experts, n, _ = h.shape
        rank = a_last.shape[2]
        wants = ctx.needs_input_grad[5:]  # of (A, B) pairs in order, then of base weights (never)

        d_mixed = dy @ bases[-1][0]
        d_gated = torch.bmm(dy, b_last.flatten(1, 2).mT).view(u, n, experts, rank).transpose(1, 2)
        d_z_last = (gates.mT.unsqueeze(-1).to(x.dtype) * d_gated).mul_(scale).reshape(u * experts, n, rank)
        d_h = torch.bmm(d_z_last, a_last.flatten(0, 1)).view_as(h)
        d_loras, d_bases, d_gates = expert_mlp.activate_backward(h, slopes, gates, d_mixed, d_h)
        d_gates = d_gates + (d_gated * z_last).sum(-1).mT

        grads: list[Tensor | None] = []
        d_z, d_x = [], None
        for i in range(first):
            d_lora = d_loras[i].flatten(0, 1)
            d_z.append(torch.bmm(d_lora, b_first[i].flatten(0, 1).mT).view(u, experts, n, rank))
            part = d_bases[i] @ bases[i][0]
            d_x = part if d_x is None else d_x.add_(part)
            grads += [None, torch.bmm(turn(z[i]), d_lora).view_as(b_first[i]) if wants[2 * i + 1] else None]
        flat = torch.stack(d_z, 1).permute(0, 3, 1, 2, 4).reshape(u, n, first * experts * rank).mul_(scale)
        d_x = cast(Tensor, d_x).baddbmm_(flat, _side_by_side(a_first))
        if wants[0]:
            d_a = torch.bmm(turn(flat), x).view(u, first, experts, rank, -1)
            grads[0 : 2 * first : 2] = d_a.unbind(1)
        grads.append(torch.bmm(turn(d_z_last), h.flatten(0, 1)).view_as(a_last) if wants[2 * first] else None)
        grads.append(torch.bmm(turn(gated), dy).view_as(b_last) if wants[2 * first + 1] else None)
        return None, None, d_x, d_gates.to(gates.dtype), None, *grads, *[None] * (2 * first + 2)


class _Enter(torch.autograd.Function):
    """The mixture's input, and its products with all thin matrices that read it: the first linears' A, the router.

    One thin product instead of several, and in the backward pass their gradient is added to the rest of the input's
    as it is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tokens, wide: Float[Tensor, "users columns width"]) -> tuple[Tokens, Tensor]:
        ctx.save_for_backward(x, wide)
        return x.view_as(x), torch.bmm(x, wide.mT)

    @staticmethod
    def backward(ctx: Any, d_x: Tokens, d_thin: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, wide = ctx.saved_tensors
        want_x, want_wide = ctx.needs_input_grad
        # In place: d_x was made by _NativeMixture, and nobody else has it.
        return d_x.baddbmm_(d_thin, wide) if want_x else None, torch.bmm(turn(d_thin), x) if want_wide else None


class _NativeMixture(torch.autograd.Function):
    """The rest, with everything of the hidden width in native code, which keeps none of it but the base's products.

    ``part`` has the two passes, as the module :mod:`~comingle.models.kernels.expert_mlp`. Arguments after ``first``: B
    of each first linear, A and B of the last, then (W, b) of the same linears.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Any, act: Any, scale: float, x: Tokens, z: Tensor, gates: Tensor, first: int, *rest: Any
    ) -> Tokens:
        b_first, (a_last, b_last), weights, biases = _sort_native(rest, first)
        products = [F.linear(x, weight) for weight in weights[:-1]]
        mixed, last, gated = part.forward(act, scale, products, biases[:-1], z, gates, b_first, a_last)
        y = F.linear(mixed, weights[-1], biases[-1]).baddbmm_(gated, b_last.flatten(1, 2))
        ctx.part, ctx.act, ctx.scale, ctx.first = part, act, scale, first
        ctx.save_for_backward(z, gates, last, gated, *products, *rest)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tokens) -> tuple[Any, ...]:  # type: ignore[override]
        first = ctx.first
        z, gates, last, gated, *saved = ctx.saved_tensors
        products, rest = saved[:first], saved[first:]
        b_first, (a_last, b_last), weights, biases = _sort_native(rest, first)
        factors = any(ctx.needs_input_grad[7:])
        d_mixed = dy @ weights[-1]
        d_gated = torch.bmm(dy, b_last.flatten(1, 2).mT)
        given = (ctx.act, ctx.scale, products, biases[:-1], z, gates, b_first, a_last, last)
        d_bases, d_z, d_gates, d_b, d_a_last = ctx.part.backward(*given, d_mixed, d_gated, factors)
        d_x = None
        if ctx.needs_input_grad[3]:
            d_x = d_bases[0] @ weights[0]
            for d_base, weight in zip(d_bases[1:], weights[1:-1], strict=True):
                d_x += d_base @ weight
        grads = [*d_b, d_a_last, torch.bmm(turn(gated), dy).view_as(b_last)] if factors else [None] * (first + 2)
        return None, None, None, d_x, d_z, d_gates, None, *grads, *[None] * (2 * first + 2)


def _sort_native(
    rest: Sequence[Any], first: int
) -> tuple[Sequence[Tensor], tuple[Tensor, Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Split the flat arguments into B of first linears, (A, B) of the last, base weights, base biases."""
    return rest[:first], (rest[first], rest[first + 1]), rest[first + 2 :: 2], rest[first + 3 :: 2]


def _side_by_side(factors: Sequence[Tensor]) -> Float[Tensor, "users columns width"]:
    """All experts' factors of several linears as one matrix per user."""
    flat = [f.flatten(1, 2) for f in factors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def _sort(
    rest: Sequence[Any], first: int
) -> tuple[tuple[Any, Any, Tensor, Tensor], list[tuple[Tensor, Tensor | None]]]:
    """Split the flat arguments into (A of first linears, B of first linears, A of last, B of last) and base pairs."""
    factors, weights = rest[: 2 * first + 2], rest[2 * first + 2 :]
    bases = list(zip(weights[::2], weights[1::2], strict=True))
    return (factors[0 : 2 * first : 2], factors[1 : 2 * first : 2], factors[-2], factors[-1]), bases
