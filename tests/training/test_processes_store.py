"""Users on disk, shared out over processes: each keeps its own, and any number goes on with what another has kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outcomes import found, told
from test_processes_sharded import KILLED, SHORT, WHOLE, Played, go, play

from comingle.runs import api
from comingle.utils.files import list_checkpoints

pytestmark = pytest.mark.slow

DISK = {"runtime.store": "disk", "training.participation": 0.7}
SAMPLE = WHOLE | DISK | {"evaluation.users": 2, "evaluation.every": 1}
BEST = SAMPLE | {"evaluation.select": "best", "training.experts.learning_rate": 0.05, "checkpoints.keep": 1}
MEMORY = {"runtime.store": "memory"}
MERGED = DISK | {"method": "{name: fedmerge, models: 2}", "evaluation.users": 1}
COPIED = DISK | {"method": "pcl"}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, write_recipe: Callable[[Path], Path]) -> Any:
    folder = tmp_path_factory.mktemp("stored")
    resumed = [go(1, BEST, kill=[0, 2]), go(3, BEST, resume=True, kill=[1, 3]), go(2, BEST, resume=True)]
    runs = {
        "memory-1": [go(1, SAMPLE | MEMORY)],
        "memory-3": [go(3, SAMPLE | MEMORY)],
        "disk-1": [go(1, SAMPLE)],
        "disk-3": [go(3, SAMPLE)],
        "best-memory": [go(1, BEST | MEMORY)],
        "best-3": [go(3, BEST)],
        "best-resumed": resumed,
        "spans": [go(2, BEST, kill=[0, 3]), go(2, BEST | {"runtime.users_per_step": 2}, resume=True)],
        "merged-1": [go(1, MERGED)],
        "merged-3": [go(3, MERGED)],
        "copied-1": [go(1, COPIED)],
        "copied-2": [go(2, COPIED)],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMINGLE_CACHE", str(folder / "cache"))
        yield play(folder, write_recipe(folder / "project"), runs)


def everything(folder: Path) -> dict[str, torch.Tensor]:
    federation = api.load(folder).federation
    clients = federation.clients
    return clients.state.take(list(range(clients.num_rows))).tensors() | federation.server.state


def require_same(one: Path, other: Path) -> None:
    expected, got = everything(one), everything(other)
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []
    assert found(one) == found(other)
    assert told(one) == told(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("memory-1", "memory-3"),
        ("memory-1", "disk-1"),
        ("disk-1", "disk-3"),
        ("best-memory", "best-3"),
        ("merged-1", "merged-3"),
        ("copied-1", "copied-2"),
    ],
)
def test_several_processes_with_stores_leave_behind_what_one_does(played: Played, one: str, other: str) -> None:
    """Tensors of users and server, events and metrics; some have nobody who is evaluated."""
    assert not any(code for goes in (played.codes[one], played.codes[other]) for codes in goes for code in codes)
    require_same(played[one], played[other])


def test_any_number_of_processes_goes_on_with_what_another_has_kept(played: Played) -> None:
    """One that is killed, three of whom one is, two to the end: the best round is there too."""
    first, second, third = played.codes["best-resumed"]
    assert first == [KILLED]
    assert second[1] == KILLED
    assert third == [0, 0]
    require_same(played["best-memory"], played["best-resumed"])
    kept = {path.name for path in (played["best-resumed"] / "store").glob("*.bin")}
    assert {f"params-{number}-of-2.bin" for number in range(2)} <= kept
    assert not any("of-3" in name for name in kept)
    newest = list_checkpoints(played["best-resumed"])[-1]
    assert {path.name for path in newest.glob("places*")} == {f"places-{n}-of-2.safetensors" for n in range(2)}


def test_processes_that_have_others_users_than_before_go_on(played: Played) -> None:
    """As many of them, whose users are shared out in another way."""
    assert played.codes["spans"][1] == [0, 0]
    assert api.load(played["spans"]).metrics["rounds"] == SHORT["training.rounds"] + 2


def test_each_process_has_its_own_users_alone(played: Played) -> None:
    sizes = [(played["disk-3"] / "store" / f"params-{number}-of-3.bin").stat().st_size for number in range(3)]
    assert min(sizes) > 0
    assert (played["disk-3"] / "store" / "names.text").read_text() == "annbobcem"


def test_arrays_and_conversations_are_shared_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for number in range(4):
        arrays = {"x": draw.normal(size=(12 + number, 5)).astype(np.float32), "y": draw.integers(0, 3, 12 + number)}
        np.savez(tmp_path / f"{number}.npz", **arrays)
        rows = [{"prompt": f"{number} {i}", "response": "yes" * (i + 1)} for i in range(6 + number)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "runtime: {device: cpu, threads: 1, users_per_step: 1, shard_sums: ordered, store: disk, dtype: float32}\n"
    users = {kind: ", ".join(f"u{n}: {tmp_path}/{n}.{kind}" for n in range(4)) for kind in ("npz", "jsonl")}
    recipes = {
        "arrays": f"data: {{kind: samples, users: {{{users['npz']}}}}}\nmethod: fedper\n",
        "chats": f"base: random:llama\ndata: {{kind: conversations, users: {{{users['jsonl']}}}}}\nmethod: fedavg\n",
    }
    for name, text in recipes.items():
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(f"{text}{common}training: {{rounds: 2, batch_size: 4}}\nevaluation: {{users: 3}}\n")
        runs = {f"{name}-{n}": [{"processes": n, "sets": ["seed=1"]}] for n in (1, 3)}
        played = play(tmp_path, recipe, runs)
        assert {run: codes for run, [codes] in played.codes.items() if any(codes)} == {}, played.said
        require_same(tmp_path / f"{name}-1", tmp_path / f"{name}-3")
