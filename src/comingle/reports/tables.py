"""Tables of comparisons: in the terminal, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.text import Text

from comingle.reports import against
from comingle.reports.comparisons import against_of, compare_runs
from comingle.tables.crowds import at_share, best_first, budget_note, is_unequal, typical_budget
from comingle.tables.framing import Table
from comingle.tables.measures import markdown_line, rule
from comingle.tables.run_tables import seconds_text, sizes, users_with_column
from comingle.utils.records import GEOMETRIC, measure_of, number, privacy_told, sample_told, write_json, write_text
from comingle.utils.terminal import printable, words

_MEANS = ("mean", "geometric mean")
_COSTS = ("trainable", "upload / round", "seconds")


def write_comparison(
    folder: Path, runs: Sequence[Path], baseline: str | None = None, labels: Mapping[Path, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Write ``table.md`` and ``table.json`` to ``folder`` and return the table; as :func:`compare_runs`."""
    table = compare_runs(runs, baseline, labels)
    write_json(folder / "table.json", table)
    write_text(folder / "table.md", markdown(table))
    return table


def score_columns(table: dict[str, Any]) -> list[tuple[str, list[dict[str, float | None]]]]:
    """Return the heading of each column of results, and each method's ``mean`` and ``std`` over seeds."""
    rows, measure = table["methods"], measure_of(table["methods"][0])
    if names := users_with_column(rows[0]["users"]):
        columns = [(printable(name), [row["users"][name] for row in rows]) for name in names]
    else:
        spread = [[row["users"][name] for name in _spread_users(row["users"], measure)] for row in rows]
        columns = [(name, [of_row[i] for of_row in spread]) for i, name in enumerate(_SPREAD)]
    means = zip(_MEANS, (f"mean_test_{measure}", GEOMETRIC), strict=True)
    return columns + [(name, [row[key] for row in rows]) for name, key in means if all(key in row for row in rows)]


def cost_columns(table: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the heading and the cells of each column of costs; a dagger marks unequal numbers of parameters."""
    rows = table["methods"]
    counts = [row["trainable_parameters"] for row in rows]
    typical = typical_budget(counts)
    trainable = [f"{count:,}" + (" †" if is_unequal(count, typical) else "") for count in counts]
    sent = sizes([row["upload_bytes_per_user_round"] for row in rows])
    return list(zip(_COSTS, (trainable, sent, [seconds_text(row["wall_seconds"]) for row in rows]), strict=True))


def _cells(table: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text: method, users, mean, parameters, upload, time."""
    several = any(len(row["seeds"]) > 1 for row in table["methods"])
    measure = measure_of(table["methods"][0])

    def cell(value: dict[str, float | None]) -> str:
        spread = value["std"]
        return number(value["mean"], measure) + (
            f" ({number(spread, measure)})" if several and spread is not None else ""
        )

    scores = [(name, [cell(value) for value in values]) for name, values in score_columns(table)]
    columns = [("method", [row["method"] for row in table["methods"]]), *scores, *cost_columns(table)]
    return [name for name, _ in columns], [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]


_SPREAD = {"best": 0.0, "median": 0.5, "worst": 1.0}


def _spread_users(users: dict[str, dict[str, float | None]], measure: str) -> list[str]:
    """The best user of a method, the median one and the worst."""
    ordered = best_first({name: user["mean"] for name, user in users.items()}, measure)
    return [at_share(ordered, share) for share in _SPREAD.values()]


def note_of(table: dict[str, Any]) -> str:
    """Return notes on samples, missing seeds, budgets, privacy and warnings in one line; empty without any."""
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


def title_of(table: dict[str, Any], spread: str = "mean (std)") -> str:
    """Return what a comparison's cells are: measure, direction, and seeds; ``spread`` names cells of several seeds."""
    seeds = sorted({seed for row in table["methods"] for seed in row["seeds"]})
    over = f"{spread} over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    first = table["methods"][0]
    measure, users = measure_of(first), first["users"]
    what = f"test {measure} of each user" if users_with_column(users) else f"mean test {measure} of {len(users)} users"
    return f"{what} ({rule(measure)}), {over}"


def markdown(table: dict[str, Any]) -> str:
    """A comparison as Markdown tables."""
    head, rows = _cells(table)
    lines = [f"Table: {title_of(table)}", "", markdown_line(head), "|" + "---|" * len(head)]
    lines += [markdown_line(row) for row in rows]
    lines += ["", note] if (note := note_of(table)) else []
    lines += ["", *against.markdown(found)] if (found := against_of(table)) else []
    return "\n".join(lines) + "\n"


def tables_of(table: dict[str, Any], *, everybody: bool = False) -> Iterator[Table | Text]:
    """A comparison for the terminal, with its note, each method against the baseline, and if asked for a table of
    ``everybody`` who has no column."""
    yield from render_comparison(table)
    if note := note_of(table):
        yield words(note, "dim")
    if found := against_of(table):
        yield words("")
        yield from against.render(found)
    if not everybody or users_with_column(table["methods"][0]["users"]):
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
    yield _shown_table(title_of(table), head[:costs], [row[:costs] for row in rows])
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
