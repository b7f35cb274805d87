"""Questions on the command line: preview, compare, report, and what is not for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from comingle.config import load_recipe
from comingle.cost.records import count_flops
from comingle.runs.session import build, prepare
from comingle.training.client import train
from comingle_papers.questions import LABELS, NOTE, QUESTIONS, build_prompt


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """XNLI in two languages, 9 questions each, beside a recipe that names its folder relatively."""
    rows = [
        {"id": i, "lang": who, "premise": f"{who}{i}", "hypothesis": "h", "label": LABELS[i % 3]}
        for who in ("en", "de")
        for i in range(9)
    ]
    (tmp_path / "questions").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "questions" / "xnli.jsonl").write_text(lines, encoding="utf-8")
    questions = {"name": "xnli", "path": "questions", "languages": ["en", "de"], "train": 4, "valid": 2, "test": 3}
    content = {
        "base": "random:llama",
        "method": "fedavg",
        "data": {"questions": questions},
        "adapters": {"rank": 2},
        "training": {"rounds": 2, "batch_size": 4, "context": 190},
        "evaluation": {"every": 1},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    (tmp_path / "xnli.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return tmp_path / "xnli.yaml"


def test_the_preview_counts_questions_and_their_tokens(comingle: Any, recipe: Path) -> None:
    found = comingle("data", recipe)
    assert found.code == 0, found.err
    longest = len(build_prompt(QUESTIONS["xnli"].instruction, "Premise: en0\nHypothesis: h")) + len("contradiction") + 1
    shortest = longest - len("contradiction") + len("neutral")
    rows = [line.split() for line in found.out.splitlines() if line.split()[:1] in (["en"], ["de"])]
    assert [row[0] for row in rows] == ["en", "de"]
    for row in rows:  # tokens are bytes
        assert [*row[1:4], *row[5:]] == ["4", "2", "3", str(longest), str(len("contradiction") + 1)]
        assert shortest < int(row[4]) < longest


@pytest.mark.slow
def test_methods_are_compared_by_accuracy_and_reported_with_rouge(comingle: Any, recipe: Path) -> None:
    out = recipe.parent / "out"
    found = comingle("compare", recipe, "--methods", "local,fedavg,comigs-1g1s", "--seeds", 0, "--out", out)
    assert found.code == 0, found.err
    assert "test accuracy of each user (per cent, higher is better)" in " ".join(found.out.split())
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert [set(row) >= {"mean_test_accuracy", "samples_per_second"} for row in table["methods"]] == [True] * 3
    found = comingle("show", out / "fedavg-seed0")
    assert found.code == 0, found.err
    assert "test accuracy by round" in found.out
    page = recipe.parent / "report.html"
    found = comingle("report", out, "--out", page)
    assert found.code == 0, found.err
    text = page.read_text(encoding="utf-8")
    assert "Test accuracy at the last evaluation (per cent, higher is better)" in text
    assert "rouge1" in text
    assert "samples/s" in text


def test_what_was_interrupted_is_resumed_from_the_command_line(comingle: Any, recipe: Path) -> None:
    out = recipe.parent / "run"
    assert comingle("run", recipe, "--out", out).code == 0
    metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    (out / "metrics.json").unlink()
    found = comingle("run", "--resume", out)
    assert found.code == 0, found.err
    again = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    assert again["users"] == metrics["users"]


@pytest.mark.parametrize(
    ("verb", "change", "said"),
    [
        ("run", "data.questions.languages=[en, fr]", "no row in language 'fr'; every user needs some"),
        ("run", "data.questions.languages=[]", "data.questions.languages: List should have at least 1 item"),
        ("run", "data.questions.test=9", "have at most 190 tokens (training.context) in each of en, de; train 4, "),
        ("run", "training.context=20", "xnli: 0 of 9 questions have at most 20 tokens (training.context)"),
        ("run", "training.local_steps=3", "training.local_steps: got 3"),
        ("run", "base=net:mlp", "base: got 'net:mlp' for text; allowed: a language model"),
        (
            "run",
            "method=ensemble",
            "method ensemble: mixes whole models",
        ),
        ("cost", "data.questions.name=xnly", "no questions 'xnly'. Did you mean 'xnli'?"),
    ],
)
def test_mistakes_are_said_in_one_line(comingle: Any, recipe: Path, verb: str, change: str, said: str) -> None:
    found = comingle(verb, recipe, "--set", change)
    assert found.code == 2
    assert said in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert not (recipe.parent / "runs").exists()


@pytest.mark.slow
def test_questions_cost_at_most_what_text_does(comingle: Any, recipe: Path) -> None:
    """Four questions a user in batches of four, twice a round; who has everybody's has twice as many."""
    changes = ("--set", "training.local_epochs=2", "--json")
    found = comingle("cost", recipe, "--method", "fedavg,centralized", *changes)
    assert found.code == 0, found.err
    plan = json.loads(found.out)
    assert (plan["users"], plan["local_steps"], plan["note"]) == (["en", "de"], 2, NOTE)
    text = ("--set", "data={users: {en: text, de: text}}", "--json")
    for method, steps in (("fedavg", 2), ("centralized", 4)):
        same = comingle("cost", recipe, "--method", method, *text, "--set", f"training.local_steps={steps}")
        (cost,) = [one for one in plan["methods"] if one["method"] == method]
        (alike,) = json.loads(same.out)["methods"]
        assert cost["users"] == alike["users"]
    run = comingle("run", recipe, "--set", "training.local_epochs=2", "--out", recipe.parent / "run")
    assert run.code == 0, run.err
    metrics = json.loads((recipe.parent / "run" / "metrics.json").read_text())["users"].values()
    (user,) = plan["methods"][0]["users"]
    assert {one["trainable_parameters"] for one in metrics} == {user["trainable_parameters"]}
    assert {one["upload_bytes_per_round"] for one in metrics} == {user["upload_bytes"]}
    read = load_recipe(recipe).with_changes({"training.local_epochs": 2})
    clients = build(read, prepare(read)).clients
    spent, most = count_flops(lambda: train(clients, [0], 0)), user["training_flops_per_round"]["total"]
    assert 0.5 * most < spent < most
    assert NOTE in " ".join(comingle("cost", recipe).out.split())


def test_a_method_that_validates_asks_for_questions_to_validate_with(comingle: Any, recipe: Path) -> None:
    found = comingle("run", recipe, "--set", "method=pcl", "--set", "data.questions.valid=0")
    assert found.code == 2
    assert re.search(r"user 'en': valid .*0 questions.*data\.questions\.valid", found.err)
