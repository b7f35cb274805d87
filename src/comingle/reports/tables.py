"""Results as tables: in the terminal, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.text import Text

from comingle.errors import list_names
from comingle.records import GEOMETRIC, geometric, measure_of, number, privacy_told, sample_told, write_json, write_text
from comingle.reports import against
from comingle.reports.comparisons import against_of, compare_runs
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
from comingle.reports.framing import Table
from comingle.reports.measures import byte_unit, markdown_line, rule
from comingle.terminal import printable, words

MOST_USERS = 8
"""A comparison has a column for each of so many users; of more it shows the best, the median and the worst."""


_MEANS = ("mean", "geometric mean")
_COSTS = ("trainable", "upload / round", "seconds")


def _title_of(measure: str) -> str:
    return f"test {measure} ({rule(measure)})"


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
    table.add_column(
        measure, justify="right", footer="\n".join(_told(mean, metrics, measure) for mean in means.values())
    )
    for name in (f"test {unit}", "trainable", "one upload"):  # in comparisons rounds without one count, too
        table.add_column(name, justify="right")
    if everybody or len(metrics["users"]) <= MOST_ROWS:
        _add_users(table, metrics, list(metrics["users"]))
    else:
        _add_crowd(table, metrics, measure)
    table.caption = caption = words(_circumstances(metrics, unit), "table.caption")
    table.caption_justify = "left"
    if privacy := metrics.get("privacy"):
        caption.append(f"\nprivacy: {privacy_told(privacy)}")
    for warning in metrics.get("warnings", ()):
        caption.append(f"\nwarning: {warning}", "yellow")
    if sample := sample_told(metrics):
        caption.append(f"\n{sample}")
    if planned := metrics.get("planned_rounds"):
        caption.append(f"\nthe privacy budget was spent after round {metrics['rounds']} of {planned}")
    if untold := metrics.get("untold"):
        caption.append(f"\nnot told to the server: results of {list_names(untold)}")
    if (chosen := metrics.get("selected_round", metrics["rounds"])) != metrics["rounds"]:
        told = f"\nmodels of round {chosen} of {metrics['rounds']}, whose validation loss is the lowest"
        caption.append(told)
    return table


def _told(mean: float | None, record: dict[str, Any], measure: str) -> str:
    """A mean over users, of whom there may be none who tells."""
    return number(mean, measure) if record["users"] else "not told"


def _circumstances(metrics: dict[str, Any], unit: str) -> str:
    rate = metrics[f"{unit}_per_second"]
    idle = "speed not told" if metrics.get("untold") or not metrics["users"] else "no training"
    speed = f"{rate:,.0f} {unit}/s" if rate else idle
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
    names = _shown(dict.fromkeys(name for e in evaluations for name in e["users"]))
    for name in names:
        table.add_column(words(name), justify="right")
    for e in evaluations:
        scores = [number(e["users"][n][f"test_{measure}"], measure) if n in e["users"] else "not told" for n in names]
        means = [e[f"mean_test_{measure}"], *_geometric(e["users"], measure).values()]
        table.add_row(str(e["round"]), *(_told(mean, e, measure) for mean in means), *scores)
    return table


def _geometric(users: dict[str, dict[str, Any]], measure: str) -> dict[str, float | None]:
    """The geometric mean over users under the name that it has in tables; for perplexities alone."""
    return dict(zip(["geometric mean"], geometric(users, measure).values(), strict=False))


def _shown(names: Iterable[str]) -> list[str]:
    """The users who get a column."""
    names = list(names)
    return names if len(names) <= MOST_USERS else []


# -------------------------------------------------------------------- several runs


def write_comparison(
    folder: Path, runs: Sequence[Path], baseline: str | None = None, labels: Mapping[Path, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Write ``table.md`` and ``table.json`` to ``folder`` and return the table; as :func:`compare_runs`."""
    table = compare_runs(runs, baseline, labels)
    write_json(folder / "table.json", table)
    write_text(folder / "table.md", markdown(table))
    return table


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
    whole = dict(zip(_MEANS, (f"mean_test_{measure}", GEOMETRIC), strict=True))
    means = {name: key for name, key in whole.items() if all(key in row for row in table["methods"])}
    some = [printable(name) for name in names] or list(_SPREAD)
    head = ["method", *some, *means, *_COSTS]
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
    """About users who were drawn of all, budgets that differ, and methods of which a seed is missing."""
    seeds = sorted({seed for row in table["methods"] for seed in row["seeds"]})
    fewer = [row for row in table["methods"] if len(row["seeds"]) < len(seeds)]
    missing = [f"{row['method']}: seeds {', '.join(map(str, row['seeds']))} alone" for row in fewer]
    budget = budget_note([row["trainable_parameters"] for row in table["methods"]])
    private = [
        f"{row['method']}: privacy {privacy_told(row['privacy'])}" for row in table["methods"] if "privacy" in row
    ]
    warned = [f"{row['method']}, {one}" for row in table["methods"] for one in row.get("warnings", ())]
    rows = table["methods"]
    return "; ".join(filter(None, [_sample_note(rows), *missing, budget, *_stopped(rows), *private, *warned]))


