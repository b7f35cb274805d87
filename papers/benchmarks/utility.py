"""The cost of privacy: test scores over epsilon, by method, on real data.

AG News with its four categories as users, the authors of stackexchange_users with most text, and MNIST with 300 users.
Each run spends a given epsilon at delta 1e-5; the server adds the noise to a mean of clipped changes (``central``), or
each user to its own (``local``), or to its steps, which hide single examples (``example``). A method that shares
nothing needs no noise; one to which the mechanism does not apply is refused, and the table says so. Prints a Markdown
table of means over seeds with the distance of the farthest seed, and one JSON line with all that was measured.
``--out`` keeps a line for each run, and what is there is not run again. ``--seconds`` begins no run after so long.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import time
from pathlib import Path
from typing import Any

import comingle

# isort: split
import torch
from attack_tables import shown

import attacks
from comingle.utils.errors import ComingleError

EPSILONS = (math.inf, 1000.0, 100.0, 10.0, 2.0)
METHODS = {
    "news": ("comigs-1g1s", "fedavg", "local"),
    "posts": ("comigs-1g1s", "fedavg", "local"),
    "mnist": ("fedavg", "local", "floral", "floral-unreported", "fedmerge"),
}
UNREPORTED = {"floral-unreported": {"name": "floral", "report_mixture": False}}
"""Settings of methods: FLoRAL with local mixture weights, so that the server's mean has bounded sensitivity."""
FILES = {
    "news": ("ag_news/ag_news.jsonl.xz", "category", 4, 60),
    "posts": ("users/stackexchange_users.jsonl.xz", "user", 200, 20),
}
"""File, user field, number of users and documents per user, for each text data set."""

KEYS = ("data", "seed", "method", "epsilon")
"""Fields that identify a run besides its rounds, clip norm and mechanism."""
PART = {"news": 1.0, "posts": 0.2, "mnist": 0.2}
"""Probability with which each user takes part in a round."""


