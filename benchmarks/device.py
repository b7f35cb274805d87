"""Processes, memory and idle load of one participant of a federation, on this machine; one JSON line.

    python benchmarks/device.py --base BASE
    python benchmarks/device.py --base BASE --dtype bfloat16 --rounds 3
    python benchmarks/device.py --base BASE --other main~5      (the same of another commit, in turns)
    python benchmarks/device.py --base BASE --serve             (its model answers requests meanwhile)

A server and two users run as typed commands. The first user joins and waits for the second, which is the idle time;
then both train. Memory is that of all processes of the first user together, as PSS: shared pages are divided among the
processes that share them.

The first user starts with the server, which takes most of ``joined_after_seconds``. When the others have joined, after
``others_joined_after_seconds``, the first local step begins.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from comingle.federation.flower.processes import free_port
from compare_commits import checkout, environment

HERE = Path(__file__).parents[1]
CHARACTERS = 80_000
PROMPT, ANSWER_TOKENS = "def main() -> None:", 32
JOINED = re.compile("has (joined|come)")
"""The server's line about a user who joins; "has come" up to commit cb378345."""
_SAMPLE_SECONDS = 0.2
_LIMIT_SECONDS = 1800.0


def main() -> None:
    """Measure this checkout, and another commit if one is named."""
    asked = _arguments()
    measure = measure_all if asked.federate else measure_first
    with tempfile.TemporaryDirectory() as metadata, tempfile.TemporaryDirectory() as other_metadata:
        own = environment(HERE, Path(metadata))
        print(json.dumps({"benchmark": "device", "commit": "here", **measure(asked, own)}), flush=True)
        if asked.other:
            with checkout(asked.other) as tree:
                other = environment(tree, Path(other_metadata))
                print(json.dumps({"benchmark": "device", "commit": asked.other, **measure(asked, other)}), flush=True)


def measure_all(asked: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, Any]:
    """Run ``comingle federate`` and return what the server and all clients need on one machine.

    Args:
        asked: Options of the command line.
        variables: Environment of the command, which decides the commit.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        users = _write_files(asked, folder)
        recipe = yaml.safe_load((folder / "federation.yaml").read_text(encoding="utf-8"))
        recipe = {key: value for key, value in recipe.items() if key not in ("participants", "network")}
        recipe["data"] = {"users": {name: str(path) for name, path in users.items()}, "max_test_tokens": 1024}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        began = time.monotonic()
        line = ("federate", folder / "recipe.yaml", "--out", folder / "run")
        with _command(folder, "federate", line, variables) as process, Monitor(process.pid) as monitor:
            if process.wait(_LIMIT_SECONDS):
                raise SystemExit(f"device: it failed\n{_text(folder, 'federate')}")
            peak = monitor.reset_peak()
        return {
            "base": Path(asked.base).name,
            "users": len(users),
            "quantise": asked.quantise,
            "seconds": round(time.monotonic() - began, 1),
            "peak_mib": peak,
        }


def measure_first(asked: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, Any]:
    """Run a federation and return what its first participant needs.

    Args:
        asked: Options of the command line.
        variables: Environment of the commands, which decides the commit.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, port = Path(scratch), free_port()
        users = _write_files(asked, folder)
        server = ("server", folder / "federation.yaml", "--out", folder / "run", "--port", port)
        common = {"base": asked.base, "server": f"127.0.0.1:{port}"}
        if asked.memory:
            common["runtime"] = {"memory": asked.memory}
        clients = []
        for name, path in users.items():
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump({"name": name, "data": str(path), "state": str(folder / name), **common}))
            clients.append(("client", file))
        first, *others = clients
        serving_port = free_port()
        if asked.serve:
            first = (*first, "--serve", serving_port)
        answers = AnswerTimes(serving_port, next(iter(users)))
        with _command(folder, "server", server, variables) as serving:
            began = time.monotonic()
            log = partial(_text, folder, "first")
            command = partial(_command, folder, variables=variables, limit_mib=asked.cgroup_mib)
            with command("first", first) as process, Monitor(process.pid, folder / "user0") as monitor:
                _wait(lambda: "waiting for" in _text(folder, "first"), process, log)
                waiting = time.monotonic() - began
                _wait(lambda: JOINED.search(_text(folder, "server")) is not None, process, log)
                joined = time.monotonic() - began
                time.sleep(asked.settle)
                answers.measure(asked.answers if asked.serve else 0)
                idle_answers = answers.reset()
                join_peak, server_before = monitor.reset_peak(), _cpu_seconds(serving.pid)
                found = monitor.idle(asked.idle)
                server_idle = (_cpu_seconds(serving.pid) - server_before) / asked.idle
                others_began = time.monotonic()
                with ExitStack() as stack:
                    for number, other in enumerate(others):
                        stack.enter_context(command(f"other{number}", other))
                    if asked.serve:
                        stack.enter_context(answers.measured_meanwhile(lambda: "round 1" in log()))
                    _wait(lambda: len(JOINED.findall(_text(folder, "server"))) > len(others), process, log)
                    others_joined = time.monotonic() - others_began
                    _wait(lambda: serving.poll() is not None, process, log, ends=True)
                    peak = monitor.reset_peak()
                if serving.returncode or process.wait(60):
                    raise SystemExit("\n".join(["device: it failed", _text(folder, "server"), log()]))
        return {
            "base": Path(asked.base).name,
            "dtype": asked.dtype,
            "quantise": asked.quantise,
            "memory": asked.memory,
            "settings": _setting(folder),
            "waiting_after_seconds": round(waiting, 1),
            "joined_after_seconds": round(joined, 1),
            "others_joined_after_seconds": round(others_joined, 1),
            **found,
            "server_idle_cpu_percent": round(100 * server_idle, 2),
            "join_peak_mib": join_peak,
            "rounds_peak_mib": peak,
            **({"idle_answers": idle_answers, "answers_in_rounds": answers.reset()} if asked.serve else {}),
        }


