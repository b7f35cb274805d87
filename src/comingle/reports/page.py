"""One self-contained HTML page about runs: nothing in it is loaded from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from comingle.reports import figures
from comingle.reports.colours import INK, LINE, MUTED, PAPER, Colour, expert_css, layer_colours, rgb, styles
from comingle.reports.runs import Entry, notices
from comingle.reports.series import Cost, Spread, baselines, compared, cost, expert_curves, final
from comingle.reports.tables import megabytes
from comingle.reports.tokens import TokenView, as_data


def render_page(entries: Sequence[Entry], views: Sequence[TokenView] = (), *, title: str = "comingle report") -> str:
    """The page. Text of users and names are escaped wherever they stand."""
    palette = _palette(entries)
    drawn = _Drawn({colour.light: f"var(--c{colour.light[1:]})" for colour in palette})
    users = list(entries[0].first.users)
    environment = Environment(
        loader=PackageLoader("comingle.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    first = entries[0].first
    return environment.get_template("report.html").render(
        title=title,
        base=first.base,
        users=users,
        seeds=sorted({run.seed for entry in entries for run in entry.runs}),
        rounds=max(entry.first.planned_rounds for entry in entries),
        notices=notices(entries),
        palette=palette,
        experts=expert_css(),
        channels=lambda colour: " ".join(map(str, rgb(colour))),
        results=_results(entries, users),
        curves=[
            drawn(figures.curves_figure(entries), "learning curves of all methods, from the start"),
            drawn(figures.curves_figure(entries, start=False), "learning curves of all methods, without the start"),
        ],
        gains=[found for baseline in baselines(entries) if (found := _gains(entries, baseline, drawn))],
        costs=[_cost_cells(cost(entry)) for entry in entries],
        bytes_figure=drawn(figures.bytes_figure(entries), "test perplexity against uploaded bytes"),
        scores=[
            (entry.label, drawn(figures.scores_figure(entry), f"expert scores of {entry.label}"), _score_rows(entry))
            for entry in entries
            if entry.first.routed
        ],
        views=as_data(views),
        owners=any(text.owner for view in views for text in view.texts),
    )


class _Drawn:
    """Turns figures into inline SVG, each with ids of its own."""

    def __init__(self, variables: dict[str, str]):
        self._variables, self._count = variables, 0

    def __call__(self, figure: Figure, label: str) -> Markup:
        self._count += 1
        return Markup(figures.svg(figure, f"f{self._count}", str(escape(label)), self._variables))


def _palette(entries: Sequence[Entry]) -> list[Colour]:
    """Every colour that the figures of these entries use, each once."""
    colours = [INK, MUTED, LINE, PAPER, *(style.colour for style in styles([entry.method for entry in entries]))]
    for entry in entries:
        for user in entry.first.users:
            for expert in expert_curves(entry, user):
                colours += layer_colours(expert.name, len(expert.layers))
    return list({colour.light: colour for colour in colours}.values())


def _spread(value: Spread | None, digits: int = 2) -> str:
    if value is None:
        return "not finite"
    deviation = "" if value.std is None else f" ({value.std:,.{digits}f})"
    return f"{value.mean:,.{digits}f}{deviation}"


def _results(entries: Sequence[Entry], users: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each entry; the best number of each column is marked."""
    found = {entry.label: [final(entry, user) for user in (*users, None)] for entry in entries}
    columns = list(zip(*found.values(), strict=True))
    best = [min((v.mean for v in column if v is not None), default=None) for column in columns]
    return [
        {
            "label": label,
            "cells": [(_spread(v), v is not None and v.mean == b) for v, b in zip(values, best, strict=True)],
        }
        for label, values in found.items()
    ]


def _gains(entries: Sequence[Entry], baseline: Entry, drawn: _Drawn) -> dict[str, Any] | None:
    figure = figures.users_figure(entries, baseline)
    if figure is None:
        return None
    rows = []
    for entry, found in compared(entries, baseline):
        named = {
            verdict: [f"{g.user} ({g.percent.mean:+.1f}%)" for g in found if g.verdict == verdict]
            for verdict in ("gained", "even", "harmed")
        }
        rows.append({"label": entry.label, **{key: ", ".join(names) or "nobody" for key, names in named.items()}})
    label = f"change of each user's test perplexity against {baseline.label}"
    return {"baseline": baseline.label, "figure": drawn(figure, label), "rows": rows}


def _cost_cells(found: Cost) -> list[str]:
    def or_dash(value: Any, spell: Any) -> str:
        return "–" if value is None else spell(value)

    return [
        found.label,
        str(found.rounds),
        or_dash(found.trainable_parameters, "{:,}".format),
        or_dash(found.upload_bytes_per_user_round, megabytes),
        or_dash(found.download_bytes_per_user_round, megabytes),
        megabytes(found.upload_bytes),
        megabytes(found.download_bytes),
        or_dash(found.peak_memory_bytes, lambda value: f"{value / 1e9:,.2f} GB"),
        or_dash(found.tokens_per_second, lambda value: _spread(value, 0)),
        or_dash(found.wall_seconds, lambda value: _spread(value, 0)),
        found.place,
    ]


def _score_rows(entry: Entry) -> list[tuple[str, str, list[str]]]:
    """For the table beside the picture: each user's experts with their last score in every layer."""
    return [
        (user, expert.name, [f"{curve.values[-1].mean:.2f}" for curve in expert.layers])
        for user in entry.first.users
        for expert in expert_curves(entry, user)
    ]
