"""Tables of results, participants and costs."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from rich import table as rich_table
from rich.text import Text

from comingle.reports import comparisons
from comingle.reports.comparisons import (
    BaselineComparison,
    CellSpread,
    ComparisonTable,
    MethodRow,
    compare_runs,
    read_baseline_comparison,
)
from comingle.reports.formatting import (
    FEW,
    MOST_ROWS,
    QUANTILES,
    Table,
    at_share,
    best_first,
    best_of,
    byte_unit,
    is_unequal,
    markdown_line,
    parameter_count_note,
    rule,
    typical_budget,
)
from comingle.reports.runs import Cost, Entry, Spread
from comingle.utils.errors import RecipeError, list_names
from comingle.utils.records import (
    GEOMETRIC,
    PARTICIPANTS,
    JsonMapping,
    JsonObject,
    describe_privacy,
    describe_sample,
    geometric,
    measure_of,
    number,
    write_json,
    write_text,
)
from comingle.utils.terminal import printable, words

MOST_USERS = 8
"""Largest number of users that get a column each."""


def megabytes(count: float | int) -> str:
    """Return bytes as megabytes."""
    return f"{count / 1e6:,.2f} MB"


def sizes(counts: Sequence[float | None]) -> list[str]:
    """Return the byte counts of a column as text in the unit of the largest; unknown ones are a dash."""
    unit, name = byte_unit(max((count for count in counts if count is not None), default=0))
    digits = 0 if name == "B" else 2
    return ["–" if count is None else f"{count / unit:,.{digits}f} {name}" for count in counts]


def seconds_text(value: float) -> str:
    """Return seconds as text, with one digit below 10 s."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def render_run(metrics: JsonObject, *, all_users: bool = False) -> Table:
    """Return the table of a finished run for the terminal: users, means over users, and circumstances as caption.

    If no user has reported results, as in a federation with privacy, a sentence replaces rows and columns.

    Args:
        metrics: Content of the run's ``metrics.json``.
        all_users: Whether each user has a row; else, of many users, only the best and the worst.
    """
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    if not metrics["users"] and metrics.get("untold"):  # users that keep their results private
        name, own = f"{metrics['method']}, seed {metrics['seed']}", "each user's own run folder has its scores"
        table = Table("", box=None, show_header=False, caption=_run_caption(metrics, unit), caption_justify="left")
        table.add_row(words(f"{name}: no user reports results to the server (`tells`); {own}"))
        return table
    title = f"{metrics['method']}, seed {metrics['seed']}: test {measure} ({rule(measure)})"
    table = Table("user", title=title, title_justify="left", box=None, show_footer=True)
    means = {"mean": metrics[f"mean_test_{measure}"], **_named_geometric_mean(metrics["users"], measure)}
    table.columns[0].footer = "\n".join(means)
    table.add_column(
        measure, justify="right", footer="\n".join(_mean_text(mean, metrics, measure) for mean in means.values())
    )
    # "one upload" has the bytes of a round with an upload. Comparisons have means over all rounds instead.
    for name in (f"test {unit}", "trainable", "one upload"):
        table.add_column(name, justify="right")
    if all_users or len(metrics["users"]) <= MOST_ROWS:
        _add_users(table, metrics, list(metrics["users"]))
    else:
        _add_summary(table, metrics, measure)
    table.caption, table.caption_justify = _run_caption(metrics, unit), "left"
    return table


def _run_caption(metrics: JsonObject, unit: str) -> Text:
    """Return the lines below the table of a run: circumstances, privacy, warnings, and users without results.

    Args:
        metrics: Content of the run's ``metrics.json``.
        unit: Unit of its data.
    """
    caption = words(_run_circumstances(metrics, unit), "table.caption")
    if privacy := metrics.get("privacy"):
        caption.append(f"\nprivacy: {describe_privacy(privacy)}")
    for warning in metrics.get("warnings", ()):
        caption.append(f"\nwarning: {warning}", "yellow")
    if sample := describe_sample(metrics):
        caption.append(f"\n{sample}")
    if planned := metrics.get("planned_rounds"):
        caption.append(f"\nthe privacy budget was spent after round {metrics['rounds']} of {planned}")
    absent = metrics.get("absent", [])  # users of a federation who never joined it
    # In a federation users can keep their results private.
    if private_users := [name for name in metrics.get("untold", ()) if name not in absent]:
        caption.append(f"\nnot reported to the server: results of {list_names(private_users)}")
    if absent:
        caption.append(f"\ndid not take part: {list_names(absent)}")
    selected_round = metrics.get("selected_round", metrics["rounds"])
    if selected_round != metrics["rounds"]:
        caption.append(
            f"\nmodels of round {selected_round} of {metrics['rounds']}, whose validation loss is the lowest"
        )
    return caption


def _mean_text(mean: float | None, record: Mapping[str, object], measure: str) -> str:
    """Return a mean over users as text, also if no user shares its results."""
    return number(mean, measure) if record["users"] else "not reported"


