"""FLoRAL's Lemmas A.6 to A.8 and Theorem A.9: where they hold, and that each fails once its statement is changed."""

from __future__ import annotations

import numpy as np
import pytest

from comingle_papers.theory.claims import Claim, Curve
from comingle_papers.theory.clusters import (
    A6,
    A7,
    A8,
    A9,
    A9_PRINTED,
    PINSKER,
    Cluster,
    ClusterSettings,
    Descent,
    Schedule,
    aggregation_weights,
    cluster_curves,
    descend,
    descent_bound,
    draw_recursion,
    mismatch_bound,
    printed_routed_rate,
    rate_bound,
    routed_descent_bound,
    routed_rate_bound,
    router,
    sum_bound,
)

STATEMENTS = {A6, PINSKER, A7, A8, A9}


def curves(**changes: float) -> list[Curve]:
    sizes = {"clients": 3, "size": 2, "steps": 30, "replicas": 8, "local_steps": 2, "instances": 6}
    settings = ClusterSettings(**{**sizes, "condition": 9.0, "mismatches": (0.0, 1.0), "decay": 0.5, **changes})
    return list(cluster_curves(4, settings))


def claims_of(found: list[Curve], statement: str) -> list[Claim]:
    return [claim for curve in found for claim in curve.claims if claim.statement == statement]


def one_client(condition: float, shift: float, scale: float, steps: int) -> tuple[Cluster, Schedule, Descent]:
    """Gradient descent on two numbers, from a point where the curvature is least."""
    cluster = Cluster(hessians=np.diag([1.0, condition])[None], centres=np.zeros((1, 2)), weights=np.ones(1))
    schedule, rng = Schedule(scale=scale, shift=shift, local_steps=1), np.random.default_rng(0)
    start = np.array([1.0, 0.0])
    found = descend(
        cluster, schedule, initial_weights=np.ones(1), decay=0.5, start=start, steps=steps, replicas=1, rng=rng
    )
    return cluster, schedule, found


def test_each_holds_on_every_instance() -> None:
    found = curves()
    for statement in STATEMENTS:
        claims = claims_of(found, statement)
        assert len(claims) == 2 * 6, statement
        assert all(claim.covered and claim.holds for claim in claims), statement


# ---------------------------------------------------------------- Lemma A.6


def test_the_mismatch_bound_needs_its_logarithm() -> None:
    """Both users have the best model of cluster 0, and one is far from that of cluster 1: no gap, but a mismatch."""
    losses, even = np.array([[0.0, 10.0], [0.0, 0.0]]), np.full(2, 0.5)
    truth, guessed = (aggregation_weights(router(found, 1.0), even) for found in (np.zeros((2, 2)), losses))
    apart = float(np.abs(truth - guessed)[:, 0].sum() ** 2)
    assert apart == pytest.approx((2 / 6) ** 2, rel=1e-3)  # p = (1/2, 1/2), p_hat = (2/3, 1/3)
    bound = mismatch_bound(eta=1.0, true_eta=1.0, gap=0.0, lowest_loss=0.0, num_users=2, num_clusters=2, drift=0.0)
    assert bound - 4 * np.log(4) < apart <= bound


@pytest.mark.slow
def test_pinsker_s_inequality_needs_its_factor() -> None:
    found = curves(instances=40)
    assert all(claim.holds for claim in claims_of(found, PINSKER))
    assert any(claim.measured > claim.bound / 2 for claim in claims_of(found, PINSKER) if claim.bound is not None)
    assert all(claim.measured <= 4 < 4 * np.log(3 * 2) for claim in claims_of(found, A6))  # L6: true of any router


# ---------------------------------------------------------------- Lemma A.7


def test_the_descent_is_that_of_the_paper_s_terms() -> None:
    """Gradient descent without noise from (0, 1), where the curvature is L: every term by hand."""
    condition, shift = 9.0, 3 * 8 * 9.0
    cluster = Cluster(hessians=np.diag([1.0, condition])[None], centres=np.zeros((1, 2)), weights=np.ones(1))
    schedule, rng = Schedule(scale=3, shift=shift, local_steps=1), np.random.default_rng(0)
    start = np.array([0.0, 1.0])
    found = descend(cluster, schedule, initial_weights=np.ones(1), decay=0.5, start=start, steps=3, replicas=1, rng=rng)
    rate, gap = 3 / shift, condition / 2
    assert found.estimated_mean_gap[0] == pytest.approx(gap)
    assert found.next_squared_distance[0] == pytest.approx((1 - rate * condition) ** 2)
    two_clusters = 16 * rate**2 * condition**2 * np.log(2)
    bound = (1 - rate) - rate / 2 * gap + two_clusters + 9 * rate**3 * condition * condition**2
    assert routed_descent_bound(found, cluster, 1, 2)[0] == pytest.approx(bound)
    alone = routed_descent_bound(found, cluster, 1, 1)
    assert (found.next_squared_distance <= alone).all()
    assert (found.next_squared_distance > alone - 7 / 2 * rate * found.estimated_mean_gap)[
        0
    ]  # were it 4 eta in place of eta / 2


