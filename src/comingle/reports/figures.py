"""Figures of runs: learning curves, bytes, heat maps, gains and mixtures.

Source of the mixtures: FLoRAL, section 3.2 (one softmax vector per user over C adaptor sets) and section 6 (user k is
in cluster k mod C). Adaptor sets have no names, so they are sorted by the clusters that use them most.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from scipy.optimize import linear_sum_assignment

from comingle.reports.canvas import (
    INK,
    PAPER,
    Key,
    Panels,
    Style,
    draw,
    expert_colour,
    label_points,
    save,
    short,
    styles,
)
from comingle.reports.formatting import axis_label, byte_unit, change_label, is_worse, sparse_tick, tick
from comingle.reports.runs import (
    Curve,
    Entry,
    ExpertCurves,
    Gain,
    baselines,
    compared,
    cost,
    expert_curves,
    final,
    learning_curve,
)
from comingle.utils.records import MEASURES, read_events

DEVIATION = "one standard deviation over seeds"
INTERVALS = "95% confidence intervals of the mean change over seeds; long ones are cut at the edge"
"""Meaning of all bands and whiskers."""

MAX_PANELS = 24
"""Largest number of users that get a panel each. For more users figures show the best and the worst."""


def is_population(users: Sequence[str]) -> bool:
    """Return whether there are too many users to show each of them."""
    return len(users) > MAX_PANELS


def extremes(entries: Sequence[Entry], most: int, baseline: Entry | None = None) -> dict[str, str]:
    """Choose up to ``most`` users for a figure; of more users the best and the worst ones, half of each.

    Users are sorted by their mean change against the baseline over the other trained entries, or by their mean test
    result without a baseline. Users without a finite number are among the worst.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        most: Largest number of users.
        baseline: The baseline; None for the first of :func:`comingle.reports.runs.baselines`.

    Returns:
        The titles of panels or rows by user: the name, or "best 2: NAME" and "worst 1: NAME" if not all are chosen.
    """
    users = list(entries[0].first.users)
    if len(users) <= most:
        return {user: user for user in users}
    values = _mean_change_by_user(entries, baseline) or _mean_result_by_user(entries)
    sign = -1 if MEASURES[entries[0].first.measure] == "higher" else 1
    order = sorted(users, key=lambda user: (user not in values, sign * values.get(user, 0.0)))
    best, worst = order[: -(-most // 2)], order[len(order) - most // 2 :]  # if ``most`` is odd, one more best user
    titles = {user: f"best {number}: {user}" for number, user in enumerate(best, 1)}
    return titles | {user: f"worst {len(worst) - number}: {user}" for number, user in enumerate(worst)}


def _mean_change_by_user(entries: Sequence[Entry], baseline: Entry | None) -> dict[str, float]:
    """Return each user's mean change against a baseline over all compared entries, by the user's name.

    Users without a finite change in one of these entries are left out.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        baseline: The baseline; None for the first of :func:`comingle.reports.runs.baselines`.
    """
    baseline = baseline or next(iter(baselines(entries)), None)
    if baseline is None:
        return {}
    changes_of_entries = [
        {gain.user: gain.change.mean for gain in gains_of_entry} for _, gains_of_entry in compared(entries, baseline)
    ]
    if not changes_of_entries:
        return {}
    known = [user for user in entries[0].first.users if all(user in changes for changes in changes_of_entries)]
    return {user: statistics.fmean(changes[user] for changes in changes_of_entries) for user in known}


def _mean_result_by_user(entries: Sequence[Entry]) -> dict[str, float]:
    """Return each user's mean final result over the trained entries, by name; over all entries if none is trained.

    Users without a finite result in one of these entries are left out.
    """
    entries = [entry for entry in entries if entry.trained] or entries
    means: dict[str, float] = {}
    for user in entries[0].first.users:
        results = [result.mean for entry in entries if (result := final(entry, user)) is not None]
        if len(results) == len(entries):
            means[user] = statistics.fmean(results)
    return means


MOST_TICKS = 5


def scores_figure(entry: Entry) -> Figure:
    """Return a figure of each expert's mean score in each layer over training, for every user."""
    return scores_panels(entry).figure()


