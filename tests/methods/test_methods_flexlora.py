"""FlexLoRA against the dense computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from receiving import downloaded, received

from comingle.methods.heterogeneous_ranks import Redistribute, mean_factors
from comingle.methods.server import ServerSetup
from federations import exchange, local_round

EVERYONE = [0, 1, 2]


def random_factors(ranks: list[int], experts: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(len(ranks), *experts, max(ranks), 9, dtype=torch.float64, generator=draw)
    b = torch.randn(len(ranks), *experts, max(ranks), 7, dtype=torch.float64, generator=draw)
    for user, rank in enumerate(ranks):
        a[user, ..., rank:, :] = 0
        b[user, ..., rank:, :] = 0
    return a, b


@pytest.mark.parametrize("experts", [(), (2,)], ids=["attention", "experts"])
@pytest.mark.parametrize("ranks", [[1, 2, 3], [2, 2, 2], [4, 1, 4]])
def test_everybody_gets_the_truncated_singular_values_of_the_dense_mean(
    ranks: list[int], experts: tuple[int, ...]
) -> None:
    a, b = random_factors(ranks, experts)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    scales = 16 / torch.tensor(ranks, dtype=torch.float64).sqrt()
    dense = sum(weights[u] * scales[u] * a[u].mT @ b[u] for u in EVERYONE)
    left, singular, right = torch.linalg.svd(dense, full_matrices=False)
    server, first = Redistribute(), {"x.a": a, "x.b": b}
    setup = ServerSetup(models=first, users=["ann", "bob", "cem"], scales=scales, seed=0)
    kept = server.start(setup)
    server.aggregate(kept, received(first, weights.tolist(), scales=scales))
    for user, rank in enumerate(ranks):
        own = downloaded(server, kept, user)
        new_a, new_b = own["x.a"], own["x.b"]
        wanted = left[..., :rank] * singular[..., None, :rank] @ right[..., :rank, :]
        got = scales[user] * new_a[..., :rank, :].mT @ new_b[..., :rank, :]
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


def test_more_rank_than_there_is_stays_zero() -> None:
    a, b = random_factors([1, 1])
    a, b = (torch.nn.functional.pad(t, (0, 0, 0, 5)) for t in (a, b))  # room for 6, of 2 in all
    new_a, new_b = mean_factors(a, b, torch.tensor([0.5, 0.5]), torch.ones(2))
    dense = 0.5 * sum(a[u].mT @ b[u] for u in range(2))
    torch.testing.assert_close(new_a.mT @ new_b, dense, rtol=1e-9, atol=1e-11)


def test_one_user_keeps_its_function(federate: Any) -> None:
    federation = federate("flexlora", users=("ann",))
    local_round(federation, [0], 0)
    before = federation.clients.evaluate()[0].loss_nats
    rows = federation.clients.state.rows.clone()
    exchange(federation, [0])
    assert not torch.equal(rows, federation.clients.state.rows)
    assert federation.clients.evaluate()[0].loss_nats == pytest.approx(before, rel=1e-10)


def test_users_of_unequal_rank_in_a_federation(federate: Any) -> None:
    federation = federate("flexlora", changes={"adapters.rank": [1, 2, 4]})
    local_round(federation, EVERYONE, 0)
    views = {
        name: t.clone() for name, t in federation.clients.model.layout.views(federation.clients.state.rows).items()
    }
    scales = federation.clients.model.adapters.scales
    exchange(federation, EVERYONE)
    assert not federation.clients.state.rows[~federation.clients.mask].any()
    new = federation.clients.model.layout.views(federation.clients.state.rows)
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down"):
        dense = sum(scales[u] * views[f"{name}.a"][u].mT @ views[f"{name}.b"][u] for u in EVERYONE) / 3
        left, singular, right = torch.linalg.svd(dense, full_matrices=False)
        for user, rank in enumerate((1, 2, 4)):
            wanted = left[..., :rank] * singular[..., None, :rank] @ right[..., :rank, :]
            got = scales[user] * new[f"{name}.a"][user].mT @ new[f"{name}.b"][user]
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)
