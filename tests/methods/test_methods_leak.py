"""``accumulate_gradients`` against plain torch: a module, two optimisers and a backward pass for each user by itself.

The loop is the public code's as it is described: after a step only the optimiser that stepped has its gradients zeroed,
and ``.grad`` lasts from round to round, as modules do. Neither comingle's models nor its optimisers are used in it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.methods import REGISTRY, settings_of
from comingle.models.loading import load_base
from comingle.models.scoring import random_windows
from comingle.training.backends.local import InProcess
from comingle.training.state import GRADIENTS
from comingle.utils.seeds import generator
from federations import exchange, local_round
from naive import Reference, Rules, honest_double

PERIOD = {"router_every": 3, "router_steps": 2}
TINY = "random:llama?layers=1&dim=16&heads=2&mlp=24"
ROUNDS, LOCAL_STEPS = 4, 2
CHANGES = {"training.rounds": ROUNDS, "training.local_steps": LOCAL_STEPS, "training.batch_size": 1}
CLOSE = {"rtol": 1e-7, "atol": 1e-10}
ALTERNATING = [name for name in REGISTRY if "accumulate_gradients" in settings_of(name)]


class Person:
    """One user: parameters, a naive model made of them, an optimiser for the experts and one for the router."""

    def __init__(self, federation: InProcess, user: int):
        clients = federation.clients
        self.plan, self.data = clients.plan, clients.trainers[user]
        views = clients.model.layout.views(clients.state.rows)
        self.own = {name: t[user].clone().requires_grad_() for name, t in views.items()}
        plain = load_base(TINY, dtype="float64", device="cpu").model
        self.model = Reference(plain, "llama", self.own, Rules(scale=16 / math.sqrt(2)))
        options: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
        routers = [t for name, t in self.own.items() if name.endswith(".router")]
        experts = [t for name, t in self.own.items() if not name.endswith(".router")]
        self.of_experts, self.of_router = torch.optim.AdamW(experts, **options), torch.optim.AdamW(routers, **options)
        self.iterations = 0

    def batch(self, stream: str, purpose: str, *place: int) -> Tensor:
        """The text that the federation draws there."""
        random = generator(self.plan.seed, self.data.name, place[0], purpose, *place[1:])
        size, context = self.plan.training.batch_size, self.plan.training.context
        return random_windows(getattr(self.data, stream), count=size, context=context, generator=random)

    def step(self, optimizer: torch.optim.Optimizer, batch: Tensor, *, leaks: bool) -> None:
        losses, penalty = self.model.losses(batch)
        (losses.mean() + self.plan.training.balance_weight * penalty).backward()
        optimizer.step()
        for one in (optimizer,) if leaks else (self.of_experts, self.of_router):
            one.zero_grad()

    def local_round(self, number: int, stream: str, *, leaks: bool) -> None:
        for at in range(LOCAL_STEPS):
            cosine = 0.5 * (1 + math.cos(math.pi * self.iterations / (ROUNDS * LOCAL_STEPS)))
            self.of_experts.param_groups[0]["lr"] = 2e-3 * (0.1 + 0.9 * cosine)
            self.step(self.of_experts, self.batch("train", "experts", number, at, 0), leaks=leaks)
            self.iterations += 1
            if self.iterations % PERIOD["router_every"] == 0:
                for repeat in range(PERIOD["router_steps"]):
                    self.step(self.of_router, self.batch(stream, "router", number, at, repeat), leaks=leaks)


def shared_parts(method: str, own: dict[str, Tensor]) -> list[Tensor]:
    """What the federation averages: nothing, or attention and the first expert, or all experts."""
    experts = {"comigs-2s": 0, "comigs-2g": 2}.get(method, 1)
    named = {name: t for name, t in own.items() if not name.endswith(".router")}
    return [t[:experts] if ".mlp." in name else t for name, t in named.items()] if experts else []


def naive(federation: InProcess, method: str, stream: str, *, leaks: bool) -> list[dict[str, Tensor]]:
    """Every user's tensors after the last local round."""
    people = [Person(federation, user) for user in range(2)]
    for number in range(ROUNDS):
        for person in people:
            person.local_round(number, stream, leaks=leaks)
        if number == ROUNDS - 1:
            break
        with torch.no_grad():
            for parts in zip(*(shared_parts(method, person.own) for person in people), strict=True):
                mean = torch.stack(parts).mean(0)
                for part in parts:
                    part.copy_(mean)
    return [person.own for person in people]


