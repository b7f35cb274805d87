"""FFA-LoRA and FedSA-LoRA: which factor moves, which travels."""

from __future__ import annotations

from typing import Any

import torch

from federations import exchange, local_round, message_bytes


def factor(federation: Any, which: str) -> torch.Tensor:
    tensors = federation.clients.model.layout.views(federation.clients.state.rows)
    return torch.cat([t.flatten(1) for name, t in tensors.items() if name.endswith(f".{which}")], 1)


def test_ffa_has_one_a_for_all_that_never_moves(federate: Any) -> None:
    federation = federate("ffa-lora")
    start = factor(federation, "a").clone()
    assert (start == start[0]).all()
    assert start.any()
    for number in range(2):
        local_round(federation, [0, 1, 2], number)
        exchange(federation, [0, 1, 2])
    assert torch.equal(factor(federation, "a"), start)
    assert factor(federation, "b").any()


def test_ffa_averages_changes_exactly(federate: Any) -> None:
    """With one A for all, the mean of B times A is the mean of the users' products (the point of FFA-LoRA)."""
    federation = federate("ffa-lora")
    local_round(federation, [0, 1, 2], 0)

    def change(name: str = "layers.0.mlp.up") -> torch.Tensor:
        views = federation.clients.model.layout.views(federation.clients.state.rows)
        return views[f"{name}.b"].mT @ views[f"{name}.a"]

    expected = change().mean(0)
    exchange(federation, [0, 1, 2])
    torch.testing.assert_close(change()[1], expected, rtol=1e-10, atol=1e-14)


def test_fedsa_shares_a_and_keeps_b(federate: Any) -> None:
    federation = federate("fedsa-lora")
    local_round(federation, [0, 1, 2], 0)
    a, b = factor(federation, "a").clone(), factor(federation, "b").clone()
    exchange(federation, [0, 1, 2])
    torch.testing.assert_close(factor(federation, "a"), a.mean(0).expand_as(a), rtol=1e-12, atol=1e-15)
    assert torch.equal(factor(federation, "b"), b)


def test_what_travels_is_the_one_factor(federate: Any) -> None:
    fedavg, ffa, fedsa = federate("fedavg"), federate("ffa-lora"), federate("fedsa-lora")
    sent = [set(federation.clients.upload([0], 1, {}).tensors) for federation in (fedavg, ffa, fedsa)]
    assert sent[0] == sent[1] | sent[2]
    assert [{name[-2:] for name in names} for names in sent[1:]] == [{".b"}, {".a"}]
    for federation, names in zip((fedavg, ffa, fedsa), sent, strict=True):
        views = federation.clients.model.layout.views(federation.clients.state.rows)
        header = {"kind": "upload", "round": 1, "user": "ann", "rank": 2}
        said = {"loss": torch.tensor(0.0)}
        wanted = message_bytes({name: views[name][0] for name in names}, header, said)
        assert federation.clients.upload_bytes()[0] == wanted
    assert ffa.clients.trainable_parameters()[0] == sum(
        t[0].numel() for t in ffa.clients.upload([0], 1, {}).tensors.values()
    )
    assert fedsa.clients.trainable_parameters() == fedavg.clients.trainable_parameters()
