"""Comparisons of methods over seeds, with intervals and p-values.

All statistics of tables, pages and advice are computed here. Decision 14 (docs/decisions/0014-two-way-intervals.md)
says why these intervals, and why no bootstrap.

Differences are paired by user and seed: log ratios of perplexities and losses, whose mean is the ratio of geometric
means, and plain differences of accuracies and ROUGE-1. A method is *better* or *worse* if the interval of its mean
difference (:func:`comingle.reports.comparisons.two_way`), at the level of Holm's procedure over all methods, does not
contain 0. Else it is *level*, which does not prove that there is no difference.

A baseline may consist of several methods. It is then the best of them, for each user and seed.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, cast

import numpy as np
from jaxtyping import Float
from rich.text import Text

from comingle.reports.formatting import (
    Table,
    additive_difference,
    as_change,
    best_of,
    change_text,
    clip_points,
    epsilon_of,
    interval_text,
    is_worse,
    markdown_line,
    unit_and_direction,
    worst_of,
)
from comingle.utils.errors import RecipeError, RunError, did_you_mean, list_names
from comingle.utils.records import GEOMETRIC, SHARES, JsonMapping, JsonObject, geometric, measure_of, read_metrics
from comingle.utils.terminal import literal_text

ERROR = 0.05
"""Error rate of a family of intervals or of tests."""

_ROUNDING = 1e-10
"""Largest standard error that counts as 0, as it may come from rounding."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, its standard error, and its degrees of freedom in Student's t distribution."""

    mean: float
    error: float
    freedom: float

    def interval(self, share: float = 1.0) -> tuple[float, float]:
        """Return both ends of the confidence interval, ``mean -+ t error``.

        Args:
            share: Share of the error rate :data:`ERROR` (0.05): the confidence is ``1 - share * ERROR``, so 95% for
                share 1 and 97.5% for share 0.5.
        """
        half_width = 0.0
        if self.error:
            from scipy.special import stdtrit  # slow to import

            t = float(stdtrit(self.freedom, 1 - share * ERROR / 2))
            half_width = self.error * t
        return self.mean - half_width, self.mean + half_width

    @property
    def p_value(self) -> float:
        """Two-sided p-value for a mean of 0, by Student's t test."""
        if not self.error:  # t would be mean / 0
            return 1.0 if self.mean == 0 else 0.0
        from scipy.special import stdtr  # slow to import

        return float(2 * stdtr(self.freedom, -abs(self.mean) / self.error))


def one_way(values: Sequence[float]) -> Estimate:
    """Return the mean of at least two independent values with its standard error.

    The error is ``s / sqrt(n)``, with ``n - 1`` degrees of freedom.
    """
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), error=error, freedom=len(values) - 1)


def interval(values: Sequence[float], *, num_intervals: int = 1) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the mean, ``mean -+ t s / sqrt(n)``.

    Args:
        values: Independent values.
        num_intervals: Number of intervals that hold simultaneously with 95% (Bonferroni); more make each one wider.

    Returns:
        Both ends; None for fewer than two values.
    """
    if len(values) < 2:
        return None
    return one_way(values).interval(share=1 / num_intervals)


def is_constant_share(estimate: Estimate, measure: str) -> bool:
    """Return whether the measure is a share, such as an accuracy, that does not vary between seeds.

    Its confidence interval would have width 0, so none is shown.

    Args:
        estimate: The mean over seeds.
        measure: Name of the measure, such as "accuracy" or "perplexity".
    """
    is_share = measure in SHARES
    is_equal_for_all_seeds = estimate.error <= _ROUNDING
    return is_share and is_equal_for_all_seeds


def interval_of_change(
    differences: Sequence[float], measure: str, *, num_intervals: int = 1
) -> tuple[float, float] | None:
    """Return the 95% confidence interval of a mean change over seeds.

    Args:
        differences: One :func:`comingle.reports.formatting.additive_difference` for each seed.
        measure: Name of the measure of the results, such as "perplexity".
        num_intervals: Number of intervals that hold simultaneously with 95% (Bonferroni); more make each one wider.

    Returns:
        Both ends, in the unit of :func:`comingle.reports.formatting.change`; None for fewer than two seeds, and for
        shares that are equal for all seeds (:func:`is_constant_share`).
    """
    if len(differences) < 2:
        return None
    estimate = one_way(differences)
    if is_constant_share(estimate, measure):
        return None
    low, high = estimate.interval(share=1 / num_intervals)
    return _possible_change(low, measure), _possible_change(high, measure)


def _possible_change(difference: float, measure: str) -> float:
    """Return an end of an interval of differences as a change; shares cannot change by more than 100 points."""
    return clip_points(as_change(difference, measure), measure)


def two_way(values: Float[np.ndarray, "user seed"]) -> Estimate:
    """Return the mean over users and seeds, both random effects: ``value = mean + user + seed + residual``.

    Its variance over U users and S seeds is ``MS / (U S)``. MS is the largest of ``MS_users``, ``MS_seeds`` and
    ``MS_users + MS_seeds - MS_residual``, from the mean squares of a two-way analysis of variance. So the variance is
    at least that of users alone or of seeds alone. If the sum is the largest, its degrees of freedom are
    Satterthwaite's (Biometrics Bulletin 2, 1946).

    Args:
        values: One value per user and seed, for at least two seeds.
    """
    num_users, num_seeds = values.shape
    if num_users == 1:
        return one_way(values[0].tolist())
    mean, mean_by_user, mean_by_seed = values.mean(), values.mean(1), values.mean(0)
    residuals = values - mean_by_user[:, None] - mean_by_seed + mean
    freedom_users, freedom_seeds = num_users - 1, num_seeds - 1
    freedom_residual = freedom_users * freedom_seeds
    ms_users = num_seeds * mean_by_user.var(ddof=1)
    ms_seeds = num_users * mean_by_seed.var(ddof=1)
    ms_residual = (residuals**2).sum() / freedom_residual

    users_candidate, seeds_candidate = (ms_users, float(freedom_users)), (ms_seeds, float(freedom_seeds))
    ms, freedom = max(users_candidate, seeds_candidate)  # the one with the larger mean square
    ms_sum = ms_users + ms_seeds - ms_residual
    if ms_sum > ms:
        ms = ms_sum
        terms = [ms_users**2 / freedom_users, ms_seeds**2 / freedom_seeds, ms_residual**2 / freedom_residual]
        freedom = ms_sum**2 / sum(terms)
    return Estimate(mean=float(mean), error=math.sqrt(ms / values.size), freedom=float(freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values (Scandinavian Journal of Statistics 6, 1979).

    The k-th smallest of n p-values, counted from 0, is multiplied by ``n - k``, and is at least the adjusted value
    before it and at most 1: ``[0.03, 0.01]`` becomes ``[0.03, 0.02]``.
    """
    adjusted = [1.0] * len(p_values)
    largest_so_far = 0.0
    for rank, hypothesis in enumerate(np.argsort(p_values, kind="stable")):
        largest_so_far = max(largest_so_far, (len(p_values) - rank) * p_values[hypothesis])
        adjusted[hypothesis] = min(1.0, largest_so_far)
    return adjusted


