"""No changed byte of a checkpoint is loaded, and what to do instead is said."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from comingle.config import load_recipe
from comingle.runs import api
from comingle.training.backends.local import InProcess
from comingle.training.checkpoints import load_checkpoint, read_progress
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints, seal, verify
from comingle.utils.records import read_metrics

FLIPS = 300


@pytest.fixture(scope="module")
def done(write_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> experiment.Run:
    """A run of four rounds that keeps three checkpoints and selects its best round."""
    stage = tmp_path_factory.mktemp("checksums")
    changes = {"checkpoints.keep": 3, "evaluation.select": "best"}
    return api.run(load_recipe(write_recipe(stage)).with_changes(changes), out=stage / "run")


@pytest.fixture
def copy(done: experiment.Run, tmp_path: Path) -> Path:
    assert done.folder is not None
    return Path(shutil.copytree(done.folder, tmp_path / "run"))


def load(run: Path, federation: InProcess) -> None:
    newest, clients = list_checkpoints(run)[-1], federation.clients
    read_progress(newest)
    load_checkpoint(newest, clients.model.layout, clients.state, federation.server.state)


def refused(run: Path, federation: InProcess) -> str:
    with pytest.raises(RunError) as caught:
        load(run, federation)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_flipped_bit_is_loaded(done: experiment.Run, copy: Path) -> None:
    """Anywhere in the folder, each file as often as the others: the counters and sums are small beside the tensors."""
    load(copy, done.federation)
    newest, draw = list_checkpoints(copy)[-1], random.Random(0)
    files = sorted(newest.iterdir())
    silent = []
    for _ in range(FLIPS):
        path = draw.choice(files)
        content = path.read_bytes()
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        try:
            load(copy, done.federation)
            silent.append((path.name, place, bit))
        except RunError:
            pass
        path.write_bytes(content)
    assert silent == []
    load(copy, done.federation)


@pytest.mark.parametrize("name", ["SHA256SUMS", "checkpoint.json", "state.safetensors"])
def test_no_file_may_be_missing(done: experiment.Run, copy: Path, name: str) -> None:
    (list_checkpoints(copy)[-1] / name).unlink()
    assert name in refused(copy, done.federation)


def test_no_file_may_be_added(done: experiment.Run, copy: Path) -> None:
    (list_checkpoints(copy)[-1] / "more").write_text("more")
    assert re.search("damaged: more .*SHA256SUMS", refused(copy, done.federation))


def test_the_usual_tool_reads_the_sums(copy: Path) -> None:
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("SHA256SUM IS NOT INSTALLED")
    newest = list_checkpoints(copy)[-1]
    assert subprocess.run([tool, "--check", "--strict", "SHA256SUMS"], cwd=newest, capture_output=True).returncode == 0


# ---------------------------------------------------------------- an older one is offered


def spoil(folder: Path) -> None:
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_what_is_offered_works(done: experiment.Run, copy: Path) -> None:
    """Two of three are damaged: the shell line in the message removes both, and the run ends as it did before."""
    older, old, newest = list_checkpoints(copy)
    spoil(old)
    spoil(newest)
    with pytest.raises(RunError) as caught:
        api.run(done.recipe, out=copy, resume=True)
    command = f"{older.name}.*`rm -r {old} {newest}`.*`comingle run --resume {copy}`"
    assert re.match(f"{newest}: .*state.safetensors.*SHA256SUMS.*{command}", str(caught.value))
    subprocess.run(str(caught.value).split("`")[1], shell=True, check=True)
    again = api.run(done.recipe, out=copy, resume=True)
    assert again.metrics["users"] == done.metrics["users"]
    assert [path.name for path in list_checkpoints(copy)] == ["round-0002", "round-0003", "round-0004"]


def test_where_no_older_one_is_whole(done: experiment.Run, copy: Path) -> None:
    found = list_checkpoints(copy)
    for folder in found:
        spoil(folder)
    remove = " ".join(map(str, found))
    assert re.search(f"`rm -r {remove}`.*`comingle run --resume {copy}`", refused(copy, done.federation))


def test_a_finished_run_does_not_open_with_the_models_of_an_earlier_round(copy: Path) -> None:
    newest = list_checkpoints(copy)[-1]
    assert api.load(copy).metrics == read_metrics(copy)
    shutil.rmtree(newest)
    said = "round-0003: the run has 4 rounds, its last checkpoint 3; `comingle run --resume .*` "
    with pytest.raises(RunError, match=said):
        api.load(copy)


# ---------------------------------------------------------------- what no run can have written


def poison(name: str, value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "state.safetensors"
        tensors = load_file(path)
        tensors[name].view(-1)[0] = value
        save_file(tensors, path)

    return change


def count(name: str, value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "checkpoint.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return change


IMPOSSIBLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN": (poison("second", math.nan), "tensor 'second' is not finite"),
    "infinite": (poison("user/layers.0.mlp.up.b", -math.inf), "tensor 'user/layers.0.mlp.up.b' is not finite"),
    "best NaN": (poison("best/rows", math.nan), "tensor 'best/rows' is not finite"),
    "lowest loss NaN": (poison("server/lowest_loss", math.nan), "tensor 'server/lowest_loss' is not finite"),
    "negative steps": (poison("iterations", -1), "tensor 'iterations' has a negative count"),
    "negative versions": (poison("versions", -2), "tensor 'versions' has a negative count"),
    "negative ranks": (poison("ranks", -2), "tensor 'ranks' has a negative count"),
    "negative round": (count("round", -1), "round is -1"),
    "negative bytes": (count("upload_bytes", -5), "upload_bytes is -5"),
    "endless": (count("wall_seconds", math.inf), "wall_seconds is inf"),
}


@pytest.mark.parametrize(("change", "said"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_numbers_that_no_run_can_have_written(
    done: experiment.Run, copy: Path, change: Callable[[Path], None], said: str
) -> None:
    newest = list_checkpoints(copy)[-1]
    change(newest)
    seal(newest)
    verify(newest)
    message = refused(copy, done.federation)
    assert said in message
    assert "round-0003" in message


def test_before_the_first_evaluation_the_lowest_loss_is_infinite(done: experiment.Run, copy: Path) -> None:
    newest = list_checkpoints(copy)[-1]
    poison("server/lowest_loss", math.inf)(newest)
    seal(newest)
    load(copy, done.federation)
