"""Overhead of a federation over processes beyond its local steps, on this machine; one JSON line.

    python benchmarks/network.py --base BASE --users 2
    python benchmarks/network.py --base BASE --users 8 --rounds 2 --steps 2

Every user is a process with text of its own (files of Python's library). A round's overhead is its time less that of
the slowest user's local steps; the first begins when all have joined, base and torch loaded. Memory is the sum over all
processes of what is theirs (PSS: shared pages are shared out), at its highest.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from comingle.config import parse_recipe
from comingle.federation.launch import federate

CHARACTERS = 80_000


def main() -> None:
    """Run one federation and print what it cost."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        out, time_of_message = Path(folder) / "run", {}

        def say(line: str) -> None:
            if args.verbose:
                print(f"{time.perf_counter() - began:7.1f}  {line}", flush=True)
            message = line.partition(":")[0] if line.startswith("round ") else line.rpartition(" ")[2]
            time_of_message.setdefault(message, time.perf_counter())
            if message == "joined":
                time_of_message[message] = time.perf_counter()  # the last

        memory = Memory(folder)
        began = time.perf_counter()
        metrics = federate(parse_recipe(_recipe(args, Path(folder))), out, say=say)
        wall = time.perf_counter() - began
        peak = memory.end()
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    seconds = [event["seconds"] for event in events if event["event"] == "round"]
    ends = [time_of_message[f"round {number + 1}"] for number in range(len(seconds))]
    later = [end - before - work for before, end, work in zip(ends, ends[1:], seconds[1:], strict=False)]
    line = {
        "benchmark": "network",
        "users": args.users,
        "rounds": args.rounds,
        "local_seconds": [round(one, 2) for one in seconds],
        "all_joined_after_seconds": round(time_of_message["joined"] - began, 2),
        "first_overhead_seconds": round(ends[0] - time_of_message["joined"] - seconds[0], 2),
        "later_overhead_seconds": [round(one, 2) for one in later],
        "later_overhead_median_seconds": round(median(later), 2) if later else None,
        "wall_seconds": round(wall, 1),
        "peak_memory_gib": round(peak / 2**30, 2),
        "upload_bytes_per_user_round": metrics["upload_bytes_per_user_round"],
    }
    print(json.dumps(line))


class Memory:
    """Peak memory of this process and of the federation's processes."""

    def __init__(self, folder: str) -> None:
        self._folder, self._peak, self._ended = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Stop and return the peak memory in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        """Poll the memory of all processes every second until :meth:`end`."""
        while not self._ended.wait(1.0):
            self._peak = max(
                self._peak, sum(_proportional_bytes(process) for process in _federation_processes(self._folder))
            )


def _federation_processes(folder: str) -> list[psutil.Process]:
    """Return this process and all processes of the federation in a folder."""
    processes = [psutil.Process()]
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(folder in value for value in (*process.environ().values(), *process.cmdline())):
                processes.append(process)
    return processes


def _proportional_bytes(process: psutil.Process) -> int:
    """Return the proportional set size of a process in bytes; 0 if it has ended or cannot be read."""
    with suppress(psutil.Error, OSError):
        return process.memory_full_info().pss
    return 0


def _recipe(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write users' text, parts of Python's library, and return the recipe."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    library_text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    users = {}
    for number in range(args.users):
        path = folder / f"text{number}.txt"
        path.write_text(library_text[number * CHARACTERS : (number + 1) * CHARACTERS], encoding="utf-8")
        users[f"user{number}"] = str(path)
    return {
        "base": args.base,
        "data": {"users": users, "split": {"valid": 0.1, "test": 0.1}},
        "method": args.method,
        "training": {"rounds": args.rounds, "local_steps": args.steps, "batch_size": 4, "context": 128},
        "evaluation": {"every": args.rounds, "first": False},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--method", default="comigs-1g1s")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
