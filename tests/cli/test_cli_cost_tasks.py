"""``comingle cost`` of tasks, in samples, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def net_recipe(tmp_path: Path) -> Path:
    content = {
        "method": {"name": "floral", "clusters": 2},
        "data": {"task": {"name": "linear", "users": 4}},
        "floral": {"rank": 1},
        "training": {"rounds": 2, "batch_size": 4, "experts": {"name": "sgd", "learning_rate": 0.05}},
        "runtime": {"dtype": "float32", "device": "cpu"},
    }
    path = tmp_path / "net.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_task_is_counted_in_samples(comingle: Any, net_recipe: Path) -> None:
    answer = comingle("cost", net_recipe, "--method", "floral,centralized")
    assert (answer.code, answer.err) == (0, "")
    assert "net:linear, 33 parameters, float32 on cpu; 4 users: user-0, user-1, user-2, user-3" in answer.out
    assert "2 rounds of up to 2 steps with 4 samples for each user" in answer.out
    for word in ("adaptor", "forward / sample", "training / round", "kFLOPs", " data ", " nets ", "kB"):
        assert word in answer.out, word
    for word in ("token", "naive", "Table 3"):
        assert word not in answer.out, word
    assert "centralized: fits: needs" in answer.out


@pytest.mark.slow
def test_json_of_a_task_has_what_a_run_then_counts(comingle: Any, net_recipe: Path) -> None:
    found = json.loads(comingle("cost", net_recipe, "--json").out)
    assert comingle("run", net_recipe, "--out", net_recipe.parent / "run").code == 0
    metrics = json.loads((net_recipe.parent / "run" / "metrics.json").read_text())
    (user,) = found["methods"][0]["users"]
    assert {user["trainable_parameters"]} == {u["trainable_parameters"] for u in metrics["users"].values()}
    events = [json.loads(line) for line in (net_recipe.parent / "run" / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert len(rounds) - 1 == found["methods"][0]["exchanges"]  # local models count: the last round needs none
    assert [event["upload_bytes"] for event in rounds] == [4 * user["upload_bytes"], 0]
    assert user["forward_flops_per_sample"]["base"] == found["base_forward_flops_per_sample"] == 60
    assert found["comigs_1g1s_minus_fedavg"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--users", "0"], "--users: got 0; allowed: whole numbers from 1"),
        (["--method", "comigs-1g1s"], "method comigs-1g1s: trains no part of a net"),
        (["--set", "base=smollm2-135m"], "base: got 'smollm2-135m' for data.task; allowed: net:NAME"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, comingle: Any, net_recipe: Path) -> None:
    answer = comingle("cost", net_recipe, *words)
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1
