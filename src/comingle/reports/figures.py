"""Figures of runs: learning curves, bytes, heat maps, gains and mixtures.

Source of the mixtures: FLoRAL, section 3.2 (one softmax vector per user over C adaptor sets) and section 6 (user k is
in cluster k mod C). Adaptor sets have no names, so they are sorted by the clusters that use them most.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    cost,
    expert_curves,
    final_result,
    gains_of_entries,
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


def choose_users(entries: Sequence[Entry], max_users: int, baseline: Entry | None = None) -> dict[str, str]:
    """Choose at most ``max_users`` users for a figure: all users if they fit, else the best and the worst ones.

    Users are ranked by their mean change against the baseline, or by their mean test result without a baseline.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        max_users: Largest number of users.
        baseline: The baseline; None for the first of :func:`comingle.reports.runs.baselines`.

    Returns:
        Titles by user: ``{"ann": "ann"}`` if all are chosen, else ``{"ann": "best 1: ann", "bob": "worst 1: bob"}``.
    """
    users = list(entries[0].first.users)
    if len(users) <= max_users:
        return {user: user for user in users}
    values = _mean_change_by_user(entries, baseline) or _mean_result_by_user(entries)
    higher_is_better = MEASURES[entries[0].first.measure] == "higher"

    def rank(user: str) -> tuple[bool, float]:
        """Return the sort key of a user: best first, users without a value last."""
        value = values.get(user, 0.0)
        return user not in values, -value if higher_is_better else value

    best_to_worst = sorted(users, key=rank)
    num_worst = max_users // 2
    num_best = max_users - num_worst
    titles = {}
    for number, user in enumerate(best_to_worst[:num_best], start=1):
        titles[user] = f"best {number}: {user}"
    worst_users = best_to_worst[len(users) - num_worst :]  # the worst one is the last
    for i, user in enumerate(worst_users):
        titles[user] = f"worst {num_worst - i}: {user}"
    return titles


def _mean_change_by_user(entries: Sequence[Entry], baseline: Entry | None) -> dict[str, float]:
    """Return each user's mean change against a baseline over all compared entries.

    Users without a finite change in one of these entries are left out.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        baseline: The baseline; None for the first of :func:`comingle.reports.runs.baselines`.
    """
    if baseline is None:
        baseline = next(iter(baselines(entries)), None)
    if baseline is None:  # none of the entries can be a baseline
        return {}
    changes_by_entry = []
    for _, gains in gains_of_entries(entries, baseline):
        changes_by_entry.append({gain.user: gain.change.mean for gain in gains})
    if not changes_by_entry:
        return {}
    means = {}
    for user in entries[0].first.users:
        if all(user in changes for changes in changes_by_entry):
            means[user] = statistics.fmean(changes[user] for changes in changes_by_entry)
    return means


def _mean_result_by_user(entries: Sequence[Entry]) -> dict[str, float]:
    """Return each user's mean final result over the trained entries; over all entries if none is trained.

    Users without a finite result in one of these entries are left out.
    """
    trained_or_all = [entry for entry in entries if entry.trained] or entries
    means: dict[str, float] = {}
    for user in entries[0].first.users:
        results = [final_result(entry, user) for entry in trained_or_all]
        finite = [result.mean for result in results if result is not None]
        if len(finite) == len(results):
            means[user] = statistics.fmean(finite)
    return means


MOST_TICKS = 5
"""Largest number of labelled ticks on an axis."""


def scores_figure(entry: Entry) -> Figure:
    """Return a figure of each expert's mean score in each layer over training, for every user."""
    return scores_panels(entry).figure()


