"""Do two lists of numbers put the same things in the same order? Kendall's tau, and which pairs disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

_LISTED = 8

Entry = tuple[float, float | None]
"""A mean and its deviation over seeds (None: unknown)."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """How the paper's order of some rows compares with ours.

    ``tau`` is Kendall's tau-b and ``p_value`` that of the hypothesis of independent orders; None for fewer than two
    rows, or where one side is all ties. ``swapped`` are pairs (the paper's better one first) that we found the other
    way round by more than their deviations together; in ``unclear`` pairs it is by less, in the paper or with us.
    """

    rows: int
    pairs: int
    agreeing: int
    tau: float | None
    p_value: float | None
    swapped: tuple[tuple[str, str], ...]
    unclear: tuple[tuple[str, str], ...]
    deviations: bool
    """Whether ours are known: they are not with one seed."""


def ranks(means: Mapping[str, float], *, lower_is_better: bool = True) -> dict[str, int]:
    """1 for the best; equal numbers share the better rank."""
    sign = 1 if lower_is_better else -1
    return {name: 1 + sum(sign * other < sign * mean for other in means.values()) for name, mean in means.items()}


def compare_orders(paper: Mapping[str, Entry], ours: Mapping[str, Entry], *, lower_is_better: bool = True) -> Order:
    """Compare over the rows that both have."""
    names = [name for name in paper if name in ours]
    pairs = list(combinations(names, 2))
    sign = 1.0 if lower_is_better else -1.0
    agreeing = 0
    swapped: list[tuple[str, str]] = []
    unclear: list[tuple[str, str]] = []
    for one, two in pairs:
        said, our_difference = paper[two][0] - paper[one][0], ours[two][0] - ours[one][0]
        if said * our_difference > 0 or said == our_difference == 0:
            agreeing += 1
            continue
        better, worse = (one, two) if sign * said >= 0 else (two, one)
        clear = abs(said) > _noise(paper, one, two) and abs(our_difference) > _noise(ours, one, two)
        (swapped if clear else unclear).append((better, worse))
    tau, p_value = _kendall([paper[n][0] for n in names], [ours[n][0] for n in names])
    return Order(
        rows=len(names),
        pairs=len(pairs),
        agreeing=agreeing,
        tau=tau,
        p_value=p_value,
        swapped=tuple(swapped),
        unclear=tuple(unclear),
        deviations=any(ours[name][1] is not None for name in names),
    )


def _noise(entries: Mapping[str, Entry], one: str, two: str) -> float:
    return (entries[one][1] or 0.0) + (entries[two][1] or 0.0)


def _kendall(paper: list[float], ours: list[float]) -> tuple[float | None, float | None]:
    if len(paper) < 2:
        return None, None
    from scipy.stats import kendalltau  # takes half a second to import

    result: Any = kendalltau(paper, ours)
    tau, p_value = float(result.statistic), float(result.pvalue)
    return (None, None) if math.isnan(tau) else (tau, p_value)


def sentence(label: str, order: Order, reference: str = "paper") -> str:
    """In plain words whether the order of the reference holds."""
    if order.rows < 2:
        return f"{label}: {order.rows} row with numbers on both sides, so there is no order to compare."
    if order.tau is None:
        return f"{label}: all numbers of one side are equal, so there is no order to compare."
    head = f"{label}: tau = {order.tau:.2f} (p = {order.p_value:.2g}) over {order.rows} rows; "
    if order.agreeing == order.pairs:
        return head + f"the {reference}'s order holds in full."
    told = f"{order.agreeing} of {order.pairs} pairs are in the {reference}'s order"
    if not order.swapped:
        return f"{head}{told}, and the others differ by no more than their deviations: {_list(order.unclear)}."
    verdict = "the order holds for the most part" if order.agreeing > 0.8 * order.pairs else "the order does not hold"
    beyond = "beyond the deviations" if order.deviations else "with one seed, so that our deviations are unknown"
    clear = f"the other way round, {beyond}: {_list(order.swapped)}"
    rest = f"; within the deviations: {_list(order.unclear)}" if order.unclear else ""
    return f"{head}{verdict}: {told}; {clear}{rest}."


def _list(pairs: tuple[tuple[str, str], ...]) -> str:
    """Pairs as the paper orders them; ``table.json`` has those that are too many to be read."""
    shown = [f"{better} before {worse}" for better, worse in pairs[:_LISTED]]
    return ", ".join(shown) + (f" and {len(pairs) - _LISTED} more" if len(pairs) > _LISTED else "")
