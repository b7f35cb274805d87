"""Privacy audits on real text by noise: the four categories of AG News as users of a model of 260,000 parameters.

Prints a Markdown table, and one JSON line with all audits.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import comingle

# isort: split
import torch

from comingle.reports.audit import Audit, conclusions
from comingle.reports.comparisons import interval

DOCUMENTS = 120
CASES = {"none": None, "local 4": ("local", 4.0), "central 2": ("central", 2.0), "example 1": ("example", 1.0)}
"""Mechanisms and their noise multipliers."""


def read_users(data: Path) -> dict[str, list[str]]:
    """Return the first documents of every category."""
    texts: dict[str, list[str]] = {}
    with lzma.open(data / "ag_news/ag_news.jsonl.xz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            texts.setdefault(row["category"], []).append(row["text"])
    return {name: texts[name][:DOCUMENTS] for name in sorted(texts)}


def make_recipe(data: Path, args: argparse.Namespace, case: str) -> dict[str, Any]:
    """Return the recipe of one case.

    Args:
        data: Folder of the real data sets.
        args: The command line.
        case: Key of ``CASES``.
    """
    training = {"rounds": args.rounds, "local_steps": 20, "batch_size": 4, "context": 32}
    content: dict[str, Any] = {
        "base": str(data / "models/stories260K"),
        "adapters": {"rank": 4},
        "data": {"max_train_tokens": 8192, "split": {"valid": 0.1, "test": 0.3}},
        "training": {**training, "experts": {"learning_rate": 0.005}},
        "evaluation": {"every": args.rounds, "first": False, "model": "exchanged"},
        "runtime": {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False},
    }
    if (privacy := CASES[case]) is not None:
        numbers = {"noise_multiplier": privacy[1], "clip_norm": 1.0, "delta": 1e-5}
        content["privacy"] = {"mechanism": privacy[0], **numbers}
    return content


def format_row(method: str, case: str, audit: Audit) -> str:
    """Return one row of the table.

    Args:
        method: Name of the method.
        case: Key of ``CASES``.
        audit: The audit.
    """
    proofs = [
        f"{p.correct}/{p.guesses}, {p.epsilon:.2f} ({'nothing' if p.upper is None else f'{p.upper:.1f}'})"
        for p in audit.proofs
    ]
    aucs, bits = [one.auc for one in audit.members], [audit.inserted, audit.absent]
    auc_interval = interval(aucs) or (0.0, 1.0)
    shadowed = [[one.auc for one in audit.shadowed if one.view == proof.view] for proof in audit.proofs]
    cells = [f"{fmean(aucs):.2f} ({auc_interval[0]:.2f} to {auc_interval[1]:.2f})"]
    cells += [f"{fmean(one):.2f}" for one in shadowed] + [f"{fmean(one):.1f}" for one in bits]
    return f"| {method} | {case} | {' | '.join([*proofs, *cells])} |"


def main() -> None:
    """Run the audits and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--methods", default="fedavg,comigs-1g1s")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, users, audits = time.perf_counter(), read_users(args.data), []
    heads = ["method", "noise", "server: right, epsilon (promised)", "users", "AUC", "with references: server", "users"]
    print(f"| {' | '.join([*heads, 'bits in', 'bits out'])} |\n|" + "---|" * 9)
    for method in args.methods.split(","):
        for case in args.cases.split(","):
            run = comingle.run(make_recipe(args.data, args, case), users=users, method=method)
            audit = comingle.audit(run, trials=args.trials, rounds=args.rounds, users=users)
            audits.append({"method": method, "noise": case, **audit.as_dict()})
            print(format_row(method, case, audit), flush=True)
            print("\n".join(conclusions(audit)), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "auditing", "seconds": round(time.perf_counter() - started, 1), "audits": audits}))


if __name__ == "__main__":
    main()
