"""SIGTERM, with which service managers and containers stop a process: one line, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.federation.test_federate import recipe_of
from tests.federation.test_out_there import Place, rounds_of

import comingle as library
from comingle.federation.flower.processes import free_port
from comingle.training.backends.launched import interrupt_on_sigterm
from comingle.utils.files import list_checkpoints

SECONDS = 120


MAIN = "from comingle.cli import main; main()"
NO_GRACE = f"import comingle.serving.access as access; access.GRACE_SECONDS = 0.0; {MAIN}"


@contextmanager
def command(*arguments: object, program: str = MAIN) -> Iterator[subprocess.Popen[str]]:
    """``comingle`` as a process."""
    line = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], Any], *processes: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


def terminate(process: subprocess.Popen[str]) -> str:
    """What a process writes to standard error after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=60)[1]


def test_an_inner_block_tells_the_outer_one() -> None:
    earlier = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupt_on_sigterm() as outer, interrupt_on_sigterm() as inner:
        signal.raise_signal(signal.SIGTERM)
    assert outer.is_set()
    assert inner.is_set()
    with pytest.raises(KeyboardInterrupt), interrupt_on_sigterm() as later:
        signal.raise_signal(signal.SIGTERM)
    assert later.is_set()
    assert signal.getsignal(signal.SIGTERM) is earlier


@pytest.mark.slow
def test_a_run_ends_with_code_143_and_can_be_resumed(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    folder, rounds = tmp_path / "run", 300
    changes = {"training.rounds": rounds, "training.local_steps": 1, "evaluation.every": rounds}
    options = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    arguments = ["run", recipe_file, "--out", folder, "--quiet", *options]
    with command(*arguments) as process:
        wait_for(lambda: list_checkpoints(folder), process)
        err = terminate(process)
    assert process.returncode == 143
    (line,) = err.splitlines()
    assert line.startswith("comingle: stopped by SIGTERM; ")
    assert "--resume" in line
    assert not (folder / "metrics.json").exists()
    assert comingle(*arguments, "--resume").code == 0
    assert json.loads((folder / "metrics.json").read_text())["rounds"] == rounds


@pytest.mark.slow
def test_the_processes_of_a_run_end_with_it(recipe_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--set", "training.rounds=3000", "--set", "training.local_steps=1", "--set", "evaluation.every=3000"]
    with command("run", recipe_file, "--out", folder, "--quiet", "--processes", 2, *options) as process:
        wait_for(lambda: list_checkpoints(folder), process)
        (holder,) = [word for word in (folder / ".holder").read_text().split() if word.isdecimal()]
        err = terminate(process)
    assert process.returncode == 143
    assert [line for line in err.splitlines() if "comingle:" in line] == [err.splitlines()[-1]]
    assert not Path(f"/proc/{holder}").exists()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, write_recipe: Any) -> Path:
    recipe = write_recipe(tmp_path_factory.mktemp("sigterm") / "project")
    folder = recipe.parent / "run"
    library.run(recipe, out=folder, **{"training.rounds": 1})
    return folder


def lines_after_sigterm(url: str, process: subprocess.Popen[str], **options: object) -> list[str]:
    """The rest of a streamed answer whose server gets SIGTERM after the first line."""
    body = {"model": "ann", "prompt": "one", "temperature": 1.0, "seed": 1, "stream": True, **options}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        return [line.removeprefix("data: ") for line in lines if line]


@pytest.mark.slow
def test_serve_completes_the_answer_in_progress(run_folder: Path) -> None:
    with command("serve", run_folder, "--port", 0) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        *_, last, done = lines_after_sigterm(url, process, max_tokens=120)
        err = process.communicate(timeout=60)[1]
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] in ("stop", "length")
    assert (process.returncode, err) == (0, "comingle: stopped by SIGTERM\n")


@pytest.mark.slow
def test_serve_ends_an_answer_that_takes_too_long_with_an_error(run_folder: Path) -> None:
    with command("serve", run_folder, "--port", 0, program=NO_GRACE) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        *_, last = lines_after_sigterm(url, process, max_tokens=1000, n=16)
        err = process.communicate(timeout=60)[1]
    assert "stopping" in json.loads(last)["error"]["message"]
    assert (process.returncode, err) == (0, "comingle: stopped by SIGTERM\n")


@pytest.mark.slow
def test_serve_ends_while_it_loads(run_folder: Path) -> None:
    with command("serve", run_folder, "--port", 0) as process:
        time.sleep(2.0)  # imports torch, or loads the base
        err = terminate(process)
    assert (process.returncode, err) == (0, "comingle: stopped by SIGTERM\n")


@pytest.mark.slow
def test_server_and_clients_of_a_federation_continue_where_they_were_stopped(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "fedavg").with_changes({"training.rounds": 12})
    place, port = Place.of(tmp_path, recipe), free_port()
    events = tmp_path / "apart"
    ann_line = [*place.client("ann", place.port), "--serve", port]
    with command(*place.client("bob", place.port)) as bob:
        with command(*place.server()) as server, command(*ann_line) as ann:
            wait_for(lambda: rounds_of(events), server, ann, bob)
            *_, done = lines_after_sigterm(f"http://127.0.0.1:{port}", ann, max_tokens=60)
            assert done == "[DONE]"
            err_of_ann = ann.communicate(timeout=60)[1]
            err_of_server = terminate(server)
        for process, err in ((ann, err_of_ann), (server, err_of_server)):
            assert process.returncode == 0
            assert err == "comingle: stopped by SIGTERM; run the same command again to continue\n"
        assert len(rounds_of(events)) < 12
        with command(*place.server()) as server, command(*ann_line) as ann:
            outputs = [process.communicate(timeout=SECONDS) for process in (server, ann, bob)]
            assert [process.returncode for process in (server, ann, bob)] == [0, 0, 0], outputs
    assert [event["round"] for event in rounds_of(events)] == list(range(1, 13))


@pytest.mark.slow
def test_live_completes_the_answer_in_progress(recipe_file: Path, tmp_path: Path) -> None:
    with command("live", recipe_file, "--out", tmp_path / "live", "--port", 0) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        while "http://" not in line:
            assert line
            line = process.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http://"))
        *_, done = lines_after_sigterm(url, process, max_tokens=60)
        err = process.communicate(timeout=60)[1]
    assert done == "[DONE]"
    assert process.returncode == 0
    assert err.splitlines()[-1] == "comingle: stopped by SIGTERM; run the same command again to continue"
    assert "Traceback" not in err