def scores_panels(entry: Entry, entries: Sequence[Entry] = ()) -> Panels:
    """Return one heat map per user and expert: the expert's mean gate by layer (up) and round (across).

    Gate 1 is solid, gate 0 is blank. Of many users only the best and the worst have heat maps.

    Args:
        entry: The entry whose scores are shown.
        entries: Entries by which users are ranked; empty for ``entry`` alone.
    """
    most_experts = max(len(expert_curves(entry, user)) for user in entry.first.users)
    max_users = max(2, MAX_PANELS // most_experts)
    titles, experts_by_user = _experts_with_heatmaps(entry, entries or [entry], max_users)
    round_by_iterations = {}
    for run in entry.runs:
        for evaluation in run.evaluations:
            round_by_iterations[evaluation.iterations] = evaluation.round

    painters: list[Callable[[Axes], None] | None] = []
    for user, experts in experts_by_user.items():
        for expert in experts:
            title_length = 27 - len(expert.name)  # so that the title fits a panel
            title = f"{short(titles[user], title_length)}: {expert.name}"
            painters.append(
                partial(_paint_heatmap, expert=expert, title=title, round_by_iterations=round_by_iterations)
            )
        num_empty_panels = most_experts - len(experts)  # so that all users have the same number of panels
        painters += [None] * num_empty_panels
    num_layers = max(len(expert.layers) for experts in experts_by_user.values() for expert in experts)
    max_columns = min(4, len(painters))
    users_per_row = max(1, max_columns // most_experts)
    names = [expert.name for expert in max(experts_by_user.values(), key=len)]
    return Panels(
        painters=painters,
        columns=most_experts * users_per_row,
        size=(2.9, min(2.6, 1.15 + 0.06 * num_layers)),
        sheet=_heatmap_sheet(experts_by_user, round_by_iterations),
        legend=[(Patch(color=expert_colour(name).light), f"{name} (solid 1, blank 0)") for name in names],
        x_label="round",
        y_label="layer",
    )


def _experts_with_heatmaps(
    entry: Entry, entries: Sequence[Entry], max_users: int
) -> tuple[dict[str, str], dict[str, list[ExpertCurves]]]:
    """Return the titles and the experts of the users that have heat maps: the best and the worst, as far as they fit.

    If all of these users keep their scores private, other users that report scores take their place.

    Args:
        entry: The entry whose scores are shown.
        entries: Entries by which users are ranked.
        max_users: Largest number of users.
    """
    titles = choose_users(entries, max_users)
    experts_by_user = _experts_by_user(entry, titles)
    if experts_by_user:
        return titles, experts_by_user
    users_with_scores = list(entry.first.evaluations[-1].scores)[:max_users]
    titles = {user: user for user in users_with_scores}
    return titles, {user: expert_curves(entry, user) for user in users_with_scores}


def _experts_by_user(entry: Entry, users: Iterable[str]) -> dict[str, list[ExpertCurves]]:
    """Return the gate curves of each user's experts; users without recorded gates are left out."""
    experts_by_user = {user: expert_curves(entry, user) for user in users}
    return {user: experts for user, experts in experts_by_user.items() if experts}


def _paint_heatmap(axis: Axes, *, expert: ExpertCurves, title: str, round_by_iterations: dict[int, int]) -> None:
    """Paint an expert's mean scores: rounds across, layers up.

    Args:
        axis: The axes to paint on.
        expert: The expert's curve of each layer.
        title: Title of the panel.
        round_by_iterations: The round by number of local steps.
    """
    scores = np.array([[value.mean for value in layer.values] for layer in expert.layers])  # (layers, evaluations)
    colour = expert_colour(expert.name).light
    transparent, solid = f"{colour}00", f"{colour}ff"
    shades = LinearSegmentedColormap.from_list(expert.name, [transparent, solid])
    axis.imshow(scores, vmin=0, vmax=1, cmap=shades, aspect="auto", interpolation="none", origin="lower")
    axis.set_title(title)
    rounds = [round_by_iterations[iterations] for iterations in expert.layers[0].iterations]
    interval = math.ceil(len(rounds) / MOST_TICKS)
    ticks = range(0, len(rounds), interval)
    axis.set_xticks(ticks, [str(rounds[i]) for i in ticks])
    axis.yaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True, min_n_ticks=1))
    axis.grid(visible=False)


def _heatmap_sheet(
    experts_by_user: dict[str, list[ExpertCurves]], round_by_iterations: dict[int, int]
) -> list[list[object]]:
    """Return a header and rows with every score of the heat maps.

    Args:
        experts_by_user: The experts of each shown user.
        round_by_iterations: The round by number of local steps.
    """
    rows: list[list[object]] = [["user", "expert", "layer", "round", "mean_score", "std_over_seeds"]]
    for user, experts in experts_by_user.items():
        for expert in experts:
            for layer, curve in enumerate(expert.layers):
                for iterations, value in zip(curve.iterations, curve.values, strict=True):
                    rows.append([user, expert.name, layer, round_by_iterations[iterations], value.mean, value.std])
    return rows


MAX_BARS = 60
"""Largest number of bars in a figure; tables have all users."""
LEVEL_OPACITY = 0.4
"""Opacity of the bars of level results."""
HATCH = "////"
"""Pattern of the bars of worse results."""

GainsByEntry = Sequence[tuple[Entry, Sequence[Gain]]]
"""Pairs of an entry and the changes of its users against a baseline."""


def users_figure(entries: Sequence[Entry], baseline: Entry) -> Figure | None:
    """Return a bar chart of each user's change against ``baseline``; None if nothing can be compared."""
    panels = users_panels(entries, baseline)
    return None if panels is None else panels.figure()


def users_panels(entries: Sequence[Entry], baseline: Entry, width: float = 8.2) -> Panels | None:
    """Return one panel with a bar for each user and entry: the user's change against the baseline.

    Of too many users only the best and the worst have bars; the figure's CSV file has the changes of all users.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        baseline: The entry that others are compared with.
        width: Width of the panel, in inches.

    Returns:
        The panel; None if no entry can be compared with the baseline.
    """
    gains_by_entry = gains_of_entries(entries, baseline)
    if not gains_by_entry:
        return None
    num_entries = len(gains_by_entry)
    titles = choose_users(entries, max_users_with_bars(num_entries), baseline)
    shown_gains = [gain for _, gains in gains_by_entry for gain in gains if gain.user in titles]
    has_intervals = any(gain.interval for gain in shown_gains)
    measure = baseline.first.measure
    style_by_label = _styles_by_label(entries)
    legend: list[Key] = [
        (Patch(color=style_by_label[entry.label].colour.light), entry.label) for entry, _ in gains_by_entry
    ]
    legend += _verdict_keys(shown_gains)
    paint = partial(
        _paint_users, gains_by_entry=gains_by_entry, titles=titles, style_by_label=style_by_label, measure=measure
    )
    return Panels(
        painters=[paint],
        columns=1,
        size=(width, 1.1 + 0.17 * len(titles) * (num_entries + 0.8)),
        sheet=_gain_sheet(gains_by_entry, baseline),
        legend=legend,
        x_label=change_label(measure, baseline.label, short=width < 6),
        note=f"whiskers: {INTERVALS}" if has_intervals else "",
    )


