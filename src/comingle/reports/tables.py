"""Results as tables: in the terminal, as Markdown, as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from comingle.errors import RunError
from comingle.records import read_metrics, write_json, write_text


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.2f}"


def _spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (0 for a single value); None where a value is not finite."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0


def megabytes(count: float | int) -> str:
    """Bytes as megabytes."""
    return f"{count / 1e6:,.2f} MB"


# -------------------------------------------------------------------- one run


def render_run(metrics: dict[str, Any]) -> Table:
    """Every user of a run, and their mean."""
    title = f"{metrics['method']}, seed {metrics['seed']}: test perplexity (lower is better)"
    table = Table("user", title=title, title_justify="left", box=None, show_footer=True)
    table.columns[0].footer = "mean"
    table.add_column("perplexity", justify="right", footer=_number(metrics["mean_test_perplexity"]))
    for name in ("test tokens", "trainable", "upload / round"):
        table.add_column(name, justify="right")
    for name, user in metrics["users"].items():
        table.add_row(
            name,
            _number(user["test_perplexity"]),
            f"{user['test_tokens']:,}",
            f"{user['trainable_parameters']:,}",
            megabytes(user["upload_bytes_per_round"]),
        )
    speed = f"{metrics['tokens_per_second']:,.0f} tokens/s" if metrics["tokens_per_second"] else "no training"
    peak = f"{metrics['peak_memory_bytes'] / 1e9:.1f} GB"
    place = f"{metrics['dtype']} on {metrics['device']}"
    table.caption = f"{metrics['base']} · {place} · {speed} · {metrics['wall_seconds']:.0f} s · peak memory {peak}"
    table.caption_justify = "left"
    return table


def render_curve(events: list[dict[str, Any]]) -> Table:
    """Mean and per-user test perplexity at each evaluation."""
    evaluations = [e for e in events if e["event"] == "evaluation"]
    table = Table("round", "mean", title="test perplexity by round", title_justify="left", box=None)
    for name in evaluations[0]["users"] if evaluations else []:
        table.add_column(name, justify="right")
    for e in evaluations:
        scores = [_number(user["test_perplexity"]) for user in e["users"].values()]
        table.add_row(str(e["round"]), _number(e["mean_test_perplexity"]), *scores)
    return table


# -------------------------------------------------------------------- several runs


def compare_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """Mean and deviation over seeds, for each method in the order given.

    Raises:
        RunError: a run is missing or has not finished.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for folder in folders:
        metrics = read_metrics(folder)
        by_method.setdefault(metrics["method"], []).append(metrics)
    return {"methods": [_row(name, runs) for name, runs in by_method.items()]}


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    mean, std = _spread([run["mean_test_perplexity"] for run in runs])
    users = {}
    for user in runs[0]["users"]:
        user_mean, user_std = _spread([run["users"][user]["test_perplexity"] for run in runs])
        users[user] = {"mean": user_mean, "std": user_std}
    return {
        "method": name,
        "seeds": [run["seed"] for run in runs],
        "mean_test_perplexity": {"mean": mean, "std": std},
        "users": users,
        "upload_bytes_per_user_round": runs[0]["upload_bytes_per_user_round"],
        "trainable_parameters": runs[0]["trainable_parameters"],
        "tokens_per_second": statistics.fmean(run["tokens_per_second"] for run in runs),
        "wall_seconds": statistics.fmean(run["wall_seconds"] for run in runs),
    }


def write_comparison(folder: Path, runs: Sequence[Path]) -> dict[str, Any]:
    """Write ``table.md`` and ``table.json`` to ``folder`` and return the table."""
    table = compare_runs(runs)
    write_json(folder / "table.json", table)
    write_text(folder / "table.md", markdown(table))
    return table


def read_comparison(folder: Path) -> dict[str, Any]:
    """The table of a comparison.

    Raises:
        RunError: not the folder of a comparison.
    """
    try:
        return json.loads((folder / "table.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: not the folder of a comparison ({error})") from None


def _cells(table: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text: method, each user, mean, parameters, upload, time."""
    several = any(len(row["seeds"]) > 1 for row in table["methods"])

    def cell(value: dict[str, float | None]) -> str:
        spread = value["std"]
        return _number(value["mean"]) + (f" ({spread:.2f})" if several and spread is not None else "")

    names = list(table["methods"][0]["users"])
    head = ["method", *names, "mean", "trainable", "upload / round", "seconds"]
    rows = [
        [
            row["method"],
            *(cell(row["users"][name]) for name in names),
            cell(row["mean_test_perplexity"]),
            f"{row['trainable_parameters']:,}",
            megabytes(row["upload_bytes_per_user_round"]),
            f"{row['wall_seconds']:.0f}",
        ]
        for row in table["methods"]
    ]
    return head, rows


def _title(table: dict[str, Any]) -> str:
    seeds = sorted({seed for row in table["methods"] for seed in row["seeds"]})
    spread = f"mean (std) over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"test perplexity of each user (lower is better), {spread}"


def markdown(table: dict[str, Any]) -> str:
    """A comparison as a Markdown table."""
    head, rows = _cells(table)
    lines = [f"Table: {_title(table)}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def render_comparison(table: dict[str, Any]) -> Table:
    """A comparison for the terminal; the best mean is bold."""
    head, rows = _cells(table)
    shown = Table(title=_title(table), title_justify="left", box=None)
    for i, name in enumerate(head):
        style = "bold" if name == "mean" else ""
        shown.add_column(name, justify="left" if i == 0 else "right", style=style, no_wrap=i == 0)
    means = [row["mean_test_perplexity"]["mean"] for row in table["methods"]]
    best = min((m for m in means if m is not None), default=None)
    for cells, mean in zip(rows, means, strict=True):
        shown.add_row(*cells, style="green" if mean is not None and mean == best else "")
    return shown
