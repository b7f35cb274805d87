"""Finished runs that end worse than they began, or whose mixtures have not moved, say so; privacy plans are judged."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import comingle
from comingle.cli import app
from comingle.config import load_recipe
from comingle.config.settings import PrivacySection
from comingle.methods import make
from comingle.privacy.mechanisms import Central, Local
from comingle.reports.comparisons import compare_runs
from comingle.reports.tables import markdown, render_run
from comingle.training.rounds import Evaluations, _warn_of_mixtures, outcome_warnings
from comingle.utils.records import read_metrics


def samples(seed: int) -> Any:
    """Points of one line, a little noise: easy to fit, and easy to leave."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def net(*shape: Any) -> torch.nn.Module:
    layer = torch.nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(0.05)  # nearly the answer
    return layer


def run(out: Path | None = None, *, base: Any = net, **changes: Any) -> Any:
    training = {"rounds": 3, "batch_size": 8, "experts": {"name": "sgd", "learning_rate": 0.01}}
    recipe = {"training": training, "data": {"loss": "mse"}, "evaluation": {"model": "exchanged"}}
    users = {name: samples(seed) for seed, name in enumerate("abc")}
    return comingle.run({**recipe}, users=users, base=base, out=out, **{"method": "fedavg", **changes})


def shown(metrics: dict[str, Any]) -> str:
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render_run(metrics))
    return console.export_text()


def test_a_run_that_ends_worse_than_it_began_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "warnings" not in run().metrics
    caplog.clear()
    bad = run(tmp_path / "bad", **{"training.learning_rate": 2.0})
    (warning,) = bad.metrics["warnings"]
    assert re.search(r"mean test loss .*before training; .*3 of 3 users", warning)
    assert "training.experts.learning_rate" in warning
    assert f"fedavg: {warning}" in caplog.messages
    kept = read_metrics(tmp_path / "bad")
    assert kept["warnings"] == [warning]
    assert warning in shown(kept)
    assert warning in markdown(compare_runs([tmp_path / "bad"]))


def test_a_resumed_run_says_it_too(tmp_path: Path) -> None:
    rate = {"training.learning_rate": 2.0, "checkpoints.every": 1}
    (told,) = run(tmp_path / "whole", **rate).metrics["warnings"]

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed", observers=[stop], **rate)
    assert run(tmp_path / "resumed", resume=True, **rate).metrics["warnings"] == [told]


def test_privacy_is_shown_and_blamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    privacy = {"noise_multiplier": 30.0, "clip_norm": 1.0, "accountant": "rdp", "noise": "reproducible"}
    done = run(tmp_path / "private", privacy=privacy)
    (plan, *_) = [line for line in caplog.messages if line.startswith("privacy: ")]
    assert "mechanism: example" in plan
    (warning,) = done.metrics["warnings"]
    assert "(epsilon " in warning
    assert "privacy.mechanism: example" in warning
    text = shown(read_metrics(tmp_path / "private"))
    spent = done.metrics["privacy"]["epsilon"]
    assert f"privacy: central, epsilon {spent:.4g} at delta 1e-05, noise multiplier 30, clip norm 1, 3 releases" in text
    assert "fedavg: privacy central, epsilon" in markdown(compare_runs([tmp_path / "private"]))


@pytest.mark.parametrize(
    ("mechanism", "users", "numbers", "works"),
    [
        ("central", 4, 500_000, False),
        ("central", 1000, 500_000, True),
        ("central", 4, 100, True),
        ("local", 1000, 500_000, False),
        ("local", 1000, 4_000, True),
    ],
)
def test_a_plan_is_judged_by_noise_users_and_parameters(mechanism: Any, users: int, numbers: int, works: bool) -> None:
    names = tuple(f"user-{i}" for i in range(users))
    privacy = PrivacySection(mechanism=mechanism, noise_multiplier=1.0)
    mechanism_class = {"central": Central, "local": Local}[mechanism]
    made = mechanism_class(privacy=privacy, participation=1.0, users=names, key="seed 0")
    told = made.warn(numbers, rounds=20)
    assert (told is None) == works
    if told is not None:
        needed = int(re.findall(r"([\d,]+) users", told)[-1].replace(",", "")) + 1
        enough = replace(made, users=tuple(f"user-{i}" for i in range(needed)))
        assert enough.warn(numbers, rounds=20) is None


