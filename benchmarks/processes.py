"""What a second process gains: rounds of one run with one process and with several, in turns.

``python benchmarks/processes.py [--processes 1,2] [--users 32] [--rounds 6] [--turns 3] [--method fedavg]`` trains a random
language model's users on text that is made up, with one thread for each process, and prints one JSON line:

- ``round_s``: median seconds of a round (local steps and exchange) for each number of processes;
- ``speed_up``: how many times faster a round is than with one process, by the medians of each turn;
- ``exchange_s``: what of it is not the slowest process's local steps;
- ``sent_bytes``: what a process sends of its users' uploads in a round, reduced and ordered.

Start-up is left out: every process takes some seconds to import what it needs, whatever the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import yaml


def write_recipe(folder: Path, users: int, rounds: int, method: str) -> Path:
    (folder / "texts").mkdir()
    names = [f"user{number}" for number in range(users)]
    for name in names:
        draw = random.Random(name)
        words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(400)]
        text = "\n\n".join(" ".join(words[i : i + 25]) for i in range(0, len(words), 25))
        (folder / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    content = {
        "base": "random:llama",
        "method": method,
        "data": {"users": {name: f"texts/{name}.txt" for name in names}, "max_test_tokens": 50},
        "training": {"rounds": rounds, "local_steps": 10, "batch_size": 8, "context": 64},
        "evaluation": {"every": rounds, "first": False},
        "checkpoints": {"every": rounds},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1, "users_per_step": 4, "compile": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def play(recipe: Path, out: Path, processes: int) -> list[dict[str, Any]]:
    """The rounds of a run, but for the first, in which everything is warmed up; with the time between their ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COMINGLE_NO_TYPECHECK": "1"}
    code = (
        "import sys, time, json; from comingle.engines import events; take = events.EventLog.__call__\n"
        "def stamped(self, event):\n"
        "    if event['event'] == 'round': event = event | {'clock': time.perf_counter()}\n"
        "    take(self, event)\n"
        "events.EventLog.__call__ = stamped\n"
        "from comingle.cli import main; main()"
    )
    _ = code
    command = [sys.executable, "-m", "comingle", "run", str(recipe), "--out", str(out), "--quiet"]
    subprocess.run([*command, "--processes", str(processes)], check=True, env=environment, capture_output=True)
    return [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
