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
from rich.console import Group
from rich.text import Text

from comingle.reports import comparisons
from comingle.reports.comparisons import (
    BaselineComparison,
    CellSpread,
    ComparisonTable,
    MethodRow,
    compare_runs,
    edge_notes,
    read_baseline_comparison,
    read_tuning,
    tuning_rows,
    tuning_title,
)
from comingle.reports.formatting import (
    FEW,
    MOST_ROWS,
    QUANTILES,
    Table,
    best_first,
    best_of,
    byte_unit,
    epsilon_of,
    format_duration,
    is_unequal,
    markdown_line,
    median_parameter_count,
    parameter_count_note,
    unit_and_direction,
    user_at_quantile,
)
from comingle.reports.runs import Cost, Entry, Spread, served_lines
from comingle.utils.errors import RecipeError, list_names
from comingle.utils.records import (
    GEOMETRIC,
    PARTICIPANTS,
    JsonMapping,
    JsonObject,
    RunSummary,
    client_models,
    client_runs,
    describe_privacy,
    describe_sample,
    geometric,
    measure_of,
    number,
    read_choices,
    read_events,
    summarize_run,
    write_json,
    write_text,
)
from comingle.utils.terminal import literal_text, printable

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
    """Return the table of a finished run for the terminal: a row for each user, and the mean over users at the bottom.

    Args:
        metrics: Content of the run's ``metrics.json``.
        all_users: Whether all users have a row; else, of many users, only the best and the worst.
    """
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    run_name = f"{metrics['method']}, seed {metrics['seed']}"
    caption = _run_caption(metrics, unit)
    all_results_are_private = metrics.get("untold") and not metrics["users"]  # untold: users that report no results
    if all_results_are_private:
        table = Table("", box=None, show_header=False, caption=caption, caption_justify="left")
        reason = "no user reports results to the server (`tells`); each user's own run folder has its scores"
        table.add_row(literal_text(f"{run_name}: {reason}"))
        return table

    title = f"{run_name}: test {measure} ({unit_and_direction(measure)})"
    table = Table("user", title=title, title_justify="left", box=None, show_footer=True)
    mean_by_name = {"mean": metrics[f"mean_test_{measure}"]}
    mean_by_name.update(_named_geometric_mean(metrics["users"], measure))
    mean_texts = [_mean_text(mean, metrics, measure) for mean in mean_by_name.values()]
    table.columns[0].footer = "\n".join(mean_by_name)  # one line for each mean
    table.add_column(measure, justify="right", footer="\n".join(mean_texts))
    # "one upload": bytes of a round with an upload. Comparisons have the mean over all rounds instead.
    for heading in (f"test {unit}", "trainable", "one upload"):
        table.add_column(heading, justify="right")
    if all_users or len(metrics["users"]) <= MOST_ROWS:
        _add_users(table, metrics, list(metrics["users"]))
    else:
        _add_summary(table, metrics, measure)
    table.caption, table.caption_justify = caption, "left"
    return table


def _run_caption(metrics: JsonObject, unit: str) -> Text:
    """Return the lines below a run's table: base and speed, privacy, warnings, users without results.

    Args:
        metrics: Content of the run's ``metrics.json``.
        unit: "tokens" or "samples".
    """
    caption = literal_text(_run_circumstances(metrics, unit), "table.caption")
    if privacy := metrics.get("privacy"):
        caption.append(f"\nprivacy: {describe_privacy(privacy)}")
    for warning in metrics.get("warnings", ()):
        caption.append(f"\nwarning: {warning}", "yellow")
    if sample := describe_sample(metrics):
        caption.append(f"\n{sample}")
    rounds = metrics["rounds"]
    planned_rounds = metrics.get("planned_rounds")  # only if the run ended early
    if planned_rounds:
        caption.append(f"\nthe privacy budget was spent after round {rounds} of {planned_rounds}")
    never_joined = metrics.get("absent", [])
    without_results = metrics.get("untold", ())  # users that reported none, or never joined
    private_users = [name for name in without_results if name not in never_joined]
    if private_users:
        caption.append(f"\nnot reported to the server: results of {list_names(private_users)}")
    if never_joined:
        caption.append(f"\ndid not take part: {list_names(never_joined)}")
    selected_round = metrics.get("selected_round", rounds)
    if selected_round != rounds:
        caption.append(f"\nmodels of round {selected_round} of {rounds}, whose validation loss is the lowest")
    return caption


def _mean_text(mean: float | None, record: Mapping[str, object], measure: str) -> str:
    """Return a mean over the users of ``record`` as text; "not reported" if all users keep their results private."""
    return number(mean, measure) if record["users"] else "not reported"


def _run_circumstances(metrics: JsonObject, unit: str) -> str:
    """Return a line such as "smollm2-135m · float32 on cpu · 900 tokens/s · 12 s · peak memory 1.2 GB".

    Args:
        metrics: Content of the run's ``metrics.json``.
        unit: "tokens" or "samples".
    """
    rate = metrics[f"{unit}_per_second"]  # 0 if it is unknown
    some_results_are_private = metrics.get("untold") or not metrics["users"]
    if rate:
        speed = f"{rate:,.0f} {unit}/s"
    elif some_results_are_private:
        speed = "speed not reported"
    elif not metrics["rounds"]:
        speed = "no training"
    else:  # a client's own run folder: only the server measures speed and time
        speed = ""
    parts = [metrics["base"], f"{metrics['dtype']} on {metrics['device']}"]
    if speed:
        parts += [speed, f"{seconds_text(metrics['wall_seconds'])} s"]
    parts.append(f"peak memory {metrics['peak_memory_bytes'] / 1e9:.1f} GB")
    return " · ".join(parts)


def _add_users(table: Table, metrics: JsonObject, names: Sequence[str]) -> None:
    """Add a row for each given user: test result, amount of test data, trained parameters and bytes of an upload.

    Args:
        table: The table, changed in place.
        metrics: Content of the run's ``metrics.json``.
        names: The users that get a row, in order.
    """
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    results_of_users = [metrics["users"][name] for name in names]
    upload_texts = sizes([results["upload_bytes_per_round"] for results in results_of_users])
    for name, results, upload in zip(names, results_of_users, upload_texts, strict=True):
        score = number(results[f"test_{measure}"], measure)
        num_tested, num_trained = results[f"test_{unit}"], results["trainable_parameters"]
        plain_name = literal_text(name)  # without interpreting markup
        table.add_row(plain_name, score, f"{num_tested:,}", f"{num_trained:,}", upload)


