"""Alternating methods: routers and experts take turns, and neither sees the other's gradient."""

from __future__ import annotations

import inspect
import logging
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.methods import REGISTRY
from comingle.methods.base import Phase
from comingle.models.adapted import AdaptedModel
from comingle.models.scoring import random_windows
from comingle.training import settings
from comingle.training.backends.local import InProcess
from comingle.training.checkpoints import Clock
from comingle.utils.seeds import generator
from comingle.utils.trees import EXPERT_ROLES, ROUTER
from federations import local_round, take_phase

EVERYONE = [0, 1, 2]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def both(federation: InProcess) -> tuple[Phase, Phase]:
    experts, router = federation.clients.method.client.phases
    return experts, router


def has_router(federation: InProcess) -> bool:
    return ROUTER in federation.clients.model.layout.roles


def documented_client(method: dict[str, Any]) -> str:
    """What a method's docstring says its users do; the engine and the phases are not asked."""
    return (inspect.getdoc(REGISTRY[method["name"]]) or "").partition("Client:")[2].partition("Server:")[0]


def documented_stream(alternating: dict[str, Any]) -> str:
    """Which text the docstring has the routers trained on."""
    client = documented_client(alternating)
    said = {stream for stream, words in STREAMS.items() if words.search(client)}
    assert len(said) == 1, client
    return said.pop()


STREAMS = {"valid": re.compile(r"\bvalidation text\b"), "train": re.compile(r"\btraining batches\b")}


def windows(federation: InProcess, stream: str, purpose: str, step: int, repeat: int) -> Tensor:
    """Everybody's batch of the first round, straight out of the named text."""
    plan = federation.clients.plan
    drawn = [
        random_windows(
            getattr(user, stream),
            count=plan.training.batch_size,
            context=plan.training.context,
            generator=generator(plan.seed, user.name, 0, purpose, step, repeat),
        )
        for user in federation.clients.trainers
    ]
    return torch.stack(drawn)


def test_phases_part_all_roles(federate: Any, alternating: dict[str, Any]) -> None:
    experts, router = both(federate(alternating))
    assert (experts.roles, router.roles) == (frozenset(EXPERT_ROLES), frozenset({ROUTER}))
    assert (experts.every, experts.steps) == (1, 1)
    assert (router.every, router.steps) == (alternating["router_every"], alternating["router_steps"])


@pytest.mark.sampled(6)
def test_validation_text_moves_the_routers_of_those_who_say_so_and_nothing_else(
    federate: Any, make_user: Any, trained: dict[str, Any]
) -> None:
    """Bob has other validation text; the round ends as the routers have had their steps."""
    bob, other = make_user("bob"), make_user("bob", text="another text")
    rows = []
    for user in (bob, replace(bob, valid=other.valid)):
        federation = federate(trained, users=("ann", user, "cem"), changes={"training.local_steps": 3})
        members = list(range(len(federation.clients.trainers)))
        local_round(federation, members, 0)
        rows.append(federation.clients.state.rows)
    routers = federation.clients.model.layout.mask({ROUTER}) & federation.clients.mask
    client = documented_client(trained)
    says = "alternating" in client and documented_stream(trained) == "valid"
    moved = rows[0] != rows[1]
    assert not moved[~routers].any()
    if routers.any() or not says:
        assert moved.any() == says


def test_only_what_a_phase_trains_moves(federate: Any, alternating: dict[str, Any]) -> None:
    federation = federate(alternating)
    for step in range(2):
        for phase in federation.clients.phases:
            mine = federation.clients.model.layout.mask(phase.roles)
            before = {name: tensor.clone() for name, tensor in federation.clients.state.tensors().items()}
            take_phase(federation.clients, phase, 0, step)
            for name in ("rows", "first", "second"):
                now = getattr(federation.clients.state, name)
                assert torch.equal(now[:, ~mine], before[name][:, ~mine]), name
                assert not torch.equal(now[:, mine], before[name][:, mine]), name
            steps = phase.steps if phase.optimizer == "router" else 0
            assert torch.equal(federation.clients.state.router_steps, before["router_steps"] + steps)
            assert torch.equal(federation.clients.state.iterations, before["iterations"])


