"""The round loop: what happens when, what is counted, which model counts, and what stops it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from comingle.config import Recipe, load_recipe
from comingle.protocol.wire import packed_bytes
from comingle.runs import api, session
from comingle.runs.folders import open_folder
from comingle.runs.session import describe, prepare
from comingle.training.backends.local import InProcess
from comingle.training.client import train
from comingle.training.rounds import run_rounds
from comingle.utils.errors import ComingleError, DivergenceError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events

Events = list[dict[str, Any]]


def followed(sim: InProcess) -> tuple[list[Any], Events, list[int]]:
    """Scores, events without steps, and the rounds after which a checkpoint is due."""
    events: Events = []
    saved: list[int] = []
    scores = run_rounds(sim, observe=events.append, checkpoint=lambda done, clock: saved.append(done))
    return scores, [event for event in events if event["event"] != "step"], saved


def test_rounds_evaluations_and_checkpoints_come_when_they_are_due(federate: Any) -> None:
    changes = {"training.rounds": 5, "training.local_steps": 1, "evaluation.every": 2, "checkpoints.every": 3}
    sim = federate("fedavg", changes=changes)
    scores, events, saved = followed(sim)
    assert [(e["event"], e["round"]) for e in events] == [
        ("evaluation", 0), ("round", 1), ("round", 2), ("evaluation", 2), ("round", 3), ("round", 4), ("evaluation", 4),
        ("round", 5), ("evaluation", 5),
    ]  # fmt: skip
    assert saved == [3, 5]
    assert [score.perplexity for score in scores] == [u["test_perplexity"] for u in events[-1]["users"].values()]
    assert events[-1]["mean_test_perplexity"] == fmean(score.perplexity for score in scores)


def test_the_first_evaluation_is_that_of_the_base_and_can_be_left_out(federate: Any) -> None:
    """Every adapter starts as nothing, so a curve starts where the pretrained model is."""
    base = followed(federate("pretrained"))[1][0]["users"]
    for method in ("fedavg", "comigs-1g1s", "centralized"):
        first = followed(federate(method))[1][0]
        assert (first["event"], first["round"], first["iterations"]) == ("evaluation", 0, 0)
        for user, scores in first["users"].items():
            assert scores["test_loss_nats"] == pytest.approx(base[user]["test_loss_nats"], rel=1e-7)
    kept = followed(federate("fedavg", changes={"evaluation.first": False}))[1]
    assert [e["event"] for e in kept] == ["round", "round", "evaluation"]


def test_a_step_is_told_for_every_iteration_of_every_cohort(federate: Any) -> None:
    sim = federate("local", changes={"runtime.users_per_step": 2})
    events: Events = []
    run_rounds(sim, observe=events.append)
    steps = [event["advance"] for event in events if event["event"] == "step" and event["round"] == 1]
    assert sum(steps) == 2 * sim.clients.plan.training.local_steps


def test_a_round_tells_tokens_losses_and_bytes_of_those_who_took_part(federate: Any) -> None:
    sim = federate("fedavg", changes={"training.participation": 0.5})
    _, events, _ = followed(sim)
    first = next(event for event in events if event["event"] == "round")
    assert len(first["train_loss_nats"]) == 2
    assert first["tokens"] == 2 * 2 * 2 * 16  # users, steps, sequences, context
    assert first["upload_bytes"] == 2 * sim.clients.upload_bytes()[0] > 0
    assert first["download_bytes"] == 0  # who starts has what the server has
    second = next(event for event in events if event["event"] == "round" and event["round"] == 2)
    sent = packed_bytes(sim.server.download(("ann", "bob")))
    assert second["download_bytes"] == sum(sent)
    assert 0 < sent[0] < sim.clients.upload_bytes()[0]  # without a loss


def test_the_loss_of_a_round_is_the_mean_over_its_steps(federate: Any) -> None:
    whole, stepwise = federate("local").clients, federate("local").clients
    everyone = [0, 1, 2]
    found = train(whole, everyone, 0).losses
    cohort, active = stepwise.cohort(everyone, 0), torch.ones(3, dtype=torch.bool)
    steps = [stepwise.steps.take_local_step(cohort, stepwise.phases, step, active) for step in range(2)]
    assert found == pytest.approx(dict(enumerate(torch.stack(steps).mean(0).tolist())))
    first = stepwise.model.losses(
        whole.model.layout.views(federate("local").clients.state.rows),
        everyone,
        whole.batch_source.draw(everyone, whole.phases[0], 0, 0, 0),
    )
    assert steps[0].tolist() == pytest.approx(first[0].mean((1, 2)).tolist())


@pytest.mark.parametrize("which", ["local", "exchanged"])
def test_the_run_ends_with_the_models_that_were_evaluated(federate: Any, which: str) -> None:
    sim = federate("fedavg", changes={"evaluation.model": which})
    scores, _, _ = followed(sim)
    assert [s.loss_nats for s in sim.clients.evaluate()] == [s.loss_nats for s in scores]
    equal = torch.equal(sim.clients.state.rows[0], sim.clients.state.rows[1])
    assert equal == (which == "exchanged")


def test_without_rounds_there_is_one_evaluation_and_nothing_is_sent(federate: Any) -> None:
    sim = federate("pretrained")
    scores, events, saved = followed(sim)
    assert [(e["event"], e["round"]) for e in events] == [("evaluation", 0)]
    assert saved == []
    assert sim.clients.upload_bytes() == sim.clients.trainable_parameters() == [0, 0, 0]
    assert (sim.clock.upload_bytes, sim.clock.download_bytes) == (0, 0)
    untrained = federate("comigs-2g")
    assert [s.loss_nats for s in scores] == pytest.approx([s.loss_nats for s in untrained.clients.evaluate()], rel=1e-9)


# ---------------------------------------------------------------- the pooled upper bound


def test_the_pooled_trainer_has_everybodys_text_and_batch(federate: Any) -> None:
    sim = federate("centralized")
    clients = sim.clients
    assert [trainer.name for trainer in clients.trainers] == ["everyone"]
    assert torch.equal(clients.trainers[0].train, torch.cat([user.train for user in clients.users]))
    assert clients.batch_source.draw([0], clients.phases[0], 0, 0, 0).shape == (
        1,
        3 * clients.plan.training.batch_size,
        17,
    )
    local = federate("local")
    tokens = [followed(each)[1][1]["tokens"] for each in (sim, local)]
    assert tokens[0] == tokens[1]


def test_the_pooled_model_is_evaluated_on_each_users_own_test(federate: Any) -> None:
    sim = federate("centralized")
    scores, events, _ = followed(sim)
    assert list(events[-1]["users"]) == ["ann", "bob", "cem"]
    assert len({score.loss_nats for score in scores}) == 3
    # The same numbers as those of a federation in which everybody holds the pooled model.
    copies = federate("local").clients
    copies.state.rows[:] = sim.clients.state.rows
    assert [s.loss_nats for s in copies.evaluate()] == pytest.approx([s.loss_nats for s in scores], rel=1e-9)
    assert sim.clients.upload_bytes() == [0, 0, 0]
    assert sim.clients.trainable_parameters() == copies.trainable_parameters()


@pytest.mark.parametrize("participation", [0.4, [["cem"], ["ann", "bob"]]], ids=["fraction", "list"])
def test_participation_is_nothing_to_the_pooled_trainer(recipe_file: Path, participation: Any) -> None:
    changes = {"method": "centralized", "training.rounds": 2, "training.participation": participation}
    done = api.run(load_recipe(recipe_file).with_changes(changes))
    assert done.metrics["rounds"] == 2


# ---------------------------------------------------------------- divergence


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file).with_changes({"method": "fedavg"})


def stopped(recipe: Recipe, folder: Path, spoil: Callable[[InProcess, dict[str, Any]], None] | None = None) -> str:
    """The one line with which a run stops; ``spoil`` may touch the federation at every event."""
    run_data = prepare(recipe)
    sim = session.build(recipe, run_data)
    inputs = describe(run_data, recipe)
    observers = [lambda event: spoil(sim, event)] if spoil else []
    with open_folder(folder, recipe, inputs, resume=False, force=False), pytest.raises(DivergenceError) as caught:
        session.execute(sim, recipe, folder, observers=observers)
    assert isinstance(caught.value, ComingleError)
    assert "\n" not in str(caught.value)
    assert not (folder / "metrics.json").exists()
    return str(caught.value)


def test_a_rate_beyond_reason_is_named_with_user_and_round(recipe: Recipe, tmp_path: Path) -> None:
    message = stopped(recipe.with_changes({"training.experts.learning_rate": 1e30}), tmp_path / "run")
    assert message.startswith("user 'ann': training loss is nan in round 1, local step 2; ")
    assert "training.experts.learning_rate" in message
    assert "checkpoint" not in message
    assert list_checkpoints(tmp_path / "run") == []


def test_the_last_good_checkpoint_is_kept_and_can_be_gone_on_with(recipe: Recipe, tmp_path: Path) -> None:
    def spoil(sim: InProcess, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 3 and event["advance"]:
            sim.clients.state.rows[1] = math.nan

    message = stopped(recipe, tmp_path / "run", spoil)
    assert message.startswith("user 'bob': training loss is nan in round 3, local step 2; ")
    assert message.endswith("round-0002")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["round-0001", "round-0002"]
    resumed = api.run(recipe, out=tmp_path / "run", resume=True)
    whole = api.run(recipe)
    assert resumed.metrics["users"] == whole.metrics["users"]


def test_tensors_that_break_in_the_last_step_of_a_round_are_neither_shared_nor_saved(
    recipe: Recipe, tmp_path: Path
) -> None:
    """The losses of that round were all finite; in the exchange, the others would catch it."""

    def spoil(sim: InProcess, event: dict[str, Any]) -> None:
        spoil.steps += event["event"] == "step" and event["round"] == 2 and event["advance"]
        if spoil.steps == recipe.training.local_steps:
            sim.clients.state.rows[1, 5] = math.inf

    spoil.steps = 0
    message = stopped(recipe, tmp_path / "run", spoil)
    assert message.startswith("user 'bob': ")
    assert "round 2" in message
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["round-0001"]


def test_a_model_that_breaks_only_in_evaluation_is_not_a_result(recipe: Recipe, tmp_path: Path) -> None:
    """After one step with a rate beyond reason, the training loss was still that of the base."""
    changes = {"training.experts.learning_rate": 1e30, "training.rounds": 1, "training.local_steps": 1}
    message = stopped(recipe.with_changes(changes), tmp_path / "run")
    assert message.startswith("user 'ann': test loss is nan after round 1")
    assert list_checkpoints(tmp_path / "run") == []
    events = [event["event"] for event in read_events(tmp_path / "run")]
    assert events == ["start", "evaluation", "round"]


# ---------------------------------------------------------------- metrics


def test_metrics_add_up(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file)
    done = api.run(recipe, out=tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics == done.metrics
    users = metrics["users"].values()
    assert metrics["mean_test_perplexity"] == pytest.approx(sum(u["test_perplexity"] for u in users) / 3, rel=1e-12)
    for user in users:
        assert user["test_perplexity"] == pytest.approx(math.exp(user["test_loss_nats"]), rel=1e-12)
        assert user["test_tokens"] == 59
        # The last of the four exchanges does not take place: the model that counts is the local one.
        assert 3 / 4 * user["upload_bytes_per_round"] == metrics["upload_bytes_per_user_round"]
        assert user["trainable_parameters"] == metrics["trainable_parameters"]
        assert user["train_tokens"] > user["valid_tokens"] > 16
    events = list(read_events(tmp_path / "run"))
    rounds = [event for event in events if event["event"] == "round"]
    assert metrics["tokens_per_second"] == pytest.approx(
        sum(e["tokens"] for e in rounds) / sum(e["seconds"] for e in rounds), rel=1e-6
    )
    assert sum(e["upload_bytes"] for e in rounds) == 4 * 3 * metrics["upload_bytes_per_user_round"]
    assert [event["event"] for event in events] == [
        "start", "evaluation", "round", "round", "evaluation", "round", "round", "evaluation", "end"
    ]  # fmt: skip


def test_a_finished_run_can_be_opened_and_talked_to(recipe_file: Path, tmp_path: Path) -> None:
    done = api.run(recipe_file, out=tmp_path / "run")
    opened = api.load(tmp_path / "run")
    assert opened.users == ["ann", "bob", "cem"]
    assert opened.metrics == done.metrics
    said = [run.user("bob").generate("a", max_new_tokens=8) for run in (done, opened)]
    assert said[0] == said[1]
    tokens = opened.federation.clients.users[1].test
    assert opened.user("bob").score(tokens, context=16).perplexity == pytest.approx(
        done.metrics["users"]["bob"]["test_perplexity"], rel=1e-5
    )
    with pytest.raises(ComingleError, match=r"'dan'.*ann, bob, cem"):
        opened.user("dan")


def test_without_a_folder_nothing_is_written(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    api.run(recipe_file, method="local", seed=3)
    assert list((tmp_path / "empty").iterdir()) == []


def test_weights_by_tokens_favour_who_has_more(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"method": "fedavg", "evaluation.model": "exchanged"})
    uniform = api.run(recipe).metrics["users"]
    weighted = api.run(recipe.with_changes({"training.weighting": "tokens"})).metrics["users"]
    assert uniform != weighted
