"""The lower bound on epsilon: against closed forms, and against mechanisms whose every outcome is counted."""

from __future__ import annotations

import math
from itertools import product

import pytest
from scipy.integrate import quad
from scipy.stats import binom, norm

from comingle.audits.auditing import epsilon_lower_bound, epsilon_of_replacing, guess_probability
from comingle.privacy.accounting import Release, epsilon


@pytest.mark.parametrize("count", [8, 12, 40])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_all_right_proves_the_closed_form(count: int, confidence: float) -> None:
    right = (1 - confidence) ** (1 / count)  # q**count = 1 - confidence
    proven = epsilon_lower_bound(trials=count, guesses=count, correct=count, delta=0.0, confidence=confidence)
    assert proven == pytest.approx(math.log(right / (1 - right)), abs=1e-9)


def test_too_few_right_prove_nothing() -> None:
    assert epsilon_lower_bound(trials=4, guesses=4, correct=4, delta=0.0) == 0  # 1/16 is above one in twenty
    assert epsilon_lower_bound(trials=100, guesses=100, correct=50, delta=0.0) == 0
    assert epsilon_lower_bound(trials=9, guesses=0, correct=0, delta=1e-5) == 0


@pytest.mark.parametrize("true", [0.0, 0.4, 1.5])
@pytest.mark.parametrize("leaks", [0.0, 0.03])
@pytest.mark.parametrize("coins", [1, 3, 6])
def test_the_chance_bounds_every_outcome_of_a_mechanism_that_is_private(true: float, leaks: float, coins: int) -> None:
    # Each coin is told with probability delta, and else by randomised response: (epsilon, delta) of each coin.
    q = leaks + (1 - leaks) / (1 + math.exp(-true))
    for correct in range(coins + 1):
        happens = sum(
            math.prod(q if right else 1 - q for right in outcome)
            for outcome in product((False, True), repeat=coins)
            if sum(outcome) >= correct
        )
        bound = guess_probability(true, trials=coins, guesses=coins, correct=correct, delta=leaks)
        assert happens <= bound + 1e-12
        if leaks == 0:
            assert happens == pytest.approx(bound)  # which is tight


@pytest.mark.parametrize("true", [0.0, 0.5, 2.0])
def test_what_is_proven_is_false_as_seldom_as_is_said(true: float) -> None:
    coins, q = 30, 1 / (1 + math.exp(-true))
    wrong = sum(
        float(binom.pmf(v, coins, q))
        for v in range(coins + 1)
        if epsilon_lower_bound(trials=coins, guesses=coins, correct=v, delta=0.0) > true
    )
    assert wrong <= 0.05


def test_more_delta_proves_less() -> None:
    proven = [epsilon_lower_bound(trials=40, guesses=40, correct=38, delta=delta) for delta in (0.0, 1e-5, 1e-3, 1e-2)]
    assert proven == sorted(proven, reverse=True)
    assert proven[0] > proven[-1]


# -------------------------------------------------------------------- what the account promises of a replacement


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.8, 2.0, 5.0])
def test_replacing_doubles_a_gaussians_sensitivity(noise: float) -> None:
    pytest.importorskip("dp_accounting")
    found, delta, mu = (
        epsilon_of_replacing(Release(noise=noise), 1, 1e-4, "pld", is_for_replacing=False),
        1e-4,
        2 / noise,
    )
    # Balle and Wang 2018, Theorem 8.
    spent = norm.cdf(mu / 2 - found / mu) - math.exp(found) * norm.cdf(-mu / 2 - found / mu)
    assert spent == pytest.approx(delta, rel=0.02)
    counted = Release(noise=noise)
    assert epsilon_of_replacing(counted, 3, delta, "pld", is_for_replacing=True) == epsilon(counted, 3, delta, "pld")


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.slow
def test_replacing_one_who_may_be_drawn_is_bounded(rate: float) -> None:
    pytest.importorskip("dp_accounting")
    noise, delta = 1.5, 1e-4
    found = epsilon_of_replacing(Release(noise=noise, rate=rate), 1, delta, "rdp", is_for_replacing=False)

    def stick(x: float) -> float:
        one = (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, 1, noise)
        other = (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, -1, noise)
        return max(float(one - math.exp(found) * other), 0.0)

    assert quad(stick, -20, 20, limit=500)[0] <= delta
    assert math.isfinite(found)
