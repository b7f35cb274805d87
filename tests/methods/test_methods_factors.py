"""FFA-LoRA and FedSA-LoRA: which factor moves, which travels."""

from __future__ import annotations

from typing import Any

import torch


def factor(sim: Any, which: str) -> torch.Tensor:
    tensors = sim.model.layout.views(sim.state.rows)
    return torch.cat([t.flatten(1) for name, t in tensors.items() if name.endswith(f".{which}")], 1)


def test_ffa_has_one_a_for_all_that_never_moves(federate: Any) -> None:
    sim = federate("ffa-lora")
    start = factor(sim, "a").clone()
    assert (start == start[0]).all()
    assert start.any()
    for number in range(2):
        sim.local_round([0, 1, 2], number)
        sim.exchange([0, 1, 2])
    assert torch.equal(factor(sim, "a"), start)
    assert factor(sim, "b").any()


def test_ffa_averages_changes_exactly(federate: Any) -> None:
    """With one A for all, the mean of B times A is the mean of the users' products (the point of FFA-LoRA)."""
    sim = federate("ffa-lora")
    sim.local_round([0, 1, 2], 0)

    def change(name: str = "layers.0.mlp.up") -> torch.Tensor:
        views = sim.model.layout.views(sim.state.rows)
        return views[f"{name}.b"].mT @ views[f"{name}.a"]

    expected = change().mean(0)
    sim.exchange([0, 1, 2])
    torch.testing.assert_close(change()[1], expected, rtol=1e-10, atol=1e-14)


def test_fedsa_shares_a_and_keeps_b(federate: Any) -> None:
    sim = federate("fedsa-lora")
    sim.local_round([0, 1, 2], 0)
    a, b = factor(sim, "a").clone(), factor(sim, "b").clone()
    sim.exchange([0, 1, 2])
    torch.testing.assert_close(factor(sim, "a"), a.mean(0).expand_as(a), rtol=1e-12, atol=1e-15)
    assert torch.equal(factor(sim, "b"), b)


def test_what_travels_is_the_one_factor(federate: Any) -> None:
    fedavg, ffa, fedsa = federate("fedavg"), federate("ffa-lora"), federate("fedsa-lora")
    assert ffa.upload_bytes()[0] + fedsa.upload_bytes()[0] == fedavg.upload_bytes()[0]
    assert ffa.trainable_parameters()[0] * 4 == ffa.upload_bytes()[0]
    assert fedsa.trainable_parameters() == fedavg.trainable_parameters()
