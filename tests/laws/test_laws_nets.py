"""The laws for nets that are trained whole: users are a batch dimension there too, and nothing else couples them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.data.samples import Samples
from comingle.engines.exchange import build_uploads
from comingle.engines.mixing import mixtures
from comingle.engines.simulation import Simulation

EXACT = {"rtol": 1e-9, "atol": 1e-12}
EVERYONE = [0, 1, 2, 3]


def trained(sim: Simulation, rounds: int = 2) -> Tensor:
    for number in range(rounds):
        if number:
            sim.exchange(EVERYONE)
        sim.local_round(EVERYONE, number)
    return sim.state.rows


def test_a_cohort_equals_its_users_trained_one_at_a_time(federate_nets: Any, netted: dict[str, Any]) -> None:
    together = trained(federate_nets(netted))
    for users_per_step in (1, 3):
        apart = trained(federate_nets(netted, changes={"runtime.users_per_step": users_per_step}))
        torch.testing.assert_close(apart, together, **EXACT)


def test_nobodys_data_moves_anybody_else_within_a_round(federate_nets: Any, netted: dict[str, Any]) -> None:
    sim, other = federate_nets(netted), federate_nets(netted)
    bank = other.feed.banks["train"]
    start, count = int(bank.starts[1]), int(bank.counts[1])
    bank.targets[start : start + count] += 3.0
    one, two = trained(sim, 1), trained(other, 1)
    assert torch.equal(one[[0, 2, 3]], two[[0, 2, 3]])
    assert not torch.equal(one[1], two[1])


def test_what_is_trained_moves_and_nothing_else_does(federate_nets: Any, netted: dict[str, Any]) -> None:
    # Without batch norm, behind which a bias has no gradient but rounding.
    sim = federate_nets(netted, changes={"data.task.name": "mlp"})
    layout = sim.model.layout
    before = sim.state.rows.clone()
    trained(sim)
    moved = (sim.state.rows != before).any(0)
    method = sim.method
    rerouted = method.reroute or (method.mixture and method.mixture.at == "samples")
    expected = set(method.trained) | ({"router"} if rerouted else set()) | {"statistics"}
    for slot in layout.slots:
        span = slice(layout.starts[slot.name], layout.starts[slot.name] + slot.size)
        changes = bool(moved[span].any())
        assert changes == bool(set(slot.roles) & expected), slot.name


def test_only_what_is_shared_leaves(federate_nets: Any, netted: dict[str, Any]) -> None:
    sim = federate_nets(netted)
    uploads = build_uploads(sim.method, sim.model.layout, sim.state.rows)
    sent = {slot.name for slot in sim.model.layout.slots if all(slot.chosen(sim.method.shared))}
    assert set(uploads) == sent
    clusters = sim.mixture.clusters if sim.method.report else 0
    entries = sum(t[0].numel() for t in uploads.values())
    said = clusters + bool(sim.method.picks) + 1  # which model it took, and how many samples it trains on
    assert sim.upload_bytes() == [4 * (entries + said) * bool(uploads)] * 4 or not uploads


def test_an_exchange_leaves_what_is_local(federate_nets: Any, netted: dict[str, Any]) -> None:
    sim = federate_nets(netted)
    trained(sim, 1)
    rerouted = {"router"} if sim.method.reroute else set()  # out of what has been received
    local = ~sim.model.layout.mask(sim.method.shared | rerouted)
    before = sim.state.rows.clone()
    sim.exchange(EVERYONE)
    assert torch.equal(sim.state.rows[:, local], before[:, local])
    if sim.method.welcome is not None:  # everybody gets a model of their own
        return
    for name in build_uploads(sim.method, sim.model.layout, sim.state.rows):
        values = sim.model.layout.views(sim.state.rows)[name]
        torch.testing.assert_close(values, values[:1].expand_as(values), **EXACT)


def test_micro_batches_change_nothing_without_batch_norm(federate_nets: Any, netted: dict[str, Any]) -> None:
    changes = {"data.task.name": "mlp"}
    whole = trained(federate_nets(netted, changes=changes))
    parts = trained(federate_nets(netted, changes={**changes, "runtime.micro_batch": 7}))
    torch.testing.assert_close(parts, whole, **EXACT)


def test_users_of_unequal_size_take_their_own_number_of_steps(federate_nets: Any, netted: dict[str, Any]) -> None:
    """Whoever has fewer samples has fewer steps, and is what it would be alone."""

    def cut(sim: Simulation) -> Simulation:
        from comingle.engines.samples import SampleFeed

        few = sim.trainers[2]
        short = Samples(inputs=few.train.inputs[:43], targets=few.train.targets[:43])
        sim.trainers[2] = type(few)(name=few.name, train=short, valid=few.valid, test=few.test, cluster=few.cluster)
        sim.feed = SampleFeed(
            sim.trainers, sim.training, sim.batch_size, device=sim.model.device, dtype=sim.model.dtype
        )
        return sim

    together, apart = cut(federate_nets(netted)), cut(federate_nets(netted, changes={"runtime.users_per_step": 1}))
    # Preconditioning multiplies rounding by up to 1e5.
    torch.testing.assert_close(trained(together), trained(apart), rtol=1e-6, atol=1e-7)
    assert together.state.iterations.tolist() == [6, 6, 4, 6]


@pytest.mark.parametrize("name", ["floral", "ensemble", "local-adaptor", "fedavg"])
def test_absent_users_train_nothing(federate_nets: Any, name: str) -> None:
    sim = federate_nets(name)
    before = sim.state.rows.clone()
    sim.local_round([0, 3], 0)
    assert torch.equal(sim.state.rows[[1, 2]], before[[1, 2]])
    local = ~sim.model.layout.mask(sim.method.shared)
    sim.exchange([0, 3])
    assert torch.equal(sim.state.rows[1:3, local], before[1:3, local])


def test_evaluations_say_what_is_mixed(federate_nets: Any, netted: dict[str, Any]) -> None:
    event = mixtures(federate_nets(netted))
    models = netted["name"].startswith(("ensemble", "fedmerge", "ifca", "fedem"))
    mixes = models or netted["name"].startswith("floral")
    assert event.get("component") == ({True: "model", False: "adaptor set"}[models] if mixes else None)