def holm_shares(p_values: Sequence[float]) -> list[float]:
    """Return the share of the error rate 0.05 at which Holm's procedure tests each hypothesis.

    The smallest of n p-values has the share ``1 / n``, the next ``1 / (n - 1)``, and so on. From the first hypothesis
    that is not rejected on, all have the same share: ``[0.001, 0.04, 0.3]`` becomes ``[1/3, 1/2, 1/2]``. An interval
    with confidence ``1 - 0.05 share`` excludes 0 exactly if its hypothesis is rejected.
    """
    num_rejected = sum(adjusted <= ERROR for adjusted in holm(p_values))
    shares = [1.0] * len(p_values)
    for rank, hypothesis in enumerate(np.argsort(p_values, kind="stable")):
        tested_rank = min(rank, num_rejected)  # the first hypothesis that is not rejected has rank num_rejected
        shares[hypothesis] = 1 / (len(p_values) - tested_rank)
    return shares


def signed_rank(differences: Sequence[float]) -> float:
    """Return the exact two-sided p-value of Wilcoxon's signed-rank test, with one value per user.

    The statistic is the sum of the ranks of ``|difference|`` over the positive differences. Zeros are left out and ties
    share the mean of their ranks. Its distribution is that over all ``2^n`` signs (Biometrics Bulletin 1, 1945).
    """
    nonzero = np.array([value for value in differences if value])
    if not len(nonzero):
        return 1.0
    # Doubled ranks, which are integers for ties too: sizes 0.1, 0.3, 0.3 have ranks 1, 2.5, 2.5, doubled 2, 5, 5.
    _, index_of_size, num_ties = np.unique(np.abs(nonzero), return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(num_ties)
    doubled_ranks_of_sizes = 2 * last_ranks - num_ties + 1
    doubled_ranks = doubled_ranks_of_sizes[index_of_size]
    probabilities = np.ones(1)  # probabilities[s]: that the doubled ranks of positive differences sum to s
    for rank in doubled_ranks:  # each difference is negative or positive with probability 1/2
        if_negative = np.pad(probabilities, (0, rank))  # the sum stays
        if_positive = np.pad(probabilities, (rank, 0))  # the sum grows by the rank
        probabilities = (if_negative + if_positive) / 2
    observed_sum = int(doubled_ranks[nonzero > 0].sum())
    lower_tail, upper_tail = probabilities[: observed_sum + 1].sum(), probabilities[observed_sum:].sum()
    # Both tails have the observed sum, so twice a tail can be more than 1.
    return min(1.0, 2 * float(min(lower_tail, upper_tail)))


def smallest_signed_rank(users: int) -> float:
    """Return the smallest possible :func:`signed_rank`, ``2 / 2^users``: 0.125 for 4 users."""
    return min(1.0, 2.0 ** (1 - users))


Results = Mapping[str, Mapping[int, Mapping[str, float | None]]]
"""Results by method, seed and user; None if a result is not finite."""

DEFAULT_BASELINE = "local"
"""Method with which others are compared by default: each user trains alone."""

BETTER, LEVEL, WORSE = "better", "level", "worse"
"""Verdicts of a comparison with the baseline; "level" if its interval has no change."""

NOT_FINITE, ONE_SEED = "not finite", "one seed"
"""Verdicts where there can be no comparison."""

STYLES = {BETTER: "green", WORSE: "red"}
"""Colours of verdicts in the terminal."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of one method against the baseline.

    ``change`` and its interval are in the unit of :func:`comingle.reports.formatting.change`: per cent of perplexities,
    points of shares, powers of ten of losses. They and ``confidence`` are None if ``verdict`` is :data:`NOT_FINITE` or
    :data:`ONE_SEED`. The interval and ``confidence`` are also None if shares do not differ between seeds
    (:func:`is_constant_share`); the verdict is then :data:`LEVEL`.

    Args:
        method: Label of the method.
        seeds: Seeds that the method and the baseline have in common.
        verdict: :data:`BETTER`, :data:`LEVEL`, :data:`WORSE`, :data:`NOT_FINITE` or :data:`ONE_SEED`.
        change: Mean change.
        low: Lower end of its interval.
        high: Upper end of its interval.
        confidence: Confidence of the interval, at least 0.95.
        p_value: Wilcoxon's p-value over users, adjusted by Holm; None if so few users can never reach 0.05.
        ahead: Number of results, one per user and seed, that are better than the baseline's.
        pairs: Number of all results.
        worst: Change of the worst result; None if a result is not finite.
    """

    method: str
    seeds: tuple[int, ...]
    verdict: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    p_value: float | None = None
    ahead: int = 0
    pairs: int = 0
    worst: float | None = None


class BaselineComparisonRecord(TypedDict):
    """:class:`BaselineComparison` as plain data; each of ``methods`` has the fields of a :class:`Verdict`."""

    baseline: str
    measure: str
    users: int
    unit: str
    methods: list[JsonObject]


@dataclass(frozen=True, kw_only=True)
class BaselineComparison:
    """Verdicts on all methods of a comparison against ``baseline``, such as "the better of local and fedavg"."""

    baseline: str
    measure: str
    users: int
    verdicts: tuple[Verdict, ...]

    @property
    def num_tested(self) -> int:
        """Number of methods with an interval, over which Holm's procedure adjusts."""
        return sum(verdict.change is not None for verdict in self.verdicts)

    def as_dict(self) -> BaselineComparisonRecord:
        """Return all fields, and the unit of changes, as plain data for JSON; :meth:`read` returns the object again."""
        units = {"perplexity": "per cent", "loss": "powers of ten"}
        unit = units.get(self.measure, "points of 0.01")
        methods = []
        for verdict in self.verdicts:
            record = asdict(verdict)
            record["seeds"] = list(verdict.seeds)
            methods.append(record)
        return {
            "baseline": self.baseline,
            "measure": self.measure,
            "users": self.users,
            "unit": unit,
            "methods": methods,
        }

    @classmethod
    def read(cls, content: BaselineComparisonRecord) -> BaselineComparison:
        """Create a comparison from its plain data, such as from JSON; inverse of :meth:`as_dict`."""
        verdicts = []
        for record in content["methods"]:
            fields = dict(record)
            fields["seeds"] = tuple(record["seeds"])  # a list in JSON
            verdicts.append(Verdict(**fields))
        return cls(
            baseline=content["baseline"],
            measure=content["measure"],
            users=content["users"],
            verdicts=tuple(verdicts),
        )


def baseline_of(methods: Sequence[str], wanted: str | None) -> str:
    """Return the baseline: ``wanted``, else ``local``, else the first method.

    Args:
        methods: Names of the compared methods.
        wanted: One or several methods, such as "local, fedavg"; None for the default.

    Raises:
        RecipeError: A wanted method is not among the methods.
    """
    if wanted is None:
        return DEFAULT_BASELINE if DEFAULT_BASELINE in methods else methods[0]
    wanted_methods = baseline_methods(wanted)
    for name in wanted_methods:
        if name not in methods:
            hint = did_you_mean(name, methods)
            raise RecipeError(f"--against {name!r}: not among the methods.{hint} Allowed: {', '.join(methods)}")
    return ",".join(wanted_methods)


def baseline_methods(baseline: str) -> list[str]:
    """Return the methods of a baseline, each once."""
    return list(dict.fromkeys(name.strip() for name in baseline.split(",")))


def baseline_text(names: Sequence[str]) -> str:
    """Return a baseline for sentences: "local", "the better of local and fedavg", "the best of a, b and c"."""
    *others, last = names
    if not others:
        return last
    superlative = "better" if len(others) == 1 else "best"
    return f"the {superlative} of {', '.join(others)} and {last}"


def compare_with_baseline(results: Results, measure: str, baseline: str) -> BaselineComparison | None:
    """Compare every other method with ``baseline``: mean change with its interval, verdict and p-value.

    The verdict follows from a t-interval of the mean over users and seeds (:func:`two_way`). The p-value is Wilcoxon's
    over the users' means (:func:`signed_rank`). Holm's procedure corrects both for the number of methods.

    Args:
        results: Results by method, seed and user.
        measure: Name of the measure of these results, such as "perplexity".
        baseline: A method. Of several, such as "local,fedavg", each user's best result counts, for each seed.

    Returns:
        The verdicts; None if there is no other method, or none that has two seeds in common with the baseline.
    """
    names_in_baseline = baseline_methods(baseline)
    baseline_results = _best_results([results[name] for name in names_in_baseline], measure)
    differences_by_method: dict[str, dict[int, list[float | None]]] = {}
    for name, results_of_method in results.items():
        if name != baseline:
            differences_by_method[name] = _differences(results_of_method, baseline_results, measure)
    if all(len(by_seed) < 2 for by_seed in differences_by_method.values()):
        return None
    num_users = len(next(iter(baseline_results.values())))

    # Methods with one seed or a difference that is not finite are not tested.
    tested: dict[str, np.ndarray] = {}  # differences of shape (users, seeds), by method
    for name, by_seed in differences_by_method.items():
        array = _as_array(by_seed)
        if array is not None:
            tested[name] = array
    estimates = {name: two_way(array) for name, array in tested.items()}
    p_of_means = []
    for estimate in estimates.values():
        p_of_means.append(1.0 if is_constant_share(estimate, measure) else estimate.p_value)
    error_share_by_method = dict(zip(tested, holm_shares(p_of_means), strict=True))
    p_over_users = [signed_rank(array.mean(1).tolist()) for array in tested.values()]
    p_value_by_method = dict(zip(tested, holm(p_over_users), strict=True))
    smallest_adjusted_p = len(tested) * smallest_signed_rank(num_users)
    has_enough_users = smallest_adjusted_p <= ERROR  # for a significant p-value

    verdicts = []
    for name, by_seed in differences_by_method.items():
        seeds = tuple(by_seed)
        if name in tested:
            p_value = p_value_by_method[name] if has_enough_users else None
            verdict = _verdict_of(name, seeds, estimates[name], measure, error_share_by_method[name], p_value)
        else:
            verdict = Verdict(method=name, seeds=seeds, verdict=NOT_FINITE if len(seeds) > 1 else ONE_SEED)
        num_ahead, num_pairs, worst = _count_ahead(by_seed, measure)
        verdicts.append(replace(verdict, ahead=num_ahead, pairs=num_pairs, worst=worst))
    return BaselineComparison(
        baseline=baseline_text(names_in_baseline), measure=measure, users=num_users, verdicts=tuple(verdicts)
    )


def _best_results(
    results_of_methods: Sequence[Mapping[int, Mapping[str, float | None]]], measure: str
) -> dict[int, dict[str, float | None]]:
    """Return each user's best result over the methods of a baseline, for each seed that all these methods have.

    Args:
        results_of_methods: Results of each method by seed and user.
        measure: Name of the measure of the results, such as "perplexity".

    Returns:
        Results by seed and user; None if a method's result is not finite.
    """
    min_or_max = best_of(measure)
    first_method = results_of_methods[0]
    best_results: dict[int, dict[str, float | None]] = {}
    for seed, results_by_user in first_method.items():
        if not all(seed in results_of_method for results_of_method in results_of_methods):
            continue
        best_results[seed] = {}
        for user in results_by_user:
            values = [results_of_method[seed].get(user) for results_of_method in results_of_methods]
            finite = [value for value in values if value is not None and math.isfinite(value)]
            best_results[seed][user] = min_or_max(finite) if len(finite) == len(values) else None
    return best_results


def _count_ahead(differences: Mapping[int, Sequence[float | None]], measure: str) -> tuple[int, int, float | None]:
    """Count a method's results that are better than the baseline's, and find the worst change.

    Args:
        differences: Each user's difference to the baseline by seed; None if it is not finite.
        measure: Name of the measure of the results, such as "perplexity".

    Returns:
        The number of better results, the number of all results, and the worst change, None if a result is not finite.
    """
    all_differences = [value for values in differences.values() for value in values]
    finite = [value for value in all_differences if value is not None]
    num_ahead = sum(value != 0 and not is_worse(value, measure) for value in finite)
    worst: float | None = None
    if finite and len(finite) == len(all_differences):
        min_or_max = worst_of(measure)
        worst = as_change(min_or_max(finite), measure)
    return num_ahead, len(all_differences), worst


def _differences(
    results: Mapping[int, Mapping[str, float | None]],
    baseline_results: Mapping[int, Mapping[str, float | None]],
    measure: str,
) -> dict[int, list[float | None]]:
    """Return each user's difference to the baseline, for each seed that both have; None if it is not finite.

    Args:
        results: Results of a method by seed and user.
        baseline_results: Results of the baseline by seed and user.
        measure: Name of the measure of the results, such as "perplexity".
    """
    differences: dict[int, list[float | None]] = {}
    for seed, baseline_by_user in baseline_results.items():
        if seed not in results:
            continue
        differences[seed] = []
        for user, baseline_result in baseline_by_user.items():
            result = results[seed].get(user)
            differences[seed].append(additive_difference(result, baseline_result, measure))
    return differences


def _as_array(differences: Mapping[int, Sequence[float | None]]) -> np.ndarray | None:
    """Return the users' differences to the baseline as an array of shape (users, seeds).

    Args:
        differences: Differences of the users, in order, by seed; None stands for one that is not finite.

    Returns:
        The array; None with fewer than two seeds, or if a difference is not finite.
    """
    if len(differences) < 2:
        return None
    if any(value is None for values in differences.values() for value in values):
        return None
    return np.array(list(differences.values()), dtype=float).T


def _verdict_of(
    name: str, seeds: tuple[int, ...], estimate: Estimate, measure: str, error_share: float, p_value: float | None
) -> Verdict:
    """Return the verdict on a method with a finite mean change: better, level or worse.

    Args:
        name: Label of the method.
        seeds: Seeds that the method and the baseline have in common.
        estimate: Its mean difference to the baseline.
        measure: Name of the measure of the results, such as "perplexity".
        error_share: Share of the error rate 0.05: its interval has the confidence ``1 - 0.05 error_share``.
        p_value: Its adjusted p-value over users; None if so few users can never reach 0.05.
    """
    change = as_change(estimate.mean, measure)
    if is_constant_share(estimate, measure):  # no interval
        return Verdict(method=name, seeds=seeds, verdict=LEVEL, change=change, p_value=p_value)
    low, high = estimate.interval(error_share)
    if low <= 0 <= high:
        verdict = LEVEL
    elif is_worse(estimate.mean, measure):
        verdict = WORSE
    else:
        verdict = BETTER
    return Verdict(
        method=name,
        seeds=seeds,
        verdict=verdict,
        change=change,
        low=_possible_change(low, measure),
        high=_possible_change(high, measure),
        confidence=1 - error_share * ERROR,
        p_value=p_value,
    )


# -------------------------------------------------------------------- text and tables


def heading(comparison: BaselineComparison) -> str:
    """Return the heading of the table of verdicts: baseline, measure, users and seeds."""
    measure, num_users = comparison.measure, comparison.users
    mean = "geometric mean of test" if measure in ("perplexity", "loss") else "mean test"
    users_text = "1 user" if num_users == 1 else f"{num_users} users"
    seeds = sorted({seed for verdict in comparison.verdicts for seed in verdict.seeds})
    seeds_text = ", ".join(map(str, seeds))
    return (
        f"against {comparison.baseline}: {mean} {measure} over {users_text} and seeds {seeds_text} "
        f"({unit_and_direction(measure)})"
    )


def verdict_rows(comparison: BaselineComparison) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of verdicts as text, with a row for each method.

    "p over users" is Wilcoxon's p-value, adjusted by Holm. "ahead" is the number of results that are better than the
    baseline's, such as "7 of 12" for 4 users and 3 seeds. "worst" is the change of the worst of these results.
    """
    header = ["method", "change", "interval", "verdict", "p over users", "ahead", "worst"]
    rows = []
    for verdict in comparison.verdicts:
        interval_cell = "–"
        if verdict.low is not None and verdict.high is not None:
            interval_cell = interval_text((verdict.low, verdict.high), comparison.measure)
        rows.append(
            [
                verdict.method,
                _change_cell(verdict.change, comparison.measure),
                interval_cell,
                verdict.verdict,
                _p_text(verdict.p_value),
                f"{verdict.ahead} of {verdict.pairs}" if verdict.pairs else "–",
                _change_cell(verdict.worst, comparison.measure),
            ]
        )
    return header, rows


def _change_cell(change: float | None, measure: str) -> str:
    """Return a change as text; a dash if it is unknown."""
    return "–" if change is None else change_text(change, measure)


def _p_text(value: float | None) -> str:
    """Return a p-value as text with two significant digits; a dash if there is none."""
    if value is None:
        return "–"
    if value < 0.001:
        return "< 0.001"
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def notes(comparison: BaselineComparison) -> list[str]:
    """Return sentences on how to read the table of verdicts, and on what it cannot show."""
    num_methods = comparison.num_tested
    verdict_note = (
        "better, worse: the interval of the mean change excludes 0; level: it contains 0, so no change is shown. "
        "Users and seeds both count as random."
    )
    if num_methods > 1:
        verdict_note += (
            f" For {num_methods} methods, Holm's correction makes the intervals wider, so that better and worse mean "
            "significant at a joint level of 5%."
        )
    smallest_p = num_methods * smallest_signed_rank(comparison.users)
    if smallest_p <= ERROR:
        p_note = "p: Wilcoxon's signed-rank test over users, with the seeds as given; adjusted by Holm."
    else:
        after_holm = f", after Holm's correction for {num_methods} methods" if num_methods > 1 else ""
        p_note = (
            f"No p over users: Wilcoxon's test needs at least {_fewest_users(num_methods)} users to reach p = {ERROR}"
            f"{after_holm}; here are {comparison.users}."
        )
    ahead_note = (
        "ahead: number of results, one per user and seed, that beat the baseline's; worst: the largest deficit."
    )
    return [verdict_note, p_note, ahead_note]


def _fewest_users(num_methods: int) -> int:
    """Return the smallest number of users for which Wilcoxon's test, after Holm's correction, can reach 0.05."""
    return math.ceil(1 + math.log2(max(1, num_methods) / ERROR))


def markdown(comparison: BaselineComparison) -> list[str]:
    """Return the table of verdicts with its heading and notes as lines of Markdown."""
    header, rows = verdict_rows(comparison)
    lines = [f"Table: {heading(comparison)}", "", markdown_line(header), "|" + "---|" * len(header)]
    lines += [markdown_line(row) for row in rows]
    lines.append("")
    lines += notes(comparison)
    return lines


def render(comparison: BaselineComparison) -> Iterator[Table | Text]:
    """Yield a comparison with a baseline for the terminal: heading, table of each method's verdict, and notes."""
    yield literal_text(heading(comparison), "italic")  # a title would be wrapped at the width of the table
    header, rows = verdict_rows(comparison)
    table = Table(box=None)
    for name in header:
        table.add_column(name, justify="left" if name in ("method", "verdict") else "right", no_wrap=True)
    for row in rows:
        cells = []
        for name, text in zip(header, row, strict=True):
            style = STYLES.get(text, "") if name == "verdict" else ""
            cells.append(literal_text(text, style))
        table.add_row(*cells)
    yield table
    yield literal_text(" ".join(notes(comparison)), "dim")


CellSpread = dict[str, float | None]
"""``mean`` and ``std`` over seeds, each None if it is not finite."""


class _MethodRow(TypedDict):
    method: str
    seeds: list[int]
    rounds: list[int]
    users: dict[str, CellSpread]
    results: dict[str, list[float | None]]
    upload_bytes_per_user_round: float
    trainable_parameters: int
    wall_seconds: float


class MethodRow(_MethodRow, total=False):
    """A method's row in a comparison.

    Means and rates have further keys that contain the measure and the unit of the data.
    """

    planned_rounds: int
    sample: JsonMapping
    privacy: JsonMapping
    warnings: list[str]
    method_settings: JsonMapping
    """Settings of the method that differ from its defaults."""
    untrained: list[str]
    """Roles that no phase of a run has reached."""


class _ComparisonTable(TypedDict):
    methods: list[MethodRow]


class ComparisonTable(_ComparisonTable, total=False):
    """A comparison as in ``table.json``; older tables have no ``against``."""

    against: BaselineComparisonRecord | None
    tuning: Tuning
    """Candidates and picked values, if ``compare --tune`` tuned the methods."""


TUNING = "tuning"
"""Folder of the candidates' runs in the folder of a comparison, and stem of the file with the picked values."""


class _TriedCandidate(TypedDict):
    values: JsonObject
    """Values by recipe key."""
    mean_valid_loss: float | None
    """Mean over users; None if the run failed or the loss is not finite."""


class TriedCandidate(_TriedCandidate, total=False):
    """A candidate that has been trained, and its result."""

    error: str
    """The error with which the run failed."""


class TunedMethod(TypedDict):
    """The picked values of a method, by recipe key, and all of its candidates."""

    picked: JsonObject
    candidates: list[TriedCandidate]


class Tuning(TypedDict):
    """Result of ``compare --tune``: the seed of the candidates, their values by key, and the methods by label."""

    seed: int
    keys: dict[str, list[object]]
    methods: dict[str, TunedMethod]


def read_tuning(folder: Path) -> Tuning | None:
    """Return the content of ``tuning.json`` in the folder of a comparison; None without the file.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / f"{TUNING}.json"
    try:
        return cast(Tuning, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: not readable ({error}); use another --out, or --force") from None


def tuned_keys(folder: Path) -> list[str]:
    """Return the recipe keys that were tuned in the folder of a comparison; empty without tuning."""
    tuning = read_tuning(folder)
    return [] if tuning is None else list(tuning["keys"])


def edge_notes(tuning: Tuning) -> list[str]:
    """Return a line for each picked number that is the smallest or largest of three or more candidates."""
    notes = []
    for label, method in tuning["methods"].items():
        for key, value in method["picked"].items():
            candidates = [candidate["values"][key] for candidate in method["candidates"]]
            if _is_at_edge(value, candidates):
                notes.append(f"{label}: {key}={value} is at the edge of its candidates; try values beyond it")
    return notes


def _is_at_edge(value: object, candidates: Sequence[object]) -> bool:
    """Return whether a value is the smallest or largest of three or more numbers; False if some are no numbers."""
    numbers = [number for number in candidates if isinstance(number, int | float) and not isinstance(number, bool)]
    if len(numbers) < len(candidates) or len(set(numbers)) < 3:  # of two numbers each is at the edge
        return False
    return value in (min(numbers), max(numbers))


def tuning_title(tuning: Tuning) -> str:
    """Return the title of the table of candidates."""
    return (
        f"picked by mean validation loss over users, seed {tuning['seed']}, of candidates with equal budgets (loss of "
        "each in nats, * picked)"
    )


def tuning_rows(tuning: Tuning) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of candidates: for each method what was picked, and each candidate's loss."""
    headings = {}  # the text of each combination, in the order of the candidates
    for method in tuning["methods"].values():
        for candidate in method["candidates"]:
            headings[_candidate_text(candidate["values"])] = None
    rows = []
    for label, method in tuning["methods"].items():
        cells = dict.fromkeys(headings, "–")
        for candidate in method["candidates"]:
            loss = candidate["mean_valid_loss"]
            text = "failed" if loss is None else f"{loss:.4f}"
            is_picked = candidate["values"] == method["picked"]
            cells[_candidate_text(candidate["values"])] = f"{text} *" if is_picked else text
        rows.append([label, _candidate_text(method["picked"]), *cells.values()])
    return ["method", "picked", *headings], rows


def _candidate_text(values: JsonMapping) -> str:
    """Return values by key as text, such as "learning_rate=0.003, rank=4"."""
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())