def _verdict_keys(shown_gains: Sequence[Gain]) -> list[Key]:
    """Return the legend entries that explain pale and hatched bars, each only if the figure has such bars."""
    keys: list[Key] = []
    if any(gain.verdict == "level" for gain in shown_gains):
        pale = Patch(facecolor=INK.light, alpha=LEVEL_OPACITY, linewidth=0)
        keys.append((pale, "pale: level"))
    if any(_is_hatched(gain) for gain in shown_gains):
        hatched = Patch(facecolor=INK.light, edgecolor=PAPER.light, hatch=HATCH, linewidth=0)
        keys.append((hatched, "hatched: worse"))
    return keys


def _is_hatched(gain: Gain) -> bool:
    return gain.verdict != "level" and is_worse(gain.change.mean, gain.measure)


def max_users_with_bars(num_entries: int) -> int:
    """Return the largest number of users that have bars, if each has a bar for each of ``num_entries`` entries."""
    return max(1, MAX_BARS // num_entries)


def _styles_by_label(entries: Sequence[Entry]) -> dict[str, Style]:
    """Return the colour, line style and marker with which each entry is drawn, by the entry's label."""
    styles_of_entries = styles([entry.method for entry in entries])
    return {entry.label: style for entry, style in zip(entries, styles_of_entries, strict=True)}


def _gain_sheet(gains_by_entry: GainsByEntry, baseline: Entry) -> list[list[object]]:
    """Return a header and a row for every user's gain, entry by entry, best first.

    Args:
        gains_by_entry: Pairs of an entry and its users' gains against the baseline.
        baseline: The entry that the others are compared with.
    """
    first_run = baseline.first
    amount_column = f"train_{first_run.unit}"  # train_tokens or train_samples
    rows: list[list[object]] = [
        ["method", "against", "user", amount_column, "change", "std_over_seeds", "low_95", "high_95", "verdict"]
    ]
    for entry, gains in gains_by_entry:
        for gain in gains:
            amount = first_run.amounts.get(gain.user)
            low, high = gain.interval or (None, None)
            names = [entry.label, baseline.label, gain.user]
            rows.append([*names, amount, gain.change.mean, gain.change.std, low, high, gain.verdict])
    return rows


def _paint_users(
    axis: Axes,
    *,
    gains_by_entry: GainsByEntry,
    titles: dict[str, str],
    style_by_label: dict[str, Style],
    measure: str,
) -> None:
    """Paint horizontal bars of users' changes: a group for each user, with one bar for each entry.

    Args:
        axis: The axes to paint on.
        gains_by_entry: Pairs of an entry (runs of one recipe with different seeds) and its users' gains.
        titles: Title of each user that has bars, such as ``{"ann": "best 1: ann"}``.
        style_by_label: The style of each entry.
        measure: Name of the measure of the results, such as "perplexity".
    """
    group_height = 0.8  # the bars of user i fill the heights from i - 0.4 to i + 0.4
    bar_height = group_height / len(gains_by_entry)
    for number, (entry, gains) in enumerate(gains_by_entry):
        gain_by_user = {gain.user: gain for gain in gains}
        offset = (number + 0.5) * bar_height - group_height / 2
        _paint_bars(axis, list(titles), gain_by_user, style_by_label[entry.label], offset, bar_height)
    axis.axvline(_position_of_no_change(measure), color=INK.light, linewidth=1)
    if measure == "loss":  # changes are factors: on a logarithmic axis ×0.5 and ×2 have bars of equal length
        axis.set_xscale("log")
    all_gains = [gain for _, gains in gains_by_entry for gain in gains]
    if any(gain.interval for gain in all_gains):  # a wide interval would squeeze all bars
        _limit_axis(axis, [gain for gain in all_gains if gain.user in titles], measure)
    if measure == "loss":  # after the limits are final
        low, high = axis.get_xlim()
        _format_factors(axis.xaxis, low, high)
    axis.set_yticks(range(len(titles)), [short(title, 22) for title in titles.values()])
    axis.set_ylim(len(titles) - 0.4, -0.6)  # the first user is at the top
    axis.grid(visible=False, axis="y")


def _paint_bars(
    axis: Axes, users: Sequence[str], gain_by_user: dict[str, Gain], style: Style, offset: float, height: float
) -> None:
    """Paint one entry's bars, with 95% confidence intervals as whiskers.

    Bars of level results are pale, bars of worse results are hatched.

    Args:
        axis: The axes; the bars of user i are centred at height i.
        users: Users that have bars, from top to bottom.
        gain_by_user: Gains of the entry's users.
        style: The style of the entry.
        offset: Distance of the entry's bar from the centre of a user's bars.
        height: Height for a bar.
    """
    centres = [i + offset for i, user in enumerate(users) if user in gain_by_user]
    gains = [gain_by_user[user] for user in users if user in gain_by_user]
    ends = [_to_axis(gain.measure, gain.change.mean) for gain in gains]
    for centre, end, gain in zip(centres, ends, gains, strict=True):
        start = _position_of_no_change(gain.measure)
        drawn_height = height * 0.92  # leaves a gap between bars
        (bar,) = axis.barh(
            centre, end - start, drawn_height, left=start, color=style.colour.light, edgecolor=PAPER.light, linewidth=0
        )
        bar.set_alpha(LEVEL_OPACITY if gain.verdict == "level" else 1.0)
        bar.set_hatch(HATCH if _is_hatched(gain) else "")
    if any(gain.interval for gain in gains):
        lengths_left, lengths_right = [], []  # of the whiskers; 0 without an interval
        for end, gain in zip(ends, gains, strict=True):
            low, high = gain.interval or (gain.change.mean, gain.change.mean)
            lengths_left.append(abs(end - _to_axis(gain.measure, low)))
            lengths_right.append(abs(end - _to_axis(gain.measure, high)))
        whiskers = [lengths_left, lengths_right]
        axis.errorbar(ends, centres, xerr=whiskers, fmt="none", ecolor=INK.light, elinewidth=0.9, capsize=2)


def _position_of_no_change(measure: str) -> float:
    """Return the position of no change on the axis: 1 for losses, whose changes are shown as factors, else 0."""
    return 1.0 if measure == "loss" else 0.0


def _to_axis(measure: str, change: float) -> float:
    """Return a change in the unit of the axis: for losses the factor ``10**change``, else the change itself.

    Ends of whiskers can be too large for matplotlib. They are clipped far beyond the end of the axis.
    """
    if measure != "loss":
        return min(change, 1e9)
    exponent = max(-300.0, min(change, 300.0))  # of a power that is neither infinite nor 0
    return 10**exponent


def _limit_axis(axis: Axes, gains: Sequence[Gain], measure: str) -> None:
    """Set limits that show all bars, and whiskers up to the range of the bars beyond them; longer whiskers are cut.

    For bars from -2 to 4, whose range is 6, whiskers are cut at -8 and 10.

    Args:
        axis: The axes to paint on.
        gains: Gains that have bars.
        measure: Name of the measure of the results.
    """
    bar_ends = [0.0, *(gain.change.mean for gain in gains)]
    whisker_ends = [end for gain in gains for end in gain.interval or ()]
    low, high = min(bar_ends), max(bar_ends)
    bars_range = high - low
    if bars_range == 0:  # no change at all: show the longest whisker
        bars_range = max((abs(end) for end in whisker_ends), default=0.0)
    if bars_range == 0:  # no whiskers either
        bars_range = 1.0
    left = max(min([low, *whisker_ends]), low - bars_range)
    right = min(max([high, *whisker_ends]), high + bars_range)
    margin = bars_range / 20
    axis.set_xlim(_to_axis(measure, left - margin), _to_axis(measure, right + margin))


def _format_factors(axis: Axis, low: float, high: float) -> None:
    """Format the ticks of a logarithmic axis as factors, such as "×2".

    Args:
        axis: The x axis or the y axis of a panel.
        low: Its lower limit, a factor.
        high: Its upper limit, a factor.
    """
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"×{value:,.12g}"))
    minor_labels_overlap = high > 30 * low
    if minor_labels_overlap:
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_minor_formatter(FuncFormatter(_factor_tick))