def _add_summary(table: Table, metrics: JsonObject, measure: str) -> None:
    """Add rows for the best users, quantiles of all results, and the worst users, in place of a row for each user.

    Args:
        table: The table, changed in place.
        metrics: Content of the run's ``metrics.json``.
        measure: Name of the measure of the results, such as "perplexity".
    """
    score_by_user = {name: results[f"test_{measure}"] for name, results in metrics["users"].items()}
    best_to_worst = best_first(score_by_user, measure)
    table.add_row(literal_text(f"best {FEW} of {len(best_to_worst)} (--all shows all users)", "dim"))
    _add_users(table, metrics, best_to_worst[:FEW])
    table.add_row(literal_text("from best to worst", "dim"))
    for label, quantile in QUANTILES.items():
        user = user_at_quantile(best_to_worst, quantile)
        table.add_row(label, number(score_by_user[user], measure))
    table.add_row(literal_text(f"worst {FEW}", "dim"))
    _add_users(table, metrics, best_to_worst[-FEW:])


def render_curve(events: list[JsonObject]) -> Table:
    """Return the table of a learning curve for the terminal: a row for each evaluation, a column for each user.

    Args:
        events: A run's events; only those of evaluations are read.
    """
    evaluations = [event for event in events if event["event"] == "evaluation"]
    if not evaluations:
        return Table("round", "mean", title="test perplexity by round", title_justify="left", box=None)

    measure = measure_of(evaluations[0])
    mean_names = ["mean", *_named_geometric_mean(evaluations[0]["users"], measure)]
    table = Table("round", *mean_names, title=f"test {measure} by round", title_justify="left", box=None)
    names = users_with_column(dict.fromkeys(name for event in evaluations for name in event["users"]))
    for name in names:
        table.add_column(literal_text(name), justify="right")
    for event in evaluations:
        users = event["users"]
        means = [event[f"mean_test_{measure}"], *_named_geometric_mean(users, measure).values()]
        cells = [_mean_text(mean, event, measure) for mean in means]
        for name in names:
            # In a federation users can keep their results private.
            cells.append(number(users[name][f"test_{measure}"], measure) if name in users else "not reported")
        table.add_row(str(event["round"]), *cells)
    return table


def render_task_scores(scores: Mapping[str, JsonMapping]) -> Table:
    """Return a table for the terminal of users' scores on tasks of lm-eval: a row for each task, metric and user.

    Args:
        scores: Results of :func:`comingle.runs.harness.score_on_tasks` by user.
    """
    table = Table("task", "metric", "user", title="scores of lm-eval", title_justify="left", box=None)
    for heading in ("score", "standard error", "documents"):
        table.add_column(heading, justify="right")
    first = next(iter(scores.values()))["results"]
    for task, metrics in first.items():
        for metric in metrics:
            if metric.endswith("_stderr"):
                continue
            for user, of_user in scores.items():
                score = of_user["results"][task][metric]
                error = of_user["results"][task].get(f"{metric}_stderr")
                documents = of_user["n-samples"].get(task, {}).get("effective")  # none for groups of tasks
                numbers = (
                    f"{score:.4g}",
                    "" if error is None else f"{error:.2g}",
                    "" if documents is None else documents,
                )
                table.add_row(literal_text(task), literal_text(metric), literal_text(user), *map(str, numbers))
    return table


def _named_geometric_mean(users: Mapping[str, Mapping[str, float | None]], measure: str) -> dict[str, float | None]:
    """Return the geometric mean over users by its name in tables; empty for measures other than perplexity."""
    means = list(geometric(users, measure).values())  # one for perplexities, none for other measures
    return {"geometric mean": means[0]} if means else {}


def users_with_column(names: Iterable[str]) -> list[str]:
    """Return the names if each user gets a column; an empty list for more than :data:`MOST_USERS` users."""
    names = list(names)
    return names if len(names) <= MOST_USERS else []


WIDTH, HEIGHT = 480, 200
"""Size of the SVG in pixels."""
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 72, 12, 12, 28

Curve = list[tuple[int, float | None]]
"""Rounds and the measure after each, in order; None if the measure is not finite."""


