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
    interval_text,
    is_worse,
    markdown_line,
    rule,
    within_limits,
    worst_of,
)
from comingle.utils.errors import RecipeError, RunError, did_you_mean, list_names
from comingle.utils.records import GEOMETRIC, SHARES, JsonMapping, JsonObject, geometric, measure_of, read_metrics
from comingle.utils.terminal import words

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
            share: Share of the error rate :data:`ERROR` (0.05): the confidence is ``1 - share * ERROR``. Of several
                simultaneous intervals, each has a share below 1.
        """
        from scipy.special import stdtrit  # slow to import

        half_width = self.error * float(stdtrit(self.freedom, 1 - share * ERROR / 2)) if self.error else 0.0
        return self.mean - half_width, self.mean + half_width

    @property
    def p_value(self) -> float:
        """Two-sided p-value for a mean of 0, by Student's t test.

        An end of the confidence interval (:meth:`interval`) is 0 if the error rate is this p-value.
        """
        if not self.error:  # t would be mean / 0
            return 1.0 if self.mean == 0 else 0.0
        from scipy.special import stdtr  # slow to import

        return float(2 * stdtr(self.freedom, -abs(self.mean) / self.error))


def one_way(values: Sequence[float]) -> Estimate:
    """Return the mean of at least two independent values.

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
    share = 1 / num_intervals  # of the error rate of 5%
    return None if len(values) < 2 else one_way(values).interval(share)


def has_no_interval(estimate: Estimate, measure: str) -> bool:
    """Return whether no confidence interval can be given, as a share such as accuracy is equal for all seeds.

    With 10 test samples, several seeds may easily give the same accuracy.

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

    The interval is computed of the differences and then converted, so its ends are possible values: a perplexity cannot
    fall by more than 100%.

    Args:
        differences: One :func:`comingle.reports.formatting.additive_difference` for each seed.
        measure: Name of the measure of the results, such as "perplexity".
        num_intervals: Number of intervals that hold simultaneously with 95% (Bonferroni); more make each one wider.

    Returns:
        Both ends, in the unit of :func:`comingle.reports.formatting.change`; None for fewer than two seeds, and for
        shares that are equal for all seeds (:func:`has_no_interval`).
    """
    if len(differences) < 2 or has_no_interval(estimate := one_way(differences), measure):
        return None
    low, high = (within_limits(as_change(end, measure), measure) for end in estimate.interval(1 / num_intervals))
    return low, high


