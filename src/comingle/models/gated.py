"""Two nets of one user and a gate that mixes their outputs sample by sample: pFedMoE where nets are trained whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.adapters.inject import GENERALIST, ROUTER, SPECIALIST
from comingle.data.seeds import derive
from comingle.trees import STATISTICS, Slot

HIDDEN = 64
"""Width of the gate."""

_PLACES = {"shared": GENERALIST, "own": SPECIALIST, "gate": ROUTER}


class GatedPair(nn.Module):
    """``g_0(x) shared(x) + g_1(x) own(x)``, where g is the softmax of the gate's two outputs."""

    def __init__(self, shared: nn.Module, own: nn.Module, gate: nn.Module):
        super().__init__()
        self.shared, self.own, self.gate = shared, own, gate

    def forward(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch outputs"]:
        """The mixed outputs."""
        gates = self.gate(inputs).softmax(-1)
        return gates[:, :1] * self.shared(inputs) + gates[:, 1:] * self.own(inputs)


def gated_pair(shared: nn.Module, own: nn.Module, *, inputs: int, seed: int) -> GatedPair:
    """The nets with a gate of two linear layers on the flattened sample, drawn from the seed."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(derive("gate", seed))
        layers = [nn.Flatten(), nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2)]
    return GatedPair(shared, own, nn.Sequential(*layers))


def place(slot: Slot) -> Slot:
    """The slot of a :class:`GatedPair` with its role; running statistics have whose they are as their factor."""
    part = slot.name.partition(".")[0]
    if slot.roles == (STATISTICS,):
        return replace(slot, factor=part)
    return replace(slot, roles=(_PLACES[part],))
