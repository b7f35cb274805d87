"""The figures of runs: learning curves, and bytes; those of scores and of gains stand beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from comingle.reports.canvas import Key, Panels, draw, label_points, save, short
from comingle.reports.colours import Style, styles
from comingle.reports.extremes import MAX_PANELS, extremes
from comingle.reports.gains import users_figure
from comingle.reports.heatmaps import scores_figure
from comingle.reports.runs import Entry
from comingle.reports.series import Curve, cost, final, learning_curve
from comingle.tables.measures import axis_label, byte_unit, sparse, tick
from comingle.utils.records import MEASURES

__all__ = ["bytes_figure", "curves_figure", "draw", "save", "scores_figure", "users_figure"]

# -------------------------------------------------------------------- learning curves (Figures 5 to 7, 9, 11 to 13)


def curves_figure(entries: Sequence[Entry], *, start: bool = True, measure: str = "") -> Figure:
    """Test results against local iterations, as :func:`curves_panels` has them."""
    return curves_panels(entries, start=start, measure=measure).figure()


def curves_panels(entries: Sequence[Entry], *, start: bool = True, measure: str = "") -> Panels:
    """Test results against local iterations: the mean over users, then each user; bands are deviations over seeds.

    They are perplexities, or whatever models are compared by, unless ``measure`` says otherwise; of perplexities there
    is the geometric mean too. ``start=False`` leaves out the first evaluation of trained runs, so that late differences
    can be seen. Of a population there are the best and the worst users.
    """
    measure = measure or entries[0].first.measure
    users = extremes(entries, MAX_PANELS)
    count = len(entries[0].first.users)
    over = f"over {count} users" if count > len(users) else "over users"
    which = [(None, False, f"mean {over}")]
    which += [(None, True, f"geometric mean {over}")] if measure == "perplexity" else []
    which += [(user, False, short(title)) for user, title in users.items()]
    curves = [[_shown(entry, user, measure, geometric, start) for entry in entries] for user, geometric, _ in which]
    return Panels(
        paint=[
            partial(_curves_panel, entries=entries, curves=curve, title=title, start=start, measure=measure)
            for (_, _, title), curve in zip(which, curves, strict=True)
        ],
        columns=min(4, len(which)),
        size=(2.9, 2.45),
        sheet=_curves_sheet(entries, [user or title for user, _, title in which], curves),
        keys=method_keys(entries),
        below="local iterations",
        left=axis_label(measure),
    )


def method_keys(entries: Sequence[Entry]) -> list[Key]:
    """The lines of entries, and their names."""
    looks = styles([entry.method for entry in entries])
    lines = [Line2D([], [], color=s.colour.light, linestyle=s.line, marker=s.marker) for s in looks]
    return [(line, entry.label) for line, entry in zip(lines, entries, strict=True)]


def _shown(entry: Entry, user: str | None, measure: str, geometric: bool, start: bool) -> Curve:
    curve = learning_curve(entry, user, measure, geometric=geometric)
    return curve if start else _without_start(curve)


def _curves_sheet(
    entries: Sequence[Entry], names: Sequence[str], curves: Sequence[Sequence[Curve]]
) -> list[list[object]]:
    rows: list[list[object]] = [["of", "method", "local_iterations", "mean_over_seeds", "std_over_seeds"]]
    for name, by_entry in zip(names, curves, strict=True):
        for entry, curve in zip(entries, by_entry, strict=True):
            points = zip(curve.iterations, curve.values, strict=True)
            rows += [[name, entry.label, at, value.mean, value.std] for at, value in points]
    return rows


def _curves_panel(
    axis: Axes, *, entries: Sequence[Entry], curves: Sequence[Curve], title: str, start: bool, measure: str
) -> None:
    axis.set_title(title)
    looks = styles([entry.method for entry in entries])
    trained = [entry.trained for entry in entries]
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
        logarithmic(axis, means, measure)


def _is_wide(values: Sequence[float], measure: str, start: bool) -> bool:
    """Whether small differences need a logarithmic axis: those of losses do even without the start."""
    if not values or MEASURES[measure] == "higher":
        return False
    return (start or measure == "loss") and 0 < 4 * min(values) < max(values)


def logarithmic(axis: Axes, values: Sequence[float], measure: str, room: float = 1.6) -> None:
    """Limits a factor below the lowest and above the highest value: bands must not set the scale."""
    axis.set_yscale("log")
    axis.set_ylim(min(values) / room, max(values) * room)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    crowded = max(values) > 1000 * min(values)
    axis.yaxis.set_minor_formatter(NullFormatter() if crowded else FuncFormatter(lambda v, _: sparse(v, measure)))


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


# -------------------------------------------------------------------- bytes


def bytes_figure(entries: Sequence[Entry]) -> Figure:
    """Mean test results at the end against everything that all users uploaded: left is cheap."""
    return bytes_panels(entries).figure()


def bytes_panels(entries: Sequence[Entry]) -> Panels:
    """A panel for the mean over users; of perplexities another for the geometric mean."""
    measure = entries[0].first.measure
    means = ["mean", "geometric mean"] if measure == "perplexity" else ["mean"]
    sheet: list[list[object]] = [["of", "method", "upload_bytes_in_total", "mean_over_seeds", "std_over_seeds"]]
    for mean in means:
        ends = [(entry, final(entry, geometric=mean != "mean")) for entry in entries if entry.trained]
        sheet += [[mean, e.label, cost(e).upload_bytes, end.mean, end.std] for e, end in ends if end is not None]
    _, name = byte_unit(max((cost(entry).upload_bytes for entry in entries), default=0))
    return Panels(
        paint=[partial(_bytes_panel, entries=entries, mean=mean) for mean in means],
        columns=len(means),
        size=(4.2, 3.0),
        sheet=sheet,
        below=f"uploaded by all users over the run, {name}",
        left=axis_label(measure),
    )


def _bytes_panel(axis: Axes, *, entries: Sequence[Entry], mean: str) -> None:
    measure = entries[0].first.measure
    most = max((cost(entry).upload_bytes for entry in entries), default=0)
    unit, _ = byte_unit(most)
    points = []
    for entry, style in zip(entries, styles([entry.method for entry in entries]), strict=True):
        spread = final(entry, geometric=mean != "mean")
        if spread is None or not entry.trained:
            continue
        sent = cost(entry).upload_bytes / unit
        axis.errorbar(sent, spread.mean, yerr=spread.std, fmt=style.marker, color=style.colour.light, markersize=7)
        points.append((sent, spread.mean, entry.label))
    axis.set_title(f"{mean} over users")
    axis.margins(y=0.2)
    axis.set_xlim(-0.04 * (most / unit or 1.0), 1.4 * (most / unit or 1.0))  # room for labels on the right
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    ends = [end for _, end, _ in points]
    if measure == "loss" and ends and min(ends) > 0 and max(ends) > 10 * min(ends):
        logarithmic(axis, ends, measure, room=3.0)
    figure = axis.figure
    assert isinstance(figure, Figure)
    label_points(figure, axis, points)