def test_no_better_round_than_the_start_says_so() -> None:
    changes = {"training.learning_rate": 2.0, "evaluation.select": "best"}
    (warning,) = run(**changes).metrics["warnings"]
    assert warning.startswith("no round is better than the start")


def test_mixtures_that_stay_uniform_say_so() -> None:
    floral: dict[str, Any] = {"method": {"name": "floral", "clusters": 2}, "training.learning_rate": 0.001}
    slow: Any = {"training.router": {"name": "sgd", "learning_rate": 1e-9}}
    fast: Any = {"training.router": {"name": "adamw", "learning_rate": 0.5}}
    stuck = run(**floral, **slow)
    (warning,) = stuck.metrics["warnings"]
    assert re.search(r"^mixtures .*\b2 components .*0\.5\b", warning)
    assert "warnings" not in run(**floral, **fast).metrics
    assert "warnings" not in run(**{**floral, "method": {"name": "local-adaptor"}}).metrics


def test_merging_weights_that_stay_uniform_say_so() -> None:
    def warnings_of(**settings: Any) -> list[str]:
        method = {"name": "fedmerge", "models": 2, **settings}
        made = run(method=method, base=lambda *_: torch.nn.Linear(3, 1))  # models with different initial weights
        return made.metrics.get("warnings", [])

    (warning,) = warnings_of(weight_step=1e-4)
    assert re.search(r"^mixtures have stayed uniform: .*\b2 components .*method.weight_step", warning)
    assert not warnings_of(weight_step=0.3)
    assert not warnings_of(weight_step=0.0)  # frozen weights are uniform on purpose
    assert not warnings_of(softmax=False, weight_step=0.3)


@pytest.mark.parametrize(
    ("scores", "is_uniform"),
    [
        ({"ada": [[0.52, 0.48], [0.5, 0.5]], "ben": [[0.45, 0.55], [0.5, 0.5]]}, True),
        ({"ada": [[0.52, 0.48], [0.5, 0.5]], "ben": [[0.45, 0.55], [0.2, 0.8]]}, False),
        ({"ada": [[0.35, 0.33, 0.32]], "ben": [[1.0]]}, True),  # Ben has a single expert, hence no router
        ({"ben": [[1.0]]}, False),
        ({}, False),
    ],
)
def test_mean_gates_that_are_uniform_are_said(scores: dict[str, list[list[float]]], is_uniform: bool) -> None:
    events: list[Any] = [{"event": "evaluation", "round": done, "expert_scores": scores} for done in (1, 2)]
    found = list(_warn_of_mixtures(make("comigs-1g1s"), Evaluations(events)))
    assert [warning[:27] for warning in found] == ["routers have stayed uniform"] * is_uniform
    assert not _warn_of_mixtures(make("fedavg"), Evaluations(events))  # has no trained router


@pytest.mark.slow
def test_token_routers_that_stay_uniform_say_so(tmp_path: Path, write_recipe: Any) -> None:
    def warnings_of(learning_rate: float, every: int = 1) -> list[str]:
        changes = {
            "method": {"name": "comigs-1g1s", "router_every": every, "router_steps": 4},
            "training.router.learning_rate": learning_rate,
            "training.balance_weight": 0.0,
            "training.rounds": 4,
        }
        recipe = load_recipe(write_recipe(tmp_path / f"{learning_rate}-{every}")).with_changes(changes)
        return comingle.run(recipe, out=tmp_path / f"run-{learning_rate}-{every}").metrics.get("warnings", [])

    assert not [line for line in warnings_of(1e-9, every=10_000) if "uniform" in line]  # untrained, as is said already
    (warning,) = [line for line in warnings_of(1e-9) if "uniform" in line]
    assert warning.startswith("routers have stayed uniform")
    assert not [line for line in warnings_of(1.0) if "uniform" in line]
    out = tmp_path / "report.html"
    answer = CliRunner().invoke(app, ["report", str(tmp_path / "run-1e-09-1"), "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    assert "routers have stayed uniform" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("mixtures", "said"),
    [
        ([[0.3, 0.2, 0.25, 0.25]] * 2, "uniform"),
        ([[0.25] * 4, [0.5, 0.5, 0.0, 0.0]], None),
        ([[0.55, 0.45]], "uniform"),
        ([[0.65, 0.35], [0.35, 0.65]], None),
        ([[0.01, 0.97, 0.02], [0.0, 1.0, 0.0]], "number 1,"),
        ([[0.01, 0.99], [0.99, 0.01]], None),
        ([[1.0, 0.0]], None),
        ([[1.0], [1.0]], None),
    ],
)
def test_mixtures_of_one_kind_are_said(mixtures: list[list[float]], said: str | None) -> None:
    learned = {str(number): weights for number, weights in enumerate(mixtures)}
    events: list[Any] = [{"event": "evaluation", "round": done, "mixtures": learned} for done in (1, 2)]
    found = list(_warn_of_mixtures(make("floral"), Evaluations(events)))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("weights", "said"),
    [([0.0, 1.0], "to its local model"), ([1.0, 0.0], "to the global model"), ([0.5, 0.5], None)],
)
def test_stacking_says_which_model_has_all_weight(weights: list[float], said: str | None) -> None:
    mixtures = {"ada": weights, "ben": weights}
    events: list[Any] = [{"event": "evaluation", "round": done, "mixtures": mixtures} for done in (1, 2)]
    found = list(_warn_of_mixtures(make("stacking"), Evaluations(events)))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert not found or "cluster" not in found[0]