def _mean_and_std(values: Sequence[float | None]) -> CellSpread:
    """Return mean and standard deviation over seeds (0 for a single one); both are None if a value is not finite."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return {"mean": None, "std": None}
    std = statistics.stdev(finite) if len(finite) > 1 else 0.0
    return {"mean": statistics.fmean(finite), "std": std}


def folder_name(label: str) -> str:
    """Return the name of a method's run folders without ``-seedN``, with characters that all file systems allow."""
    return re.sub(r"[^\w=.,+-]+", "-", label)


def compare_runs(
    folders: Sequence[Path], baseline: str | None = None, labels: Mapping[Path, str] = MappingProxyType({})
) -> ComparisonTable:
    """Return a table of each method's results, as mean and deviation over seeds, with verdicts against a baseline.

    Args:
        folders: Run folders.
        baseline: A method. Of several, such as "local,fedavg", each user's best result counts.
        labels: Name of the method in the table by run folder, such as "fedprox:mu=0.1"; else that in the run.

    Raises:
        RunError: A run is missing or has not finished, or runs have different users.
        RecipeError: The baseline is not among the methods.
    """
    labelled_metrics = []
    for folder in folders:
        metrics = read_metrics(folder)
        label = labels.get(folder, metrics["method"])
        labelled_metrics.append((label, metrics))
    return compare_metrics(labelled_metrics, baseline)


