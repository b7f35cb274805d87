"""Small nets user by user, for algorithms written out in tests: batches, gradients by autograd, plain descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from comingle.training.backends.local import InProcess
from federations import exchange, local_round

RATE = 0.05
EVERYONE = [0, 1, 2, 3]
Own = dict[str, Tensor]


class ByHand:
    """A federation's users, one by one."""

    def __init__(self, federation: Any):
        self.federation, self.clients = federation, federation.clients
        self.net = self.clients.model.net.train()
        self.trained = [name for name, _ in self.net.named_parameters()]
        self.amounts = [len(user.train) for user in self.clients.trainers]

    def rows(self) -> list[Own]:
        """What every row has now."""
        return rows_of(self.federation)

    def steps(self, user: int) -> int:
        """Local steps of a round."""
        return self.clients.batch_source.steps(user)

    def gradient(self, own: Own, user: int, number: int, step: int) -> Own:
        """Of a batch's mean loss; running statistics in ``own`` change as they do in a forward pass."""
        drawn = self.clients.batch_source.draw([user], self.clients.phases[0], number, step, 0)[0]
        data: Any = self.clients.trainers[user].train
        at = drawn[drawn >= 0]
        leaves = {name: own[name].clone().requires_grad_() for name in self.trained}
        outputs = functional_call(self.net, own | leaves, (data.inputs.double()[at],))
        loss = (outputs - data.targets.double()[at]).square().mean()
        return dict(zip(self.trained, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def mean(self, uploads: dict[int, Own]) -> Own:
        """By the users' amounts of data."""
        total, names = sum(self.amounts[user] for user in uploads), next(iter(uploads.values()))
        parts = {n: [self.amounts[u] / total * own[n] for u, own in uploads.items()] for n in names}
        return {n: torch.stack(of_users).sum(0) for n, of_users in parts.items()}


def played(federation: InProcess, rounds: list[list[int]]) -> list[Own]:
    """What every row has after rounds of these users, the last exchange and everybody's download included."""
    for number, members in enumerate(rounds):
        local_round(federation, members, number)
        exchange(federation, members)
    return rows_of(federation)


def rows_of(federation: InProcess) -> list[Own]:
    """What every row has now."""
    rows = federation.clients.state.rows
    views = federation.clients.model.layout.views(rows)
    return [{name: t[row].clone() for name, t in views.items()} for row in range(len(rows))]


def same(found: list[Own], wanted: list[Own]) -> None:
    """To rounding."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, t in other.items():
            torch.testing.assert_close(one[name], t, rtol=1e-9, atol=1e-11, msg=name)