def trained(federate: Any, method: str, **settings: Any) -> tuple[InProcess, InProcess]:
    """A federation before training, and the same one after it."""
    own = {"name": method, **PERIOD, **settings}
    start, federation = (federate(own, base=TINY, users=("ann", "bob"), changes=CHANGES) for _ in range(2))
    for number in range(ROUNDS):
        local_round(federation, [0, 1], number)
        if number < ROUNDS - 1:
            exchange(federation, [0, 1])
    return start, federation


@pytest.mark.parametrize("leaks", [True, False], ids=["accumulated", "zeroed"])
@pytest.mark.parametrize("method", ["comigs-1g1s", "comigs-2g", "comigs-2s", "comigs-tr"])
@pytest.mark.sampled(1)
def test_accumulated_gradients_are_those_of_a_plain_loop_that_zeroes_what_stepped(
    federate: Any, method: str, leaks: bool
) -> None:
    """The first router phase is within a round, the second at a round's end: what it leaves outlasts an exchange."""
    stream = "train" if method == "comigs-tr" else "valid"
    with honest_double():
        start, federation = trained(federate, method, accumulate_gradients=leaks)
        expected = naive(start, method, stream, leaks=leaks)
        views = federation.clients.model.layout.views(federation.clients.state.rows)
        for user, own in enumerate(expected):
            for name, tensor in own.items():
                torch.testing.assert_close(views[name][user], tensor.detach(), **CLOSE, msg=f"{name}, user {user}")


@pytest.mark.parametrize("method", ALTERNATING)
def test_what_a_router_phase_leaves_waits_for_the_experts(federate: Any, make_user: Any, method: str) -> None:
    """A round that ends with a router step: the routers' are used up, the experts' come from the routers' text."""
    own = {"name": method, "accumulate_gradients": True, "router_every": 1, "router_steps": 1}
    left = []
    for ann in ("ann", replace(make_user("ann"), valid=make_user("ann", text="another text").valid)):
        federation = federate(own, base=TINY, users=(ann, "bob"), changes={**CHANGES, "training.local_steps": 1})
        local_round(federation, [0, 1], 0)
        left.append(federation.clients.state.kept[GRADIENTS][0])
    routers = federation.clients.model.layout.mask({"router"})
    on_valid = any(phase.stream == "valid" for phase in federation.clients.phases)
    assert not left[0][routers].any()
    assert left[0][~routers].all()
    assert bool((left[0] != left[1]).any()) == on_valid


@pytest.mark.parametrize("method", ALTERNATING)
def test_nothing_waits_by_default(federate: Any, method: str) -> None:
    assert GRADIENTS not in federate(method, base=TINY).clients.state.kept


def test_members_who_are_due_at_different_times_keep_gradients_of_their_own(federate: Any) -> None:
    """Ann joins one round late; what she computes is what she would have computed by herself."""
    own = {"name": "comigs-2s", "router_every": 2, "router_steps": 1, "accumulate_gradients": True}
    changes = {**CHANGES, "training.local_steps": 1}
    together, alone = (federate(own, base=TINY, changes=changes) for _ in range(2))
    for number, members in enumerate([[1, 2], [0, 1, 2], [0, 2], [0, 1, 2]]):
        local_round(together, members, number)
    for number in (1, 2, 3):
        local_round(alone, [0], number)
    torch.testing.assert_close(together.clients.state.rows[0], alone.clients.state.rows[0], rtol=1e-9, atol=1e-12)
