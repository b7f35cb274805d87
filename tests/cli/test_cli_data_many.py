"""``comingle data`` for many users: their distribution and its ends; everybody with --all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from comingle.cli.training import choose_rows


@pytest.fixture
def many(recipe_file: Path) -> Path:
    content = yaml.safe_load(recipe_file.read_text())
    content["data"]["users"] = {f"user{i:02}": f"texts/{i}.txt" for i in range(30)}
    for i in range(30):
        (recipe_file.parent / "texts" / f"{i}.txt").write_text("word " * (100 + i))
    (recipe_file.parent / "texts" / "29.txt").write_text("few")
    content["data"]["on_small_user"] = "skip"
    recipe_file.write_text(yaml.safe_dump(content))
    return recipe_file


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_many_users_are_summarised(
    comingle: Any, many: Path, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    out = comingle("data", many, "--set", f"runtime.store={store}").out
    for word in ("least of 29", "median of 29", "most of 29", "user00", "user02", "user26", "user28"):
        assert word in out, word
    assert "user13" not in out
    assert "too little text: 1" in out
    assert "  user29: train " in out
    assert "user00 train: word word" in out
    assert len(out.splitlines()) < 40


def test_users_in_a_file_are_listed_where_it_is_asked_for(
    comingle: Any, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    out = comingle("data", many, "--all", "--set", "runtime.store=disk").out
    assert all(f"user{i:02}" in out for i in range(30))


def test_everybody_is_listed_where_it_is_asked_for(comingle: Any, many: Path) -> None:
    out = comingle("data", many, "--all").out
    assert all(f"user{i:02}" in out for i in range(30))
    assert "median" not in out


def test_a_task_is_summarised_too(comingle: Any, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text("method: fedavg\ndata: {task: {name: linear, users: 40}}")
    assert "median of 40" in comingle("data", path).out
    assert len(comingle("data", path, "--all").out.splitlines()) > 40


def test_a_distribution_is_that_of_each_column() -> None:
    counts = {f"u{i}": [i, 100 - i] for i in range(25)}
    rows = choose_rows(counts, sort_column=0)
    assert rows[:3] == [("least of 25", ["0", "76"]), ("median of 25", ["12", "88"]), ("most of 25", ["24", "100"])]
    assert [name for name, _ in rows[3:]] == ["u0", "u1", "u2", "u22", "u23", "u24"]
    assert len(choose_rows(dict(list(counts.items())[:24]), sort_column=0)) == 24
