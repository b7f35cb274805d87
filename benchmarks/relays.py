"""Seconds of a round over comingle's own server and client processes, and over Flower's programs; one JSON line.

    python benchmarks/relays.py --rounds 20
    python benchmarks/relays.py --rounds 20 --only own subprocess

The same federation runs three times: under ``comingle federate``; under ``flower-superlink`` and ``flower-supernode``
with a process for each message (``--isolation subprocess``); and with long-lived ``flower-superexec`` processes beside
them (``--isolation process``). A round is the time between two ``round`` events; the first one is left out, since base
and torch are loaded in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from comingle.config import Recipe, parse_recipe
from comingle.federation.files import save_plan, split_recipe
from comingle.federation.flower.client_app import PROJECT
from comingle.federation.flower.processes import LOOPBACK, environment, free_port, listens
from comingle.federation.launch import federate
from comingle.federation.participant import Participant, save_participant
from comingle.federation.run_folder import has_ended

PROGRAMS = Path(sys.executable).parent
WAYS = ("own", "subprocess", "process")
_START_SECONDS, _RUN_SECONDS = 120.0, 1800.0


def main() -> None:
    """Run the federations that are asked for and print what a round takes in each."""
    args = _arguments()
    line: dict[str, Any] = {"benchmark": "relays", "users": args.users, "rounds": args.rounds}
    for way in args.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            recipe = parse_recipe(_recipe(path, args.users, args.rounds))
            began = time.monotonic()
            seconds = _run_own(recipe, path) if way == "own" else _run_stock(recipe, path, way)
            line[f"{way}_round_seconds"] = round(median(seconds), 2)
            line[f"{way}_slowest_round_seconds"] = round(max(seconds), 2)
            line[f"{way}_wall_seconds"] = round(time.monotonic() - began, 1)
            print(f"{way}: {json.dumps([round(one, 2) for one in seconds])}", file=sys.stderr, flush=True)
    line |= {
        f"{way}_over_own": round(line[f"{way}_round_seconds"] / line["own_round_seconds"], 1)
        for way in args.only
        if way != "own" and "own" in args.only
    }
    print(json.dumps(line))


def _run_own(recipe: Recipe, folder: Path) -> list[float]:
    """Run the federation under ``comingle federate`` and return the seconds of each round but the first."""
    with _timed(folder / "run") as times:
        federate(recipe, folder / "run")
    return _differences(times)


def _run_stock(recipe: Recipe, folder: Path, isolation: str) -> list[float]:
    """Run the federation under Flower's programs and return the seconds of each round but the first.

    Args:
        recipe: The recipe.
        folder: Folder for all files.
        isolation: "subprocess" or "process", as of Flower's ``--isolation``.
    """
    out = folder / "run"
    plan, own_parts = split_recipe(recipe)
    save_plan(folder / "federation.yaml", plan)
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    home = folder / "flower" / "home"
    home.mkdir(parents=True)
    superlink_port, *node_ports = [free_port() for _ in range(len(own_parts) + 1)]
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{LOOPBACK}:{superlink_port}"\ninsecure = true\n',
        encoding="utf-8",
    )
    (folder / "secret").write_bytes(os.urandom(32))
    common = ["--insecure", "--isolation", isolation, "--host", LOOPBACK]
    common += ["--superexec-auth-secret-file", str(folder / "secret")]
    commands = [
        ["flower-superlink", *common, "--port", str(superlink_port), "--disable-runtime-dependency-installation"]
    ]
    for own_part, port in zip(own_parts, node_ports, strict=True):
        file = folder / own_part.name / "participant.yaml"
        participant = Participant(**own_part.model_dump(exclude_defaults=True), state=".")
        save_participant(file, participant)
        address = ["--superlink", f"{LOOPBACK}:{superlink_port}", "--port", str(port)]
        address += ["--node-config", f'config="{file}"']
        commands.append(["flower-supernode", *common, *address])
    executors = [
        *("flower-superexec", "--insecure", "--superexec-auth-secret-file", str(folder / "secret")),
        "--runtime-api-address",
    ]
    with _programs(commands, folder, superlink_port), _timed(out) as times:
        ports = (superlink_port, *node_ports) if isolation == "process" else ()
        executor_commands = [[*executors, f"{LOOPBACK}:{port}"] for port in ports]
        with _programs(executor_commands, folder, superlink_port):
            config = f'federation="{folder / "federation.yaml"}" out="{out}"'
            run = [str(PROGRAMS / "flwr"), "run", str(folder / "app"), "here", "--run-config", config]
            subprocess.run(run, check=True, env=_environment(folder), stdout=subprocess.DEVNULL)
            deadline = time.monotonic() + _RUN_SECONDS
            while not has_ended(out):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{isolation}: has not ended in {_RUN_SECONDS:g} s")
                time.sleep(0.2)
    return _differences(times)


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment in which Flower's programs find each other."""
    return {**environment(folder / "flower"), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}


@contextmanager
def _programs(commands: Sequence[Sequence[str]], folder: Path, port: int) -> Iterator[None]:
    """Run Flower's programs; the first one listens before the others start."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for program, *options in commands:
            with (folder / f"{program}.log").open("ab") as log:
                command = [str(PROGRAMS / program), *options]
                started.append(subprocess.Popen(command, env=_environment(folder), stdout=log, stderr=log))
            until = time.monotonic() + _START_SECONDS
            while not listens(f"{LOOPBACK}:{port}"):
                if time.monotonic() > until:
                    raise SystemExit(f"{program}: does not listen; {(folder / f'{program}.log').read_text()[-2000:]}")
                time.sleep(0.2)
        yield
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)


@contextmanager
def _timed(out: Path) -> Iterator[list[float]]:
    """Collect the times at which ``round`` events are written to a run folder."""
    times: list[float] = []
    over = threading.Event()

    def watch() -> None:
        path = out / "events.jsonl"
        while not over.wait(0.01):
            if path.exists():
                done = path.read_bytes().count(b'"event": "round"')
                times.extend([time.monotonic()] * (done - len(times)))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield times
    over.set()
    thread.join()


def _differences(times: Sequence[float]) -> list[float]:
    """Return the differences of successive times."""
    return [after - before for before, after in itertools.pairwise(times)]


def _recipe(folder: Path, users: int, rounds: int) -> dict[str, Any]:
    """Return a recipe whose local steps take next to no time."""
    sources = {}
    for number in range(users):
        path = folder / f"text{number}.txt"
        path.write_text("".join(f"User {number} writes line {line}.\n" for line in range(200)), encoding="utf-8")
        sources[f"user{number}"] = str(path)
    return {
        "base": "random:llama?dim=32",
        "data": {"users": sources, "split": {"valid": 0.1, "test": 0.1}},
        "method": "comigs-1g1s",
        "training": {"rounds": rounds, "local_steps": 1, "batch_size": 2, "context": 16},
        "evaluation": {"every": rounds, "first": False},
        "runtime": {"threads": 1},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
