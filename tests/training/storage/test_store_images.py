"""Users with images and arrays who are read one after another are those who are read all at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from populations import both, paint, recipe_of, require_same

from comingle.data.populations import as_users
from comingle.data.samples import reading
from comingle.data.samples.samples import UserSamples
from comingle.runs import api
from comingle.runs.session import prepare
from comingle.utils.errors import ComingleError
from resuming import final


@pytest.mark.parametrize("loss", [None, "mse"])
def test_samples_in_arrays(tmp_path: Path, loss: str | None) -> None:
    draw = np.random.default_rng(0)
    for name, count in {"ann": 20, "bob": 12}.items():
        arrays = {"inputs": draw.normal(size=(count, 5)).astype(np.float32), "targets": draw.integers(0, 3, count)}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    data = {"kind": "samples", "users": {name: str(tmp_path / f"{name}.npz") for name in ("ann", "bob")}}
    data |= {"loss": loss} if loss else {}
    for more in ({}, {"classes": 5}):
        memory, disk = both(data | more)
        require_same(data | more)
        assert replace(memory.common, users=as_users(())) == replace(disk.common, users=as_users(()))


def test_folders_of_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Classes are those of all users, whoever is read first."""
    users: dict[str, Any] = {
        "ann": paint(tmp_path / "ann", {"cat": 10, "owl": 90}),
        "bob": paint(tmp_path / "bob", {"ape": 50, "cat": 20, "dog": 0}),
        "cem": {split: paint(tmp_path / "cem" / split, {"owl": 70, "cat": 30}) for split in ("train", "test")},
    }
    data = {"kind": "samples", "users": users}
    for more in ({}, {"image_size": [3, 6], "grayscale": True}, {"classes": ["owl", "cat", "fox", "ape", "dog"]}):
        caplog.clear()
        memory, disk = both(data | more)
        assert replace(memory.common, users=as_users(())) == replace(disk.common, users=as_users(()))
        lines = [line for line in caplog.messages if "lack some" in line]
        assert (len(lines), len({*lines})) == (2, 1)
        require_same(data | more)
    for store in ("memory", "disk"):
        api.run(recipe_of(data, store), out=tmp_path / store)
    assert final(tmp_path / "memory") == final(tmp_path / "disk")


def test_folders_of_images_are_refused_in_the_same_words(tmp_path: Path) -> None:
    np.savez(tmp_path / "dag.npz", inputs=np.zeros((9, 5), dtype=np.float32), targets=np.arange(9) % 2)
    ann, dag = paint(tmp_path / "ann", {"cat": 10, "owl": 90}), str(tmp_path / "dag.npz")
    for data in (
        {"users": {"ann": ann, "dag": dag}},
        {"users": {"dag": dag}, "grayscale": True},
        {"users": {"ann": ann}, "classes": ["cat", "dog"]},
        {"users": {"ann": ann, "bob": str(tmp_path / "nowhere")}},
        {"users": {"ann": ann, "bob": paint(tmp_path / "bob", {"cat": 10}, size=(7, 4))}},
    ):
        told = []
        for store in ("memory", "disk"):
            with pytest.raises(ComingleError) as caught:
                api.run(recipe_of({"kind": "samples", **data}, store))
            told.append(str(caught.value))
        assert told[0] == told[1]


def test_a_new_class_is_seen_though_it_has_no_images(tmp_path: Path) -> None:
    data = {"kind": "samples", "users": {"ann": paint(tmp_path / "ann", {"cat": 10, "owl": 90})}}
    assert require_same(data).common.labels == ("cat", "owl")
    (tmp_path / "ann" / "dog").mkdir()
    assert require_same(data).common.labels == ("cat", "dog", "owl")


def test_one_user_with_images_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first, to whose shapes those of the others are held."""
    users = {f"user {i}": paint(tmp_path / str(i), {"cat": 10, "owl": 90}) for i in range(6)}
    alive, most = weakref.WeakSet[Any](), list[int]()
    original = reading.split_samples

    def part(*args: Any, **more: Any) -> UserSamples:
        user = original(*args, **more)
        alive.add(user.train.inputs)
        most.append(len(alive))
        return user

    monkeypatch.setattr(reading, "split_samples", part)
    prepare(recipe_of({"kind": "samples", "users": users}))
    assert len(most) == 6
    assert max(most) <= 3
