"""Run folders on a machine where things go wrong: two processes, a full or read-only disk, links, a kill half-way."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comingle.config import Recipe, load_recipe
from comingle.runs import api
from comingle.runs.folders import open_folder
from comingle.runs.session import describe, prepare
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events
from commands import comingle as comingle
from resuming import moments_of

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SLOW = """
import sys, time
from comingle.runs import api, session

def wait(event):
    if event["event"] == "round":
        print(event["round"], flush=True)
        time.sleep(60)

api.run(sys.argv[1], out=sys.argv[2], resume=len(sys.argv) > 3, observers=[wait])
"""


TWICE = """
import os, signal, sys, time
import transformers.models.llama.modeling_llama  # once, and not in each child
from comingle.runs import api

def wait(event):
    if event["event"] == "round":
        time.sleep(60)

both = []
for _ in range(2):
    both.append(os.fork())
    if both[-1] == 0:
        api.run(sys.argv[1], out=sys.argv[2], resume=True, observers=[wait])
loser, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 1
(winner,) = set(both) - {loser}
print(winner)
os.kill(winner, signal.SIGKILL)
"""


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file)


def refused(recipe: Recipe, folder: Path, **options: Any) -> str:
    with pytest.raises(RunError) as caught:
        api.run(recipe, out=folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- one writer


@pytest.fixture
def writer(recipe_file: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of a run, after its first round."""
    command = [sys.executable, "-c", SLOW, str(recipe_file), str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_second_process_is_told_who_writes(
    comingle: Any, recipe: Recipe, recipe_file: Path, tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    folder = tmp_path / "run"
    before = (folder / "events.jsonl").read_bytes()
    who = f"process {writer.pid} on {socket.gethostname()} since {time.strftime('%F')} "
    for how in ({"resume": True}, {"force": True}, {}):
        message = refused(recipe, folder, **how)
        assert message.startswith(f"{folder}: ")
        assert who in message
    answer = comingle("run", recipe_file, "--out", folder, "--resume")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"comingle: {folder}: ")
    assert who in answer.err
    assert (folder / "events.jsonl").read_bytes() == before

    writer.send_signal(signal.SIGKILL)
    writer.wait()
    run = api.run(recipe, out=folder, resume=True)
    assert [e["round"] for e in read_events(folder) if e["event"] == "round"] == [1, 2, 3, 4]
    assert run.metrics["users"] == api.run(recipe).metrics["users"]


@pytest.mark.slow
def test_compare_and_reproduce_are_refused_too(
    comingle: Any, recipe_file: Path, tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "run").rename(tmp_path / "all" / "comigs-1g1s-seed0")  # the process writes on there
    answer = comingle("compare", recipe_file, "--methods", "comigs-1g1s", "--out", tmp_path / "all", "--resume")
    assert answer.code == 2
    assert f"process {writer.pid} on" in answer.err


@pytest.mark.slow
def test_two_at_once_are_one_and_a_refusal(recipe_file: Path, tmp_path: Path) -> None:
    """Both pass the first check before either writes: only the lock keeps them apart."""
    folder = tmp_path / "run"
    api.run(load_recipe(recipe_file), out=folder)
    (folder / "metrics.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    command = [sys.executable, "-c", TWICE, str(recipe_file), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert f"process {done.stdout.strip()} on" in done.stderr
    api.run(load_recipe(recipe_file), out=folder, resume=True)
    assert [e["round"] for e in read_events(folder) if e["event"] == "round"] == [1, 2, 3, 4]


@pytest.mark.slow
def test_one_process_is_two_writers_too(recipe: Recipe, tmp_path: Path) -> None:
    inputs = describe(prepare(recipe), recipe)
    with open_folder(tmp_path / "run", recipe, inputs, resume=False, force=False):
        assert f"process {os.getpid()} on" in refused(recipe, tmp_path / "run", resume=True)
    api.run(recipe, out=tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / ".holder").exists()


# ---------------------------------------------------------------- half-made folders


KILLED = """
import os, signal, sys
from pathlib import Path
import transformers.models.llama.modeling_llama  # once, and not in each child
from comingle.utils import files as locks
from comingle.runs import api, folders, session

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

recipe, out = sys.argv[1], Path(sys.argv[2])
for moment in sys.argv[3:]:
    if (child := os.fork()) == 0:
        if moment == "made":
            folders.locked = die
        elif moment == "locked":
            locks.write_text = die
        elif moment == "half of the recipe":
            os.fsync = lambda handle: list((out / moment).glob(".recipe.yaml.*")) and die()
        elif moment == "recipe":
            session.execute = api.execute = die
        api.run(recipe, out=out / moment)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, moment
"""
MOMENTS = ["made", "locked", "half of the recipe", "recipe"]


@pytest.fixture(scope="module")
def half_made(
    write_recipe: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Recipe, Path]:
    """A folder for each moment at which a process was killed that made one."""
    stage = tmp_path_factory.mktemp("half made")
    path = write_recipe(stage / "project")
    recipe = load_recipe(path).with_changes({"method": "pretrained"})
    path.write_text(recipe.as_yaml())
    command = [sys.executable, "-c", KILLED, str(path), str(stage), *moments_of(request)]
    subprocess.run(command, env=ENVIRONMENT, check=True)
    return recipe, stage


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "resume", "force"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_folder_that_was_half_made(half_made: tuple[Recipe, Path], tmp_path: Path, moment: str, how: str) -> None:
    recipe, stage = half_made
    folder = Path(shutil.copytree(stage / moment, tmp_path / "run"))
    if how == "resume" and moment != "recipe":
        assert refused(recipe, folder, resume=True).endswith("leave out --resume")
    elif how == "plain" and moment == "recipe":
        assert refused(recipe, folder).endswith("--resume continues it, --force replaces it, --out names another")
    else:
        api.run(recipe, out=folder, resume=how == "resume", force=how == "force")
        assert (folder / "metrics.json").exists()
        assert not list(folder.glob(".recipe.yaml.*"))


# ---------------------------------------------------------------- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("NO RIGHT TO MOUNT A SMALL DISK: run this test as root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, leave: int = 0) -> None:
    """Everything but so many bytes is taken, in pages."""
    free = os.statvfs(disk)
    (disk / "filling").write_bytes(b"x" * (free.f_bavail * free.f_frsize - leave))


@pytest.mark.parametrize("leave", [0, 4096])
def test_a_disk_that_is_full_when_the_folder_is_made(recipe: Recipe, small_disk: Path, leave: int) -> None:
    recipe = recipe.with_changes({"method": "pretrained"})
    fill(small_disk, leave)
    assert refused(recipe, small_disk / "run").endswith("cannot be written to: No space left on device")
    (small_disk / "filling").unlink()
    api.run(recipe, out=small_disk / "run")


@pytest.mark.parametrize("event", ["round", "evaluation"])
def test_a_disk_that_fills_up_during_a_run(recipe: Recipe, small_disk: Path, event: str) -> None:
    folder = small_disk / "run"

    def eat(found: dict[str, Any]) -> None:
        if found["event"] == event and found["round"] == 2:
            fill(small_disk)

    with pytest.raises(RunError, match="cannot be written") as caught:
        api.run(recipe, out=folder, observers=[eat])
    assert "\n" not in str(caught.value)
    assert "No space left on device" in str(caught.value)
    (small_disk / "filling").unlink()
    assert [path.name for path in list_checkpoints(folder)] == ["round-0001"]
    run = api.run(recipe, out=folder, resume=True)
    assert [e["round"] for e in read_events(folder) if e["event"] == "round"] == [1, 2, 3, 4]
    assert run.metrics["users"] == api.run(recipe).metrics["users"]


def test_a_read_only_folder(recipe: Recipe, small_disk: Path) -> None:
    run = api.run(recipe, out=small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for how in ({"resume": True}, {"force": True}):
        assert refused(recipe, small_disk / "run", **how).endswith("cannot be written to: Read-only file system")
    assert refused(recipe, small_disk / "new").endswith("cannot be written to: Read-only file system")
    assert api.load(small_disk / "run").metrics["users"] == run.metrics["users"]  # reading needs no writing


# ---------------------------------------------------------------- who may read, and where it goes


@pytest.fixture
def umask() -> Iterator[Any]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "allowed"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644)])
def test_files_are_for_those_whom_the_umask_allows(
    recipe: Recipe, tmp_path: Path, umask: Any, mask: int, allowed: int
) -> None:
    umask(mask)
    api.run(recipe.with_changes({"training.rounds": 1}), out=tmp_path / "run")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {path.name for path in modes} > {"recipe.yaml", "events.jsonl", "metrics.json", "checkpoint.json"}
    assert [path for path, mode in modes.items() if mode & ~allowed] == []
    assert modes[tmp_path / "run" / "recipe.yaml"] == allowed
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_folder_that_is_there_keeps_its_mode(recipe: Recipe, tmp_path: Path, umask: Any) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    api.run(recipe.with_changes({"method": "pretrained"}), out=tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.json", "checkpoints", "tensorboard", ".lock"])
@pytest.mark.parametrize("how", ["resume", "force"])
@pytest.mark.sampled(2)
def test_nothing_is_written_through_a_link(recipe: Recipe, tmp_path: Path, name: str, how: str) -> None:
    recipe = recipe.with_changes({"training.rounds": 1})
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    api.run(recipe, out=folder)
    elsewhere.mkdir()
    target = elsewhere / name
    (folder / name).rename(target)
    (folder / name).symlink_to(target)
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    message = refused(recipe, folder, **{how: True})
    assert str(folder / name) in message
    assert "link" in message
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before
