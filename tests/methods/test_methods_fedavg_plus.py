"""FedAvg+: the global model tuned by every user before it is used, and forgotten after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_task import EVERYONE, LINEAR, RATE

from comingle.config import load_recipe
from comingle.runs import api
from comingle.training.backends.local import InProcess
from comingle.training.client import finetuned
from comingle.training.rounds import run_rounds
from federations import exchange, local_round


def kept(federation: InProcess) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in federation.clients.state.tensors().items()}


def tuned(federation: InProcess, done: int | None = None) -> Sequence[Any]:
    """Everybody's score with its tuned model after so many rounds."""
    with finetuned(federation.clients, done):
        return federation.clients.evaluate()


def after_a_round(federation: InProcess, members: list[int]) -> InProcess:
    local_round(federation, members, 0)
    exchange(federation, members)
    return federation


def test_scores_are_those_of_a_tuned_copy_written_out(federate_nets: Any) -> None:
    """Torch's own layers and loop, user by user, from the global model."""
    federation = after_a_round(federate_nets("fedavg+", changes=LINEAR), EVERYONE)
    views, found = federation.clients.model.layout.views(federation.clients.state.rows), tuned(federation, 1)
    phase = replace(federation.clients.phases[0], label="tuning")
    for k, user in enumerate(federation.clients.trainers):
        net = torch.nn.Linear(10, 3).double()
        net.load_state_dict({name: t[k] for name, t in views.items()})
        descent = torch.optim.SGD(net.parameters(), lr=RATE)
        for step in range(federation.clients.batch_source.steps(k)):
            at = federation.clients.batch_source.draw([k], phase, 1, step, 0)[0]
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
    before, phases = kept(looked), looked.clients.phases
    first, second = tuned(looked, 1), tuned(looked, 1)
    assert [s.mean_loss for s in first] == [s.mean_loss for s in second]
    assert looked.clients.phases is phases
    assert all(torch.equal(t, kept(looked)[name]) for name, t in before.items())
    plain = after_a_round(make("fedavg", changes=changes), members)
    assert torch.equal(plain.clients.state.rows, looked.clients.state.rows)
    assert all(a.mean_loss != b.mean_loss for a, b in zip(first, plain.clients.evaluate(), strict=True))
    for federation in (looked, blind, plain):
        local_round(federation, members, 1)
    assert torch.equal(looked.clients.state.rows, blind.clients.state.rows)
    assert torch.equal(looked.clients.state.rows, plain.clients.state.rows)


def test_tuning_draws_batches_of_its_own(federate_nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federate_nets("fedavg+", changes=LINEAR)
    drawn: list[tuple[str, int]] = []
    original = federation.clients.batch_source.draw

    def spy(trainers: Any, phase: Any, number: int, step: int, repeat: int) -> torch.Tensor:
        drawn.append((phase.purpose, number))
        return original(trainers, phase, number, step, repeat)

    monkeypatch.setattr(federation.clients.batch_source, "draw", spy)
    for done in (0, 1, None):
        tuned(federation, done)
    assert set(drawn) == {("tuning", 0), ("tuning", 1)}  # of two rounds


def test_it_tunes_the_exchanged_model_whatever_the_setting(federate_nets: Any) -> None:
    """Everybody starts from the same, also who was away; the last exchange takes place."""
    events: list[dict[str, Any]] = []
    changes = {**LINEAR, "evaluation.model": "local", "training.participation": 0.5, "evaluation.every": 1}
    federation = federate_nets("fedavg+", changes=changes)
    run_rounds(federation, observe=events.append)
    assert [e["round"] for e in events if e["event"] == "evaluation"] == [0, 1, 2]
    assert torch.equal(
        federation.clients.state.rows, federation.clients.state.rows[:1].expand_as(federation.clients.state.rows)
    )


def test_a_users_model_is_the_tuned_one(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"method": "fedavg+", "training.experts.learning_rate": 0.05})
    run = api.run(recipe, out=tmp_path / "run")
    opened = api.load(tmp_path / "run")
    text = "ada loved the sea and the sea loved her"
    with finetuned(run.federation.clients):
        rows = run.federation.clients.state.rows.clone()
    for i, name in enumerate(run.users):
        own = run.user(name)
        assert own.perplexity(text) == opened.user(name).perplexity(text)
        for key, t in run.federation.clients.model.layout.views(rows).items():
            torch.testing.assert_close(own.tensors[key][0], t[i], rtol=1e-4, atol=1e-5)
    scores = {name: user["test_perplexity"] for name, user in run.metrics["users"].items()}
    again = tuned(opened.federation)
    assert [score.perplexity for score in again] == pytest.approx(list(scores.values()), rel=1e-6)
