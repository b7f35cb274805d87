"""Injection of adapters into a frozen causal language model, in which each MLP becomes a mixture of LoRA experts.

An expert is the whole MLP with its own LoRA on every linear layer. The experts' outputs are mixed::

    y = sum_j p_j MLP_j(x)                                     with sum_j p_j = 1

As the probabilities sum to one, all experts share each product with a base weight, without approximation (W1, W2 are
base weights, s is the LoRA scale, A_j and B_j are the factors of expert j)::

    h_j = act(W1 x + b1 + s B1_j A1_j x)                       gated MLPs: h_j = act(gate_j x) * up_j x
    y   = W2 (sum_j p_j h_j) + b2 + s sum_j p_j B2_j A2_j h_j

So W1 x and the product with W2 are computed once instead of once per expert. ``mix: linear`` costs even less but is a
*different* function: each linear layer multiplies the gates into the rank dimension, ``W x + s B_cat (p * (A_cat x))``.

:func:`inject` replaces every attention linear by a :class:`LoraLinear` and every MLP by a :class:`RoutedMLP`, and
returns the :class:`Adapters`: the layout of each user's trainable tensors, and :meth:`Adapters.bind`, which assigns a
cohort's tensors to the modules. The base's parameters do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from comingle.config.settings import AdaptersSection, Gating, TargetsSection
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import SHORT
from comingle.models.layouts import activation_name, decoder_layers, find_targets
from comingle.models.lora import (
    RESIDUAL,
    LoraLinear,
    base_weight,
    contiguous_transpose,
    factors_of,
    init_a,
    init_zero,
    lora_scale,
    low_rank,
    residual_slots,
    weight_shape,
)
from comingle.models.routers import Router, init_router
from comingle.utils.errors import BaseModelError, RecipeError
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Context, Layout, Slot, Tree

Tokens = Float[Tensor, "users n width"]


class RoutedMLP(nn.Module):
    """A mixture of LoRA experts that replaces a block's MLP; ``factors`` and ``router`` are bound before each pass.

    ``factors[name]`` is ``(A, B)`` with shapes ``(users, experts, rank, d_in)`` and ``(users, experts, rank, d_out)``
    for the keys ``up``, ``down`` and, in gated MLPs, ``gate``.

    Args:
        first: The linear layers that read the MLP's input: ``up``, and ``gate`` in gated MLPs.
        last: The linear layer that writes the MLP's output.
        act: Name of the activation, as in transformers.
        scale: LoRA scale.
        mix: "output" or "linear": what the gates multiply.
    """

    factors: dict[str, tuple[Tensor, Tensor]]

    def __init__(self, *, first: dict[str, nn.Module], last: nn.Module, act: str, scale: float, mix: str):
        """Keep the base's linears, and create a router without a weight.

        Args:
            first: The linears that read the MLP's input, by the keys "gate" (in gated MLPs) and "up".
            last: The linear that writes the MLP's output ("down").
            act: Name of the activation, a key of ``ACTIVATIONS``.
            scale: LoRA scale.
            mix: "output" mixes the experts' outputs, "linear" mixes the experts in each linear layer.
        """
        super().__init__()
        self.first = nn.ModuleDict(first)
        self.last = last
        self.act = expert_mlp.ACTIVATIONS[act]
        self.scale = scale
        self.mix = mix
        self.router = Router()
        self.factors = {}

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return the mixture of each user's experts; the rows of ``x`` are ordered by user.

        With ``mix="output"`` the experts' outputs are mixed, ``sum_j p_j MLP_j(x)``, by the fastest code that supports
        the input: a kernel for generation, fused kernels (C++ or Triton), or PyTorch. With ``mix="linear"`` experts are
        mixed in each linear layer instead, a different function.
        """
        a_down, _ = self.factors["down"]
        users, rank = a_down.shape[0], a_down.shape[-2]
        tokens = x.reshape(users, -1, x.shape[-1])
        if self.mix == "output" and self._fits_decoding(x, users):
            return self._mix_rows(tokens).view(x.shape)
        backend = expert_mlp.backend_for(tokens, self.act, rank)
        if self.mix == "output" and backend is not None:
            return self._mix_natively(backend, tokens).view(x.shape)
        gates = self.router(tokens)
        mixed = self._mix_linears(tokens, gates) if self.mix == "linear" else self._mix_outputs(tokens, gates)
        return mixed.view(x.shape)

    def _fits_decoding(self, x: Float[Tensor, "*batch width"], users: int) -> bool:
        """Return whether the native kernels for decoding support this MLP and its input ``x`` of ``users`` users."""
        if self.act not in expert_mlp.ACTIVATION_CODES or not expert_mlp.fits_rows(x, users):
            return False
        weights = [base_weight(linear)[0] for linear in (*self.first.values(), self.last)]  # without biases
        return all(expert_mlp.fits_weight(weight, x) for weight in weights)

    def _mix_rows(self, x: Tokens) -> Tokens:
        """Mix the experts' outputs, ``sum_j p_j MLP_j(x)``, in the native kernel for generation.

        In generation a pass has one token (a row) of each of a few texts, and no gradients.

        Args:
            x: The MLP's input.
        """
        a_and_b = {name: (a.to(x.dtype), b.to(x.dtype)) for name, (a, b) in self.factors.items()}
        first = [(base_weight(linear), a_and_b[name]) for name, linear in self.first.items()]
        return expert_mlp.experts(
            self.act, self.scale, x, self.router(x), first, (base_weight(self.last), a_and_b["down"])
        )

    def _mix_outputs(self, x: Tokens, gates: Float[Tensor, "users n experts"]) -> Tokens:
        """Mix the experts' outputs, ``sum_j p_j MLP_j(x)``, with PyTorch.

        Args:
            x: The MLP's input.
            gates: The experts' probabilities p_j.
        """
        names = ["gate", "up"] if "gate" in self.first else ["up"]
        # Autograd functions need flat arguments: A and B of each linear, then the base's weight and bias of each.
        factors = [factor.to(x.dtype) for name in [*names, "down"] for factor in self.factors[name]]
        linears = [*(self.first[name] for name in names), self.last]
        weights = [t for linear in linears for t in base_weight(linear)]
        return cast(Tensor, _Mixture.apply(self.act, self.scale, x, gates, len(names), *factors, *weights))

    def _mix_natively(self, backend: object, x: Tokens) -> Tokens:
        """Mix the experts' outputs, ``sum_j p_j MLP_j(x)``, with native code (C++ or Triton); compute the gates first.

        The first layers' factors A and the router's weight read the same input, so one product computes all of them.

        Args:
            backend: An object with ``forward`` and ``backward`` like :mod:`~comingle.models.kernels.expert_mlp`.
            x: The MLP's input.
        """
        names = [*self.first, "down"]
        a, b = zip(*((f.to(x.dtype).contiguous() for f in self.factors[name]) for name in names), strict=True)
        router_weight = [] if self.router.weight is None else [self.router.weight.to(x.dtype)]
        a_first = [factor.flatten(1, 2) for factor in a[:-1]]  # (users, experts * rank, width)
        same_x, products = _InputProducts.apply(x, torch.cat([*a_first, *router_weight], 1))
        # The products with A, and those with the router's weight.
        z, logits = products.tensor_split([sum(factor.shape[1] for factor in a_first)], -1)
        # Without a weight the gates are equal: an expanded row, but native code needs contiguous memory.
        gates = (self.router.choose(logits.float(), x) if router_weight else self.router(x)).contiguous()
        weights = [t for linear in (*self.first.values(), self.last) for t in base_weight(linear)]
        # `same_x` equals x. The mixture's gradient of `same_x` goes to _InputProducts, which adds the gradient through
        # the products in place. If x needs no gradient, the mixture reads x itself and computes no gradient for it.
        mixture_input = same_x if x.requires_grad else x
        num_first = len(names) - 1
        tensors = (*b[:-1], a[-1], b[-1], *weights)  # autograd functions need flat arguments
        mixed = _NativeMixture.apply(backend, self.act, self.scale, mixture_input, z, gates, num_first, *tensors)
        return cast(Tensor, mixed)

    def _mix_linears(self, x: Tokens, gates: Float[Tensor, "users n experts"]) -> Tokens:
        """Run the MLP with experts mixed in each linear layer (``mix: linear``).

        Args:
            x: The MLP's input.
            gates: The experts' probabilities.
        """
        pre = {name: self._mix_linear(linear, name, x, gates) for name, linear in self.first.items()}
        hidden, _ = self.act(pre["gate"] if "gate" in pre else pre["up"])  # value and derivative
        if "gate" in pre:
            hidden = hidden * pre["up"]
        return self._mix_linear(self.last, "down", hidden, gates)

    def _mix_linear(self, linear: nn.Module, name: str, x: Tokens, gates: Tensor) -> Float[Tensor, "users n d_out"]:
        """Return ``W x + s B_cat (p * (A_cat x))``: one LoRA whose ranks are those of all experts one after another.

        Args:
            linear: The base's linear layer with weight W.
            name: Its key in ``factors``: "gate", "up" or "down".
            x: Input of the layer.
            gates: The probabilities p of the experts, ``(users, n, experts)``.
        """
        a, b = (f.to(x.dtype) for f in self.factors[name])
        rank = a.shape[-2]
        # All ranks of an expert have its probability: (users, n, experts * rank).
        rank_gates = gates.to(x.dtype).repeat_interleave(rank, dim=-1)
        return linear(x) + low_rank(x, a.flatten(1, 2), b.flatten(1, 2), self.scale, gates=rank_gates)


