"""Ending with the round whose validation loss was the lowest, instead of with the last."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from comingle.config import Recipe, parse_recipe
from comingle.data.samples.samples import Split, UserSamples
from comingle.reports.page import user_records
from comingle.reports.runs import Entry, final_result, read_run
from comingle.runs import api
from comingle.training.client import finetuned
from comingle.training.kinds.samples import PersonalNet
from comingle.utils.errors import DataError
from comingle.utils.records import read_events


class StoppedError(Exception):
    pass


def recipe_of(method: str = "local", changes: dict[str, Any] | None = None) -> Recipe:
    """A few noisy samples that nets of many parameters learn by heart: validation losses fall, then rise."""
    sgd = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "schedule": "constant", "weight_decay": 0}
    content = {
        "method": method,
        "data": {"task": {"name": "mlp-norm", "users": 3, "clusters": 3, "test_samples": 40, "valid": 0.4}},
        "training": {"rounds": 12, "batch_size": 8, "weighting": "samples", "experts": sgd},
        "evaluation": {"every": 2, "model": "exchanged", "select": "best"},
        "checkpoints": {"every": 1},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    return parse_recipe(content).with_changes({"data.task.fraction": 0.08, **(changes or {})})


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if event["event"] == "evaluation"]


def loss_of(run: experiment.Run, name: str, split: Split) -> float:
    """What a user's net, taken out of the run, loses on the user's samples."""
    net, user = run.user(name), next(user for user in run.federation.clients.users if user.name == name)
    assert isinstance(net, PersonalNet)
    assert isinstance(user, UserSamples)
    return net.evaluate(user.split(split)).mean_loss


@pytest.mark.parametrize("method", ["local", "fedavg+", "ifca"])
@pytest.mark.sampled(1)
def test_a_run_ends_with_its_best_round(method: str, tmp_path: Path) -> None:
    """Everything that can be asked of it is of that round: a run of so many rounds that ends with its last agrees."""
    run = api.run(recipe_of(method), out=tmp_path / "best")
    found = evaluations(tmp_path / "best")
    lowest = min(found, key=lambda event: event["mean_valid_loss"])
    metrics = run.metrics
    assert metrics["selected_round"] == lowest["round"]
    assert metrics["mean_test_loss"] == lowest["mean_test_loss"] != found[-1]["mean_test_loss"]
    assert lowest["mean_valid_loss"] == pytest.approx(mean(lowest["valid_loss"].values()))
    assert {name: user["valid_loss"] for name, user in metrics["users"].items()} == lowest["valid_loss"]
    records = user_records([tmp_path / "best"])  # rows of the CSV
    assert {record["user"]: record["valid_loss"] for record in records} == lowest["valid_loss"]
    changes = {"training.rounds": lowest["round"], "evaluation.select": "last"}
    short = api.run(recipe_of(method).with_changes(changes))
    for name in run.users:  # a tuned model's last batches are drawn for the round after
        expected = pytest.approx(metrics["users"][name]["test_loss"], rel=1e-6)
        assert short.metrics["users"][name]["test_loss"] == expected
    with finetuned(short.federation.clients):
        held_out = mean(short.federation.clients.validate().values())
    assert held_out == pytest.approx(lowest["mean_valid_loss"], rel=1e-6)
    opened = api.load(tmp_path / "best")
    for name in run.users:
        expected = pytest.approx(metrics["users"][name]["test_loss"], rel=1e-5)
        assert loss_of(opened, name, "test") == expected
    record = read_run(tmp_path / "best")
    assert record.final_evaluation.round == lowest["round"]
    told = final_result(Entry(label="best", runs=(record,)))
    assert told is not None
    assert told.mean == pytest.approx(metrics["mean_test_loss"])


def test_the_validation_loss_is_the_mean_over_users() -> None:
    run = api.run(recipe_of())
    sim = run.federation.clients
    own = [loss_of(run, name, "valid") for name in run.users]
    assert list(sim.validate().values()) == pytest.approx(own, rel=1e-5)
    assert run.metrics["selected_round"] < 12


def test_a_resumed_run_knows_an_earlier_best(tmp_path: Path) -> None:
    """Stopped after the best round, before the next checkpoint."""

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 11 and event["advance"]:
            raise StoppedError

    whole = api.run(recipe_of(), out=tmp_path / "whole")
    assert 0 < whole.metrics["selected_round"] < 10
    with pytest.raises(StoppedError):
        api.run(recipe_of(), out=tmp_path / "parts", observers=[stop])
    resumed = api.run(recipe_of(), out=tmp_path / "parts", resume=True)
    assert resumed.metrics["users"] == whole.metrics["users"]
    assert resumed.metrics["selected_round"] == whole.metrics["selected_round"]
    assert evaluations(tmp_path / "parts") == evaluations(tmp_path / "whole")
    again = api.run(recipe_of(), out=tmp_path / "whole", resume=True)
    assert again.metrics["users"] == whole.metrics["users"]


def test_without_validation_data_there_is_nothing_to_select_by() -> None:
    with pytest.raises(DataError, match=r"evaluation.select: best .*data\.task\.valid"):
        api.run(recipe_of(changes={"data.task.valid": 0}))


def test_when_models_are_evaluated_decides_only_on_what_is_selected() -> None:
    often = {"evaluation.every": 1}
    assert recipe_of().fingerprint != recipe_of(changes=often).fingerprint
    last = {"evaluation.select": "last"}
    assert recipe_of(changes=last).fingerprint == recipe_of(changes={**last, **often}).fingerprint
    assert "select" not in json.dumps(recipe_of(changes=last).result_content)
