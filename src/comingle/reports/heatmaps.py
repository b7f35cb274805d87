"""Expert scores over training as heat maps: layers x rounds, for each user and expert (CoMiGS, Figures 4 and 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from comingle.reports.canvas import Panels, short
from comingle.reports.colours import expert_colour
from comingle.reports.extremes import MAX_PANELS, extremes
from comingle.reports.runs import Entry
from comingle.reports.series import ExpertCurves, expert_curves

MOST_TICKS = 5


def scores_figure(entry: Entry) -> Figure:
    """How much each expert says in each layer over training, for every user."""
    return scores_panels(entry).figure()


def scores_panels(entry: Entry, entries: Sequence[Entry] = ()) -> Panels:
    """A panel for each user and expert: layers (up, the first below) x rounds; solid is 1, blank is 0.

    Users stand below each other, or two in a row. Of a population there are the best and the worst, as ``entries``
    (default: this one alone) tell them.
    """
    width = max(len(expert_curves(entry, user)) for user in entry.first.users)
    most = max(2, MAX_PANELS // width)
    shown = extremes(entries or [entry], most)
    users = {user: by_layer for user in shown if (by_layer := expert_curves(entry, user))}
    if not users:  # none of these tells, over a network
        shown = {user: user for user in list(entry.first.evaluations[-1].scores)[:most]}
        users = {user: expert_curves(entry, user) for user in shown}
    rounds = {evaluation.iterations: evaluation.round for run in entry.runs for evaluation in run.evaluations}
    paint: list[Callable[[Axes], None] | None] = []
    for user, by_layer in users.items():
        titles = [f"{short(shown[user], 27 - len(one.name))}: {one.name}" for one in by_layer]
        paint += [
            partial(_heat, expert=e, title=title, rounds=rounds) for e, title in zip(by_layer, titles, strict=True)
        ]
        paint += [None] * (width - len(by_layer))
    names = [expert.name for expert in max(users.values(), key=len)]
    layers = max(len(expert.layers) for by_layer in users.values() for expert in by_layer)
    return Panels(
        paint=paint,
        columns=width * max(1, min(4, len(paint)) // width),
        size=(2.9, min(2.6, 1.15 + 0.06 * layers)),
        sheet=_heatmap_sheet(users, rounds),
        keys=[(Patch(color=expert_colour(name).light), f"{name} (solid 1, blank 0)") for name in names],
        below="round",
        left="layer",
    )


def _heat(axis: Axes, *, expert: ExpertCurves, title: str, rounds: dict[int, int]) -> None:
    values = np.array([[value.mean for value in layer.values] for layer in expert.layers])
    colour = expert_colour(expert.name).light
    shades = LinearSegmentedColormap.from_list(expert.name, [f"{colour}00", f"{colour}ff"])
    axis.imshow(values, vmin=0, vmax=1, cmap=shades, aspect="auto", interpolation="none", origin="lower")
    axis.set_title(title)
    at = [rounds[iterations] for iterations in expert.layers[0].iterations]
    places = range(0, len(at), -(-len(at) // MOST_TICKS))
    axis.set_xticks(places, [str(at[place]) for place in places])
    axis.yaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True, min_n_ticks=1))
    axis.grid(visible=False)


def _heatmap_sheet(users: dict[str, list[ExpertCurves]], rounds: dict[int, int]) -> list[list[object]]:
    rows: list[list[object]] = [["user", "expert", "layer", "round", "mean_score", "std_over_seeds"]]
    for user, by_layer in users.items():
        for expert in by_layer:
            for layer, curve in enumerate(expert.layers):
                for iterations, value in zip(curve.iterations, curve.values, strict=True):
                    rows.append([user, expert.name, layer, rounds[iterations], value.mean, value.std])
    return rows
