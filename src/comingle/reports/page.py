"""One self-contained HTML page about runs: nothing in it is loaded from anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from comingle.records import MEASURES
from comingle.reports import figures
from comingle.reports.canvas import svg
from comingle.reports.colours import INK, LINE, MUTED, PAPER, Colour, expert_css, layer_colours, rgb, styles
from comingle.reports.measures import number, rule
from comingle.reports.mixtures import Mixtures, mixtures_figure, read_mixtures
from comingle.reports.runs import Entry, notices
from comingle.reports.series import Cost, Spread, baselines, compared, cost, expert_curves, final, measured
from comingle.reports.tables import sizes
from comingle.reports.tokens import TokenView, as_data

WIDE = 8
"""The table of results has a column for each of so many users; of more it shows the worst and the best."""
NAMED = 12
"""How many names stand in a cell."""


def render_page(entries: Sequence[Entry], views: Sequence[TokenView] = (), *, title: str = "comingle report") -> str:
    """The page. Text of users and names are escaped wherever they stand."""
    palette = _palette(entries)
    drawn = _Drawn({colour.light: f"var(--c{colour.light[1:]})" for colour in palette})
    environment = Environment(
        loader=PackageLoader("comingle.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    first = entries[0].first
    users = list(first.users)
    mixtures = [_mixtures(entry.label, found, drawn) for entry in entries if (found := _learned(entry))]
    components = {one["component"] for one in mixtures}
    return environment.get_template("report.html").render(
        title=title,
        base=first.base,
        task=first.task,
        measure=first.measure,
        rule=rule(first.measure),
        unit=first.unit,
        users=users,
        seeds=sorted({run.seed for entry in entries for run in entry.runs}),
        rounds=max(entry.first.planned_rounds for entry in entries),
        notices=notices(entries),
        palette=palette,
        experts=expert_css(),
        channels=lambda colour: " ".join(map(str, rgb(colour))),
        results=_results(entries, users),
        panels=figures.MAX_PANELS,
        curves=list(_curves(entries, drawn)),
        gains=[found for baseline in baselines(entries) if (found := _gains(entries, baseline, drawn))],
        costs=_costs([cost(entry) for entry in entries]),
        bytes_figure=drawn(figures.bytes_figure(entries), f"mean test {first.measure} against uploaded bytes"),
        mixtures=mixtures,
        component=components.pop() if len(components) == 1 else "component",
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
        return Markup(svg(figure, f"f{self._count}", str(escape(label)), self._variables))


def _palette(entries: Sequence[Entry]) -> list[Colour]:
    """Every colour that the figures of these entries use, each once."""
    colours = [INK, MUTED, LINE, PAPER, *(style.colour for style in styles([entry.method for entry in entries]))]
    for entry in entries:
        for user in entry.first.users:
            for expert in expert_curves(entry, user):
                colours += layer_colours(expert.name, len(expert.layers))
    return list({colour.light: colour for colour in colours}.values())


# -------------------------------------------------------------------- results


def _told(value: Spread | None, measure: str) -> str:
    if value is None:
        return "not finite"
    deviation = "" if value.std is None else f" ({number(value.std, measure)})"
    return f"{number(value.mean, measure)}{deviation}"


def _results(entries: Sequence[Entry], users: Sequence[str]) -> dict[str, Any]:
    """Entries x users and their mean; of many users the worst and the best, and all of them in a table beside it."""
    measure = entries[0].first.measure
    by_user = {user: [final(entry, user) for entry in entries] for user in users}
    whole = [(user, _marked([_told(v, measure) for v in found], found, measure)) for user, found in by_user.items()]
    mean = [final(entry) for entry in entries]
    columns = whole if len(users) <= WIDE else [_extreme(by_user, measure, worst=worst) for worst in (True, False)]
    columns = [*columns, ("mean", _marked([_told(v, measure) for v in mean], mean, measure))]
    rows = zip(entries, zip(*(cells for _, cells in columns), strict=True), strict=True)
    return {
        "head": [name for name, _ in columns],
        "rows": [{"label": entry.label, "cells": cells} for entry, cells in rows],
        "labels": [entry.label for entry in entries],
        "users": whole if len(users) > WIDE else [],
    }


def _extreme(by_user: dict[str, list[Spread | None]], measure: str, *, worst: bool) -> tuple[str, list[Any]]:
    """Each entry's user with the worst or the best mean over seeds."""
    pick = max if (MEASURES[measure] == "higher") != worst else min
    cells, found = [], []
    for values in zip(*by_user.values(), strict=True):
        known = {user: value for user, value in zip(by_user, values, strict=True) if value is not None}
        name = pick(known, key=lambda user: known[user].mean) if len(known) == len(values) else ""
        found.append(known.get(name))
        cells.append(f"{_told(found[-1], measure)}{' · ' if name else ''}{name}")
    return ("worst user" if worst else "best user"), _marked(cells, found, measure)


