"""The learning curve of a run as one inline SVG, without matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from comingle.tables.measures import rule
from comingle.tables.run_tables import users_with_column
from comingle.utils.records import measure_of, number
from comingle.utils.terminal import printable

WIDTH, HEIGHT = 480, 200
"""Size of the SVG in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 12, 28

Curve = list[tuple[int, float | None]]
"""A round and the measure after it, in the order of rounds; None where the measure is not finite."""


def curve_svg(events: Sequence[dict[str, Any]]) -> str:
    """Return the test measure by round as an SVG: the mean over users, and each user of at most 8.

    Perplexities have a logarithmic axis. Values that are not finite interrupt their line. Lines of users have the
    user's name as tooltip, escaped.

    Args:
        events: a run's events; only evaluations are read.

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
    by_user: dict[str, Curve] = {
        name: [(e["round"], e["users"].get(name, {}).get(f"test_{measure}")) for e in evaluations]
        for name in users_with_column(dict.fromkeys(name for event in evaluations for name in event["users"]))
    }
    return _draw(mean, by_user, measure)


def _draw(mean: Curve, by_user: Mapping[str, Curve], measure: str) -> str:
    known = [value for curve in (mean, *by_user.values()) for _, value in curve if value is not None]
    low, high, last = min(known), max(known), mean[-1][0]
    scale = math.log if measure == "perplexity" else float

    def place(round_number: int, value: float) -> tuple[float, float]:
        across = round_number / last if last else 0.5
        up = (scale(value) - scale(low)) / (scale(high) - scale(low)) if scale(high) > scale(low) else 0.5
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    def line(curve: Curve, name: str, style: str) -> str:
        parts = [[place(*point) for point in part] for part in _finite_parts(curve)]
        drawn = "".join(_polyline(part) if len(part) > 1 else _dot(part[0]) for part in parts)
        return f"<g {style}><title>{escape(printable(name))}</title>{drawn}</g>"

    left, bottom, right = _LEFT, HEIGHT - _BOTTOM, WIDTH - _RIGHT
    label = escape(f"test {measure} by round ({rule(measure)})")
    ticks = [_text(left - 6, place(0, low)[1] + 4, "end", number(low, measure))]
    if high > low:
        ticks.append(_text(left - 6, place(0, high)[1] + 4, "end", number(high, measure)))
    if last:
        ticks += [_text(left, HEIGHT - 8, "middle", "0"), _text(right, HEIGHT - 8, "end", str(last))]
    ticks.append(_text((left + right) / 2, HEIGHT - 8, "middle", "round; bold: mean over users"))
    users = "".join(line(curve, name, 'stroke-opacity="0.4" fill-opacity="0.4"') for name, curve in by_user.items())
    average = line(mean, "mean", 'stroke-width="2.5"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'style="max-width: {WIDTH}px; width: 100%; font: 12px sans-serif" fill="currentColor" stroke="none">'
        f'<path d="M{left} {_TOP}V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity="0.3"/>'
        f"{''.join(ticks)}{users}{average}</svg>"
    )


def _finite_parts(curve: Curve) -> list[list[tuple[int, float]]]:
    parts: list[list[tuple[int, float]]] = [[]]
    for round_number, value in curve:
        if value is None:
            parts.append([])
        else:
            parts[-1].append((round_number, value))
    return [part for part in parts if part]


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    told = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{told}" fill="none" stroke="currentColor"/>'


def _dot(point: tuple[float, float]) -> str:
    return f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3"/>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