def _factor_tick(value: float, _: object) -> str:
    """Return the label of a minor tick as a factor, such as "×2"; empty except for 2 and 5 times a power of ten."""
    text = sparse_tick(value, "loss")  # a plain number, as for losses
    return f"×{text}" if text else ""


# -------------------------------------------------------------------- populations


def population_panels(entries: Sequence[Entry], baseline: Entry) -> Panels | None:
    """Return panels of many users: the distribution of changes, and the changes against the users' amounts of data.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        baseline: The entry that others are compared with.

    Returns:
        A panel for the distribution, and one for each compared entry if the runs record the amounts of data; None if
        nothing can be compared.
    """
    gains_by_entry = gains_of_entries(entries, baseline)
    if not gains_by_entry:
        return None
    style_by_label = _styles_by_label(entries)
    painters: list[Callable[[Axes], None]] = [
        partial(
            _paint_distribution,
            gains_by_entry=gains_by_entry,
            style_by_label=style_by_label,
            measure=baseline.first.measure,
            baseline=baseline.label,
        )
    ]
    if baseline.first.amounts:
        for entry, gains in gains_by_entry:
            style = style_by_label[entry.label]
            painters.append(partial(_paint_against_data, entry=entry, gains=gains, style=style, baseline=baseline))
    return Panels(
        painters=painters,
        columns=min(3, len(painters)),
        size=(3.9, 2.9),
        sheet=_gain_sheet(gains_by_entry, baseline),
        legend=[(_legend_line(style_by_label[entry.label]), entry.label) for entry, _ in gains_by_entry],
    )


def _legend_line(style: Style) -> Line2D:
    """Return a line with a style's colour, line style and marker, for a legend."""
    return Line2D([], [], color=style.colour.light, linestyle=style.line, marker=style.marker)


def _paint_distribution(
    axis: Axes, *, gains_by_entry: GainsByEntry, style_by_label: dict[str, Style], measure: str, baseline: str
) -> None:
    """Draw the cumulative distribution of changes: share of users (up) with at most a given change (across).

    Args:
        axis: The axes to paint on.
        gains_by_entry: Pairs of an entry (runs of one recipe with different seeds) and its users' gains.
        style_by_label: The style of each entry.
        measure: Name of the measure of the results, such as "perplexity".
        baseline: Label of the baseline.
    """
    for entry, gains in gains_by_entry:
        changes = [_to_axis(gain.measure, gain.change.mean) for gain in gains]
        style = style_by_label[entry.label]
        axis.ecdf(np.sort(changes), color=style.colour.light, linestyle=style.line)
    axis.axvline(_position_of_no_change(measure), color=INK.light, linewidth=1)
    axis.set_title("distribution over users")
    axis.set_ylabel("share of users, %")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    axis.set_xlabel(change_label(measure, baseline, short=True))
    if measure == "loss":
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        _format_factors(axis.xaxis, low, high)


