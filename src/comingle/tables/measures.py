"""How measures are told: in headings, on axes, in cells, and as the change of a user's result against a baseline.

Accuracies are kept in [0, 1] and told in per cent. What is better is in :data:`comingle.utils.records.MEASURES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from comingle.utils.records import MEASURES, SHARES


def rule(measure: str) -> str:
    """What a reader must know of a measure's numbers: their unit, if they have one, and which way is better."""
    better = f"{MEASURES[measure]} is better"
    unit = {**dict.fromkeys(SHARES, "per cent, "), "rouge1": "from 0 to 1, "}
    return unit.get(measure, "") + better


def axis_label(measure: str) -> str:
    """A measure with its unit beside an axis."""
    return f"test {measure}, %" if measure in SHARES else f"test {measure}"


def tick(value: float, measure: str) -> str:
    """A measure at the tick of an axis."""
    value = 100 * value if measure in SHARES else value
    return f"{value:,.2f}".rstrip("0").removesuffix(".") if value >= 10 else f"{value:g}"


def sparse(value: float, measure: str) -> str:
    """Between powers of ten only 2 and 5 are written."""
    leading = round(value / 10 ** math.floor(math.log10(value)))
    return tick(value, measure) if leading in (2, 5) else ""


def byte_unit(largest: float) -> tuple[float, str]:
    """Bytes in a unit, and its name, for numbers up to ``largest``: whole bytes while they are few, else megabytes."""
    return (1.0, "B") if largest < 10_000 else (1e6, "MB")


# -------------------------------------------------------------------- one user against a baseline

_POINTS = {**dict.fromkeys(SHARES, "percentage points"), "rouge1": "points of 0.01"}
"""What shares differ by, which have values from 0 to 1."""
_LARGEST = 700.0
"""A logarithm beyond which a float has no exponential: the end of an interval may lie anywhere."""


def change(value: float, baseline: float, measure: str) -> float | None:
    """How far a result is from a baseline's; None where that cannot be said.

    Accuracies and ROUGE-1 differ by points, perplexities by per cent of the baseline. Losses of regressions span many
    orders of magnitude, so that nearly all would be 100% better: they differ by ``log10(value / baseline)``.
    """
    if measure in _POINTS:
        return 100 * (value - baseline)
    if measure == "loss":
        return math.log10(value / baseline) if value > 0 and baseline > 0 else None
    return 100 * (value / baseline - 1) if baseline else None


def difference(value: float | None, baseline: float | None, measure: str) -> float | None:
    """How far a result is from a baseline's, such that differences add up: the log ratio of perplexities and losses,
    what is left of accuracies and ROUGE-1. None where a result is not finite, or has no logarithm."""
    if value is None or baseline is None or not math.isfinite(value - baseline):
        return None
    if measure in _POINTS:
        return value - baseline
    return math.log(value / baseline) if value > 0 and baseline > 0 else None


def as_change(mean: float, measure: str) -> float:
    """A mean of such differences in the unit of :func:`change`."""
    if measure in _POINTS:
        return 100 * mean
    return mean / math.log(10) if measure == "loss" else 100 * math.expm1(min(mean, _LARGEST))


def is_worse(difference: float, measure: str) -> bool:
    """Whether such a change is harm."""
    return difference < 0 if MEASURES[measure] == "higher" else difference > 0


def best_of(measure: str) -> Callable[..., Any]:
    """What finds the best of several results or changes: ``min`` or ``max``."""
    return min if MEASURES[measure] == "lower" else max


def worst_of(measure: str) -> Callable[..., Any]:
    """What finds the worst of them."""
    return max if MEASURES[measure] == "lower" else min


def level(measure: str) -> float:
    """Below what size a change of a single seed says nothing: 1 per cent, 1 point, a factor of 1.01 of losses."""
    return math.log10(1.01) if measure == "loss" else 1.0


def level_text(measure: str) -> str:
    """That size in words."""
    return "a factor of 1.01" if measure == "loss" else "1 point" if measure in _POINTS else "1%"


def factor_text(factor: float) -> str:
    """A factor with three digits, or with as many as show that it is not 1.

    >>> factor_text(0.0625), factor_text(1.00072), factor_text(1.0)
    ('×0.0625', '×1.00072', '×1')
    """
    away = abs(factor - 1)
    if not 0 < away < 0.005:
        return f"×{factor:.3g}"
    return f"×{factor:.{min(9, 1 - math.floor(math.log10(away)))}f}"


def change_text(difference: float, measure: str) -> str:
    """A change as people read it."""
    if measure == "loss":
        return factor_text(10**difference)
    return f"{difference:+.1f}\u00a0points" if measure in _POINTS else f"{difference:+.1f}%"


def reach_text(reach: tuple[float, float], measure: str) -> str:
    """An interval of changes as people read it, with a digit more where it is narrow."""
    if measure == "loss":
        return " to ".join(factor_text(10 ** min(end, _LARGEST / math.log(10))) for end in reach)
    digits = 1 if reach[1] - reach[0] >= 1 else 2
    return f"{reach[0]:+.{digits}f} to {reach[1]:+.{digits}f}"


def change_label(measure: str, baseline: str, *, short: bool = False) -> str:
    """A change beside an axis, and, unless it must be short, which end of it is which."""
    sides = ("better", "worse") if MEASURES[measure] == "lower" else ("worse", "better")
    ends = f"(left: {sides[0]}, right: {sides[1]})"
    if short:
        return f"change against {baseline}, {'multiple' if measure == 'loss' else _POINTS.get(measure, '%')}"
    if measure == "loss":
        return f"test loss as a multiple of that of {baseline} {ends}"
    return f"change of test {measure} against {baseline}, {_POINTS.get(measure, '%')} {ends}"


# What would end a cell, become HTML, or set letters differently; an underscore within a word does not.
_MARKDOWN = re.compile(r"[\\`*\[\]<>|]|(?<![^\W_])_|_(?![^\W_])")


def markdown_line(cells: Sequence[str]) -> str:
    """A row of a Markdown table that shows its cells as they are.

    >>> markdown_line(["a|b", "_x_"])
    '| a\\\\|b | \\\\_x\\\\_ |'
    """
    return "| " + " | ".join(_MARKDOWN.sub(r"\\\g<0>", cell) for cell in cells) + " |"