def curve_svg(events: Sequence[JsonObject]) -> str:
    """Return the test measure by round as an SVG: a bold line for the mean over users, and one for each user.

    With more than 8 users only the mean has a line.

    Args:
        events: A run's events; only those of evaluations are read.

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
    all_names = dict.fromkeys(name for event in evaluations for name in event["users"])
    curve_by_user: dict[str, Curve] = {}
    for name in users_with_column(all_names):  # none if there are many users
        curve: Curve = []
        for event in evaluations:
            result = event["users"].get(name, {})  # empty if the user kept its results private in this round
            curve.append((event["round"], result.get(f"test_{measure}")))
        curve_by_user[name] = curve
    return _draw_curves(mean, curve_by_user, measure)


@dataclass(frozen=True, kw_only=True)
class _PlotArea:
    """The area of a plot of learning curves, with the results at its lower and upper edge.

    Args:
        last_round: The round at the right edge; round 0 is at the left edge.
        lowest: The smallest result.
        highest: The largest result.
        measure: Name of the measure, such as "perplexity"; perplexities have a logarithmic axis.
    """

    last_round: int
    lowest: float
    highest: float
    measure: str

    left, right = _LEFT_MARGIN, WIDTH - _RIGHT_MARGIN  # edges in pixels
    top, bottom = _TOP_MARGIN, HEIGHT - _BOTTOM_MARGIN

    def position(self, round_number: int, value: float) -> tuple[float, float]:
        """Return x and y of a point of a curve in pixels; y grows downwards, and is logarithmic for perplexities.

        Args:
            round_number: The round, which determines x.
            value: The test result after it, which determines y.
        """
        scale = math.log if self.measure == "perplexity" else float
        across = round_number / self.last_round if self.last_round else 0.5  # fraction of the width
        up = 0.5  # fraction of the height
        if scale(self.highest) > scale(self.lowest):
            up = (scale(value) - scale(self.lowest)) / (scale(self.highest) - scale(self.lowest))
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def labels(self) -> str:
        """Return the markup of the labels: the lowest and the highest result, and the first and the last round."""
        _, y_of_lowest = self.position(0, self.lowest)
        _, y_of_highest = self.position(0, self.highest)
        texts = [_svg_text(self.left - 6, y_of_lowest + 4, "end", number(self.lowest, self.measure))]
        if self.highest > self.lowest:
            texts.append(_svg_text(self.left - 6, y_of_highest + 4, "end", number(self.highest, self.measure)))
        if self.last_round:
            texts.append(_svg_text(self.left, HEIGHT - 8, "middle", "0"))
            texts.append(_svg_text(self.right, HEIGHT - 8, "end", str(self.last_round)))
        texts.append(_svg_text((self.left + self.right) / 2, HEIGHT - 8, "middle", "round; bold: mean over users"))
        return "".join(texts)

    def line(self, curve: Curve, name: str, style: str) -> str:
        """Return the SVG markup of one curve; values that are not finite are gaps.

        Args:
            curve: Pairs of a round and the test result after it.
            name: Tooltip of the curve, such as the user's name.
            style: SVG attributes, such as the width and opacity of the stroke.
        """
        shapes = []
        for part in _finite_parts(curve):
            points = [self.position(round_number, value) for round_number, value in part]
            shapes.append(_polyline(points) if len(points) > 1 else _dot(points[0]))
        return f"<g {style}><title>{escape(printable(name))}</title>{''.join(shapes)}</g>"


def _draw_curves(mean: Curve, curve_by_user: Mapping[str, Curve], measure: str) -> str:
    """Draw learning curves as an SVG; a curve is a list of pairs of a round and the test result after it.

    Args:
        mean: The mean over users, which is drawn bold.
        curve_by_user: Each user's curve by name, drawn pale; empty for many users.
        measure: Name of the measure, such as "perplexity".
    """
    curves = [mean, *curve_by_user.values()]
    finite = [value for curve in curves for _, value in curve if value is not None]
    last_round, _ = mean[-1]
    area = _PlotArea(last_round=last_round, lowest=min(finite), highest=max(finite), measure=measure)
    pale = 'stroke-opacity="0.4" fill-opacity="0.4"'
    user_lines = [area.line(curve, name, pale) for name, curve in curve_by_user.items()]
    mean_line = area.line(mean, "mean", 'stroke-width="2.5"')
    label = escape(f"test {measure} by round ({unit_and_direction(measure)})")
    axes = f"M{area.left} {area.top}V{area.bottom}H{area.right}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'style="max-width: {WIDTH}px; width: 100%; font: 12px sans-serif" fill="currentColor" stroke="none">'
        f'<path d="{axes}" fill="none" stroke="currentColor" stroke-opacity="0.3"/>'
        f"{area.labels()}{''.join(user_lines)}{mean_line}</svg>"
    )


def _finite_parts(curve: Curve) -> list[list[tuple[int, float]]]:
    """Split a curve at values that are not finite; return the parts between them."""
    parts: list[list[tuple[int, float]]] = [[]]
    for round_number, value in curve:
        if value is None:  # not finite
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
    """Return a text at a position in pixels; ``anchor`` is "start", "middle" or "end", the part of the text there."""
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
    """Return the weights that a robust aggregation rule gave each user's uploads, smallest mean first."""
    weights_by_user: dict[str, list[float]] = {}
    for run in entry.runs:
        for event in run.aggregations:
            weights_of_round = event.get("counted", {})  # weight of each user's upload in this round's aggregate
            for user, weight in weights_of_round.items():
                weights_by_user.setdefault(user, []).append(weight)
    summaries = []
    for user, weights in weights_by_user.items():
        summaries.append(UploadWeights(user=user, uploads=len(weights), left_out=weights.count(0), mean=fmean(weights)))
    # With equal means, the user whose uploads were left out more often comes first.
    return sorted(summaries, key=lambda summary: (summary.mean, -summary.left_out))


def upload_weight_tables(entries: Sequence[Entry]) -> list[dict[str, object]]:
    """Return a table for each entry that aggregates robustly: the users whose uploads had the smallest weights.

    Returns:
        Mappings for the page's template: ``label`` of the entry, ``rule`` (name of the aggregation rule), ``rows`` of
        at most :data:`MOST_WEIGHTS` users, such as ``("alice", "3 of 10", "0.42")`` (user, uploads with weight 0, mean
        weight), and ``more``, the number of other users.
    """
    tables: list[dict[str, object]] = []
    for entry in entries:
        weights_of_users = upload_weights(entry)
        if not weights_of_users:
            continue
        rows = []
        for weights in weights_of_users[:MOST_WEIGHTS]:
            rows.append((weights.user, f"{weights.left_out} of {weights.uploads}", f"{weights.mean:.2f}"))
        num_others = len(weights_of_users) - len(rows)
        aggregation_rule = entry.first.aggregations[0]["rule"]
        tables.append({"label": entry.label, "rule": aggregation_rule, "rows": rows, "more": num_others})
    return tables


_DESCRIPTIONS_OF_MODELS = {
    "pretrained": "the base as it is",
    "local": "trained alone, from scratch",
    "shared": "shared model of the federation, before any training",
    "joined": "after joining",
}
_INITIAL_NET = "the net with its initial weights"


def render_joined(name: str, measure: str, result_by_model: Mapping[str, JsonMapping]) -> Table:
    """Return the table for a user that joined a finished run: test result and training data of each model.

    Args:
        name: Name of the user.
        measure: Name of the measure of the results, such as "perplexity".
        result_by_model: Results of the models "pretrained", "local", "shared" and "joined".
    """
    unit = "tokens" if "train_tokens" in result_by_model["joined"] else "samples"
    title = f"{printable(name)}: test {measure} ({unit_and_direction(measure)})"
    table = Table("model", title=title, title_justify="left", box=None)
    table.add_column(measure, justify="right", style="bold")
    table.add_column(f"training {unit}", justify="right")
    table.add_column("")
    for model, description in _DESCRIPTIONS_OF_MODELS.items():
        if model == "pretrained" and unit == "samples":
            description = _INITIAL_NET
        result = result_by_model[model]
        score, amount = number(result[f"test_{measure}"], measure), f"{result[f'train_{unit}']:,}"
        table.add_row(model, score, amount, literal_text(description, "dim"))
    return table


