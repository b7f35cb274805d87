"""FedProx, Ditto, FedPer, FedBN and SCAFFOLD against loops written from their papers, on a net with batch norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import EVERYONE, RATE, ByHand, Own, played, same

from comingle.data.samples.samples import UserSamples
from comingle.utils.errors import RecipeError
from federations import replace_user

ROUNDS = [EVERYONE, [0, 2, 3], EVERYONE]


def few(federation: Any) -> Any:
    """User 2 has fewer samples than the others, so that means are weighted and it takes fewer steps."""
    one = federation.clients.trainers[2]
    replace_user(federation.clients, 2, UserSamples(**{**vars(one), "train": one.train.first(43)}))
    return federation


def descended(hand: ByHand, start: Own, user: int, number: int, moved: Callable[[Own, Own], Own]) -> Own:
    """A user's local round from ``start``; ``moved`` is what is descended on, of the gradient and what it has."""
    own = {name: t.clone() for name, t in start.items()}
    for step in range(hand.steps(user)):
        directions = moved(hand.gradient(own, user, number, step), own)
        own |= {name: own[name] - RATE * directions[name] for name in hand.trained}
    return own


def near(weight: float, at: Own) -> Callable[[Own, Own], Own]:
    """The gradient with that of ``weight / 2 |theta - at|^2``."""
    return lambda gradient, own: {n: g + weight * (own[n] - at[n]) for n, g in gradient.items()}


def test_fedprox_is_equation_2(federate_nets: Any) -> None:
    federation = few(federate_nets({"name": "fedprox", "proximal": 0.3}))
    hand = ByHand(federation)
    model = hand.rows()[0]
    for number, members in enumerate(ROUNDS):
        at = model
        model = hand.mean({user: descended(hand, at, user, number, near(0.3, at)) for user in members})
    same(played(federation, ROUNDS), [model] * 4)


def test_ditto_is_algorithm_1(federate_nets: Any) -> None:
    federation = few(federate_nets({"name": "ditto", "nearness": 0.4}))
    hand = ByHand(federation)
    model, personal = hand.rows()[0], hand.rows()[4:]
    for number, members in enumerate(ROUNDS):
        at = model
        for user in members:
            personal[user] = descended(hand, personal[user], user, number, near(0.4, at))
        model = hand.mean({user: descended(hand, at, user, number, lambda g, own: g) for user in members})
    same(played(federation, ROUNDS), [*[model] * 4, *personal])
    assert list(federation.clients.row_of) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("fedper", ["3.weight", "3.bias"]),
        ("fedbn", ["1.weight", "1.bias", "1.running_mean", "1.running_var"]),
    ],
)
def test_what_is_personal_stays_and_the_rest_is_averaged(federate_nets: Any, name: str, local: list[str]) -> None:
    federation = few(federate_nets(name))
    hand = ByHand(federation)
    assert set(local) < set(hand.rows()[0])
    owns = hand.rows()
    for number, members in enumerate(ROUNDS):
        trained = {user: descended(hand, owns[user], user, number, lambda g, own: g) for user in members}
        mean = hand.mean(trained)
        for user in EVERYONE:
            kept = trained.get(user, owns[user])
            owns[user] = {n: kept[n] if n in local else t for n, t in mean.items()}
    same(played(federation, ROUNDS), owns)


def test_scaffold_is_algorithm_1_with_option_ii(federate_nets: Any) -> None:
    federation = few(federate_nets({"name": "scaffold", "server_rate": 0.8}))
    hand = ByHand(federation)
    model = hand.rows()[0]
    zeros = {n: torch.zeros_like(model[n]) for n in hand.trained}
    common, own = dict(zeros), [dict(zeros) for _ in EVERYONE]
    for number, members in enumerate(ROUNDS):
        uploads, changes = {}, []
        for user in members:
            pull = {n: common[n] - own[user][n] for n in zeros}
            y = descended(hand, model, user, number, lambda g, _, pull=pull: {n: g[n] + pull[n] for n in g})
            after = {n: (model[n] - y[n]) / (hand.steps(user) * RATE) - pull[n] for n in zeros}
            changes.append({n: after[n] - own[user][n] for n in zeros})
            uploads[user], own[user] = y, after
        mean = hand.mean(uploads)
        model = {n: model[n] + 0.8 * (t - model[n]) for n, t in mean.items()}
        common = {n: common[n] + sum(change[n] for change in changes) / len(EVERYONE) for n in zeros}
    same(played(federation, ROUNDS), [model] * 4)
    for n, t in common.items():
        torch.testing.assert_close(federation.server.kept[f"control.{n}"], t, rtol=1e-9, atol=1e-11)


def test_the_first_steps_of_scaffold_are_those_of_fedavg(federate: Any) -> None:
    """As c and c_i begin at zero, whatever the optimiser; afterwards they differ."""
    rows = [played(federate(name), [[0, 1, 2]] * n) for n in (1, 2) for name in ("fedavg", "scaffold")]
    same(rows[1], rows[0])
    assert any(not torch.allclose(rows[3][0][n], t, rtol=1e-6) for n, t in rows[2][0].items())


@pytest.mark.parametrize("base", ["text", "mlp"])
def test_fedbn_is_refused_where_it_would_be_fedavg(federate: Any, federate_nets: Any, base: str) -> None:
    with pytest.raises(RecipeError, match=r"method fedbn: .*base\.norm"):
        federate("fedbn") if base == "text" else federate_nets("fedbn", changes={"data.task.name": "mlp"})