def compare_metrics(labelled_metrics: Iterable[tuple[str, JsonObject]], baseline: str | None = None) -> ComparisonTable:
    """Return the table of :func:`compare_runs` for metrics in memory.

    Args:
        labelled_metrics: For each run the name of its method in the table and its metrics.
        baseline: A method. Of several, such as "local,fedavg", each user's best result counts.

    Raises:
        RunError: Runs have different users.
        RecipeError: The baseline is not among the methods.
    """
    runs_by_label: dict[str, list[JsonObject]] = {}
    for label, metrics in labelled_metrics:
        runs_by_label.setdefault(label, []).append(metrics)
    all_runs = [run for runs in runs_by_label.values() for run in runs]
    require_same_users(users_of(all_runs))
    rows = [_method_row(label, runs) for label, runs in runs_by_label.items()]
    return with_baseline({"methods": rows}, baseline)


def require_same_users(runs: Sequence[tuple[str, Collection[str]]]) -> None:
    """Check that runs have the same users, so that their results can be compared.

    Args:
        runs: The name of each run for messages, and the names of its users.

    Raises:
        RunError: A run has other users than the first.
    """
    first_name, first_users = runs[0]
    for name, users in runs[1:]:
        if set(users) != set(first_users):
            raise RunError(
                f"{name}: its users are {list_names(users)}, those of {first_name} are {list_names(first_users)}; give "
                "runs of the same users (data.on_small_user: skip may leave out others with another seed)"
            )


