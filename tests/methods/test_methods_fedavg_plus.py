"""FedAvg+: the global model tuned by every user before it is used, and forgotten after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_task import EVERYONE, LINEAR, RATE

from comingle import experiment
from comingle.engines.rounds import run_rounds
from comingle.engines.simulation import Simulation
from comingle.recipes import load_recipe


def kept(sim: Simulation) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in sim.state.tensors().items()}


def after_a_round(sim: Simulation, members: list[int]) -> Simulation:
    sim.local_round(members, 0)
    sim.exchange(members)
    return sim


def test_scores_are_those_of_a_tuned_copy_written_out(federate_nets: Any) -> None:
    """Torch's own layers and loop, user by user, from the global model."""
    sim = after_a_round(federate_nets("fedavg+", changes=LINEAR), EVERYONE)
    views, found = sim.model.layout.views(sim.state.rows), sim.evaluate(1)
    phase = replace(sim.phases[0], label="tuning")
    for k, user in enumerate(sim.trainers):
        net = torch.nn.Linear(10, 3).double()
        net.load_state_dict({name: t[k] for name, t in views.items()})
        descent = torch.optim.SGD(net.parameters(), lr=RATE)
        for step in range(sim.feed.steps(k)):
            at = sim.feed.draw([k], phase, 1, step, 0)[0]
            at = at[at >= 0]
            descent.zero_grad()
            (net(user.train.inputs[at].double()) - user.train.targets[at]).square().mean().backward()
            descent.step()
        loss = (net(user.test.inputs.double()) - user.test.targets).square().mean()
        assert found[k].mean_loss == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["net", "language model"])
def test_an_evaluation_leaves_nothing_behind(federate: Any, federate_nets: Any, kind: str) -> None:
    """Rows, moments and step counts stay bit for bit, and so does what is trained afterwards; nobody trains less."""
    make = federate_nets if kind == "net" else federate
    members = EVERYONE if kind == "net" else EVERYONE[:3]
    changes = {"training.experts": {"name": "adamw", "learning_rate": 0.01}}
    looked, blind = (after_a_round(make("fedavg+", changes=changes), members) for _ in range(2))
    before, phases = kept(looked), looked.phases
    first, second = looked.evaluate(1), looked.evaluate(1)
    assert [s.mean_loss for s in first] == [s.mean_loss for s in second]
    assert looked.phases is phases
    assert all(torch.equal(t, kept(looked)[name]) for name, t in before.items())
    plain = after_a_round(make("fedavg", changes=changes), members)
    assert torch.equal(plain.state.rows, looked.state.rows)
    assert all(a.mean_loss != b.mean_loss for a, b in zip(first, plain.evaluate(), strict=True))
    for sim in (looked, blind, plain):
        sim.local_round(members, 1)
    assert torch.equal(looked.state.rows, blind.state.rows)
    assert torch.equal(looked.state.rows, plain.state.rows)


def test_tuning_draws_batches_of_its_own(federate_nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = federate_nets("fedavg+", changes=LINEAR)
    drawn: list[tuple[str, int]] = []
    original = sim.feed.draw

    def spy(trainers: Any, phase: Any, number: int, step: int, repeat: int) -> torch.Tensor:
        drawn.append((phase.purpose, number))
        return original(trainers, phase, number, step, repeat)

    monkeypatch.setattr(sim.feed, "draw", spy)
    sim.evaluate(0)
    sim.evaluate(1)
    sim.evaluate()
    assert set(drawn) == {("tuning", 0), ("tuning", 1)}  # of two rounds


def test_it_tunes_the_exchanged_model_whatever_the_setting(federate_nets: Any) -> None:
    """Everybody starts from the same, also who was away; the last exchange takes place."""
    events: list[dict[str, Any]] = []
    changes = {**LINEAR, "evaluation.model": "local", "training.participation": 0.5, "evaluation.every": 1}
    sim = federate_nets("fedavg+", changes=changes)
    run_rounds(sim, observe=events.append)
    assert [e["round"] for e in events if e["event"] == "evaluation"] == [0, 1, 2]
    assert torch.equal(sim.state.rows, sim.state.rows[:1].expand_as(sim.state.rows))


def test_a_users_model_is_the_tuned_one(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"method": "fedavg+", "training.experts.learning_rate": 0.05})
    run = experiment.run(recipe, out=tmp_path / "run")
    opened = experiment.load(tmp_path / "run")
    text = "ada loved the sea and the sea loved her"
    with run.simulation.tuned():
        rows = run.simulation.state.rows.clone()
    for i, name in enumerate(run.users):
        own = run.user(name)
        assert own.perplexity(text) == opened.user(name).perplexity(text)
        for key, t in run.simulation.model.layout.views(rows).items():
            torch.testing.assert_close(own.tensors[key][0], t[i], rtol=1e-4, atol=1e-5)
    scores = {name: user["test_perplexity"] for name, user in run.metrics["users"].items()}
    again = opened.simulation.evaluate()
    assert [score.perplexity for score in again] == pytest.approx(list(scores.values()), rel=1e-6)