def _paint_against_data(axis: Axes, *, entry: Entry, gains: Sequence[Gain], style: Style, baseline: Entry) -> None:
    """Draw a point for each user: amount of training data (across) and change against the baseline (up).

    Args:
        axis: The axes to paint on.
        entry: Runs of one method with the same recipe and different seeds.
        gains: Change of each of its users against the baseline.
        style: Colour and marker of the points.
        baseline: The baseline, whose first run records the amounts.
    """
    first_run = baseline.first
    amounts, changes = [], []
    for gain in gains:
        amount = first_run.amounts.get(gain.user, 0)
        if amount > 0:
            amounts.append(amount)
            changes.append(_to_axis(gain.measure, gain.change.mean))
    axis.plot(
        amounts, changes, linestyle="", marker=style.marker or "o", markersize=3.5, alpha=0.6, color=style.colour.light
    )
    axis.axhline(_position_of_no_change(first_run.measure), color=INK.light, linewidth=1)
    axis.set_title(f"{short(entry.label)} and amount of data")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(f"training {first_run.unit} of the user")
    axis.set_ylabel(change_label(first_run.measure, baseline.label, short=True))
    if first_run.measure == "loss":
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        _format_factors(axis.yaxis, low, high)


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
        component_ids: Numbers of the run's components in the order of the columns, such as ``(2, 0, 1)`` if the first
            cluster uses component 2 after the last round.
        weights: Weights, of shape (evaluation, user, component); each row sums to 1.
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
    component_ids: tuple[int, ...]
    weights: np.ndarray
    component: str = "component"
    entropy: tuple[float, ...] | None = None
    mismatch: tuple[float, ...] | None = None

    @property
    def learned(self) -> bool:
        """True if any user mixes several components; with optimal routing each has one component from the start."""
        return bool((self.weights.max(-1) < 1).any())

    @cached_property
    def rand_index(self) -> tuple[float, ...] | None:
        """Adjusted Rand index of each user's heaviest component against the true clusters, at each evaluation.

        None if the true clusters are unknown.
        """
        if self.clusters is None:
            return None
        return tuple(adjusted_rand_index(self.clusters, weights.argmax(1).tolist()) for weights in self.weights)


def read_mixtures(folder: Path) -> Mixtures | None:
    """Read from a run's events how each user weighted the components (adaptor sets or models) that it mixes.

    Args:
        folder: Run folder.

    Returns:
        The weights at each evaluation; None if users of this method do not mix components.
    """
    events = list(read_events(folder))
    start = next((event for event in events if event["event"] == "start"), None)
    evaluations = [event for event in events if event["event"] == "evaluation" and "mixtures" in event]
    if start is None or not evaluations:
        return None
    last = evaluations[-1]
    # In a federation users can miss an evaluation or keep their results private; they are left out.
    users = [user for user in last["mixtures"] if all(user in event["mixtures"] for event in evaluations)]
    if not users:
        return None

    clusters: tuple[int, ...] | None = None
    cluster_by_user: dict[str, int] | None = last.get("clusters")  # the true clusters, if they are known
    if cluster_by_user is not None:
        users = sorted(users, key=lambda user: cluster_by_user[user])
        clusters = tuple(cluster_by_user[user] for user in users)
    # Of shape (evaluation, user, component).
    weights = np.array([[event["mixtures"][user] for user in users] for event in evaluations])
    component_ids = order_by_cluster(weights[-1], clusters)
    return Mixtures(
        method=start["method"],
        seed=start["seed"],
        rounds=tuple(event["round"] for event in evaluations),
        users=tuple(users),
        clusters=clusters,
        component_ids=component_ids,
        weights=weights[:, :, list(component_ids)],
        component=last.get("component", "component"),
        entropy=_values_of(evaluations, "router_entropy_nats"),
        mismatch=_values_of(evaluations, "aggregation_mismatch"),
    )


def _values_of(events: Sequence[dict[str, Any]], key: str) -> tuple[float, ...] | None:
    """Return the value of ``key`` in each event, in order; None if one of the events does not have it."""
    if not all(key in event for event in events):
        return None
    return tuple(event[key] for event in events)


def order_by_cluster(mixture: np.ndarray, clusters: Sequence[int] | None) -> tuple[int, ...]:
    """Return the components in the order of the clusters that use them: ``(2, 0, 1)`` if cluster 0 uses component 2.

    Each cluster gets another component, so that the total weight of users on their clusters' components is the largest
    (linear sum assignment). The remaining components follow, largest total weight first.

    Args:
        mixture: Weights, of shape (user, component).
        clusters: True cluster of each user; None if unknown.
    """
    matched: list[int] = []
    if clusters is not None:
        cluster_of_user = np.array(clusters)
        weights_of_clusters = [mixture[cluster_of_user == cluster].sum(0) for cluster in sorted(set(clusters))]
        cluster_indices, components = linear_sum_assignment(np.stack(weights_of_clusters), maximize=True)
        matched = [int(components[i]) for i in np.argsort(cluster_indices)]
    total_weights = mixture.sum(0)
    unmatched = [component for component in range(mixture.shape[1]) if component not in matched]
    unmatched.sort(key=lambda component: (-total_weights[component], component))
    return (*matched, *unmatched)


