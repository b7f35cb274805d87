"""Speed-up by more processes: rounds of the same run with one process and with several, in turns.

``python benchmarks/processes.py [--processes 1,2] [--users 16] [--rounds 4] [--turns 3] [--method fedavg]`` trains a
random language model's users on made-up text, one thread for each process, and prints one JSON line:

- ``round_s``: seconds of a round by number of processes, the median over turns;
- ``steps_s``: seconds of it in local steps of the slowest process; the rest is messages, waiting and a checkpoint;
- ``speed_up``: seconds of a round with one process over those with this number, the median of the turns' ratios;
- ``steps_share``: share of local steps in a round.

Start-up is left out, since imports take some seconds in every process whatever the run. Times are differences between
the clocks of two checkpoints.
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

CHECKPOINTS = 3
"""Number of checkpoints: warm-up before the first, evaluation before the last, measurement in between."""


def write_recipe(folder: Path, users: int, rounds: int, method: str) -> Path:
    """Write the recipe, with made-up text of its users beside it, and return its path.

    Args:
        folder: Folder to write to.
        users: Number of users.
        rounds: Rounds between two checkpoints.
        method: Name of the method.
    """
    (folder / "texts").mkdir()
    names = [f"user{number}" for number in range(users)]
    for name in names:
        draw = random.Random(name)
        words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(400)]
        text = "\n\n".join(" ".join(words[i : i + 25]) for i in range(0, len(words), 25))
        (folder / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    all_rounds = CHECKPOINTS * rounds
    content = {
        "base": "random:llama",
        "method": method,
        "data": {"users": {name: f"texts/{name}.txt" for name in names}, "max_test_tokens": 50},
        "training": {"rounds": all_rounds, "local_steps": 10, "batch_size": 8, "context": 64},
        "evaluation": {"every": all_rounds, "first": False},
        "checkpoints": {"every": rounds, "keep": CHECKPOINTS},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1, "users_per_step": 4, "compile": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def measure(recipe: Path, out: Path, processes: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of a round and of its local steps.

    Args:
        recipe: Path of the recipe.
        out: The run folder.
        processes: Number of processes.
        rounds: Rounds between two checkpoints.
    """
    command = [sys.executable, "-m", "comingle", "run", str(recipe), "--out", str(out), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--processes", str(processes)], check=True, env=environment, capture_output=True)
    first, second = (
        json.loads((out / "checkpoints" / f"round-{number * rounds:04d}" / "checkpoint.json").read_text("utf-8"))
        for number in (1, 2)
    )
    round_s, steps_s = ((second[key] - first[key]) / rounds for key in ("wall_seconds", "train_seconds"))
    return round_s, steps_s


def main() -> None:
    """Time runs with each number of processes in turns and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--method", default="fedavg")
    args = parser.parse_args()
    counts = sorted({1, *(int(count) for count in args.processes.split(","))})
    measured: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder), args.users, args.rounds, args.method)
        for turn in range(args.turns):
            for count in counts:
                out = Path(folder) / f"run-{turn}-{count}"
                measured[count].append(measure(recipe, out, count, args.rounds))
    ratios = {
        count: median(single[0] / several[0] for single, several in zip(measured[1], turns, strict=True))
        for count, turns in measured.items()
    }
    rounds_s = {count: median(round_s for round_s, _ in turns) for count, turns in measured.items()}
    steps_s = {count: median(steps for _, steps in turns) for count, turns in measured.items()}
    line: dict[str, Any] = {
        "method": args.method,
        "users": args.users,
        "cores": os.cpu_count(),
        "round_s": {count: round(seconds, 4) for count, seconds in rounds_s.items()},
        "steps_s": {count: round(seconds, 4) for count, seconds in steps_s.items()},
        "speed_up": {count: round(ratio, 2) for count, ratio in ratios.items()},
        "steps_share": {count: round(steps_s[count] / rounds_s[count], 2) for count in counts},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
