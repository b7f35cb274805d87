"""Checkpoints: everything comes back, damage is one line that names the file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from comingle.training.backends.local import InProcess
from comingle.training.checkpoints import Progress, load_checkpoint, prune_checkpoints, read_progress, save_checkpoint
from comingle.training.client import train
from comingle.training.state import State
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints, seal
from comingle.utils.trees import Tree, restrict

CPU = torch.device("cpu")
FILES = ["SHA256SUMS", "checkpoint.json", "state.safetensors"]


def progress(number: int) -> Progress:
    return Progress(
        round=number,
        fingerprint="abc",
        trainers=["ann", "bob", "cem"],
        events_bytes=17,
        train_seconds=1.5,
        wall_seconds=2.25,
        tokens=number * 100,
        upload_bytes=number * 7,
        download_bytes=number * 9,
        told_upload_bytes=number * 6,
        told_download_bytes=number * 8,
        user_rounds=number * 3,
    )


@pytest.fixture
def sim(federate: Any) -> InProcess:
    """Unequal users, in float32, after a round: nothing in the state is at its start any more."""
    method = {"name": "comigs", "specialists": [0, 1, 2], "router_every": 2, "router_steps": 1}
    sim: InProcess = federate(method, dtype="float32")
    train(sim.clients, [0, 1, 2], 0)
    return sim


@pytest.fixture
def folder(sim: InProcess, tmp_path: Path) -> Path:
    return save(tmp_path, sim)


def save(run: Path, sim: InProcess) -> Path:
    return save_checkpoint(run, sim.clients.model.layout, sim.clients.state, sim.server.state, progress(3))


def load(folder: Path, sim: InProcess) -> tuple[State, Tree]:
    return load_checkpoint(folder, sim.clients.model.layout, sim.clients.state, sim.server.state)


def refused(folder: Path, sim: InProcess) -> str:
    """The one line with which a checkpoint is refused."""
    with pytest.raises(RunError) as caught:
        load(folder, sim)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_a_round_trip_changes_nothing(folder: Path, sim: InProcess) -> None:
    found, server = load(folder, sim)
    for half, wanted in ((found.tensors(), sim.clients.state.tensors()), (server, sim.server.state)):
        assert half.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(half[name], tensor), name
            assert half[name].dtype == tensor.dtype
    assert read_progress(folder) == progress(3)
    assert folder.name == "round-0003"
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_tensors_keep_their_names(folder: Path, sim: InProcess) -> None:
    found = load_file(folder / "state.safetensors")
    layout, sent = sim.clients.model.layout, sim.clients.method.shared
    names = {f"user/{slot.name}" for slot in layout.slots}
    shared = {f"server/model.{name}" for name in restrict(layout.views(sim.clients.state.rows), layout, sent)}
    assert shared
    others = {"first", "second", "iterations", "router_steps", "ranks", "versions"} | {
        "server/version",
        "server/ranks",
        "server/lowest_loss",
    }
    assert found.keys() == names | shared | others


def test_a_checkpoint_of_the_same_round_replaces_it(folder: Path, sim: InProcess, tmp_path: Path) -> None:
    sim.clients.state.rows += 1
    assert save(tmp_path, sim) == folder
    assert torch.equal(load(folder, sim)[0].rows, sim.clients.state.rows)


def test_a_draft_that_a_process_of_the_same_number_left_is_no_obstacle(sim: InProcess, tmp_path: Path) -> None:
    """In a container every process may be number 1, the killed one too."""
    draft = tmp_path / "checkpoints" / f".round-0003.{os.getpid()}"
    draft.mkdir(parents=True)
    (draft / "state.safetensors").write_bytes(b"half")
    (draft / "left").write_text("over")
    folder = save(tmp_path, sim)
    assert torch.equal(load(folder, sim)[0].rows, sim.clients.state.rows)
    assert sorted(path.name for path in folder.iterdir()) == FILES


@pytest.mark.parametrize("keep", [0, 7, 100, 10_000])
def test_a_truncated_checkpoint(folder: Path, sim: InProcess, keep: int) -> None:
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    seal(folder)
    assert "truncated or not safetensors" in refused(folder, sim)


def test_a_missing_state(folder: Path, sim: InProcess) -> None:
    (folder / "state.safetensors").unlink()
    assert "state.safetensors" in refused(folder, sim)


def test_a_checkpoint_is_never_executed(folder: Path, sim: InProcess, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    content = pickle.dumps(Bomb())
    pickle.loads(content)
    (tmp_path / "executed").unlink()  # it works, and it is not what happens here
    (folder / "state.safetensors").write_bytes(content)
    seal(folder)
    refused(folder, sim)
    assert not (tmp_path / "executed").exists()


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["user/layers.0.mlp.op.a"] = tensors.pop("user/layers.0.mlp.up.a")


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["iterations"] = tensors["iterations"].double()


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["user/layers.1.mlp.up.b"] = tensors["user/layers.1.mlp.up.b"][:, :2].contiguous()


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["iterations"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["zeta"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (rename, "tensor 'user/layers.0.mlp.op.a': got ((3, 3, 2, 32), torch.float32); this recipe has nothing"),
        (widen, "tensor 'iterations': got ((3,), torch.float64); this recipe has ((3,), torch.int64)"),
        (cut, "tensor 'user/layers.1.mlp.up.b': got ((3, 2, 2, 88), torch.float32); this recipe has ((3, 3, 2, 88), "),
        (drop, "tensor 'iterations': got nothing; this recipe has ((3,), torch.int64)"),
        (add, "tensor 'zeta': got ((1,), torch.float32); this recipe has nothing"),
    ],
    ids=["renamed", "wrong dtype", "wrong shape", "missing", "additional"],
)
def test_a_foreign_checkpoint(
    folder: Path, sim: InProcess, damage: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    path = folder / "state.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    seal(folder)
    message = refused(folder, sim)
    assert f"{path}: {said}" in message


def test_a_checkpoint_of_another_federation(folder: Path, sim: InProcess, federate: Any) -> None:
    four = federate("comigs-1g1s", users=("ann", "bob", "cem", "dee"), dtype="float32")
    for other in (four, federate("local", dtype="float32"), federate("local", dtype="float32", base="random:gpt2")):
        assert "state.safetensors: tensor '" in refused(folder, other)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"round": 3}', '{"round": 3, "colour": "red"}', "\x00"], ids=repr
)
def test_a_checkpoint_without_a_word_of_what_it_is(folder: Path, content: str) -> None:
    (folder / "checkpoint.json").write_text(content)
    seal(folder)
    with pytest.raises(RunError) as caught:
        read_progress(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder}: not a ")
    assert f"`rm -r {folder}`, then `comingle run --resume" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("round", '"two"'), ("events_bytes", "1.5"), ("wall_seconds", "null"), ("trainers", '["ann", 1]')],
)
def test_what_a_checkpoint_says_is_of_the_right_kind(folder: Path, key: str, value: str) -> None:
    path = folder / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: json.loads(value)}))
    seal(folder)
    with pytest.raises(RunError, match=f"{folder}: .*[(]{key} is "):
        read_progress(folder)


def test_the_newest_is_the_one_of_the_highest_round(tmp_path: Path) -> None:
    for number in (9999, 10_000, 2, 10_001):
        (tmp_path / "checkpoints" / f"round-{number:04d}").mkdir(parents=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "round-0002",
        "round-9999",
        "round-10000",
        "round-10001",
    ]
    assert list_checkpoints(tmp_path / "elsewhere") == []


def test_old_checkpoints_and_drafts_are_pruned(tmp_path: Path) -> None:
    for name in ("round-0001", "round-0002", "round-0003", ".round-0004.123"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    prune_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["round-0002", "round-0003"]


def test_progress_is_plain_json(folder: Path) -> None:
    found = json.loads((folder / "checkpoint.json").read_text())
    assert found == {
        "round": 3, "fingerprint": "abc", "trainers": ["ann", "bob", "cem"],
        "events_bytes": 17, "train_seconds": 1.5, "wall_seconds": 2.25, "tokens": 300,
        "upload_bytes": 21, "download_bytes": 27, "told_upload_bytes": 18, "told_download_bytes": 24, "user_rounds": 9,
    }  # fmt: skip
