"""The linear task user by user, for algorithms written out in tests: samples, batches, steps of plain descent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comingle.engines.samples import SampleFeed
from comingle.engines.simulation import Simulation

RATE = 0.05
LINEAR = {"data.task.name": "linear", "training.batch_size": 3, "evaluation.model": "exchanged"}
EVERYONE = [0, 1, 2, 3]
Own = dict[str, Tensor]


def unequal(sim: Simulation) -> Simulation:
    """User 2 has fewer samples than the others, so that means are weighted."""
    few = sim.trainers[2]
    sim.trainers[2] = replace(few, train=few.train.first(4))
    sim.feed = SampleFeed(sim.trainers, sim.training, sim.batch_size, device=sim.model.device, dtype=sim.model.dtype)
    return sim


def samples_of(sim: Simulation, user: int, split: str = "train") -> tuple[Tensor, Tensor]:
    part: Any = getattr(sim.trainers[user], split)
    return part.inputs.double(), part.targets.double()


def outputs(own: Own, inputs: Tensor) -> Tensor:
    return inputs @ own["weight"].T + own["bias"]


def sample_losses(own: Own, inputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs(own, inputs) - targets).square().mean(1)


def batches(sim: Simulation, user: int, number: int) -> list[Tensor]:
    """Numbers of samples, step by step."""
    phase = sim.phases[0]
    drawn = [sim.feed.draw([user], phase, number, step, 0)[0] for step in range(sim.feed.steps(user))]
    return [at[at >= 0] for at in drawn]


def descend(own: Own, loss: Any) -> Own:
    """One step down a function of the tensors."""
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return {name: own[name] - RATE * g for name, g in zip(leaves, gradients, strict=True)}