def adjusted_rand_index(first_partition: Sequence[Hashable], second_partition: Sequence[Hashable]) -> float:
    """Return the similarity of two partitions of the same items: 1 for equal ones, about 0 for unrelated ones.

    It is ``(together - expected) / (mean - expected)``, where 0 / 0 counts as 1 (Hubert and Arabie, 1985). All three
    are numbers of pairs of items:

    - together: pairs that are in one part in both partitions
    - expected: number of such pairs that is expected by chance
    - mean: pairs that are in one part in a partition, as the mean of both partitions
    """
    together = _num_pairs(Counter(zip(first_partition, second_partition, strict=True)))
    in_first, in_second = _num_pairs(Counter(first_partition)), _num_pairs(Counter(second_partition))
    mean = (in_first + in_second) / 2
    all_pairs = comb(len(first_partition), 2)
    expected = in_first * in_second / all_pairs if all_pairs else 0.0
    if mean == expected:
        return 1.0
    return (together - expected) / (mean - expected)


def _num_pairs(sizes: Counter[object]) -> int:
    """Return the number of pairs of items that are in the same part, from the sizes of all parts."""
    return sum(comb(size, 2) for size in sizes.values())


# -------------------------------------------------------------------- mixtures


def mixtures_figure(mixtures: Mixtures) -> Figure:
    """Return heat maps of users (down) x components (across) at up to :data:`MAX_SNAPSHOTS` evaluations.

    Weight 1 is solid and weight 0 is transparent, so that the figure suits light and dark pages.
    """
    snapshots = _snapshot_indices(len(mixtures.rounds))  # such as evaluations [0, 2, 4]
    num_components = len(mixtures.component_ids)

    def paint(figure: Figure, axes: list[Axes]) -> None:
        """Paint one heat map for each snapshot, and the colour bar."""
        for axis, snapshot in zip(axes, snapshots, strict=True):
            axis.imshow(mixtures.weights[snapshot], vmin=0, vmax=1, cmap=_SHADES, aspect="auto", interpolation="none")
            axis.set_title(_snapshot_title(mixtures, snapshot))
            axis.set_xticks(range(num_components), [str(name) for name in mixtures.component_ids])
            if num_components > 10:  # labels of two digits would overlap horizontally
                axis.tick_params(axis="x", labelrotation=90, labelsize=min(8.0, 110 / num_components))
            axis.set_xlabel(mixtures.component)
            axis.grid(visible=False)
            is_leftmost = snapshot == snapshots[0]
            _mark_clusters(axis, mixtures, has_labels=is_leftmost)
        figure.suptitle(f"{mixtures.method}, seed {mixtures.seed}: each user's mixture", x=0.01, ha="left")
        bar = figure.colorbar(axes[-1].images[0], ax=axes, label="weight", shrink=0.8)
        assert bar.solids is not None
        bar.solids.set_rasterized(True)  # seams show between hundreds of translucent vector strips

    names_and_colour_bar, margin, column = 1.7, 0.6, 0.22  # widths in inches
    width = names_and_colour_bar + len(snapshots) * (margin + column * num_components)
    width = min(14.0, max(4.4, width))  # 4.4 has space for the title
    return draw(1, len(snapshots), (width / len(snapshots), 3.4), paint)


def _snapshot_indices(num_evaluations: int) -> list[int]:
    """Return the shown evaluations at equal distances, with the first and the last: ``[0, 2, 4, 6, 8, 10]`` of 11."""
    num_snapshots = min(num_evaluations, MAX_SNAPSHOTS)
    if num_snapshots == 1:
        return [0]
    last_evaluation, last_snapshot = num_evaluations - 1, num_snapshots - 1
    return [round(number * last_evaluation / last_snapshot) for number in range(num_snapshots)]


def _snapshot_title(mixtures: Mixtures, evaluation_index: int) -> str:
    """Return the title of a heat map: the round of the evaluation and the adjusted Rand index, if it is known."""
    title = f"round {mixtures.rounds[evaluation_index]}"
    if mixtures.rand_index is None:
        return title
    return f"{title}\nARI {mixtures.rand_index[evaluation_index]:.2f}"


