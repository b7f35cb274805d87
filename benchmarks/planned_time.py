"""Compare planned round times (``comingle cost --machines``) with measured ones (``comingle run --processes``).

``python benchmarks/planned_time.py [CASE ...] [--processes 1,2,3,4] [--turns 3] [--clock wall|processor]`` prints one
JSON line for each case and number of processes on this machine:

- ``planned_s`` and ``measured_s``: seconds of a round, with an evaluation and a checkpoint every three rounds;
- ``off``: planned over measured, less 1, as the median over turns; each turn measures the parts and then runs;
- ``least_off``: the same with the minimum of both over turns, which other work on the machine affects least;
- ``from_2_off``: the same with the parts that were measured in two processes, for more of them;
- ``shares``: shares of compute, server, network and disk in the planned round; ``load``: the machine's load.

Start-up is excluded: times are taken between two checkpoints, from the clock in them. Processes have one thread each.
On a machine with other work, ``--clock processor`` measures processor time instead of wall time, both for
the parts and in the run. Waiting for the network, the disk or a core is then excluded from both.
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

from comingle.config import Recipe, load_recipe
from comingle.cost import machines
from comingle.cost.machines import Measurement, measure, plan_time, run_work
from comingle.cost.planning import plan
from comingle.cost.timing import Cluster
from comingle.runs.distributed import cores

ROUNDS, USERS = 3, 12
"""Rounds between two checkpoints, and users of the population.