_STATE_STYLES = {"here": "green", "away": "red", "expected": "dim"}


def render_participants(folder: Path, *, all_users: bool = False) -> rich_table.Table:
    """Return the table of the clients of a running federation, for the terminal.

    It has no rows while the server has not written its file of participants.

    Args:
        folder: Run folder of the federation's server.
        all_users: Whether to list all clients; else at most :data:`MOST_ROWS`, clients that are away first.
    """
    content = read_participants(folder)
    users: Mapping[str, JsonMapping] = content.get("users", {})
    measure = content.get("measure") or ""
    table = rich_table.Table("user", "", title=_participants_title(content), title_justify="left", box=None)
    for heading in ("round", "last seen", "sent", "received", "train loss", f"test {measure}".strip()):
        table.add_column(heading, justify="right")
    optional_columns = ["epsilon"] if "privacy" in content else []  # keys of a user, which are also the headings
    if any(user.get("counted") is not None for user in users.values()):  # weights of a robust aggregation rule
        optional_columns.append("counted")
    for heading in optional_columns:
        table.add_column(heading, justify="right")
    table.add_column("")  # why a client is away

    listed = list(users)
    if len(users) > MOST_ROWS and not all_users:
        states_by_urgency = ("away", "expected", "here")
        by_urgency = sorted(users, key=lambda name: states_by_urgency.index(users[name]["state"]))
        listed = by_urgency[:MOST_ROWS]
    for name in listed:
        *cells, reason = _participant_row(name, users[name], measure)
        optional_cells = [_number_or_dash(users[name].get(column)) for column in optional_columns]
        table.add_row(*cells, *optional_cells, reason)
    num_hidden = len(users) - len(listed)
    if num_hidden:
        table.caption, table.caption_justify = literal_text(f"and {num_hidden:,} more", "table.caption"), "left"
    return table


_ROUNDS_TIMED = 10
"""Number of newest rounds whose mean duration is shown."""


def render_progress(folder: Path, *, is_running: bool, all_users: bool = False) -> Group:
    """Return the state of a run or of a federation for the terminal: a line, and a table with a row for each user.

    Args:
        folder: The run folder.
        is_running: Whether a process writes to it.
        all_users: Whether to list all users; else at most :data:`MOST_ROWS`.
    """
    state = "running" if is_running else "finished" if (folder / "metrics.json").exists() else "stopped"
    events = list(read_events(folder))
    num_rounds = next((event["rounds"] for event in events if event["event"] == "start"), None)
    rounds = [event for event in events if event["event"] == "round"]
    title = f"{folder}: {state}"
    if num_rounds is not None:
        num_done = rounds[-1]["round"] if rounds else 0
        title += f" · round {num_done} of {num_rounds}{_round_times(rounds, num_rounds - num_done, state)}"
    if (folder / PARTICIPANTS).exists():
        table = render_participants(folder, all_users=all_users)
    else:
        table = _progress_of_users(events, all_users=all_users)
    return Group(literal_text(title), table)


def render_client(folder: Path, *, is_running: bool) -> Group:
    """Return the state of a client's newest run: its rounds, and which model the user is served.

    Args:
        folder: The client's state folder, or the folder of one of its runs.
        is_running: Whether the client runs.
    """
    newest = client_runs(folder)[-1]
    state = "running" if is_running else "stopped"
    if client_models(newest):
        state = "ended"
    choices = read_choices(newest)
    title = f"{newest}: {state}"
    lines: list[str] = []
    if choices:
        title += f" · last validation after round {choices[-1]['round']}"
        lines = served_lines({"served": choices[-1]["served"], "users": {}})
    return Group(*(literal_text(line) for line in (title, *lines)))


def render_runs(folders: Sequence[Path], *, title: str) -> Group:
    """Return a line, and a table of runs that follow one another: start, who has trained, mean test result and bytes.

    Args:
        folders: The run folders, the oldest first.
        title: The line above the table.
    """
    return Group(literal_text(title), runs_table({folder.name: summarize_run(folder) for folder in folders}))


def runs_table(summaries: Mapping[str, RunSummary]) -> rich_table.Table:
    """Return the table of runs that follow one another.

    Args:
        summaries: Totals of the runs by name, in the order of the rows.
    """
    table = rich_table.Table("run", "started", "trained", box=None)
    for heading in ("rounds", "mean test", "up", "down"):
        table.add_column(heading, justify="right")
    for name, summary in summaries.items():
        started = "–" if summary.started is None else time.strftime("%F %H:%M", time.localtime(summary.started))
        table.add_row(
            name,
            started,
            literal_text(list_names(summary.trained) if summary.trained else "–"),
            str(summary.rounds),
            "–" if summary.mean_test is None else f"{number(summary.mean_test, summary.measure)} {summary.measure}",
            _size_text(summary.upload_bytes),
            _size_text(summary.download_bytes),
        )
    return table


def _round_times(rounds: Sequence[JsonMapping], num_left: int, state: str) -> str:
    """Return the mean duration of the newest rounds, and while a run is running the time left, as text.

    Args:
        rounds: Events of the rounds that are done.
        num_left: Number of rounds that are not.
        state: "running", "finished" or "stopped".
    """
    seconds = [event["seconds"] for event in rounds[-_ROUNDS_TIMED:] if event["seconds"]]  # 0 without participants
    if not seconds:
        return ""
    mean = fmean(seconds)
    text = f" · {mean:.3g} s per round"
    if state == "running" and num_left > 0:
        text += f" · about {format_duration(mean * num_left)} left without evaluations"
    return text