def texts(data: Path, name: str) -> dict[str, list[str]]:
    """Return the documents of the users with the most text."""
    file, field, users, documents = FILES[name]
    found: dict[str, list[str]] = {}
    with lzma.open(data / file, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            found.setdefault(row[field], []).append(row["text"])
    most = sorted(found, key=lambda user: -sum(map(len, found[user])))[:users]
    return {user: found[user][:documents] for user in sorted(most)}


def setting(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return users, base and the part of the recipe that is the same for all methods."""
    common: dict[str, Any] = {
        "training": {"rounds": args.rounds, "participation": PART[name]},
        "evaluation": {"every": args.rounds, "first": False, "model": "exchanged"},
        "runtime": {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False},
    }
    if name == "mnist":
        sgd = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "weight_decay": 0}
        common["training"] |= {"batch_size": 20, "local_epochs": 2, "experts": sgd}
        return attacks.mnist_users(args.data, 300, args.seed), attacks.small_net, common
    common["training"] |= {"local_steps": 5, "batch_size": 4, "context": 64, "experts": {"learning_rate": 0.005}}
    common["adapters"] = {"rank": 4}
    common["data"] = {"max_train_tokens": 4096, "max_valid_tokens": 1024, "max_test_tokens": 1024}
    return texts(args.data, name), str(args.data / "models/stories260K"), common


def measure(name: str, method: str, epsilon: float, args: argparse.Namespace) -> dict[str, Any]:
    """Run a method once; return the users' mean score, the noise and the last clip norm, or the error.

    Args:
        name: Name of the data set.
        method: Name of the method.
        epsilon: Privacy budget; infinite for no noise.
        args: Options of the command line.
    """
    users, base, recipe = setting(name, args)
    clip = args.clip if args.clip == "adaptive" else float(args.clip)
    if math.isfinite(epsilon):
        recipe["privacy"] = {"clip_norm": clip, "epsilon": epsilon, "noise": "reproducible", "accountant": "rdp"}
        recipe["privacy"]["mechanism"] = args.mechanism
        recipe["privacy"] |= {} if args.first_clip is None else {"first_clip_norm": args.first_clip}
        recipe["privacy"] |= {} if args.clip_rate is None else {"clip_rate": args.clip_rate}
    found: dict[str, Any] = {"data": name, "method": method, "epsilon": epsilon, "seed": args.seed}
    found |= {"clip": clip, "first_clip": args.first_clip, "clip_rate": args.clip_rate}
    found |= {"rounds": args.rounds, "mechanism": args.mechanism}
    started = time.perf_counter()
    try:
        chosen = UNREPORTED.get(method, method)
        metrics = comingle.run(recipe, users=users, base=base, method=chosen, seed=args.seed).metrics
    except ComingleError as error:
        return found | {"why": str(error)}
    key = "test_accuracy" if name == "mnist" else "test_perplexity"
    found["score"] = statistics.fmean(user[key] for user in metrics["users"].values())
    found |= {key: metrics.get("privacy", {}).get(key) for key in ("noise_multiplier", "clip_norm")}
    return found | {"seconds": time.perf_counter() - started}


def table(results: list[dict[str, Any]], name: str, epsilons: list[float]) -> list[str]:
    """Return the lines of a table with a row for each method.

    Args:
        results: Results of all runs.
        name: Name of the data set.
        epsilons: Budgets, one column each.
    """
    heads = ["none" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in epsilons]
    lines = ["| method | " + " | ".join(heads) + " |", "|" + "---|" * (1 + len(heads))]
    of: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for one in results:
        of.setdefault((one["method"], one["epsilon"]), []).append(one)
    for method in METHODS[name]:
        lines.append(f"| {method} | " + " | ".join(_cell(of.get((method, epsilon), [])) for epsilon in epsilons) + " |")
    return lines


def _cell(found: list[dict[str, Any]]) -> str:
    if any("why" in one for one in found):
        return "refused"
    return shown([one["score"] for one in found], ".4g") if found else ""


def of_run(one: dict[str, Any], args: argparse.Namespace) -> bool:
    """Return whether a result has the same rounds and, with noise, the same clip norm and mechanism."""
    alike = str(one["clip"]) == args.kept_clip and one["mechanism"] == args.mechanism
    alike = alike and (one.get("first_clip"), one.get("clip_rate")) == (args.first_clip, args.clip_rate)
    return one["rounds"] == args.rounds and (math.isinf(one["epsilon"]) or alike)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--datasets", default=",".join(METHODS))
    parser.add_argument("--methods", help="of those that the table has; without it all")
    parser.add_argument("--epsilons", default=",".join(map(str, EPSILONS)))
    parser.add_argument("--clip", default="adaptive", help="a norm, or adaptive")
    parser.add_argument("--first-clip", type=float, help="where an adaptive norm begins, if not as recipes have it")
    parser.add_argument("--clip-rate", type=float, help="step size of an adaptive norm, if not as recipes have it")
    parser.add_argument("--mechanism", default="central", choices=("central", "local", "example"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, help="JSON lines, of one run each")
    args = parser.parse_args()
    args.kept_clip = args.clip if args.clip == "adaptive" else str(float(args.clip))
    torch.set_num_threads(1)
    started, results = time.perf_counter(), attacks.read_results(args.out)
    epsilons, seeds = [float(one) for one in args.epsilons.split(",")], [int(one) for one in args.seeds.split(",")]
    cases = [
        (name, seed, method, epsilon)
        for name in args.datasets.split(",")
        for seed in seeds
        for method in METHODS[name]
        if args.methods is None or method in args.methods.split(",")
        for epsilon in epsilons
        if method != "local" or epsilon == math.inf  # it shares nothing, whatever epsilon is
    ]
    for name, args.seed, method, epsilon in cases:
        if time.perf_counter() - started > args.seconds:
            break
        keys = (name, args.seed, method, epsilon)
        if not any(keys == tuple(one[k] for k in KEYS) and of_run(one, args) for one in results):
            results.append(measure(name, method, epsilon, args))
            attacks.append_result(results[-1], args.out)
    for name in args.datasets.split(","):
        found = [one for one in results if one["data"] == name and one["seed"] in seeds and of_run(one, args)]
        print("\n".join(["", f"{name}:", *table(found, name, epsilons), ""]), flush=True)
    print(json.dumps({"benchmark": "utility", "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