def users_of(runs: Iterable[JsonMapping]) -> list[tuple[str, Collection[str]]]:
    """Return a name for messages and the users of each run, for :func:`require_same_users`.

    Args:
        runs: ``metrics.json`` of each run.
    """
    return [(f"{run['method']}, seed {run['seed']}", run["users"]) for run in runs]


def with_baseline(table: ComparisonTable, baseline: str | None) -> ComparisonTable:
    """Return a comparison with verdicts against a baseline, in place of those that it has.

    With one seed or one method there are no verdicts.

    Args:
        table: The comparison, with a row of results and costs for each method.
        baseline: A method. Of several, such as "local,fedavg", each user's best result counts. None for ``local``, or
            else the first method.

    Raises:
        RunError: The table is of an older version, without the results of each seed.
        RecipeError: The baseline is not among the methods.
    """
    rows = table["methods"]
    if any("results" not in row for row in rows):
        raise RunError("the table lacks the results of each seed; write it again with `comingle compare --resume`")
    chosen_baseline = baseline_of([row["method"] for row in rows], baseline)
    results_by_method: dict[str, dict[int, dict[str, float | None]]] = {}
    for row in rows:
        results_by_seed: dict[int, dict[str, float | None]] = {}
        for i, seed in enumerate(row["seeds"]):  # row["results"] has a list over seeds for each user
            results_by_seed[seed] = {user: results_of_seeds[i] for user, results_of_seeds in row["results"].items()}
        results_by_method[row["method"]] = results_by_seed
    comparison = compare_with_baseline(results_by_method, measure_of(rows[0]), chosen_baseline)
    return {**table, "against": None if comparison is None else comparison.as_dict()}