A run has three checkpoints. The time is taken between the first two: the rounds before them warm up, and the last round
of a run has no exchange.
"""

TEXT = {
    "base": "random:llama",
    "data": {"users": {f"user{i}": f"user{i}.txt" for i in range(USERS)}, "max_test_tokens": 50},
    "training": {"local_steps": 5, "batch_size": 8, "context": 64},
    "runtime": {"users_per_step": 3},
}
NETS = {
    "data": {"task": {"name": "mlp-norm", "users": 240, "clusters": 2}},
    "training": {"batch_size": 40},
    "runtime": {"users_per_step": 60},
}
CASES: dict[str, dict[str, Any]] = {
    "text, sums": {**TEXT, "method": "fedavg"},
    "text, every upload": {**TEXT, "method": "fedmerge"},
    "nets, sums": {**NETS, "method": "fedavg"},
}


def write_case(case: str, folder: Path) -> Path:
    """Write the recipe of a case, with made-up text beside it."""
    content = CASES[case]
    for name in content["data"].get("users", {}):
        draw = random.Random(name)
        words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(400)]
        text = "\n\n".join(" ".join(words[i : i + 25]) for i in range(0, len(words), 25))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    machine = {"dtype": "float32", "device": "cpu", "threads": 1, "compile": False}
    whole = content | {
        "training": content["training"] | {"rounds": 3 * ROUNDS},
        "runtime": content["runtime"] | machine,
        "evaluation": {"every": ROUNDS, "first": False},
        "checkpoints": {"every": ROUNDS, "keep": 3},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    return path


PROCESSOR = "import time\ntime.perf_counter = time.process_time\n"
"""First lines of every Python process if processor time is the clock, as ``sitecustomize.py``."""


def use_processor_time(folder: Path) -> None:
    """Have all processes that are started from now on take their own processor time for the clock."""
    (folder / "sitecustomize.py").write_text(PROCESSOR, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def run_round(recipe: Path, out: Path, processes: int) -> float:
    """Return the seconds of a round of a real run.

    Args:
        recipe: Path of the recipe.
        out: The run folder.
        processes: Number of processes.
    """
    command = [sys.executable, "-m", "comingle", "run", str(recipe), "--out", str(out), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--processes", str(processes)], check=True, env=environment, capture_output=True)
    checkpoints = [out / "checkpoints" / f"round-{number * ROUNDS:04d}" / "checkpoint.json" for number in (1, 2)]
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in checkpoints)
    # With a clock of its own each process has seconds of its own: steps are those of the slowest, wherever it is.
    return max((second[key] - first[key]) / ROUNDS for key in ("wall_seconds", "train_seconds"))


def describe_machine(processes: int, disk: float = 1.0, *, own_core: bool) -> Cluster:
    """Describe this machine as a cluster.

    Args:
        processes: Number of processes.
        disk: Rate of the disk, in bytes per second.
        own_core: Whether each process has its own core.
    """
    count = processes if own_core else cores()
    return Cluster(machines=1, processes=processes, cores=count, threads=1, link=1.25e9, latency=1e-4, disk=disk)


def planned_round(
    recipe: Recipe, cost: Any, measurement: Measurement, processes: int, *, own_core: bool
) -> dict[str, Any]:
    """Return the planned times of a round on this machine.

    Args:
        recipe: The recipe.
        cost: Costs of its method.
        measurement: Measurement of the parts.
        processes: Number of processes.
        own_core: Whether each process has its own core.
    """
    machine = describe_machine(processes, measurement.disk, own_core=own_core)
    users = sum(len(user.names) for user in cost.users)
    return plan_time(run_work(recipe, cost, measurement, users), measurement, machine).as_dict()


def measure_case(case: str, counts: list[int], turns: int, *, own_core: bool) -> None:
    """Plan and run a case in turns and print a line of JSON for each number of processes.

    Args:
        case: Key of ``CASES``.
        counts: Numbers of processes.
        turns: Number of turns.
        own_core: Whether each process has its own core, as with processor time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_case(case, Path(folder))
        recipe = load_recipe(path)
        (cost,) = plan(recipe).methods
        users = sum(len(user.names) for user in cost.users)
        rows: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
        for turn in range(turns):
            measurements: dict[int, Measurement] = {}
            for count in counts:
                if own_core:
                    machines.cores = lambda count=count: count
                measurements[count] = measure(recipe, describe_machine(count, own_core=own_core), users)
                planned = planned_round(recipe, cost, measurements[count], count, own_core=own_core)
                measured = run_round(path, Path(folder) / f"run-{turn}-{count}", count)
                extrapolated = count > 2 and 2 in measurements
                fewer = planned_round(recipe, cost, measurements[2], count, own_core=own_core) if extrapolated else None
                rows[count].append({"planned": planned, "measured": measured, "fewer": fewer})
                print(turn, count, planned["round_seconds"], measured, file=sys.stderr, flush=True)
    for count, turns_of in rows.items():
        print(json.dumps({"case": case, "processes": count} | summarise(turns_of)), flush=True)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a line of results: medians over turns and errors of the plan."""

    def off(key: str) -> float:
        return round(median(row[key]["round_seconds"] / row["measured"] for row in rows) - 1, 3)

    middle = sorted(rows, key=lambda row: row["planned"]["round_seconds"])[len(rows) // 2]["planned"]
    parts = ("compute", "server", "network", "disk")
    fields = {
        "planned_s": round(median(row["planned"]["round_seconds"] for row in rows), 3),
        "measured_s": round(median(row["measured"] for row in rows), 3),
        "off": off("planned"),
        "least_off": round(
            min(row["planned"]["round_seconds"] for row in rows) / min(row["measured"] for row in rows) - 1, 3
        ),
        "each_off": [round(row["planned"]["round_seconds"] / row["measured"] - 1, 2) for row in rows],
        "shares": {key: round(middle[f"{key}_seconds"] / middle["round_seconds"], 3) for key in parts},
        "load": round(os.getloadavg()[0], 1),
    }
    return fields | ({"from_2_off": off("fewer")} if rows[0]["fewer"] else {})


def main() -> None:
    """Plan and run the cases and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--processes", default="1,2,3,4")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    args = parser.parse_args()
    counts = [int(count) for count in args.processes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if args.clock == "processor":
            use_processor_time(Path(folder))
        for case in args.cases or CASES:
            measure_case(case, counts, args.turns, own_core=args.clock == "processor")


if __name__ == "__main__":
    main()
