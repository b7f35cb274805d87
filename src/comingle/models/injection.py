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
from inspect import Parameter, signature
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from comingle.config.settings import AdaptersSection, Gating, TargetsSection
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import SHORT
from comingle.models.layouts import activation_name, decoder_layers, find_targets
from comingle.models.lora import (
    MIDDLE,
    RESIDUAL,
    LoraLinear,
    base_weight,
    contiguous_transpose,
    factors_of,
    init_a,
    init_zero,
    lora_scale,
    low_rank,
    multiplies_packed,
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

        ``mix="linear"`` mixes the experts in each linear layer. ``mix="output"`` mixes their outputs,
        ``sum_j p_j MLP_j(x)``, with the native kernel for generation, else with other native code (C++ or Triton), else
        with PyTorch.
        """
        a_down, _ = self.factors["down"]
        users, _experts, rank, _width = a_down.shape
        tokens = x.reshape(users, -1, x.shape[-1])
        if self.mix == "linear":
            return self._mix_linears(tokens, self.router(tokens)).view(x.shape)
        if multiplies_packed(self.last, x):
            return self._mix_packed(tokens).view(x.shape)
        if self._generation_kernel_supports(x, users):
            return self._mix_in_generation(tokens).view(x.shape)
        backend = expert_mlp.backend_for(tokens, self.act, rank)
        if backend is not None:
            return self._mix_natively(backend, tokens).view(x.shape)
        return self._mix_outputs(tokens, self.router(tokens)).view(x.shape)

    def _generation_kernel_supports(self, x: Float[Tensor, "*batch width"], users: int) -> bool:
        """Return whether the native kernel for generation supports the activation, the input and the base's weights.

        Args:
            x: The MLP's input.
            users: Number of users whose rows ``x`` has.
        """
        if self.act not in expert_mlp.ACTIVATION_CODES:
            return False
        if not expert_mlp.fits_rows(x, users):
            return False
        for linear in (*self.first.values(), self.last):
            weight, _bias = base_weight(linear)
            if not expert_mlp.fits_weight(weight, x):
                return False
        return True

    def _mix_in_generation(self, x: Tokens) -> Tokens:
        """Return ``sum_j p_j MLP_j(x)`` from the native kernel for generation, which computes no gradients.

        Args:
            x: The MLP's input.
        """
        factors = {name: (a.to(x.dtype), b.to(x.dtype)) for name, (a, b) in self.factors.items()}
        first = [(base_weight(linear), factors[name]) for name, linear in self.first.items()]
        last = (base_weight(self.last), factors["down"])
        gates = self.router(x)
        return expert_mlp.experts(self.act, self.scale, x, gates, first, last)

    def _mix_packed(self, x: Tokens) -> Tokens:
        """Return ``sum_j p_j MLP_j(x)`` with a base whose weights are packed, without gradients.

        Args:
            x: The MLP's input.
        """
        gates = self.router(x)
        products, loras = [], []
        for name, linear in self.first.items():
            a, b = (factor.to(x.dtype) for factor in self.factors[name])
            products.append(cast(Any, linear).multiply(x, fine=False))
            z = self.scale * torch.matmul(x.unsqueeze(1), a.mT)  # (users, experts, n, rank)
            loras.append(torch.matmul(z, b))
        h, _slopes, mixed = expert_mlp.activate(self.act, products, loras, gates, False)
        a, b = (factor.to(x.dtype) for factor in self.factors["down"])
        z = self.scale * gates.mT.unsqueeze(-1).to(x.dtype) * torch.matmul(h, a.mT)
        return cast(Any, self.last).multiply(mixed, fine=False) + torch.matmul(z, b).sum(1)

    def _mix_outputs(self, x: Tokens, gates: Float[Tensor, "users n experts"]) -> Tokens:
        """Return ``sum_j p_j MLP_j(x)``, computed with PyTorch.

        Args:
            x: The MLP's input.
            gates: The experts' probabilities p_j.
        """
        first_names = ["gate", "up"] if "gate" in self.first else ["up"]
        # Autograd functions take flat arguments: A and B of each linear, then weight and bias of each linear.
        factors, weights_and_biases = [], []
        for name in [*first_names, "down"]:
            a, b = self.factors[name]
            factors += [a.to(x.dtype), b.to(x.dtype)]
            linear = self.last if name == "down" else self.first[name]
            weights_and_biases += base_weight(linear)
        num_first = len(first_names)
        mixed = _Mixture.apply(self.act, self.scale, x, gates, num_first, *factors, *weights_and_biases)
        return cast(Tensor, mixed)

    def _mix_natively(self, backend: object, x: Tokens) -> Tokens:
        """Return ``sum_j p_j MLP_j(x)``, computed with native code (C++ or Triton).

        One product of ``x`` with several matrices, one below the other, gives ``z = A x`` of all first layers and the
        router's logits.

        Args:
            backend: An object with ``forward`` and ``backward`` like :mod:`~comingle.models.kernels.expert_mlp`.
            x: The MLP's input.
        """
        a_first, b_first, weights_and_biases = [], [], []
        for name, linear in self.first.items():
            a, b = self.factors[name]
            a_first.append(a.to(x.dtype).flatten(1, 2))  # (users, experts * rank, width)
            b_first.append(b.to(x.dtype).contiguous())
            weights_and_biases += base_weight(linear)
        a_last, b_last = (factor.to(x.dtype).contiguous() for factor in self.factors["down"])
        weights_and_biases += base_weight(self.last)

        router_weight = self.router.weight
        matrices = a_first if router_weight is None else [*a_first, router_weight.to(x.dtype)]
        returned_x, products = _InputProducts.apply(x, torch.cat(matrices, 1))
        z_width = sum(a.shape[1] for a in a_first)
        z, logits = products.tensor_split([z_width], -1)
        # A router without a weight gives all experts the same gate.
        gates = self.router(x) if router_weight is None else self.router.choose(logits.float(), x)
        # `returned_x` equals x, but its gradient goes to _InputProducts.backward, which adds its own in place.
        mixture_input = returned_x if x.requires_grad else x
        num_first = len(self.first)
        tensors = (*b_first, a_last, b_last, *weights_and_biases)  # autograd functions take flat arguments
        mixed = _NativeMixture.apply(
            backend, self.act, self.scale, mixture_input, z, gates.contiguous(), num_first, *tensors
        )
        return cast(Tensor, mixed)

    def _mix_linears(self, x: Tokens, gates: Float[Tensor, "users n experts"]) -> Tokens:
        """Run the MLP with experts mixed in each linear layer (``mix: linear``).

        Args:
            x: The MLP's input.
            gates: The experts' probabilities.
        """
        pre_activations = {name: self._mix_linear(linear, name, x, gates) for name, linear in self.first.items()}
        if "gate" in self.first:
            activated, _derivative = self.act(pre_activations["gate"])
            hidden = activated * pre_activations["up"]
        else:
            hidden, _derivative = self.act(pre_activations["up"])
        return self._mix_linear(self.last, "down", hidden, gates)

    def _mix_linear(self, linear: nn.Module, name: str, x: Tokens, gates: Tensor) -> Float[Tensor, "users n d_out"]:
        """Return ``W x + s B_cat (p * (A_cat x))``, where A_cat and B_cat concatenate all experts' factors.

        Args:
            linear: The base's linear layer with weight W.
            name: Its key in ``factors``: "gate", "up" or "down".
            x: Input of the layer.
            gates: The experts' probabilities, ``(users, n, experts)``.
        """
        a, b = (factor.to(x.dtype) for factor in self.factors[name])
        a_cat, b_cat = a.flatten(1, 2), b.flatten(1, 2)  # (users, experts * rank, ...)
        rank = a.shape[-2]
        p = gates.to(x.dtype).repeat_interleave(rank, dim=-1)  # each expert's probability, once per rank
        return linear(x) + low_rank(x, a_cat, b_cat, self.scale, gates=p)


class _Mixture(torch.autograd.Function):
    """The expert mixture of the module docstring, with a hand-written backward pass.

    "First" layers are the linears that read the MLP's input (gate and up, or up alone), the "last" one is down.
    """

    @staticmethod
    def forward(
        ctx: Context, act: Any, scale: float, x: Tokens, gates: Tensor, num_first: int, *layer_tensors: Any
    ) -> Tokens:
        """Return the mixture's output ``y = W2 (sum_j p_j h_j) + b2 + s sum_j p_j B2_j A2_j h_j``.

        h_j are the hidden activations of expert j, p_j its probability, s the LoRA scale; W2, b2, A2_j and B2_j belong
        to the last layer.

        Args:
            ctx: Autograd context.
            act: Activation that returns its value and its derivative.
            scale: LoRA scale.
            x: The MLP's input.
            gates: The experts' probabilities, ``(users, n, experts)``.
            num_first: Number of first layers: 2 with a gate, else 1.
            *layer_tensors: (A, B) of each first layer and of the last, then (W, b) of the same layers.
        """
        (a_first, b_first, a_last, b_last), weights_and_biases = _split_arguments(layer_tensors, num_first)
        *weights_and_biases_first, (weight_last, bias_last) = weights_and_biases
        users, experts, rank, _ = a_last.shape
        n = x.shape[1]
        # z = s A_j x of all first layers and experts, from one product with all A below one another.
        z = torch.bmm(x, _join_factors(a_first).mT).mul_(scale)  # (users, n, num_first * experts * rank)
        z = z.view(users, n, num_first, experts, rank).permute(2, 0, 3, 1, 4)
        z = z.reshape(num_first, users * experts, n, rank)
        products = [F.linear(x, weight, bias) for weight, bias in weights_and_biases_first]  # W x + b
        loras = []
        for z_of_layer, b in zip(z, b_first, strict=True):
            loras.append(torch.bmm(z_of_layer, b.flatten(0, 1)).view(users, experts, n, -1))
        keeps_slopes = any(ctx.needs_input_grad)  # for the backward pass
        h, slopes, mixed = expert_mlp.activate(act, products, loras, gates, keeps_slopes)  # mixed: sum_j p_j h_j
        z_last = torch.bmm(h.flatten(0, 1), a_last.flatten(0, 1).mT)
        z_last = z_last.view(users, experts, n, rank).mul_(scale)  # s A2_j h_j
        gated = gates.mT.unsqueeze(-1).to(x.dtype) * z_last  # p_j s A2_j h_j
        gated = gated.transpose(1, 2).reshape(users, n, experts * rank)
        y = F.linear(mixed, weight_last, bias_last)
        y = y.baddbmm_(gated, b_last.flatten(1, 2))  # add sum_j B2_j gated_j
        ctx.num_first, ctx.scale = num_first, scale
        ctx.save_for_backward(x, gates, z, h, z_last, gated, *slopes, *layer_tensors)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tokens) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of ``x``, of the gates and of the LoRA factors; the base's weights are frozen.

        With the output's gradient ``dy``, A2_j and B2_j of the last layer, and ``z_last_j = s A2_j h_j``::

            d_mixed    = dy W2                          through the base, for all experts
            d_gated_j  = dy B2_j                        of p_j z_last_j
            d_z_last_j = s p_j d_gated_j
            d_h_j      = p_j d_mixed + d_z_last_j A2_j
            d_gates_j  = <d_mixed, h_j> + <d_gated_j, z_last_j>

        Each first layer is ``W x + b + B_j z_j`` with ``z_j = s A_j x``.
        """
        num_first, scale = ctx.num_first, ctx.scale
        x, gates, z, h, z_last, gated, *saved = ctx.saved_tensors
        slopes, layer_tensors = saved[:num_first], saved[num_first:]
        (a_first, b_first, a_last, b_last), weights_and_biases = _split_arguments(layer_tensors, num_first)
        *weights_and_biases_first, (weight_last, _) = weights_and_biases
        users, experts, n, _ = h.shape
        rank = a_last.shape[2]
        # Arguments of `forward`: act, scale, x, gates, num_first, *layer_tensors.
        _, _, _, _, _, *wants_layer_tensors = ctx.needs_input_grad
        *wants_first, wants_a_last, wants_b_last = wants_layer_tensors[: 2 * (num_first + 1)]  # A and B of each layer
        wants_a_first, wants_b_first = wants_first[::2], wants_first[1::2]

        d_mixed = dy @ weight_last
        d_gated = torch.bmm(dy, b_last.flatten(1, 2).mT).view(users, n, experts, rank).transpose(1, 2)
        d_z_last = (gates.mT.unsqueeze(-1).to(x.dtype) * d_gated).mul_(scale).reshape(users * experts, n, rank)
        d_h = torch.bmm(d_z_last, a_last.flatten(0, 1)).view_as(h)  # activate_backward adds p_j d_mixed
        d_loras, d_bases, d_gates = expert_mlp.activate_backward(h, slopes, gates, d_mixed, d_h)
        d_gates = d_gates + (d_gated * z_last).sum(-1).mT

        d_a_first: list[Tensor | None] = [None] * num_first
        d_b_first: list[Tensor | None] = [None] * num_first
        d_z, d_x = [], None
        for i, (weight, _) in enumerate(weights_and_biases_first):
            d_lora = d_loras[i].flatten(0, 1)
            d_z.append(torch.bmm(d_lora, b_first[i].flatten(0, 1).mT).view(users, experts, n, rank))
            d_x_of_base = d_bases[i] @ weight
            d_x = d_x_of_base if d_x is None else d_x.add_(d_x_of_base)
            if wants_b_first[i]:
                d_b_first[i] = torch.bmm(contiguous_transpose(z[i]), d_lora).view_as(b_first[i])
        # (users, num_first, experts, n, rank) -> (users, n, num_first * experts * rank)
        d_z_joined = torch.stack(d_z, 1).permute(0, 3, 1, 2, 4).reshape(users, n, num_first * experts * rank)
        d_z_joined = d_z_joined.mul_(scale)
        d_x = cast(Tensor, d_x).baddbmm_(d_z_joined, _join_factors(a_first))
        if any(wants_a_first):  # one product for A of all first layers
            d_a_joined = torch.bmm(contiguous_transpose(d_z_joined), x)
            d_a_first = list(d_a_joined.view(users, num_first, experts, rank, -1).unbind(1))

        d_a_last, d_b_last = None, None
        if wants_a_last:
            d_a_last = torch.bmm(contiguous_transpose(d_z_last), h.flatten(0, 1)).view_as(a_last)
        if wants_b_last:
            d_b_last = torch.bmm(contiguous_transpose(gated), dy).view_as(b_last)

        d_first: list[Tensor | None] = []
        for d_a, d_b in zip(d_a_first, d_b_first, strict=True):
            d_first += [d_a, d_b]
        no_grads = [None] * (2 * num_first + 2)  # weights and biases of the base
        return None, None, d_x, d_gates.to(gates.dtype), None, *d_first, d_a_last, d_b_last, *no_grads


class _InputProducts(torch.autograd.Function):
    """The product of the mixture's input with A of the first layers and the router's weight, as one matrix."""

    @staticmethod
    def forward(ctx: Context, x: Tokens, matrix: Float[Tensor, "users columns width"]) -> tuple[Tokens, Tensor]:
        """Return ``x`` and its product with each user's ``matrix``, ``(users, n, columns)``.

        The caller gives the returned ``x`` to the mixture. So :meth:`backward` gets the mixture's gradient of ``x`` and
        adds the product's gradient in place, without another tensor.

        Args:
            ctx: Autograd context.
            x: The mixture's input.
            matrix: A of the first layers and the router's weight, one below the other.
        """
        ctx.save_for_backward(x, matrix)
        return x.view_as(x), torch.bmm(x, matrix.mT)

    @staticmethod
    def backward(ctx: Context, d_x: Tokens, d_products: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the input ``x`` and of the matrix.

        Args:
            ctx: Autograd context.
            d_x: The mixture's gradient of its input, which is the ``x`` that :meth:`forward` returned; overwritten with
                the result.
            d_products: Gradient of the product.
        """
        x, matrix = ctx.saved_tensors
        wants_x, wants_matrix = ctx.needs_input_grad
        # d_x may be overwritten: _NativeMixture has allocated it, and nothing else reads it.
        d_input = d_x.baddbmm_(d_products, matrix) if wants_x else None
        d_matrix = torch.bmm(contiguous_transpose(d_products), x) if wants_matrix else None
        return d_input, d_matrix


class _NativeMixture(torch.autograd.Function):
    """The expert mixture of :class:`_Mixture`, with the hidden activations computed by native code."""

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
        *layer_tensors: Any,
    ) -> Tokens:
        """Return the mixture's output ``W2 (sum_j p_j h_j) + b2 + s sum_j p_j B2_j A2_j h_j``, as in :class:`_Mixture`.

        h_j are the hidden activations of expert j, p_j its probability, s the LoRA scale; W2, b2, A2_j and B2_j belong
        to the MLP's last layer. The backend computes ``sum_j p_j h_j`` and ``p_j s A2_j h_j``; the products with W and
        B2 are PyTorch's.

        Args:
            ctx: Autograd context.
            backend: An object with ``forward`` and ``backward`` like :mod:`~comingle.models.kernels.expert_mlp`.
            act: Activation that returns its value and its derivative.
            scale: LoRA scale.
            x: The MLP's input.
            z: Products of ``x`` with A of the first layers, ``(users, n, num_first * experts * rank)``.
            gates: The experts' probabilities, ``(users, n, experts)``.
            num_first: Number of layers that read the input: 2 with a gate, else 1.
            *layer_tensors: B of each first layer, A and B of the last, then (W, b) of the same layers.
        """
        b_first, (a_last, b_last), weights, biases = _split_native_arguments(layer_tensors, num_first)
        *weights_first, weight_last = weights
        *biases_first, bias_last = biases
        products = [F.linear(x, weight) for weight in weights_first]
        # mixed = sum_j p_j h_j, z_last = s A2_j h_j, gated = p_j s A2_j h_j
        mixed, z_last, gated = backend.forward(act, scale, products, biases_first, z, gates, b_first, a_last)
        y = F.linear(mixed, weight_last, bias_last).baddbmm_(gated, b_last.flatten(1, 2))
        ctx.backend, ctx.act, ctx.scale, ctx.num_first = backend, act, scale, num_first
        ctx.save_for_backward(z, gates, z_last, gated, *products, *layer_tensors)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tokens) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of ``x``, ``z``, the gates and the LoRA factors.

        In names, "first" are the layers that read the MLP's input and "last" is the one that computes its output.
        ``z_last_j = s A2_j h_j`` and ``gated_j = p_j z_last_j`` are as in :meth:`forward`; ``d_mixed`` and ``d_gated``
        are the gradients of ``sum_j p_j h_j`` and of ``gated``. The gradient of ``x`` is the part through the base's
        weights; :class:`_InputProducts` adds the part through ``z``, the products of ``x`` with A of the first layers.

        Args:
            ctx: Autograd context.
            dy: Gradient of the mixture's output.
        """
        num_first = ctx.num_first
        z, gates, z_last, gated, *saved = ctx.saved_tensors
        products, layer_tensors = saved[:num_first], saved[num_first:]
        b_first, (a_last, b_last), weights, biases = _split_native_arguments(layer_tensors, num_first)
        *weights_first, weight_last = weights
        *biases_first, _ = biases
        # Arguments of `forward`: backend, act, scale, x, z, gates, num_first, *layer_tensors.
        _, _, _, wants_x, _, _, _, *wants_layer_tensors = ctx.needs_input_grad
        wants_factors = any(wants_layer_tensors)  # the base weights in `layer_tensors` are frozen
        d_mixed = dy @ weight_last
        d_gated = torch.bmm(dy, b_last.flatten(1, 2).mT)
        d_products, d_z, d_gates, d_b_first, d_a_last = ctx.backend.backward(
            ctx.act,
            ctx.scale,
            products,
            biases_first,
            z,
            gates,
            b_first,
            a_last,
            z_last,
            d_mixed,
            d_gated,
            wants_factors,
        )
        d_x = None
        if wants_x:
            d_x = d_products[0] @ weights_first[0]
            for d_product, weight in zip(d_products[1:], weights_first[1:], strict=True):
                d_x += d_product @ weight
        d_factors: list[Tensor | None] = [None] * (num_first + 2)
        if wants_factors:
            d_b_last = torch.bmm(contiguous_transpose(gated), dy).view_as(b_last)
            d_factors = [*d_b_first, d_a_last, d_b_last]
        no_grads = [None] * (2 * num_first + 2)  # weights and biases of the base
        return None, None, None, d_x, d_z, d_gates, None, *d_factors, *no_grads


def _split_native_arguments(
    layer_tensors: Sequence[Any], num_first: int
) -> tuple[Sequence[Tensor], tuple[Tensor, Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Split the last arguments of :class:`_NativeMixture`, the tensors, which autograd requires to be flat.

    Args:
        layer_tensors: B of each first layer (one that reads the MLP's input), A and B of the last layer, then weight
            and bias of each of these layers. A of the first layers is not needed: the caller has multiplied the input.
        num_first: Number of first layers: 2 with a gate, else 1.

    Returns:
        B of the first layers, (A, B) of the last, weights of all layers, biases of all layers.
    """
    b_first = layer_tensors[:num_first]
    a_last, b_last, *weights_and_biases = layer_tensors[num_first:]
    weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
    return b_first, (a_last, b_last), weights, biases


def _join_factors(factors: Sequence[Tensor]) -> Float[Tensor, "users columns width"]:
    """Return A of all experts and several linear layers as one matrix per user.

    Args:
        factors: A of each linear layer, ``(users, experts, rank, width)``.
    """
    matrices = [a.flatten(1, 2) for a in factors]  # (users, experts * rank, width)
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, 1)


def _split_arguments(
    layer_tensors: Sequence[Any], num_first: int
) -> tuple[tuple[Any, Any, Tensor, Tensor], list[tuple[Tensor, Tensor | None]]]:
    """Split the last arguments of :class:`_Mixture`, the tensors, which autograd requires to be flat.

    Args:
        layer_tensors: A and B of each first layer and of the last, then weight and bias of the same layers.
        num_first: Number of layers that read the input: 2 with a gate, else 1.

    Returns:
        (A of the first layers, B of the first layers, A of the last, B of the last), and (W, b) of each layer.
    """
    num_factors = 2 * (num_first + 1)  # A and B of each layer
    *factors_first, a_last, b_last = layer_tensors[:num_factors]
    a_first, b_first = factors_first[::2], factors_first[1::2]
    weights, biases = layer_tensors[num_factors::2], layer_tensors[num_factors + 1 :: 2]
    weights_and_biases = list(zip(weights, biases, strict=True))
    return (a_first, b_first, a_last, b_last), weights_and_biases


logger = logging.getLogger("comingle")


class LoraTarget(NamedTuple):
    """A linear layer that gets a LoRA: for example ``("layers.0.q_proj", module, (8,), ("attention",))``."""

    name: str
    linear: nn.Module
    leading: tuple[int, ...]
    """Leading dimensions of the factors: ``(rank,)`` in attention, ``(experts, rank)`` in an MLP."""
    roles: tuple[str, ...]
    """``("attention",)`` in attention; in an MLP the role of each expert, "generalist" or "specialist"."""


def check_ranks(ranks: Int[Tensor, " users"], targets: Sequence[LoraTarget]) -> None:
    """Warn if the largest LoRA rank exceeds the full rank ``min(d_in, d_out)`` of a weight; reject absurd ranks.

    Args:
        ranks: LoRA rank of each user.
        targets: The linear layers that get a LoRA.

    Raises:
        RecipeError: A rank exceeds ``d_in + d_out`` of every weight. The limit is loose: it catches mistyped ranks.
    """
    largest_rank = int(ranks.max())
    user = int(ranks.argmax())
    user_note = f" for user {user + 1} of {len(ranks)}" if len(ranks.unique()) > 1 else ""
    shapes = {target.name: tuple(weight_shape(target.linear)) for target in targets}
    largest_weight = max(shapes, key=lambda name: sum(shapes[name]))  # by d_out + d_in
    d_out, d_in = shapes[largest_weight]
    if largest_rank > d_in + d_out:
        raise RecipeError(
            f"adapters.rank: got {largest_rank}{user_note}; the largest weight, {largest_weight}, maps {d_in} to "
            f"{d_out}, so its updates have a rank of at most {min(d_in, d_out)}; allowed: up to {d_in + d_out}"
        )
    exceeded = [name for name, shape in shapes.items() if largest_rank > min(shape)]
    if exceeded:
        example = exceeded[0]
        d_out, d_in = shapes[example]
        logger.warning(
            "adapters.rank: %d%s exceeds the full rank of %d of %d weights (%s maps %d to %d); the excess is unused",
            largest_rank, user_note, len(exceeded), len(shapes), example, d_in, d_out,
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
    _raise_unless_one_input(original, family)
    up_weight, _ = base_weight(mlp.first["up"])
    dtype, device = up_weight.dtype, up_weight.device
    for name, linear in [*mlp.first.items(), ("down", mlp.last)]:
        d_out, d_in = weight_shape(linear)
        a, b = up_weight.new_zeros(1, 1, 1, d_in), up_weight.new_zeros(1, 1, 1, d_out)  # one user, expert and rank
        mlp.factors[name] = (a, b)
    mlp.router.present = torch.ones(1, 1, dtype=torch.bool, device=device)
    tokens, width = 4, up_weight.shape[1]
    x = torch.linspace(-1, 1, tokens * width, dtype=dtype, device=device).view(1, tokens, width)
    expected, got = original(x), mlp(x)
    error = (got - expected).double().norm() / expected.double().norm()
    # Far above rounding errors; SHORT are the 16-bit dtypes, and packed weights are multiplied with rounded inputs.
    tolerance = 0.05 if dtype in SHORT or multiplies_packed(mlp.last, x) else 1e-4
    if error > tolerance:
        raise BaseModelError(
            f"{family}: its MLP does more than act, gate, up and down (with adapters at zero the output differs by "
            f"{error:.1%}), so comingle cannot adapt it"
        )


def _raise_unless_one_input(original: nn.Module, family: str) -> None:
    """Raise an error unless an MLP's ``forward`` has one required argument; Bloom's, for example, has two.

    Args:
        original: The MLP of the base model.
        family: Class of the base model, for the message.

    Raises:
        BaseModelError: ``forward`` has no required argument or several.
    """
    required = []
    for parameter in signature(original.forward).parameters.values():
        is_starred = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)  # *args or **kwargs
        if parameter.default is Parameter.empty and not is_starred:
            required.append(parameter.name)
    if len(required) != 1:
        raise BaseModelError(
            f"{family}: its MLP ({type(original).__name__}) is called with {', '.join(required) or 'nothing'}; "
            "comingle can only adapt MLPs of one input"
        )


@dataclass(frozen=True, kw_only=True)
class ExpertCounts:
    """Number of experts of each user in every MLP.

    All users have ``generalists`` generalists; user u has ``specialists[u]`` specialists, such as ``(1, 3, 0)`` for
    three users. Generalists come first on the expert axis. Users with fewer specialists than others are padded.
    """

    generalists: int
    specialists: tuple[int, ...]

    @property
    def width(self) -> int:
        """Size of the expert axis: the largest number of experts of a user."""
        return self.generalists + max(self.specialists)

    @property
    def roles(self) -> tuple[str, ...]:
        """Kind of each expert of an MLP, in their order: all generalists (shared by the users), then specialists.

        Users with fewer specialists than others are padded, so these are as many as the largest number of a user.
        """
        return (GENERALIST,) * self.generalists + (SPECIALIST,) * max(self.specialists)

    def present(self) -> Bool[Tensor, "users experts"]:
        """Return True where a user has an expert, False for padding."""
        experts_per_user = self.generalists + torch.tensor(self.specialists)
        return torch.arange(self.width) < experts_per_user.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapter modules in a base model, with the layout of a user's trainable tensors, and users' experts and ranks.

    Args:
        layout: Names, shapes and roles of a user's trainable tensors.
        present: True where a user has an expert.
        ranks: Each user's LoRA rank.
        scales: Each user's LoRA scale, ``alpha / sqrt(rank)``.
        scale: The LoRA scale that the modules apply: the smallest of all users.
        attention: The linears of attention with their LoRA, by name.
        experts: The expert mixtures that replace the MLPs, by name.
    """

    layout: Layout
    present: Bool[Tensor, "users experts"]
    ranks: Int[Tensor, " users"]
    scales: Float[Tensor, " users"]
    scale: float
    attention: dict[str, LoraLinear]
    experts: dict[str, RoutedMLP]

    def only(self, users: Sequence[int]) -> Adapters:
        """Return the adapters of some users, who are then numbered from 0.

        Args:
            users: Indices of the users, such as ``[4, 7]``.
        """
        rows = list(users)
        return replace(self, present=self.present[rows], ranks=self.ranks[rows], scales=self.scales[rows])

    def without(self, roles: frozenset[str]) -> Adapters:
        """Return the adapters without the experts of some roles, for a phase that trains without the specialists, say.

        :func:`comingle.utils.trees.restrict` removes the same experts from the users' tensors.

        Args:
            roles: Roles of the experts to leave out.
        """
        # All tensors of MLPs have the same expert axis, so read its roles from the first of them.
        first_mlp_slot = next(slot for slot in self.layout.slots if slot.roles != (ATTENTION,))
        kept_experts = [expert for expert, role in enumerate(first_mlp_slot.roles) if role not in roles]
        return replace(self, present=self.present[:, kept_experts])

    def bind(self, tensors: Tree, users: Sequence[int]) -> None:
        """Assign tensors of some users to the modules for the next forward passes.

        Args:
            tensors: The users' tensors by name, with a leading user axis.
            users: Indices of the users, in the order of that axis.
        """
        rescaled, present = self.prepare(tensors, users)
        self.assign(rescaled, present)

    def prepare(self, tensors: Tree, users: Sequence[int]) -> tuple[Tree, Bool[Tensor, "users experts"]]:
        """Return the arguments of :meth:`assign`: tensors rescaled to the modules' scale, and the users' experts.

        Args:
            tensors: The users' tensors by name, with a leading user axis.
            users: Indices of the users, in the order of that axis.
        """
        scales_differ = bool((self.scales != self.scale).any())
        if scales_differ:
            tensors = self._rescale_factors(tensors, users)
        device = next(iter(tensors.values())).device
        return tensors, self.present[list(users)].to(device)

    def assign(self, tensors: Tree, present: Bool[Tensor, "users experts"]) -> None:
        """Assign tensors of some users to the modules for the next forward passes.

        Args:
            tensors: The users' tensors by name, rescaled by :meth:`prepare`.
            present: True where a user has an expert.
        """
        for name, lora in self.attention.items():
            lora.factors = factors_of(tensors, name, lora.scale)
        for name, mlp in self.experts.items():
            linears = (*mlp.first, "down")
            mlp.factors = {linear: factors_of(tensors, f"{name}.{linear}", mlp.scale) for linear in linears}
            mlp.router.weight = tensors.get(f"{name}.router")  # None averages the experts
            a_up, _ = mlp.factors["up"]
            mlp.router.keys = a_up  # for gates that compare a token with each expert's A
            mlp.router.present = present
            mlp.router.penalty = None  # clear the penalty of the previous pass

    def _rescale_factors(self, tensors: Tree, users: Sequence[int]) -> Tree:
        """Return the tensors with each user's A multiplied by the user's LoRA scale divided by the modules' scale.

        The modules multiply by one scale for all users, but a user's own scale, ``alpha / sqrt(rank)``, depends on the
        user's rank.

        Args:
            tensors: The users' tensors by name, with a leading user axis.
            users: Indices of the users, in the order of that axis.
        """
        ratios = (self.scales / self.scale)[list(users)]
        rescaled = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith(".a"):
                ratio_per_user = ratios.to(tensor).view(-1, *[1] * (tensor.dim() - 1))
                rescaled[name] = tensor * ratio_per_user
        return rescaled

    def penalties(self) -> Tensor | float:
        """Return each user's load-balancing penalty of the last forward pass, as a mean over the MLPs.

        Routers compute the penalty during the pass, which is added to the loss so that tokens are spread evenly over
        the experts. The result is 0.0 if there is no such penalty.
        """
        penalties = [mlp.router.penalty for mlp in self.experts.values() if mlp.router.penalty is not None]
        return torch.stack(penalties).mean(0) if penalties else 0.0

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """Return True where a user has a parameter, False for padding and for the router of a user with one expert.

        Args:
            ranks: LoRA rank of each user; :attr:`ranks` by default.
        """
        ranks = self.ranks if ranks is None else ranks
        masks = [self._slot_mask(slot, ranks).flatten(1) for slot in self.layout.slots]
        return torch.cat(masks, 1)

    def _slot_mask(self, slot: Slot, ranks: Int[Tensor, " users"]) -> Bool[Tensor, "users ..."]:
        """Return the mask of one trainable tensor, ``(users, *slot.shape)``: False for padding.

        All users' tensors have the shape of the largest, so users with fewer experts (``self.present`` is False) or a
        smaller LoRA rank are padded. A user with a single expert has no router.

        Args:
            slot: Name, shape and roles of the tensor.
            ranks: LoRA rank of each user.
        """
        users = len(ranks)
        full_shape = (users, *slot.shape)
        if slot.name.endswith(".router"):
            num_rows, _width = slot.shape
            return self._router_row_mask(num_rows).unsqueeze(-1).expand(full_shape)
        if slot.roles[0] == RESIDUAL:  # a frozen change beside each LoRA; its rank is the same for all users
            if len(slot.shape) == 2:  # (rank, width), without experts
                return torch.ones(users, dtype=torch.bool).view(users, 1, 1).expand(full_shape)
            return self.present.view(*self.present.shape, 1, 1).expand(full_shape)
        largest_rank = slot.shape[-2]
        within_rank = torch.arange(largest_rank) < ranks.unsqueeze(1)  # (users, rank), such as [True, True, False]
        if slot.roles == (ATTENTION,):  # (rank, width), without experts
            return within_rank.unsqueeze(-1).expand(full_shape)
        within_rank_of_expert = self.present.unsqueeze(-1) & within_rank.unsqueeze(1)  # (users, experts, rank)
        return within_rank_of_expert.unsqueeze(-1).expand(full_shape)

    def _router_row_mask(self, num_rows: int) -> Bool[Tensor, "users rows"]:
        """Return True where a user has a row of a router's weight; a user with a single expert has none.

        If the weight has at most one row per expert, its rows belong to the last experts: with 3 experts, 3 rows belong
        to all of them and 2 rows to the last two, as in a method whose first expert has no row. A user lacks the rows
        of experts that it lacks. With more rows than experts, as some methods define them, a row belongs to no single
        expert.

        Args:
            num_rows: Number of rows of the router's weight.
        """
        has_router = self.present.sum(1, keepdim=True) > 1  # (users, 1)
        num_experts = self.present.shape[1]
        if num_rows > num_experts:
            return has_router
        return (self.present & has_router)[:, -num_rows:]


def ranks_of(settings: AdaptersSection, users: int) -> Int[Tensor, " users"]:
    """Return the LoRA rank of each user.

    Args:
        settings: Settings of the adapters; ``rank`` is one number for all users, or a list.
        users: Number of users.

    Raises:
        RecipeError: The recipe has a list of ranks whose length is not the number of users.
    """
    assert not isinstance(settings.rank, dict), "ranks by user name: call Recipe.for_users first"
    if isinstance(settings.rank, int):
        return torch.tensor((settings.rank,) * users)
    if len(settings.rank) != users:
        raise RecipeError(f"adapters.rank: {len(settings.rank)} numbers for {users} users; give one, or one per user")
    return torch.tensor(settings.rank)


def inject(
    model: nn.Module,
    settings: AdaptersSection,
    counts: ExpertCounts,
    *,
    routed: bool,
    gating: Gating | None = None,
    residual: int | None = None,
    middle: bool = False,
) -> Adapters:
    """Replace the target modules of every decoder layer of ``model`` by adapters, in place.

    Args:
        model: The base model.
        settings: Ranks, scale and target modules.
        counts: How many experts each user has; ``counts.width`` is the largest number of a user.
        routed: Add a router to each MLP, if some user has more than one expert.
        gating: How routers compute gates; None: a softmax over logits.
        residual: Rank of the frozen residual beside each LoRA (:mod:`comingle.models.lora`); None for no residual.
        middle: Whether each LoRA has a matrix R between its factors, ``W x + s B R A x``.

    Returns:
        The modules, and the layout of a user's trainable tensors.

    Raises:
        BaseModelError: The family, its target modules or its activation are not supported.
        RecipeError: The ranks do not fit the number of users, or one is absurdly large (:func:`check_ranks`).
    """
    targets = find_targets(model, settings.targets)
    ranks = ranks_of(settings, users=len(counts.specialists))
    largest_rank, act = int(ranks.max()), activation_name(model, targets)
    # The modules use the scale of the largest rank for all users; Adapters.bind corrects A of users with smaller ranks.
    scale = lora_scale(settings.alpha, largest_rank)
    attention: dict[str, LoraLinear] = {}
    experts: dict[str, RoutedMLP] = {}
    for i, layer in enumerate(decoder_layers(model)):
        for name in targets.attention:
            lora = LoraLinear(layer.get_submodule(name), scale=scale)
            layer.set_submodule(name, lora)
            attention[f"layers.{i}.{name}"] = lora
        mlp = _create_routed_mlp(layer, targets, act, scale, settings, counts)
        mlp.router.gating = gating
        is_first_layer = i == 0  # all layers are alike, so check one
        has_mlp_module = bool(targets.mlp)
        has_values = not next(layer.parameters()).is_meta  # without values functions cannot be compared
        if is_first_layer and has_mlp_module and has_values:
            check_same_function(layer.get_submodule(targets.mlp), mlp, type(model).__name__)
        _replace_mlp(layer, targets, mlp)
        experts[f"layers.{i}.mlp"] = mlp

    lora_targets = _lora_targets(attention, experts, counts, largest_rank)
    check_ranks(ranks, lora_targets)
    # All A, then all B, then all routers, so that the columns that a phase trains are contiguous.
    slots = [*map(_a_slot, lora_targets), *map(_b_slot, lora_targets)]
    if routed and counts.width > 1:
        slots += [_router_slot(name, mlp, counts.width, largest_rank) for name, mlp in experts.items()]
    if middle:
        slots += map(_middle_slot, lora_targets)
    if residual is not None:
        slots += _residual_slots(lora_targets, counts.width, residual)
    # The part, "head" or "body", can be named in recipes to share or freeze only some layers.
    slots = [replace(slot, part=_slot_part(slot.name, experts)) for slot in slots]
    scales = settings.alpha / ranks.double().sqrt()
    return Adapters(
        layout=Layout(slots=tuple(slots)),
        present=counts.present(),
        ranks=ranks,
        scales=scales,
        scale=float(scales.min()),  # of the largest rank
        attention=attention,
        experts=experts,
    )


def _lora_targets(
    attention: dict[str, LoraLinear], experts: dict[str, RoutedMLP], counts: ExpertCounts, rank: int
) -> list[LoraTarget]:
    """Return the linears that get a LoRA: those of attention, then those of MLPs.

    Args:
        attention: The attention modules by name.
        experts: The expert mixtures by name.
        counts: How many experts each user has.
        rank: Largest LoRA rank of a user.
    """
    lora_targets = [LoraTarget(name, lora.linear, (rank,), (ATTENTION,)) for name, lora in attention.items()]
    for name, mlp in experts.items():
        for key, linear in [*mlp.first.items(), ("down", mlp.last)]:
            leading = (counts.width, rank)  # the largest number of experts of a user
            lora_targets.append(LoraTarget(f"{name}.{key}", linear, leading, counts.roles))
    return lora_targets


def _residual_slots(lora_targets: Sequence[LoraTarget], experts: int, rank: int) -> list[Slot]:
    """Return names, shapes and roles of the residuals' factors, for the layout of all tensors.

    A residual is a frozen low-rank change of a linear's weight, beside its LoRA. The server sets it; users never train
    it.

    Args:
        lora_targets: The linears that get a LoRA and a residual.
        experts: Size of the expert axis in MLPs.
        rank: Rank of the residuals; 0 for the full rank of the largest weight.
    """
    linears = []
    for target in lora_targets:
        num_experts = 0 if target.roles == (ATTENTION,) else experts  # 0: without an expert axis
        linears.append((target.name, target.linear, num_experts))
    return residual_slots(linears, rank)


def _create_routed_mlp(
    layer: nn.Module, targets: TargetsSection, act: str, scale: float, settings: AdaptersSection, counts: ExpertCounts
) -> RoutedMLP:
    """Create the expert mixture for a decoder layer's MLP; the layer itself is unchanged.

    Args:
        layer: The decoder layer.
        targets: Names of the linears in a decoder layer.
        act: Name of the MLP's activation.
        scale: LoRA scale.
        settings: Experts per token, load balancing and form of the mixture.
        counts: How many experts each user has.
    """
    first = {"gate": layer.get_submodule(targets.gate)} if targets.gate else {}
    first["up"] = layer.get_submodule(targets.up)
    mlp = RoutedMLP(first=first, last=layer.get_submodule(targets.down), act=act, scale=scale, mix=settings.mix)
    mlp.router.top_k = settings.top_k
    mlp.router.balance = settings.balance
    if settings.balance == "generalist" and counts.generalists != 1:  # "generalist" balances towards expert 0 alone
        mlp.router.balance = "uniform"
    return mlp


def _slot_part(name: str, experts: dict[str, RoutedMLP]) -> str:
    """Return the part of the model that recipes can name for a tensor, as in "specialist.head".

    It is "head" for tensors of the last MLP, such as "layers.11.mlp.up.a", else "body".

    Args:
        name: Name of the tensor.
        experts: The expert mixtures by name, in the order of the layers.
    """
    *_, last_mlp = experts
    return "head" if name.startswith(f"{last_mlp}.") else "body"


def _replace_mlp(layer: nn.Module, targets: TargetsSection, mlp: RoutedMLP) -> None:
    """Replace the MLP of a decoder layer by the mixture, in place.

    If the layer itself holds the MLP's linears, as in OPT, the mixture replaces ``up``; ``down`` and the activation
    become identities.

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
    if not activations:  # an activation function in the layer's `forward` cannot be removed
        raise BaseModelError(f"adapters.targets.mlp: '' needs a layer with an activation module; got {sorted(leaves)}")
    layer.set_submodule(targets.up, mlp)
    for name in (targets.down, *activations):
        layer.set_submodule(name, nn.Identity())


def _a_slot(target: LoraTarget) -> Slot:
    """Return name, shape, roles and initialiser of a linear's LoRA factor A, for the layout of trainable tensors.

    Its shape is ``(rank, d_in)`` in attention and ``(experts, rank, d_in)`` in an MLP.
    """
    _d_out, d_in = weight_shape(target.linear)
    shape = (*target.leading, d_in)
    return Slot(name=f"{target.name}.a", shape=shape, roles=target.roles, init=init_a, factor="a")


def _b_slot(target: LoraTarget) -> Slot:
    """Return name, shape, roles and initialiser of a linear's LoRA factor B, for the layout of trainable tensors.

    B is stored transposed: ``(rank, d_out)`` in attention and ``(experts, rank, d_out)`` in an MLP. It starts at zero.
    """
    d_out, _d_in = weight_shape(target.linear)
    shape = (*target.leading, d_out)
    return Slot(name=f"{target.name}.b", shape=shape, roles=target.roles, init=init_zero, factor="b")


def _middle_slot(target: LoraTarget) -> Slot:
    """Return name, shape, roles and initialiser of the matrix R between a linear's LoRA factors, ``(..., rank, rank)``.

    It starts at zero.
    """
    shape = (*target.leading, target.leading[-1])
    return Slot(name=f"{target.name}.{MIDDLE}", shape=shape, roles=target.roles, init=init_zero, factor=MIDDLE)


def _router_slot(name: str, mlp: RoutedMLP, experts: int, rank: int) -> Slot:
    """Return name, shape, roles and initialiser of a router's weight ``(rows, width)``, for the layout of all tensors.

    A router has one row per expert, unless the method has its own gating, whose ``start`` returns the number of rows
    and their initialiser.

    Args:
        name: Name of the MLP.
        mlp: The mixture of experts that the router belongs to.
        experts: Largest number of experts of a user.
        rank: Largest LoRA rank of a user.
    """
    _d_out, width = weight_shape(mlp.first["up"])
    gating = mlp.router.gating
    rows, init = (experts, init_router) if gating is None else gating.start(experts, rank, width)
    return Slot(name=f"{name}.router", shape=(rows, width), roles=(ROUTER,) * rows, init=init)
