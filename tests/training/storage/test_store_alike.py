"""What is refused, left out or passed over is so in the same words as of users who are in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from populations import paint, recipe_of, require_same, said, talks, write_rows

from comingle.runs import api
from comingle.runs.session import prepare
from comingle.utils.errors import ComingleError
from resuming import final


@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_who_has_too_little_is_refused_in_the_same_words(tmp_path: Path, kind: str) -> None:
    has = {"ann": 8, "bob": 1, "cem": 1, "dag": 9}
    for name, count in has.items():
        if kind == "text":
            write_rows(tmp_path / f"{name}.jsonl", {name: said(name, count) if count > 1 else ["x"]}, "text")
        else:
            write_rows(tmp_path / f"{name}.jsonl", {name: talks(name, count)}, "messages")
    data: dict[str, Any] = {"kind": kind, "users": {name: str(tmp_path / f"{name}.jsonl") for name in has}}
    told = []
    for store in ("memory", "disk"):
        recipe = recipe_of(data, store)
        with pytest.raises(ComingleError, match=r"2 of 4 users have too (little|few)") as caught:
            api.run(recipe)
        told.append(str(caught.value))
    assert told[0] == told[1]
    skipping = {**data, "on_small_user": "skip"}
    assert list(require_same(skipping).users.names) == ["ann", "dag"]


def test_who_is_left_out_is_counted_and_stands_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that is looked at grows with their number."""
    has = {f"small-{i}": ["x"] for i in range(150)} | {name: said(name, 8) for name in ("ann", "bob")}
    path = write_rows(tmp_path / "rows.jsonl", has, "text")
    data = {"dataset": {"path": str(path), "user": "who"}, "on_small_user": "skip"}
    pytest.importorskip("datasets")
    for out in ("first", "second"):  # the second time they are not read anew
        caplog.clear()
        api.run(recipe_of(data), out=tmp_path / out)
        (line,) = [text for text in caplog.messages if "too little text" in text]
        assert "150 of 152 users" in line
        assert line.endswith("and 140 more")
        skipped = json.loads((tmp_path / out / "skipped.json").read_text())
        assert skipped.keys() == has.keys() - {"ann", "bob"}
        for told in (final(tmp_path / out), json.loads((tmp_path / out / "events.jsonl").read_text().split("\n")[0])):
            assert len(told["skipped_users"]) == 100
            assert told["skipped"] == 150


def require_refused_alike(data: Mapping[str, Any]) -> str:
    told = []
    for store in ("memory", "disk"):
        with pytest.raises(ComingleError) as caught:
            api.run(recipe_of(data, store))
        told.append(str(caught.value))
    assert told[0] == told[1]
    return told[0]


@pytest.mark.parametrize("loss", [None, "mse", "cross_entropy"])
@pytest.mark.parametrize("first", ["int64", "float32"])
def test_classes_of_one_and_numbers_of_another_are_refused(tmp_path: Path, loss: str | None, first: str) -> None:
    """Whoever comes first: the one's classes would be regressed on."""
    inputs, targets = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32), np.arange(12) % 3
    for dtype in ("int64", "float32"):
        np.savez(tmp_path / f"{dtype}.npz", inputs=inputs, targets=targets.astype(dtype))
    names = sorted(("int64", "float32"), key=lambda dtype: dtype != first)
    users = {name: str(tmp_path / f"{name}.npz") for name in names}
    require_refused_alike({"kind": "samples", "users": users} | ({"loss": loss} if loss else {}))


def test_classes_called_train_and_test(tmp_path: Path) -> None:
    """In folders that are named as splits; a folder of both is in splits."""
    pictures = {"train": 10, "test": 90}
    parts = {split: paint(tmp_path / split, pictures) for split in ("train", "test")}
    for split in ("train", "test"):
        paint(tmp_path / "bob" / split, pictures)
    for users in ({"ann": parts}, {"bob": str(tmp_path / "bob")}):
        assert require_same({"kind": "samples", "users": users}).common.labels == ("test", "train")


def test_conversations_beside_columns_that_are_no_text(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    when = datetime(2026, 11, 23)
    rows = [
        {"who": name, "messages": one, "when": when, "whens": [when], "raw": b"\xff"}
        for name in "ab"
        for one in talks(name, 6)
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    dataset = {"path": str(tmp_path / "rows.parquet"), "user": "who"}
    require_same({"kind": "conversations", "dataset": dataset})
    for columns in ({"prompt": "when", "response": "raw"}, {"messages": "when"}, {"messages": "whens"}):
        for store in ("memory", "disk"):
            with pytest.raises(ComingleError, match=r"row 1\b.*; allowed: "):
                prepare(recipe_of({"kind": "conversations", "dataset": dataset} | columns, store))


def test_a_limit_for_nobody_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = write_rows(tmp_path / "rows.jsonl", {name: said(name, 8) for name in ("ann", "bob")}, "text")
    data = {"dataset": {"path": str(path), "user": "who"}, "max_train_tokens": {"ann": 90}}
    told = require_refused_alike(data | {"max_test_tokens": {"bobb": 9, "abe": 9}})
    assert "data.max_test_tokens: no user 'bobb'" in told


def test_who_has_one_class_has_no_gradient_and_trains_as_in_memory(tmp_path: Path) -> None:
    np.savez(tmp_path / "ann.npz", inputs=np.ones((12, 5), dtype=np.float32), targets=np.zeros(12, dtype=np.int64))
    for store in ("memory", "disk"):
        data = {"kind": "samples", "users": {"ann": str(tmp_path / "ann.npz")}, "classes": ["here", "elsewhere"]}
        api.run(recipe_of(data, store), out=tmp_path / store)
    assert final(tmp_path / "memory") == final(tmp_path / "disk")
