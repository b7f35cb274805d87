"""``comingle join`` and ``comingle advise``, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def eve(tmp_path: Path) -> Path:
    path = tmp_path / "eve.txt"
    path.write_text("\n\n".join(f"Paragraph {i} is one of many that eve wrote by herself." for i in range(60)))
    return path


def test_a_newcomers_run_is_told_and_used(comingle: Any, run: Path, eve: Path, tmp_path: Path) -> None:
    said = comingle("join", run, "--name", "eve", "--data", eve, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    written = json.loads((tmp_path / "out" / "joined.json").read_text())
    for row in ("pretrained", "local", "shared", "joined"):
        assert f"{written['rows'][row]['test_perplexity']:,.2f}" in said.out
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["users"].keys() == {"eve"}
    export = comingle("export", tmp_path / "out", "--user", "eve", "--to", tmp_path / "model")
    assert export.code == 0, export.err
    again = comingle("join", run, "--name", "eve", "--data", eve, "--out", tmp_path / "out")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "exists" in again.err


def test_a_name_is_no_path(
    comingle: Any, run: Path, eve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    said = comingle("join", run, "--name", "x/../../../eve", "--data", eve, "--rounds", 1, "--quiet")
    assert said.code == 0, said.err
    assert [path.name for path in (tmp_path / "here" / "runs").iterdir()] == ["run-x%2F..%2F..%2F..%2Feve"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--name", "bob", "--data", "eve.txt"), "--name: got 'bob'"),
        (("--name", "eve", "--data", "nowhere.txt"), "nowhere.txt"),
        (("--name", "eve", "--data", "short.txt"), "user 'eve'"),
        (("--name", "eve", "--data", "chats.jsonl"), "chats.jsonl"),
    ],
)
def test_mistakes_of_joining_are_one_line(
    comingle: Any, run: Path, eve: Path, options: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(eve.parent)
    Path("short.txt").write_text("Too short.")
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    before = sorted(path.name for path in eve.parent.iterdir())
    answer = comingle("join", run, *options, "--out", eve.parent / "out")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert said in answer.err
    assert sorted(path.name for path in eve.parent.iterdir()) == before


@pytest.mark.slow
def test_advice_is_a_paragraph_and_a_table(comingle: Any, recipe: Path) -> None:
    said = comingle("advise", recipe, "--seeds", "0,1", "--rounds", 2, "--methods", "fedavg")
    assert said.code == 0, said.err
    paragraph, table = said.out.split("\n\n", 1)
    assert "runs of 2 rounds with seeds 0, 1" in paragraph
    for pair in ("ann and bob", "ann and cem", "bob and cem"):
        assert f"fedavg: {pair}" in table


def test_advice_needs_something_that_is_shared(comingle: Any, recipe: Path) -> None:
    said = comingle("advise", recipe, "--methods", "local")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert said.err.startswith("comingle: --methods: got only local; ")


def test_a_newcomer_with_a_net_is_told_of_the_net(comingle: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("ada", "ben", "eve"):
        np.savez(tmp_path / f"{name}.npz", x=draw.random((40, 6), dtype=np.float32), y=np.arange(40) % 2)
    recipe = {
        "data": {"kind": "samples", "users": {name: str(tmp_path / f"{name}.npz") for name in ("ada", "ben")}},
        "base": "net:linear",
        "method": "fedavg",
        "training": {"rounds": 2, "batch_size": 8},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    ran = comingle("run", tmp_path / "recipe.yaml", "--out", tmp_path / "run", "--quiet")
    assert ran.code == 0, ran.err
    said = comingle(
        "join", tmp_path / "run", "--name", "eve", "--data", tmp_path / "eve.npz", "--out", tmp_path / "out"
    )
    assert said.code == 0, said.err
    assert "loading the net and the users' data" in said.progress
    assert "the net with its initial weights" in said.out
    assert said.out.rstrip().endswith("a run with eve only, for comingle.load in Python")
    assert "base" not in said.out + "".join(said.progress)
