"""Who sits a round out is not there: whatever their tensors hold reaches neither the server nor anybody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comingle.engines.simulation import Simulation
from torch import Tensor

from comingle.methods.base import ROUTERS

ABSENT = 1


def exchanged(sim: Simulation, poison: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Everybody's tensors and the server's after a round without one user; nobody may have looked at hers."""
    users = len(sim.trainers)
    members = [user for user in range(users) if user != ABSENT]
    sim.local_round(members, 0)
    if poison:
        for copy in range(sim.method.copies):
            for kept in (sim.state.rows, sim.state.first, sim.state.second):
                kept[copy * users + ABSENT] = torch.nan
    sim.exchange(members)
    return sim.state.rows, sim.state.server


def check(clean: Simulation, poisoned: Simulation) -> None:
    (wanted, kept), (found, server) = exchanged(clean, False), exchanged(poisoned, True)
    users, layout = len(clean.trainers), clean.model.layout
    hers = torch.tensor([row % users == ABSENT for row in range(len(wanted))])
    assert torch.equal(found[~hers], wanted[~hers])
    assert kept.keys() == server.keys()
    assert all(torch.equal(server[name], t) for name, t in kept.items())
    downloaded = layout.mask(clean.method.shared)
    if clean.method.peers or not downloaded.any():  # she downloads when she is there
        assert found[ABSENT].isnan().all()
        return
    assert torch.equal(found[ABSENT, downloaded], wanted[ABSENT, downloaded])
    own = found[ABSENT].isnan() | (wanted[ABSENT] == 0)
    if clean.method.reroute:  # a router is set anew, by what its owner downloads
        own |= layout.mask(ROUTERS) & (found[ABSENT] == wanted[ABSENT])
    assert bool(own[~downloaded].all())


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
