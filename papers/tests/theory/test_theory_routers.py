"""FLoRAL's routers as formulas, and the errors of shared bases, against enumeration and finite differences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import optimize, special

from comingle_papers.theory.clusters import (
    SharedBaseProblem,
    aggregation_weights,
    draw_clients,
    gradient_error,
    logit_gradient,
    logit_step,
    losses_of_mixture,
    mismatch_bound,
    router,
    sharing_bound,
)

# ---------------------------------------------------------------- eq. 5


def test_with_the_clusters_own_loss_all_routers_are_the_same_after_an_exchange() -> None:
    """L4: eq. 5 has f_c. Models are everybody's then, so p(k|c) is p(k), whatever has been learned."""
    amounts, of_cluster = np.array([0.2, 0.5, 0.3]), np.array([0.1, 2.0])
    shares = router(np.broadcast_to(of_cluster, (3, 2)), 1.5)
    np.testing.assert_allclose(aggregation_weights(shares, amounts), np.stack([amounts, amounts], 1))
    own = router(np.array([[0.1, 2.0], [2.0, 0.1], [0.1, 2.0]]), 1.5)  # appendix C.1: with f^k
    assert aggregation_weights(own, amounts)[1, 1] > 0.8


def test_routers_forget_as_steps_become_smaller() -> None:
    """L5: eta_t falls to zero, and eq. 5 with it to equal shares; Theorem 4.5 assumes that the mismatch falls."""
    losses = np.array([[0.0, 3.0]])
    assert router(losses, 2.0)[0, 0] > 0.99
    assert [round(float(router(losses, 1 / t)[0, 0]), 2) for t in (1, 10, 100, 1000)] == [0.95, 0.57, 0.51, 0.5]


@pytest.mark.parametrize("seed", range(20))
def test_the_mismatch_is_less_than_lemma_a6_says_and_than_four(seed: int) -> None:
    """L6: no distributions are further apart than 4, and the lemma allows more of three users or two clusters."""
    rng = np.random.default_rng(seed)
    users, clusters = int(rng.integers(2, 6)), int(rng.integers(2, 5))
    losses, lowest = rng.exponential(5, (users, clusters)), rng.exponential(0.1, (users, clusters))
    amounts = rng.dirichlet(np.ones(users))
    rate, final = 0.1, 1.0
    true, guessed = (
        aggregation_weights(router(lowest, final), amounts),
        aggregation_weights(router(losses, rate), amounts),
    )
    for c in range(clusters):
        found = float(np.abs(guessed[:, c] - true[:, c]).sum() ** 2)
        gap = float(true[:, c] @ (losses[:, c] - lowest[:, c]))
        allowed = mismatch_bound(rate, final, max(gap, 0.0), float(lowest[:, c].min()), users, clusters, 0.0)
        assert found <= 4 < allowed


# ---------------------------------------------------------------- FML and MFL


@pytest.mark.parametrize("seed", range(20))
def test_mixing_weights_loses_no_more_than_mixing_losses_where_the_loss_is_convex(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs, labels = rng.standard_normal((9, 4)), rng.choice([-1.0, 1.0], 9)

    def logistic(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -labels * (inputs @ w)).mean())

    fml, mfl = losses_of_mixture(logistic, 3 * rng.standard_normal((3, 4)), rng.dirichlet(np.ones(3)))
    assert fml <= mfl
    same = rng.standard_normal(4)
    assert losses_of_mixture(logistic, np.stack([same] * 3), rng.dirichlet(np.ones(3))) == pytest.approx(
        [logistic(same)] * 2
    )


def test_of_nets_it_may_lose_more() -> None:
    """Two hidden units in either order are the same net; halfway between both they are not."""

    def loss(w: np.ndarray) -> float:
        hidden = np.maximum(np.outer([-1.0, 1.0], w[:2]), 0)
        return float(((hidden @ w[2:] - [-1.0, 1.0]) ** 2).mean())

    models = np.array([[1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, -1.0, 1.0]])
    assert [loss(model) for model in models] == [0, 0]
    fml, mfl = losses_of_mixture(loss, models, np.array([0.5, 0.5]))
    assert fml > mfl == 0


# ---------------------------------------------------------------- appendix C.2


def test_the_gradient_of_the_logits_is_that_of_finite_differences() -> None:
    rng = np.random.default_rng(3)
    models, logits, centre = rng.standard_normal((4, 5)), rng.standard_normal(4), rng.standard_normal(5)

    def loss(theta: np.ndarray) -> float:
        return float(np.sum((special.softmax(theta) @ models - centre) ** 4))

    shares = special.softmax(logits)
    gradient = 4 * (shares @ models - centre) ** 3
    wanted = optimize.approx_fprime(logits, loss, 1e-7)
    np.testing.assert_allclose(logit_gradient(gradient, models, shares), wanted, atol=1e-4)