def _run_circumstances(metrics: JsonObject, unit: str) -> str:
    """Return a run's base, dtype, device, speed, time and peak memory as one line; ``unit`` is that of its data.

    The model of a federation's client has no speed and no time, which only the server has counted.
    """
    rate = metrics[f"{unit}_per_second"]
    # In a federation users can keep their results private; "untold" lists those that do.
    has_private_users = metrics.get("untold") or not metrics["users"]
    without_rate = "speed not reported" if has_private_users else "no training"
    speed = f"{rate:,.0f} {unit}/s" if rate else without_rate
    peak = f"{metrics['peak_memory_bytes'] / 1e9:.1f} GB"
    place = f"{metrics['dtype']} on {metrics['device']}"
    # A client's model has trained for some rounds, but has no rate although its user has results.
    is_clients_model = metrics["rounds"] and not rate and not has_private_users
    times = [] if is_clients_model else [speed, f"{seconds_text(metrics['wall_seconds'])} s"]
    return " · ".join([metrics["base"], place, *times, f"peak memory {peak}"])


def _add_users(table: Table, metrics: JsonObject, names: Sequence[str]) -> None:
    """Add a row for each given user: test result, amount of test data, trained parameters and bytes of an upload.

    Args:
        table: The table, changed in place.
        metrics: Content of the run's ``metrics.json``.
        names: Names of the users.
    """
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    users = [metrics["users"][name] for name in names]
    uploads = sizes([user["upload_bytes_per_round"] for user in users])
    for name, user, upload in zip(names, users, uploads, strict=True):
        table.add_row(
            words(name),
            number(user[f"test_{measure}"], measure),
            f"{user[f'test_{unit}']:,}",
            f"{user['trainable_parameters']:,}",
            upload,
        )


def _add_summary(table: Table, metrics: JsonObject, measure: str) -> None:
    """Add rows for the best users, quantiles of all results, and the worst users, in place of a row for each user.

    Args:
        table: The table, changed in place.
        metrics: Content of the run's ``metrics.json``.
        measure: Name of the measure of the results, such as "perplexity".
    """
    scores = {name: user[f"test_{measure}"] for name, user in metrics["users"].items()}
    ordered = best_first(scores, measure)
    table.add_row(words(f"best {FEW} of {len(ordered)} (--all shows all users)", "dim"))
    _add_users(table, metrics, ordered[:FEW])
    table.add_row(words("from best to worst", "dim"))
    for label, share in QUANTILES.items():
        table.add_row(label, number(scores[at_share(ordered, share)], measure))
    table.add_row(words(f"worst {FEW}", "dim"))
    _add_users(table, metrics, ordered[-FEW:])


def render_curve(events: list[JsonObject]) -> Table:
    """Return a table of the mean over users and of each user's result at each evaluation, for the terminal.

    Args:
        events: A run's events, of which only evaluations are read.
    """
    evaluations = [event for event in events if event["event"] == "evaluation"]
    measure = measure_of(evaluations[0]) if evaluations else "perplexity"
    mean_columns = ["mean", *(_named_geometric_mean(evaluations[0]["users"], measure) if evaluations else {})]
    table = Table("round", *mean_columns, title=f"test {measure} by round", title_justify="left", box=None)
    names = users_with_column(dict.fromkeys(name for event in evaluations for name in event["users"]))
    for name in names:
        table.add_column(words(name), justify="right")
    for event in evaluations:
        users = event["users"]  # in a federation users can keep their results private
        results = [
            number(users[name][f"test_{measure}"], measure) if name in users else "not reported" for name in names
        ]
        means = [event[f"mean_test_{measure}"], *_named_geometric_mean(users, measure).values()]
        table.add_row(str(event["round"]), *(_mean_text(mean, event, measure) for mean in means), *results)
    return table


def _named_geometric_mean(users: Mapping[str, Mapping[str, float | None]], measure: str) -> dict[str, float | None]:
    """Return the geometric mean over users by its name in tables; empty for measures other than perplexity."""
    return dict(zip(["geometric mean"], geometric(users, measure).values(), strict=False))


def users_with_column(names: Iterable[str]) -> list[str]:
    """Return the names if each user gets a column; an empty list for more than :data:`MOST_USERS` users."""
    names = list(names)
    return names if len(names) <= MOST_USERS else []


