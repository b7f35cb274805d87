"""Tables of the results of ``attacks.py --out``: mean and spread over seeds by attack and rule."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attacks import NONE, RULES

CLOSE = 0.05
"""Largest relative loss against the clean score with which a defence counts as successful."""

Cells = dict[tuple[str, float, str], dict[int, dict[str, Any]]]
"""Runs by seed, for each (attack, hostile share, rule)."""


def cells_of(results: Sequence[Mapping[str, Any]], data: str) -> Cells:
    """Return the runs on one data set."""
    found: Cells = {}
    for result in results:
        if result["data"] == data:
            found.setdefault((result["attack"], result["share"], result["rule"]), {})[result["seed"]] = dict(result)
    return found


def worse(data: str, score: float, clean: float) -> float:
    """Return how much worse a score is than the clean one, as a share of the clean one.

    Args:
        data: Name of the data set.
        score: Score under attack.
        clean: Score of the plain mean without an attack.
    """
    return (clean - score) / clean if data == "mnist" else (score - clean) / clean


def close(data: str, cell: Mapping[int, Mapping[str, Any]], clean: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether a cell's mean over seeds is close to the plain mean without an attack.

    Args:
        data: Name of the data set.
        cell: Results under attack, by seed.
        clean: Results of the plain mean without an attack, by seed.
    """
    return statistics.fmean(worse(data, run["score"], clean[seed]["score"]) for seed, run in cell.items()) <= CLOSE


def shown(values: Sequence[float], digits: str = ".3g") -> str:
    """Return the mean and the distance of the farthest seed from it, as text."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "none"
    mean = statistics.fmean(finite)
    text = format(mean, digits) if mean < 1000 else f"{mean:.2g}"
    spread = max(abs(value - mean) for value in finite)
    if len(finite) > 1 and mean < 1000:
        text += f" ± {spread:.2g}"
    return text + (f" ({len(values) - len(finite)} none)" if len(finite) < len(values) else "")


def table(cells: Cells, data: str, rules: Sequence[str], number: Callable[[Mapping[str, Any]], float]) -> list[str]:
    """Return the lines of a table of scores by attack and rule, bold where they are close to the clean ones.

    Args:
        cells: Results by attack, hostile share and rule.
        data: Name of the data set.
        rules: Rules, one column each.
        number: Function that takes the printed number from a result: its score, or another one.
    """
    lines = ["| attack | hostile | " + " | ".join(rules) + " |", "|" + "---|" * (2 + len(rules))]
    clean = cells[NONE, 0.0, "mean"]
    for attack, share in dict.fromkeys((a, s) for a, s, _ in cells):
        row = []
        for rule in rules:
            runs = {seed: run for seed, run in cells.get((attack, share, rule), {}).items() if seed in clean}
            text = shown([number(run) for run in runs.values()]) if runs else ""
            row.append(f"**{text}**" if runs and close(data, runs, clean) else text)
        lines.append(f"| {attack or 'none'} | {share:.0%} | {' | '.join(row)} |")
    return lines


def unmet(cells: Cells, data: str) -> list[str]:
    """List the attacks and shares against which no tried rule comes close to the clean run."""
    clean = cells[NONE, 0.0, "mean"]
    good: dict[tuple[str, float], bool] = {}
    for (attack, share, _), runs in cells.items():
        of_seeds = {seed: run for seed, run in runs.items() if seed in clean}
        good[attack, share] = good.get((attack, share), False) or close(data, of_seeds, clean)
    return [f"{attack} at {share:.0%}" for (attack, share), held in good.items() if not held]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--phrase", action="store_true", help="perplexity of the backdoor's phrase instead of scores")
    args = parser.parse_args()
    results = [json.loads(line) for file in args.files for line in file.read_text().splitlines()]
    name = "phrase_perplexity" if args.phrase else "score"
    for data in dict.fromkeys(result["data"] for result in results):
        cells = cells_of(results, data)
        seeds = sorted({seed for runs in cells.values() for seed in runs})
        rows = table(cells, data, args.rules.split(","), lambda run: run.get(name, math.nan))
        print(
            "\n".join([f"{data}, seeds {seeds}", "", *rows, "", f"no rule close: {', '.join(unmet(cells, data))}", ""])
        )


if __name__ == "__main__":
    main()
