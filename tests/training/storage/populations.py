"""Users of every kind in files, and recipes that read them in memory or in turn."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.config import Recipe, parse_recipe
from comingle.data.populations import LazyPopulation
from comingle.data.samples.samples import SPLITS
from comingle.runs.session import prepare
from comingle.training.kinds.base import RunData

WORDS = ["tide", "lamp", "chalk", "river", "bread", "stone", "cloud", "glass"]


def said(name: str, count: int, words: int = 40) -> list[str]:
    draw = random.Random(name)
    return [f"{name} " + " ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


def write_rows(path: Path, people: Mapping[str, list[Any]], column: str) -> Path:
    """Everybody's rows, in an order in which they are mixed."""
    rows = [{"who": name, column: what} for name, has in people.items() for what in has]
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talks(name: str, count: int) -> list[Any]:
    return [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in said(name, count)]


def recipe_of(data: Mapping[str, Any], store: str = "disk", **more: Any) -> Recipe:
    content: dict[str, Any] = {
        "base": "random:llama",
        "method": "fedavg",
        "adapters": {"rank": 2},
        "training": {"rounds": 2, "local_steps": 1, "batch_size": 2, "context": 16},
        "runtime": {"device": "cpu", "dtype": "float32", "compile": False, "store": store},
    }
    if data.get("kind") == "conversations":
        content["training"] = {"rounds": 2, "batch_size": 2, "context": 300}
    if data.get("kind") == "samples":
        del content["base"], content["adapters"]
        content["training"] = {"rounds": 2, "batch_size": 4}
    return parse_recipe(content | {"data": data} | more)


def contents(part: Any) -> list[Any]:
    parts = getattr(part, "contents", (part,))
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in parts]


def both(data: Mapping[str, Any]) -> tuple[RunData, RunData]:
    return prepare(recipe_of(data, "memory")), prepare(recipe_of(data))


def require_same(data: Mapping[str, Any]) -> RunData:
    memory, disk = both(data)
    assert isinstance(disk.users, LazyPopulation)
    assert list(disk.users.names) == [user.name for user in memory.users]
    for one, other in zip(memory.users, disk.users, strict=True):
        assert type(one) is type(other)
        assert [contents(getattr(one, split)) for split in SPLITS] == [
            contents(getattr(other, split)) for split in SPLITS
        ]
    assert dict(memory.skipped) == dict(disk.skipped)
    return disk


def paint(folder: Path, classes: Mapping[str, int], count: int = 8, size: tuple[int, int] = (5, 4)) -> str:
    """Images in one colour each; a class without images is one too."""
    image = pytest.importorskip("PIL.Image")
    for name, value in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count if value else 0):
            image.new("RGB", size, (value, i, 255 - value)).save(folder / name / f"{i}.png")
    return str(folder)