WIDTH, HEIGHT = 480, 200
"""Size of the SVG in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 12, 28

Curve = list[tuple[int, float | None]]
"""Rounds and the measure after each, in order; None if the measure is not finite."""


def curve_svg(events: Sequence[JsonObject]) -> str:
    """Return the test measure by round as an SVG: a line for the mean over users, and one for each user.

    With more than 8 users only the mean has a line. Perplexities have a logarithmic axis. Values that are not finite
    interrupt their line. Lines of users have the user's name as tooltip, escaped.

    Args:
        events: A run's events, of which only evaluations are read.

    Returns:
        An ``<svg>`` element; an empty string if no evaluation has a finite mean.
    """
    evaluations = [event for event in events if event["event"] == "evaluation"]
    if not evaluations:
        return ""
    measure = measure_of(evaluations[0])
    mean: Curve = [(event["round"], event[f"mean_test_{measure}"]) for event in evaluations]
    if all(value is None for _, value in mean):
        return ""
    by_user: dict[str, Curve] = {}
    # The same users have a line here and a column in tables.
    for name in users_with_column(dict.fromkeys(name for event in evaluations for name in event["users"])):
        results = [event["users"].get(name, {}).get(f"test_{measure}") for event in evaluations]
        by_user[name] = [(event["round"], result) for event, result in zip(evaluations, results, strict=True)]
    return _draw_curves(mean, by_user, measure)


def _draw_curves(mean: Curve, by_user: Mapping[str, Curve], measure: str) -> str:
    """Draw learning curves as an SVG.

    Args:
        mean: The mean over users, which is drawn bold.
        by_user: Each user's curve by name; empty for many users.
        measure: The measure; perplexities have a logarithmic axis.
    """
    finite = [value for curve in (mean, *by_user.values()) for _, value in curve if value is not None]
    low, high, last = min(finite), max(finite), mean[-1][0]
    scale = math.log if measure == "perplexity" else float

    def place(round_number: int, value: float) -> tuple[float, float]:
        """Return the position of a point in pixels; y grows downwards."""
        across = round_number / last if last else 0.5  # fractions of the width and the height
        up = (scale(value) - scale(low)) / (scale(high) - scale(low)) if scale(high) > scale(low) else 0.5
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    def line(curve: Curve, name: str, style: str) -> str:
        """Return the markup of one curve, with ``name`` as its tooltip."""
        parts = [[place(*point) for point in part] for part in _finite_parts(curve)]
        drawn = "".join(_polyline(part) if len(part) > 1 else _dot(part[0]) for part in parts)
        return f"<g {style}><title>{escape(printable(name))}</title>{drawn}</g>"

    left, bottom, right = _LEFT, HEIGHT - _BOTTOM, WIDTH - _RIGHT
    label = escape(f"test {measure} by round ({rule(measure)})")
    ticks = [_svg_text(left - 6, place(0, low)[1] + 4, "end", number(low, measure))]
    if high > low:
        ticks.append(_svg_text(left - 6, place(0, high)[1] + 4, "end", number(high, measure)))
    if last:
        ticks += [_svg_text(left, HEIGHT - 8, "middle", "0"), _svg_text(right, HEIGHT - 8, "end", str(last))]
    ticks.append(_svg_text((left + right) / 2, HEIGHT - 8, "middle", "round; bold: mean over users"))
    users = "".join(line(curve, name, 'stroke-opacity="0.4" fill-opacity="0.4"') for name, curve in by_user.items())
    average = line(mean, "mean", 'stroke-width="2.5"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'style="max-width: {WIDTH}px; width: 100%; font: 12px sans-serif" fill="currentColor" stroke="none">'
        f'<path d="M{left} {_TOP}V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity="0.3"/>'
        f"{''.join(ticks)}{users}{average}</svg>"
    )


def _finite_parts(curve: Curve) -> list[list[tuple[int, float]]]:
    """Split a curve at values that are not finite; return the parts between them."""
    parts: list[list[tuple[int, float]]] = [[]]
    for round_number, value in curve:
        if value is None:
            parts.append([])
        else:
            parts[-1].append((round_number, value))
    return [part for part in parts if part]


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{coordinates}" fill="none" stroke="currentColor"/>'


def _dot(point: tuple[float, float]) -> str:
    return f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3"/>'


def _svg_text(x: float, y: float, anchor: str, text: str) -> str:
    """Return a text at a position in pixels; ``anchor`` says which end of the text is there."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


MOST_WEIGHTS = 12
"""Largest number of users of each entry that the page lists, those with the smallest weights."""


@dataclass(frozen=True, kw_only=True)
class UploadWeights:
    """Weights of one user's uploads over the rounds and seeds of an entry.

    Args:
        user: The user.
        uploads: Number of uploads with a weight.
        left_out: Number of uploads with weight 0.
        mean: Mean weight.
    """

    user: str
    uploads: int
    left_out: int
    mean: float


def upload_weights(entry: Entry) -> list[UploadWeights]:
    """Return the users whose uploads an aggregation rule has weighted, smallest mean weights first.

    A robust rule gives small weights to uploads that differ from the others.
    """
    weights: dict[str, list[float]] = {}
    for run in entry.runs:
        for event in run.aggregations:
            for user, weight in event.get("counted", {}).items():  # by how much each upload counted in the round
                weights.setdefault(user, []).append(weight)
    users = [
        UploadWeights(user=user, uploads=len(of_user), left_out=of_user.count(0), mean=fmean(of_user))
        for user, of_user in weights.items()
    ]
    return sorted(users, key=lambda user: (user.mean, -user.left_out))