class Monitor:
    """Memory of a process with its children, sampled in a thread; peaks since the last reset."""

    def __init__(self, pid: int, folder: Path | None = None) -> None:
        self._pid, self._folder, self._peak, self._ended = pid, folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def reset_peak(self) -> int:
        """Return the peak in MiB, and start anew."""
        peak, self._peak = self._peak, 0
        return round(peak / 2**20)

    def idle(self, seconds: float) -> dict[str, Any]:
        """Return processes, threads, memory and processor time over some idle seconds."""
        processes = _tree(self._pid, self._folder)
        before = _cpu_seconds(self._pid, self._folder)
        time.sleep(seconds)
        return {
            "processes": len(processes),
            "threads": sum(process.num_threads() for process in processes),
            "idle_mib": round(sum(map(_pss, processes)) / 2**20),
            "idle_cpu_percent": round(100 * (_cpu_seconds(self._pid, self._folder) - before) / seconds, 2),
        }

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, sum(map(_pss, _tree(self._pid, self._folder))))


class AnswerTimes:
    """Seconds per token of the answers of a model that a client serves."""

    def __init__(self, port: int, name: str) -> None:
        self._url, self._name = f"http://127.0.0.1:{port}/v1/completions", name
        self._first: list[float] = []  # seconds to the first token of each answer
        self._others: list[float] = []  # mean seconds to each further token

    def measure(self, count: int) -> None:
        """Request some answers, one after another."""
        for _ in range(count):
            self._request()

    def reset(self) -> dict[str, float]:
        """Return the number of answers, and the medians in milliseconds; forget them."""
        found: dict[str, float] = {"count": len(self._first)}
        if self._first:
            found["first_token_ms"] = round(1000 * statistics.median(self._first), 1)
            found["further_token_ms"] = round(1000 * statistics.median(self._others), 1)
        self._first, self._others = [], []
        return found

    @contextmanager
    def measured_meanwhile(self, begun: Callable[[], bool]) -> Iterator[None]:
        """Request answers in a thread, from the time at which ``begun`` is true to the end of the context."""
        ended = threading.Event()

        def request_all() -> None:
            while not ended.wait(0.2):
                if begun():
                    with suppress(OSError):  # the client has ended
                        self._request()

        thread = threading.Thread(target=request_all, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _request(self) -> None:
        """Request an answer as a stream, and record the times between its tokens."""
        body = {"model": self._name, "prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        times = [time.perf_counter()]
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["finish_reason"] is None:
                    times.append(time.perf_counter())
        if len(times) > 2:
            self._first.append(times[1] - times[0])
            self._others.append((times[-1] - times[1]) / (len(times) - 2))


def _tree(pid: int, folder: Path | None = None) -> list[psutil.Process]:
    """Return a process and all its descendants, and processes with a folder in their command lines.

    The worker of a client, up to commit cb378345, is no descendant: the process that starts it ends.
    """
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
    if folder is not None:
        own = {os.getpid(), *(process.pid for process in found)}
        for process in psutil.process_iter(["cmdline"]):
            if process.pid not in own and str(folder) in (process.info["cmdline"] or ()):
                found.append(process)
    return found


def _pss(process: psutil.Process) -> int:
    with suppress(psutil.Error, OSError):
        return process.memory_full_info().pss
    return 0


def _cpu_seconds(pid: int, folder: Path | None = None) -> float:
    total = 0.0
    for process in _tree(pid, folder):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextmanager
def _command(
    folder: Path, name: str, arguments: Sequence[object], variables: Mapping[str, str], limit_mib: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``comingle`` with some arguments; what it prints goes to ``NAME.log``."""
    line = [sys.executable, "-m", "comingle", *map(str, arguments)]
    group: Path | None = None
    if limit_mib is not None:
        group = Path(f"/sys/fs/cgroup/memory/comingle-{os.getpid()}-{name}")  # version 1
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_mib << 20))
        line = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *line]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(variables))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
        if group is not None:
            largest = int((group / "memory.max_usage_in_bytes").read_text()) >> 20
            print(f"{name}: {largest} MiB at most, with cached files", file=sys.stderr)
            group.rmdir()


def _setting(folder: Path) -> str:
    """Return the line in which the first client says what it has chosen for its memory; empty without one."""
    lines = [line for line in _text(folder, "first").splitlines() if "runtime.memory" in line]
    return lines[0] if lines else ""


def _text(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text(errors="replace")


def _wait(
    happened: Callable[[], bool], process: subprocess.Popen[bytes], log: Callable[[], str], *, ends: bool = False
) -> None:
    """Wait until something has happened, while a process runs."""
    until = time.monotonic() + _LIMIT_SECONDS
    while not happened():
        if time.monotonic() > until or (process.poll() is not None and not ends):
            raise SystemExit(f"device: the client has ended, or took too long\n{log()}")
        time.sleep(0.1)


def _write_files(asked: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Write the server's file and the users' texts (files of Python's library); return the texts by user."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    users = {f"user{number}": folder / f"user{number}.txt" for number in range(asked.users)}
    for number, path in enumerate(users.values()):
        path.write_text(text[number * CHARACTERS : (number + 1) * CHARACTERS], encoding="utf-8")
    plan: dict[str, Any] = {
        "participants": list(users),
        "network": {"min_participants": len(users), "join_timeout": 600},
        "base": asked.base,
        "method": asked.method,
        "training": {"rounds": asked.rounds, "local_steps": asked.steps, "batch_size": 4, "context": 128},
        "evaluation": {"every": asked.rounds, "first": False},
        "runtime": {"dtype": asked.dtype},
    }
    if asked.serve:  # others take little time, as they share the cores with the one that is measured
        first, *others = users
        plan["training"]["local_steps"] = {first: asked.steps, **dict.fromkeys(others, 1)}
    if asked.quantise != "none":
        plan["quantise"] = asked.quantise
    if asked.memory:  # the clients choose what is not set
        del plan["runtime"]
    (folder / "federation.yaml").write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    return users


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantise", default="none", help="Format of the base: none, 8bit or 4bit.")
    parser.add_argument("--memory", help="runtime.memory of the clients, such as 650MiB.")
    parser.add_argument("--cgroup-mib", type=int, help="Limit of a control group for each client; as root.")
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--federate", action="store_true", help="Measure server and clients of comingle federate.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--method", default="comigs-1g1s")
    parser.add_argument("--settle", type=float, default=10.0, help="Seconds between joining and the idle measurement.")
    parser.add_argument("--idle", type=float, default=20.0, help="Seconds of the idle measurement.")
    parser.add_argument("--serve", action="store_true", help="Request answers of the first client's model meanwhile.")
    parser.add_argument("--answers", type=int, default=5, help="Answers in the idle time, with --serve.")
    parser.add_argument("--other", help="Another commit to measure as well.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