def read_baseline_comparison(table: ComparisonTable) -> BaselineComparison | None:
    """Return a table's verdicts; None for tables of one seed and for older tables."""
    comparison = table.get("against")
    return BaselineComparison.read(comparison) if comparison else None


def _method_row(name: str, runs: Sequence[JsonMapping]) -> MethodRow:
    """Return a method's row of a comparison: means over seeds of results and speeds, and the costs.

    Args:
        name: The method's label.
        runs: ``metrics.json`` of its runs, one for each seed.
    """
    first = runs[0]
    measure, unit = measure_of(first), first.get("unit", "tokens")
    results_by_user = {}  # each user's results, one per seed
    for user in first["users"]:
        results_by_user[user] = [run["users"][user][f"test_{measure}"] for run in runs]
    row: JsonObject = {
        "method": name,
        "seeds": [run["seed"] for run in runs],
        "rounds": [run["rounds"] for run in runs],
    }
    planned_rounds = max(run.get("planned_rounds", 0) for run in runs)  # only runs that ended early have it
    if planned_rounds:
        row["planned_rounds"] = planned_rounds
    row[f"mean_test_{measure}"] = _mean_and_std([run[f"mean_test_{measure}"] for run in runs])
    row.update(_geometric_mean_entry(runs, measure))
    row["users"] = {user: _mean_and_std(results) for user, results in results_by_user.items()}
    row["results"] = results_by_user
    # Models and uploads have the same size with every seed; speeds differ.
    row["upload_bytes_per_user_round"] = first["upload_bytes_per_user_round"]
    row["trainable_parameters"] = first["trainable_parameters"]
    row[f"{unit}_per_second"] = statistics.fmean(run[f"{unit}_per_second"] for run in runs)
    row["wall_seconds"] = statistics.fmean(run["wall_seconds"] for run in runs)
    if len(runs) == 1 and "sample" in first:  # several runs have a deviation over seeds instead
        row["sample"] = first["sample"]
    if any(run.get("privacy") for run in runs):
        row["privacy"] = _most_revealing_privacy(runs)
    warnings = _warnings(runs)
    if warnings:
        row["warnings"] = warnings
    for key in ("method_settings", "untrained"):  # settings that are not defaults, and roles that never trained
        if key in first:
            row[key] = first[key]
    return cast(MethodRow, row)  # a type checker cannot know keys such as "mean_test_perplexity"