def two_way(values: Float[np.ndarray, "user seed"]) -> Estimate:
    """Return the mean over users and seeds, both random effects: ``value = mean + user + seed + rest``.

    The variance of the mean over U users and S seeds is estimated from the mean squares of a two-way analysis of
    variance, ``(MS_users + MS_seeds - MS_rest) / (U S)``, with Satterthwaite's degrees of freedom (Biometrics Bulletin
    2, 1946). It is taken to be at least ``MS_users / (U S)`` and ``MS_seeds / (U S)``. So if there is little variance
    between users and seeds, the interval is too wide rather than too narrow.

    Args:
        values: One value per user and seed, for at least two seeds.
    """
    num_users, num_seeds = values.shape
    if num_users == 1:
        return one_way(values[0].tolist())
    mean, by_user, by_seed = values.mean(), values.mean(1), values.mean(0)
    rest = values - by_user[:, None] - by_seed + mean
    freedom_of_rest = (num_users - 1) * (num_seeds - 1)
    # Mean squares of users, of seeds, and of the rest.
    of_users, of_seeds = num_seeds * by_user.var(ddof=1), num_users * by_seed.var(ddof=1)
    of_rest = (rest**2).sum() / freedom_of_rest
    # The larger one of users and seeds, with its degrees of freedom, unless the combined variance is larger.
    variance, freedom = max((of_users, num_users - 1.0), (of_seeds, num_seeds - 1.0))
    if (combined := of_users + of_seeds - of_rest) > variance:
        mean_squares = ((of_users, num_users - 1), (of_seeds, num_seeds - 1), (of_rest, freedom_of_rest))
        variance = combined
        freedom = combined**2 / sum(square**2 / its_freedom for square, its_freedom in mean_squares)
    return Estimate(mean=float(mean), error=math.sqrt(variance / values.size), freedom=float(freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values (Scandinavian Journal of Statistics 6, 1979).

    The k-th smallest of n p-values, counted from 0, is multiplied by ``n - k``, and is at least the adjusted value
    before it and at most 1. If hypotheses with an adjusted value of at most 0.05 are rejected, the probability to
    reject at least one true hypothesis is at most 0.05.
    """
    adjusted, largest = [1.0] * len(p_values), 0.0  # largest adjusted p-value so far
    for rank, hypothesis in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, (len(p_values) - rank) * p_values[hypothesis])
        adjusted[hypothesis] = min(1.0, largest)
    return adjusted


def holm_shares(p_values: Sequence[float]) -> list[float]:
    """Return the share of the error rate 0.05 (ERROR) at which Holm's procedure tests each hypothesis.

    An interval with confidence ``1 - 0.05 share`` excludes 0 exactly if the hypothesis is rejected, so intervals agree
    with :func:`holm`. The smallest p-value has the share ``1 / n``, the next ``1 / (n - 1)``, and so on until a
    hypothesis is not rejected. Holm's procedure stops at this hypothesis, so all later ones get the same share.
    """
    num_rejected = sum(adjusted <= ERROR for adjusted in holm(p_values))
    shares = [1.0] * len(p_values)
    for rank, hypothesis in enumerate(np.argsort(p_values, kind="stable")):
        last_rank = min(rank, num_rejected)  # the share grows up to the first hypothesis that is not rejected
        shares[hypothesis] = 1 / (len(p_values) - last_rank)
    return shares


def signed_rank(differences: Sequence[float]) -> float:
    """Return the exact two-sided p-value of Wilcoxon's signed-rank test, with one value per user.

    The statistic is the sum of the ranks of ``|difference|`` over the positive differences. Zeros are left out and ties
    share the mean of their ranks. The distribution of the statistic is exact: it follows from all ``2^n`` signs.
    Source: Biometrics Bulletin 1, 1945.
    """
    nonzero = np.array([value for value in differences if value])
    if not len(nonzero):
        return 1.0
    _, distinct_index, counts = np.unique(np.abs(nonzero), return_inverse=True, return_counts=True)
    ranks = (2 * np.cumsum(counts) - counts + 1)[distinct_index]  # twice the rank, which is an integer for ties too
    probabilities = np.ones(1)  # of each sum of the ranks with a positive sign
    for rank in ranks:  # a sign is negative or positive with probability 1/2
        probabilities = (np.pad(probabilities, (0, rank)) + np.pad(probabilities, (rank, 0))) / 2
    observed = int(ranks[nonzero > 0].sum())
    lower_tail, upper_tail = probabilities[: observed + 1].sum(), probabilities[observed:].sum()
    # Two-sided: twice the smaller tail. Both tails have the observed sum, so twice a tail can be more than 1.
    return min(1.0, 2 * float(min(lower_tail, upper_tail)))


def smallest_signed_rank(users: int) -> float:
    """Return the smallest possible :func:`signed_rank`, ``2 / 2^users``: 0.125 for 4 users."""
    return min(1.0, 2.0 ** (1 - users))


Results = Mapping[str, Mapping[int, Mapping[str, float | None]]]
"""Results by method, seed and user; None if a result is not finite."""

BASELINE = "local"
BETTER, LEVEL, WORSE = "better", "level", "worse"
NOT_FINITE, ONE_SEED = "not finite", "one seed"
STYLES = {BETTER: "green", WORSE: "red"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of one method against the baseline.

    ``change`` and its interval are in the unit of :func:`comingle.reports.formatting.change`: per cent of perplexities,
    points of shares, powers of ten of losses. They and ``confidence`` are None if ``verdict`` is :data:`NOT_FINITE` or
    :data:`ONE_SEED`. The interval and ``confidence`` are also None if shares do not differ between seeds
    (:func:`has_no_interval`); the verdict is then :data:`LEVEL`.

    Args:
        method: The method.
        seeds: Its seeds.
        verdict: :data:`BETTER`, :data:`LEVEL`, :data:`WORSE`, :data:`NOT_FINITE` or :data:`ONE_SEED`.
        change: Mean change.
        low: Lower end of its interval.
        high: Upper end of its interval.
        confidence: Confidence of the interval, at least 0.95.
        p_value: Wilcoxon's p-value over users, adjusted by Holm; None if there are too few users for a value of 0.05.
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
    """All methods of a comparison against ``baseline``, which is named as by :func:`baseline_text`."""

    baseline: str
    measure: str
    users: int
    verdicts: tuple[Verdict, ...]

    @property
    def num_tested(self) -> int:
        """Number of methods with an interval, over which Holm's procedure adjusts."""
        return sum(verdict.change is not None for verdict in self.verdicts)

    def as_dict(self) -> BaselineComparisonRecord:
        """Return all fields as plain data for JSON, from which :meth:`read` returns the object.

        ``unit`` is the unit of changes: a change of a loss of 0.3 means a factor of ``10^0.3``, and a change of an
        accuracy of 1 means 0.01.
        """
        unit = {"perplexity": "per cent", "loss": "powers of ten"}.get(self.measure, "points of 0.01")
        methods = [{**asdict(verdict), "seeds": list(verdict.seeds)} for verdict in self.verdicts]
        return {
            "baseline": self.baseline,
            "measure": self.measure,
            "users": self.users,
            "unit": unit,
            "methods": methods,
        }

    @classmethod
    def read(cls, content: BaselineComparisonRecord) -> BaselineComparison:
        """Return the object of a record; inverse of :meth:`as_dict`."""
        verdicts = tuple(Verdict(**{**record, "seeds": tuple(record["seeds"])}) for record in content["methods"])
        baseline, measure, users = content["baseline"], content["measure"], content["users"]
        return cls(baseline=baseline, measure=measure, users=users, verdicts=verdicts)


def baseline_of(methods: Sequence[str], wanted: str | None) -> str:
    """Return the baseline: ``wanted`` (several methods separated by commas), else ``local``, else the first method.

    Args:
        methods: Names of the compared methods.
        wanted: The baseline that the caller wants; None for the default.

    Raises:
        RecipeError: A wanted method is not among the methods.
    """
    if wanted is None:
        return BASELINE if BASELINE in methods else methods[0]
    for name in baseline_methods(wanted):
        if name not in methods:
            hint = did_you_mean(name, methods)
            raise RecipeError(f"--against {name!r}: not among the methods.{hint} Allowed: {', '.join(methods)}")
    return ",".join(baseline_methods(wanted))


def baseline_methods(baseline: str) -> list[str]:
    """Return the methods of a baseline, each once."""
    return list(dict.fromkeys(name.strip() for name in baseline.split(",")))


def baseline_text(names: Sequence[str]) -> str:
    """Return a baseline for sentences: "local", or for several methods "the best of local, fedavg and ditto".

    With several methods, each user's result is compared with the best that the user has with any of them.
    """
    *others, last = names
    if not others:
        return last
    return f"the {'better' if len(others) == 1 else 'best'} of {', '.join(others)} and {last}"


def compare_with_baseline(results: Results, measure: str, baseline: str) -> BaselineComparison | None:
    """Compare every other method with ``baseline``: mean change with its interval, verdict and p-value.

    The verdict follows from a t-interval of the mean over users and seeds (:func:`two_way`). The p-value is of a second
    test, which assumes no distribution: Wilcoxon's signed-rank test over the users' means. Holm's procedure corrects
    both for the number of methods.

    Args:
        results: Results by method, seed and user.
        measure: Name of the measure of these results, such as "perplexity".
        baseline: One method, or several separated by commas, of which each user's best result for a seed counts.

    Returns:
        The verdicts; None if there is no other method, or none that has two seeds in common with the baseline.
    """
    baseline_results = _best_results([results[name] for name in baseline_methods(baseline)], measure)
    differences = {
        name: _differences(of_method, baseline_results, measure)
        for name, of_method in results.items()
        if name != baseline
    }
    if not any(len(by_seed) > 1 for by_seed in differences.values()):
        return None
    # Differences of users x seeds, for methods with at least two seeds whose differences are all finite.
    arrays = {name: array for name, by_seed in differences.items() if (array := _as_array(by_seed)) is not None}
    estimates = {name: two_way(array) for name, array in arrays.items()}
    # Shares of the error rate, from which the confidence of each method's interval follows. A method whose results do
    # not differ between seeds has no interval. It is counted as not significant.
    p_of_means = [1.0 if has_no_interval(estimate, measure) else estimate.p_value for estimate in estimates.values()]
    shares = dict(zip(arrays, holm_shares(p_of_means), strict=True))
    p_over_users = [signed_rank(array.mean(1).tolist()) for array in arrays.values()]
    p_values = dict(zip(arrays, holm(p_over_users), strict=True))
    num_users = len(next(iter(baseline_results.values())))
    has_p_values = len(arrays) * smallest_signed_rank(num_users) <= ERROR  # else none could be significant

    def verdict(name: str) -> Verdict:
        """Return the verdict on a method, also without an interval."""
        seeds = tuple(differences[name])
        if name not in arrays:
            return Verdict(method=name, seeds=seeds, verdict=NOT_FINITE if len(seeds) > 1 else ONE_SEED)
        p_value = p_values[name] if has_p_values else None
        return _verdict_of(name, seeds, estimates[name], measure, shares[name], p_value)

    return BaselineComparison(
        baseline=baseline_text(baseline_methods(baseline)),
        measure=measure,
        users=num_users,
        verdicts=tuple(
            replace(verdict(name), **_count_ahead(by_seed, measure)) for name, by_seed in differences.items()
        ),
    )


def _best_results(
    results: Sequence[Mapping[int, Mapping[str, float | None]]], measure: str
) -> dict[int, dict[str, float | None]]:
    """Return the results of a baseline of several methods: each user's best result for each seed that all methods have.

    Args:
        results: Results of each method by seed and user.
        measure: Name of the measure of the results, such as "perplexity".

    Returns:
        Results by seed and user; None if a method's result is not finite.
    """
    pick_best = best_of(measure)

    def best_result(seed: int, user: str) -> float | None:
        """Return a user's best result for a seed; None if a method's is not finite."""
        of_methods = [of_method[seed].get(user) for of_method in results]
        finite = [value for value in of_methods if value is not None and math.isfinite(value)]
        return pick_best(finite) if len(finite) == len(results) else None

    common_seeds = [seed for seed in results[0] if all(seed in of_method for of_method in results)]
    return {seed: {user: best_result(seed, user) for user in results[0][seed]} for seed in common_seeds}


def _count_ahead(differences: Mapping[int, Sequence[float | None]], measure: str) -> JsonObject:
    """Count a method's results that are better than the baseline's, and find the worst change.

    Returns:
        Fields of a :class:`Verdict`: ``ahead``, the number of better results, one per user and seed; ``pairs``, the
        number of all; ``worst``, the worst change, None if a result is not finite.

    Args:
        differences: Differences of all users to the baseline by seed; None stands for one that is not finite.
        measure: Name of the measure of the results, such as "perplexity".
    """
    all_differences = [value for values in differences.values() for value in values]
    finite = [value for value in all_differences if value is not None]
    num_ahead = sum(value != 0 and not is_worse(value, measure) for value in finite)  # equal results are not better
    worst: float | None = None
    if finite and len(finite) == len(all_differences):
        worst = as_change(worst_of(measure)(finite), measure)
    return {"ahead": num_ahead, "pairs": len(all_differences), "worst": worst}


def _differences(
    results: Mapping[int, Mapping[str, float | None]], baseline: Mapping[int, Mapping[str, float | None]], measure: str
) -> dict[int, list[float | None]]:
    """Return each user's difference to the baseline, for each seed that both have; None if it is not finite.

    Args:
        results: Results of a method by seed and user.
        baseline: Results of the baseline by seed and user.
        measure: Name of the measure of the results, such as "perplexity".
    """
    return {
        seed: [additive_difference(results[seed].get(user), value, measure) for user, value in users.items()]
        for seed, users in baseline.items()
        if seed in results
    }


def _as_array(differences: Mapping[int, Sequence[float | None]]) -> np.ndarray | None:
    """Return the users' differences between two methods as an array of shape (users, seeds).

    Args:
        differences: Differences of the users, in order, by seed; None stands for one that is not finite.

    Returns:
        The array; None with fewer than two seeds, or if a difference is not finite.
    """
    if len(differences) < 2 or any(value is None for values in differences.values() for value in values):
        return None
    return np.array(list(differences.values()), dtype=float).T


def _verdict_of(
    name: str, seeds: tuple[int, ...], estimate: Estimate, measure: str, share: float, p_value: float | None
) -> Verdict:
    """Return the verdict on a method with a finite mean change, without the numbers of :func:`_count_ahead`.

    Args:
        name: The method.
        seeds: Its seeds.
        estimate: Its mean difference to the baseline.
        measure: Name of the measure of the results, such as "perplexity".
        share: Share of the error rate :data:`ERROR` that Holm's procedure gives to this method, by which the
            confidence of its interval is ``1 - share * ERROR``.
        p_value: Its adjusted p-value over users; None if there are too few users.
    """
    change = as_change(estimate.mean, measure)
    if has_no_interval(estimate, measure):  # an interval of width 0 would be wrong
        return Verdict(method=name, seeds=seeds, verdict=LEVEL, change=change, p_value=p_value)
    bounds = estimate.interval(share)
    direction = WORSE if is_worse(estimate.mean, measure) else BETTER
    low, high = (within_limits(as_change(end, measure), measure) for end in bounds)
    return Verdict(
        method=name,
        seeds=seeds,
        verdict=LEVEL if bounds[0] <= 0 <= bounds[1] else direction,
        change=change,
        low=low,
        high=high,
        confidence=1 - share * ERROR,
        p_value=p_value,
    )


# -------------------------------------------------------------------- text and tables


def heading(against: BaselineComparison) -> str:
    """Return the heading of the table of verdicts: baseline, measure, users and seeds."""
    mean = "geometric mean of test" if against.measure in ("perplexity", "loss") else "mean test"
    seeds = sorted({seed for verdict in against.verdicts for seed in verdict.seeds})
    over = f"{against.users} user{'s' if against.users != 1 else ''} and seeds {', '.join(map(str, seeds))}"
    return f"against {against.baseline}: {mean} {against.measure} over {over} ({rule(against.measure)})"


def rows_of(against: BaselineComparison) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of verdicts as text, with a row for each method.

    Columns: mean change with its interval and verdict; Wilcoxon's p-value over users; how many results, one per user
    and seed, are better than the baseline's ("ahead"); and the worst change of any of these results.
    """
    return ["method", "change", "interval", "verdict", "p over users", "ahead", "worst"], [
        [
            each.method,
            "–" if each.change is None else change_text(each.change, against.measure),
            "–" if each.low is None or each.high is None else interval_text((each.low, each.high), against.measure),
            each.verdict,
            _p_text(each.p_value),
            f"{each.ahead} of {each.pairs}" if each.pairs else "–",
            "–" if each.worst is None else change_text(each.worst, against.measure),
        ]
        for each in against.verdicts
    ]


def _p_text(value: float | None) -> str:
    """Return a p-value as text with two significant digits; a dash if there is none."""
    if value is None:
        return "–"
    if value < 0.001:
        return "< 0.001"
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def notes(against: BaselineComparison) -> list[str]:
    """Return sentences on how to read the table of verdicts, and on what it cannot show."""
    num_methods = against.num_tested
    verdict_note = (
        "better, worse: the interval of the mean change excludes 0; level: it contains 0, so no change is shown. "
        "Users and seeds both count as random."
    )
    if num_methods > 1:
        verdict_note += (
            f" For {num_methods} methods, Holm's correction makes the intervals wider, so that better and worse mean "
            "significant at a joint level of 5%."
        )
    if num_methods * smallest_signed_rank(against.users) > ERROR:
        after = f", after Holm's correction for {num_methods} methods" if num_methods > 1 else ""
        p_note = (
            f"No p over users: Wilcoxon's test needs at least {_least_users(num_methods)} users to reach p = {ERROR}"
            f"{after}; here are {against.users}."
        )
    else:
        p_note = "p: Wilcoxon's signed-rank test over users, with the seeds as given; adjusted by Holm."
    return [
        verdict_note,
        p_note,
        "ahead: number of results, one per user and seed, that beat the baseline's; worst: the largest deficit.",
    ]


def _least_users(num_methods: int) -> int:
    """Return the smallest number of users for which Wilcoxon's test, after Holm's correction, can reach 0.05."""
    return math.ceil(1 + math.log2(max(1, num_methods) / ERROR))


def markdown(against: BaselineComparison) -> list[str]:
    """Return the table of verdicts with its heading and notes as lines of Markdown."""
    head, rows = rows_of(against)
    lines = [f"Table: {heading(against)}", "", markdown_line(head), "|" + "---|" * len(head)]
    return [*lines, *map(markdown_line, rows), "", *notes(against)]


def render(against: BaselineComparison) -> Iterator[Table | Text]:
    """Yield the heading, the table of verdicts and the notes for the terminal."""
    yield words(heading(against), "italic")  # a title would be wrapped at the width of the table
    head, rows = rows_of(against)
    table = Table(box=None)
    for name in head:
        table.add_column(name, justify="left" if name in ("method", "verdict") else "right", no_wrap=True)
    verdict_column = head.index("verdict")  # it is coloured
    for row in rows:
        table.add_row(*(words(cell, STYLES.get(cell, "") if i == verdict_column else "") for i, cell in enumerate(row)))
    yield table
    yield words(" ".join(notes(against)), "dim")


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


def _cell_spread(values: Sequence[float | None]) -> CellSpread:
    """Return mean and standard deviation over seeds (0 for a single one); both are None if a value is not finite."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return {"mean": None, "std": None}
    return {"mean": statistics.fmean(finite), "std": statistics.stdev(finite) if len(finite) > 1 else 0.0}


def folder_name(label: str) -> str:
    """Return the name of a method's run folders without ``-seedN``, with characters that all file systems allow."""
    return re.sub(r"[^\w=.,+-]+", "-", label)


def compare_runs(
    folders: Sequence[Path], baseline: str | None = None, labels: Mapping[Path, str] = MappingProxyType({})
) -> ComparisonTable:
    """Return mean and deviation over seeds for each method, in the given order, and comparisons with a baseline.

    Args:
        folders: Run folders.
        baseline: A method, or several separated by commas, of which the best result counts.
        labels: Names of runs that are not called by their method's name, for example with other settings.

    Raises:
        RunError: A run is missing or has not finished, or runs have different users.
        RecipeError: The baseline is not among the methods.
    """
    read = [(folder, read_metrics(folder)) for folder in folders]
    return compare_metrics([(labels.get(folder, metrics["method"]), metrics) for folder, metrics in read], baseline)


def compare_metrics(named: Iterable[tuple[str, JsonObject]], baseline: str | None = None) -> ComparisonTable:
    """Return the table of :func:`compare_runs` for metrics in memory.

    Args:
        named: The label of a method and the metrics of one run, for each run.
        baseline: A method, or several separated by commas, of which the best result counts.

    Raises:
        RunError: Runs have different users.
        RecipeError: The baseline is not among the methods.
    """
    by_method: dict[str, list[JsonObject]] = {}
    for name, metrics in named:
        by_method.setdefault(name, []).append(metrics)
    require_same_users(users_of(run for runs in by_method.values() for run in runs))
    return with_baseline({"methods": [_method_row(name, runs) for name, runs in by_method.items()]}, baseline)


def require_same_users(runs: Sequence[tuple[str, Collection[str]]]) -> None:
    """Check that runs have the same users, without which their results cannot be compared.

    Args:
        runs: The name of each run for messages, and the names of its users.

    Raises:
        RunError: A run has other users than the first.
    """
    first, expected = runs[0]
    for name, users in runs[1:]:
        if set(users) != set(expected):
            raise RunError(
                f"{name}: its users are {list_names(users)}, those of {first} are {list_names(expected)}; give runs of "
                "the same users (data.on_small_user: skip may leave out others with another seed)"
            )


def users_of(runs: Iterable[JsonMapping]) -> list[tuple[str, Collection[str]]]:
    """Return the argument of :func:`require_same_users` for metrics."""
    return [(f"{run['method']}, seed {run['seed']}", run["users"]) for run in runs]


def with_baseline(table: ComparisonTable, baseline: str | None) -> ComparisonTable:
    """Return a comparison with verdicts against a baseline, in place of those that it has.

    With one seed or one method there are no verdicts.

    Args:
        table: The comparison, with a row of results and costs for each method.
        baseline: A method, or several separated by commas, of which the best result counts; None for ``local``, or
            else the first method.

    Raises:
        RunError: The table has no results of single seeds, as older tables.
        RecipeError: The baseline is not among the methods.
    """
    rows = table["methods"]
    if any("results" not in row for row in rows):
        raise RunError("the table lacks the results of each seed; write it again with `comingle compare --resume`")
    chosen = baseline_of([row["method"] for row in rows], baseline)
    results: dict[str, dict[int, dict[str, float | None]]] = {}  # by method, seed and user
    for row in rows:
        results[row["method"]] = {
            seed: {user: values[i] for user, values in row["results"].items()} for i, seed in enumerate(row["seeds"])
        }
    comparison = compare_with_baseline(results, measure_of(rows[0]), chosen)
    return {**table, "against": None if comparison is None else comparison.as_dict()}


def read_baseline_comparison(table: ComparisonTable) -> BaselineComparison | None:
    """Return a table's verdicts; None for tables of one seed and for older tables."""
    comparison = table.get("against")
    return BaselineComparison.read(comparison) if comparison else None


def _method_row(name: str, runs: Sequence[JsonMapping]) -> MethodRow:
    """Return a method's row of a comparison.

    Args:
        name: The method's label.
        runs: Metrics of its runs, one for each seed.
    """
    measure, unit = measure_of(runs[0]), runs[0].get("unit", "tokens")
    results = {user: [run["users"][user][f"test_{measure}"] for run in runs] for user in runs[0]["users"]}
    users = {user: _cell_spread(values) for user, values in results.items()}
    row = {
        "method": name,
        "seeds": [run["seed"] for run in runs],
        "rounds": [run["rounds"] for run in runs],
        # Only runs that stopped early record how many rounds were planned.
        **({"planned_rounds": planned} if (planned := max(run.get("planned_rounds", 0) for run in runs)) else {}),
        f"mean_test_{measure}": _cell_spread([run[f"mean_test_{measure}"] for run in runs]),
        **_geometric_mean_entry(runs, measure),
        "users": users,
        "results": results,
        # Seeds have equal sizes of models and uploads, but different speeds.
        "upload_bytes_per_user_round": runs[0]["upload_bytes_per_user_round"],
        "trainable_parameters": runs[0]["trainable_parameters"],
        f"{unit}_per_second": statistics.fmean(run[f"{unit}_per_second"] for run in runs),
        "wall_seconds": statistics.fmean(run["wall_seconds"] for run in runs),
        # The interval for a sample of the users is that of a single run; several runs have a deviation over seeds.
        **({"sample": runs[0]["sample"]} if len(runs) == 1 and "sample" in runs[0] else {}),
        **({"privacy": _most_revealing(runs)} if any(run.get("privacy") for run in runs) else {}),
        **({"warnings": warned} if (warned := _warnings(runs)) else {}),
        **{key: runs[0][key] for key in ("method_settings", "untrained") if key in runs[0]},
    }
    return cast(MethodRow, row)  # names of two keys depend on measure and unit


def _most_revealing(runs: Sequence[JsonMapping]) -> Mapping[str, object]:
    """Return the privacy of the seed with the largest epsilon."""
    return max((run["privacy"] for run in runs if run.get("privacy")), key=lambda privacy: privacy["epsilon"] or 0.0)


def _warnings(runs: Sequence[JsonMapping]) -> list[str]:
    """Return the warnings of all seeds, each with its seed."""
    return [f"seed {run['seed']}: {warning}" for run in runs for warning in run.get("warnings", ())]


def _geometric_mean_entry(runs: Sequence[JsonMapping], measure: str) -> dict[str, CellSpread]:
    """Return mean and deviation over seeds of the geometric mean over users, for perplexities only."""
    means = [mean for run in runs for mean in geometric(run["users"], measure).values()]  # empty for other measures
    return {GEOMETRIC: _cell_spread(means)} if means else {}


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
    """Return method and seed of each run in the ``table.json`` of a comparison's folder; empty if it has none."""
    return [(str(row["method"]), seed) for row in _rows_in_table(folder) for seed in row.get("seeds", ())]


def _rows_in_table(folder: Path) -> list[JsonObject]:
    try:
        return [{**row} for row in read_comparison(folder)["methods"] if "method" in row]
    except (RunError, TypeError, KeyError):
        return []
