"""Users of different ranks in one federation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comingle.utils.errors import RecipeError
from federations import local_round, message_bytes

RANKS = [1, 2, 4]
NAMES = ("ann", "bob", "cem")


@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "hetlora"])
def test_a_user_among_others_of_more_rank_trains_as_alone(federate: Any, method: str) -> None:
    settings = {"name": "comigs-1g1s", "router_every": 2, "router_steps": 1} if method == "comigs-1g1s" else method
    together = federate(settings, changes={"adapters.rank": RANKS})
    start = together.clients.model.layout.views(together.clients.state.rows.clone())
    local_round(together, [0, 1, 2], 0)
    found = together.clients.model.layout.views(together.clients.state.rows)
    for user, (name, rank) in enumerate(zip(NAMES, RANKS, strict=True)):
        alone = federate(settings, users=(name,), changes={"adapters.rank": rank})
        for key, t in alone.clients.model.layout.views(alone.clients.state.rows).items():
            t.copy_(cut(start[key][user], key, rank))
        local_round(alone, [0], 0)
        for key, t in alone.clients.model.layout.views(alone.clients.state.rows).items():
            torch.testing.assert_close(t[0], cut(found[key][user], key, rank), rtol=1e-9, atol=1e-12)


def cut(t: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    return t if name.endswith(".router") else t[..., :rank, :]


def test_scales_are_each_users_own_and_padding_counts_nowhere(federate: Any) -> None:
    federation = federate("fedavg", changes={"adapters.rank": RANKS})
    assert federation.clients.model.adapters.scales.tolist() == pytest.approx([16 / math.sqrt(rank) for rank in RANKS])
    one, two, four = federation.clients.trainable_parameters()
    assert (two, four) == (2 * one, 4 * one)
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    for user, rank in enumerate(RANKS):
        own = {name: t[user, ..., :rank, :] for name, t in views.items()}
        assert sum(t.numel() for t in own.values()) == (one, two, four)[user]
        header = {"kind": "upload", "round": 1, "user": NAMES[user], "rank": rank}
        assert federation.clients.upload_bytes()[user] == message_bytes(own, header, {"loss": torch.tensor(0.0)})
    assert not federation.clients.state.rows[~federation.clients.mask].any()


def test_as_many_ranks_as_users(federate: Any) -> None:
    with pytest.raises(RecipeError, match=r"adapters\.rank: 2 .* 3 users"):
        federate("fedavg", changes={"adapters.rank": [1, 2]})


def test_the_pooled_trainer_has_the_largest_rank(federate: Any) -> None:
    assert federate("centralized", changes={"adapters.rank": RANKS}).clients.model.adapters.ranks.tolist() == [4]
