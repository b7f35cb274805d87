"""A method's server is what it says that it is: a sum over users, and maybe one that bounds what a user can change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.methods.base import Client, Method, Placement
from comingle.methods.mixtures import mixtures_by_tensor
from comingle.methods.server import Received, Server
from comingle.training.backends.local import InProcess
from comingle.utils.trees import Tree
from federations import local_round

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
LOSS = 0.5


def some(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kept_after(server: Server, kept: Tree, received: Received) -> Tree:
    """What the server keeps after these uploads, from what it kept before."""
    after = {name: t.clone() for name, t in kept.items()}
    server.aggregate(after, received)
    return after


def received_of(federation: InProcess, seed: int = 0) -> Received:
    """Random uploads of all users as the server would see them, of unequal weights."""
    clients, server = federation.clients, federation.server
    everyone = list(range(len(clients.trainers)))
    local_round(federation, everyone, 0)
    sent = clients.upload(everyone, 1, {"loss": torch.full((len(everyone),), LOSS)})
    weights = torch.arange(1.0, len(everyone) + 1, dtype=torch.float64)
    return Received(
        users=everyone,
        tensors={name: t + 0.1 * some(t.shape, seed + i) for i, (name, t) in enumerate(sent.tensors.items())},
        weights=weights / weights.sum(),
        ranks=sent.ranks,
        scales=server.scales,
        reports={name: t * 0 if name == "choice" else t for name, t in sent.reports.items()},
        clustered=server.clustered,
        centred=server.centred,
    )


def permuted(received: Received, order: Sequence[int]) -> Received:
    at = list(order)
    return replace(
        received,
        users=[received.users[i] for i in at],
        tensors={name: t[at] for name, t in received.tensors.items()},
        weights=received.weights[at],
        ranks=received.ranks[at],
        scales=received.scales[at],
        reports={name: t[at] for name, t in received.reports.items()},
    )


def check_sum(federation: InProcess) -> None:
    server, kept = federation.server.method.server, federation.server.kept
    if server.kind != "sum" or not federation.clients.shares:
        return
    received = received_of(federation)
    wanted = kept_after(server, kept, received)
    assert any(not torch.equal(wanted[name], t) for name, t in kept.items())
    order = list(reversed(range(len(received.weights))))
    same(kept_after(server, kept, permuted(received, order)), wanted)
    same(kept_after(server, kept, exchanged(server, received)), wanted)


def exchanged(server: Server, received: Received) -> Received:
    """Other uploads of two users who choose alike, with the same sum of each component.

    User 0 gets d more and user 2 as much less as their weights in the sum of that component say.
    """
    tensors = {name: t.clone() for name, t in received.tensors.items()}
    one, two = 0, 2  # who are in one cluster where clusters are given
    for i, (name, t) in enumerate(tensors.items()):
        shares = received.weights.unsqueeze(1)
        if name in received.clustered and "mixture" in received.reports:
            shares = shares * mixtures_by_tensor(received.reports["mixture"], received.clustered)[name].double()
        ratio = (shares[one] / shares[two]).view(-1, *[1] * (t.dim() - 2)) if t.dim() > 1 else shares[one] / shares[two]
        ratio = ratio.nan_to_num()  # of a component that neither has
        change = some(t.shape[1:], 100 + i)
        t[one] += change
        t[two] -= (ratio * change).view(change.shape)
    assert not all(torch.equal(tensors[name], t) for name, t in received.tensors.items())
    return replace(received, tensors=tensors)


def same(found: Tree, wanted: Tree) -> None:
    assert found.keys() == wanted.keys()
    for name, t in wanted.items():
        torch.testing.assert_close(found[name], t, **CLOSE, msg=name)


@pytest.mark.sampled(15)
def test_a_sum_depends_on_weighted_sums_alone(federate: Any, federated: dict[str, Any]) -> None:
    check_sum(federate(federated))


@pytest.mark.sampled(9)
def test_a_sum_of_nets_depends_on_weighted_sums_alone(federate_nets: Any, netted: dict[str, Any]) -> None:
    check_sum(federate_nets(netted))


def check_bound(federation: InProcess) -> None:
    """A constant added to one user's upload moves the model by rate times the user's weight times that constant."""
    server, kept = federation.server.method.server, federation.server.kept
    if not server.clipped_mean:
        return
    assert server.kind == "sum"
    received = received_of(federation)
    everyone, rate = list(received.users), first_rate(federation)
    before = server.download(kept_after(server, kept, received), everyone)
    for user, weight in enumerate(received.weights.tolist()):
        for size in (1.0, 1e6):  # however large it is, its weight stays what it was
            tensors = {name: t.clone() for name, t in received.tensors.items()}
            for t in tensors.values():
                t[user] += size
            moved = server.download(kept_after(server, kept, replace(received, tensors=tensors)), everyone)
            for name, t in moved.items():
                expected = torch.full_like(t, rate * weight * size)
                torch.testing.assert_close(t - before[name], expected, rtol=1e-7, atol=1e-8, msg=name)


def first_rate(federation: InProcess) -> float:
    """By how much of the mean a server moves in its first round: FDLoRA's v = g, theta -= rate (1 + momentum) g."""
    server = federation.server.method.server
    return float(getattr(server, "rate", 1.0) * (1 + getattr(server, "momentum", 0.0)))


@pytest.mark.sampled(15)
def test_a_mean_has_weights_that_no_upload_decides_on(federate: Any, federated: dict[str, Any]) -> None:
    check_bound(federate(federated))


def test_a_mean_of_nets_has_weights_that_no_upload_decides_on(federate_nets: Any, netted: dict[str, Any]) -> None:
    check_bound(federate_nets(netted))


@pytest.mark.parametrize("name", ["fedavg", "comigs-1g1s", "fdlora", "fedit", "fedavg+"])
def test_methods_with_one_mean_say_so(federate: Any, name: str) -> None:
    server = federate(name).server.method.server
    assert (server.kind, server.clipped_mean) == ("sum", True)


@pytest.mark.parametrize("name", ["hetlora", "flexlora", "pcl", "fedmerge"])
def test_methods_that_look_at_each_upload_say_so(federate: Any, name: str) -> None:
    server = federate(name).server.method.server
    assert (server.kind, server.clipped_mean) == ("stack", False)


def test_a_method_shares_something_if_its_server_does_something(federate: Any, method: dict[str, Any]) -> None:
    made = federate(method).server.method
    assert (made.server.kind == "none") == (not made.shared)


# ---------------------------------------------------------------- what a method is made of


def test_a_method_has_few_fields() -> None:
    assert len(fields(Method)) <= 10
    assert {"name", "placement", "client", "server"} <= {field.name for field in fields(Method)}


@pytest.mark.parametrize("half", [Method, Placement, Client, Server])
def test_what_a_method_is_made_of_is_documented(half: type) -> None:
    assert half.__doc__
    assert len(half.__doc__.split()) > 10