def test_one_step_is_eq_5_where_the_loss_is_affine() -> None:
    rng = np.random.default_rng(4)
    models, slope = rng.standard_normal((3, 6)), rng.standard_normal(6)
    step, update = logit_step(lambda w: float(slope @ w) + 2, lambda w: slope, models, 0.7)
    np.testing.assert_allclose(step, update, rtol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_otherwise_it_is_off_by_the_curvature(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models, hessian = rng.standard_normal((3, 5)), draw_clients(rng, 1, 5, 7.0)[0][0]
    step, update = logit_step(lambda w: float(w @ hessian @ w / 2), lambda w: hessian @ w, models, 0.4)
    away = np.log(step / update)
    # Logits differ, up to a constant, by at most rate / C * L / 2 * |w_c - mean w|^2, with L the largest curvature.
    allowed = 0.4 / 3 * 7.0 / 2 * ((models - models.mean(0)) ** 2).sum(1).max()
    assert 1e-6 < np.ptp(away) <= allowed


# ---------------------------------------------------------------- appendix B


def problem_of(seed: int, clients: int = 3) -> tuple[SharedBaseProblem, np.ndarray, np.ndarray]:
    """Clients of two clusters that share half of their numbers, a guess of the routers, and models."""
    rng = np.random.default_rng(seed)
    hessians, centres = draw_clients(rng, clients, 4, 6.0)
    routers = rng.dirichlet([0.5, 0.5], clients)
    amounts = rng.dirichlet(np.full(clients, 3.0))
    problem = SharedBaseProblem(hessians=hessians, centres=centres, data_shares=amounts, routers=routers, base_size=2)
    models = rng.standard_normal((clients, 2, 4))
    models[..., :2] = models[:, :1, :2]
    return problem, rng.dirichlet([1.0, 1.0], clients), models


def test_the_error_is_that_of_all_draws() -> None:
    problem, guessed, models = problem_of(0, clients=2)
    joint = problem.data_shares[:, None] * problem.routers
    within = joint / joint.sum(0)
    trusted = problem.data_shares[:, None] * guessed
    each = [[[h @ (models[k, c] - m) for h, m in zip(problem.hessians, problem.centres, strict=True)]
             for c in range(2)] for k in range(2)]  # fmt: skip
    true = sum(joint[k, c] * within[d, c] * each[k][c][d] for k, c, d in product(range(2), repeat=3))
    pairs, error = list(product(range(2), repeat=2)), 0.0
    for drawn in product(range(2), repeat=8):  # the base's, then the adaptors', of each client and cluster
        chance = np.prod([problem.data_shares[i] for i in drawn[:4]])
        chance *= np.prod([within[i, c] for i, (_, c) in zip(drawn[4:], pairs, strict=True)])
        total = np.zeros(4)
        for place, (k, c) in enumerate(pairs):
            total[:2] += trusted[k, c] * each[k][c][drawn[place]][:2]
            total[2:] += trusted[k, c] * each[k][c][drawn[4 + place]][2:]
        error += chance * float(np.sum((true - total) ** 2))
    assert gradient_error(problem, guessed, models).error == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_eq_31_bounds_it(seed: int) -> None:
    problem, guessed, models = problem_of(seed, clients=5)
    for trusted in (guessed, problem.routers):
        found = gradient_error(problem, trusted, models)
        parts = {
            "second_moment": found.second_moment,
            "adaptor_variances": found.adaptor_variances,
            "base_variance": found.base_variance,
        }
        assert found.error <= sharing_bound(problem, trusted, heterogeneity=found.heterogeneity, **parts)


def even(routers: np.ndarray) -> SharedBaseProblem:
    clients = len(routers)
    flat = {"hessians": np.zeros((clients, 2, 2)), "centres": np.zeros((clients, 2))}
    return SharedBaseProblem(**flat, data_shares=np.full(clients, 1 / clients), routers=routers, base_size=1)


def test_eq_32_and_33_are_cases_of_eq_31() -> None:
    base, adaptor, moment, unlike = 0.7, 0.3, 1.9, 0.05
    parts = {"second_moment": moment, "base_variance": base}
    one = even(np.ones((6, 1)))  # Remark B.4
    found = sharing_bound(one, one.routers, adaptor_variances=np.array([adaptor]), heterogeneity=0.0, **parts)
    assert found == pytest.approx((4 * base + 2 * adaptor) / 6)
    copies = even(np.full((6, 3), 1 / 3))
    found = sharing_bound(copies, copies.routers, adaptor_variances=np.full(3, adaptor), heterogeneity=0.0, **parts)
    assert found == pytest.approx(4 * base / (6 * 3) + 2 * adaptor / 6)  # eq. 32
    clustered = even(np.eye(3)[np.arange(6) % 3])
    uniform = np.full((6, 3), 1 / 3)
    found = sharing_bound(clustered, uniform, adaptor_variances=np.full(3, adaptor), heterogeneity=unlike, **parts)
    mismatch = 4 * (3 - 1) ** 2 / 3**2
    assert found == pytest.approx(4 * base / 6 + 2 * adaptor / (6 / 3) + 2 * moment * mismatch + 4 * unlike)  # eq. 33