class _Mixture(torch.autograd.Function):
    """The expert mixture of the module docstring, with a hand-written backward pass.

    "First" layers are the linears that read the MLP's input (gate and up, or up alone), the "last" one is down.
    """

    @staticmethod
    def forward(ctx: Context, act: Any, scale: float, x: Tokens, gates: Tensor, num_first: int, *rest: Any) -> Tokens:
        """Return the mixture's output ``W2 (sum_j p_j h_j) + b2 + s sum_j p_j B2_j A2_j h_j``.

        h_j are the hidden activations of expert j, p_j its probability, s the LoRA scale, and layer 2 the last one.

        Args:
            ctx: Autograd context.
            act: Activation that returns its value and its derivative.
            scale: LoRA scale.
            x: The MLP's input.
            gates: The experts' probabilities, ``(users, n, experts)``.
            num_first: Number of first layers: 2 with a gate, else 1.
            *rest: (A, B) of each first layer and of the last, then (W, b) of the same layers.
        """
        (a_first, b_first, a_last, b_last), bases = _split_arguments(rest, num_first)
        u, experts, rank = a_last.shape[:3]
        n = x.shape[1]
        # z are the products of x with A of the first layers. One product for all these layers and experts:
        # (u, n, num_first * experts * rank) -> (num_first, u * experts, n, rank)
        z = torch.bmm(x, _join_factors(a_first).mT).mul_(scale)
        z = z.view(u, n, num_first, experts, rank).permute(2, 0, 3, 1, 4).reshape(num_first, u * experts, n, rank)
        products = [F.linear(x, *base) for base in bases[:-1]]
        loras = [torch.bmm(z[i], b.flatten(0, 1)).view(u, experts, n, -1) for i, b in enumerate(b_first)]
        keeps_slopes = any(ctx.needs_input_grad)  # for the backward pass
        h, slopes, mixed = expert_mlp.activate(act, products, loras, gates, keeps_slopes)
        z_last = torch.bmm(h.flatten(0, 1), a_last.flatten(0, 1).mT).view(u, experts, n, rank).mul_(scale)  # s A_j h_j
        gated = gates.mT.unsqueeze(-1).to(x.dtype) * z_last  # p_j s A_j h_j
        gated = gated.transpose(1, 2).reshape(u, n, experts * rank)
        y = F.linear(mixed, *bases[-1]).baddbmm_(gated, b_last.flatten(1, 2))
        ctx.num_first, ctx.scale = num_first, scale
        ctx.save_for_backward(x, gates, z, h, z_last, gated, *slopes, *rest)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tokens) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of ``x``, of the gates and of the LoRA factors; the base's weights are frozen.

        With the output's gradient ``dy``, B_j and A_j of the last layer, and ``z_last_j = s A_j h_j``::

            d_mixed    = dy W2                          through the base, for all experts
            d_gated_j  = dy B_j                         of p_j z_last_j
            d_z_last_j = s p_j d_gated_j
            d_h_j      = p_j d_mixed + d_z_last_j A_j
            d_gates_j  = <d_mixed, h_j> + <d_gated_j, z_last_j>

        From d_h_j follow the gradients of the layers that read the MLP's input (gate and up, or up alone). Each of them
        is a product with the base's weight plus one LoRA per expert, whose products with A are ``z``.
        """
        num_first, scale = ctx.num_first, ctx.scale
        x, gates, z, h, z_last, gated, *saved = ctx.saved_tensors
        slopes, rest = saved[:num_first], saved[num_first:]
        (a_first, b_first, a_last, b_last), bases = _split_arguments(rest, num_first)
        u, experts, n, _ = h.shape
        rank = a_last.shape[2]
        wants_grad = ctx.needs_input_grad[5:]  # (A, B) pairs in order, then base weights (never True)

        d_mixed = dy @ bases[-1][0]
        d_gated = torch.bmm(dy, b_last.flatten(1, 2).mT).view(u, n, experts, rank).transpose(1, 2)
        d_z_last = (gates.mT.unsqueeze(-1).to(x.dtype) * d_gated).mul_(scale).reshape(u * experts, n, rank)
        d_h = torch.bmm(d_z_last, a_last.flatten(0, 1)).view_as(h)  # activate_backward adds p_j d_mixed
        d_loras, d_bases, d_gates = expert_mlp.activate_backward(h, slopes, gates, d_mixed, d_h)
        d_gates = d_gates + (d_gated * z_last).sum(-1).mT

        grads: list[Tensor | None] = []
        d_z, d_x = [], None
        for i in range(num_first):
            d_lora = d_loras[i].flatten(0, 1)
            d_z.append(torch.bmm(d_lora, b_first[i].flatten(0, 1).mT).view(u, experts, n, rank))
            product = d_bases[i] @ bases[i][0]
            d_x = product if d_x is None else d_x.add_(product)
            wants_b = wants_grad[2 * i + 1]
            d_b = torch.bmm(contiguous_transpose(z[i]), d_lora).view_as(b_first[i]) if wants_b else None
            grads += [None, d_b]  # A's gradient follows below, for all first layers at once
        # (u, num_first, experts, n, rank) -> (u, n, num_first * experts * rank)
        flat = torch.stack(d_z, 1).permute(0, 3, 1, 2, 4).reshape(u, n, num_first * experts * rank).mul_(scale)
        d_x = cast(Tensor, d_x).baddbmm_(flat, _join_factors(a_first))
        if wants_grad[0]:
            d_a = torch.bmm(contiguous_transpose(flat), x).view(u, num_first, experts, rank, -1)
            grads[0 : 2 * num_first : 2] = d_a.unbind(1)
        wants_a, wants_b = wants_grad[2 * num_first : 2 * num_first + 2]
        d_a_last = torch.bmm(contiguous_transpose(d_z_last), h.flatten(0, 1)).view_as(a_last) if wants_a else None
        d_b_last = torch.bmm(contiguous_transpose(gated), dy).view_as(b_last) if wants_b else None
        no_grads = [None] * (2 * num_first + 2)  # of (W, b) of all layers
        return None, None, d_x, d_gates.to(gates.dtype), None, *grads, d_a_last, d_b_last, *no_grads


class _InputProducts(torch.autograd.Function):
    """The mixture's input, and its product with all narrow matrices that read it: A of the first layers, the router.

    This replaces several narrow products by one. The backward pass accumulates its gradient into the input's gradient.
    """

    @staticmethod
    def forward(ctx: Context, x: Tokens, matrix: Float[Tensor, "users columns width"]) -> tuple[Tokens, Tensor]:
        """Return ``x`` itself, and its product with each user's ``matrix``, ``(users, n, columns)``.

        The mixture reads the returned ``x``. So :meth:`backward` gets the mixture's gradient of ``x``, and adds the
        gradient through the product in place.

        Args:
            ctx: Autograd context.
            x: The mixture's input.
            matrix: Narrow matrices that read the input, one below the other.
        """
        ctx.save_for_backward(x, matrix)
        return x.view_as(x), torch.bmm(x, matrix.mT)

    @staticmethod
    def backward(ctx: Context, d_x: Tokens, d_products: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the input ``x`` and of the matrix.

        Args:
            ctx: Autograd context.
            d_x: Gradient of the first output of :meth:`forward`, which is ``x`` itself; overwritten with the result.
            d_products: Gradient of the products.
        """
        x, matrix = ctx.saved_tensors
        wants_x, wants_matrix = ctx.needs_input_grad
        # In place: only this function holds d_x, which _NativeMixture has allocated.
        d_input = d_x.baddbmm_(d_products, matrix) if wants_x else None
        d_matrix = torch.bmm(contiguous_transpose(d_products), x) if wants_matrix else None
        return d_input, d_matrix


