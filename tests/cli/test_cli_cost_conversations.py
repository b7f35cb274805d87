"""``comingle cost`` of conversations: what a run refuses, leaves out and counts, and what is known without them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

LONG = 200


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """Ann and bob have 20 conversations each, cem one; dan's six are longer than the context."""
    counts = {"ann": 20, "bob": 20, "cem": 1, "dan": 6}
    rows = [
        {"who": name, "prompt": f"{name} {number}?", "response": "y" * (LONG if name == "dan" else 3)}
        for name, count in counts.items()
        for number in range(count)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "base": "random:llama?layers=1&dim=32",
        "method": "fedavg",
        "data": {
            "kind": "conversations",
            "dataset": {"path": "chats.jsonl", "user": "who"},
            "split": {"valid": 0.2, "test": 0.2},
        },
        "training": {"rounds": 2, "batch_size": 2, "context": 128},
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
    }
    path = tmp_path / "chats.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_cost_refuses_what_a_run_refuses_in_the_same_words(comingle: Any, recipe_file: Path) -> None:
    run, cost = (comingle(verb, recipe_file) for verb in ("run", "cost"))
    assert (run.code, cost.code) == (2, 2)
    assert "2 of 4 users have too few conversations: 'cem' (no conversations in test), 'dan'" in run.err
    assert cost.err == run.err.splitlines(keepends=True)[-1]


def test_how_long_the_context_must_be_is_named_where_nothing_is_left(comingle: Any, recipe_file: Path) -> None:
    found = {verb: comingle(verb, recipe_file) for verb in ("run", "data")}
    assert [one.code for one in found.values()] == [2, 2]
    (longest,) = {tokens for one in found.values() for tokens in re.findall(r"longest has (\d+) tokens", one.err)}
    for one in found.values():
        (user,) = re.findall(r"'dan' \(.*?\)|user 'dan': .*", one.err)
        assert "6 left out" in user
        assert f"training.context to at least {longest}" in user
    assert "'cem'" not in found["data"].err.splitlines()[-1]
    context = ["--set", f"training.context={longest}"]
    assert comingle("data", recipe_file, *context).code == 0
    shorter = comingle("data", recipe_file, "--set", f"training.context={int(longest) - 1}")
    assert shorter.code == 2 or "left out" in shorter.err


@pytest.mark.slow
def test_those_who_are_left_out_cost_nothing(comingle: Any, recipe_file: Path) -> None:
    skip = ["--set", "data.on_small_user=skip"]
    found = json.loads(comingle("cost", recipe_file, *skip, "--method", "fedavg,centralized", "--json").out)
    assert found["users"] == ["ann", "bob"]
    assert found["local_steps"] == 6  # 12 of 20 conversations, in pairs
    out = recipe_file.parent / "run"
    assert comingle("run", recipe_file, *skip, "--out", out).code == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert sorted(metrics["users"]) == ["ann", "bob"]
    # Local models count, so the last of two rounds needs no exchange.
    (user,) = found["methods"][0]["users"]
    assert 2 * metrics["upload_bytes_per_user_round"] == user["upload_bytes"]
    assert metrics["upload_bytes_per_user_round"] == user["upload_bytes_per_user_round"]


@pytest.mark.slow
def test_without_conversations_a_number_of_users_is_enough(comingle: Any, recipe_file: Path) -> None:
    (recipe_file.parent / "chats.jsonl").unlink()
    run, cost = (comingle(verb, recipe_file) for verb in ("run", "cost"))
    assert (run.code, cost.code) == (2, 2)
    assert cost.err == run.err.splitlines(keepends=True)[-1]
    found = json.loads(comingle("cost", recipe_file, "--users", "3", "--json").out)
    assert found["users"] == ["user 1", "user 2", "user 3"]
    assert found["local_steps"] == 1
    assert "one batch" in found["note"]