def _stopped(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Which methods' runs ended before the others', as their privacy budget was spent."""
    for row in rows:
        if planned := row.get("planned_rounds"):
            last = " and ".join(map(str, sorted(set(row["rounds"]))))
            yield f"{row['method']}: the privacy budget was spent after round {last} of {planned}"


def _sample_note(rows: Sequence[dict[str, Any]]) -> str:
    """Of how many users means are, where not of all, and how far each method's may be from theirs."""
    told = [(row["method"], sample_told(row).split(", ", 1)) for row in rows if "sample" in row]
    if not told:
        return ""
    intervals = [f"{method}: {', '.join(rest)}" for method, (_, *rest) in told if rest]
    return "; ".join([told[0][1][0], *intervals])


def _title(table: dict[str, Any]) -> str:
    seeds = sorted({seed for row in table["methods"] for seed in row["seeds"]})
    spread = f"mean (std) over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    first = table["methods"][0]
    measure, users = measure_of(first), first["users"]
    what = f"test {measure} of each user" if _shown(users) else f"mean test {measure} of {len(users)} users"
    return f"{what} ({rule(measure)}), {spread}"


def markdown(table: dict[str, Any]) -> str:
    """A comparison as Markdown tables."""
    head, rows = _cells(table)
    lines = [f"Table: {_title(table)}", "", markdown_line(head), "|" + "---|" * len(head)]
    lines += [markdown_line(row) for row in rows]
    lines += ["", note] if (note := _note(table)) else []
    lines += ["", *against.markdown(found)] if (found := against_of(table)) else []
    return "\n".join(lines) + "\n"


def tables_of(table: dict[str, Any], *, everybody: bool = False) -> Iterator[Table | Text]:
    """A comparison for the terminal, with its note, each method against the baseline, and if asked for a table of
    ``everybody`` who has no column."""
    yield from render_comparison(table)
    if note := _note(table):
        yield words(note, "dim")
    if found := against_of(table):
        yield words("")
        yield from against.render(found)
    if not everybody or _shown(table["methods"][0]["users"]):
        return
    shown = Table("user", title="every user", title_justify="left", box=None)
    for row in table["methods"]:
        shown.add_column(row["method"], justify="right")
    measure = measure_of(table["methods"][0])
    for name in table["methods"][0]["users"]:
        shown.add_row(words(name), *(number(row["users"][name]["mean"], measure) for row in table["methods"]))
    yield shown


def render_comparison(table: dict[str, Any]) -> Iterator[Table]:
    """A comparison for the terminal; beside deviations there is no room for costs, which are then a second table."""
    head, rows = _cells(table)
    several = any(len(row["seeds"]) > 1 for row in table["methods"])
    costs = len(head) - (len(_COSTS) if several else 0)
    yield _shown_table(_title(table), head[:costs], [row[:costs] for row in rows])
    if several:
        yield _shown_table("", [head[0], *_COSTS], [[row[0], *row[costs:]] for row in rows])


def _shown_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    shown = Table(title=title or None, title_justify="left", box=None)
    for i, name in enumerate(head):
        style = "bold" if name in _MEANS else ""
        justify = "left" if i == 0 else "right"
        shown.add_column(words(name), justify=justify, style=style, no_wrap=i == 0, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown
