"""Intervals and p-values beside closed forms, enumerations, published examples, and how often they are right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats

from comingle.reports.comparisons import (
    Estimate,
    holm,
    holm_shares,
    interval,
    one_way,
    signed_rank,
    smallest_signed_rank,
    two_way,
)

wilcoxon: Any = scipy.stats.wilcoxon  # what scipy returns has no types
ttest: Any = scipy.stats.ttest_1samp

# ---------------------------------------------------------------- one way


def test_one_way_is_students_t() -> None:
    values = [0.3, -1.2, 2.2, 0.9]
    found = ttest(values, 0)
    assert one_way(values).p_value == pytest.approx(found.pvalue)
    assert one_way(values).interval() == pytest.approx(tuple(found.confidence_interval(0.95)))
    assert one_way(values).interval(0.2) == pytest.approx(tuple(found.confidence_interval(0.99)))
    assert interval(values) == one_way(values).interval()
    assert interval([3.0]) is None


def test_values_that_do_not_differ_leave_no_doubt() -> None:
    assert one_way([0.5, 0.5, 0.5]).interval() == (0.5, 0.5)
    assert (one_way([0.5, 0.5]).p_value, one_way([0.0, 0.0]).p_value) == (0.0, 1.0)


# ---------------------------------------------------------------- two ways


def by_hand(table: list[list[float]]) -> tuple[float, float]:
    """Variance of the mean and Satterthwaite's degrees of freedom, term by term, without numpy."""
    users, seeds = len(table), len(table[0])
    mean = sum(map(sum, table)) / (users * seeds)
    rows = [sum(row) / seeds for row in table]
    columns = [sum(row[s] for row in table) / users for s in range(seeds)]
    of_users = seeds * sum((row - mean) ** 2 for row in rows) / (users - 1)
    of_seeds = users * sum((column - mean) ** 2 for column in columns) / (seeds - 1)
    rest = sum((table[u][s] - rows[u] - columns[s] + mean) ** 2 for u in range(users) for s in range(seeds))
    rest /= (users - 1) * (seeds - 1)
    whole = of_users + of_seeds - rest
    freedom = of_users**2 / (users - 1) + of_seeds**2 / (seeds - 1) + rest**2 / ((users - 1) * (seeds - 1))
    return whole / (users * seeds), whole**2 / freedom


def test_two_ways_is_the_analysis_of_variance_by_hand() -> None:
    table = [[1.0, 2.5, 2.0], [3.0, 4.4, 4.1], [0.5, 1.1, 1.6], [6.0, 8.0, 7.3]]
    found = two_way(np.array(table))
    variance, freedom = by_hand(table)
    assert (found.mean, found.error**2, found.freedom) == pytest.approx((np.mean(table), variance, freedom))


def told(estimate: Estimate) -> tuple[float, float, float]:
    return estimate.mean, estimate.error, estimate.freedom


def test_without_seeds_of_their_own_two_ways_is_one_way_over_users() -> None:
    """Every seed gives a user the same: then users' means are all that there is."""
    users = [0.1, 0.4, -0.2, 0.8]
    assert told(two_way(np.tile(np.array(users)[:, None], 3))) == pytest.approx(told(one_way(users)))


def test_without_users_of_their_own_two_ways_is_one_way_over_seeds() -> None:
    seeds = [0.1, 0.4, 0.3]
    assert told(two_way(np.tile(np.array(seeds), (5, 1)))) == pytest.approx(told(one_way(seeds)))
    assert two_way(np.array([seeds])) == one_way(seeds)


def test_never_surer_than_users_alone_or_seeds_alone() -> None:
    draws = np.random.default_rng(0)
    for _ in range(200):
        table = draws.normal(size=(4, 3))
        error = two_way(table).error
        assert error >= one_way(table.mean(1).tolist()).error * (1 - 1e-12)
        assert error >= one_way(table.mean(0).tolist()).error * (1 - 1e-12)


def covered(draw: Callable[[np.random.Generator], np.ndarray], estimate: Callable[[np.ndarray], Estimate]) -> float:
    """In how many of 1,000 populations, whose mean is 0, the 95% interval has it."""
    draws = np.random.default_rng(7)
    reaches = [estimate(draw(draws)).interval() for _ in range(1000)]
    return sum(low <= 0 <= high for low, high in reaches) / 1000


def population(users: int, seeds: int, of_user: float, of_seed: float, rest: float) -> Callable[..., np.ndarray]:
    def draw(draws: np.random.Generator) -> np.ndarray:
        parts = draws.normal(size=(users, 1)), draws.normal(size=(1, seeds)), draws.normal(size=(users, seeds))
        return of_user * parts[0] + of_seed * parts[1] + rest * parts[2]

    return draw


@pytest.mark.parametrize("deviations", [(1, 0, 0.3), (1, 0.3, 0.3), (1, 1, 0.3), (0.1, 1, 0.3)])
@pytest.mark.parametrize("size", [(4, 3), (10, 3), (30, 5)])
@pytest.mark.sampled(2)
def test_a_95_percent_interval_has_the_truth_in_95_of_100_populations(
    size: tuple[int, int], deviations: tuple[float, float, float]
) -> None:
    assert 0.93 <= covered(population(*size, *deviations), two_way) <= 0.97


@pytest.mark.parametrize("size", [(4, 3), (10, 3), (30, 5)])
def test_where_nothing_but_noise_differs_it_is_too_wide_and_never_too_narrow(size: tuple[int, int]) -> None:
    assert covered(population(*size, 0, 0, 1), two_way) >= 0.96


