"""IFCA against its algorithm written out user by user, what travels, and who is in which cluster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_task import EVERYONE, LINEAR, Own, batches, descend, sample_losses, samples_of, unequal

from comingle.engines.simulation import Simulation
from comingle.methods.ifca import PICKED, best_model

MODELS = 3
METHOD = {"name": "ifca", "models": MODELS}


def soup_of(sim: Simulation) -> list[Own]:
    soup = {n.removeprefix("soup."): t for n, t in sim.state.server.items() if n.startswith("soup.")}
    return [{name: t[j].clone() for name, t in soup.items()} for j in range(MODELS)]


def picks(sim: Simulation, soup: list[Own]) -> list[int]:
    """Everybody's model with the lowest loss on all of its training data."""
    losses = [[float(sample_losses(own, *samples_of(sim, k)).mean()) for own in soup] for k in EVERYONE]
    return [row.index(min(row)) for row in losses]


def settled(sim: Simulation) -> Simulation:
    """As if the users had had these samples from the start."""
    soup, rows = soup_of(sim), sim.model.layout.views(sim.state.rows)
    chosen = picks(sim, soup)
    sim.state.server[PICKED].copy_(torch.eye(MODELS)[chosen])
    for k, j in enumerate(chosen):
        for name, t in rows.items():
            t[k] = soup[j][name]
    return sim


def by_hand(sim: Simulation, rounds: int, members: list[int]) -> tuple[list[Own], list[list[int]]]:
    """Algorithm 1 with model averaging: the models, and who took which before each round and after the last."""
    soup, taken = soup_of(sim), []
    for number in range(rounds):
        taken.append(picks(sim, soup))
        uploads: dict[int, Own] = {}
        for k in members:
            own, (x, y) = soup[taken[-1][k]], samples_of(sim, k)
            for at in batches(sim, k, number):
                own = descend(own, lambda leaves, at=at, x=x, y=y: sample_losses(leaves, x[at], y[at]).mean())
            uploads[k] = own
        for j in range(MODELS):
            size = {k: len(sim.trainers[k].train) for k in members if taken[-1][k] == j}
            if size:
                total = sum(size.values())
                soup[j] = {name: sum(n / total * uploads[k][name] for k, n in size.items()) for name in soup[j]}
    return soup, [*taken, picks(sim, soup)]


@pytest.mark.parametrize("members", [EVERYONE, [0, 2, 3]], ids=["everybody", "sampled"])
def test_rounds_equal_the_algorithm_written_out(federate_nets: Any, members: list[int]) -> None:
    sim, twin = (settled(unequal(federate_nets(METHOD, changes=LINEAR))) for _ in range(2))
    wanted, taken = by_hand(twin, 3, members)
    assert len(set(taken[-1])) > 1
    for number in range(3):
        assert sim.state.server[PICKED].argmax(1).tolist() == taken[number]
        sim.local_round(members, number)
        sim.exchange(members)
    assert sim.state.server[PICKED].argmax(1).tolist() == taken[-1]
    rows = sim.model.layout.views(sim.state.rows)
    for j, found in enumerate(soup_of(sim)):
        for name, t in wanted[j].items():
            torch.testing.assert_close(found[name], t, rtol=1e-6, atol=1e-8)
    for k in EVERYONE:  # who was away too
        for name, t in wanted[taken[-1][k]].items():
            torch.testing.assert_close(rows[name][k], t, rtol=1e-6, atol=1e-8)


def test_the_first_download_is_what_each_user_picks(federate_nets: Any) -> None:
    sim = federate_nets(METHOD, changes=LINEAR)
    before = sim.state.rows.clone()
    first = sim.state.server[PICKED].clone()
    settled(sim)
    assert torch.equal(sim.state.server[PICKED], first)
    assert torch.equal(sim.state.rows, before)


def test_a_model_that_nobody_takes_stays_as_it_is(federate_nets: Any) -> None:
    sim = federate_nets({"name": "ifca", "models": 6}, changes=LINEAR)
    before = {name: t.clone() for name, t in sim.state.server.items()}
    sim.local_round(EVERYONE, 0)
    sim.exchange(EVERYONE)
    taken = before[PICKED].sum(0) > 0
    assert 0 < int(taken.sum()) < 6
    for name in ("soup.weight", "soup.bias"):
        same = (sim.state.server[name] == before[name]).flatten(1).all(1)
        assert torch.equal(same, ~taken)


def test_users_download_every_model_and_send_one_with_its_number(federate_nets: Any) -> None:
    sim, plain = federate_nets(METHOD), federate_nets("fedavg")
    model = plain.upload_bytes()[0]
    assert sim.upload_bytes() == [model + 4] * 4
    assert sim.exchanged_bytes([0, 2]) == (2 * (model + 4), 2 * MODELS * (model - 4))  # nobody is told how much data


def test_losses_are_those_of_whole_training_sets_with_batch_norm(federate_nets: Any) -> None:
    """In evaluation mode, whatever the portions; a net of one user at a time, by torch alone."""
    sim, parts = (federate_nets(METHOD, changes={"runtime.users_per_step": n}) for n in (4, 3))
    soup = {n.removeprefix("soup."): t for n, t in sim.state.server.items() if n.startswith("soup.")}
    found = sim.assess(soup, sim.state.rows)
    torch.testing.assert_close(parts.assess(soup, parts.state.rows), found, rtol=1e-9, atol=1e-12)
    net = sim.stacked.net.eval()
    for k in EVERYONE:
        x, y = samples_of(sim, k)
        for j in range(MODELS):
            made = torch.func.functional_call(net, {name: t[j] for name, t in soup.items()}, (x,))
            assert float(found[k, j]) == pytest.approx(float((made - y).square().mean()), rel=1e-9)


def test_the_lowest_loss_is_taken_and_a_tie_changes_nothing() -> None:
    losses = torch.tensor([[2.0, 1.0, 3.0], [1.0, 1.0, 1.0], [1.0, 1.0, 2.0]])
    before = torch.eye(3)[[0, 2, 2]]
    assert best_model(losses, before).argmax(1).tolist() == [1, 2, 0]


def test_language_models_begin_with_random_clusters(federate: Any) -> None:
    """LoRA changes nothing before training, so all models are equally good; each user draws by its own name."""
    names = ("ann", "bob", "cem", "dan", "eva", "fay")
    sim = federate({"name": "ifca", "models": 2}, users=names)
    first = sim.state.server[PICKED].argmax(1)
    assert set(first.tolist()) == {0, 1}
    sim.local_round(range(6), 0)
    sim.exchange(range(6))
    soup = {n.removeprefix("soup."): t for n, t in sim.state.server.items() if n.startswith("soup.")}
    sim.round_number = -1
    losses = sim.assess(soup, sim.state.rows)
    assert bool((losses[:, 0] != losses[:, 1]).all())
