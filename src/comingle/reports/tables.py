"""Results as tables: in the terminal, as Markdown, as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from comingle.errors import RunError
from comingle.records import GEOMETRIC, MEASURES, geometric, measure_of, number, read_metrics, write_json, write_text
from comingle.reports.crowds import (
    FEW,
    MOST_ROWS,
    SHARES,
    at_share,
    best_first,
    budget_note,
    is_unequal,
    typical_budget,
)
from comingle.reports.measures import byte_unit, markdown_line, rule
from comingle.terminal import printable, words

MOST_USERS = 8
"""A comparison has a column for each of so many users; of more it shows the best, the median and the worst."""


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


def render_run(metrics: dict[str, Any], *, everybody: bool = False) -> Table:
    """The users of a run, and their mean; of many, unless ``everybody`` is asked for, the best and the worst."""
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    title = f"{metrics['method']}, seed {metrics['seed']}: {_title_of(measure)}"
    table = Table("user", title=title, title_justify="left", box=None, show_footer=True)
    means = {"mean": metrics[f"mean_test_{measure}"], **_geometric(metrics["users"], measure)}
    table.columns[0].footer = "\n".join(means)
    table.add_column(measure, justify="right", footer="\n".join(number(mean, measure) for mean in means.values()))
    for name in (f"test {unit}", "trainable", "upload / round"):
        table.add_column(name, justify="right")
    if everybody or len(metrics["users"]) <= MOST_ROWS:
        _add_users(table, metrics, list(metrics["users"]))
    else:
        _add_crowd(table, metrics, measure)
    table.caption, table.caption_justify = words(_circumstances(metrics, unit), "table.caption"), "left"
    if (chosen := metrics.get("selected_round", metrics["rounds"])) != metrics["rounds"]:
        told = f"\nmodels of round {chosen} of {metrics['rounds']}, whose validation loss is the lowest"
        table.caption.append(told)
    return table


def _circumstances(metrics: dict[str, Any], unit: str) -> str:
    rate = metrics[f"{unit}_per_second"]
    speed = f"{rate:,.0f} {unit}/s" if rate else "no training"
    peak = f"{metrics['peak_memory_bytes'] / 1e9:.1f} GB"
    place = f"{metrics['dtype']} on {metrics['device']}"
    return f"{metrics['base']} · {place} · {speed} · {_seconds(metrics['wall_seconds'])} s · peak memory {peak}"


def _add_users(table: Table, metrics: dict[str, Any], names: Sequence[str]) -> None:
    """A row for each of some users."""
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    users = [metrics["users"][name] for name in names]
    sent = sizes([user["upload_bytes_per_round"] for user in users])
    for name, user, upload in zip(names, users, sent, strict=True):
        table.add_row(
            words(name),
            number(user[f"test_{measure}"], measure),
            f"{user[f'test_{unit}']:,}",
            f"{user['trainable_parameters']:,}",
            upload,
        )


def _add_crowd(table: Table, metrics: dict[str, Any], measure: str) -> None:
    """The best users, how everybody's results are spread, and the worst users."""
    scores = {name: user[f"test_{measure}"] for name, user in metrics["users"].items()}
    ordered = best_first(scores, measure)
    table.add_row(words(f"best {FEW} of {len(ordered)} (--all shows everybody)", "dim"))
    _add_users(table, metrics, ordered[:FEW])
    table.add_row(words("from best to worst", "dim"))
    for label, share in SHARES.items():
        table.add_row(label, number(scores[at_share(ordered, share)], measure))
    table.add_row(words(f"worst {FEW}", "dim"))
    _add_users(table, metrics, ordered[-FEW:])


def render_curve(events: list[dict[str, Any]]) -> Table:
    """Mean and per-user result at each evaluation."""
    evaluations = [e for e in events if e["event"] == "evaluation"]
    measure = measure_of(evaluations[0]) if evaluations else "perplexity"
    whole = ["mean", *(_geometric(evaluations[0]["users"], measure) if evaluations else {})]
    table = Table("round", *whole, title=f"test {measure} by round", title_justify="left", box=None)
    names = _shown(evaluations[0]["users"]) if evaluations else []
    for name in names:
        table.add_column(words(name), justify="right")
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
    means = [mean for run in runs for mean in geometric(run["users"], measure).values()]
    return {GEOMETRIC: dict(zip(("mean", "std"), _spread(means), strict=True))} if means else {}


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
    """Header and rows as text: method, users, mean, parameters, upload, time."""
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
    some = [printable(name) for name in names] or list(_SPREAD)
    head = ["method", *some, *means, "trainable", "upload / round", "seconds"]
    typical = typical_budget([row["trainable_parameters"] for row in table["methods"]])
    sent = sizes([row["upload_bytes_per_user_round"] for row in table["methods"]])
    rows = [
        [
            row["method"],
            *(cell(row["users"][name]) for name in names or _spread_users(row["users"], measure)),
            *(cell(row[key]) for key in means.values()),
            f"{row['trainable_parameters']:,}" + (" †" if is_unequal(row["trainable_parameters"], typical) else ""),
            upload,
            _seconds(row["wall_seconds"]),
        ]
        for row, upload in zip(table["methods"], sent, strict=True)
    ]
    return head, rows


_SPREAD = {"best": 0.0, "median": 0.5, "worst": 1.0}


def _spread_users(users: dict[str, dict[str, float | None]], measure: str) -> list[str]:
    """The best user of a method, the median one and the worst."""
    ordered = best_first({name: user["mean"] for name, user in users.items()}, measure)
    return [at_share(ordered, share) for share in _SPREAD.values()]


def _note(table: dict[str, Any]) -> str:
    return budget_note([row["trainable_parameters"] for row in table["methods"]])


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
    lines = [f"Table: {_title(table)}", "", markdown_line(head), "|" + "---|" * len(head)]
    lines += [markdown_line(row) for row in rows]
    return "\n".join([*lines, *(["", note] if (note := _note(table)) else [])]) + "\n"


def tables_of(table: dict[str, Any], *, everybody: bool = False) -> Iterator[Table | Text]:
    """A comparison for the terminal, with its note, and if asked for a table of ``everybody`` who has no column."""
    yield render_comparison(table)
    if note := _note(table):
        yield words(note, "dim")
    if not everybody or _shown(table["methods"][0]["users"]):
        return
    shown = Table("user", title="every user", title_justify="left", box=None)
    for row in table["methods"]:
        shown.add_column(row["method"], justify="right")
    measure = measure_of(table["methods"][0])
    for name in table["methods"][0]["users"]:
        shown.add_row(words(name), *(number(row["users"][name]["mean"], measure) for row in table["methods"]))
    yield shown


def render_comparison(table: dict[str, Any]) -> Table:
    """A comparison for the terminal; of several methods the best mean is green."""
    head, rows = _cells(table)
    shown = Table(title=_title(table), title_justify="left", box=None)
    for i, name in enumerate(head):
        style = "bold" if name in ("mean", "geometric mean") else ""
        shown.add_column(words(name), justify="left" if i == 0 else "right", style=style, no_wrap=i == 0)
    measure = measure_of(table["methods"][0])
    means = [row[f"mean_test_{measure}"]["mean"] for row in table["methods"]]
    best = (min if MEASURES[measure] == "lower" else max)((m for m in means if m is not None), default=None)
    for cells, mean in zip(rows, means, strict=True):
        shown.add_row(*cells, style="green" if len(rows) > 1 and mean is not None and mean == best else "")
    return shown
