"""The linear task user by user, for algorithms written out in tests: samples, batches, steps of plain descent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comingle.training.backends.local import InProcess
from federations import replace_user

RATE = 0.05
LINEAR = {"data.task.name": "linear", "training.batch_size": 3, "evaluation.model": "exchanged"}
EVERYONE = [0, 1, 2, 3]
Own = dict[str, Tensor]


def unequal(federation: InProcess) -> InProcess:
    """User 2 has fewer samples than the others, so that means are weighted."""
    few = federation.clients.trainers[2]
    replace_user(federation.clients, 2, replace(few, train=few.train.first(4)))
    return federation


def samples_of(federation: InProcess, user: int, split: str = "train") -> tuple[Tensor, Tensor]:
    part: Any = getattr(federation.clients.trainers[user], split)
    return part.inputs.double(), part.targets.double()


def outputs(own: Own, inputs: Tensor) -> Tensor:
    return inputs @ own["weight"].T + own["bias"]


def sample_losses(own: Own, inputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs(own, inputs) - targets).square().mean(1)


def batches(federation: InProcess, user: int, number: int) -> list[Tensor]:
    """Numbers of samples, step by step."""
    phase = federation.clients.phases[0]
    drawn = [
        federation.clients.batch_source.draw([user], phase, number, step, 0)[0]
        for step in range(federation.clients.batch_source.steps(user))
    ]
    return [at[at >= 0] for at in drawn]


def descend(own: Own, loss: Any) -> Own:
    """One step down a function of the tensors."""
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return {name: own[name] - RATE * g for name, g in zip(leaves, gradients, strict=True)}
