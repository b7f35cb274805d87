"""Routers that are trained together with the experts: one gradient, and the schedule that each of the two has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from federations import local_round

EVERYONE = [0, 1, 2]
STEPS = 4
RATE = 0.01


@pytest.mark.parametrize("name", ["local-moe", "fedavg-moe", "pfedmoe"])
def test_experts_follow_a_cosine_and_routers_a_constant_rate(federate: Any, name: str) -> None:
    """CoMiGS App. B.1: "constant" for "routing parameters", "one-cycle cosine" for "expert parameters".

    A naive loop over one backward pass a step and torch's AdamW with a group for each.
    """
    rates = {"training.experts.learning_rate": RATE, "training.router.learning_rate": RATE}
    federation = federate(name, changes={"training.local_steps": STEPS, "training.rounds": 1, **rates})
    tensors = {
        n: t.clone().requires_grad_()
        for n, t in federation.clients.model.layout.views(federation.clients.state.rows).items()
    }
    routers = [n for n in tensors if n.endswith(".router")]
    parts = [[n for n in tensors if n not in routers], routers]
    groups = [{"params": [tensors[n] for n in names]} for names in parts]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        batch = federation.clients.batch_source.draw(EVERYONE, federation.clients.phases[0], 0, step, 0)
        losses, penalty = federation.clients.model.losses(tensors, EVERYONE, batch)
        optimizer.zero_grad()
        (losses.mean((1, 2)) + federation.clients.plan.training.balance_weight * penalty).sum().backward()
        optimizer.step()
    assert routers
    local_round(federation, EVERYONE, 0)
    for n, tensor in federation.clients.model.layout.views(federation.clients.state.rows).items():
        torch.testing.assert_close(tensor, tensors[n].detach(), rtol=1e-9, atol=1e-12, msg=n)
    assert federation.clients.state.router_steps.tolist() == [STEPS] * 3