def upload_weight_tables(entries: Sequence[Entry]) -> list[dict[str, object]]:
    """Return a table for each entry that aggregates robustly: the users whose uploads had the smallest weights.

    Returns:
        Mappings for the page's template: ``label`` of the entry, ``rule`` (name of the aggregation rule), ``rows`` of
        at most :data:`MOST_WEIGHTS` users (user, uploads with weight 0, mean weight), and ``more``, the number of
        other users.
    """
    tables: list[dict[str, object]] = []
    for entry in entries:
        users = upload_weights(entry)
        if not users:
            continue
        rows = [(user.user, f"{user.left_out} of {user.uploads}", f"{user.mean:.2f}") for user in users[:MOST_WEIGHTS]]
        aggregation_rule = entry.first.aggregations[0]["rule"]
        tables.append({"label": entry.label, "rule": aggregation_rule, "rows": rows, "more": len(users) - len(rows)})
    return tables


_DESCRIPTIONS_OF_MODELS = {
    "pretrained": "the base as it is",
    "local": "trained alone, from scratch",
    "shared": "shared model of the federation, before any training",
    "joined": "after joining",
}
_INITIAL_NET = "the net with its initial weights"


def render_joined(name: str, measure: str, rows: Mapping[str, JsonMapping]) -> Table:
    """Return a table of models for a user that joined a finished run: test result and amount of training data.

    Args:
        name: The user's name.
        measure: Name of the measure of the results, such as "perplexity".
        rows: Results by model: the base or the initial net (``pretrained``), the user's own training (``local``), the
            federation's model before (``shared``) and after training on the user's data (``joined``).
    """
    unit = next(key for key in rows["joined"] if key.startswith("train_"))  # train_tokens or train_samples
    title = f"{printable(name)}: test {measure} ({rule(measure)})"
    table = Table("model", title=title, title_justify="left", box=None)
    table.add_column(measure, justify="right", style="bold")
    table.add_column(f"training {unit.removeprefix('train_')}", justify="right")
    table.add_column("")
    for model, description in _DESCRIPTIONS_OF_MODELS.items():
        result = rows[model]
        if model == "pretrained" and unit == "train_samples":
            description = _INITIAL_NET
        table.add_row(model, number(result[f"test_{measure}"], measure), f"{result[unit]:,}", words(description, "dim"))
    return table


_STATE_STYLES = {"here": "green", "away": "red", "expected": "dim"}


def render_participants(folder: Path, *, all_users: bool = False) -> rich_table.Table:
    """Return the table of the clients of a running federation, for the terminal.

    Columns: the round, the time since the last message, bytes, and the losses and scores that users share. Depending on
    the recipe, also epsilon, and the weight of each user's last upload in the aggregate ("counted"). The table is empty
    while its file is missing or cannot be read.

    Args:
        folder: Run folder of the federation's server.
        all_users: Whether to list all clients; else at most :data:`MOST_ROWS`, clients that are away first.
    """
    content = _read_participants(folder)
    users: Mapping[str, JsonMapping] = content.get("users", {})
    measure = content.get("measure") or "test"
    table = rich_table.Table("user", "", title=_participants_title(content), title_justify="left", box=None)
    optional_columns = ["epsilon"] if "privacy" in content else []
    if any(user.get("counted") is not None for user in users.values()):
        optional_columns.append("counted")
    for name in ("round", "last seen", "sent", "received", "loss", measure, *optional_columns):
        table.add_column(name, justify="right")
    table.add_column("")
    listed = list(users)
    if len(users) > MOST_ROWS and not all_users:  # clients that are away need attention
        by_state = sorted(users, key=lambda name: ("away", "expected", "here").index(users[name]["state"]))
        listed = by_state[:MOST_ROWS]
    for name in listed:
        *cells, why = _participant_row(name, users[name], measure)
        table.add_row(*cells, *(_number_or_dash(users[name].get(column)) for column in optional_columns), why)
    if len(listed) < len(users):
        table.caption, table.caption_justify = words(f"and {len(users) - len(listed):,} more", "table.caption"), "left"
    return table


