"""Who gained and who was harmed: a bar for each user, and for a population the distribution of all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from comingle.reports.canvas import Panels, short
from comingle.reports.colours import INK, PAPER, Style, styles
from comingle.reports.extremes import extremes
from comingle.reports.runs import Entry
from comingle.reports.series import Gain, compared
from comingle.tables.measures import change_label, is_worse, sparse

MAX_BARS = 60
"""How many bars a figure has; the tables have all users."""
PALE = 0.4
"""How strong the bar of a level result is."""

Rows = Sequence[tuple[Entry, Sequence[Gain]]]


def users_figure(entries: Sequence[Entry], baseline: Entry) -> Figure | None:
    """Per user and entry a bar: the change of the test result against ``baseline``; None where nothing compares."""
    panels = users_panels(entries, baseline)
    return None if panels is None else panels.figure()


def users_panels(entries: Sequence[Entry], baseline: Entry, width: float = 8.2) -> Panels | None:
    """One panel with a bar for each user and entry, ``width`` inches wide.

    None where nothing can be compared. Of too many users the best and the worst have bars; the numbers are of all.
    """
    rows = compared(entries, baseline)
    if not rows:
        return None
    looks = _looks(entries)
    shown = extremes(entries, bars_room(rows), baseline)
    measure = baseline.first.measure
    return Panels(
        paint=[partial(_users, rows=rows, shown=shown, looks=looks, measure=measure)],
        columns=1,
        size=(width, 1.1 + 0.17 * len(shown) * (len(rows) + 0.8)),
        sheet=_gain_sheet(rows, baseline),
        keys=[(Patch(color=looks[entry.label].colour.light), entry.label) for entry, _ in rows],
        below=change_label(measure, baseline.label, short=width < 6),
    )


def bars_room(rows: Sequence[Any]) -> int:
    """How many users have a bar, where there are so many entries."""
    return max(1, MAX_BARS // len(rows))


def _looks(entries: Sequence[Entry]) -> dict[str, Style]:
    every = styles([entry.method for entry in entries])
    return {entry.label: style for entry, style in zip(entries, every, strict=True)}


def _gain_sheet(rows: Rows, baseline: Entry) -> list[list[object]]:
    """Every user, entry by entry, best first."""
    unit = baseline.first.unit
    head = ["method", "against", "user", f"train_{unit}", "change", "std_over_seeds", "low_95", "high_95", "verdict"]
    sheet: list[list[object]] = [[*head]]
    for entry, gains_of_entry in rows:
        for gain in gains_of_entry:
            low, high = gain.interval or (None, None)
            amount, change = baseline.first.amounts.get(gain.user), gain.change
            names = [entry.label, baseline.label, gain.user, amount]
            sheet.append([*names, change.mean, change.std, low, high, gain.verdict])
    return sheet


def _users(axis: Axes, *, rows: Rows, shown: dict[str, str], looks: dict[str, Style], measure: str) -> None:
    height = 0.8 / len(rows)
    for number, (entry, gains_of_entry) in enumerate(rows):
        by_user = {gain.user: gain for gain in gains_of_entry}
        _bars(axis, list(shown), by_user, looks[entry.label], (number + 0.5) * height - 0.4, height)
    axis.axvline(_from(measure), color=INK.light, linewidth=1)
    if measure == "loss":
        axis.set_xscale("log")
        _multiples(axis.xaxis, *axis.get_xlim())
    axis.set_yticks(range(len(shown)), [short(name, 22) for name in shown.values()])
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")


def _bars(
    axis: Axes, users: Sequence[str], by_user: dict[str, Gain], style: Style, offset: float, height: float
) -> None:
    have = [(i, by_user[user]) for i, user in enumerate(users) if user in by_user]
    places = [i + offset for i, _ in have]
    ends = [_end(g, g.change.mean) for _, g in have]
    # Hatched where it is worse, which is seen without colour and without looking for the zero; pale where it is level.
    for place, end, (_, gain) in zip(places, ends, have, strict=True):
        start = _from(gain.measure)
        (bar,) = axis.barh(
            place, end - start, height * 0.92, left=start, color=style.colour.light, edgecolor=PAPER.light, linewidth=0
        )
        bar.set_alpha(PALE if gain.verdict == "level" else 1.0)
        bar.set_hatch("////" if gain.verdict != "level" and is_worse(gain.change.mean, gain.measure) else "")
    if any(g.change.std for _, g in have):
        spreads = [[_end(g, g.change.mean + sign * (g.change.std or 0.0)) for _, g in have] for sign in (-1, 1)]
        below, above = ([abs(end - to) for end, to in zip(ends, side, strict=True)] for side in spreads)
        axis.errorbar(ends, places, xerr=[below, above], fmt="none", ecolor=INK.light, elinewidth=0.9, capsize=2)


def _from(measure: str) -> float:
    """Where no change is: losses are shown as multiples."""
    return 1.0 if measure == "loss" else 0.0


def _end(gain: Gain, change: float) -> float:
    return 10**change if gain.measure == "loss" else change


def _multiples(axis: Axis, low: float, high: float) -> None:
    """Ticks of a logarithmic axis as factors."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"×{value:,.12g}"))
    crowded = high > 30 * low
    axis.set_minor_formatter(NullFormatter() if crowded else FuncFormatter(_multiple))


