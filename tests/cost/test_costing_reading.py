"""Costs of users on disk are those of users in memory, and their data is read one user after another."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comingle.config import Recipe, parse_recipe
from comingle.cost import planning
from comingle.cost.memory import peak_memory
from comingle.cost.planning import data_bytes, fit, local_work_by_user, plan, rehearse_nets
from comingle.data import population_files
from comingle.data.populations import LazyPopulation
from comingle.data.text import reading
from comingle.runs.session import prepare
from comingle.training.kinds.conversations import ConversationsKind
from comingle.utils.errors import ComingleError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache of the test; assume a process's own memory."""
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "measured_process_bytes", lambda *_: 1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Populations that were written; nobody reads users all at once."""
    found: list[Any] = []
    original: Callable[..., None] = population_files.write_users
    monkeypatch.setattr(
        population_files, "write_users", lambda reader, folder: (found.append(reader), original(reader, folder))
    )

    def at_once(*_: Any, **__: Any) -> Any:
        raise AssertionError("read at once")

    monkeypatch.setattr(reading, "read_users", at_once)
    monkeypatch.setattr(ConversationsKind, "read", at_once)
    return found


def recipe_of(data: dict[str, Any], store: str = "disk", **more: Any) -> Recipe:
    samples = data.get("kind") == "samples"
    content: dict[str, Any] = {
        "method": "fedavg",
        "data": data,
        "training": {"rounds": 2, "batch_size": 2} | ({} if samples else {"context": 64}),
        "runtime": {"device": "cpu", "dtype": "float32", "compile": False, "store": store},
    }
    return parse_recipe(content | ({} if samples else {"base": "random:llama?layers=1&dim=32"}) | more)


def documents(name: str, count: int) -> str:
    return "\n\n".join(f"{name} {n} " + "word " * 450 for n in range(count))


def texts(folder: Path, **counts: int) -> dict[str, str]:
    for name, count in counts.items():
        (folder / f"{name}.txt").write_text(documents(name, count) if count else "x")
    return {name: str(folder / f"{name}.txt") for name in counts}


@pytest.mark.slow
def test_text_is_read_once_for_costs_and_run(tmp_path: Path, reads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    users = texts(tmp_path, ann=3, bob=4, eve=0)
    data = {"users": users, "on_small_user": "skip"}
    (cost,) = plan(recipe_of(data)).methods
    assert [name for user in cost.users for name in user.names] == ["ann", "bob"]
    prepare(recipe_of(data))
    assert len(reads) == 1
    monkeypatch.undo()
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    told = []
    for store in ("memory", "disk"):
        with pytest.raises(ComingleError) as caught:
            plan(recipe_of({"users": users}, store))
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_one_users_text_is_in_memory_at_a_time(
    tmp_path: Path, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most = weakref.WeakSet[Any](), list[int]()
    original = reading.TextReader.encode

    def encode(turns: Any, read: Any) -> Any:
        alive.add(read)
        most.append(len(alive))
        return original(turns, read)

    monkeypatch.setattr(reading.TextReader, "encode", encode)
    plan(recipe_of({"users": texts(tmp_path, **{f"user{i}": 3 for i in range(6)})}))
    assert (len(most), max(most)) == (6, 1)


@pytest.fixture
def chats(tmp_path: Path) -> dict[str, Any]:
    counts = {"ann": 20, "bob": 11, "cem": 1}
    rows = [{"who": w, "prompt": f"{w} {n}?", "response": "yes"} for w, count in counts.items() for n in range(count)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"path": str(tmp_path / "chats.jsonl"), "user": "who"}
    split = {"valid": 0.2, "test": 0.2}
    return {"kind": "conversations", "dataset": dataset, "split": split, "on_small_user": "skip"}


def test_conversations_cost_what_they_do_in_memory(chats: dict[str, Any]) -> None:
    found = [plan(recipe_of(chats, store)) for store in ("memory", "disk")]
    assert found[0].users == found[1].users == ("ann", "bob")
    assert found[0].local_steps == found[1].local_steps == 6
    assert found[0].note == found[1].note
    assert found[0].methods[0].users == found[1].methods[0].users


def test_a_pass_is_fitted_without_reading_conversations_again(chats: dict[str, Any], reads: list[Any]) -> None:
    recipe = recipe_of(chats)
    assert fit(recipe, prepare(recipe)).sequences == 2
    assert len(reads) == 1


def test_samples_cost_what_they_do_in_memory_but_those_of_a_cohort_are_held(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, count in {"ann": 40, "bob": 30, "cem": 20}.items():
        inputs = draw.normal(size=(count, 5)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", inputs=inputs, targets=draw.integers(0, 3, count))
    data = {"kind": "samples", "users": {name: str(tmp_path / f"{name}.npz") for name in ("ann", "bob", "cem")}}
    sizes, loads = [], []
    for store in ("memory", "disk"):
        recipe = recipe_of(data, store, runtime={"device": "cpu", "store": store, "users_per_step": 1})
        population = prepare(recipe).common
        assert isinstance(population.users, LazyPopulation) == (store == "disk")
        stage = rehearse_nets(recipe, population)
        loads.append(local_work_by_user(stage.federation.clients, population))
        sizes.append(peak_memory(stage).data_bytes)
        assert stage.data_bytes == data_bytes(population, stage.steps.model.dtype)
        assert peak_memory(stage, one_user=True).data_bytes == stage.data_bytes // 3
    assert loads[0] == loads[1]
    assert sizes == [90 * 2 * (5 * 4 + 8), 30 * 2 * (5 * 4 + 8)]
