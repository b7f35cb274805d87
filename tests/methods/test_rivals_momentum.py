"""Momentum clustering against a loop over users, centres and numbers that knows of the engine its batches alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import EVERYONE, RATE, ByHand, Own, played, same
from torch import Tensor

from comingle.data.samples.samples import UserSamples
from comingle.methods.momentum_clustering import CENTRES, OWN, TOTAL_MOVES, Centres, threshold_step
from comingle.utils.seeds import generator
from federations import replace_user

ROUNDS = [EVERYONE, [0, 2, 3], EVERYONE]
DECAY, SERVER_RATE, QUANTILE, ITERATIONS, CLUSTERS = 0.6, 0.7, 0.5, 3, 2


def apart(one: Own, other: Own) -> float:
    return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5


def quantile(values: list[float], part: float) -> float:
    """Between the two order statistics around ``part``."""
    ordered, at = sorted(values), part * (len(values) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def clustered(centres: list[Own], points: list[Own], shares: list[float]) -> list[Own]:
    """Threshold clustering, number by number."""
    for _ in range(ITERATIONS):
        moved = []
        for centre in centres:
            far = [apart(point, centre) for point in points]
            radius = quantile(far, QUANTILE)
            taken = [point if d <= radius else centre for point, d in zip(points, far, strict=True)]
            moved.append({n: sum(p * one[n] for p, one in zip(shares, taken, strict=True)) for n in centre})
        centres = moved
    return centres


def test_rounds_equal_the_algorithm_written_out(federate_nets: Any) -> None:
    settings = {"momentum": DECAY, "quantile": QUANTILE, "iterations": ITERATIONS, "server_rate": SERVER_RATE}
    federation = federate_nets({"name": "momentum-clustering", "clusters": CLUSTERS, **settings})
    few = federation.clients.trainers[2]
    replace_user(federation.clients, 2, UserSamples(**{**vars(few), "train": few.train.first(43)}))
    hand = ByHand(federation)
    owns, momenta, centres = hand.rows(), {}, []
    for number, members in enumerate(ROUNDS):
        for user in members:
            own = {name: t.clone() for name, t in owns[user].items()}
            for step in range(hand.steps(user)):
                gradient = hand.gradient(own, user, number, step)
                own |= {name: own[name] - RATE * gradient[name] for name in hand.trained}
            change = {name: owns[user][name] - own[name] for name in own}
            had = momenta.get(user, change)
            momenta[user] = {name: DECAY * had[name] + (1 - DECAY) * change[name] for name in change}
        points = [momenta[user] for user in members]
        if not centres:
            draws = [float(torch.rand(1, generator=generator(0, n, "momentum"))) for n in federation.clients.names]
            first = sorted(members, key=lambda user: draws[user])
            centres = [momenta[user] for user in first[:CLUSTERS]]
        amounts = [hand.amounts[user] for user in members]
        centres = clustered(centres, points, [n / sum(amounts) for n in amounts])
        for user in members:
            own_centre = min(centres, key=lambda centre: apart(momenta[user], centre))
            owns[user] = {name: t - SERVER_RATE * own_centre[name] for name, t in owns[user].items()}
    same(played(federation, ROUNDS), owns)


def test_two_groups_are_found_and_who_is_too_far_away_moves_nothing() -> None:
    groups = torch.tensor([[5.0, 0.0], [5.2, 0.0], [4.8, 0.0], [-5.0, 1.0], [-5.0, 0.8], [-5.0, 1.2]]).double()
    points = torch.cat([groups, torch.tensor([[1e6, 1e6]]).double()])
    centres, weights = points[[1, 4]], torch.full((7,), 1 / 7).double()
    for _ in range(40):
        centres = threshold_step(centres, points, weights, 0.35)
    torch.testing.assert_close(centres, torch.tensor([[5.0, 0.0], [-5.0, 1.0]]).double(), atol=1e-5, rtol=0)


def test_one_cluster_without_a_threshold_and_momentum_is_federated_averaging(federate_nets: Any) -> None:
    settings = {"clusters": 1, "momentum": 0.0, "iterations": 1, "quantile": 1}
    found = played(federate_nets({"name": "momentum-clustering", **settings}), [EVERYONE] * 2)
    same(found, played(federate_nets("fedavg"), [EVERYONE] * 2))


def test_who_joins_takes_what_its_cluster_has_moved_by(federate_nets: Any) -> None:
    federation = federate_nets({"name": "momentum-clustering", "clusters": 2, "quantile": 0.5})
    played(federation, [EVERYONE])
    server: Any = federation.server
    kept = {name: t.clone() for name, t in server.kept.items()}
    settled = server.method.server.settled()
    assert isinstance(settled, Centres)
    first = torch.cat([t.flatten() for n, t in kept.items() if n.startswith("model.")])
    kept[OWN][1] = first
    for cluster in (0, 1):
        kept[OWN][1] = first
        settled.aggregate(kept, received(sent_by_who_moves(kept, kept[CENTRES][cluster])))
        torch.testing.assert_close(kept[OWN][1], first + kept[TOTAL_MOVES][cluster])
    torch.testing.assert_close(kept[CENTRES], server.kept[CENTRES])


def sent_by_who_moves(kept: Own, momentum: Tensor) -> Own:
    """An upload ``x - m`` of a user who has the model that all began with."""
    begun = {name.removeprefix("model."): t for name, t in kept.items() if name.startswith("model.")}
    parts = momentum.split([t.numel() for t in begun.values()])
    return {n: (t - part.view_as(t)).unsqueeze(0) for (n, t), part in zip(begun.items(), parts, strict=True)}


def received(sent: Own) -> Any:
    from comingle.methods.server import Received

    one = torch.ones(1)
    return Received(users=[1], tensors=sent, weights=one, ranks=torch.tensor([1]), scales=one)


@pytest.mark.parametrize("absent", [False, True])
def test_fewer_users_than_clusters_are_clusters_of_one_user_each(federate_nets: Any, absent: bool) -> None:
    federation = federate_nets({"name": "momentum-clustering", "clusters": 6, "quantile": 0.0})
    members = [1] if absent else EVERYONE
    found = played(federation, [members])
    alone = played(federate_nets("local"), [members])
    same(found, alone)


def test_settings_reach_the_server() -> None:
    from comingle.methods import make

    wanted = {"clusters": 3, "quantile": 0.25, "iterations": 4}
    server = make("momentum-clustering", **wanted, server_rate=0.5).server
    assert server == Centres(**wanted, rate=0.5)