def _progress_of_users(events: Sequence[JsonMapping], *, all_users: bool) -> rich_table.Table:
    """Return a table with each user's last round, training loss and test result.

    Args:
        events: Events of the run.
        all_users: Whether to list all users; else at most :data:`MOST_ROWS`.
    """
    last_round, loss, test = dict[str, int](), dict[str, float](), dict[str, float]()
    names, measure = dict[str, None](), "test"
    for event in events:
        if event["event"] == "start":
            names.update(dict.fromkeys(event["users"]))
        elif event["event"] == "round":
            loss.update(event["train_loss_nats"])
            last_round.update(dict.fromkeys(event["train_loss_nats"], event["round"]))
        elif event["event"] == "evaluation":
            measure = measure_of(event)
            test.update({name: scores[f"test_{measure}"] for name, scores in event["users"].items()})
    table = rich_table.Table("user", box=None)
    for heading in ("round", "loss", measure):
        table.add_column(heading, justify="right")
    listed = list(names) if all_users else list(names)[:MOST_ROWS]
    for name in listed:
        test_text = number(test[name], measure) if name in test else "–"
        loss_text = f"{loss[name]:.3f}" if name in loss else "–"
        table.add_row(literal_text(name), str(last_round.get(name, "–")), loss_text, test_text)
    num_hidden = len(names) - len(listed)
    if num_hidden:
        table.caption, table.caption_justify = literal_text(f"and {num_hidden:,} more", "table.caption"), "left"
    return table


def read_participants(folder: Path) -> JsonObject:
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
    title = f"{content['round']} of {content['rounds']} rounds are done · {counts}"
    privacy = content.get("privacy")  # the budget spent so far
    if privacy:
        title += f" · epsilon {epsilon_of(privacy):.3g} at delta {privacy['delta']:g}"
    return title


def _participant_row(name: str, status: JsonMapping, measure: str) -> tuple[str | Text, ...]:
    """Return the cells of a client's row without the optional columns; the last one says why it is away or declined.

    Args:
        name: Name of the user.
        status: The user's entry in the file of participants, such as ``{"state": "away", "why": "timed out", ...}``.
        measure: The measure of test results.
    """
    last_seen, train_loss, test_result = status["seen"], status["train_loss_nats"], status["test"]
    last_seen_text = "never" if last_seen is None else _ago_text(time.time() - last_seen)
    return (
        literal_text(name),
        literal_text(status["state"], _STATE_STYLES[status["state"]]),
        str(status["round"] or "–"),  # 0 before the client has answered in any round
        last_seen_text,
        _size_text(status["upload_bytes"]),
        _size_text(status["download_bytes"]),
        "–" if train_loss is None else f"{train_loss:.3f}",
        "–" if test_result is None else number(test_result, measure),
        literal_text(status["why"], "dim"),
    )


def _number_or_dash(value: float | None) -> str:
    """Return a number with three significant digits; a dash if it is unknown."""
    return "–" if value is None else f"{value:.3g}"


def _size_text(count: int) -> str:
    """Return a byte count as text, in bytes below 10,000, else in megabytes."""
    unit, name = byte_unit(count)
    return f"{count / unit:,.1f} {name}" if unit > 1 else f"{count} B"


def _ago_text(seconds: float) -> str:
    """Return a time in the past as text, such as "3 min ago"."""
    return f"{format_duration(seconds)} ago"


