"""Epsilon against closed forms, other people's numbers, and itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from tests.quick import recipe_with

from comingle.config.settings import PrivacySection
from comingle.privacy.accounting import Release, epsilon, expected_participants, most_releases
from comingle.privacy.mechanisms import Central, calibrate, check_supported, release_of
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Layout

DELTA = 1e-5
FOUR: tuple[tuple[int, ...], ...] = ((0, 1), (1,), (1, 2, 3))


def gaussian_epsilon(noise: float, delta: float) -> float:
    """The Gaussian mechanism, exactly: Balle and Wang 2018, Theorem 8."""

    def excess(eps: float) -> float:
        low, high = -1 / (2 * noise) - eps * noise, 1 / (2 * noise) - eps * noise
        return float(norm.cdf(high) - math.exp(eps + float(norm.logcdf(low)))) - delta

    return float(brentq(excess, 1e-6, 1e4))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (0.7, 3), (2.0, 40), (10.0, 100)])
@pytest.mark.sampled(1)
def test_full_participation_is_one_gaussian_with_less_noise(accountant: str, noise: float, count: int) -> None:
    exact = gaussian_epsilon(noise / math.sqrt(count), DELTA)
    ours = epsilon(Release(noise=noise), count, DELTA, accountant)
    assert ours >= exact - 1e-9
    assert ours <= exact * (1.001 if accountant == "pld" else 1.2)


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("noise", [0.1, 1e-4, 1e-9])
def test_hardly_any_noise_is_accounted_for_without_a_grid(noise: float, rate: float) -> None:
    """Between the privacy loss's mean, which is of everybody in ten rounds, and a tenth more with five deviations."""
    found = epsilon(Release(noise=noise, rate=rate), 10, DELTA, "pld")
    mean = 10 / (2 * noise**2)
    assert 200 < found < 1.1 * mean + 5 * math.sqrt(2 * mean)
    assert found > mean or rate < 1


def test_abadi_and_others_example() -> None:
    """q = 0.01, sigma = 4, 10,000 steps: 1.26 by the moments accountant (Abadi et al. 2016, section 3.2)."""
    release = Release(noise=4.0, rate=0.01)
    rdp, pld = (epsilon(release, 10_000, DELTA, name) for name in ("rdp", "pld"))
    assert 0.9 < pld < rdp < 1.26


def naive_poisson(rate: float, noise: float, count: int, order: int) -> float:
    """Epsilon by one integer order: Mironov et al. 2019, section 3.3, and Mironov 2017, Proposition 3."""
    terms = (
        math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp(k * (k - 1) / (2 * noise**2))
        for k in range(order + 1)
    )
    return (count * math.log(math.fsum(terms)) + math.log(1 / DELTA)) / (order - 1)


def test_the_published_number_for_mnist() -> None:
    """60,000 samples, batches of 256, noise 1.12, 60 epochs: 2.92 at order 9 (TensorFlow Privacy's documentation).

    A newer conversion from Renyi's divergence (Canonne et al. 2020), which ours has, gives less.
    """
    rate, count = 256 / 60_000, 60 * 60_000 // 256
    by_order = {order: naive_poisson(rate, 1.12, count, order) for order in range(2, 40)}
    assert min(by_order, key=by_order.__getitem__) == 9
    assert by_order[9] == pytest.approx(2.92, abs=0.005)
    assert 0.8 * by_order[9] < epsilon(Release(noise=1.12, rate=rate), count, DELTA, "rdp") < by_order[9]


def wang_bound(rate: float, noise: float, count: int) -> float:
    """Epsilon of sampling without replacement: Wang et al. 2019, Theorem 9 for integer orders, slow and naive."""

    def term(order: int, j: int) -> float:
        rdp_2, rdp_j = 1 / noise**2, j / (2 * noise**2)
        of_2 = min(4 * math.expm1(rdp_2), 2 * math.exp(rdp_2))
        return math.comb(order, j) * rate**j * (of_2 if j == 2 else 2 * math.exp((j - 1) * rdp_j))

    def moment(order: int) -> float:
        return math.log1p(math.fsum(term(order, j) for j in range(2, order + 1))) / (order - 1)

    return min(count * moment(a) + math.log(1 / DELTA) / (a - 1) for a in range(2, 40))


def test_so_many_users_have_their_own_analysis() -> None:
    """At most what the naive bound says, and never what the chance of each user by itself would allow."""
    privacy = PrivacySection(noise_multiplier=4.0, sampling="fixed")
    release = release_of(privacy, 0.1, 100)
    assert release == Release(noise=2.0, sample=10, users=100)  # another user instead of one moves the sum twice as far
    ours = epsilon(release, 20, DELTA, "pld")
    assert ours <= wang_bound(0.1, 2.0, 20)
    assert ours > epsilon(Release(noise=4.0, rate=0.1), 20, DELTA, "rdp")
    assert ours > epsilon(Release(noise=2.0, rate=0.1), 20, DELTA, "rdp")


@pytest.mark.slow
def test_without_a_release_nothing_is_spent_and_more_of_them_cost_more() -> None:
    for release in (Release(noise=1.0), Release(noise=1.0, rate=0.2), Release(noise=1.0, sample=2, users=9)):
        spent = [epsilon(release, count, DELTA, "rdp") for count in range(5)]
        assert spent[0] == 0
        assert spent == sorted(set(spent))


def test_local_users_are_alone_with_twice_the_bound() -> None:
    privacy = PrivacySection(mechanism="local", noise_multiplier=3.0)
    for participation in (1.0, 0.1, FOUR):
        assert release_of(privacy, participation, 9) == Release(noise=1.5)


@pytest.mark.parametrize(
    "settings", [{}, {"sampling": "fixed"}, {"mechanism": "local"}, {"accountant": "rdp"}], ids=str
)
@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.25])
def test_the_noise_for_a_budget_is_the_least(settings: dict[str, Any], participation: float) -> None:
    privacy = PrivacySection(epsilon=3.0, **settings)
    noise = calibrate(privacy, participation, 40, 12)

    def spends(factor: float) -> float:
        known = PrivacySection(epsilon=3.0, **settings, noise_multiplier=noise * factor)
        return epsilon(release_of(known, participation, 40), 12, DELTA, known.accountant)

    assert spends(1.0) <= 3.0 < spends(0.998)


def test_by_how_much_sums_are_divided_does_not_depend_on_who_is_there() -> None:
    poisson, fixed = PrivacySection(), PrivacySection(sampling="fixed")
    assert [expected_participants(poisson, 0.3, 7, number) for number in range(2)] == [pytest.approx(2.1)] * 2
    assert expected_participants(fixed, 0.3, 7, 0) == 3
    assert [expected_participants(poisson, FOUR, 4, number) for number in range(4)] == [2, 1, 3, 2]
    assert most_releases([FOUR[number % 3] for number in range(4)]) == 4


def test_a_delta_of_one_user_and_no_noise_at_all_are_refused() -> None:
    from comingle.methods import make

    with pytest.raises(RecipeError, match=r"^privacy\.delta: got 0\.01 for 100 users; allowed: below 1/100"):
        Central(privacy=PrivacySection(delta=0.01)).check_server(make("fedavg"), Layout(slots=()), 100)
    with pytest.raises(RecipeError, match=r"^privacy: .*noise_multiplier, or epsilon"):
        check_supported(make("fedavg"), recipe_with(privacy=PrivacySection()))