class _NativeMixture(torch.autograd.Function):
    """The expert mixture after :class:`_InputProducts`; native code computes all tensors of the hidden width.

    Of those only the base's products are saved for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Context,
        backend: Any,
        act: Any,
        scale: float,
        x: Tokens,
        z: Tensor,
        gates: Tensor,
        num_first: int,
        *rest: Any,
    ) -> Tokens:
        """Return the mixture's output ``W2 (sum_j p_j h_j) + b2 + s sum_j p_j B2_j A2_j h_j``, as in :class:`_Mixture`.

        The backend computes ``sum_j p_j h_j`` and ``p_j s A2_j h_j``; the products with W and B2 are PyTorch's.

        Args:
            ctx: Autograd context.
            backend: An object with ``forward`` and ``backward`` like :mod:`~comingle.models.kernels.expert_mlp`.
            act: Activation that returns its value and its derivative.
            scale: LoRA scale.
            x: The MLP's input.
            z: Products of ``x`` with A of the first layers, ``(users, n, num_first * experts * rank)``.
            gates: The experts' probabilities, ``(users, n, experts)``.
            num_first: Number of layers that read the input: 2 with a gate, else 1.
            *rest: B of each first layer, A and B of the last, then (W, b) of the same layers.
        """
        b_first, (a_last, b_last), weights, biases = _split_native_arguments(rest, num_first)
        products = [F.linear(x, weight) for weight in weights[:-1]]
        mixed, z_last, gated = backend.forward(act, scale, products, biases[:-1], z, gates, b_first, a_last)
        y = F.linear(mixed, weights[-1], biases[-1]).baddbmm_(gated, b_last.flatten(1, 2))
        ctx.backend, ctx.act, ctx.scale, ctx.num_first = backend, act, scale, num_first
        ctx.save_for_backward(z, gates, z_last, gated, *products, *rest)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tokens) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of ``x``, ``z``, the gates and the LoRA factors.

        z are the products of ``x`` with the factors A of the first layers. :class:`_InputProducts` computes z, and adds
        to the gradient of ``x`` the part through z. The gradient of ``x`` here is the part through the base's weights.

        Args:
            ctx: Autograd context.
            dy: Gradient of the mixture's output.
        """
        num_first = ctx.num_first
        z, gates, z_last, gated, *saved = ctx.saved_tensors
        products, rest = saved[:num_first], saved[num_first:]
        b_first, (a_last, b_last), weights, biases = _split_native_arguments(rest, num_first)
        # Arguments of `forward` by index: 3 is x, and from 7 on follow the factors and the frozen base weights.
        wants_x, wants_factors = ctx.needs_input_grad[3], any(ctx.needs_input_grad[7:])
        d_mixed = dy @ weights[-1]
        d_gated = torch.bmm(dy, b_last.flatten(1, 2).mT)
        # Native code computes all gradients that need tensors of the hidden width.
        forward_tensors = (ctx.act, ctx.scale, products, biases[:-1], z, gates, b_first, a_last, z_last)
        gradients = ctx.backend.backward(*forward_tensors, d_mixed, d_gated, wants_factors)
        d_bases, d_z, d_gates, d_b, d_a_last = gradients
        d_x = None
        if wants_x:
            d_x = d_bases[0] @ weights[0]
            for d_base, weight in zip(d_bases[1:], weights[1:-1], strict=True):
                d_x += d_base @ weight
        grads: list[Tensor | None] = [None] * (num_first + 2)
        if wants_factors:
            grads = [*d_b, d_a_last, torch.bmm(contiguous_transpose(gated), dy).view_as(b_last)]
        no_grads = [None] * (2 * num_first + 2)  # of (W, b) of all layers
        return None, None, None, d_x, d_z, d_gates, None, *grads, *no_grads