def test_users_alone_are_far_too_sure_where_seeds_matter() -> None:
    """What the second way is for: the interval over users that most tables would print."""
    users_alone = covered(population(10, 3, 1, 1, 0.3), lambda table: one_way(table.mean(1).tolist()))
    assert users_alone < 0.8


# ---------------------------------------------------------------- many at once


def test_holm_on_his_own_kind_of_example() -> None:
    """0.01 <= 0.05/4 and 0.013 <= 0.05/3 are rejected; 0.03 > 0.05/2 stops it, and 0.04 stays though below 0.05."""
    p_values = [0.01, 0.04, 0.03, 0.013]
    assert holm(p_values) == pytest.approx([0.04, 0.06, 0.06, 0.04])
    assert holm_shares(p_values) == pytest.approx([1 / 4, 1 / 2, 1 / 2, 1 / 3])
    assert (holm([]), holm_shares([])) == ([], [])
    assert (holm([0.7, 0.8]), holm([0.03])) == ([1.0, 1.0], [0.03])


def closed_testing(p_values: tuple[float, ...]) -> list[bool]:
    """Holm from the principle behind it: a hypothesis is rejected where every set that holds it is, by Bonferroni."""
    numbers = range(len(p_values))
    sets = [group for size in range(1, len(p_values) + 1) for group in itertools.combinations(numbers, size)]
    rejected = {group: min(p_values[i] for i in group) <= 0.05 / len(group) for group in sets}
    return [all(rejected[group] for group in sets if number in group) for number in numbers]


def test_holm_is_closed_testing_with_bonferroni() -> None:
    draws = np.random.default_rng(1)
    for _ in range(300):
        p_values = tuple((draws.random(4) * draws.choice([0.02, 0.1, 1])).tolist())
        assert [adjusted <= 0.05 for adjusted in holm(p_values)] == closed_testing(p_values)


def test_an_interval_of_holms_share_leaves_out_0_exactly_where_he_rejects() -> None:
    draws, rejections = np.random.default_rng(2), 0
    for _ in range(300):
        found = [two_way(draws.normal(size=(6, 3)) + draws.choice([0, 0.8, 1.5])) for _ in range(4)]
        p_values = [one.p_value for one in found]
        for one, adjusted, share in zip(found, holm(p_values), holm_shares(p_values), strict=True):
            low, high = one.interval(share)
            assert (adjusted <= 0.05) == (not low <= 0 <= high)
            rejections += adjusted <= 0.05
    assert 200 < rejections < 1000


def test_holm_is_wrong_about_any_in_5_of_100_families() -> None:
    draws = np.random.default_rng(3)
    p_values = draws.random((2000, 5)).tolist()
    wrong = np.mean([min(holm(family)) <= 0.05 for family in p_values])
    assert 0.035 < wrong < 0.06


# ---------------------------------------------------------------- Wilcoxon


def all_signs(differences: list[float]) -> float:
    """The p-value from its definition: every way to give the ranks signs, as likely as any other."""
    known = [value for value in differences if value]
    ranks = scipy.stats.rankdata(np.abs(known))
    found = sum(rank for rank, value in zip(ranks, known, strict=True) if value > 0)
    sums = [
        sum(rank for rank, up in zip(ranks, signs, strict=True) if up)
        for signs in itertools.product([False, True], repeat=len(known))
    ]
    below, above = (sum(1 for one in sums if side(one)) for side in (lambda s: s <= found, lambda s: s >= found))
    return min(1.0, 2 * min(below, above) / len(sums))


@pytest.mark.parametrize(
    "differences",
    [
        [1.0, 2.0, 3.0, 4.0],
        [-1.0, 2.0, 3.0, 4.0, -5.0, 6.5],
        [1.0, 1.0, -1.0, 2.0, 2.0],
        [0.0, 0.5, -0.5, 0.0, 3.0],
        [-3.0],
        [2.0, -2.0],
    ],
)
def test_signed_ranks_count_all_signs(differences: list[float]) -> None:
    assert signed_rank(differences) == pytest.approx(all_signs(differences))


def test_signed_ranks_of_a_published_example() -> None:
    """Darwin's maize (Cross and Self Fertilisation, 1876): 15 pairs, crossed less selfed, in eighths of an inch.

    The sum of negative ranks is 24, and the exact p-value is 0.0413, as the documentation of scipy has it.
    """
    differences = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert signed_rank(differences) == pytest.approx(0.0413, abs=5e-5)
    assert signed_rank([-value for value in differences]) == signed_rank(differences)


def test_signed_ranks_are_scipys_exact_ones() -> None:
    differences = np.random.default_rng(4).normal(0.3, 1, 40)
    assert signed_rank(differences.tolist()) == pytest.approx(wilcoxon(differences, method="exact").pvalue)


def test_hundreds_of_users_are_counted_too() -> None:
    differences = np.random.default_rng(5).normal(0.1, 1, 300)
    assert signed_rank(differences.tolist()) == pytest.approx(wilcoxon(differences).pvalue, rel=0.02)


@pytest.mark.parametrize("users", range(1, 9))
def test_nothing_is_below_what_so_few_users_can_say(users: int) -> None:
    assert signed_rank([1.0 + number for number in range(users)]) == pytest.approx(smallest_signed_rank(users))
    assert math.isclose(smallest_signed_rank(4), 0.125)


def test_no_difference_at_all_says_nothing() -> None:
    assert (signed_rank([0.0, 0.0]), signed_rank([])) == (1.0, 1.0)
