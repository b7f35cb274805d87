"""A user's adapters put into the weights of a plain base, outside of the federation."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from comingle.adapters import watching
from comingle.adapters.lora import base_weight
from comingle.models.adapted import AdaptedModel
from comingle.models.pretrained import PreTrainedModel
from comingle.trees import Tree


def why_not_merged(model: AdaptedModel, row: int) -> str:
    """Why no weights can hold the model of user ``row``; empty where they can: one expert, or all mixed per linear."""
    experts = int(model.adapters.present[row].sum())
    mlps = model.adapters.experts.values()
    if experts == 1:
        return ""
    if watching.routed(model.adapters):
        return f"{experts} experts are chosen token by token"
    if any(mlp.mix == "output" for mlp in mlps):
        return f"{experts} experts are averaged after the MLP's nonlinearity"
    return ""


@torch.no_grad()
def merge_adapters(model: AdaptedModel, tensors: Tree, row: int) -> PreTrainedModel:
    """A copy of the base with ``W + s sum_j p_j B_j A_j`` for every adapted weight W.

    Only where :func:`why_not_merged` knows no reason. p is uniform over the user's experts.
    """
    model.adapters.bind(tensors, [row])
    names = {id(p): name for name, p in model.base.model.named_parameters()}
    merged = copy.deepcopy(model.base.model)
    for linear, a, b, scale in _low_rank_terms(model, row):
        change = torch.matmul(b.mT, a).sum(0) * scale  # (d_out, d_in)
        weight = merged.get_parameter(names[id(linear.weight)])
        weight.add_((change if base_weight(linear)[0] is linear.weight else change.mT).to(weight))
    return merged


def _low_rank_terms(model: AdaptedModel, row: int) -> Iterator[tuple[nn.Module, Tensor, Tensor, float]]:
    """Every adapted linear with the factors ``(experts, rank, width)`` bound to it, in float32 at least."""
    present = model.adapters.present[row]

    def wide(factors: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [f[0].to(torch.promote_types(f.dtype, torch.float32)) for f in factors]

    for lora in model.adapters.attention.values():
        a, b = wide(lora.factors)
        yield lora.linear, a.unsqueeze(0), b.unsqueeze(0), lora.scale
    for mlp in model.adapters.experts.values():
        for key, linear in (*mlp.first.items(), ("down", mlp.last)):
            a, b = (f[present.to(f.device)] for f in wide(mlp.factors[key]))
            yield linear, a, b, mlp.scale / len(a)
