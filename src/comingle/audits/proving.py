"""What an attack proves: a lower bound on epsilon, out of how often it guessed right.

Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Theorem 5.2: every one of ``trials`` canaries is put in or left out
by a coin of its own, and the attacker guesses some of the coins from everything that is seen. Canaries of one run may
share that run, as nothing is assumed of how they act on each other; coins of several runs count together. A bound by
Clopper and Pearson on rates of right and wrong alarms (Jagielski et al. 2020, arXiv:2006.07709) would need
trials that are independent, hence a run for each.
"""

from __future__ import annotations

import math

_MOST = 64.0
_STEPS = 60


def chance(epsilon: float, *, trials: int, guesses: int, correct: int, delta: float = 0.0) -> float:
    """At most how probable it is that of ``guesses`` so many are correct, if ``(epsilon, delta)`` holds of each coin.

    Source: the theorem above with all guesses counted, as in the paper's appendix D.
    """
    from scipy.stats import binom

    if correct <= 0 or guesses == 0:
        return 1.0
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if delta == 0:
        return tail
    steepest, below = 0.0, 0.0
    for back in range(1, correct + 1):
        below += float(binom.pmf(correct - back, guesses, right))
        steepest = max(steepest, below / back)
    return min(1.0, tail + 2 * trials * delta * steepest)


def least_epsilon(*, trials: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that is refuted with this confidence; 0 where none is."""

    def refuted(epsilon: float) -> bool:
        return chance(epsilon, trials=trials, guesses=guesses, correct=correct, delta=delta) <= 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _MOST
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