def _split_native_arguments(
    rest: Sequence[Any], num_first: int
) -> tuple[Sequence[Tensor], tuple[Tensor, Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Split the arguments of :class:`_NativeMixture` after ``num_first``, which autograd requires to be flat.

    Args:
        rest: B of each first layer, A and B of the last, then weight and bias of the same layers.
        num_first: Number of layers that read the input: 2 with a gate, else 1.

    Returns:
        B of the first layers, (A, B) of the last, weights of all layers, biases of all layers.
    """
    b_first, (a_last, b_last), bases = rest[:num_first], rest[num_first : num_first + 2], rest[num_first + 2 :]
    return b_first, (a_last, b_last), bases[::2], bases[1::2]


def _join_factors(factors: Sequence[Tensor]) -> Float[Tensor, "users columns width"]:
    """Concatenate all experts' factors of several linear layers to one matrix per user."""
    flat = [f.flatten(1, 2) for f in factors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def _split_arguments(
    rest: Sequence[Any], num_first: int
) -> tuple[tuple[Any, Any, Tensor, Tensor], list[tuple[Tensor, Tensor | None]]]:
    """Split the arguments of :class:`_Mixture` after ``num_first``, which autograd requires to be flat.

    Args:
        rest: A and B of each first layer and of the last, then weight and bias of the same layers.
        num_first: Number of layers that read the input: 2 with a gate, else 1.

    Returns:
        (A of the first layers, B of the first layers, A of the last, B of the last), and (W, b) of each layer.
    """
    factors, weights = rest[: 2 * num_first + 2], rest[2 * num_first + 2 :]
    bases = list(zip(weights[::2], weights[1::2], strict=True))
    *first, a_last, b_last = factors
    return (first[::2], first[1::2], a_last, b_last), bases


logger = logging.getLogger("comingle")

Linear = tuple[str, nn.Module, tuple[int, ...], tuple[str, ...]]
"""A linear layer that gets a LoRA: name, module, leading dimensions of the factors, roles along the expert axis."""


def check_ranks(ranks: Int[Tensor, " users"], linears: Sequence[Linear]) -> None:
    """Check that LoRA ranks are not larger than the weights: log a warning, or raise an error if they are far larger.

    A rank above min(d_in, d_out), the full rank of a weight, changes no result, but the excess is trained and uploaded.
    A rank above d_in + d_out of every weight is an error: such factors are larger than the weights.

    Args:
        ranks: LoRA rank of each user.
        linears: All linear layers that get a LoRA: name, module, leading dimensions of the factors, and roles.

    Raises:
        RecipeError: The largest rank exceeds d_in + d_out of the largest weight.
    """
    shapes = {name: tuple(weight_shape(linear)) for name, linear, _, _ in linears}
    user = int(ranks.argmax())
    rank = int(ranks[user])
    suffix = f" for user {user + 1} of {len(ranks)}" if len(ranks.unique()) > 1 else ""
    largest = max(shapes, key=lambda name: sum(shapes[name]))
    d_out, d_in = shapes[largest]
    if rank > d_in + d_out:
        raise RecipeError(
            f"adapters.rank: got {rank}{suffix}; the largest weight, {largest}, maps {d_in} to {d_out}, so its updates "
            f"have a rank of at most {min(d_in, d_out)}; allowed: up to {d_in + d_out}"
        )
    too_small = {name: shape for name, shape in shapes.items() if rank > min(shape)}
    if too_small:
        first, (d_out, d_in) = next(iter(too_small.items()))
        logger.warning(
            "adapters.rank: %d%s exceeds the full rank of %d of %d weights (%s maps %d to %d); the excess is unused",
            rank, suffix, len(too_small), len(shapes), first, d_in, d_out,
        )  # fmt: skip


@torch.no_grad()
def check_same_function(original: nn.Module, mlp: RoutedMLP, family: str) -> None:
    """Check that with zero adapters the mixture computes the same function as the MLP that it replaces.

    Args:
        original: The MLP of the base model.
        mlp: The mixture; its factors and router are overwritten.
        family: Class of the base model, for the message.

    Raises:
        BaseModelError: The outputs differ, so the MLP computes more than act, gate, up and down.
    """
    _require_one_input(original, family)
    shapes = {name: weight_shape(linear) for name, linear in [*mlp.first.items(), ("down", mlp.last)]}
    up, _ = base_weight(mlp.first["up"])  # without the bias
    # Zero factors A and B of one user with one expert of rank 1.
    mlp.factors = {
        name: (up.new_zeros(1, 1, 1, d_in), up.new_zeros(1, 1, 1, d_out)) for name, (d_out, d_in) in shapes.items()
    }
    mlp.router.present = torch.ones(1, 1, dtype=torch.bool, device=up.device)
    x = torch.linspace(-1, 1, 4 * up.shape[1], dtype=up.dtype, device=up.device).view(1, 4, -1)
    expected, got = original(x), mlp(x)
    error = (got - expected).double().norm() / expected.double().norm()
    if error > (0.05 if up.dtype in SHORT else 1e-4):  # rounding errors are far smaller, also in 16-bit dtypes
        raise BaseModelError(
            f"{family}: its MLP does more than act, gate, up and down (with adapters at zero the output differs by "
            f"{error:.1%}), so comingle cannot adapt it"
        )


def _require_one_input(original: nn.Module, family: str) -> None:
    """Raise an error if an MLP takes more than one input; Bloom's, for example, also gets the residual that it adds.

    Args:
        original: The MLP of the base model.
        family: Class of the base model, for the message.

    Raises:
        BaseModelError: The MLP's ``forward`` needs no argument or several.
    """
    needed = [
        p.name
        for p in signature(original.forward).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) != 1:
        raise BaseModelError(
            f"{family}: its MLP ({type(original).__name__}) is called with {', '.join(needed) or 'nothing'}; comingle "
            "can only adapt MLPs of one input"
        )


@dataclass(frozen=True, kw_only=True)
class ExpertCounts:
    """Numbers of experts of each MLP: ``generalists`` is equal for all users, ``specialists`` has one number per user.

    Generalists come first on the expert axis. Users with fewer specialists than others are padded and masked.
    """

    generalists: int
    specialists: tuple[int, ...]

    @property
    def width(self) -> int:
        """The largest number of experts of a user, which is the size of the expert axis."""
        return self.generalists + max(self.specialists)

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each index on the expert axis."""
        return (GENERALIST,) * self.generalists + (SPECIALIST,) * max(self.specialists)

    def present(self) -> Bool[Tensor, "users experts"]:
        """Return True where a user has an expert."""
        counts = self.generalists + torch.tensor(self.specialists)
        return torch.arange(self.width) < counts.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapter modules in a base model, with the layout of a user's trainable tensors, and users' experts and ranks.

    Args:
        layout: Names, shapes and roles of a user's trainable tensors.
        present: True where a user has an expert.
        ranks: Each user's LoRA rank.
        scales: Each user's LoRA scale, ``alpha / sqrt(rank)``.
        scale: The LoRA scale that the modules apply: the smallest of all users.
        attention: The attention modules by name.
        experts: The expert mixtures by name.
    """

    layout: Layout
    present: Bool[Tensor, "users experts"]
    ranks: Int[Tensor, " users"]
    scales: Float[Tensor, " users"]
    scale: float
    attention: dict[str, LoraLinear]
    experts: dict[str, RoutedMLP]

    def only(self, users: Sequence[int]) -> Adapters:
        """Return the adapters of some users, renumbered from 0; the modules keep their width."""
        rows = list(users)
        return replace(self, present=self.present[rows], ranks=self.ranks[rows], scales=self.scales[rows])

    def without(self, roles: frozenset[str]) -> Adapters:
        """Return the adapters without the experts of some roles, such as all specialists.

        :func:`comingle.utils.trees.restrict` removes the same experts from tensors.

        Args:
            roles: Roles of the experts to leave out.
        """
        # All trainable tensors of MLPs have the same roles along the expert axis, so the first tensor tells them.
        expert_roles = next(slot.roles for slot in self.layout.slots if slot.roles != (ATTENTION,))
        keep = [i for i, role in enumerate(expert_roles) if role not in roles]
        return replace(self, present=self.present[:, keep])

    def bind(self, tensors: Tree, users: Sequence[int]) -> None:
        """Assign ``tensors`` (leading dimension ``len(users)``) to the modules for the next forward passes."""
        self.assign(*self.prepare(tensors, users))

    def prepare(self, tensors: Tree, users: Sequence[int]) -> tuple[Tree, Bool[Tensor, "users experts"]]:
        """Return the arguments of :meth:`assign`: tensors rescaled to the modules' scale, and the users' experts.

        Args:
            tensors: The users' tensors by name, with a leading user axis.
            users: Indices of the users, in the order of that axis.
        """
        if bool((self.scales != self.scale).any()):
            tensors = self._rescale_factors(tensors, users)
        return tensors, self.present[list(users)].to(next(iter(tensors.values())).device)

    def assign(self, tensors: Tree, present: Bool[Tensor, "users experts"]) -> None:
        """Assign tensors of some users to the modules for the next forward passes.

        Args:
            tensors: The users' tensors by name, rescaled by :meth:`prepare`.
            present: True where a user has an expert.
        """
        for name, lora in self.attention.items():
            lora.factors = factors_of(tensors, name, lora.scale)
        for name, mlp in self.experts.items():
            mlp.factors = {k: factors_of(tensors, f"{name}.{k}", mlp.scale) for k in (*mlp.first, "down")}
            mlp.router.weight = tensors.get(f"{name}.router")  # None averages the experts
            # A of "up" reads the same hidden states as the router; some methods' gates compare a token with it.
            mlp.router.keys = mlp.factors["up"][0]
            mlp.router.present = present
            mlp.router.penalty = None  # remove that of the last pass: this one may have no router

    def _rescale_factors(self, tensors: Tree, users: Sequence[int]) -> Tree:
        """Return the tensors with A multiplied by the ratio of each user's LoRA scale to the modules' common scale.

        Users with a smaller rank have a larger scale ``alpha / sqrt(rank)``, but the modules multiply all users by one
        number.

        Args:
            tensors: The users' tensors by name, with a leading user axis.
            users: Indices of the users, in the order of that axis.
        """
        ratios = (self.scales / self.scale)[list(users)]
        factors_a = {name: t for name, t in tensors.items() if name.endswith(".a")}
        rescaled = {name: t * ratios.to(t).view(-1, *[1] * (t.dim() - 1)) for name, t in factors_a.items()}
        return tensors | rescaled

    def penalties(self) -> Tensor | float:
        """Return each user's load-balancing penalty of the last pass, averaged over blocks; 0.0 without a penalty."""
        by_block = [mlp.router.penalty for mlp in self.experts.values() if mlp.router.penalty is not None]
        return torch.stack(by_block).mean(0) if by_block else 0.0

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """Return True where a user has a parameter, False for padding and for the router of a user with one expert.

        Args:
            ranks: Replaces the users' ranks, for methods that change them.
        """
        ranks = self.ranks if ranks is None else ranks
        return torch.cat([self._slot_mask(slot, ranks).flatten(1) for slot in self.layout.slots], 1)

    def _slot_mask(self, slot: Slot, ranks: Int[Tensor, " users"]) -> Bool[Tensor, "users ..."]:
        """Return True where a user has an entry of one trainable tensor, ``(users, *slot.shape)``.

        Tensors of all users have the same shape, with padding for users with fewer experts or a smaller rank. A user
        with a single expert has no router.

        Args:
            slot: Name, shape and roles of the tensor.
            ranks: LoRA rank of each user.
        """
        users = len(ranks)
        if slot.name.endswith(".router"):
            return self._routed_rows(slot.shape[0]).unsqueeze(-1).expand(users, *slot.shape)
        if slot.roles[0] == RESIDUAL:  # a frozen change of the weight beside the LoRA; its rank is the same for all
            has_experts = len(slot.shape) > 2  # (experts, rank, width)
            present = self.present if has_experts else torch.ones(users, dtype=torch.bool)
            return present.view(*present.shape, 1, 1).expand(users, *slot.shape)
        within_rank = torch.arange(slot.shape[-2]) < ranks.unsqueeze(1)  # (users, rank)
        if slot.roles == (ATTENTION,):  # attention has one LoRA, without experts
            return within_rank.unsqueeze(-1).expand(users, *slot.shape)
        of_experts = self.present.unsqueeze(-1) & within_rank.unsqueeze(1)  # (users, experts, rank)
        return of_experts.unsqueeze(-1).expand(users, *slot.shape)

    def _routed_rows(self, num_rows: int) -> Bool[Tensor, "users rows"]:
        """Return True where a user has a row of a router's weight; a user with a single expert has none.

        Args:
            num_rows: Number of rows. A softmax router has one per expert. A method's own gating may have fewer, which
                belong to the last experts. It may also have more, which do not belong to single experts.
        """
        has_several = self.present.sum(1, keepdim=True) > 1  # (users, 1)
        if num_rows > self.present.shape[1]:
            return has_several
        return (self.present & has_several)[:, -num_rows:]


def ranks_of(settings: AdaptersSection, users: int) -> Int[Tensor, " users"]:
    """Return the LoRA rank of each user.

    Args:
        settings: Settings of the adapters; ``rank`` is one number for all users, or a list.
        users: Number of users.

    Raises:
        RecipeError: The recipe has a list of ranks whose length is not the number of users.
    """
    assert not isinstance(settings.rank, dict), "Recipe.for_users was not called"
    ranks = (settings.rank,) * users if isinstance(settings.rank, int) else settings.rank
    if len(ranks) != users:
        raise RecipeError(f"adapters.rank: {len(ranks)} numbers for {users} users; give one, or one per user")
    return torch.tensor(ranks)


def inject(
    model: nn.Module,
    settings: AdaptersSection,
    counts: ExpertCounts,
    *,
    routed: bool,
    gating: Gating | None = None,
    residual: int | None = None,
) -> Adapters:
    """Replace the target modules of every decoder layer of ``model`` by adapters, in place.

    Args:
        model: The base model.
        settings: Ranks, scale and target modules.
        counts: How many experts each user has; ``counts.width`` is the largest number of a user.
        routed: Add a router to each MLP, if some user has more than one expert.
        gating: How routers compute gates; None: a softmax over logits.
        residual: Rank of the frozen residual beside each LoRA (:mod:`comingle.models.lora`); None for no residual.

    Returns:
        The modules, and the layout of a user's trainable tensors.

    Raises:
        BaseModelError: The family, its target modules or its activation are not supported.
        RecipeError: The ranks do not fit the number of users, or one is absurdly large (:func:`check_ranks`).
    """
    targets = find_targets(model, settings.targets)
    ranks = ranks_of(settings, len(counts.specialists))
    rank, act = int(ranks.max()), activation_name(model, targets)
    # The modules apply one scale, that of the largest rank. For users with a smaller rank, Adapters.bind multiplies A.
    scale = lora_scale(settings.alpha, rank)
    attention: dict[str, LoraLinear] = {}
    experts: dict[str, RoutedMLP] = {}
    for i, layer in enumerate(decoder_layers(model)):
        for name in targets.attention:
            attention[f"layers.{i}.{name}"] = lora = LoraLinear(layer.get_submodule(name), scale=scale)
            layer.set_submodule(name, lora)
        experts[f"layers.{i}.mlp"] = mlp = _routed_mlp(layer, targets, act, scale, settings, counts)
        mlp.router.gating = gating
        # Compare the first layer only, as all are alike; without an MLP module or on the meta device there is nothing
        # to compare with.
        if targets.mlp and i == 0 and not next(layer.parameters()).is_meta:
            check_same_function(layer.get_submodule(targets.mlp), mlp, type(model).__name__)
        _replace_mlp(layer, targets, mlp)
    linears: list[Linear] = [(name, lora.linear, (rank,), (ATTENTION,)) for name, lora in attention.items()]
    for name, mlp in experts.items():
        for key, linear in [*mlp.first.items(), ("down", mlp.last)]:
            linears.append((f"{name}.{key}", linear, (counts.width, rank), counts.roles))
    check_ranks(ranks, linears)
    # All A, then all B, then all routers: the columns that a phase trains are contiguous.
    slots = [_a_slot(*linear) for linear in linears] + [_b_slot(*linear) for linear in linears]
    if routed and counts.width > 1:
        slots += [_router_slot(name, mlp, counts.width, rank) for name, mlp in experts.items()]
    if residual is not None:
        # Factors of attention lead with (rank,), those of experts with (experts, rank).
        adapted = [(name, linear, counts.width if len(lead) > 1 else 0) for name, linear, lead, _ in linears]
        slots += residual_slots(adapted, residual)
    scales = settings.alpha / ranks.double().sqrt()
    return Adapters(
        layout=Layout(slots=tuple(replace(slot, part=_slot_part(slot.name, experts)) for slot in slots)),
        present=counts.present(),
        ranks=ranks,
        scales=scales,
        scale=float(scales.min()),  # of the largest rank, as above
        attention=attention,
        experts=experts,
    )


def _routed_mlp(
    layer: nn.Module, targets: TargetsSection, act: str, scale: float, settings: AdaptersSection, counts: ExpertCounts
) -> RoutedMLP:
    """Return the expert mixture for a decoder layer's MLP; the layer itself is unchanged.

    Args:
        layer: The decoder layer.
        targets: Names of its linears.
        act: Name of its activation.
        scale: LoRA scale.
        settings: Experts per token, load balancing and form of the mixture.
        counts: How many experts each user has.
    """
    first = {"gate": layer.get_submodule(targets.gate)} if targets.gate else {}
    first["up"] = layer.get_submodule(targets.up)
    mlp = RoutedMLP(first=first, last=layer.get_submodule(targets.down), act=act, scale=scale, mix=settings.mix)
    mlp.router.top_k = settings.top_k
    # Balancing towards expert 0 only makes sense if it is the only generalist.
    mlp.router.balance = "uniform" if settings.balance == "generalist" and counts.generalists != 1 else settings.balance
    return mlp


def _slot_part(name: str, experts: dict[str, RoutedMLP]) -> str:
    """Return "head" for tensors of the last MLP, as for the last layer of a net, else "body"."""
    return "head" if name.startswith(f"{list(experts)[-1]}.") else "body"


def _replace_mlp(layer: nn.Module, targets: TargetsSection, mlp: RoutedMLP) -> None:
    """Put the mixture into a decoder layer, in place.

    It replaces the MLP module. If the layer itself holds the MLP's linears (OPT), the mixture replaces ``up``, and
    ``down`` and the activation become identities, because the mixture contains both.

    Args:
        layer: The decoder layer.
        targets: Names of its modules; ``targets.mlp`` is empty if the layer itself holds the linears.
        mlp: The mixture.

    Raises:
        BaseModelError: The layer holds the linears but has no activation module.
    """
    if targets.mlp:
        layer.set_submodule(targets.mlp, mlp)
        return
    leaves = [name for name, child in layer.named_children() if not list(child.children())]
    activations = [name for name in leaves if "activation" in name and not name.endswith("norm")]
    if not activations:  # the layer calls a function, which would apply to the mixture's output again
        raise BaseModelError(f"adapters.targets.mlp: '' needs a layer with an activation module; got {sorted(leaves)}")
    layer.set_submodule(targets.up, mlp)
    for name in (targets.down, *activations):
        layer.set_submodule(name, nn.Identity())


def _a_slot(name: str, linear: nn.Module, lead: tuple[int, ...], roles: tuple[str, ...]) -> Slot:
    """Return name, shape, roles and initialiser of a linear's LoRA factor A, ``(*lead, d_in)``.

    Args:
        name: Name of the linear.
        linear: The base's linear.
        lead: Leading dimensions: ``(rank,)`` in attention, ``(experts, rank)`` in an MLP.
        roles: ``("attention",)`` in attention; in an MLP "generalist" or "specialist" for each expert.
    """
    width = weight_shape(linear)[1]
    return Slot(name=f"{name}.a", shape=(*lead, width), roles=roles, init=init_a, factor="a")


def _b_slot(name: str, linear: nn.Module, lead: tuple[int, ...], roles: tuple[str, ...]) -> Slot:
    """Return name, shape, roles and initialiser of a linear's LoRA factor B, ``(*lead, d_out)``, which starts at zero.

    Args:
        name: Name of the linear.
        linear: The base's linear.
        lead: Leading dimensions: ``(rank,)`` in attention, ``(experts, rank)`` in an MLP.
        roles: ``("attention",)`` in attention; in an MLP "generalist" or "specialist" for each expert.
    """
    width = weight_shape(linear)[0]
    return Slot(name=f"{name}.b", shape=(*lead, width), roles=roles, init=init_zero, factor="b")


def _router_slot(name: str, mlp: RoutedMLP, experts: int, rank: int) -> Slot:
    """Return name, shape, roles and initialiser of a router's weight ``(rows, width)``.

    A router has one row per expert, unless the method's own gating defines the rows and their initial values.

    Args:
        name: Name of the MLP.
        mlp: The mixture of experts that the router belongs to.
        experts: Largest number of experts of a user.
        rank: Largest LoRA rank of a user.
    """
    width, gating = weight_shape(mlp.first["up"])[1], mlp.router.gating  # the router reads the MLP's input
    rows, init = (experts, init_router) if gating is None else gating.start(experts, rank, width)
    return Slot(name=f"{name}.router", shape=(rows, width), roles=(ROUTER,) * rows, init=init)
