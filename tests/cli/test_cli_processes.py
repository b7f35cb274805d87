"""`comingle run --processes` and torchrun: how several processes of one run end, and how the run goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from comingle.cli import training
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events, read_metrics

# What a shell starts in the background ignores Ctrl-C, and so do its children: the program is told to hear it again.
HEAR = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
COMINGLE = [sys.executable, "-c", HEAR + "from comingle.cli import main; main()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LONG = ["training.rounds=60", "training.local_steps=1", "training.batch_size=1", "evaluation.every=60"]

SHORT = ["training.rounds=1", "training.local_steps=1", "evaluation.every=1"]


def options(*sets: str) -> list[str]:
    return [word for one in sets for word in ("--set", one)]


def started(*command: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **pipes)


def launched_before(words: list[str], folder: Path) -> bytes:
    """What an earlier launch of the same run has told."""
    assert "ann" in started(*TORCHRUN, "-m", "comingle", *words).communicate(timeout=300)[0]
    return (folder / "run" / "events.jsonl").read_bytes()


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str], after: int = 0) -> None:
    while process.poll() is None and (
        not list_checkpoints(run) or list_checkpoints(run)[-1].name <= f"round-{after:04d}"
    ):
        time.sleep(0.01)


def ranks_of(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The processes that it has started, by rank."""
    children = psutil.Process(process.pid).children(recursive=True)
    return {child.environ()["RANK"]: child for child in children if "RANK" in child.environ()}


def rounds(run: Path) -> list[int]:
    return [event["round"] for event in read_events(run) if event["event"] == "round"]


@pytest.fixture
def run(recipe_file: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The words of a run of 60 rounds, or with other settings."""
    words = ["run", str(recipe_file), "--out", str(tmp_path / "run"), "--quiet"]
    return lambda *more, sets=LONG: [*words, *options(*sets), *more]


@pytest.fixture
def others() -> Iterator[list[psutil.Process]]:
    """Processes that must be gone at the end of a test."""
    watched: list[psutil.Process] = []
    yield watched
    _, left = psutil.wait_procs(watched, timeout=20)
    for process in left:
        process.kill()
    assert left == []


def test_a_number_that_a_launcher_contradicts_is_refused(
    comingle: Any, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    refused = comingle("run", recipe_file, "--processes", "3")
    assert refused.code == 2
    assert refused.err.startswith("comingle: --processes: got 3, ")
    assert refused.err.count("\n") == 1
    other = comingle("methods")
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert other.err.startswith("comingle: methods: runs in one process; ")
    monkeypatch.setenv("RANK", "1")
    silent = comingle("methods")
    assert (silent.code, silent.err) == (2, "")


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_leaves_a_run_that_goes_on(
    run: Callable[..., list[str]], others: list[psutil.Process], tmp_path: Path
) -> None:
    process = started(*COMINGLE, *run("--processes", "2"))
    wait_for_checkpoint(tmp_path / "run", process)
    others.extend(ranks_of(process).values())
    assert len(others) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.strip().startswith("comingle: stopped")
    assert "--resume" in said
    newest = list_checkpoints(tmp_path / "run")[-1]
    assert len(list(newest.glob("users-*-of-2.safetensors"))) == 2


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_run_goes_on(
    run: Callable[..., list[str]], others: list[psutil.Process], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = started(*COMINGLE, *run("--processes", "2"))
    wait_for_checkpoint(folder, process)
    found = ranks_of(process)
    others.extend(found.values())
    found["1"].kill()
    _, said = process.communicate(timeout=120)
    newest = list_checkpoints(folder)[-1].name
    assert process.returncode == 2
    assert re.fullmatch(rf"comingle: process 1 of 2 .*SIGKILL.*--resume.* {newest}", said.strip())
    done = started(*COMINGLE, *run("--processes", "2", "--resume"))
    assert done.communicate(timeout=900)[1] == ""
    assert rounds(folder) == list(range(1, 61))
    assert read_metrics(folder)["rounds"] == 60


@pytest.mark.slow
def test_without_their_parent_processes_end(
    run: Callable[..., list[str]], others: list[psutil.Process], tmp_path: Path
) -> None:
    process = started(*COMINGLE, *run("--processes", "2"))
    wait_for_checkpoint(tmp_path / "run", process)
    others.extend(ranks_of(process).values())
    process.kill()
    process.communicate(timeout=120)


@pytest.mark.slow
def test_torchrun_begins_anew_from_the_last_round_when_a_process_dies(
    run: Callable[..., list[str]], others: list[psutil.Process], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = started(*TORCHRUN, "--max-restarts", "1", "-m", "comingle", *run())
    wait_for_checkpoint(folder, process)
    found = ranks_of(process)
    others.extend(found.values())
    found["1"].kill()
    out, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    assert rounds(folder) == list(range(1, 61))
    assert "ann" in out


@pytest.mark.slow
def test_torchrun_refuses_the_folder_of_an_earlier_launch_in_each_attempt(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    short = run(sets=SHORT)
    before = launched_before(short, tmp_path)
    process = started(*TORCHRUN, "--max-restarts", "1", "-m", "comingle", *short)
    out, said = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert len(re.findall("--resume.*--force", said)) == 2
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_restart_before_the_folder_was_opened_still_replaces_what_was_there(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    short = run(sets=SHORT)
    before = launched_before(short, tmp_path)
    script = tmp_path / "dies_once.py"
    script.write_text(
        "import os, signal\n"
        "from comingle.cli import main, training\n"
        "if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('1', '0'):\n"
        "    training.read_users_of_process = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main()\n"
    )
    process = started(*TORCHRUN, "--max-restarts", "1", str(script), *short, "--force")
    out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "ann" in out
    assert (tmp_path / "run" / "events.jsonl").read_bytes() != before  # seconds differ


@pytest.mark.parametrize(("names", "newest"), [(["round-9999", "round-10000"], "round-10000"), ([], "the beginning")])
def test_who_was_killed_is_told_with_the_newest_checkpoint(names: list[str], newest: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(RunError, match=rf"process 1 of 2 .*SIGKILL.*--resume.* {newest}$"):
        training._raise_failure([0, -signal.SIGKILL], tmp_path)