def _mark_clusters(axis: Axes, mixtures: Mixtures, *, has_labels: bool) -> None:
    """Draw lines between the true clusters and label them at their centres; without clusters label each user.

    Args:
        axis: The axes of a heat map, with a row for each user.
        mixtures: The mixtures, whose users are sorted by cluster.
        has_labels: Whether the heat map has labels.
    """
    if mixtures.clusters is None:
        row_labels = list(mixtures.users)
    else:
        row_labels = [f"cluster {cluster}" for cluster in mixtures.clusters]  # the same for users of one cluster
    # First row of each cluster. Without clusters every row has its own label, and so is a start.
    starts = [row for row, label in enumerate(row_labels) if row == 0 or row_labels[row - 1] != label]
    if mixtures.clusters is not None:
        for start in starts[1:]:
            axis.axhline(start - 0.5, color=INK.light, linewidth=0.8)
    if not has_labels or len(starts) > _MOST_NAMES:
        axis.set_yticks([])
        return
    ends = [*starts[1:], len(row_labels)]
    centres = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    axis.set_yticks(centres, [short(row_labels[start]) for start in starts])


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

    Bands are standard deviations over seeds. Of many users the best and the worst have panels.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        start: Include the first evaluation of trained runs; without it late differences are visible.
        measure: Name of a measure, such as "accuracy"; empty for the measure by which methods are compared.
    """
    measure = measure or entries[0].first.measure
    title_by_user = choose_users(entries, MAX_PANELS)
    num_users = len(entries[0].first.users)
    over_users = f"over {num_users} users" if num_users > len(title_by_user) else "over users"

    curves_by_name: list[tuple[str, list[Curve]]] = []  # of each panel: a mean or a user, and a curve for each entry
    mean_curves = [_shown_curve(entry, None, measure, start=start) for entry in entries]
    curves_by_name.append((f"mean {over_users}", mean_curves))
    if measure == "perplexity":
        geometric_curves = [_shown_curve(entry, None, measure, geometric=True, start=start) for entry in entries]
        curves_by_name.append((f"geometric mean {over_users}", geometric_curves))
    titles = [name for name, _ in curves_by_name]
    for user, title in title_by_user.items():
        curves_by_name.append((user, [_shown_curve(entry, user, measure, start=start) for entry in entries]))
        titles.append(short(title))

    painters: list[Callable[[Axes], None]] = []
    for (_, curves), title in zip(curves_by_name, titles, strict=True):
        painters.append(
            partial(_paint_curves_panel, entries=entries, curves=curves, title=title, start=start, measure=measure)
        )
    has_bands = any(value.std for _, curves in curves_by_name for curve in curves for value in curve.values)
    return Panels(
        painters=painters,
        columns=min(4, len(painters)),
        size=(2.9, 2.45),
        sheet=_curves_sheet(entries, curves_by_name),
        legend=method_keys(entries),
        x_label="local iterations",
        y_label=axis_label(measure),
        note=f"bands: {DEVIATION}" if has_bands else "",
    )


def method_keys(entries: Sequence[Entry]) -> list[Key]:
    """Return the legend of entries: for each a line in its colour, style and marker, and its label."""
    styles_of_entries = styles([entry.method for entry in entries])
    return [(_legend_line(style), entry.label) for style, entry in zip(styles_of_entries, entries, strict=True)]


def _shown_curve(entry: Entry, user: str | None, measure: str, *, geometric: bool = False, start: bool) -> Curve:
    """Return a learning curve (:func:`learning_curve`) without its point before training, unless ``start`` is set."""
    curve = learning_curve(entry, user, measure, geometric=geometric)
    return curve if start else _without_start(curve)


def _curves_sheet(
    entries: Sequence[Entry], curves_by_name: Sequence[tuple[str, Sequence[Curve]]]
) -> list[list[object]]:
    """Return a header and a row for every point of the learning curves.

    Args:
        entries: Entries, each the runs of one recipe with different seeds.
        curves_by_name: Name of each panel (a user or a mean over users), and its curves, one for each entry.
    """
    rows: list[list[object]] = [["of", "method", "local_iterations", "mean_over_seeds", "std_over_seeds"]]
    for name, curves in curves_by_name:
        for entry, curve in zip(entries, curves, strict=True):
            for iterations, value in zip(curve.iterations, curve.values, strict=True):
                rows.append([name, entry.label, iterations, value.mean, value.std])
    return rows


def _paint_curves_panel(
    axis: Axes, *, entries: Sequence[Entry], curves: Sequence[Curve], title: str, start: bool, measure: str
) -> None:
    """Paint the curves of one user, or of a mean over users; entries that do not train are horizontal lines.

    Args:
        axis: The axes to paint on.
        entries: Entries, each the runs of one recipe with different seeds.
        curves: Learning curve of each entry.
        title: Title of the panel.
        start: Whether the curves include the first evaluation.
        measure: Name of the measure of the results, such as "perplexity".
    """
    axis.set_title(title)
    values = []
    for curve, entry in zip(curves, entries, strict=True):
        if entry.trained:
            values += [value.mean for value in curve.values]
    has_log_axis = _needs_log_axis(values, measure, start)
    styles_of_entries = styles([entry.method for entry in entries])
    for curve, style, entry in zip(curves, styles_of_entries, entries, strict=True):
        if entry.trained:
            _paint_curve(axis, curve, style, has_log_axis=has_log_axis)
        elif curve.values:
            constant = curve.values[0].mean
            values.append(constant)
            axis.axhline(constant, color=style.colour.light, linestyle=style.line)
    axis.yaxis.set_major_formatter(_tick_formatter(measure))
    if has_log_axis:
        set_log_axis(axis, values, measure)


def _tick_formatter(measure: str) -> FuncFormatter:
    """Return a formatter of ticks that show a measure."""
    return FuncFormatter(lambda value, _: tick(value, measure))


def _needs_log_axis(values: Sequence[float], measure: str, start: bool) -> bool:
    """Return whether the largest value is over 4 times the smallest, so that a linear axis would hide differences.

    Accuracies always have a linear axis. Perplexities have one if the first evaluation is not shown.

    Args:
        values: The results that the panel shows.
        measure: Name of the measure of these results, such as "perplexity".
        start: Whether they include the first evaluation, which is far from the others.
    """
    if not values or MEASURES[measure] == "higher":
        return False
    if not start and measure != "loss":
        return False
    return 0 < 4 * min(values) < max(values)


def set_log_axis(axis: Axes, values: Sequence[float], measure: str, margin: float = 1.6) -> None:
    """Set a logarithmic y axis whose limits depend on the values, not on the bands around them.

    Args:
        axis: The axes to paint on.
        values: The values that the axis must show.
        measure: Name of the measure of these results, such as "perplexity".
        margin: Factor between the smallest value and the lower limit, and the largest and the upper limit.
    """
    low, high = min(values), max(values)
    axis.set_yscale("log")
    axis.set_ylim(low / margin, high * margin)
    axis.yaxis.set_major_formatter(_tick_formatter(measure))
    minor_labels_overlap = high > 1000 * low
    if minor_labels_overlap:
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: sparse_tick(value, measure)))


def _without_start(curve: Curve) -> Curve:
    """Return a curve without the evaluation before training."""
    points = [
        (iterations, value)
        for iterations, value in zip(curve.iterations, curve.values, strict=True)
        if iterations > 0  # local steps before the evaluation
    ]
    return Curve(iterations=tuple(x for x, _ in points), values=tuple(value for _, value in points))


def _paint_curve(axis: Axes, curve: Curve, style: Style, *, has_log_axis: bool) -> None:
    """Draw a curve with a band of one standard deviation over seeds.

    The band is drawn as high below the mean as above it. Its top is ``mean + deviation``; its bottom is
    ``mean - deviation``, or ``mean^2 / top`` on a logarithmic axis.

    Args:
        axis: The axes to paint on.
        curve: Mean and standard deviation over seeds, by local iterations.
        style: Colour, line style and marker.
        has_log_axis: Whether the axis of values is logarithmic.
    """
    means = [value.mean for value in curve.values]
    colour = style.colour.light
    marker = style.marker if len(means) <= 12 else ""  # more markers would hide the line
    axis.plot(curve.iterations, means, color=colour, linestyle=style.line, marker=marker)
    if any(value.std for value in curve.values):
        tops = [value.mean + (value.std or 0) for value in curve.values]
        if has_log_axis:
            bottoms = [mean * mean / top for mean, top in zip(means, tops, strict=True)]
        else:
            bottoms = [2 * mean - top for mean, top in zip(means, tops, strict=True)]
        axis.fill_between(curve.iterations, bottoms, tops, color=colour, alpha=0.18, linewidth=0)


# -------------------------------------------------------------------- bytes


def bytes_figure(entries: Sequence[Entry]) -> Figure:
    """Return a figure of mean test results at the end against the bytes that all users uploaded."""
    return bytes_panels(entries).figure()


def bytes_panels(entries: Sequence[Entry]) -> Panels:
    """Return panels of final test results against uploaded bytes, with a point for each trained entry.

    One panel has the mean over users; for perplexities, a second one has the geometric mean.
    """
    measure = entries[0].first.measure
    mean_names = ["mean", "geometric mean"] if measure == "perplexity" else ["mean"]
    trained_entries = [entry for entry in entries if entry.trained]
    rows: list[list[object]] = [["of", "method", "upload_bytes_in_total", "mean_over_seeds", "std_over_seeds"]]
    has_whiskers = False
    for mean_name in mean_names:
        for entry in trained_entries:
            result = final_result(entry, geometric=mean_name == "geometric mean")
            if result is None:  # not finite
                continue
            rows.append([mean_name, entry.label, cost(entry).upload_bytes, result.mean, result.std])
            if result.std:
                has_whiskers = True
    largest = max((cost(entry).upload_bytes for entry in entries), default=0)
    _, unit_name = byte_unit(largest)
    return Panels(
        painters=[partial(_paint_bytes_panel, entries=entries, mean_name=mean_name) for mean_name in mean_names],
        columns=len(mean_names),
        size=(4.2, 3.0),
        sheet=rows,
        x_label=f"uploaded by all users over the run, {unit_name}",
        y_label=axis_label(measure),
        note=f"whiskers: {DEVIATION}" if has_whiskers else "",
    )


def _paint_bytes_panel(axis: Axes, *, entries: Sequence[Entry], mean_name: str) -> None:
    """Paint a scatter plot of the mean test result (y) against uploaded bytes (x), one point per entry that trains.

    Args:
        axis: The axes to paint on.
        entries: Entries, each the runs of one recipe with different seeds.
        mean_name: Which mean over users: ``mean`` or ``geometric mean``.
    """
    measure = entries[0].first.measure
    largest = max((cost(entry).upload_bytes for entry in entries), default=0)
    unit, _ = byte_unit(largest)
    points = []
    for entry, style in zip(entries, styles([entry.method for entry in entries]), strict=True):
        result = final_result(entry, geometric=mean_name == "geometric mean")
        if result is None or not entry.trained:  # None if it is not finite
            continue
        uploaded = cost(entry).upload_bytes / unit
        axis.errorbar(uploaded, result.mean, yerr=result.std, fmt=style.marker, color=style.colour.light, markersize=7)
        points.append((uploaded, result.mean, entry.label))
    axis.set_title(f"{mean_name} over users")
    axis.margins(y=0.2)
    right_end = largest / unit or 1.0  # 1 if nothing is uploaded
    axis.set_xlim(-0.04 * right_end, 1.4 * right_end)  # has space for labels on the right
    axis.yaxis.set_major_formatter(_tick_formatter(measure))
    means = [mean for _, mean, _ in points]
    needs_log_axis = measure == "loss" and bool(means) and 0 < 10 * min(means) < max(means)
    if needs_log_axis:
        set_log_axis(axis, means, measure, margin=3.0)  # has space for labels
    figure = axis.figure
    assert isinstance(figure, Figure)
    label_points(figure, axis, points)
