"""What can be missing or full when a model is used: one line and exit status 2 from every verb, and nothing is left."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import comingle as library
from comingle.models.loading import load_base

SETTINGS = {
    "adapters": {"rank": 2},
    "training": {"rounds": 2, "local_steps": 2, "batch_size": 2, "context": 16},
    "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
}
VERBS = ["export", "chat", "serve", "join"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``run`` and the ``base`` that it needs, in one folder."""
    folder = tmp_path_factory.mktemp("faults")
    base = load_base("random:llama?layers=1&dim=32", dtype="float32", device="cpu")
    assert base.tokenizer is not None
    base.model.save_pretrained(folder / "base")
    base.tokenizer.save_pretrained(folder / "base")
    users = {name: [f"{name} counts {n} cats." for n in range(60)] for name in ("ann", "bob")}
    library.run(SETTINGS, users=users, base=str(folder / "base"), method="comigs-1g1s", out=folder / "run")
    (folder / "eve.txt").write_text("\n\n".join(f"eve counts {n} dogs." for n in range(60)))
    return folder


def called(verb: str, place: Path, to: Path) -> list[Any]:
    """A verb with a run, and what else it needs to write to ``to``."""
    more: dict[str, list[Any]] = {
        "export": ["--user", "ann", "--to", to],
        "chat": [],
        "serve": ["--port", 0],
        "join": ["--name", "eve", "--data", place / "eve.txt", "--out", to],
    }
    return [verb, place / "run", *more[verb]]


def refused(answer: Any, *said: str) -> None:
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer
    assert answer.err.startswith("comingle: ")
    for part in said:
        assert part in answer.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_base_that_is_gone(comingle: Any, trained: Path, tmp_path: Path, verb: str) -> None:
    aside = trained / "aside"
    (trained / "base").rename(aside)
    try:
        refused(comingle(*called(verb, trained, tmp_path / "out")), str(trained / "base"), "no such file or folder")
    finally:
        aside.rename(trained / "base")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_a_base_that_has_changed(comingle: Any, trained: Path, tmp_path: Path, verb: str) -> None:
    kept, weights = tmp_path / "kept", trained / "base" / "model.safetensors"
    shutil.copy(weights, kept)
    from safetensors.torch import load_file, save_file

    save_file({name: t + 1 if t.is_floating_point() else t for name, t in load_file(weights).items()}, weights)
    try:
        refused(comingle(*called(verb, trained, tmp_path / "out")), "changed")
    finally:
        shutil.copy(kept, weights)


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_without_a_checkpoint(comingle: Any, trained: Path, tmp_path: Path, verb: str) -> None:
    place = tmp_path / "place"
    shutil.copytree(trained, place)
    shutil.rmtree(place / "run" / "checkpoints")
    refused(comingle(*called(verb, place, tmp_path / "out")), str(place / "run"), "checkpoint")


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_that_is_not_finished(comingle: Any, trained: Path, tmp_path: Path, verb: str) -> None:
    place = tmp_path / "place"
    shutil.copytree(trained, place)
    (place / "run" / "metrics.json").unlink()
    refused(comingle(*called(verb, place, tmp_path / "out")), str(place / "run"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A full disk of 1 MB, which needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]).returncode:
        pytest.skip("no right to mount a disk")
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("verb", ["export", "join"])
@pytest.mark.parametrize("form", ["transformers", "gguf"])
def test_a_full_disk(comingle: Any, trained: Path, small_disk: Path, verb: str, form: str) -> None:
    if verb == "join" and form != "transformers":
        pytest.skip("joining writes no formats")
    arguments = called(verb, trained, small_disk / "out")
    arguments += ["--format", form] if verb == "export" else []
    refused(comingle(*arguments), str(small_disk), "No space left on device")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_keys_for_a_full_disk(comingle: Any, trained: Path, small_disk: Path) -> None:
    refused(comingle("serve", trained / "run", "--make-keys", small_disk / "keys.yaml"), "No space left on device")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_models_side_by_side_say_what_each_says(trained: Path) -> None:
    from comingle.serving.answers import Chat
    from comingle.serving.engine import Engine
    from comingle.serving.models import open_models
    from comingle.serving.rows import without_adapters

    ann = open_models(trained / "run").models["ann"]
    engine = Engine({"ann": ann, "base": without_adapters(ann)}, rows=1)
    chat = Chat(engine=engine, user="ann", plain=True, max_tokens=12, temperature=0)
    said = chat.compare({"pretrained": (engine, "base"), "ann": (engine, "ann")}, "one two")
    base = load_base(str(trained / "base"), dtype="float32", device="cpu")
    assert base.tokenizer is not None
    ids = torch.tensor([base.tokenizer("one two")["input_ids"]])
    generate: Any = base.model.generate
    expected = generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert said == {
        "pretrained": base.tokenizer.decode(expected, skip_special_tokens=True),
        "ann": ann.generate("one two", max_new_tokens=12),
    }