def scores_panels(entry: Entry, entries: Sequence[Entry] = ()) -> Panels:
    """Return one heat map per user and expert: layers (first at the bottom) x rounds; solid is 1, blank is 0.

    A heat map has the expert's mean gate in each layer at each evaluation. The panels of a user are next to each other,
    in a row with those of another user if there is space. For many users the best and the worst are shown.

    Args:
        entry: The entry whose scores are shown.
        entries: Entries by which users are ranked; empty for ``entry`` alone.
    """
    most_experts = max(len(expert_curves(entry, user)) for user in entry.first.users)
    most_users = max(2, MAX_PANELS // most_experts)
    titles_of_users = extremes(entries or [entry], most_users)
    # Users without routers have no panels.
    experts_of_users = {user: experts for user in titles_of_users if (experts := expert_curves(entry, user))}
    if not experts_of_users:
        # The chosen users keep their results private, as users of a federation can. Others are shown without a rank.
        users_with_scores = list(entry.first.evaluations[-1].scores)[:most_users]
        titles_of_users = {user: user for user in users_with_scores}
        experts_of_users = {user: expert_curves(entry, user) for user in users_with_scores}
    # Rounds by number of local steps, for the labels of the x axis.
    rounds = {evaluation.iterations: evaluation.round for run in entry.runs for evaluation in run.evaluations}
    paint: list[Callable[[Axes], None] | None] = []
    for user, experts in experts_of_users.items():
        for expert in experts:
            title = f"{short(titles_of_users[user], 27 - len(expert.name))}: {expert.name}"  # fits a panel
            paint.append(partial(_paint_heatmap, expert=expert, title=title, rounds=rounds))
        paint += [None] * (most_experts - len(experts))  # empty panels, so that each user has equally many
    names = [expert.name for expert in max(experts_of_users.values(), key=len)]
    num_layers = max(len(expert.layers) for experts in experts_of_users.values() for expert in experts)
    users_per_row = max(1, min(4, len(paint)) // most_experts)  # at most 4 panels in a row, if a user has no more
    return Panels(
        paint=paint,
        columns=most_experts * users_per_row,
        size=(2.9, min(2.6, 1.15 + 0.06 * num_layers)),
        sheet=_heatmap_sheet(experts_of_users, rounds),
        keys=[(Patch(color=expert_colour(name).light), f"{name} (solid 1, blank 0)") for name in names],
        below="round",
        left="layer",
    )


def _paint_heatmap(axis: Axes, *, expert: ExpertCurves, title: str, rounds: dict[int, int]) -> None:
    """Paint an expert's mean scores: rounds across, layers up.

    Args:
        axis: The axes.
        expert: The expert's curve of each layer.
        title: Title of the panel.
        rounds: The round by number of local steps.
    """
    values = np.array([[value.mean for value in layer.values] for layer in expert.layers])
    colour = expert_colour(expert.name).light
    shades = LinearSegmentedColormap.from_list(expert.name, [f"{colour}00", f"{colour}ff"])
    axis.imshow(values, vmin=0, vmax=1, cmap=shades, aspect="auto", interpolation="none", origin="lower")
    axis.set_title(title)
    evaluated_rounds = [rounds[iterations] for iterations in expert.layers[0].iterations]
    places = range(0, len(evaluated_rounds), -(-len(evaluated_rounds) // MOST_TICKS))  # at most MOST_TICKS
    axis.set_xticks(places, [str(evaluated_rounds[place]) for place in places])
    axis.yaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True, min_n_ticks=1))
    axis.grid(visible=False)


def _heatmap_sheet(experts_of_users: dict[str, list[ExpertCurves]], rounds: dict[int, int]) -> list[list[object]]:
    """Return a sheet (a header and rows of numbers) with every score of the heat maps.

    Args:
        experts_of_users: The experts of each shown user.
        rounds: The round by number of local steps.
    """
    rows: list[list[object]] = [["user", "expert", "layer", "round", "mean_score", "std_over_seeds"]]
    for user, experts in experts_of_users.items():
        for expert in experts:
            for layer, curve in enumerate(expert.layers):
                for iterations, value in zip(curve.iterations, curve.values, strict=True):
                    rows.append([user, expert.name, layer, rounds[iterations], value.mean, value.std])
    return rows


MAX_BARS = 60
"""Largest number of bars in a figure; tables have all users."""
LEVEL_OPACITY = 0.4
"""Opacity of the bars of level results."""
HATCH = "////"
"""Pattern of the bars of worse results."""

Rows = Sequence[tuple[Entry, Sequence[Gain]]]


def users_figure(entries: Sequence[Entry], baseline: Entry) -> Figure | None:
    """Return a bar chart of each user's change against ``baseline``; None if nothing can be compared."""
    panels = users_panels(entries, baseline)
    return None if panels is None else panels.figure()


def users_panels(entries: Sequence[Entry], baseline: Entry, width: float = 8.2) -> Panels | None:
    """Return one panel with a bar for each user and entry: the user's change against the baseline.

    With too many users only the best and the worst have bars; the figure's CSV file has the changes of all users.
    Returns None if no entry can be compared with the baseline.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        baseline: The entry that others are compared with.
        width: Width of the panel, in inches.
    """
    rows = compared(entries, baseline)
    if not rows:
        return None
    by_label = _styles_by_label(entries)
    shown = extremes(entries, max_users_with_bars(rows), baseline)
    measure = baseline.first.measure
    has_intervals = any(gain.interval for _, gains in rows for gain in gains if gain.user in shown)
    return Panels(
        paint=[partial(_paint_users, rows=rows, shown=shown, by_label=by_label, measure=measure)],
        columns=1,
        size=(width, 1.1 + 0.17 * len(shown) * (len(rows) + 0.8)),
        sheet=_gain_sheet(rows, baseline),
        keys=[
            *((Patch(color=by_label[entry.label].colour.light), entry.label) for entry, _ in rows),
            *_verdict_keys([gain for _, gains_of_entry in rows for gain in gains_of_entry if gain.user in shown]),
        ],
        below=change_label(measure, baseline.label, short=width < 6),
        note=f"whiskers: {INTERVALS}" if has_intervals else "",
    )


def _verdict_keys(gains_of_users: Sequence[Gain]) -> list[tuple[Patch, str]]:
    """Return legend entries for pale and hatched bars, each only if the figure has such bars."""
    keys = []
    if any(gain.verdict == "level" for gain in gains_of_users):
        keys.append((Patch(facecolor=INK.light, alpha=LEVEL_OPACITY, linewidth=0), "pale: level"))
    if any(_is_hatched(gain) for gain in gains_of_users):
        hatched = Patch(facecolor=INK.light, edgecolor=PAPER.light, hatch=HATCH, linewidth=0)
        keys.append((hatched, "hatched: worse"))
    return keys


def _is_hatched(gain: Gain) -> bool:
    return gain.verdict != "level" and is_worse(gain.change.mean, gain.measure)


def max_users_with_bars(rows: Sequence[object]) -> int:
    """Return the largest number of users that have bars."""
    return max(1, MAX_BARS // len(rows))


def _styles_by_label(entries: Sequence[Entry]) -> dict[str, Style]:
    """Return the style of each entry by its label."""
    styles_of_entries = styles([entry.method for entry in entries])
    return {entry.label: style for entry, style in zip(entries, styles_of_entries, strict=True)}


def _gain_sheet(rows: Rows, baseline: Entry) -> list[list[object]]:
    """Return a sheet (a header and rows) with every user's gain, entry by entry, best first.

    Args:
        rows: Entries with their users' gains against the baseline.
        baseline: The entry that the others are compared with.
    """
    unit = baseline.first.unit
    head = ["method", "against", "user", f"train_{unit}", "change", "std_over_seeds", "low_95", "high_95", "verdict"]
    sheet: list[list[object]] = [[*head]]  # a copy whose type allows numbers, too
    for entry, gains_of_entry in rows:
        for gain in gains_of_entry:
            low, high = gain.interval or (None, None)
            amount, change = baseline.first.amounts.get(gain.user), gain.change
            names = [entry.label, baseline.label, gain.user, amount]
            sheet.append([*names, change.mean, change.std, low, high, gain.verdict])
    return sheet


def _paint_users(axis: Axes, *, rows: Rows, shown: dict[str, str], by_label: dict[str, Style], measure: str) -> None:
    """Paint horizontal bars of users' changes: a group for each user, with one bar for each entry.

    Args:
        axis: The axes.
        rows: Pairs of an entry (runs of one recipe with different seeds) and its users' changes against the baseline.
        shown: Users that have bars, with their labels.
        by_label: The style of each entry.
        measure: Name of the measure of the results, such as "perplexity".
    """
    height = 0.8 / len(rows)  # the bars of user i are centred at i and take up 0.8
    for bar, (entry, changes_of_entry) in enumerate(rows):
        by_user = {change.user: change for change in changes_of_entry}
        _paint_bars(axis, list(shown), by_user, by_label[entry.label], (bar + 0.5) * height - 0.4, height)
    axis.axvline(_no_change(measure), color=INK.light, linewidth=1)
    if measure == "loss":  # changes are factors: on a logarithmic axis ×0.5 and ×2 have bars of equal length
        axis.set_xscale("log")
    changes = [change for _, changes_of_entry in rows for change in changes_of_entry]
    if any(change.interval for change in changes):  # a wide interval would squeeze all bars
        _limit_axis(axis, [change for change in changes if change.user in shown], measure)
    if measure == "loss":  # the ticks depend on the final limits
        _format_factors(axis.xaxis, *axis.get_xlim())
    axis.set_yticks(range(len(shown)), [short(name, 22) for name in shown.values()])
    axis.set_ylim(len(shown) - 0.4, -0.6)  # the first user is at the top
    axis.grid(visible=False, axis="y")


def _paint_bars(
    axis: Axes, users: Sequence[str], by_user: dict[str, Gain], style: Style, offset: float, height: float
) -> None:
    """Paint one entry's bars, with 95% confidence intervals as whiskers.

    Bars of harmed users are hatched, which is visible without colour. Bars of level results are pale.

    Args:
        axis: The axes.
        users: Users that have bars, from top to bottom.
        by_user: The gains of the entry's users.
        style: The style of the entry.
        offset: Place of the entry's bar relative to the centre of a user's bars.
        height: Height for a bar.
    """
    places = [i + offset for i, user in enumerate(users) if user in by_user]
    gains = [by_user[user] for user in users if user in by_user]
    ends = [_to_axis(gain.measure, gain.change.mean) for gain in gains]  # of the bars, in the unit of the axis
    for place, end, gain in zip(places, ends, gains, strict=True):
        start = _no_change(gain.measure)
        drawn_height = height * 0.92  # leaves a gap between bars
        (bar,) = axis.barh(
            place, end - start, drawn_height, left=start, color=style.colour.light, edgecolor=PAPER.light, linewidth=0
        )
        bar.set_alpha(LEVEL_OPACITY if gain.verdict == "level" else 1.0)
        bar.set_hatch(HATCH if _is_hatched(gain) else "")
    if any(gain.interval for gain in gains):
        intervals = [gain.interval or (gain.change.mean, gain.change.mean) for gain in gains]
        # On the axis of factors the two sides of an interval have different lengths.
        lows = [_to_axis(gain.measure, low) for gain, (low, _) in zip(gains, intervals, strict=True)]
        highs = [_to_axis(gain.measure, high) for gain, (_, high) in zip(gains, intervals, strict=True)]
        below = [abs(end - low) for end, low in zip(ends, lows, strict=True)]
        above = [abs(end - high) for end, high in zip(ends, highs, strict=True)]
        axis.errorbar(ends, places, xerr=[below, above], fmt="none", ecolor=INK.light, elinewidth=0.9, capsize=2)


def _no_change(measure: str) -> float:
    """Return the place of no change on the axis: 1 for losses, whose changes are shown as factors, else 0."""
    return 1.0 if measure == "loss" else 0.0


def _to_axis(measure: str, change: float) -> float:
    """Return a change of a measure in the unit of the axis: a finite factor for losses, else the change itself.

    Ends of whiskers are limited, as they may be too large to draw; the axis ends long before.
    """
    if measure == "loss":
        exponent = max(-300.0, min(change, 300.0))  # powers beyond are not finite floats, or 0
        return 10**exponent
    return min(change, 1e9)


def _limit_axis(axis: Axes, gains: Sequence[Gain], measure: str) -> None:
    """Set limits that show all bars, and whiskers as far as the bars' range on each side.

    With two seeds an interval may be many times as long as the bars.

    Args:
        axis: The axes.
        gains: Gains that have bars.
        measure: Name of the measure of the results.
    """
    means = [0.0, *(gain.change.mean for gain in gains)]
    ends = [end for gain in gains for end in gain.interval or ()]
    low, high = min(means), max(means)
    # Without any change the longest whisker counts, and without whiskers any width is right.
    width = (high - low) or max((abs(end) for end in ends), default=1.0) or 1.0
    left = max(min([low, *ends]), low - width)
    right = min(max([high, *ends]), high + width)
    margin = width / 20
    axis.set_xlim(_to_axis(measure, left - margin), _to_axis(measure, right + margin))


def _format_factors(axis: Axis, low: float, high: float) -> None:
    """Format the ticks of a logarithmic axis as factors, such as "×2"; minor ticks only if they have space.

    Args:
        axis: The axis.
        low: Its lower limit.
        high: Its upper limit.
    """
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"×{value:,.12g}"))
    crowded = high > 30 * low  # labels between the powers of ten would overlap
    axis.set_minor_formatter(NullFormatter() if crowded else FuncFormatter(_factor_tick))


def _factor_tick(value: float, _: object) -> str:
    """Return the label of a minor tick as a factor, empty for most ticks."""
    ticks = sparse_tick(value, "loss")
    return f"×{ticks}" if ticks else ""


# -------------------------------------------------------------------- populations


def population_panels(entries: Sequence[Entry], baseline: Entry) -> Panels | None:
    """Return figures of many users: the distribution of changes, and the changes against the users' amounts of data.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        baseline: The entry that others are compared with.

    Returns:
        A panel for the distribution, and one for each compared entry if the runs record the amounts of data; None if
        nothing can be compared.
    """
    rows = compared(entries, baseline)
    if not rows:
        return None
    measure, by_label = baseline.first.measure, _styles_by_label(entries)
    paint: list[Callable[[Axes], None]] = [
        partial(_paint_distribution, rows=rows, by_label=by_label, measure=measure, baseline=baseline.label)
    ]
    if baseline.first.amounts:
        paint += [
            partial(_paint_against_data, entry=entry, gains=gains, style=by_label[entry.label], baseline=baseline)
            for entry, gains in rows
        ]
    return Panels(
        paint=paint,
        columns=min(3, len(paint)),
        size=(3.9, 2.9),
        sheet=_gain_sheet(rows, baseline),
        keys=[(_legend_line(by_label[entry.label]), entry.label) for entry, _ in rows],
    )


def _legend_line(style: Style) -> Line2D:
    """Return a line with a style's colour, line style and marker, for a legend."""
    return Line2D([], [], color=style.colour.light, linestyle=style.line, marker=style.marker)


def _paint_distribution(axis: Axes, *, rows: Rows, by_label: dict[str, Style], measure: str, baseline: str) -> None:
    """Draw the cumulative distribution of changes: share of users (up) with at most a given change (across).

    Args:
        axis: The axes.
        rows: Pairs of an entry (runs of one recipe with different seeds) and its users' gains.
        by_label: The style of each entry.
        measure: Name of the measure of the results, such as "perplexity".
        baseline: Label of the baseline.
    """
    for entry, gains_of_entry in rows:
        changes = [_to_axis(gain.measure, gain.change.mean) for gain in gains_of_entry]  # in the unit of the axis
        style = by_label[entry.label]
        axis.ecdf(np.sort(changes), color=style.colour.light, linestyle=style.line)
    axis.axvline(_no_change(measure), color=INK.light, linewidth=1)
    axis.set_title("distribution over users")
    axis.set_ylabel("share of users, %")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    axis.set_xlabel(change_label(measure, baseline, short=True))
    if measure == "loss":
        axis.set_xscale("log")
        _format_factors(axis.xaxis, *axis.get_xlim())


def _paint_against_data(axis: Axes, *, entry: Entry, gains: Sequence[Gain], style: Style, baseline: Entry) -> None:
    """Draw a point for each user: amount of training data (across) and change against the baseline (up).

    Args:
        axis: The axes.
        entry: Runs of one method with the same recipe and different seeds.
        gains: Gains of its users.
        style: Its style.
        baseline: The baseline, whose first run records the amounts.
    """
    first = baseline.first
    with_data = [gain for gain in gains if first.amounts.get(gain.user, 0) > 0]
    amounts = [first.amounts[gain.user] for gain in with_data]
    changes = [_to_axis(gain.measure, gain.change.mean) for gain in with_data]
    axis.plot(
        amounts, changes, linestyle="", marker=style.marker or "o", markersize=3.5, alpha=0.6, color=style.colour.light
    )
    axis.axhline(_no_change(first.measure), color=INK.light, linewidth=1)
    axis.set_title(f"{short(entry.label)} and amount of data")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(f"training {first.unit} of the user")
    axis.set_ylabel(change_label(first.measure, baseline.label, short=True))
    if first.measure == "loss":
        axis.set_yscale("log")
        _format_factors(axis.yaxis, *axis.get_ylim())


MAX_SNAPSHOTS = 6
"""Largest number of evaluations that a figure of mixtures shows."""
_MOST_NAMES = 40
"""Largest number of users, or clusters, that are labelled."""
_SOLID = "#2b7bc4"  # similar contrast on light and dark pages
_SHADES = LinearSegmentedColormap.from_list("weights", [f"{_SOLID}00", f"{_SOLID}ff"])


@dataclass(frozen=True, kw_only=True)
class Mixtures:
    """Client-level mixtures of one run: each user's weights of components (adaptor sets or models) at each evaluation.

    Args:
        method: The method.
        seed: The seed.
        rounds: Rounds of the evaluations.
        users: Users, sorted by true cluster if it is known.
        clusters: True cluster of each user; None if unknown.
        order: Which of the run's adaptor sets each column is. Set c is the one that cluster c uses after the last
            round.
        values: Weights, of shape (evaluation, user, adaptor set); each row sums to 1.
        component: Name of what is mixed.
        entropy: Mean entropy of the routers over users, in nats, by evaluation.
        mismatch: Mean distance of the learned aggregation weights from the true ones (FLoRAL, section 4), by
            evaluation.
    """

    method: str
    seed: int
    rounds: tuple[int, ...]
    users: tuple[str, ...]
    clusters: tuple[int, ...] | None
    order: tuple[int, ...]
    values: np.ndarray
    component: str = "component"
    entropy: tuple[float, ...] | None = None
    mismatch: tuple[float, ...] | None = None

    @property
    def learned(self) -> bool:
        """Whether any user mixes several sets. With optimal routing each user has one set from the start."""
        return bool((self.values.max(-1) < 1).any())

    @cached_property
    def recovery(self) -> tuple[float, ...] | None:
        """Adjusted Rand index of users' components of largest weight against true clusters, at each evaluation.

        None if the true clusters are unknown.
        """
        if self.clusters is None:
            return None
        return tuple(adjusted_rand_index(self.clusters, weights.argmax(1).tolist()) for weights in self.values)


def read_mixtures(folder: Path) -> Mixtures | None:
    """Read the mixtures from a run's events; None if its users have no client-level mixtures."""
    events = list(read_events(folder))
    start = next((event for event in events if event["event"] == "start"), None)
    evaluations = [event for event in events if event["event"] == "evaluation" and "mixtures" in event]
    if start is None or not evaluations:
        return None
    truth: dict[str, int] | None = evaluations[-1].get("clusters")
    # In a federation users can miss an evaluation or keep their results private.
    names = [user for user in evaluations[-1]["mixtures"] if all(user in event["mixtures"] for event in evaluations)]
    if not names:
        return None
    users = names if truth is None else sorted(names, key=lambda name: (truth[name], names.index(name)))
    # Weights of shape (evaluation, user, component).
    values = np.array([[event["mixtures"][user] for user in users] for event in evaluations])
    clusters = None if truth is None else tuple(truth[user] for user in users)
    order = match_clusters(values[-1], clusters)  # of the components: that of the first true cluster first
    return Mixtures(
        method=start["method"],
        seed=start["seed"],
        rounds=tuple(event["round"] for event in evaluations),
        users=tuple(users),
        clusters=clusters,
        order=order,
        values=values[:, :, list(order)],
        component=evaluations[-1].get("component", "component"),
        entropy=_values_of(evaluations, "router_entropy_nats"),
        mismatch=_values_of(evaluations, "aggregation_mismatch"),
    )


def _values_of(events: Sequence[dict[str, Any]], key: str) -> tuple[float, ...] | None:
    """Return the values of a key in all events; None if an event does not have it."""
    return tuple(event[key] for event in events) if all(key in event for event in events) else None


def match_clusters(mixture: np.ndarray, clusters: Sequence[int] | None) -> tuple[int, ...]:
    """Return an order of the adaptor sets: the set of the first true cluster, that of the second, and so on.

    Each cluster is assigned a different set, so that the total weight of the clusters' users on their sets is largest
    (linear sum assignment). Sets that no cluster has follow, those with the largest total weight first.

    Args:
        mixture: Weights, of shape (user, adaptor set).
        clusters: True cluster of each user; None if unknown.

    Returns:
        Indices of all adaptor sets.
    """
    matched: list[int] = []
    if clusters is not None:
        true_clusters = np.array(clusters)
        # Total weight of each set in each cluster, of shape (cluster, adaptor set).
        weights = np.stack([mixture[true_clusters == cluster].sum(0) for cluster in sorted(set(clusters))])
        rows, columns = linear_sum_assignment(weights, maximize=True)
        matched = [int(columns[i]) for i in np.argsort(rows)]  # in the order of the clusters
    total = mixture.sum(0)
    unmatched = [number for number in range(mixture.shape[1]) if number not in matched]
    return (*matched, *sorted(unmatched, key=lambda number: (-total[number], number)))


def adjusted_rand_index(first_partition: Sequence[Hashable], second_partition: Sequence[Hashable]) -> float:
    """Return the similarity of two partitions of the same items: 1 for equal ones, about 0 for unrelated ones.

    ``(n - e) / (m - e)``: n pairs are together in both partitions, e is the number expected by chance, and m is the
    mean number of pairs together in either partition (Hubert and Arabie, 1985). 0 / 0 counts as 1.
    """
    in_both = _num_pairs(Counter(zip(first_partition, second_partition, strict=True)))
    in_first, in_second = _num_pairs(Counter(first_partition)), _num_pairs(Counter(second_partition))
    expected = in_first * in_second / comb(len(first_partition), 2) if len(first_partition) > 1 else 0.0
    mean = (in_first + in_second) / 2
    return 1.0 if mean == expected else (in_both - expected) / (mean - expected)


def _num_pairs(sizes: Counter[object]) -> int:
    """Return the number of pairs of items that are in the same part, from the sizes of all parts."""
    return sum(comb(size, 2) for size in sizes.values())


# -------------------------------------------------------------------- mixtures


def mixtures_figure(mixtures: Mixtures) -> Figure:
    """Return heat maps of users (down) x components (across) at up to :data:`MAX_SNAPSHOTS` evaluations.

    A component is what a user's model is mixed from, for example a set of adapters. Weight 1 is solid and weight 0 is
    transparent, so that the figure suits light and dark pages.
    """
    panels = _snapshot_indices(len(mixtures.rounds))

    def paint(figure: Figure, axes: list[Axes]) -> None:
        """Paint one heat map for each snapshot, and the colour bar."""
        for axis, at in zip(axes, panels, strict=True):
            axis.imshow(mixtures.values[at], vmin=0, vmax=1, cmap=_SHADES, aspect="auto", interpolation="none")
            axis.set_title(_snapshot_title(mixtures, at))
            axis.set_xticks(range(len(mixtures.order)), [str(name) for name in mixtures.order])
            if len(mixtures.order) > 10:  # labels of two digits would overlap horizontally
                axis.tick_params(axis="x", labelrotation=90, labelsize=min(8.0, 110 / len(mixtures.order)))
            axis.set_xlabel(mixtures.component)
            axis.grid(visible=False)
            _mark_clusters(axis, mixtures, labels=at == panels[0])
        figure.suptitle(f"{mixtures.method}, seed {mixtures.seed}: each user's mixture", x=0.01, ha="left")
        bar = figure.colorbar(axes[-1].images[0], ax=axes, label="weight", shrink=0.8)
        assert bar.solids is not None
        bar.solids.set_rasterized(True)  # seams show between hundreds of translucent vector strips

    # Includes space for user names, the colour bar, and the title above a single panel.
    width = min(14.0, max(4.4, 1.7 + len(panels) * (0.6 + 0.22 * len(mixtures.order))))
    return draw(1, len(panels), (width / len(panels), 3.4), paint)


def _snapshot_indices(count: int) -> list[int]:
    """Return the first evaluation, the last, and some between them at equal distances."""
    wanted = min(count, MAX_SNAPSHOTS)
    return [round(number * (count - 1) / max(1, wanted - 1)) for number in range(wanted)]


def _snapshot_title(mixtures: Mixtures, at: int) -> str:
    """Return the title of a snapshot: its round and, if the true clusters are known, the adjusted Rand index."""
    title = f"round {mixtures.rounds[at]}"
    return title if mixtures.recovery is None else f"{title}\nARI {mixtures.recovery[at]:.2f}"


def _mark_clusters(axis: Axes, mixtures: Mixtures, *, labels: bool) -> None:
    """Draw lines between the true clusters and label them at their centres; without clusters label each user.

    Args:
        axis: The axes of a heat map, with a row for each user.
        mixtures: The mixtures, whose users are sorted by cluster.
        labels: Whether to label the rows.
    """
    names = mixtures.users if mixtures.clusters is None else [f"cluster {cluster}" for cluster in mixtures.clusters]
    starts = [i for i, name in enumerate(names) if i == 0 or names[i - 1] != name]  # first rows of the clusters
    if mixtures.clusters is not None:
        for start in starts[1:]:
            axis.axhline(start - 0.5, color=INK.light, linewidth=0.8)
    if not labels or len(starts) > _MOST_NAMES:
        axis.set_yticks([])
        return
    ends = [*starts[1:], len(names)]
    places = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    axis.set_yticks(places, [short(names[start]) for start in starts])


__all__ = ["bytes_figure", "curves_figure", "draw", "save", "scores_figure", "users_figure"]

# -------------------------------------------------------------------- learning curves (Figures 5 to 7, 9, 11 to 13)


def curves_figure(entries: Sequence[Entry], *, start: bool = True, measure: str = "") -> Figure:
    """Return a figure of test results against local iterations, as :func:`curves_panels`.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        start: Include the first evaluation of trained runs.
        measure: Name of a measure, such as "accuracy"; empty for the measure by which methods are compared.
    """
    return curves_panels(entries, start=start, measure=measure).figure()


def curves_panels(entries: Sequence[Entry], *, start: bool = True, measure: str = "") -> Panels:
    """Return panels of test results against local iterations: the mean over users, then each user.

    Bands are standard deviations over seeds. Perplexities have a panel for the geometric mean too. For many users the
    best and the worst are shown.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        start: Include the first evaluation of trained runs; without it late differences are visible.
        measure: Name of a measure, such as "accuracy"; empty for the measure by which methods are compared.
    """
    measure = measure or entries[0].first.measure
    users = extremes(entries, MAX_PANELS)
    num_users = len(entries[0].first.users)
    over = f"over {num_users} users" if num_users > len(users) else "over users"
    # For each panel the user (None for a mean over users), whether the mean is geometric, and the title.
    panels: list[tuple[str | None, bool, str]] = [(None, False, f"mean {over}")]
    if measure == "perplexity":
        panels.append((None, True, f"geometric mean {over}"))
    panels += [(user, False, short(title)) for user, title in users.items()]
    curves = [[_curve_of(entry, user, measure, geometric, start) for entry in entries] for user, geometric, _ in panels]
    values = [value for by_entry in curves for curve in by_entry for value in curve.values]
    return Panels(
        paint=[
            partial(_paint_curves_panel, entries=entries, curves=by_entry, title=title, start=start, measure=measure)
            for (_, _, title), by_entry in zip(panels, curves, strict=True)
        ],
        columns=min(4, len(panels)),
        size=(2.9, 2.45),
        sheet=_curves_sheet(entries, [user or title for user, _, title in panels], curves),
        keys=method_keys(entries),
        below="local iterations",
        left=axis_label(measure),
        note=f"bands: {DEVIATION}" if any(value.std for value in values) else "",
    )


def method_keys(entries: Sequence[Entry]) -> list[Key]:
    """Return the legend of entries: for each a line in its colour, style and marker, and its label."""
    line_styles = styles([entry.method for entry in entries])
    lines = [Line2D([], [], color=s.colour.light, linestyle=s.line, marker=s.marker) for s in line_styles]
    return [(line, entry.label) for line, entry in zip(lines, entries, strict=True)]


def _curve_of(entry: Entry, user: str | None, measure: str, geometric: bool, start: bool) -> Curve:
    """Return a learning curve as :func:`learning_curve`, without the first evaluation unless ``start``."""
    curve = learning_curve(entry, user, measure, geometric=geometric)
    return curve if start else _without_start(curve)


def _curves_sheet(
    entries: Sequence[Entry], names: Sequence[str], curves: Sequence[Sequence[Curve]]
) -> list[list[object]]:
    """Return a sheet with every point of the learning curves.

    Args:
        entries: Entries, each the runs of one recipe with different seeds.
        names: The user, or the mean, of each panel.
        curves: The curves of each panel, one for each entry.
    """
    rows: list[list[object]] = [["of", "method", "local_iterations", "mean_over_seeds", "std_over_seeds"]]
    for name, by_entry in zip(names, curves, strict=True):
        for entry, curve in zip(entries, by_entry, strict=True):
            points = zip(curve.iterations, curve.values, strict=True)
            rows += [[name, entry.label, at, value.mean, value.std] for at, value in points]
    return rows


def _paint_curves_panel(
    axis: Axes, *, entries: Sequence[Entry], curves: Sequence[Curve], title: str, start: bool, measure: str
) -> None:
    """Paint the curves of one user, or of a mean over users; entries that do not train are horizontal lines.

    Args:
        axis: The axes.
        entries: Entries, each the runs of one recipe with different seeds.
        curves: Their curves.
        title: Title of the panel.
        start: Whether the curves include the first evaluation.
        measure: Name of the measure of the results, such as "perplexity".
    """
    axis.set_title(title)
    line_styles = styles([entry.method for entry in entries])
    values = [
        value.mean for curve, entry in zip(curves, entries, strict=True) if entry.trained for value in curve.values
    ]
    log_axis = _needs_log_axis(values, measure, start)  # judged by trained entries only
    for curve, style, entry in zip(curves, line_styles, entries, strict=True):
        if entry.trained:
            _paint_curve(axis, curve, style, log_axis)
        elif curve.values:
            constant = curve.values[0].mean
            values.append(constant)
            axis.axhline(constant, color=style.colour.light, linestyle=style.line)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    if log_axis:
        logarithmic(axis, values, measure)


def _needs_log_axis(values: Sequence[float], measure: str, start: bool) -> bool:
    """Return whether values span too wide a range for a linear axis: the largest is over 4 times the smallest.

    Accuracies never do. Without the first evaluation, which is far from the others, only losses may.

    Args:
        values: The values.
        measure: Name of the measure of these results, such as "perplexity".
        start: Whether they include the first evaluation.
    """
    if not values or MEASURES[measure] == "higher":
        return False
    return (start or measure == "loss") and 0 < 4 * min(values) < max(values)


def logarithmic(axis: Axes, values: Sequence[float], measure: str, room: float = 1.6) -> None:
    """Set a logarithmic y axis with limits that depend on the values, not on their bands.

    Args:
        axis: The axes.
        values: The values.
        measure: Name of the measure of these results, such as "perplexity".
        room: Factor between the extreme values and the limits.
    """
    axis.set_yscale("log")
    axis.set_ylim(min(values) / room, max(values) * room)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    crowded = max(values) > 1000 * min(values)  # labels between the powers of ten would overlap
    axis.yaxis.set_minor_formatter(NullFormatter() if crowded else FuncFormatter(lambda v, _: sparse_tick(v, measure)))


def _without_start(curve: Curve) -> Curve:
    """Return a curve without the evaluation before training."""
    kept = [i for i, x in enumerate(curve.iterations) if x > 0]
    return Curve(iterations=tuple(curve.iterations[i] for i in kept), values=tuple(curve.values[i] for i in kept))


def _paint_curve(axis: Axes, curve: Curve, style: Style, log_axis: bool) -> None:
    """Draw a curve with a band of one standard deviation over seeds.

    On a logarithmic axis the band reaches as many decades down as up, as it could reach 0 otherwise.

    Args:
        axis: The axes.
        curve: Mean and standard deviation over seeds, by local iterations.
        style: Colour, line style and marker.
        log_axis: Whether the axis of values is logarithmic.
    """
    means = [value.mean for value in curve.values]
    colour = style.colour.light
    marker = style.marker if len(means) <= 12 else ""  # more markers would hide the line
    axis.plot(curve.iterations, means, color=colour, linestyle=style.line, marker=marker)
    if any(value.std for value in curve.values):
        high = [value.mean + (value.std or 0) for value in curve.values]
        if log_axis:
            low = [mean * mean / top for mean, top in zip(means, high, strict=True)]
        else:
            low = [2 * mean - top for mean, top in zip(means, high, strict=True)]
        axis.fill_between(curve.iterations, low, high, color=colour, alpha=0.18, linewidth=0)


# -------------------------------------------------------------------- bytes


def bytes_figure(entries: Sequence[Entry]) -> Figure:
    """Return a figure of mean test results at the end against the bytes that all users uploaded."""
    return bytes_panels(entries).figure()


def bytes_panels(entries: Sequence[Entry]) -> Panels:
    """Return panels of final test results against uploaded bytes, with a point for each trained entry.

    There is a panel for the mean over users, and for perplexities another one for the geometric mean.
    """
    measure = entries[0].first.measure
    means = ["mean", "geometric mean"] if measure == "perplexity" else ["mean"]
    sheet: list[list[object]] = [["of", "method", "upload_bytes_in_total", "mean_over_seeds", "std_over_seeds"]]
    has_whiskers = False  # deviations over seeds
    for mean in means:
        for entry in entries:
            result = final(entry, geometric=mean == "geometric mean") if entry.trained else None
            if result is not None:
                sheet.append([mean, entry.label, cost(entry).upload_bytes, result.mean, result.std])
                has_whiskers = has_whiskers or bool(result.std)
    _, unit_name = byte_unit(max((cost(entry).upload_bytes for entry in entries), default=0))
    return Panels(
        paint=[partial(_paint_bytes_panel, entries=entries, mean_name=mean) for mean in means],
        columns=len(means),
        size=(4.2, 3.0),
        sheet=sheet,
        below=f"uploaded by all users over the run, {unit_name}",
        left=axis_label(measure),
        note=f"whiskers: {DEVIATION}" if has_whiskers else "",
    )


def _paint_bytes_panel(axis: Axes, *, entries: Sequence[Entry], mean_name: str) -> None:
    """Paint a point for each entry whose method trains: uploaded bytes across, mean test result over users up.

    Args:
        axis: The axes.
        entries: Entries, each the runs of one recipe with different seeds.
        mean_name: Which mean over users: ``mean`` or ``geometric mean``.
    """
    measure = entries[0].first.measure
    largest = max((cost(entry).upload_bytes for entry in entries), default=0)
    unit, _ = byte_unit(largest)
    points = []
    for entry, style in zip(entries, styles([entry.method for entry in entries]), strict=True):
        spread = final(entry, geometric=mean_name == "geometric mean")  # mean and deviation over seeds
        if spread is None or not entry.trained:  # None if a result is not finite
            continue
        uploaded = cost(entry).upload_bytes / unit
        axis.errorbar(uploaded, spread.mean, yerr=spread.std, fmt=style.marker, color=style.colour.light, markersize=7)
        points.append((uploaded, spread.mean, entry.label))
    axis.set_title(f"{mean_name} over users")
    axis.margins(y=0.2)
    width = largest / unit or 1.0  # 1 if nothing is uploaded
    axis.set_xlim(-0.04 * width, 1.4 * width)  # room for labels on the right
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    results = [result for _, result, _ in points]
    if measure == "loss" and results and min(results) > 0 and max(results) > 10 * min(results):
        logarithmic(axis, results, measure, room=3.0)  # labels need more room than curves
    figure = axis.figure
    assert isinstance(figure, Figure)
    label_points(figure, axis, points)