def _read_participants(folder: Path) -> JsonObject:
    """Return the content of a federation's file of participants; empty if it is missing or unreadable."""
    try:
        content = json.loads((folder / PARTICIPANTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _participants_title(content: JsonMapping) -> str:
    """Return the title of the table of clients: rounds that are done, clients by state, and the epsilon spent.

    Args:
        content: The content of the file of participants; empty if there is none yet.
    """
    if not content:
        return "waiting for the coordinator"
    states = [user["state"] for user in content["users"].values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in _STATE_STYLES if state in states)
    budget = content.get("privacy")
    spent = f" · epsilon {budget['epsilon']:.3g} at delta {budget['delta']:g}" if budget else ""
    return f"{content['round']} of {content['rounds']} rounds are done · {counts}{spent}"


def _participant_row(name: str, user: JsonMapping, measure: str) -> tuple[str | Text, ...]:
    """Return the cells of a client's row without the optional columns; the last one says why it is away or declined.

    Args:
        name: The user's name.
        user: The user's entry in the file of participants.
        measure: The measure of test results.
    """
    seen, loss, test = user["seen"], user["train_loss_nats"], user["test"]
    return (
        words(name),
        words(user["state"], _STATE_STYLES[user["state"]]),
        str(user["round"] or "–"),  # 0 before the client has answered in any round
        f"{_ago_text(time.time() - seen)}" if seen is not None else "never",
        _size_text(user["upload_bytes"]),
        _size_text(user["download_bytes"]),
        "–" if loss is None else f"{loss:.3f}",
        "–" if test is None else number(test, measure),
        words(user["why"], "dim"),
    )


def _number_or_dash(value: float | None) -> str:
    """Return a number with three significant digits; a dash if it is unknown."""
    return "–" if value is None else f"{value:.3g}"


def _size_text(count: int) -> str:
    """Return a byte count as text in its own unit."""
    unit, name = byte_unit(count)
    return f"{count / unit:,.1f} {name}" if unit > 1 else f"{count} B"


def _ago_text(seconds: float) -> str:
    """Return a time in the past as text, such as "3 min ago"."""
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def cost_rows(costs: Sequence[Cost]) -> list[list[str]]:
    """Return the cells of the page's table of costs, one row for each entry.

    Columns: label, rounds, trainable parameters, bytes per user and round (upload, download), bytes in total (upload,
    download), peak memory, tokens or samples per second, seconds, and dtype with device. All byte counts of a column
    have one unit.
    """

    def bytes_of(key: str) -> list[str]:
        """Return a column of byte counts as text, from an attribute of the costs."""
        return sizes([getattr(item, key) for item in costs])

    columns = [
        [item.label for item in costs],
        [str(item.rounds) for item in costs],
        ["–" if item.trainable_parameters is None else f"{item.trainable_parameters:,}" for item in costs],
        bytes_of("upload_bytes_per_user_round"),
        bytes_of("download_bytes_per_user_round"),
        bytes_of("upload_bytes"),
        bytes_of("download_bytes"),
        ["–" if item.peak_memory_bytes is None else f"{item.peak_memory_bytes / 1e9:,.2f} GB" for item in costs],
        [_mean_and_deviation(item.per_second) for item in costs],
        [_mean_and_deviation(item.wall_seconds) for item in costs],
        [item.place for item in costs],
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _mean_and_deviation(value: Spread | None) -> str:
    """Return a mean with its deviation over seeds as text; a dash if it is unknown."""
    if value is None:
        return "–"
    digits = 0 if value.mean >= 10 else 1
    return f"{value.mean:,.{digits}f}" + ("" if value.std is None else f" ({value.std:,.{digits}f})")


_MEAN_HEADINGS = ("mean", "geometric mean")
_COST_HEADINGS = ("trainable", "upload / round", "seconds")


def write_comparison(
    folder: Path, runs: Sequence[Path], baseline: str | None = None, labels: Mapping[Path, str] = MappingProxyType({})
) -> ComparisonTable:
    """Write ``table.md`` and ``table.json`` to ``folder`` and return the table.

    Args:
        folder: Folder of the comparison.
        runs: Run folders.
        baseline: A method, or several separated by commas, of which the best result counts.
        labels: Names of runs that are not called by their method's name, for example with other settings.
    """
    table = compare_runs(runs, baseline, labels)
    write_json(folder / "table.json", table)
    write_text(folder / "table.md", markdown(table))
    return table


def score_columns(table: ComparisonTable) -> list[tuple[str, list[dict[str, float | None]]]]:
    """Return the columns of results: one for each user, or of many users the best, median and worst; then the means.

    Returns:
        The heading of each column, and each method's ``mean`` and ``std`` over seeds.
    """
    rows, measure = table["methods"], measure_of(table["methods"][0])
    if names := users_with_column(rows[0]["users"]):
        columns = [(printable(name), [row["users"][name] for row in rows]) for name in names]
    else:
        chosen_users = [_spread_users(row["users"], measure) for row in rows]  # each method's best, median, worst user
        columns = [
            (heading, [row["users"][names[i]] for row, names in zip(rows, chosen_users, strict=True)])
            for i, heading in enumerate(_SPREAD_SHARES)
        ]
    for heading, key in zip(_MEAN_HEADINGS, (f"mean_test_{measure}", GEOMETRIC), strict=True):
        if all(key in row for row in rows):  # only perplexities have a geometric mean
            columns.append((heading, [row[key] for row in rows]))
    return columns


def cost_columns(table: ComparisonTable) -> list[tuple[str, list[str]]]:
    """Return the heading and the cells of each column of costs.

    A dagger marks numbers of trained parameters that differ much from those of the other methods.
    """
    rows = table["methods"]
    counts = [row["trainable_parameters"] for row in rows]
    typical = typical_budget(counts)
    trainable = [f"{count:,}" + (" †" if is_unequal(count, typical) else "") for count in counts]
    uploads = sizes([row["upload_bytes_per_user_round"] for row in rows])
    durations = [seconds_text(row["wall_seconds"]) for row in rows]
    return list(zip(_COST_HEADINGS, (trainable, uploads, durations), strict=True))


def _text_cells(table: ComparisonTable) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a comparison as text: method, users, means, parameters, upload, time."""
    has_deviations = any(len(row["seeds"]) > 1 for row in table["methods"])
    measure = measure_of(table["methods"][0])

    def cell(value: dict[str, float | None]) -> str:
        mean, deviation = number(value["mean"], measure), value["std"]
        return mean if deviation is None or not has_deviations else f"{mean} ({number(deviation, measure)})"

    scores = [(name, [cell(value) for value in values]) for name, values in score_columns(table)]
    columns = [("method", _marked_methods(table)), *scores, *cost_columns(table)]
    rows = [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]
    return [name for name, _ in columns], rows


def _marked_methods(table: ComparisonTable) -> list[str]:
    """Return the name of each method, with a double dagger if a role, such as its router, was never trained."""
    return [row["method"] + (" ‡" if row.get("untrained") else "") for row in table["methods"]]


_SPREAD_SHARES = {"best": 0.0, "median": 0.5, "worst": 1.0}


def _spread_users(users: dict[str, dict[str, float | None]], measure: str) -> list[str]:
    """Return the best, the median and the worst user of a method."""
    ordered = best_first({name: user["mean"] for name, user in users.items()}, measure)
    return [at_share(ordered, share) for share in _SPREAD_SHARES.values()]


def note_of(table: ComparisonTable) -> str:
    """Return the notes below a comparison in one line; empty without any.

    They are on samples, missing seeds, settings, parameter counts, roles that were never trained, privacy and warnings.
    """
    rows = table["methods"]
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    fewer_seeds = [row for row in rows if len(row["seeds"]) < len(seeds)]
    seed_notes = [f"{row['method']}: seeds {', '.join(map(str, row['seeds']))} alone" for row in fewer_seeds]
    parameter_note = parameter_count_note([row["trainable_parameters"] for row in rows])
    privacy_notes = [f"{row['method']}: privacy {describe_privacy(row['privacy'])}" for row in rows if "privacy" in row]
    warnings = [f"{row['method']}, {warning}" for row in rows for warning in row.get("warnings", ())]
    marks = [_settings_note(rows), parameter_note, _untrained_note(rows)]
    notes = [_sample_note(rows), *seed_notes, *marks, *_early_ends(rows), *privacy_notes, *warnings]
    return "; ".join(filter(None, notes))


def _settings_note(rows: Sequence[MethodRow]) -> str:
    """Return a note on settings that differ from the defaults, without those in a method's label; empty without any."""
    texts = []
    for row in rows:
        label = row["method"]
        # A label is the method's name, then settings: "NAME:key=value:key=value".
        keys_in_label = {setting.partition("=")[0] for setting in label.split(":")[1:]}
        settings = row.get("method_settings", {}).items()
        if others := [f"{key}={value}" for key, value in settings if key not in keys_in_label]:
            texts.append(f"{label} {', '.join(others)}")
    return f"settings that differ from the defaults: {', '.join(texts)}" if texts else ""


def _untrained_note(rows: Sequence[MethodRow]) -> str:
    """Return the note on roles (such as routers) that were never trained because the run was too short.

    Empty if all methods have trained all roles.
    """
    roles = sorted({role for row in rows for role in row.get("untrained", ())})
    if not roles:
        return ""
    return (
        f"‡ {' and '.join(roles)} never trained, since rounds x local_steps is less than the interval of its phase "
        "(method.router_every)"
    )


def _early_ends(rows: Sequence[MethodRow]) -> Iterator[str]:
    """Yield notes on methods whose runs ended early because their privacy budget was spent."""
    for row in rows:
        if planned := row.get("planned_rounds"):
            last = " and ".join(map(str, sorted(set(row["rounds"]))))
            yield f"{row['method']}: the privacy budget was spent after round {last} of {planned}"


def _sample_note(rows: Sequence[MethodRow]) -> str:
    """Return a note on means over a sample of the users, with each method's interval; empty without samples.

    The size of the sample, which all methods share, comes first.
    """
    # The texts of describe_sample are "SIZE" or "SIZE, INTERVAL".
    texts = {row["method"]: describe_sample(row) for row in rows if "sample" in row}
    if not texts:
        return ""
    size = next(iter(texts.values())).partition(", ")[0]
    intervals = {method: text.partition(", ")[2] for method, text in texts.items()}
    return "; ".join([size, *(f"{method}: {interval}" for method, interval in intervals.items() if interval)])


def title_of(table: ComparisonTable, spread: str = "mean (std)") -> str:
    """Return the title of a comparison: measure, better direction and seeds.

    Args:
        table: The comparison, with a row of results and costs for each method.
        spread: Description of the cells if there are several seeds.
    """
    seeds = sorted({seed for row in table["methods"] for seed in row["seeds"]})
    over = f"{spread} over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    first = table["methods"][0]
    measure, users = measure_of(first), first["users"]
    # The table of a comparison has a column for each user, or of many users only their means.
    what = f"test {measure} of each user" if users_with_column(users) else f"mean test {measure} of {len(users)} users"
    return f"{what} ({rule(measure)}), {over}"


def markdown(table: ComparisonTable) -> str:
    """Return a comparison as Markdown tables."""
    head, rows = _text_cells(table)
    lines = [f"Table: {title_of(table)}", "", markdown_line(head), "|" + "---|" * len(head)]
    lines += [markdown_line(row) for row in rows]
    lines += ["", note] if (note := note_of(table)) else []
    lines += ["", *comparisons.markdown(comparison)] if (comparison := read_baseline_comparison(table)) else []
    return "\n".join(lines) + "\n"


def tables_of(table: ComparisonTable, *, all_users: bool = False) -> Iterator[Table | Text]:
    """Yield a comparison for the terminal: the table of means, notes below it, and verdicts against the baseline.

    The first table has a column for each user if there are at most :data:`MOST_USERS`. For more users, ``all_users``
    adds a last table with a row for each user.
    """
    yield from render_comparison(table)
    if note := note_of(table):  # samples, missing seeds, budgets, privacy and warnings
        yield words(note, "dim")
    if comparison := read_baseline_comparison(table):
        yield words("")
        yield from comparisons.render(comparison)
    if not all_users or users_with_column(table["methods"][0]["users"]):  # the first table has all users
        return
    every_user = Table("user", title="every user", title_justify="left", box=None)
    for row in table["methods"]:
        every_user.add_column(row["method"], justify="right")
    measure = measure_of(table["methods"][0])
    for name in table["methods"][0]["users"]:
        every_user.add_row(words(name), *(number(row["users"][name]["mean"], measure) for row in table["methods"]))
    yield every_user


def render_comparison(table: ComparisonTable) -> Iterator[Table]:
    """Yield the table of a comparison for the terminal.

    With several seeds costs are in a second table, as deviations take up the width.
    """
    head, rows = _text_cells(table)
    has_deviations = any(len(row["seeds"]) > 1 for row in table["methods"])
    first_cost = len(head) - (len(_COST_HEADINGS) if has_deviations else 0)
    yield _text_table(title_of(table), head[:first_cost], [row[:first_cost] for row in rows])
    if has_deviations:
        yield _text_table("", [head[0], *_COST_HEADINGS], [[row[0], *row[first_cost:]] for row in rows])


def _text_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for the terminal, whose first column does not wrap and whose means are bold."""
    result = Table(title=title or None, title_justify="left", box=None)
    for i, name in enumerate(head):
        style = "bold" if name in _MEAN_HEADINGS else ""
        justify = "left" if i == 0 else "right"
        result.add_column(words(name), justify=justify, style=style, no_wrap=i == 0, overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


_LATEX_CHARACTERS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # at the start of a row LaTeX reads it as an option of the previous row's \\
    "*": "{*}",
    "†": r"\textdagger{}",
    "‡": r"\textdaggerdbl{}",
    "–": r"\textendash{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"\textperiodcentered{}",
}
_LATEX_SPECIAL = re.compile("|".join(map(re.escape, _LATEX_CHARACTERS)))
_LIGATURES = re.compile(r"([-'])(?=\1)")
"""Hyphens and apostrophes before another one, which LaTeX would join to a dash or a quotation mark."""
_MINUS = re.compile(r"(?<![\w.])-(\d+(?:\.\d+)?)")
"""Negative numbers, which have a minus sign in mathematics and a hyphen in text."""


def escape_latex(text: object) -> str:
    """Return a text that LaTeX typesets as it is, on one line; hyphens or apostrophes in a row are kept apart.

    >>> escape_latex("50% of a_b")
    '50\\\\% of a\\\\_b'
    """
    return _LIGATURES.sub(r"\1{}", _LATEX_SPECIAL.sub(lambda match: _LATEX_CHARACTERS[match[0]], printable(text)))


def latex_number(text: str) -> str:
    """Return a cell with numbers for LaTeX, with minus signs in place of hyphens.

    >>> latex_number("-0.8%")
    '$-0.8$\\\\%'
    """
    return _MINUS.sub(r"$-\1$", escape_latex(text))


def latex_label(name: str, suffix: str = "") -> str:
    """Return the label of a LaTeX table, ``tab:NAME`` or ``tab:NAME-SUFFIX``, without characters special to LaTeX."""
    return "tab:" + re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(filter(None, [name, suffix]))).strip("-")


def latex(
    table: ComparisonTable, *, name: str = "comparison", all_users: bool = False, require_verdicts: bool = False
) -> str:
    """Return a comparison as a ``table`` environment for the package booktabs.

    A row is a method; a column is a user, a mean over users or a cost. With several seeds costs are a tabular of their
    own below. Cells are means over seeds, with the standard deviation for methods with several seeds. The best mean of
    a column is bold, and so are means that are printed with the same digits. With one method nothing is bold. The
    verdicts against the baseline, if the comparison has them, are a table of their own.

    Args:
        table: The table of :func:`comingle.reports.comparisons.compare_metrics`.
        name: Name of the comparison, for ``\\label{tab:NAME}``.
        all_users: If users have no columns, add a table with a row for each user, whose best mean is bold.
        require_verdicts: Raise an error if there are no verdicts.

    Raises:
        RecipeError: The table has to have verdicts but has none, as it has one method or one seed.
    """
    rows, measure = table["methods"], measure_of(table["methods"][0])
    methods = [escape_latex(method) for method in _marked_methods(table)]
    seeds = [len(row["seeds"]) for row in rows]
    scores = [(escape_latex(name), _latex_cells(values, seeds, measure)) for name, values in score_columns(table)]
    costs = [(escape_latex(name), [escape_latex(cell) for cell in cells]) for name, cells in cost_columns(table)]
    method_column = ("method", methods)
    # Deviations over several seeds leave no room for costs beside the results.
    if max(seeds) > 1:
        columns_of_tabulars = [[method_column, *scores], [method_column, *costs]]
    else:
        columns_of_tabulars = [[method_column, *scores, *costs]]
    tabulars = [
        tabular([name for name, _ in columns], zip(*(cells for _, cells in columns), strict=True))
        for columns in columns_of_tabulars
    ]
    best = "; best in bold" if len(rows) > 1 else ""
    title = title_of(table, spread="mean ± std")
    environments = [table_environment(f"{title}{best}", tabulars, note_of(table), label=latex_label(name))]
    users = rows[0]["users"]
    if all_users and not users_with_column(users):
        rows_of_users = [
            [escape_latex(user), *_latex_cells([row["users"][user] for row in rows], seeds, measure)] for user in users
        ]
        of_users = tabular(["user", *methods], rows_of_users)
        label = latex_label(name, "users")
        environments.append(table_environment(f"every user: {title}{best}", [of_users], "", label=label))
    if comparison := read_baseline_comparison(table):
        environments.append(latex_verdicts(comparison, latex_label(name, "verdicts")))
    elif require_verdicts:
        seeds_text = ", ".join(map(str, sorted({seed for row in rows for seed in row["seeds"]})))
        raise RecipeError(
            f"--against: got {len(rows)} methods with seeds {seeds_text}, which have no verdicts; allowed: 2 methods "
            "or more with 2 seeds or more"
        )
    return "% needs \\usepackage{booktabs}\n" + "\n".join(environments)


def latex_verdicts(comparison: BaselineComparison, label: str, *, prefix: str = "") -> str:
    """Return verdicts as a LaTeX ``table`` environment.

    Args:
        comparison: The comparison with a baseline.
        label: Label of the table, as of :func:`latex_label`.
        prefix: Beginning of the caption, before a colon; empty for none.
    """
    head, rows = comparisons.rows_of(comparison)
    cells = [[escape_latex(method), *map(latex_number, numbers)] for method, *numbers in rows]
    body = tabular([escape_latex(name) for name in head], cells)
    note = " ".join(comparisons.notes(comparison))
    caption = ": ".join(filter(None, [prefix, comparisons.heading(comparison)]))
    return table_environment(caption, [body], note, label=label)


def _latex_cells(values: Sequence[CellSpread], seeds: Sequence[int], measure: str) -> list[str]:
    """Return the cells of a column, or of a row of users' results, with the best in bold.

    Args:
        values: Mean and deviation over seeds of each cell.
        seeds: Number of seeds of each cell's method; deviations of one seed are not shown.
        measure: Name of the measure of these results, such as "perplexity".
    """
    finite = [mean for value in values if (mean := value["mean"]) is not None and math.isfinite(mean)]
    best = number(best_of(measure)(finite), measure) if finite and len(values) > 1 else None
    cells = []
    for value, count in zip(values, seeds, strict=True):
        text = number(value["mean"], measure)
        std = value["std"] if count > 1 else None
        cell = latex_number(text if std is None else f"{text} ± {number(std, measure)}")
        cells.append(rf"\textbf{{{cell}}}" if text == best else cell)
    return cells


def table_environment(caption: str, tabulars: Sequence[str], note: str, *, label: str) -> str:
    """Return a LaTeX ``table`` environment.

    Args:
        caption: The caption, as plain text.
        tabulars: LaTeX tabulars, which are placed below each other.
        note: A note below them, as plain text; empty for none.
        label: The label, as of :func:`latex_label`.
    """
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \small",
        rf"  \caption{{{escape_latex(caption[0].upper() + caption[1:])}}}",
        rf"  \label{{{label}}}",
        "\n  \\par\\medskip\n".join(tabulars),
        *([rf"  \par\smallskip\footnotesize {escape_latex(note)}"] if note else []),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def tabular(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a LaTeX ``tabular`` with a left-aligned first column; cells are LaTeX already."""
    lines = [
        rf"  \begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"    \toprule",
        *_latex_rows([head]),
        r"    \midrule",
        *_latex_rows(rows),
        r"    \bottomrule",
        r"  \end{tabular}",
    ]
    return "\n".join(lines)


def _latex_rows(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows of LaTeX cells as lines of a tabular."""
    return [f"    {' & '.join(row)} \\\\" for row in rows]
