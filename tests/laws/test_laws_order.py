"""Users are who they are called: the order in which a recipe names them changes rounding only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comingle.methods import settings_of
from comingle.training.backends.local import InProcess
from comingle.training.rounds import run_rounds

USERS = ("ann", "bob", "cem")
TURNED = (2, 0, 1)
PARTIAL = {"training.rounds": 3, "training.participation": 0.6, "evaluation.every": 3, "evaluation.first": False}


def losses(federation: InProcess) -> dict[str, float]:
    """Every user's test loss at the end of a run."""
    scores = run_rounds(federation, observe=lambda event: None)
    return {user.name: score.mean_loss for user, score in zip(federation.clients.users, scores, strict=True)}


def turned(method: dict[str, Any]) -> dict[str, Any]:
    """The method with its values for each user in the users' other order."""
    specialists = method.get("specialists")
    return {**method, "specialists": [specialists[i] for i in TURNED]} if isinstance(specialists, list) else method


@pytest.mark.sampled(7)
def test_the_order_of_users_changes_rounding_only(federate: Any, federated: dict[str, Any]) -> None:
    changes = PARTIAL | ({"method.exchange_from": 1} if "exchange_from" in settings_of(federated["name"]) else {})
    expected = losses(federate(federated, users=USERS, changes=changes))
    found = losses(federate(turned(federated), users=[USERS[i] for i in TURNED], changes=changes))
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.sampled(7)
def test_the_order_of_users_with_nets_changes_rounding_only(federate_nets: Any, netted: dict[str, Any]) -> None:
    expected = losses(federate_nets(netted, changes=PARTIAL))
    found = losses(federate_nets(netted, changes=PARTIAL, order=(3, 1, 0, 2)))
    assert list(found) != list(expected)
    assert found == pytest.approx(expected, rel=1e-6)  # merging weights are float32


@pytest.mark.sampled(15)
def test_a_method_says_what_the_server_keeps_by_user(federate: Any, federated: dict[str, Any]) -> None:
    """What has the users on its leading dimension is as long as there are users, and theirs in any order."""
    kept = federate(federated, users=USERS).server.kept
    few = federate(cut(federated), users=USERS[:2]).server.kept
    other = federate(turned(federated), users=[USERS[i] for i in TURNED])
    by_user = {name for name, t in kept.items() if t.shape != few[name].shape}
    assert by_user == other.clients.method.server.by_user
    for name, t in kept.items():
        assert torch.equal(other.server.kept[name], t[list(TURNED)] if name in by_user else t), name


def cut(method: dict[str, Any]) -> dict[str, Any]:
    """The method for the first two users."""
    specialists = method.get("specialists")
    return {**method, "specialists": specialists[:2]} if isinstance(specialists, list) else method