def cost_rows(costs: Sequence[Cost]) -> list[list[str]]:
    """Return the rows of the page's table of costs: for each entry its label, rounds, parameters, bytes and so on."""

    def byte_column(attribute: str) -> list[str]:
        """Return a column of byte counts, all in one unit, such as ``["1.20 MB", "0.03 MB"]``."""
        return sizes([getattr(cost, attribute) for cost in costs])

    trainable, peak_memory = [], []
    for cost in costs:
        trainable.append("–" if cost.trainable_parameters is None else f"{cost.trainable_parameters:,}")
        peak_memory.append("–" if cost.peak_memory_bytes is None else f"{cost.peak_memory_bytes / 1e9:,.2f} GB")
    columns = [
        [cost.label for cost in costs],
        [str(cost.rounds) for cost in costs],
        trainable,
        byte_column("upload_bytes_per_user_round"),
        byte_column("download_bytes_per_user_round"),
        byte_column("upload_bytes"),
        byte_column("download_bytes"),
        peak_memory,
        [_mean_and_deviation(cost.per_second) for cost in costs],
        [_mean_and_deviation(cost.wall_seconds) for cost in costs],
        [cost.dtype_and_device for cost in costs],
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _mean_and_deviation(value: Spread | None) -> str:
    """Return a mean and its deviation over seeds as text, such as "12 (3)" or "1.5"; a dash if it is unknown."""
    if value is None:
        return "–"
    digits = 0 if value.mean >= 10 else 1
    mean = f"{value.mean:,.{digits}f}"
    if value.std is None:
        return mean
    return f"{mean} ({value.std:,.{digits}f})"


_MEAN_HEADINGS = ("mean", "geometric mean")
_COST_HEADINGS = ("trainable", "upload / round", "seconds")


def write_comparison(
    folder: Path, runs: Sequence[Path], baseline: str | None = None, labels: Mapping[Path, str] = MappingProxyType({})
) -> ComparisonTable:
    """Write ``table.md`` and ``table.json`` to ``folder`` and return the table.

    Args:
        folder: Folder of the comparison.
        runs: Run folders.
        baseline: A method. Of several, such as "local,fedavg", each user's best result counts.
        labels: Name of the method in the table by run folder, such as "fedprox:mu=0.1"; else that in the run.
    """
    table = compare_runs(runs, baseline, labels)
    tuning = read_tuning(folder)
    if tuning is not None:
        table["tuning"] = tuning
    write_json(folder / "table.json", table)
    write_text(folder / "table.md", markdown(table))
    return table


def score_columns(table: ComparisonTable) -> list[tuple[str, list[CellSpread]]]:
    """Return the columns of results: one for each user, then the means over users.

    Of many users only each method's best, median and worst have columns.

    Returns:
        The heading of each column, and each method's ``mean`` and ``std`` over seeds.
    """
    rows = table["methods"]
    measure = measure_of(rows[0])
    columns: list[tuple[str, list[CellSpread]]] = []
    user_names = users_with_column(rows[0]["users"])
    if user_names:
        for name in user_names:
            columns.append((printable(name), [row["users"][name] for row in rows]))
    else:
        ranked_users = []  # for each method, its users from the best to the worst
        for row in rows:
            ranked_users.append(best_first({name: result["mean"] for name, result in row["users"].items()}, measure))
        for heading, quantile in _QUANTILE_BY_HEADING.items():
            cells = []
            for row, best_to_worst in zip(rows, ranked_users, strict=True):
                cells.append(row["users"][user_at_quantile(best_to_worst, quantile)])
            columns.append((heading, cells))
    for heading, key in zip(_MEAN_HEADINGS, (f"mean_test_{measure}", GEOMETRIC), strict=True):
        if all(key in row for row in rows):  # only perplexities have a geometric mean
            columns.append((heading, [row[key] for row in rows]))
    return columns


def cost_columns(table: ComparisonTable) -> list[tuple[str, list[str]]]:
    """Return the heading and the cells of each column of costs: trained parameters, upload per round, seconds.

    The upload is the mean over users and all rounds. Seconds are the duration of a run.

    A dagger marks numbers of trained parameters that differ from the median by more than 10%.
    """
    rows = table["methods"]
    counts = [row["trainable_parameters"] for row in rows]
    median_count = median_parameter_count(counts)
    trainable = [f"{count:,} †" if is_unequal(count, median_count) else f"{count:,}" for count in counts]
    uploads = sizes([row["upload_bytes_per_user_round"] for row in rows])
    durations = [seconds_text(row["wall_seconds"]) for row in rows]
    return list(zip(_COST_HEADINGS, (trainable, uploads, durations), strict=True))


def _text_cells(table: ComparisonTable) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a comparison as text: method, results, costs."""
    measure = measure_of(table["methods"][0])
    has_deviations = _has_deviations(table)

    def cell(value: CellSpread) -> str:
        """Return a mean over seeds, with its standard deviation if there are several seeds: "12.3 (0.4)"."""
        mean, deviation = number(value["mean"], measure), value["std"]
        if deviation is None or not has_deviations:
            return mean
        return f"{mean} ({number(deviation, measure)})"

    columns = [("method", _marked_methods(table))]
    for heading, values in score_columns(table):
        columns.append((heading, [cell(value) for value in values]))
    columns += cost_columns(table)
    header = [heading for heading, _ in columns]
    cells_of_columns = [cells for _, cells in columns]
    rows = [list(row) for row in zip(*cells_of_columns, strict=True)]
    return header, rows


def _has_deviations(table: ComparisonTable) -> bool:
    """Return whether a method of the comparison has several seeds."""
    return any(len(row["seeds"]) > 1 for row in table["methods"])


def _marked_methods(table: ComparisonTable) -> list[str]:
    """Return the name of each method, with a double dagger if a role, such as its router, was never trained."""
    return [row["method"] + (" ‡" if row.get("untrained") else "") for row in table["methods"]]


_QUANTILE_BY_HEADING = {"best": 0.0, "median": 0.5, "worst": 1.0}
"""Columns of results if there are many users, with the quantile of each from the best user to the worst."""


def comparison_note(table: ComparisonTable) -> str:
    """Return the notes below a comparison in one line, separated by semicolons; empty without any."""
    rows = table["methods"]
    all_seeds = sorted({seed for row in rows for seed in row["seeds"]})
    notes = [_sample_note(rows)]
    for row in rows:
        lacks_seeds = len(row["seeds"]) < len(all_seeds)
        if lacks_seeds:
            notes.append(f"{row['method']}: seeds {', '.join(map(str, row['seeds']))} alone")
    notes.append(_settings_note(rows))
    notes.append(parameter_count_note([row["trainable_parameters"] for row in rows]))
    notes.append(_untrained_note(rows))
    notes.extend(_early_end_notes(rows))
    for row in rows:
        if "privacy" in row:
            notes.append(f"{row['method']}: privacy {describe_privacy(row['privacy'])}")
    for row in rows:
        for warning in row.get("warnings", ()):
            notes.append(f"{row['method']}, {warning}")
    if "tuning" in table:
        notes += edge_notes(table["tuning"])
    return "; ".join(note for note in notes if note)


def _settings_note(rows: Sequence[MethodRow]) -> str:
    """Return a note on settings that differ from the defaults, such as "fedprox mu=0.1"; empty without any.

    Settings in a method's label, such as ``mu`` in "fedprox:mu=0.1", are left out.
    """
    texts = []
    for row in rows:
        label = row["method"]
        settings_in_label = label.split(":")[1:]  # such as ["mu=0.1"]
        keys_in_label = {setting.partition("=")[0] for setting in settings_in_label}
        settings = row.get("method_settings", {})
        settings_not_in_label = [f"{key}={value}" for key, value in settings.items() if key not in keys_in_label]
        if settings_not_in_label:
            texts.append(f"{label} {', '.join(settings_not_in_label)}")
    return f"settings that differ from the defaults: {', '.join(texts)}" if texts else ""


def _untrained_note(rows: Sequence[MethodRow]) -> str:
    """Return the note on roles (such as routers) that were never trained because the run was too short, or ""."""
    roles = sorted({role for row in rows for role in row.get("untrained", ())})
    if not roles:
        return ""
    return (
        f"‡ {' and '.join(roles)} never trained, since rounds x local_steps is less than the interval of its phase "
        "(method.router_every)"
    )


def _early_end_notes(rows: Sequence[MethodRow]) -> Iterator[str]:
    """Yield notes on methods whose runs ended early because their privacy budget was spent."""
    for row in rows:
        planned_rounds = row.get("planned_rounds")  # only if a run ended early
        if planned_rounds:
            last_rounds = " and ".join(map(str, sorted(set(row["rounds"]))))  # one for each seed
            yield f"{row['method']}: the privacy budget was spent after round {last_rounds} of {planned_rounds}"


def _sample_note(rows: Sequence[MethodRow]) -> str:
    """Return a note on means over a sample of the users; empty if all users were evaluated.

    It begins with the size of the sample, the same for all methods: "SIZE; METHOD: INTERVAL; METHOD: INTERVAL".
    """
    notes: list[str] = []
    for row in rows:
        if "sample" not in row:
            continue
        size, _, interval = describe_sample(row).partition(", ")  # "SIZE" or "SIZE, INTERVAL"
        if not notes:
            notes.append(size)
        if interval:
            notes.append(f"{row['method']}: {interval}")
    return "; ".join(notes)


def comparison_title(table: ComparisonTable, cell_format: str = "mean (std)") -> str:
    """Return the title of a comparison, such as "test loss of each user (lower is better), seed 0".

    Args:
        table: The comparison, with a row of results and costs for each method.
        cell_format: What the cells show if there are several seeds.
    """
    first_row = table["methods"][0]
    measure, users = measure_of(first_row), first_row["users"]
    if users_with_column(users):
        results = f"test {measure} of each user"
    else:
        results = f"mean test {measure} of {len(users)} users"
    seeds = sorted({seed for row in table["methods"] for seed in row["seeds"]})
    seeds_text = f"seed {seeds[0]}"
    if len(seeds) > 1:
        seeds_text = f"{cell_format} over seeds {', '.join(map(str, seeds))}"
    return f"{results} ({unit_and_direction(measure)}), {seeds_text}"


def markdown(table: ComparisonTable) -> str:
    """Return a comparison as Markdown: the table of results and costs, notes, and verdicts against the baseline."""
    header, rows = _text_cells(table)
    lines = [f"Table: {comparison_title(table)}", "", markdown_line(header), "|" + "---|" * len(header)]
    for row in rows:
        lines.append(markdown_line(row))
    note = comparison_note(table)
    if note:
        lines += ["", note]
    if "tuning" in table:
        header, rows = tuning_rows(table["tuning"])
        lines += ["", f"Table: {tuning_title(table['tuning'])}", "", markdown_line(header), "|" + "---|" * len(header)]
        lines += [markdown_line(row) for row in rows]
    comparison = read_baseline_comparison(table)
    if comparison:
        lines += ["", *comparisons.markdown(comparison)]
    return "\n".join(lines) + "\n"


def render_with_verdicts(table: ComparisonTable, *, all_users: bool = False) -> Iterator[Table | Text]:
    """Yield a comparison for the terminal: tables of results and costs, notes, and verdicts against the baseline.

    Args:
        table: The comparison, with a row of results and costs for each method.
        all_users: Whether to add a table with a row for each user if users have no columns.
    """
    yield from render_comparison(table)
    note = comparison_note(table)
    if note:
        yield literal_text(note, "dim")
    if "tuning" in table:
        yield _text_table(tuning_title(table["tuning"]), *tuning_rows(table["tuning"]))
    comparison = read_baseline_comparison(table)
    if comparison:
        yield literal_text("")
        yield from comparisons.render(comparison)

    rows = table["methods"]
    users = rows[0]["users"]
    users_have_columns = bool(users_with_column(users))
    if all_users and not users_have_columns:
        user_table = Table("user", title="every user", title_justify="left", box=None)
        for row in rows:
            user_table.add_column(row["method"], justify="right")
        measure = measure_of(rows[0])
        for name in users:
            cells = [number(row["users"][name]["mean"], measure) for row in rows]
            user_table.add_row(literal_text(name), *cells)
        yield user_table


def render_comparison(table: ComparisonTable) -> Iterator[Table]:
    """Yield a comparison for the terminal: one table, or with several seeds a second one for the columns of costs."""
    header, rows = _text_cells(table)
    title = comparison_title(table)
    if not _has_deviations(table):
        yield _text_table(title, header, rows)
        return
    # Columns are the method, results and costs. With deviations they would be too wide for one table.
    first_cost = len(header) - len(_COST_HEADINGS)
    yield _text_table(title, header[:first_cost], [row[:first_cost] for row in rows])
    methods_and_costs = [[row[0], *row[first_cost:]] for row in rows]
    yield _text_table("", [header[0], *_COST_HEADINGS], methods_and_costs)


def _text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for the terminal, whose first column does not wrap and whose means are bold."""
    result = Table(title=title or None, title_justify="left", box=None)
    for i, name in enumerate(header):
        is_first = i == 0
        style = "bold" if name in _MEAN_HEADINGS else ""
        justify = "left" if is_first else "right"
        result.add_column(literal_text(name), justify=justify, style=style, no_wrap=is_first, overflow="fold")
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
    """Return a text that LaTeX typesets as it is, on one line. "--" becomes "-{}-", else LaTeX would join the hyphens.

    >>> escape_latex("50% of a_b")
    '50\\\\% of a\\\\_b'
    """
    escaped = _LATEX_SPECIAL.sub(lambda match: _LATEX_CHARACTERS[match[0]], printable(text))
    return _LIGATURES.sub(r"\1{}", escaped)


def latex_number(text: str) -> str:
    """Return a cell with numbers for LaTeX, with minus signs in place of hyphens.

    >>> latex_number("-0.8%")
    '$-0.8$\\\\%'
    """
    return _MINUS.sub(r"$-\1$", escape_latex(text))


def latex_label(name: str, suffix: str = "") -> str:
    """Return the label of a LaTeX table, ``tab:NAME`` or ``tab:NAME-SUFFIX``, without characters special to LaTeX."""
    parts = [part for part in (name, suffix) if part]
    allowed = re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(parts))
    return f"tab:{allowed.strip('-')}"


