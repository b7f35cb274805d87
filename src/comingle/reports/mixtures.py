"""Which users mix which adaptors, over the rounds: a heat map, and how well the true clusters were found.

Source: FLoRAL, section 3.2 (one softmax vector for each user over C adaptor sets) and section 6 (users k in cluster
k mod C). Adaptor sets have no names of their own, so they are put into the order of the clusters that use them most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from comingle.reports.canvas import draw, short
from comingle.reports.colours import INK
from comingle.utils.records import read_events

MAX_SNAPSHOTS = 6
_MOST_NAMES = 40
_SOLID = "#2b7bc4"  # about equally far from white paper and from dark
_SHADES = LinearSegmentedColormap.from_list("weights", [f"{_SOLID}00", f"{_SOLID}ff"])


@dataclass(frozen=True, kw_only=True)
class Mixtures:
    """The mixtures of a run at each evaluation, ready to be drawn.

    ``values`` is (evaluation, user, adaptor set), each row a point of the simplex. Users are sorted by their true
    cluster, where that is known, and adaptor sets so that set c is the one that cluster c uses, after the last round;
    ``order`` says which of the run's sets each of them is. ``entropy`` of the routers, mean over users, is in nats;
    ``component`` says what is mixed, as far as events do; ``mismatch`` is the mean distance of the learned aggregation
    weights from the true ones (FLoRAL, section 4).
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
        """Whether anybody ever mixed; with optimal routing all have one set from the start."""
        return bool((self.values.max(-1) < 1).any())

    @cached_property
    def recovery(self) -> tuple[float, ...] | None:
        """At each evaluation the adjusted Rand index of every user's heaviest set against the true clusters."""
        if self.clusters is None:
            return None
        return tuple(adjusted_rand_index(self.clusters, _heaviest(at)) for at in self.values)

    @cached_property
    def block_ratio(self) -> float | None:
        """How far rows of one true cluster are apart in the end, over how far rows of different ones are (means).

        Below 1 there are blocks on the diagonal; None where no two users share a cluster, or all do.
        """
        if self.clusters is None:
            return None
        last, true_clusters = self.values[-1], np.array(self.clusters)
        distances = np.linalg.norm(last[:, None] - last[None], axis=-1)
        same = true_clusters[:, None] == true_clusters[None]
        within, between = distances[same & ~np.eye(len(true_clusters), dtype=bool)], distances[~same]
        return float(within.mean() / between.mean()) if within.size and between.size and between.mean() else None


def read_mixtures(folder: Path) -> Mixtures | None:
    """The mixtures in a run's events; None where its users mix nothing at the level of the client."""
    events = list(read_events(folder))
    start = next((event for event in events if event["event"] == "start"), None)
    evaluations = [event for event in events if event["event"] == "evaluation" and "mixtures" in event]
    if start is None or not evaluations:
        return None
    truth: dict[str, int] | None = evaluations[-1].get("clusters")
    # Over a network there may be users who were away at an evaluation, or do not tell.
    names = [user for user in evaluations[-1]["mixtures"] if all(user in event["mixtures"] for event in evaluations)]
    if not names:
        return None
    users = names if truth is None else sorted(names, key=lambda name: (truth[name], names.index(name)))
    values = np.array([[event["mixtures"][user] for user in users] for event in evaluations])
    clusters = None if truth is None else tuple(truth[user] for user in users)
    order = match_clusters(values[-1], clusters)
    return Mixtures(
        method=start["method"],
        seed=start["seed"],
        rounds=tuple(event["round"] for event in evaluations),
        users=tuple(users),
        clusters=clusters,
        order=order,
        values=values[:, :, list(order)],
        component=evaluations[-1].get("component", "component"),
        entropy=_told(evaluations, "router_entropy_nats"),
        mismatch=_told(evaluations, "aggregation_mismatch"),
    )


def _told(events: Sequence[dict[str, Any]], key: str) -> tuple[float, ...] | None:
    """What every evaluation says under a key."""
    return tuple(event[key] for event in events) if all(key in event for event in events) else None


