"""The figures of runs: learning curves, expert scores, who gained and who was harmed, bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from comingle.records import MEASURES
from comingle.reports.canvas import draw, label_points, legend_above, save
from comingle.reports.colours import INK, PAPER, Style, layer_colours, styles
from comingle.reports.measures import axis_label, byte_unit, change_label, is_worse, tick
from comingle.reports.runs import Entry
from comingle.reports.series import Curve, Gain, compared, cost, expert_curves, final, learning_curve

__all__ = ["bytes_figure", "curves_figure", "draw", "save", "scores_figure", "users_figure"]

MAX_PANELS, MAX_BARS = 24, 60
"""How many users a figure shows; the tables have all of them."""

# -------------------------------------------------------------------- learning curves (Figures 5 to 7, 9, 11 to 13)


def curves_figure(entries: Sequence[Entry], *, start: bool = True, measure: str = "") -> Figure:
    """Test results against local iterations: the mean over users, then each user; bands are deviations over seeds.

    They are perplexities, or whatever models are compared by, unless ``measure`` says otherwise. ``start=False`` leaves
    out the first evaluation of trained runs, so that late differences can be seen.
    """
    measure = measure or entries[0].first.measure
    users = list(entries[0].first.users)
    panels: list[str | None] = [None, *users[:MAX_PANELS]]
    mean = f"mean over {len(users)} users ({MAX_PANELS} shown)" if len(users) > MAX_PANELS else "mean over users"
    columns = min(4, len(panels))

    def paint(figure: Figure, axes: list[Axes]) -> None:
        for axis, user in zip(axes, panels, strict=False):
            axis.set_title(mean if user is None else user)
            _curves_panel(axis, entries, user, start, measure)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        _outer_labels(axes, len(panels), columns, "local iterations", axis_label(measure))
        _legend(figure, [entry.label for entry in entries], styles([entry.method for entry in entries]))

    return draw(-(-len(panels) // columns), columns, (2.9, 2.45), paint)


def _curves_panel(axis: Axes, entries: Sequence[Entry], user: str | None, start: bool, measure: str) -> None:
    looks = styles([entry.method for entry in entries])
    curves = [learning_curve(entry, user, measure) for entry in entries]
    trained = [entry.trained for entry in entries]
    if not start:
        curves = [_without_start(curve) for curve in curves]
    means = [value.mean for curve, moves in zip(curves, trained, strict=True) if moves for value in curve.values]
    wide = _is_wide(means, measure, start)
    for curve, style, moves in zip(curves, looks, trained, strict=True):
        if moves:
            _line(axis, curve, style, wide)
        elif curve.values:
            means.append(curve.values[0].mean)
            axis.axhline(means[-1], color=style.colour.light, linestyle=style.line)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    if wide:
        _logarithmic(axis, means, measure)


def _is_wide(values: Sequence[float], measure: str, start: bool) -> bool:
    """Whether small differences need a logarithmic axis: those of losses do even without the start."""
    if not values or MEASURES[measure] == "higher":
        return False
    return (start or measure == "loss") and 0 < 4 * min(values) < max(values)


def _logarithmic(axis: Axes, values: Sequence[float], measure: str, room: float = 1.6) -> None:
    """Limits a factor below the lowest and above the highest value: bands must not set the scale."""
    axis.set_yscale("log")
    axis.set_ylim(min(values) / room, max(values) * room)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    crowded = max(values) > 1000 * min(values)
    axis.yaxis.set_minor_formatter(NullFormatter() if crowded else FuncFormatter(lambda v, _: _sparse(v, measure)))


def _without_start(curve: Curve) -> Curve:
    kept = [i for i, x in enumerate(curve.iterations) if x > 0]
    return Curve(iterations=tuple(curve.iterations[i] for i in kept), values=tuple(curve.values[i] for i in kept))


def _line(axis: Axes, curve: Curve, style: Style, wide: bool) -> None:
    """A curve with a band of one deviation; on a logarithmic axis, where it may not reach zero, as far down as up."""
    means = [value.mean for value in curve.values]
    colour = style.colour.light
    marker = style.marker if len(means) <= 12 else ""
    axis.plot(curve.iterations, means, color=colour, linestyle=style.line, marker=marker)
    if any(value.std for value in curve.values):
        high = [value.mean + (value.std or 0) for value in curve.values]
        low = [m * m / h if wide else 2 * m - h for m, h in zip(means, high, strict=True)]
        axis.fill_between(curve.iterations, low, high, color=colour, alpha=0.18, linewidth=0)


def _sparse(value: float, measure: str) -> str:
    """Between powers of ten only 2 and 5 are written."""
    leading = round(value / 10 ** math.floor(math.log10(value)))
    return tick(value, measure) if leading in (2, 5) else ""


def _outer_labels(axes: Sequence[Axes], used: int, columns: int, below: str, left: str) -> None:
    for number, axis in enumerate(axes[:used]):
        if number + columns >= used:
            axis.set_xlabel(below)
        if number % columns == 0:
            axis.set_ylabel(left)


def _legend(figure: Figure, labels: Sequence[str], looks: Sequence[Style]) -> None:
    handles = [Line2D([], [], color=s.colour.light, linestyle=s.line, marker=s.marker) for s in looks]
    legend_above(figure, handles, labels)


# -------------------------------------------------------------------- expert scores (Figures 4 and 10)


def scores_figure(entry: Entry) -> Figure:
    """How much each expert says in each layer over training, for every user; a deeper layer is darker.

    With at most two experts a user has one panel, as in the paper; otherwise a row with a panel for each expert.
    """
    users = {user: expert_curves(entry, user) for user in entry.first.users}
    users = {user: experts for user, experts in list(users.items())[:MAX_PANELS] if experts}
    width = max(len(experts) for experts in users.values())
    if width <= 2:
        panels = list(users.items())
        columns = min(4, len(panels))
    else:
        panels = [
            (f"{user}: {experts[i].name}", [experts[i]]) if i < len(experts) else ("", [])
            for user, experts in users.items()
            for i in range(width)
        ]
        columns = width

    def paint(figure: Figure, axes: list[Axes]) -> None:
        for axis, (title, experts) in zip(axes, panels, strict=False):
            axis.set_title(title)
            for expert in experts:
                _layers(axis, expert.layers, [c.light for c in layer_colours(expert.name, len(expert.layers))])
            axis.set_ylim(0, 1)
        for axis in [a for a, (_, experts) in zip(axes, panels, strict=False) if not experts] + axes[len(panels) :]:
            axis.set_axis_off()
        _outer_labels(axes, len(panels), columns, "local iterations", "expert score")
        longest = max(users.values(), key=len)
        _layer_legend(figure, [expert.name for expert in longest], len(longest[0].layers))

    return draw(-(-len(panels) // columns), columns, (2.9, 2.1), paint)


def _layers(axis: Axes, curves: Sequence[Curve], colours: Sequence[str]) -> None:
    for curve, colour in zip(curves, colours, strict=True):
        axis.plot(curve.iterations, [v.mean for v in curve.values], color=colour, linewidth=1.2)
        if len(curve.values) == 1:
            axis.plot(curve.iterations, [curve.values[0].mean], color=colour, marker="o")


def _layer_legend(figure: Figure, names: Sequence[str], layers: int) -> None:
    """For every expert its first and its last layer."""
    handles, labels = [], []
    for name in names:
        colours = layer_colours(name, layers)
        for layer in sorted({0, layers - 1}):
            handles.append(Line2D([], [], color=colours[layer].light, linewidth=3))
            labels.append(f"{name}, layer {layer}")
    legend_above(figure, handles, labels)


# -------------------------------------------------------------------- users


def users_figure(entries: Sequence[Entry], baseline: Entry) -> Figure | None:
    """Per user and entry a bar: the change of the test result against ``baseline``, as the measure is compared.

    None where nothing can be compared. The users whose results differ most come first where there are too many.
    """
    rows = compared(entries, baseline)
    if not rows:
        return None
    every = styles([entry.method for entry in entries])
    looks = {entry.label: style for entry, style in zip(entries, every, strict=True)}
    by_user = {user: [] for user in entries[0].first.users}
    for entry, found in rows:
        for gain in found:
            by_user[gain.user].append((entry.label, gain))
    users = sorted(by_user, key=lambda u: -max((abs(g.change.mean) for _, g in by_user[u]), default=0))
    kept = [user for user in by_user if user in set(users[: bars_room(rows)])]
    measure = baseline.first.measure

    def paint(figure: Figure, axes: list[Axes]) -> None:
        axis, height = axes[0], 0.8 / len(rows)
        for number, (entry, found) in enumerate(rows):
            _bars(axis, kept, {g.user: g for g in found}, looks[entry.label], (number + 0.5) * height - 0.4, height)
        axis.axvline(_from(measure), color=INK.light, linewidth=1)
        if measure == "loss":
            _multiples(axis)
        axis.set_yticks(range(len(kept)), kept)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_xlabel(change_label(measure, baseline.label))
        handles = [_swatch(looks[entry.label]) for entry, _ in rows]
        legend_above(figure, handles, [entry.label for entry, _ in rows])

    return draw(1, 1, (8.2, 1.1 + 0.17 * len(kept) * (len(rows) + 0.8)), paint)


def bars_room(rows: Sequence[Any]) -> int:
    """How many users have a bar, where there are so many entries."""
    return max(1, MAX_BARS // len(rows))


def _bars(axis: Axes, users: Sequence[str], found: dict[str, Gain], style: Style, offset: float, height: float) -> None:
    have = [(i, found[user]) for i, user in enumerate(users) if user in found]
    places = [i + offset for i, _ in have]
    ends = [_end(g, g.change.mean) for _, g in have]
    # Harm is hatched, so that it can be seen without colour and without looking for the zero.
    for place, end, (_, gain) in zip(places, ends, have, strict=True):
        start = _from(gain.measure)
        (bar,) = axis.barh(
            place, end - start, height * 0.92, left=start, color=style.colour.light, edgecolor=PAPER.light, linewidth=0
        )
        bar.set_hatch("////" if is_worse(gain.change.mean, gain.measure) else "")
    if any(g.change.std for _, g in have):
        spreads = [[_end(g, g.change.mean + sign * (g.change.std or 0.0)) for _, g in have] for sign in (-1, 1)]
        below, above = ([abs(end - to) for end, to in zip(ends, side, strict=True)] for side in spreads)
        axis.errorbar(ends, places, xerr=[below, above], fmt="none", ecolor=INK.light, elinewidth=0.9, capsize=2)


def _from(measure: str) -> float:
    """Where no change is: losses are shown as multiples."""
    return 1.0 if measure == "loss" else 0.0


def _end(gain: Gain, change: float) -> float:
    return 10**change if gain.measure == "loss" else change


def _multiples(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"×{value:,.12g}"))
    low, high = axis.get_xlim()
    crowded = high > 30 * low
    axis.xaxis.set_minor_formatter(NullFormatter() if crowded else FuncFormatter(_multiple))


def _multiple(value: float, _: Any) -> str:
    found = _sparse(value, "loss")
    return f"×{found}" if found else ""


def _swatch(style: Style) -> Patch:
    return Patch(color=style.colour.light)


# -------------------------------------------------------------------- bytes


def bytes_figure(entries: Sequence[Entry]) -> Figure:
    """Mean test result at the end against everything that all users uploaded: left is cheap."""
    measure = entries[0].first.measure
    most = max((cost(entry).upload_bytes for entry in entries), default=0)
    unit, name = byte_unit(most)

    def paint(figure: Figure, axes: list[Axes]) -> None:
        axis, points = axes[0], []
        for entry, style in zip(entries, styles([entry.method for entry in entries]), strict=True):
            found = final(entry)
            if found is None or not entry.trained:
                continue
            sent = cost(entry).upload_bytes / unit
            axis.errorbar(sent, found.mean, yerr=found.std, fmt=style.marker, color=style.colour.light, markersize=7)
            points.append((sent, found.mean, entry.label))
        axis.margins(y=0.2)
        axis.set_xlim(-0.04 * (most / unit or 1.0), 1.25 * (most / unit or 1.0))  # room for labels on the right
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
        ends = [end for _, end, _ in points]
        if measure == "loss" and ends and min(ends) > 0 and max(ends) > 10 * min(ends):
            _logarithmic(axis, ends, measure, room=3.0)
        axis.set_xlabel(f"uploaded by all users over the run, {name}")
        axis.set_ylabel(f"mean {axis_label(measure)}")
        label_points(figure, axis, points)

    return draw(1, 1, (6.4, 3.0), paint)