def _marked(cells: Sequence[str], found: Sequence[Spread | None], measure: str) -> list[tuple[str, bool]]:
    """Cells, and whether each is the best of them."""
    means = [value.mean for value in found if value is not None]
    best = (max if MEASURES[measure] == "higher" else min)(means, default=None)
    return [(text, value is not None and value.mean == best) for text, value in zip(cells, found, strict=True)]


def _curves(entries: Sequence[Entry], drawn: _Drawn) -> Iterator[tuple[str, Markup]]:
    """What is shown and its figure: of accuracies the losses too."""
    names = measured(entries)
    for name in names:
        of = f"{name} " if len(names) > 1 else ""
        for start, told in ((True, "from the start"), (False, "without the start, so that late differences show")):
            figure = figures.curves_figure(entries, start=start, measure=name)
            yield of + told, drawn(figure, f"test {name} of all methods during training, {told}")


def _gains(entries: Sequence[Entry], baseline: Entry, drawn: _Drawn) -> dict[str, Any] | None:
    figure = figures.users_figure(entries, baseline)
    if figure is None:
        return None
    rows = []
    pairs = compared(entries, baseline)
    for entry, found in pairs:
        named = {
            verdict: _names([f"{gain.user} ({gain.text})" for gain in found if gain.verdict == verdict], verdict)
            for verdict in ("gained", "even", "harmed")
        }
        rows.append({"label": entry.label, **named})
    label = f"each user's test {baseline.first.measure} held against that of {baseline.label}"
    return {
        "baseline": baseline.label,
        "figure": drawn(figure, label),
        "rows": rows,
        "room": figures.bars_room(pairs),
        "even": len(entries[0].runs) > 1 or any(row["even"] != "nobody" for row in rows),
    }


def _names(told: list[str], verdict: str) -> Markup:
    """The names of users, best first; of many the count, and those whom it concerns most, beginning with the first."""
    most = told[: -NAMED - 1 : -1] if verdict == "harmed" else told[:NAMED]
    shown = told if len(told) <= NAMED else most
    spans = [Markup('<span class="name">{}</span>').format(name + ",") for name in shown[:-1]]
    spans += [Markup('<span class="name">{}</span>').format(name) for name in shown[-1:]]
    names = Markup(" ").join(spans)
    if len(told) <= NAMED:
        return names or Markup("nobody")
    return Markup("{} users: {} and {} more").format(len(told), names, len(told) - NAMED)


# -------------------------------------------------------------------- costs


def _costs(found: Sequence[Cost]) -> list[list[str]]:
    """The ledger, a row for each entry; a column of bytes has one unit."""

    def bytes_of(key: str) -> list[str]:
        return sizes([getattr(one, key) for one in found])

    columns = [
        [one.label for one in found],
        [str(one.rounds) for one in found],
        ["–" if one.trainable_parameters is None else f"{one.trainable_parameters:,}" for one in found],
        bytes_of("upload_bytes_per_user_round"),
        bytes_of("download_bytes_per_user_round"),
        bytes_of("upload_bytes"),
        bytes_of("download_bytes"),
        ["–" if one.peak_memory_bytes is None else f"{one.peak_memory_bytes / 1e9:,.2f} GB" for one in found],
        [_measured(one.per_second) for one in found],
        [_measured(one.wall_seconds) for one in found],
        [one.place for one in found],
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _measured(value: Spread | None) -> str:
    if value is None:
        return "–"
    digits = 0 if value.mean >= 10 else 1
    return f"{value.mean:,.{digits}f}" + ("" if value.std is None else f" ({value.std:,.{digits}f})")


# -------------------------------------------------------------------- who mixes what


def _learned(entry: Entry) -> list[Mixtures]:
    """The mixtures of an entry's runs, where its users have learnt any."""
    found = [read_mixtures(run.folder) for run in entry.runs]
    return [one for one in found if one is not None and one.learned]


def _mixtures(label: str, found: Sequence[Mixtures], drawn: _Drawn) -> dict[str, Any]:
    first = found[0]
    users = first.clusters or [None] * len(first.users)
    return {
        "label": label,
        "component": first.component,
        "sets": first.order,
        "seed": first.seed,
        "figure": drawn(mixtures_figure(first), f"weight of each {first.component} for each user over the rounds"),
        "runs": [
            [
                str(one.seed),
                "–" if one.recovery is None else f"{one.recovery[-1]:.2f}",
                "–" if one.entropy is None else f"{one.entropy[0]:.2f} to {one.entropy[-1]:.2f}",
                "–" if one.mismatch is None else f"{one.mismatch[0]:.2f} to {one.mismatch[-1]:.2f}",
            ]
            for one in found
        ],
        "true": first.clusters is not None,
        "users": [
            (user, cluster, [f"{weight:.2f}" for weight in weights])
            for user, cluster, weights in zip(first.users, users, first.values[-1], strict=True)
        ],
    }


def _score_rows(entry: Entry) -> list[tuple[str, str, list[str]]]:
    """For the table beside the picture: each user's experts with their last score in every layer."""
    return [
        (user, expert.name, [f"{curve.values[-1].mean:.2f}" for curve in expert.layers])
        for user in entry.first.users
        for expert in expert_curves(entry, user)
    ]