def latex(
    table: ComparisonTable, *, name: str = "comparison", all_users: bool = False, require_verdicts: bool = False
) -> str:
    """Return a comparison as LaTeX ``table`` environments for the package booktabs.

    A row is a method; a column is a user, a mean over users or a cost. Another table has the verdicts against the
    baseline.

    Args:
        table: The table of :func:`comingle.reports.comparisons.compare_metrics`.
        name: Name of the comparison, for ``\\label{tab:NAME}``.
        all_users: If users have no columns, add a table with a row for each user.
        require_verdicts: Raise an error if there are no verdicts.

    Raises:
        RecipeError: ``require_verdicts`` is set, but the table has only one method or one seed.
    """
    rows = table["methods"]
    title = comparison_title(table, cell_format="mean ± std")
    if len(rows) > 1:
        title += "; best in bold"
    environments = [table_environment(title, _latex_tabulars(table), comparison_note(table), label=latex_label(name))]
    if all_users and not users_with_column(rows[0]["users"]):
        label = latex_label(name, "users")
        environments.append(table_environment(f"every user: {title}", [_latex_user_tabular(table)], "", label=label))
    if "tuning" in table:
        header, tuned_rows = tuning_rows(table["tuning"])
        escaped_rows = [[escape_latex(cell) for cell in row] for row in tuned_rows]
        tabulars = [tabular([escape_latex(cell) for cell in header], escaped_rows)]
        label = latex_label(name, "tuning")
        environments.append(table_environment(tuning_title(table["tuning"]), tabulars, "", label=label))
    comparison = read_baseline_comparison(table)
    if comparison:
        environments.append(latex_verdicts(comparison, latex_label(name, "verdicts")))
    elif require_verdicts:
        all_seeds = sorted({seed for row in rows for seed in row["seeds"]})
        seeds = ", ".join(map(str, all_seeds))
        raise RecipeError(
            f"--against: got {len(rows)} methods with seeds {seeds}, which have no verdicts; allowed: 2 methods or "
            "more with 2 seeds or more"
        )
    return "% needs \\usepackage{booktabs}\n" + "\n".join(environments)


