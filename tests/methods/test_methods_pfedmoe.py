"""pFedMoE on nets: against torch's own modules and optimiser, user by user, batch norm included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from linear_task import EVERYONE, RATE, batches, samples_of, unequal
from torch import Tensor, nn

from comingle.models.stacked import GatedPair
from comingle.training.backends.local import InProcess
from comingle.training.kinds.samples import personal_net
from comingle.utils.errors import RecipeError
from federations import exchange, local_round

METHOD = "pfedmoe"
CHANGES = {"training.batch_size": 33, "evaluation.model": "exchanged"}


Parts = tuple[nn.Module, nn.Module, nn.Module, nn.Module]


def pair_of(federation: InProcess, user: int) -> Parts:
    """The user's shared and own extractor, its head and its gate, as modules of their own."""
    net = federation.clients.model.net
    assert isinstance(net, GatedPair)
    own = copy.deepcopy(net)
    own.load_state_dict(
        {n: t[user] for n, t in federation.clients.model.layout.views(federation.clients.state.rows).items()},
        strict=False,
    )
    return own.shared, own.own, own.head, own.gate


def output(parts: Parts, x: Tensor) -> Tensor:
    """Yi et al.: the local head reads the features of both extractors, mixed sample by sample."""
    shared, own, head, gate = parts
    g = gate(x).exp() / gate(x).exp().sum(1, keepdim=True)
    return head(g[:, 0, None] * shared(x) + g[:, 1, None] * own(x))


def by_hand(federation: InProcess, rounds: int, members: list[int]) -> list[Parts]:
    users = [pair_of(federation, k) for k in EVERYONE]
    total = sum(len(federation.clients.trainers[k].train) for k in members)
    for number in range(rounds):
        for k in members:
            parameters = [p for part in users[k] for p in part.requires_grad_().train().parameters()]
            descent, (x, y) = torch.optim.SGD(parameters, lr=RATE), samples_of(federation, k)
            for at in batches(federation, k, number):
                descent.zero_grad()
                (output(users[k], x[at]) - y[at]).square().mean().backward()
                descent.step()
        uploads = {k: {n: t.clone() for n, t in users[k][0].state_dict().items()} for k in members}
        for name, first in uploads[members[0]].items():
            mean = first if name.endswith("tracked") else sum(
                len(federation.clients.trainers[k].train) / total * uploads[k][name] for k in members
            )  # fmt: skip
            for user in users:
                user[0].state_dict()[name].copy_(mean)
    return users


@pytest.mark.parametrize("members", [EVERYONE, [0, 2, 3]], ids=["everybody", "sampled"])
def test_rounds_equal_torch_written_out(federate_nets: Any, members: list[int]) -> None:
    """The shared extractor's running statistics are averaged with it, the own one's stay at home."""
    federation, twin = (unequal(federate_nets(METHOD, changes=CHANGES)) for _ in range(2))
    wanted = by_hand(twin, 2, members)
    for number in range(2):
        local_round(federation, members, number)
        exchange(federation, members)
    for k, scored in zip(EVERYONE, federation.clients.evaluate(), strict=True):
        for found, expected in zip(pair_of(federation, k), wanted[k], strict=True):
            for name, t in expected.state_dict().items():
                if not name.endswith("tracked"):
                    torch.testing.assert_close(found.state_dict()[name], t, rtol=1e-6, atol=1e-8, msg=name)
        x, y = samples_of(federation, k, "test")
        for part in wanted[k]:
            part.eval()
        made = output(wanted[k], x).detach()
        assert scored.mean_loss == pytest.approx((made - y).square().mean().item(), rel=1e-6)
        tensors = {
            n: t[k : k + 1] for n, t in federation.clients.model.layout.views(federation.clients.state.rows).items()
        }
        torch.testing.assert_close(personal_net("ann", federation.clients.model, tensors).predict(x), made)


def test_an_extractor_travels_and_the_gate_is_small(federate_nets: Any) -> None:
    federation, plain = federate_nets(METHOD), federate_nets("fedavg")
    shared, own, head, gate = (sum(p.numel() for p in part.parameters()) for part in pair_of(federation, 0))
    statistics = 2 * 20  # mean and variance of the norm
    sent = federation.clients.upload([0], 1, {}).tensors
    assert sum(t.numel() for t in sent.values()) == shared + statistics
    assert shared == own == plain.clients.trainable_parameters()[0] - head
    assert federation.clients.trainable_parameters()[0] == shared + own + head + gate
    assert gate == 2 * (10 + 1) < shared


def test_heads_and_own_extractors_stay_with_their_users(federate_nets: Any) -> None:
    federation = federate_nets(METHOD)
    local_round(federation, EVERYONE, 0)
    exchange(federation, EVERYONE)
    first, second = pair_of(federation, 0), pair_of(federation, 1)
    for common, one, other in zip((True, False, False, False), first, second, strict=True):
        for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b) == common, name


def test_the_two_extractors_start_differently(federate_nets: Any) -> None:
    shared, own, *_ = pair_of(federate_nets(METHOD), 0)
    assert not torch.equal(shared[0].weight, own[0].weight)


def test_a_net_of_one_layer_has_no_features_to_share(federate_nets: Any) -> None:
    with pytest.raises(RecipeError, match="method pfedmoe: net 'linear'") as error:
        federate_nets(METHOD, changes={"data.task.name": "linear", "training.batch_size": 3})
    assert "\n" not in str(error.value)
