"""Whether adapters fit the base that they are put into: its MLPs, and the ranks of its weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature
from itertools import islice

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comingle.adapters.experts import RoutedMLP
from comingle.adapters.kernels import SHORT
from comingle.adapters.lora import base_weight
from comingle.utils.errors import BaseModelError, RecipeError

logger = logging.getLogger("comingle")

Linear = tuple[str, nn.Module, tuple[int, ...], tuple[str, ...]]
"""A linear that gets a LoRA: name, module, leading dimensions of the factors, roles along the expert axis."""


def check_ranks(ranks: Int[Tensor, " users"], linears: Sequence[Linear]) -> None:
    """A change of a weight has at most the rank of its smaller side; what is above is trained and sent for nothing.

    Raises:
        RecipeError: a rank above both sides together of every weight, where factors dwarf what they change.
    """
    shapes = {name: tuple(base_weight(linear)[0].shape) for name, linear, _, _ in linears}
    user = int(ranks.argmax())
    rank = int(ranks[user])
    whose = f" for user {user + 1} of {len(ranks)}" if len(ranks.unique()) > 1 else ""
    name = max(shapes, key=lambda name: sum(shapes[name]))
    d_out, d_in = shapes[name]
    if rank > d_in + d_out:
        raise RecipeError(
            f"adapters.rank: got {rank}{whose}; the largest weight, {name}, maps {d_in} to {d_out}, so its changes "
            f"have a rank of at most {min(d_in, d_out)}; allowed: up to {d_in + d_out}"
        )
    above = {name: shape for name, shape in shapes.items() if rank > min(shape)}
    for name, (d_out, d_in) in islice(above.items(), 1):
        logger.warning(
            "adapters.rank: %d%s: more than a change can have in %d of %d weights (%s maps %d to %d), adds nothing",
            rank, whose, len(above), len(shapes), name, d_in, d_out,
        )  # fmt: skip


@torch.no_grad()
def check_same_function(original: nn.Module, mlp: RoutedMLP, family: str) -> None:
    """With adapters at zero the mixture is the MLP that it replaces, or the family's MLP has something more to it."""
    _require_one_input(original, family)
    weights = {name: base_weight(linear)[0] for name, linear in [*mlp.first.items(), ("down", mlp.last)]}
    up = weights["up"]
    mlp.factors = {
        name: (up.new_zeros(1, 1, 1, weight.shape[1]), up.new_zeros(1, 1, 1, weight.shape[0]))
        for name, weight in weights.items()
    }
    mlp.router.present = torch.ones(1, 1, dtype=torch.bool, device=up.device)
    x = torch.linspace(-1, 1, 4 * up.shape[1], dtype=up.dtype, device=up.device).view(1, 4, -1)
    wanted, got = original(x), mlp(x)
    error = (got - wanted).double().norm() / wanted.double().norm()
    if error > (0.05 if up.dtype in SHORT else 1e-4):  # rounding is far below
        raise BaseModelError(
            f"{family}: its MLP is not act, gate, up and down alone (with adapters at zero the output differs by "
            f"{error:.1%}), so comingle cannot adapt it"
        )


def _require_one_input(original: nn.Module, family: str) -> None:
    """Some MLPs are handed more than their input, as Bloom's is the residual that it adds."""
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