def match_clusters(mixture: np.ndarray, clusters: Sequence[int] | None) -> tuple[int, ...]:
    """The adaptor sets in the order of the true clusters that use them, one for each as far as there are enough.

    That assignment has the largest total weight (a linear sum assignment); sets without a cluster come after it, those
    that are used most first.
    """
    sets = range(mixture.shape[1])
    taken: list[int] = []
    if clusters is not None:
        true_clusters = np.array(clusters)
        used = np.stack([mixture[true_clusters == cluster].sum(0) for cluster in sorted(set(clusters))])
        rows, columns = linear_sum_assignment(used, maximize=True)
        taken = [int(columns[place]) for place in np.argsort(rows)]
    total = mixture.sum(0)
    return (*taken, *sorted((c for c in sets if c not in taken), key=lambda c: (-total[c], c)))


def adjusted_rand_index(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """How alike two partitions of the same things are: 1 for the same up to names, about 0 for unrelated ones.

    ``(n - e) / (m - e)``: n pairs that both keep together, e as many as by chance, m the mean of the pairs that either
    keeps together (Hubert and Arabie, 1985). Partitions for which that is 0 / 0 are the same.
    """
    together = _pairs(Counter(zip(one, other, strict=True)))
    first, second = _pairs(Counter(one)), _pairs(Counter(other))
    chance = first * second / comb(len(one), 2) if len(one) > 1 else 0.0
    most = (first + second) / 2
    return 1.0 if most == chance else (together - chance) / (most - chance)


def _pairs(sizes: Counter[Any]) -> int:
    return sum(comb(size, 2) for size in sizes.values())


def _heaviest(mixture: np.ndarray) -> list[int]:
    return [int(at) for at in mixture.argmax(1)]


# -------------------------------------------------------------------- the picture


def mixtures_figure(mixtures: Mixtures) -> Figure:
    """Users (down) x adaptor sets (across) at up to ``MAX_PANELS`` evaluations.

    A weight of 1 is solid and one of 0 lets the background through, so that the picture suits light and dark pages.
    """
    panels = _spread_out(len(mixtures.rounds))

    def paint(figure: Figure, axes: list[Axes]) -> None:
        for axis, at in zip(axes, panels, strict=True):
            axis.imshow(mixtures.values[at], vmin=0, vmax=1, cmap=_SHADES, aspect="auto", interpolation="none")
            axis.set_title(_title(mixtures, at))
            axis.set_xticks(range(len(mixtures.order)), [str(name) for name in mixtures.order])
            if len(mixtures.order) > 10:  # numbers of two digits run into each other unless they stand upright
                axis.tick_params(axis="x", labelrotation=90, labelsize=min(8.0, 110 / len(mixtures.order)))
            axis.set_xlabel(mixtures.component)
            axis.grid(visible=False)
            _mark_clusters(axis, mixtures, labels=at == panels[0])
        figure.suptitle(f"{mixtures.method}, seed {mixtures.seed}: each user's mixture", x=0.01, ha="left")
        bar = figure.colorbar(axes[-1].images[0], ax=axes, label="weight", shrink=0.8)
        assert bar.solids is not None
        bar.solids.set_rasterized(True)  # as hundreds of translucent strips it would show their seams

    # Room for names, for the colours beside the panels, and for the title above a single one.
    width = min(14.0, max(4.4, 1.7 + len(panels) * (0.6 + 0.22 * len(mixtures.order))))
    return draw(1, len(panels), (width / len(panels), 3.4), paint)


def _spread_out(count: int) -> list[int]:
    """The first and the last evaluation, and some between them at equal distances."""
    wanted = min(count, MAX_SNAPSHOTS)
    return [round(number * (count - 1) / max(1, wanted - 1)) for number in range(wanted)]


def _title(mixtures: Mixtures, at: int) -> str:
    told = f"round {mixtures.rounds[at]}"
    return told if mixtures.recovery is None else f"{told}\nARI {mixtures.recovery[at]:.2f}"


def _mark_clusters(axis: Axes, mixtures: Mixtures, *, labels: bool) -> None:
    """Lines between the true clusters, and their names in the middle of their users."""
    names = mixtures.users if mixtures.clusters is None else [f"cluster {cluster}" for cluster in mixtures.clusters]
    starts = [i for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    if mixtures.clusters is not None:
        for start in starts[1:]:
            axis.axhline(start - 0.5, color=INK.light, linewidth=0.8)
    if not labels or len(starts) > _MOST_NAMES:
        axis.set_yticks([])
        return
    ends = [*starts[1:], len(names)]
    places = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    axis.set_yticks(places, [short(names[start]) for start in starts])
