"""Results as tables: in the terminal, as Markdown, as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from comingle.errors import RunError
from comingle.records import GEOMETRIC, MEASURES, geometric, measure_of, read_metrics, write_json, write_text
from comingle.reports.measures import byte_unit, number, rule

MOST_USERS = 8
"""A comparison has a column for each of so many users; of more it shows the mean alone."""


def _title_of(measure: str) -> str:
    return f"test {measure} ({rule(measure)})"


def _spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (0 for a single value); None where a value is not finite."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0


def megabytes(count: float | int) -> str:
    """Bytes as megabytes."""
    return f"{count / 1e6:,.2f} MB"


def sizes(counts: Sequence[float | None]) -> list[str]:
    """Bytes of a column, all in the unit of the largest; a dash where nothing is known."""
    unit, name = byte_unit(max((count for count in counts if count is not None), default=0))
    digits = 0 if name == "B" else 2
    return ["–" if count is None else f"{count / unit:,.{digits}f} {name}" for count in counts]


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


# -------------------------------------------------------------------- one run


def render_run(metrics: dict[str, Any]) -> Table:
    """Every user of a run, and their mean."""
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    title = f"{metrics['method']}, seed {metrics['seed']}: {_title_of(measure)}"
    table = Table("user", title=title, title_justify="left", box=None, show_footer=True)
    means = {"mean": metrics[f"mean_test_{measure}"], **_geometric(metrics["users"], measure)}
    table.columns[0].footer = "\n".join(means)
    table.add_column(measure, justify="right", footer="\n".join(number(mean, measure) for mean in means.values()))
    for name in (f"test {unit}", "trainable", "upload / round"):
        table.add_column(name, justify="right")
    sent = sizes([user["upload_bytes_per_round"] for user in metrics["users"].values()])
    for (name, user), upload in zip(metrics["users"].items(), sent, strict=True):
        table.add_row(
            name,
            number(user[f"test_{measure}"], measure),
            f"{user[f'test_{unit}']:,}",
            f"{user['trainable_parameters']:,}",
            upload,
        )
    rate = metrics[f"{unit}_per_second"]
    speed = f"{rate:,.0f} {unit}/s" if rate else "no training"
    peak = f"{metrics['peak_memory_bytes'] / 1e9:.1f} GB"
    place = f"{metrics['dtype']} on {metrics['device']}"
    table.caption = (
        f"{metrics['base']} · {place} · {speed} · {_seconds(metrics['wall_seconds'])} s · peak memory {peak}"
    )
    if (chosen := metrics.get("selected_round", metrics["rounds"])) != metrics["rounds"]:
        table.caption += f"\nmodels of round {chosen} of {metrics['rounds']}, whose validation loss is the lowest"
    table.caption_justify = "left"
    return table


def render_curve(events: list[dict[str, Any]]) -> Table:
    """Mean and per-user result at each evaluation."""
    evaluations = [e for e in events if e["event"] == "evaluation"]
    measure = measure_of(evaluations[0]) if evaluations else "perplexity"
    whole = ["mean", *(_geometric(evaluations[0]["users"], measure) if evaluations else {})]
    table = Table("round", *whole, title=f"test {measure} by round", title_justify="left", box=None)
    names = _shown(evaluations[0]["users"]) if evaluations else []
    for name in names:
        table.add_column(name, justify="right")
    for e in evaluations:
        scores = [number(e["users"][name][f"test_{measure}"], measure) for name in names]
        means = [e[f"mean_test_{measure}"], *_geometric(e["users"], measure).values()]
        table.add_row(str(e["round"]), *(number(mean, measure) for mean in means), *scores)
    return table


def _geometric(users: dict[str, dict[str, Any]], measure: str) -> dict[str, float | None]:
    """The geometric mean over users under the name that it has in tables; for perplexities alone."""
    return dict(zip(["geometric mean"], geometric(users, measure).values(), strict=False))


def _shown(names: Iterable[str]) -> list[str]:
    """The users who get a column."""
    names = list(names)
    return names if len(names) <= MOST_USERS else []


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
    measure, unit = measure_of(runs[0]), runs[0].get("unit", "tokens")
    mean, std = _spread([run[f"mean_test_{measure}"] for run in runs])
    users = {}
    for user in runs[0]["users"]:
        user_mean, user_std = _spread([run["users"][user][f"test_{measure}"] for run in runs])
        users[user] = {"mean": user_mean, "std": user_std}
    return {
        "method": name,
        "seeds": [run["seed"] for run in runs],
        f"mean_test_{measure}": {"mean": mean, "std": std},
        **_geometric_row(runs, measure),
        "users": users,
        "upload_bytes_per_user_round": runs[0]["upload_bytes_per_user_round"],
        "trainable_parameters": runs[0]["trainable_parameters"],
        f"{unit}_per_second": statistics.fmean(run[f"{unit}_per_second"] for run in runs),
        "wall_seconds": statistics.fmean(run["wall_seconds"] for run in runs),
    }


def _geometric_row(runs: list[dict[str, Any]], measure: str) -> dict[str, Any]:
    """Each seed's geometric mean over users, for perplexities: mean and deviation over seeds."""
    found = [mean for run in runs for mean in geometric(run["users"], measure).values()]
    return {GEOMETRIC: dict(zip(("mean", "std"), _spread(found), strict=True))} if found else {}


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
    measure = measure_of(table["methods"][0])

    def cell(value: dict[str, float | None]) -> str:
        spread = value["std"]
        return number(value["mean"], measure) + (
            f" ({number(spread, measure)})" if several and spread is not None else ""
        )

    names = _shown(table["methods"][0]["users"])
    whole = {"mean": f"mean_test_{measure}", "geometric mean": GEOMETRIC}
    means = {name: key for name, key in whole.items() if all(key in row for row in table["methods"])}
    head = ["method", *names, *means, "trainable", "upload / round", "seconds"]
    sent = sizes([row["upload_bytes_per_user_round"] for row in table["methods"]])
    rows = [
        [
            row["method"],
            *(cell(row["users"][name]) for name in names),
            *(cell(row[key]) for key in means.values()),
            f"{row['trainable_parameters']:,}",
            upload,
            _seconds(row["wall_seconds"]),
        ]
        for row, upload in zip(table["methods"], sent, strict=True)
    ]
    return head, rows