def _multiple(value: float, _: Any) -> str:
    ticks = sparse(value, "loss")
    return f"×{ticks}" if ticks else ""


# -------------------------------------------------------------------- populations


def population_panels(entries: Sequence[Entry], baseline: Entry) -> Panels | None:
    """How the changes of all users are distributed, and for each entry the change against a user's amount of data."""
    rows = compared(entries, baseline)
    if not rows:
        return None
    measure, amounts = baseline.first.measure, baseline.first.amounts
    looks = _looks(entries)
    told = [entry for entry in rows if amounts]
    return Panels(
        paint=[
            partial(_distribution, rows=rows, looks=looks, measure=measure, baseline=baseline.label),
            *(
                partial(_against_data, entry=entry, gains=gains_of_entry, style=looks[entry.label], baseline=baseline)
                for entry, gains_of_entry in told
            ),
        ],
        columns=min(3, 1 + len(told)),
        size=(3.9, 2.9),
        sheet=_gain_sheet(rows, baseline),
        keys=[(_legend_line(looks[entry.label]), entry.label) for entry, _ in rows],
    )


def _legend_line(style: Style) -> Line2D:
    return Line2D([], [], color=style.colour.light, linestyle=style.line, marker=style.marker)


def _distribution(axis: Axes, *, rows: Rows, looks: dict[str, Style], measure: str, baseline: str) -> None:
    """The share of users (up) whose change is at most so much (across)."""
    for entry, gains_of_entry in rows:
        ends = np.sort([_end(gain, gain.change.mean) for gain in gains_of_entry])
        style = looks[entry.label]
        axis.ecdf(ends, color=style.colour.light, linestyle=style.line)
    axis.axvline(_from(measure), color=INK.light, linewidth=1)
    axis.set_title("distribution over users")
    axis.set_ylabel("share of users, %")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    axis.set_xlabel(change_label(measure, baseline, short=True))
    if measure == "loss":
        axis.set_xscale("log")
        _multiples(axis.xaxis, *axis.get_xlim())


def _against_data(axis: Axes, *, entry: Entry, gains: Sequence[Gain], style: Style, baseline: Entry) -> None:
    """A point for each user."""
    first = baseline.first
    have = [gain for gain in gains if first.amounts.get(gain.user, 0) > 0]
    across, up = [first.amounts[gain.user] for gain in have], [_end(gain, gain.change.mean) for gain in have]
    axis.plot(across, up, linestyle="", marker=style.marker or "o", markersize=3.5, alpha=0.6, color=style.colour.light)
    axis.axhline(_from(first.measure), color=INK.light, linewidth=1)
    axis.set_title(f"{short(entry.label)} and amount of data")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(f"training {first.unit} of the user")
    axis.set_ylabel(change_label(first.measure, baseline.label, short=True))
    if first.measure == "loss":
        axis.set_yscale("log")
        _multiples(axis.yaxis, *axis.get_ylim())
