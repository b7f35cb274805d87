"""Speed and memory of this checkout against another commit, in turns on the same machine.

    python benchmarks/compare_commits.py main~1
    python benchmarks/compare_commits.py main --only throughput --turns 5
    python benchmarks/compare_commits.py main --only throughput --one-core

Checks out the other commit in a temporary worktree, runs each benchmark of both checkouts in turns, and prints one line
of JSON for each: the ratio of the medians, this checkout over the other, that of the best turns, and the ratio of each
turn. Times and memory below 1 are better here; tokens per second above 1. A ratio of medians is good where the turns
agree. Other load only slows a benchmark down, so that the best of many turns is comparable on a busy machine as well.
Absolute values depend on what else the machine does and are not printed.

With ``--one-core`` both checkouts run at the same time on one core, which the scheduler gives to them in slices of
milliseconds, with one thread each, and count CPU seconds. Load of other programs then slows both down alike, so
that differences of a few percent show on a shared machine too; speed on several threads does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
SMALL = ("--layers", "4", "--dim", "256", "--heads", "4", "--vocab", "8192", "--users", "4", "--batch", "16")
LARGE = ("--layers", "12", "--dim", "768", "--heads", "12", "--vocab", "50257", "--batch", "4")

BENCHMARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "throughput": (("benchmarks/throughput.py", *SMALL, "--iters", "4"), ("tokens_per_s", "peak_rss_mb")),
    "throughput-124m": (("benchmarks/throughput.py", *LARGE, "--iters", "2"), ("tokens_per_s", "peak_rss_mb")),
    "many_users": (("benchmarks/many_users.py", "--grow", ""), ("stacked_s", "peak_rss_mb")),
    "peers": (("benchmarks/peers.py", "--rows", "small", "--iters", "2"), ("comingle.seconds",)),
    "serving": (("benchmarks/serving.py", "--users", "4", "--new", "16", "--repeats", "1"), ("served_tokens_per_s",)),
    "import": (("-c", "import comingle"), ("seconds", "peak_rss_mb")),
    "help": (("-m", "comingle", "--help"), ("seconds", "peak_rss_mb")),
}
"""Arguments of Python for each benchmark, and the numbers that are compared; of ``import`` and ``help`` the process.

A number inside a mapping has a dotted name."""


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check out a commit in a temporary folder and remove it afterwards."""
    git = ("git", "-C", str(HERE))
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


def environment(tree: Path, metadata: Path) -> dict[str, str]:
    """Return variables with which Python imports a checkout, under the entry points that this checkout declares."""
    sources = []
    for folder, name in ((tree, "comingle"), (tree / "papers", "comingle-papers")):
        # A commit without the second distribution hides the installed one by a distribution without entry points.
        project: dict[str, Any] = {"name": name, "version": "0"}
        if (folder / "pyproject.toml").is_file():
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        info = metadata / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project.get("entry-points", {})
        lines = [
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        sources.append(str(folder / "src"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sources, str(metadata)]), "COMINGLE_NO_TYPECHECK": "1"}


def start_benchmark(tree: Path, variables: dict[str, str], arguments: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start one benchmark of a checkout.

    A small parent process runs it, so that CPU seconds and peak memory are those of this benchmark alone.

    Args:
        tree: Folder of the checkout.
        variables: Environment variables.
        arguments: Arguments of Python.
    """
    program = (
        "import json, resource, subprocess, sys;"
        "done = subprocess.run([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE, text=True);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(done.stdout); print(json.dumps({'seconds': used.ru_utime + used.ru_stime,"
        " 'peak_rss_mb': used.ru_maxrss / 1024, 'status': done.returncode}))"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, cwd=tree, env=variables, stdout=subprocess.PIPE, text=True)


def read_benchmark(process: subprocess.Popen[str], keys: tuple[str, ...]) -> dict[str, float]:
    """Wait for a benchmark, and return those of ``keys`` that it has.

    Numbers that the benchmark prints are preferred to CPU seconds and peak memory of its process.

    Args:
        process: Result of :func:`start_benchmark`.
        keys: Names of the numbers to return.

    Raises:
        SystemExit: it failed.
    """
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args}: exit status {process.returncode}")
    *printed, last = [line for line in output.splitlines() if line.startswith("{")]
    process_numbers = json.loads(last)
    if process_numbers["status"]:
        raise SystemExit(f"{process.args}: exit status {process_numbers['status']}")
    numbers = {**process_numbers, **flatten(json.loads(printed[-1]) if printed else {})}
    return {key: float(numbers[key]) for key in keys if isinstance(numbers.get(key), int | float)}


def run_in_turn(
    sides: list[tuple[Path, dict[str, str]]], arguments: tuple[str, ...], keys: tuple[str, ...], *, reverse: bool
) -> list[dict[str, float]]:
    """Run one benchmark of each checkout, one after another, and return their numbers in the order of ``sides``.

    Args:
        sides: Folder and environment variables of each checkout.
        arguments: Arguments of Python.
        keys: Names of the numbers to return.
        reverse: Run the last checkout first, so that neither is always the first after a pause.
    """
    order = list(reversed(sides)) if reverse else sides
    numbers = [read_benchmark(start_benchmark(tree, variables, arguments), keys) for tree, variables in order]
    return list(reversed(numbers)) if reverse else numbers


def run_on_one_core(
    sides: list[tuple[Path, dict[str, str]]], arguments: tuple[str, ...], keys: tuple[str, ...]
) -> list[dict[str, float]]:
    """Run one benchmark of all checkouts at the same time on one core, and return their numbers.

    Args:
        sides: Folder and environment variables of each checkout.
        arguments: Arguments of Python.
        keys: Names of the numbers to return.
    """
    if arguments[0].startswith("benchmarks/"):
        arguments = (*arguments, "--threads", "1", "--cpu-time")
    core = min(os.sched_getaffinity(0))
    processes = []
    for tree, variables in sides:
        process = start_benchmark(tree, variables, arguments)
        os.sched_setaffinity(process.pid, {core})  # The benchmark inherits it: its parent has just begun.
        processes.append(process)
    return [read_benchmark(process, keys) for process in processes]


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def best(key: str, turns: list[dict[str, float]]) -> float:
    """Return the best value of a number: the largest of a speed, otherwise the smallest."""
    values = [turn[key] for turn in turns]
    return max(values) if key.endswith("_per_s") else min(values)


def main() -> None:
    """Compare the checkouts and print a line for each benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="names of benchmarks")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one-core", action="store_true", help="run both at once on one core, and count CPU seconds")
    options = parser.parse_args()
    with checkout(options.revision) as other, tempfile.TemporaryDirectory() as scratch:
        sides = [(tree, environment(tree, Path(scratch) / name)) for name, tree in (("here", HERE), ("other", other))]
        for name in options.only.split(","):
            arguments, keys = BENCHMARKS[name]
            turns = []
            for turn in range(options.turns):
                if options.one_core:
                    turns.append(run_on_one_core(sides, arguments, keys))
                else:
                    turns.append(run_in_turn(sides, arguments, keys, reverse=turn % 2 == 1))
            ratios = {
                key: {
                    "ratio": round(
                        statistics.median(here[key] for here, _ in turns)
                        / statistics.median(there[key] for _, there in turns),
                        3,
                    ),
                    "best": round(best(key, [here for here, _ in turns]) / best(key, [there for _, there in turns]), 3),
                    "turns": [round(here[key] / there[key], 3) for here, there in turns],
                }
                for key in turns[0][0]
            }
            print(json.dumps({"benchmark": name, **ratios}), flush=True)


if __name__ == "__main__":
    main()