def test_only_what_a_phase_trains_requires_a_gradient(
    federate: Any, alternating: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate(alternating)
    seen: list[set[str]] = []
    original = AdaptedModel.losses

    def spy(self: AdaptedModel, tensors: dict[str, Tensor], users: Any, windows: Tensor, *, train: bool) -> Any:
        seen.append({name for name, tensor in tensors.items() if tensor.requires_grad})
        return original(self, tensors, users, windows, train=train)

    monkeypatch.setattr(AdaptedModel, "losses", spy)
    for phase in federation.clients.phases:
        seen.clear()
        take_phase(federation.clients, phase, 0, 0)
        expected = {slot.name for slot in federation.clients.model.layout.slots if set(slot.roles) <= phase.roles}
        assert seen == [expected] * phase.steps
    assert not federation.clients.state.rows.requires_grad


@pytest.mark.sampled(5)
def test_two_optimisers_and_no_leak(federate: Any, alternating: dict[str, Any]) -> None:
    """The alternation equals a naive loop: torch's AdamW for the experts, another for the routers, fresh gradients.

    A gradient that leaks from one phase into the other, a shared moment or a shared step count would show at once.
    """
    federation = federate(alternating, changes={"training.local_steps": 2 * alternating["router_every"] + 1})
    steps = federation.clients.plan.training.local_steps
    expected = naive_alternation(federation, steps, documented_stream(alternating))
    local_round(federation, EVERYONE, 0)
    for name, tensor in federation.clients.model.layout.views(federation.clients.state.rows).items():
        torch.testing.assert_close(tensor, expected[name], **CLOSE, msg=name)


def naive_alternation(federation: InProcess, iterations: int, router_stream: str) -> dict[str, Tensor]:
    """All users' tensors after some iterations, by autograd and ``torch.optim``."""
    layout, plan = federation.clients.model.layout, federation.clients.plan
    tensors = {name: t.clone().requires_grad_() for name, t in layout.views(federation.clients.state.rows).items()}
    routers = [name for name in tensors if name.endswith(".router")]
    options = {"lr": plan.training.experts.learning_rate, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    of_experts = torch.optim.AdamW([t for name, t in tensors.items() if name not in routers], **options)
    of_routers = torch.optim.AdamW([tensors[name] for name in routers], **options) if routers else None

    def step(optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        losses, penalty = federation.clients.model.losses(tensors, EVERYONE, batch)
        for tensor in tensors.values():
            tensor.grad = None
        (losses.mean((1, 2)) + plan.training.balance_weight * penalty).sum().backward()
        optimizer.step()

    _, router = both(federation)
    for at in range(iterations):
        cosine = 0.5 * (1 + math.cos(math.pi * at / plan.iterations))
        of_experts.param_groups[0]["lr"] = plan.training.experts.learning_rate * (0.1 + 0.9 * cosine)
        step(of_experts, windows(federation, "train", "experts", at, 0))
        if of_routers and (at + 1) % router.every == 0:
            for repeat in range(router.steps):
                step(of_routers, windows(federation, router_stream, "router", at, repeat))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def test_the_period_counts_a_users_own_iterations(federate: Any, alternating: dict[str, Any]) -> None:
    """Three users of one cohort who have taken 0, 1 and 2 iterations: with a period of 2 only the second is due."""
    federation = federate({**alternating, "router_every": 2})
    federation.clients.state.iterations.copy_(torch.tensor([0, 1, 2]))
    router, before = federation.clients.model.layout.mask({ROUTER}), federation.clients.state.rows.clone()
    real = (federation.clients.mask & router).any(1)
    due = torch.tensor([False, True, False])
    clients = federation.clients
    cohort = clients.cohort(EVERYONE, 0)
    clients.steps.take_local_step(cohort, clients.phases, 0, torch.ones(3, dtype=torch.bool))
    clients.state.put(EVERYONE, cohort.state)
    moved = (federation.clients.state.rows != before)[:, router].any(1)
    assert torch.equal(moved, due & real)
    assert federation.clients.state.iterations.tolist() == [1, 2, 3]
    assert federation.clients.state.router_steps.tolist() == [
        int(d) * alternating["router_steps"] * has_router(federation) for d in due
    ]
    assert (federation.clients.state.rows != before)[:, ~router].any(1).all()


def test_the_period_under_partial_participation(federate: Any, alternating: dict[str, Any]) -> None:
    """Whoever joins when, a user has taken ``router_steps`` steps for every ``router_every`` of its own iterations."""
    federation = federate(alternating, changes={"training.local_steps": 1, "training.rounds": 8})
    attendance = [[0], [0, 1], [0, 2], [1, 2], [0, 1, 2], [2], [0, 1], [0, 1, 2]]
    for number, members in enumerate(attendance):
        before = federation.clients.state.rows.clone()
        local_round(federation, members, number)
        absent = [user for user in EVERYONE if user not in members]
        assert torch.equal(federation.clients.state.rows[absent], before[absent])
    taken = [sum(user in members for members in attendance) for user in EVERYONE]
    assert taken == [6, 5, 5]
    assert federation.clients.state.iterations.tolist() == taken
    steps = [n // alternating["router_every"] * alternating["router_steps"] * has_router(federation) for n in taken]
    assert federation.clients.state.router_steps.tolist() == steps


def test_users_of_one_cohort_who_are_due_at_different_times_equal_users_alone(
    federate: Any, alternating: dict[str, Any]
) -> None:
    """Ann joins one round late; what she computes is what she would have computed by herself."""
    federation = federate({**alternating, "router_every": 2}, changes={"training.local_steps": 1, "training.rounds": 3})
    alone = federate({**alternating, "router_every": 2}, changes={"training.local_steps": 1, "training.rounds": 3})
    for number, members in enumerate([[1, 2], [0, 1, 2], [0, 1, 2]]):
        local_round(federation, members, number)
    for number in (1, 2):
        local_round(alone, [0], number)
    torch.testing.assert_close(federation.clients.state.rows[0], alone.clients.state.rows[0], **CLOSE)


def test_a_run_that_ends_before_the_routers_first_step_says_so_once(
    federate: Any, alternating: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings._warn_once.cache_clear()
    every = alternating["router_every"]
    for rounds, local_steps, said in ((1, every - 1, 1), (1, every - 1, 0), (1, every, 0), (every, 1, 0)):
        caplog.clear()
        federation = federate(
            alternating,
            changes={"training.rounds": rounds, "training.local_steps": local_steps, "evaluation.every": 1},
        )
        with caplog.at_level(logging.WARNING, logger="comingle"):
            federation.start(lambda event: None, Clock())
        lines = [line for line in caplog.messages if "stays untrained" in line]
        assert len(lines) == said * has_router(federation), (rounds, local_steps, lines)
        entry = settings.untrained_entry(federation.clients.plan, local_steps)
        never = rounds * local_steps < every and has_router(federation)
        assert entry == ({"untrained": ["router"]} if never else {})
        for line in lines:
            assert line.startswith(f"method {alternating['name']}: "), line
            assert f"{rounds * local_steps} local steps" in line, line
            assert "router trains only" in line, line
            assert f"after every {every} local steps" in line, line
            assert re.search(rf"set method\.router_every .*`Phase.every`\) to at most {rounds * local_steps}, or", line)
