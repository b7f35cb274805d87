"""A row of CoMiGS, Table 1, at the paper's scale: the run itself where its text and base are at hand, else its time.

    python papers/benchmarks/table1_row.py --seconds 150 [--data FOLDER --base GPT2] [--method comigs-1g1s] [--toy]

With ``--data`` and ``--base`` this is ``comingle reproduce comigs/table1 --scale paper`` for one column and one seed,
and its perplexity counts. Without them users have made-up text and the base random weights: seconds of a round are
those of the paper's run, and perplexities mean nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import comingle

COLUMN, USERS, ROUNDS = "slimpajama", 4, 20
GPT2 = "random:gpt2?layers=12&dim=768&heads=12&vocab=50257"
WARM = 2
"""Number of first rounds, in which code is compiled."""


class OverError(Exception):
    """Time limit reached."""


def recipe_of(folder: Path, method: str, *, toy: bool) -> dict[str, Any]:
    """Return a recipe with the paper's settings (section 4.1.2, App. B.1) on made-up text of four users.

    Args:
        folder: Folder of the text files, which are written.
        method: Name of the method.
        toy: Whether to use a tiny base.
    """
    for number in range(USERS):
        draw = random.Random(number)
        paragraphs = ["".join(draw.choices("etaoin shrdlu", k=400)) for _ in range(60 if toy else 1500)]
        (folder / f"user{number}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    size = {"batch_size": 4, "context": 16, "local_steps": 2} if toy else {"local_steps": 10, "batch_size": 64}
    return {
        "base": "random:gpt2?layers=2&dim=64" if toy else GPT2,
        "method": {"name": method, "router_every": 30, "router_steps": 10},
        "data": {
            "users": {f"user{number}": str(folder / f"user{number}.txt") for number in range(USERS)},
            "max_test_tokens": 2_000 if toy else 200_000,
        },
        "adapters": {"rank": 8, "alpha": 16, "top_k": 2, "balance": "generalist"},
        "training": {"rounds": ROUNDS, **size},
        "evaluation": {"every": ROUNDS, "first": False},
        "checkpoints": {"every": ROUNDS},
        "runtime": {"device": "cpu", "compile": False} if toy else {},
    }


def timed_rounds(recipe: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Time as many rounds as the limit allows; return seconds per round and of the whole run."""
    began, ends = time.perf_counter(), []

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            ends.append(time.perf_counter())
        if time.perf_counter() - began > seconds and len(ends) > WARM:
            raise OverError

    try:
        comingle.run(recipe, observers=[observe])
        whole = time.perf_counter() - began
    except OverError:
        whole = None
    later = ends[WARM - 1 :]
    a_round = (later[-1] - later[0]) / (len(later) - 1)
    return {
        "rounds": len(ends),
        "of_rounds": ROUNDS,
        "seconds_a_round": round(a_round, 4),
        "seconds_in_all": None if whole is None else round(whole, 1),
        "expected_seconds": round(ends[0] - began + a_round * (ROUNDS - 1), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--method", default="comigs-1g1s")
    parser.add_argument("--data", default=None)
    parser.add_argument("--base", default=None)
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if args.data and args.base:
            command = ["reproduce", "comigs/table1", "--scale", "paper", "--methods", args.method, "--columns", COLUMN]
            more = ["--seeds", "0", "--data", args.data, "--base", args.base, "--out", f"{place}/table1"]
            try:
                done = subprocess.run([sys.executable, "-m", "comingle", *command, *more], timeout=args.seconds)
            except subprocess.TimeoutExpired:
                print(json.dumps({"row": args.method, "left_out": f"not done after {args.seconds:.0f} s"}))
                return
            raise SystemExit(done.returncode)
        found = timed_rounds(recipe_of(Path(place), args.method, toy=args.toy), args.seconds)
    print(json.dumps({"row": args.method, "text": "made up", "users": USERS, **found}))


if __name__ == "__main__":
    main()