def test_measures_that_rise_are_read_the_right_way_round() -> None:
    def judged(before: float | None, after: float | None, measure: str) -> bool:
        def record(value: float | None) -> dict[str, Any]:
            return {f"mean_test_{measure}": value, "users": {"a": {f"test_{measure}": value}}}

        seen = Evaluations([{"event": "evaluation", "round": 0, **record(before)}])
        metrics = {"measure": measure, "rounds": 5, "selected_round": 5, **record(after)}
        return bool(outcome_warnings(make("fedavg"), seen, metrics))

    assert judged(0.5, 0.4, "accuracy")
    assert not judged(0.4, 0.5, "accuracy")
    assert judged(80.0, 100_000.0, "perplexity")
    assert judged(80.0, float("inf"), "perplexity")
    assert judged(80.0, None, "perplexity")
    assert not judged(80.0, 80.0, "perplexity")
    assert not judged(None, 80.0, "perplexity")


def test_nets_that_learn_nothing_say_that_they_are_at_chance(caplog: pytest.LogCaptureFixture) -> None:
    def of_class(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        classes = torch.arange(60) % 3
        noise = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed))
        return 4 * torch.eye(3)[classes] + noise, classes

    def made(bias: float) -> torch.nn.Module:
        first, last = torch.nn.Linear(3, 8), torch.nn.Linear(8, 3)
        torch.nn.init.constant_(first.bias, bias)
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)
        return torch.nn.Sequential(first, torch.nn.ReLU(), last)

    def trained(bias: float, method: str = "fedavg") -> dict[str, Any]:
        training = {"rounds": 5, "batch_size": 6, "experts": {"name": "sgd", "learning_rate": 0.01}}
        users = {name: of_class(seed) for seed, name in enumerate("ab")}
        return comingle.run({"training": training}, users=users, base=lambda: made(bias), method=method).metrics

    dead_relu = -100.0
    (warning,) = trained(dead_relu)["warnings"]
    assert warning.startswith("all users' models are at chance: test losses are within 1% of ln 3, ")
    assert "training.experts.learning_rate" in warning
    assert f"fedavg: {warning}" in caplog.messages
    assert "warnings" not in trained(0.0)
    assert "warnings" not in trained(dead_relu, "pretrained")


def test_an_accuracy_above_chance_is_not_at_chance() -> None:
    def judged(accuracy: float, loss: float | None, num_classes: int | None = 10) -> bool:
        users = {"a": {"test_accuracy": accuracy, "test_loss": loss}}
        metrics = {"measure": "accuracy", "rounds": 5, "selected_round": 5, "users": users}
        return bool(outcome_warnings(make("fedavg"), Evaluations(), metrics, num_classes=num_classes))

    assert judged(0.1, 2.31)
    assert not judged(0.2, 2.31)
    assert not judged(0.1, 2.2)
    assert not judged(0.1, None)
    assert not judged(0.1, 2.31, None)