def _most_revealing_privacy(runs: Sequence[JsonMapping]) -> Mapping[str, object]:
    """Return the privacy of the seed with the largest epsilon."""
    privacy_of_runs = [run["privacy"] for run in runs if run.get("privacy")]
    return max(privacy_of_runs, key=epsilon_of)


def _warnings(runs: Sequence[JsonMapping]) -> list[str]:
    """Return the warnings of all seeds, each with its seed."""
    return [f"seed {run['seed']}: {warning}" for run in runs for warning in run.get("warnings", ())]


def _geometric_mean_entry(runs: Sequence[JsonMapping], measure: str) -> dict[str, CellSpread]:
    """Return mean and deviation over seeds of the geometric mean over users; empty for measures but perplexity."""
    means = []
    for run in runs:
        means += geometric(run["users"], measure).values()  # one value for perplexities, none for other measures
    return {GEOMETRIC: _mean_and_std(means)} if means else {}


def read_comparison(folder: Path) -> ComparisonTable:
    """Read the table of a comparison.

    Raises:
        RunError: The folder has no readable ``table.json``.
    """
    try:
        return json.loads((folder / "table.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: not the folder of a comparison ({error})") from None


def methods_in_table(folder: Path) -> list[str]:
    """Return the methods in the ``table.json`` of a comparison's folder; empty without a readable table."""
    return [str(row["method"]) for row in _rows_in_table(folder)]


def runs_in_table(folder: Path) -> list[tuple[str, int]]:
    """Return method and seed of each run in the ``table.json`` of a comparison's folder; empty without a table."""
    return [(str(row["method"]), seed) for row in _rows_in_table(folder) for seed in row.get("seeds", ())]


def _rows_in_table(folder: Path) -> list[JsonObject]:
    """Return the rows of a comparison's ``table.json``, one for each method; empty without a readable table."""
    try:
        return [{**row} for row in read_comparison(folder)["methods"] if "method" in row]
    except (RunError, TypeError, KeyError):
        return []
