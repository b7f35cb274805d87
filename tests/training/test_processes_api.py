"""``comingle.run`` in a program that torchrun starts in several processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import comingle
from comingle.runs import api
from comingle.runs import distributed as together
from comingle.utils.errors import RunError

SCRIPT = """
import sys
import comingle

texts = {name: [f"{name} counts {n} of {n}." for n in range(60)] for name in ("ada", "ben", "cem")}
options = {
    "base": "random:llama?layers=1&dim=32",
    "training": {"rounds": 2, "local_steps": 1, "context": 32},
    "runtime": {"device": "cpu", "dtype": "float32", "users_per_step": 1, "threads": 1, "shard_sums": "ordered"},
}
for seed in (0, 1):
    run = comingle.run(options, users=texts, method="fedavg", seed=seed, out=f"{sys.argv[1]}/{seed}")
    words = [str(seed), *sorted(run.metrics["users"]), run.user("cem").name]
    sys.stdout.write(" ".join(words) + "\\n")  # in one piece, as the other process writes to the same pipe
    sys.stdout.flush()
"""


@pytest.mark.slow
def test_a_program_of_two_processes_runs_what_one_does(tmp_path: Path) -> None:
    """Twice, one run after the other; each process has the whole of both."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = {"one": [], "two": ["-m", "torch.distributed.run", "--nproc-per-node", "2"]}
    for name, options in launcher.items():
        command = [sys.executable, *options, str(tmp_path / "script.py"), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        told = sorted(line for line in done.stdout.splitlines() if line)
        count = 1 if name == "one" else 2
        assert told == sorted([f"{seed} ada ben cem cem" for seed in (0, 1)] * count)
    for seed in "01":
        one, two = (json.loads((tmp_path / name / seed / "metrics.json").read_text()) for name in launcher)
        assert one["users"] == two["users"]


@pytest.mark.slow
def test_runs_follow_one_another_without_torchrun(tmp_path: Path) -> None:
    """As other launchers start processes: the first of them is the server at which they meet."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("(0, 1)", "range(8)"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "runs")]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **launched, "RANK": rank})
        for rank in "01"
    ]
    try:
        said = [process.communicate(timeout=120)[0].split("\n") for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [[line[0] for line in lines if line] for lines in said] == [list("01234567")] * 2


def test_the_environment_says_which_run_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comingle.run is api.run
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in launched.items():
        monkeypatch.setenv(key, value)
    assert comingle.run is together.run
    assert comingle.load is api.load
    with pytest.raises(RunError, match=r"out: got None.* 2 processes; .*out=FOLDER"):
        comingle.run({})
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert comingle.run is api.run


ALONE = """
import sys
import comingle

calls = {
    "compare": lambda: comingle.compare({}, ["local", "fedavg"], out=sys.argv[1]),
    "advise": lambda: comingle.advise({}, ["fedavg"]),
    "join": lambda: comingle.join(sys.argv[1], name="eve", data=["text"]),
    "audit": lambda: comingle.audit(sys.argv[1]),
}
told = []
for name, call in calls.items():
    try:
        call()
    except comingle.ComingleError as error:
        told.append(str(error))
sys.stdout.write("".join(f"{line}\\n" for line in told))
"""


@pytest.mark.slow
def test_what_each_process_would_do_by_itself_is_refused_in_each(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    verbs = [verb for verb in ("advise", "audit", "compare", "join") for _ in range(2)]
    assert [line.partition(":")[0] for line in lines] == verbs
    assert all(re.search(r"\b2\b.*comingle\.run.*torchrun", line) for line in lines)
    assert not (tmp_path / "out").exists()
