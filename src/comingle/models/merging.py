"""Adapters merged into the weights of the base model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.models import routing
from comingle.models.adapted import AdaptedModel
from comingle.models.floral_language import MixedLanguageModel
from comingle.models.lora import base_weight
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.trees import Tree

WIDE = torch.float32


@dataclass(frozen=True, kw_only=True)
class Change:
    """``W + sum_j shares_j B_j A_j`` for one linear of the base, the LoRA scale among the shares.

    ``name`` is the module's, as in the base's state dict; ``key`` is that of an expert's linear (gate, up, down), empty
    elsewhere. ``transposed``: the base keeps W as (d_in, d_out). All at least float32.
    """

    name: str
    layer: int
    key: str
    transposed: bool
    a: Float[Tensor, "experts rank d_in"]
    b: Float[Tensor, "experts rank d_out"]
    shares: Float[Tensor, " experts"]

    def summed(self) -> Float[Tensor, "d_out d_in"]:
        """The whole change."""
        return torch.einsum("e,ero,eri->oi", self.shares, self.b, self.a)

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> None:
        """Into a weight as the base keeps it, in place; rounded once, to its format."""
        whole = self.summed()
        weight.add_((whole.mT if self.transposed else whole).to(weight))

    def alone(self, expert: int) -> Change:
        """As if the user had this expert only; ``shares`` stay the LoRA scale."""
        one = slice(expert, expert + 1)
        return replace(self, a=self.a[one], b=self.b[one], shares=self.shares[one])

    def weighed(self, weights: Float[Tensor, " experts"]) -> Change:
        """With every expert in this part of it."""
        return replace(self, shares=self.shares * weights.to(self.shares))


def changes_of_adapted(model: AdaptedModel, tensors: Tree, row: int) -> list[Change]:
    """One for each adapted linear, with the factors of the experts that user ``row`` has and nobody else's."""
    model.adapters.bind(tensors, [row])
    names, found = _names(model.base.model), []
    present = model.adapters.present[row]
    for at, lora in model.adapters.attention.items():
        a, b = (_wide(f[0]).unsqueeze(0) for f in lora.factors)
        found.append(_change(names, lora.linear, _layer(at), "", a, b, _same(1, lora.scale)))
    for at, mlp in model.adapters.experts.items():
        for key, linear in (*mlp.first.items(), ("down", mlp.last)):
            a, b = (_wide(f[0])[present.to(f.device)] for f in mlp.factors[key])
            found.append(_change(names, linear, _layer(at), key, a, b, _same(len(a), mlp.scale)))
    return _cut(found)


def averaged(changes: Sequence[Change]) -> list[Change]:
    """Of a model that the base's weights can hold: where it has several experts, they are averaged in the weights."""
    means = (_same(len(change.a), 1 / len(change.a)) for change in changes)
    return [change.weighed(mean) if change.key else change for change, mean in zip(changes, means, strict=True)]


def changes_of_mixed(model: MixedLanguageModel, tensors: Tree) -> list[Change]:
    """One for each adapted linear, of rank C x r: the clusters are its experts, in the user's shares."""
    own, shares = model.of_one_user(tensors), _wide(model.shares(tensors)[0])
    names, found = _names(model.base.model), []
    for at, layer in own.layers().items():
        a, b = layer.get_parameter("a"), layer.get_parameter("b")
        factors = (_wide(a.detach()), _wide(b.detach()).mT)
        found.append(_change(names, layer.base, _layer(at), "", *factors, layer.alpha * layer.of_mixture(shares)))
    return found


def _change(
    names: dict[int, str], linear: nn.Module, layer: int, key: str, a: Tensor, b: Tensor, shares: Tensor
) -> Change:
    name, transposed = names[id(linear.weight)], base_weight(linear)[0] is not linear.weight
    a, b, shares = (t.detach().cpu() for t in (a, b, shares))
    return Change(name=name, layer=layer, key=key, transposed=transposed, a=a, b=b, shares=shares.to(a))


def _names(model: PreTrainedModel) -> dict[int, str]:
    """Names of modules by the identity of their weights, which copies of the base share with it."""
    return {id(p): name.removesuffix(".weight") for name, p in model.named_parameters()}


def _layer(name: str) -> int:
    """The number in a name such as "layers.3.mlp", which is the block's."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def _same(experts: int, value: float) -> Float[Tensor, " experts"]:
    return torch.full((experts,), value, dtype=torch.float64)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, WIDE))


def _cut(changes: Sequence[Change]) -> list[Change]:
    """Without places behind a user's own rank, which others have: there both factors or one of them are zero."""
    used = max(_rank(change) for change in changes)
    return [replace(change, a=change.a[:, :used], b=change.b[:, :used]) for change in changes]


def _rank(change: Change) -> int:
    busy = (change.a.abs().amax((0, 2)) * change.b.abs().amax((0, 2))).nonzero()
    return int(busy.max()) + 1 if len(busy) else 1


def why_not_merged(model: AdaptedModel, row: int) -> str:
    """Why no weights can hold the model of user ``row``; empty where they can: one expert, or all mixed per linear."""
    experts = int(model.adapters.present[row].sum())
    mlps = model.adapters.experts.values()
    if experts == 1:
        return ""
    if routing.routed(model.adapters):
        return f"{experts} experts are chosen token by token"
    if any(mlp.mix == "output" for mlp in mlps):
        return f"{experts} experts are averaged after the MLP's nonlinearity"
    return ""


def merge_adapters(model: AdaptedModel, tensors: Tree, row: int) -> PreTrainedModel:
    """A copy of the base with ``W + s sum_j p_j B_j A_j`` for every adapted weight W.

    Only where :func:`why_not_merged` knows no reason. p is uniform over the user's experts.
    """
    merged = copy.deepcopy(model.base.model)
    for change in averaged(changes_of_adapted(model, tensors, row)):
        change.add_to(merged.get_parameter(f"{change.name}.weight"))
    return merged