def _title(table: dict[str, Any]) -> str:
    seeds = sorted({seed for row in table["methods"] for seed in row["seeds"]})
    spread = f"mean (std) over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    first = table["methods"][0]
    measure, users = measure_of(first), first["users"]
    what = f"test {measure} of each user" if _shown(users) else f"mean test {measure} of {len(users)} users"
    return f"{what} ({rule(measure)}), {spread}"


def markdown(table: dict[str, Any]) -> str:
    """A comparison as a Markdown table."""
    head, rows = _cells(table)
    lines = [f"Table: {_title(table)}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def render_comparison(table: dict[str, Any]) -> Table:
    """A comparison for the terminal; of several methods the best mean is green."""
    head, rows = _cells(table)
    shown = Table(title=_title(table), title_justify="left", box=None)
    for i, name in enumerate(head):
        style = "bold" if name in ("mean", "geometric mean") else ""
        shown.add_column(name, justify="left" if i == 0 else "right", style=style, no_wrap=i == 0)
    measure = measure_of(table["methods"][0])
    means = [row[f"mean_test_{measure}"]["mean"] for row in table["methods"]]
    best = (min if MEASURES[measure] == "lower" else max)((m for m in means if m is not None), default=None)
    for cells, mean in zip(rows, means, strict=True):
        shown.add_row(*cells, style="green" if len(rows) > 1 and mean is not None and mean == best else "")
    return shown
