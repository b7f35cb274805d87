"""What is told of users who are too many for a row each, and of budgets that are not equal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from comingle.utils.records import MEASURES

MOST_ROWS = 24
"""A run's table has a row for each of so many users; of more it shows the best, the worst, and how all are spread."""

FEW = 5
"""So many of the best users, and of the worst."""

QUANTILES = {"10% of users": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9}
"""Where between the best user, 0, and the worst, 1, a distribution is looked at."""

TOLERANCE = 0.1
"""Budgets that differ by no more than this share are called equal."""


def best_first(scores: Mapping[str, float | None], measure: str) -> list[str]:
    """Users by their score; who has none that is finite comes last."""
    sign = 1 if MEASURES[measure] == "lower" else -1
    finite = {name: math.inf if score is None else sign * score for name, score in scores.items()}
    return sorted(scores, key=finite.__getitem__)


def at_share(ordered: Sequence[str], share: float) -> str:
    """The user so far from the best, 0, to the worst, 1: the nearest, so that a score is always somebody's."""
    return ordered[math.floor(share * (len(ordered) - 1) + 0.5)]


def typical_budget(counts: Sequence[int]) -> int | None:
    """The median number of trained parameters of methods that train at all: of two, the lower."""
    trained = [count for count in counts if count]
    return statistics.median_low(trained) if trained else None


def is_unequal(count: int, typical: int | None) -> bool:
    """Whether a method trains more than :data:`TOLERANCE` more or fewer parameters; nothing at all is no budget."""
    return bool(count) and typical is not None and abs(count - typical) > TOLERANCE * typical


def budget_note(counts: Sequence[int]) -> str:
    """A line about those that are marked; empty where none is."""
    typical = typical_budget(counts)
    if not any(is_unequal(count, typical) for count in counts):
        return ""
    return f"† trains over {TOLERANCE:.0%} more or fewer parameters than the median method, which trains {typical:,}"
