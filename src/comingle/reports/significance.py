"""What differences allow to be said: intervals, p-values, and how many questions at once cost.

Every statistic that tables, pages and advice print is made here. Which interval, and why no bootstrap:
decision 14 (docs/decisions/0014-two-way-intervals.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import stdtr, stdtrit

ERROR = 0.05
"""How often a family of intervals, or of tests, may be wrong: 5 in 100."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, its standard error, and the degrees of freedom that Student's t has for it."""

    mean: float
    error: float
    freedom: float

    def interval(self, share: float = 1.0) -> tuple[float, float]:
        """``mean -+ t error``, of confidence ``1 - 0.05 share``."""
        reach = self.error * float(stdtrit(self.freedom, 1 - share * ERROR / 2)) if self.error else 0.0
        return self.mean - reach, self.mean + reach

    @property
    def p_value(self) -> float:
        """Two-sided, of the hypothesis that the mean is 0: the share of ERROR at which the interval reaches 0."""
        if not self.error:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(self.freedom, -abs(self.mean) / self.error))


def one_way(values: Sequence[float]) -> Estimate:
    """The mean of at least two independent values, ``s / sqrt(n)``, ``n - 1``."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), error=error, freedom=len(values) - 1)


def interval(values: Sequence[float], *, together: int = 1) -> tuple[float, float] | None:
    """The 95% confidence interval of the mean, ``mean -+ t s / sqrt(n)``; None for a single value.

    Of intervals that hold ``together``, so many, with 95%, each is wider (Bonferroni).
    """
    return None if len(values) < 2 else one_way(values).interval(1 / together)


def two_way(values: Float[np.ndarray, "user seed"]) -> Estimate:
    """The mean over users and seeds, both drawn: ``value = mean + user + seed + rest``, from at least two seeds.

    With the mean squares of users, seeds and rest, ``variance = (users + seeds - rest) / (U S)``, with Satterthwaite's
    degrees of freedom (Biometrics Bulletin 2, 1946). Never less than users alone or seeds alone would give: where the
    rest is all there is, so that subtracting it may leave nothing, the interval is too wide and never too narrow.
    """
    num_users, num_seeds = values.shape
    if num_users == 1:
        return one_way(values[0].tolist())
    mean, by_user, by_seed = values.mean(), values.mean(1), values.mean(0)
    of_users, of_seeds = num_seeds * by_user.var(ddof=1), num_users * by_seed.var(ddof=1)
    of_rest = ((values - by_user[:, None] - by_seed + mean) ** 2).sum() / ((num_users - 1) * (num_seeds - 1))
    variance, freedom = max((of_users, num_users - 1.0), (of_seeds, num_seeds - 1.0))
    if (both := of_users + of_seeds - of_rest) > variance:
        parts = ((of_users, num_users - 1), (of_seeds, num_seeds - 1), (of_rest, (num_users - 1) * (num_seeds - 1)))
        variance, freedom = both, both**2 / sum(square**2 / own for square, own in parts)
    return Estimate(mean=float(mean), error=math.sqrt(variance / values.size), freedom=float(freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Scandinavian Journal of Statistics 6, 1979): those of at most 0.05 are rejected, and
    with 95% no true hypothesis is among them."""
    adjusted, floor = [1.0] * len(p_values), 0.0
    for rank, number in enumerate(np.argsort(p_values, kind="stable")):
        floor = max(floor, (len(p_values) - rank) * p_values[number])
        adjusted[number] = min(1.0, floor)
    return adjusted


def holm_shares(p_values: Sequence[float]) -> list[float]:
    """The share of ERROR at which Holm's procedure tests each: the interval of that share leaves out 0 exactly where
    the hypothesis is rejected. The smallest p-value has ``1 / n``, the next ``1 / (n - 1)``, until one is not rejected;
    that one's share is for all that are left."""
    rejected = sum(adjusted <= ERROR for adjusted in holm(p_values))
    shares = [1.0] * len(p_values)
    for rank, number in enumerate(np.argsort(p_values, kind="stable")):
        shares[number] = 1 / (len(p_values) - min(rank, rejected))
    return shares


def signed_rank(differences: Sequence[float]) -> float:
    """The exact two-sided p-value of Wilcoxon's signed-rank test (Biometrics Bulletin 1, 1945), one value a user.

    Differences of 0 are left out, equal ones share their ranks; counts all signs, so nothing is approximated.
    """
    known = np.array([value for value in differences if value])
    if not len(known):
        return 1.0
    _, place, counts = np.unique(np.abs(known), return_inverse=True, return_counts=True)
    ranks = (2 * np.cumsum(counts) - counts + 1)[place]  # twice the rank, so that shared ones are whole
    chances = np.ones(1)  # of each sum of the ranks with a positive sign
    for rank in ranks:
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    found = int(ranks[known > 0].sum())
    return min(1.0, 2 * float(min(chances[: found + 1].sum(), chances[found:].sum())))


def smallest_signed_rank(users: int) -> float:
    """Less than this :func:`signed_rank` cannot be, ``2 / 2^users``: 0.125 of 4 users."""
    return min(1.0, 2.0 ** (1 - users))
