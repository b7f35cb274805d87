"""The numbers of a comparison: each method over seeds, and each held against a baseline; ``table.json``."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from comingle.reports.against import Against, baseline_of, hold
from comingle.utils.errors import RunError, list_names
from comingle.utils.records import GEOMETRIC, geometric, measure_of, read_metrics


def _spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (0 for a single value); None where a value is not finite."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0


def folder_name(label: str) -> str:
    """Return the name of a method's run folders in a comparison, without ``-seedN``: all systems can have it."""
    return re.sub(r"[^\w=.,+-]+", "-", label)


def compare_runs(
    folders: Sequence[Path], baseline: str | None = None, labels: Mapping[Path, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Mean and deviation over seeds, for each method in the order given, and each against a baseline.

    Args:
        folders: run folders.
        baseline: a method, or several with commas between, of which the best counts.
        labels: names of runs that are not called by their method's name, as one of several with its settings.

    Raises:
        RunError: a run is missing or has not finished, or runs are of other users.
        RecipeError: the baseline is not among the methods.
    """
    read = [(folder, read_metrics(folder)) for folder in folders]
    return compare_metrics([(labels.get(folder, metrics["method"]), metrics) for folder, metrics in read], baseline)


def compare_metrics(named: Iterable[tuple[str, dict[str, Any]]], baseline: str | None = None) -> dict[str, Any]:
    """Return the table of :func:`compare_runs` for metrics in memory, each with its method's name.

    Raises:
        RunError: runs are of other users.
        RecipeError: the baseline is not among the methods.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for name, metrics in named:
        by_method.setdefault(name, []).append(metrics)
    require_same_users(users_of(run for runs in by_method.values() for run in runs))
    return hold_against({"methods": [_row(name, runs) for name, runs in by_method.items()]}, baseline)


def require_same_users(runs: Sequence[tuple[str, Collection[str]]]) -> None:
    """Whether runs, by what they are called, are of the same users, so that means and differences are.

    Raises:
        RunError: they are not.
    """
    first, theirs = runs[0]
    for name, users in runs[1:]:
        if set(users) != set(theirs):
            raise RunError(
                f"{name}: its users are {list_names(users)}, those of {first} are {list_names(theirs)}; give runs of "
                "the same users (data.on_small_user: skip may leave out others with another seed)"
            )


def users_of(runs: Iterable[Mapping[str, Any]]) -> list[tuple[str, Collection[str]]]:
    """For :func:`require_same_users`, out of metrics."""
    return [(f"{run['method']}, seed {run['seed']}", run["users"]) for run in runs]


def hold_against(table: dict[str, Any], baseline: str | None) -> dict[str, Any]:
    """A comparison with its methods held against a baseline, by default ``local`` or the first; with one seed, or one
    method, against none.

    Raises:
        RunError: an older table, which does not have the results of each seed.
        RecipeError: the baseline is not among the methods.
    """
    rows = table["methods"]
    if any("results" not in row for row in rows):
        raise RunError("the table does not have each seed's results; make it again with `comingle compare --resume`")
    chosen = baseline_of([row["method"] for row in rows], baseline)
    results = {
        row["method"]: {
            seed: {user: values[i] for user, values in row["results"].items()} for i, seed in enumerate(row["seeds"])
        }
        for row in rows
    }
    found = hold(results, measure_of(rows[0]), chosen)
    return {**table, "against": None if found is None else found.as_dict()}


def against_of(table: dict[str, Any]) -> Against | None:
    """What a table says of its baseline; older ones, and those of one seed, have none."""
    return Against.read(table["against"]) if table.get("against") else None


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    measure, unit = measure_of(runs[0]), runs[0].get("unit", "tokens")
    mean, std = _spread([run[f"mean_test_{measure}"] for run in runs])
    results = {user: [run["users"][user][f"test_{measure}"] for run in runs] for user in runs[0]["users"]}
    users = {user: dict(zip(("mean", "std"), _spread(values), strict=True)) for user, values in results.items()}
    return {
        "method": name,
        "seeds": [run["seed"] for run in runs],
        "rounds": [run["rounds"] for run in runs],
        **({"planned_rounds": planned} if (planned := max(run.get("planned_rounds", 0) for run in runs)) else {}),
        f"mean_test_{measure}": {"mean": mean, "std": std},
        **_geometric_row(runs, measure),
        "users": users,
        "results": results,
        "upload_bytes_per_user_round": runs[0]["upload_bytes_per_user_round"],
        "trainable_parameters": runs[0]["trainable_parameters"],
        f"{unit}_per_second": statistics.fmean(run[f"{unit}_per_second"] for run in runs),
        "wall_seconds": statistics.fmean(run["wall_seconds"] for run in runs),
        **({"sample": runs[0]["sample"]} if len(runs) == 1 and "sample" in runs[0] else {}),
        **({"privacy": _most_revealing(runs)} if any(run.get("privacy") for run in runs) else {}),
        **({"warnings": warned} if (warned := _warnings(runs)) else {}),
    }


def _most_revealing(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the privacy of the seed with the largest epsilon."""
    return max((run["privacy"] for run in runs if run.get("privacy")), key=lambda privacy: privacy["epsilon"] or 0.0)


def _warnings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the warnings of all seeds, each with its seed."""
    return [f"seed {run['seed']}: {warning}" for run in runs for warning in run.get("warnings", ())]


def _geometric_row(runs: list[dict[str, Any]], measure: str) -> dict[str, Any]:
    """Each seed's geometric mean over users, for perplexities: mean and deviation over seeds."""
    means = [mean for run in runs for mean in geometric(run["users"], measure).values()]
    return {GEOMETRIC: dict(zip(("mean", "std"), _spread(means), strict=True))} if means else {}


def read_comparison(folder: Path) -> dict[str, Any]:
    """The table of a comparison.

    Raises:
        RunError: not the folder of a comparison.
    """
    try:
        return json.loads((folder / "table.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: not the folder of a comparison ({error})") from None
