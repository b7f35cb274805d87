"""Busy-waiting threads: seconds of a round alone and beside another run on the same processors.

    python benchmarks/crowded.py [--rounds 3] [--patience 120] [--spins 1000,4000]

Two threads train a random GPT-2, alone and beside a process that trains another one in a single thread. This is run
with the default of GNU's OpenMP (``GOMP_SPINCOUNT`` unset) and with each value of ``--spins``, by default that of the
command line. Prints one JSON line: the median seconds of a round after the first, or null if a run took more than
``--patience`` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comingle import SPINS

RECIPE = """
base: "random:gpt2?layers=12&dim=576&heads=9&vocab=4096"
data: {users: {a: "demo:library", b: "demo:reference"}, max_train_tokens: 4000, max_test_tokens: 200}
method: fedavg
training: {rounds: ROUNDS, local_steps: 4, batch_size: 1, context: 128}
evaluation: {every: ROUNDS, first: false}
checkpoints: {every: ROUNDS}
"""
RUN = "from comingle.cli import app; app()"  # not main, which sets GOMP_SPINCOUNT


def write_command(folder: Path, name: str, rounds: int) -> list[str]:
    """Write a recipe and return the command that runs it.

    Args:
        folder: Folder of the recipe and of the run folder.
        name: Name of both.
        rounds: Number of rounds.
    """
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.replace("ROUNDS", str(rounds)), encoding="utf-8")
    return [sys.executable, "-c", RUN, "run", str(recipe), "--out", str(folder / name), "--force", "--quiet"]


@contextmanager
def train_beside(folder: Path) -> Iterator[None]:
    """Train in another process with a single thread until the block ends."""
    endless = write_command(folder, "other", 100_000)
    process = subprocess.Popen(
        endless, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        events = folder / "other" / "events.jsonl"
        while not (events.is_file() and '"round"' in events.read_text(encoding="utf-8")):
            time.sleep(0.5)
            assert process.poll() is None
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def time_round(folder: Path, rounds: int, patience: float, spins: str | None) -> float | None:
    """Return the median seconds of a round after the first.

    Args:
        folder: Folder of the run.
        rounds: Number of rounds.
        patience: Time limit of the run, in seconds.
        spins: Value of ``GOMP_SPINCOUNT``; None leaves it unset.

    Returns:
        The seconds, or None if the run timed out.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    env |= {"OMP_NUM_THREADS": "2"} | ({} if spins is None else {"GOMP_SPINCOUNT": spins})
    try:
        subprocess.run(
            write_command(folder, "run", rounds), env=env, check=True, timeout=patience, stdout=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return None
    lines = (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    round_seconds = [event["seconds"] for event in map(json.loads, lines) if event["event"] == "round"]
    return round(statistics.median(round_seconds[1:]), 3)


def main() -> None:
    """Time runs with each setting and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=120)
    parser.add_argument("--spins", default=SPINS)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for spins in (None, *args.spins.split(",")):
            alone = time_round(folder, args.rounds, args.patience, spins)
            with train_beside(folder):
                beside = time_round(folder, args.rounds, args.patience, spins)
            results["default" if spins is None else f"GOMP_SPINCOUNT={spins}"] = {"alone": alone, "beside": beside}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
