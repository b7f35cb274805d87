"""Gain from joining a finished federation: one user of real data is left out and joins afterwards, for each seed.

The newcomer is the last by name of AG News' categories, of wiki_ner's languages, and of the authors with most text in
stackexchange_users. Prints a Markdown table, and one JSON line with all that was measured.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import comingle

# isort: split
import torch

from comingle.reports.comparisons import interval

SOURCES = {
    "AG News": ("ag_news/ag_news.jsonl.xz", "category"),
    "wiki_ner": ("wiki_ner/wiki_ner.jsonl.xz", "category"),
    "stackexchange_users": ("users/stackexchange_users.jsonl.xz", "user"),
}
METHODS = ("comigs-1g1s", "floral", "fedmerge", "ifca", "fedavg", "fedavg+")
USERS, DOCUMENTS = 4, 40
ROWS = ("pretrained", "local", "shared", "joined")


def read_users(data: Path, source: str) -> dict[str, list[str]]:
    """Return the documents of the users with most text, by name."""
    file, column = SOURCES[source]
    texts: dict[str, list[str]] = {}
    with lzma.open(data / file, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            texts.setdefault(row[column], []).append(row["text"])
    largest = sorted(texts, key=lambda name: -sum(map(len, texts[name])))[:USERS]
    return {name: texts[name][:DOCUMENTS] for name in sorted(largest)}


def make_recipe(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return a recipe for a model of 260,000 parameters."""
    return {
        "base": str(data / "models/stories260K"),
        "adapters": {"rank": 4},
        "data": {"max_train_tokens": args.train_tokens, "max_valid_tokens": 2048, "max_test_tokens": 2048},
        "training": {
            "rounds": args.rounds,
            "local_steps": 5,
            "batch_size": 4,
            "context": 64,
            "experts": {"learning_rate": 0.005},
        },
        "evaluation": {"every": args.rounds, "first": False},
        "checkpoints": {"every": args.rounds},
        "runtime": {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False},
    }


def measure(data: Path, args: argparse.Namespace, source: str, method: str, seed: int) -> dict[str, Any]:
    """Run a federation without the newcomer and return the newcomer's results.

    Args:
        data: Folder of the real data sets.
        args: The command line.
        source: Key of ``SOURCES``.
        method: Name of the method.
        seed: Seed of the run.
    """
    users = read_users(data, source)
    newcomer = list(users)[-1]
    text = users.pop(newcomer)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        comingle.run(make_recipe(data, args), users=users, method=method, seed=seed, out=out)
        joined = comingle.join(out, name=newcomer, data=text)
    rows = {row: joined.rows[row]["test_perplexity"] for row in ROWS}
    tokens = {joined.rows[row]["train_tokens"] for row in ("local", "joined")}
    assert len(tokens) == 1, tokens
    return {"source": source, "newcomer": newcomer, "method": method, "seed": seed, "tokens": tokens.pop(), **rows}


def format_table(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of means over seeds, with the change by joining against training alone."""
    lines = ["| data | method | pretrained | local | shared | joined | joined against local |", "|" + "---|" * 7]
    for source in SOURCES:
        for method in METHODS:
            runs = [r for r in results if (r["source"], r["method"]) == (source, method)]
            if not runs:
                continue
            cells = [f"{statistics.fmean(r[row] for r in runs):.2f}" for row in ROWS]
            changes = [100 * (r["joined"] / r["local"] - 1) for r in runs]
            change = f"{statistics.fmean(changes):+.1f}%"
            if (change_interval := interval(changes)) is not None:
                change += f" ({change_interval[0]:+.1f} to {change_interval[1]:+.1f})"
            lines.append(f"| {source} | {method} | {' | '.join(cells)} | {change} |")
    return lines


def main() -> None:
    """Measure all methods, sources and seeds; print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--sources", default=",".join(SOURCES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--train-tokens", type=int, default=8192)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    results = []
    for method in args.methods.split(","):
        for source in args.sources.split(","):
            for seed in range(args.seeds):
                results.append(measure(args.data, args, source, method, seed))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print("\n".join(format_table(results)))
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"benchmark": "joining", "seconds": seconds, "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
