"""Two feature extractors of one user, a gate that mixes their features, and a head: pFedMoE where nets are trained."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.utils.errors import RecipeError
from comingle.utils.seeds import derive
from comingle.utils.trees import GENERALIST, ROUTER, SPECIALIST, STATISTICS, Slot

_PLACES = {"shared": GENERALIST, "own": SPECIALIST, "head": SPECIALIST, "gate": ROUTER}


class GatedPair(nn.Module):
    """``head(g_0(x) shared(x) + g_1(x) own(x))``, where g is the softmax of the gate's two outputs.

    ``shared`` and ``own`` map samples to equally many features (Yi et al. 2024, arXiv:2402.01350).
    """

    def __init__(self, shared: nn.Module, own: nn.Module, head: nn.Module, gate: nn.Module):
        super().__init__()
        self.shared, self.own, self.head, self.gate = shared, own, head, gate

    def forward(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch outputs"]:
        """What the head makes of the mixed features."""
        gates = self.gate(inputs).softmax(-1)
        return self.head(gates[:, :1] * self.shared(inputs) + gates[:, 1:] * self.own(inputs))


def gated_pair(shared: nn.Module, local: nn.Module, *, inputs: int, seed: int) -> GatedPair:
    """Two nets of one architecture, the first without its head, with a linear gate on the flattened sample.

    Raises:
        RecipeError: nets that are a single layer: there are no features to share.
    """
    (shared, _), (local, head) = split(shared), split(local)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(derive("gate", seed))
        gate = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 2))
    return GatedPair(shared, local, head, gate)


def split(net: nn.Module) -> tuple[nn.Sequential, nn.Module]:
    """A net's feature extractor, and its head: the last of its layers."""
    parts = list(net.named_children())
    if parts and not isinstance(net, nn.Sequential):
        kind = type(net).__name__
        raise RecipeError(f"method pfedmoe: net {kind} does not say which layer is its last; allowed: an nn.Sequential")
    if not isinstance(net, nn.Sequential) or len(parts) < 2:
        raise RecipeError("method pfedmoe: net 'linear' is one layer, without features to share; allowed: deeper nets")
    return nn.Sequential(OrderedDict(parts[:-1])), parts[-1][1]


def place(slot: Slot) -> Slot:
    """The slot of a :class:`GatedPair` with its role; running statistics have whose they are as their factor."""
    part = slot.name.partition(".")[0]
    if slot.roles == (STATISTICS,):
        return replace(slot, factor=part)
    return replace(slot, roles=(_PLACES[part],))