def test_it_is_no_tighter_than_lemma_a4() -> None:
    rng = np.random.default_rng(3)
    hessians = np.stack([np.diag(rng.uniform(1, 9, 2)) for _ in range(3)])
    cluster = Cluster(hessians=hessians, centres=rng.standard_normal((3, 2)), weights=np.array([0.5, 0.3, 0.2]))
    guessed, (mu, smooth) = np.full(3, 1 / 3), cluster.moduli
    schedule = Schedule(scale=3, shift=24 * smooth / mu / (2 / 3), local_steps=2)
    found = descend(
        cluster, schedule, initial_weights=guessed, decay=0.5, start=np.ones(2), steps=60, replicas=16, rng=rng
    )
    assert (descent_bound(found, cluster, 2) <= routed_descent_bound(found, cluster, 2, 2)).all()
    assert (rate_bound(found, cluster, schedule) <= routed_rate_bound(found, cluster, schedule, 2)).all()
    assert (found.average_gap <= routed_rate_bound(found, cluster, schedule, 2)).all()


# ---------------------------------------------------------------- Lemma A.8


@pytest.mark.parametrize("seed", range(20))
def test_sums_of_the_recursion_are_bounded_and_attain_the_bound(seed: int) -> None:
    mu, shift, steps = 0.3, 1.0 + seed / 4, 12
    found = draw_recursion(np.random.default_rng(seed), mu=mu, shift=shift, steps=steps)
    for t in range(steps):
        rate = 1 / (mu * (t + shift))
        right = (1 - mu * rate) * found.a[t] - rate * found.b[t] + rate**2 * found.c[t]
        assert found.a[t + 1] == pytest.approx(right, abs=1e-12)
    assert min(found.a.min(), found.b.min(), found.c.min()) >= 0
    by_hand = (shift - 1) * mu * found.a[0] + sum(c / (mu * (t + shift)) for t, c in enumerate(found.c))
    assert sum_bound(found, mu, shift) == pytest.approx(by_hand)
    assert found.b.sum() == pytest.approx(by_hand)  # so that no smaller bound holds: not (s - 2), not half of eta c


def test_it_does_not_apply_to_weights_that_grow() -> None:
    """L9: ``a_t = (t + s)^2 |w_t - w*|^2`` of gradient descent does not obey the recursion that it is used with."""
    _, schedule, found = one_client(condition=10.0, shift=40.0, scale=1, steps=50)
    weights = (np.arange(51) + schedule.shift) ** 2
    a, after = weights[:50] * found.squared_distance, weights[1:] * found.next_squared_distance
    allowed = (1 - found.step_sizes) * a - found.step_sizes * weights[
        :50
    ] * found.true_mean_gap / 2  # without noise, and H = 1
    assert (after > allowed).all()


# ---------------------------------------------------------------- Theorem A.9


@pytest.mark.parametrize("condition", [10.0, 40.0])
@pytest.mark.slow
def test_the_printed_rate_fails_where_ours_holds(condition: float) -> None:
    """With one client and one cluster log K C is 0, and what is left of the start falls as kappa^2 / T^2."""
    shift = 4 * condition
    cluster, schedule, found = one_client(condition, shift, scale=1, steps=6000)
    assert shift >= 16 * found.second_moment == pytest.approx(16)  # the theorem's condition on s
    printed = printed_routed_rate(found, cluster, schedule, 1)
    taken = 6000
    by_hand = 18 * condition / taken**2 + 24 * (shift - 1) * shift**2 / taken**3
    assert printed[-1] == pytest.approx(by_hand)
    assert found.average_gap[-1] > 1.5 * printed[-1]
    cluster, schedule, found = one_client(condition, 24 * condition, scale=3, steps=2000)
    assert (found.average_gap <= routed_rate_bound(found, cluster, schedule, 1)).all()
    assert found.average_gap[-1] > routed_rate_bound(found, cluster, schedule, 1)[-1] / 200


@pytest.mark.slow
def test_the_theory_command_shows_that_the_printed_one_fails() -> None:
    (claim,) = claims_of(curves(steps=200), A9_PRINTED)
    assert claim.covered
    assert not claim.holds
    (outside,) = claims_of(curves(condition=2.0), A9_PRINTED)  # s = 8 is less than 16 G^2 / mu
    assert not outside.covered
