"""Who sits a round out is not there: whatever their tensors hold reaches neither the server nor anybody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.transports.inprocess import InProcess
from federations import exchange, local_round

ABSENT = 1


def exchanged(federation: InProcess, poison: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Everybody's tensors and the server's after a round without one user; nobody may have looked at hers."""
    users = len(federation.clients.trainers)
    members = [user for user in range(users) if user != ABSENT]
    local_round(federation, members, 0)
    if poison:
        for copy in range(federation.clients.method.placement.copies):
            for kept in (
                federation.clients.state.rows,
                federation.clients.state.first,
                federation.clients.state.second,
            ):
                kept[copy * users + ABSENT] = torch.nan
    exchange(federation, members)
    return federation.clients.state.rows, federation.server.kept


def check(clean: InProcess, poisoned: InProcess) -> None:
    (wanted, kept), (found, server) = exchanged(clean, False), exchanged(poisoned, True)
    users, layout = len(clean.clients.trainers), clean.clients.model.layout
    hers = torch.tensor([row % users == ABSENT for row in range(len(wanted))])
    assert torch.equal(found[~hers], wanted[~hers])
    assert kept.keys() == server.keys()
    assert all(torch.equal(server[name], t) for name, t in kept.items())
    downloaded = layout.mask(clean.clients.method.shared)
    if clean.clients.method.server.peer_to_peer or not downloaded.any():  # she downloads when she is there
        assert found[ABSENT].isnan().all()
        return
    assert torch.equal(found[ABSENT, downloaded], wanted[ABSENT, downloaded])
    assert bool((found[ABSENT, ~downloaded].isnan() | (wanted[ABSENT, ~downloaded] == 0)).all())


def test_the_absent_reach_nobody(federate: Any, federated: dict[str, Any]) -> None:
    check(federate(federated), federate(federated))


def test_the_absent_reach_nobody_on_nets(federate_nets: Any, netted: dict[str, Any]) -> None:
    check(federate_nets(netted), federate_nets(netted))


@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_the_absent_of_another_rank_reach_nobody(federate: Any, name: str) -> None:
    ranks = {"adapters.rank": [2, 3, 1]}
    clean, poisoned = federate(name, changes=ranks), federate(name, changes=ranks)
    (wanted, _), (found, _) = exchanged(clean, False), exchanged(poisoned, True)
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
