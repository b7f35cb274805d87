"""Whom a user who leaves the real numbers is told to slow down: the router, the experts, or nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from comingle.methods.base import ROUTERS
from comingle.training.backends.local import InProcess
from comingle.training.rounds import run_rounds
from comingle.training.steps import diverged, find_suspects
from comingle.utils.errors import DivergenceError

ROUTER = "training.router.learning_rate, or training.router.clip_norm: 1.0"
EXPERTS = "training.experts.learning_rate, or training.experts.clip_norm: 1.0"


def message(sim: InProcess) -> str:
    with pytest.raises(DivergenceError) as caught:
        run_rounds(sim, observe=lambda event: None)
    return str(caught.value)


@pytest.mark.parametrize(("who", "told"), [("router", ROUTER), ("experts", EXPERTS)], ids=["the router", "the experts"])
@pytest.mark.parametrize("steps", [1, 3], ids=["in a round's last step", "within a round"])
def test_the_phase_that_broke_first_is_named(
    federate: Callable[..., InProcess], who: str, told: str, steps: int
) -> None:
    """An absurd rate for one of two alternating optimisers: only that one is at fault."""
    changes = {f"training.{who}.learning_rate": 1e38, "training.local_steps": steps}
    sim = federate({"name": "comigs-1g1s", "router_every": 1, "router_steps": 1}, dtype="float32", changes=changes)
    assert message(sim).endswith(f" {told}")


@pytest.mark.parametrize("name", ["local", "fedavg"])
def test_where_there_is_no_router_the_experts_are_named(federate: Callable[..., InProcess], name: str) -> None:
    sim = federate(name, dtype="float32", changes={"training.experts.learning_rate": 1e30})
    assert message(sim).endswith(f" {EXPERTS}")


def test_nets_whose_mixtures_break_name_the_experts(federate_nets: Callable[..., InProcess]) -> None:
    """Both are trained in one step here, so that both are no numbers at the end of the round."""
    sim = federate_nets("floral", changes={"training.experts.learning_rate": 1e38})
    assert message(sim).endswith(f" {EXPERTS}")


def test_a_base_that_is_not_finite_is_at_fault_itself(federate: Callable[..., InProcess]) -> None:
    sim = federate("local", dtype="float32")
    with torch.no_grad():
        sim.clients.state.rows[0, 0] = torch.nan
    said = message(sim)
    assert said.startswith("user 'ann': test loss is nan after round 0")
    assert "base" in said
    assert "learning_rate" not in said


@pytest.mark.parametrize(
    ("router", "experts", "told"),
    [
        (1e30, 0.01, ("router",)),
        (0.5, 1e9, ("experts",)),
        (torch.inf, 1e20, ("router",)),
        (torch.nan, torch.nan, ("experts", "router")),
        (1e20, 2e20, ("experts", "router")),
    ],
)
def test_what_is_larger_by_far_broke_first(
    federate: Callable[..., InProcess], router: float, experts: float, told: tuple[str, ...]
) -> None:
    sim = federate("comigs-1g1s")
    clients = sim.clients
    layout, row = clients.model.layout, torch.zeros(clients.model.layout.columns)
    others = clients.method.client.trained - ROUTERS
    row[layout.mask(ROUTERS)], row[layout.mask(others)] = router, experts
    assert find_suspects(layout, row, {"experts": others, "router": ROUTERS}) == told


def test_two_that_cannot_be_told_apart_are_both_named() -> None:
    both = str(diverged("ann", "x", ("experts", "router")))
    for key in ("learning_rate", "clip_norm"):
        assert f"training.experts.{key} and training.router.{key}" in both
