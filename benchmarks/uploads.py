"""Compressed uploads against float32 on a real data set: bytes per user and round, and perplexity, as JSON lines.

    python benchmarks/uploads.py --base BASE --data ag_news.jsonl.xz --user category --split split

Runs differ only in ``training.uploads``. ``perplexity`` is the geometric mean over users and seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from statistics import fmean, stdev

import comingle

FORMATS = ("float32", "bfloat16", "int8")


def main() -> None:
    """Print a line for each method and format."""
    args = _arguments()
    for method in args.methods.split(","):
        exact: list[float] = []
        for form in FORMATS:
            runs = [comingle.run(_recipe(args, method, form, seed), progress=False) for seed in range(args.seeds)]
            logs = [math.log(run.metrics["geometric_mean_test_perplexity"]) for run in runs]
            exact = exact or logs
            changes = [100 * math.expm1(log - was) for log, was in zip(logs, exact, strict=True)]
            line = {
                "benchmark": "uploads",
                "method": method,
                "uploads": form,
                "upload_bytes_per_user_round": runs[0].metrics["upload_bytes_per_user_round"],
                "perplexity": round(math.exp(fmean(logs)), 4),
                "change_percent": round(fmean(changes), 4),
                "change_std": round(stdev(changes), 4) if len(changes) > 1 else None,
                "seeds": args.seeds,
            }
            print(json.dumps(line), flush=True)


def _recipe(args: argparse.Namespace, method: str, form: str, seed: int) -> dict:
    """Return the recipe of one run.

    Args:
        args: The command line.
        method: Name of the method.
        form: Number format of uploads.
        seed: Seed of the run.
    """
    dataset = {"path": args.data, "user": args.user} | ({"split": args.split} if args.split else {})
    data = {"dataset": dataset, "max_train_tokens": args.tokens, "max_valid_tokens": 20000, "max_test_tokens": 20000}
    training = {"rounds": args.rounds, "local_steps": args.steps, "batch_size": 8, "context": 128, "uploads": form}
    return {
        "base": args.base,
        "data": data,
        "method": method,
        "seed": seed,
        "training": training,
        "evaluation": {"every": args.rounds, "first": False},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--data", required=True, help="a file of rows")
    parser.add_argument("--user", required=True, help="the field that names the user")
    parser.add_argument("--split", help="the field that names the split")
    parser.add_argument("--methods", default="fedavg,comigs-1g1s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
