"""Batch norm in a federation (FLoRAL App. F.2): the base's running statistics are averaged, the adaptors' stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.transports.inprocess import InProcess
from federations import exchange, local_round

EVERYONE = [0, 1, 2, 3]
FLORAL = {"name": "floral", "clusters": 2}
BASE, OWN = "model.1.base.running_", "model.1.running_"


def statistics(federation: InProcess, prefix: str) -> Tensor:
    """Everybody's running mean and variance, side by side."""
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    return torch.cat([views[f"{prefix}mean"], views[f"{prefix}var"]], 1).clone()


@pytest.mark.parametrize("method", [FLORAL, {**FLORAL, "name": "floral-mfl"}, {"name": "local-adaptor"}])
def test_the_exchange_averages_the_base_s_statistics_and_leaves_the_adaptors(federate_nets: Any, method: Any) -> None:
    federation = federate_nets(method)
    local_round(federation, EVERYONE, 0)
    base, own = statistics(federation, BASE), statistics(federation, OWN)
    assert not torch.allclose(base[0], base[1])
    exchange(federation, EVERYONE)
    counts = torch.tensor([len(user.train) for user in federation.clients.trainers], dtype=torch.float64)
    mean = (counts / counts.sum()) @ base
    torch.testing.assert_close(statistics(federation, BASE), mean.expand(4, -1))
    assert torch.equal(statistics(federation, OWN), own)


def test_reparameterised_adaptors_see_how_far_a_user_is_from_the_others(federate_nets: Any) -> None:
    """From the second round on s and m are not 1 and 0, so both forms train and score otherwise."""
    federations = [federate_nets(FLORAL, changes={"floral.batch_nora": nora}) for nora in (False, True)]
    rows, losses = [], []
    for federation in federations:
        for number in range(3):
            local_round(federation, EVERYONE, number)
            exchange(federation, EVERYONE)
        rows.append(federation.clients.state.rows)
        losses.append(torch.tensor([score.mean_loss for score in federation.clients.evaluate()]))
    assert (rows[0] - rows[1]).abs().max() > 1e-6
    assert (losses[0] - losses[1]).abs().max() > 1e-6
