"""Coverage of 95% intervals for a mean change over users and seeds; one JSON line per case.

    python benchmarks/intervals.py --populations 1000

Differences of users and seeds are drawn as ``user + seed + rest`` with mean 0 and the standard deviations of each
case: all normal, or users exponential.

Candidates: ours (two-way), Student's t over users' means, scipy's bootstrap of users' means (BCa
and percentile), the studentised bootstrap of users' means,
and the hierarchical bootstrap of users and seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.stats

from comingle.reports.comparisons import one_way, two_way

RESAMPLES = 400
CASES = [
    # users, seeds, deviations of users, seeds and rest, users exponential
    (4, 3, 1.0, 0.0, 0.3, False),
    (4, 3, 1.0, 0.3, 0.3, False),
    (4, 3, 1.0, 1.0, 0.3, False),
    (4, 3, 0.0, 0.0, 1.0, False),
    (4, 3, 1.0, 0.3, 0.3, True),
    (10, 3, 1.0, 0.3, 0.3, False),
    (10, 3, 1.0, 0.3, 0.3, True),
    (30, 5, 1.0, 0.3, 0.3, False),
    (30, 5, 1.0, 0.0, 0.3, True),
]
Interval = tuple[float, float]


def scipy_bootstrap(method: str) -> Callable[[np.ndarray, np.random.Generator], Interval]:
    """Return a function for the 95% interval of scipy's bootstrap over users' means.

    Args:
        method: scipy's name of the bootstrap: "BCa" or "percentile".
    """
    bootstrap: Any = scipy.stats.bootstrap

    def interval(table: np.ndarray, draws: np.random.Generator) -> Interval:
        result = bootstrap((table.mean(1),), np.mean, n_resamples=RESAMPLES, method=method, rng=draws)
        return result.confidence_interval.low, result.confidence_interval.high

    return interval


def studentised(table: np.ndarray, draws: np.random.Generator) -> Interval:
    """Return the studentised bootstrap interval of the mean of users' means; table is (users, seeds)."""
    means = table.mean(1)
    resampled = means[draws.integers(0, len(means), (RESAMPLES, len(means)))]
    errors = resampled.std(1, ddof=1) / math.sqrt(len(means))
    # Resamples of equal users have no error to divide by.
    is_usable = errors > 1e-12 * abs(means).max()
    low, high = np.quantile((resampled.mean(1) - means.mean())[is_usable] / errors[is_usable], [0.025, 0.975])
    error = means.std(ddof=1) / math.sqrt(len(means))
    return means.mean() - high * error, means.mean() - low * error


def hierarchical(table: np.ndarray, draws: np.random.Generator) -> Interval:
    """Return the interval of the bootstrap that draws users and seeds with replacement; table is (users, seeds)."""
    users, seeds = (draws.integers(0, n, (RESAMPLES, n)) for n in table.shape)
    low, high = np.quantile(table[users[:, :, None], seeds[:, None, :]].mean((1, 2)), [0.025, 0.975])
    return low, high


CANDIDATES: dict[str, Callable[[np.ndarray, np.random.Generator], Interval]] = {
    "two_way": lambda table, _: two_way(table).interval(),
    "t_over_users": lambda table, _: one_way(table.mean(1).tolist()).interval(),
    "bootstrap_bca": scipy_bootstrap("BCa"),
    "bootstrap_percentile": scipy_bootstrap("percentile"),
    "bootstrap_studentised": studentised,
    "bootstrap_hierarchical": hierarchical,
}


def coverage(case: tuple[int, int, float, float, float, bool], populations: int) -> dict[str, float]:
    """Return the coverage of each candidate in per cent."""
    users, seeds, of_user, of_seed, rest, skewed = case
    draws, hits = np.random.default_rng(0), dict.fromkeys(CANDIDATES, 0)
    for _ in range(populations):
        user_effects = draws.exponential(size=(users, 1)) - 1 if skewed else draws.normal(size=(users, 1))
        table = (
            of_user * user_effects + of_seed * draws.normal(size=(1, seeds)) + rest * draws.normal(size=(users, seeds))
        )
        for name, interval in CANDIDATES.items():
            low, high = interval(table, draws)
            hits[name] += bool(low <= 0 <= high)
    return {name: round(100 * count / populations, 1) for name, count in hits.items()}


def main() -> None:
    """Measure each case and print a line of JSON for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--populations", type=int, default=1000)
    populations = parser.parse_args().populations
    warnings.simplefilter("ignore")  # scipy warns if all resamples are equal
    keys = ("users", "seeds", "of_user", "of_seed", "rest", "exponential")
    for case in CASES:
        print(json.dumps({**dict(zip(keys, case, strict=True)), **coverage(case, populations)}), flush=True)


if __name__ == "__main__":
    main()