def _latex_tabulars(table: ComparisonTable) -> list[str]:
    """Return LaTeX tabulars with a row for each method: results and costs in one, or in two with several seeds.

    Args:
        table: The comparison of methods.
    """
    rows = table["methods"]
    measure = measure_of(rows[0])
    num_seeds = [len(row["seeds"]) for row in rows]
    method_column = ("method", [escape_latex(method) for method in _marked_methods(table)])
    scores = []
    for heading, values in score_columns(table):
        scores.append((escape_latex(heading), _latex_cells(values, num_seeds, measure)))
    costs = []
    for heading, cells in cost_columns(table):
        costs.append((escape_latex(heading), [escape_latex(cell) for cell in cells]))
    if max(num_seeds) > 1:  # deviations leave no room for costs beside the results
        return [_tabular_of_columns([method_column, *scores]), _tabular_of_columns([method_column, *costs])]
    return [_tabular_of_columns([method_column, *scores, *costs])]


def _tabular_of_columns(columns: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a tabular from the heading and the cells of each column."""
    header = [heading for heading, _ in columns]
    cells_of_columns = [cells for _, cells in columns]
    return tabular(header, zip(*cells_of_columns, strict=True))


def _latex_user_tabular(table: ComparisonTable) -> str:
    """Return a LaTeX tabular with a row for each user and a column for each method, for comparisons of many users."""
    rows = table["methods"]
    measure = measure_of(rows[0])
    num_seeds = [len(row["seeds"]) for row in rows]
    methods = [escape_latex(method) for method in _marked_methods(table)]
    rows_of_users = []
    for user in rows[0]["users"]:
        results = [row["users"][user] for row in rows]
        rows_of_users.append([escape_latex(user), *_latex_cells(results, num_seeds, measure)])
    return tabular(["user", *methods], rows_of_users)


def latex_verdicts(comparison: BaselineComparison, label: str, *, prefix: str = "") -> str:
    """Return verdicts against a baseline as a LaTeX ``table`` environment.

    Args:
        comparison: The comparison with a baseline.
        label: Label of the table, such as "tab:compare-demo-verdicts".
        prefix: Text that precedes the caption, such as a name of the comparison; a colon follows it. Empty for none.
    """
    header, rows = comparisons.verdict_rows(comparison)
    latex_header = [escape_latex(name) for name in header]
    latex_rows = []
    for method, *numbers in rows:
        latex_rows.append([escape_latex(method), *(latex_number(text) for text in numbers)])
    caption = comparisons.heading(comparison)
    if prefix:
        caption = f"{prefix}: {caption}"
    note = " ".join(comparisons.notes(comparison))
    return table_environment(caption, [tabular(latex_header, latex_rows)], note, label=label)


def _latex_cells(values: Sequence[CellSpread], num_seeds: Sequence[int], measure: str) -> list[str]:
    r"""Return LaTeX cells such as ``12.3 $\pm$ 0.4``, the best of them in bold, unless there is one cell only.

    Several are bold if the best means are equal in print: 12.31 and 12.34 are both 12.3.

    Args:
        values: Mean and standard deviation over seeds of each cell.
        num_seeds: Number of seeds of each cell's method; deviations of one seed are not shown.
        measure: Name of the measure of these results, such as "perplexity".
    """
    means = [value["mean"] for value in values]
    finite = [mean for mean in means if mean is not None and math.isfinite(mean)]
    best_text = None
    if finite and len(values) > 1:
        min_or_max = best_of(measure)
        best_text = number(min_or_max(finite), measure)
    cells = []
    for value, num_seeds_of_method in zip(values, num_seeds, strict=True):
        mean_text = number(value["mean"], measure)
        text = mean_text
        if num_seeds_of_method > 1 and value["std"] is not None:
            text = f"{mean_text} ± {number(value['std'], measure)}"
        cell = latex_number(text)
        cells.append(rf"\textbf{{{cell}}}" if mean_text == best_text else cell)
    return cells


def table_environment(caption: str, tabulars: Sequence[str], note: str, *, label: str) -> str:
    """Return a LaTeX ``table`` environment.

    Args:
        caption: The caption, as plain text.
        tabulars: LaTeX tabulars, which are placed below each other.
        note: A note below them, as plain text; empty for none.
        label: The label, such as "tab:compare-demo".
    """
    capitalised = caption[0].upper() + caption[1:]
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \small",
        rf"  \caption{{{escape_latex(capitalised)}}}",
        rf"  \label{{{label}}}",
        "\n  \\par\\medskip\n".join(tabulars),
    ]
    if note:
        lines.append(rf"  \par\smallskip\footnotesize {escape_latex(note)}")
    lines.append(r"\end{table}")
    return "\n".join(lines) + "\n"


def tabular(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a LaTeX ``tabular`` with a left-aligned first column; cells are LaTeX already."""
    lines = [
        rf"  \begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        r"    \toprule",
        *_latex_rows([header]),
        r"    \midrule",
        *_latex_rows(rows),
        r"    \bottomrule",
        r"  \end{tabular}",
    ]
    return "\n".join(lines)


def _latex_rows(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows of LaTeX cells as lines of a tabular."""
    return [f"    {' & '.join(row)} \\\\" for row in rows]
