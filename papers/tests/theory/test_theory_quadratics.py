"""Eq. 12 on quadratics: exact minimisers, Theorem F.1, Example 1, and what the paper says too strongly."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import linalg, optimize

from comingle_papers.theory.quadratics import (
    Quadratic,
    alternate,
    best_experts,
    best_router,
    draw_quadratic,
    energy_norms,
    fixed_point,
    interpolate,
    quadratic_constants,
    step_matrix,
)

SEEDS = range(60)


def pair(seed: int, mismatch: float) -> tuple[Quadratic, Quadratic, np.ndarray]:
    """Validation and training objective of random sizes and condition, and experts to start from."""
    rng = np.random.default_rng(seed)
    experts, router, condition = int(rng.integers(1, 7)), int(rng.integers(1, 7)), float(rng.choice([2.0, 30.0, 500.0]))
    valid, other = (draw_quadratic(rng, experts, router, condition) for _ in range(2))
    return valid, interpolate(valid, other, mismatch), 3 * rng.standard_normal(experts)


@pytest.mark.parametrize("seed", range(5))
def test_both_steps_are_the_minimisers_that_scipy_finds(seed: int) -> None:
    valid, train, experts = pair(seed, 0.5)
    router = best_router(valid, experts)
    found = optimize.minimize(lambda phi: valid.value(experts, phi), np.zeros_like(router), tol=1e-12)
    np.testing.assert_allclose(router, found.x, atol=1e-5)
    found = optimize.minimize(lambda theta: train.value(theta, router), np.zeros_like(experts), tol=1e-12)
    np.testing.assert_allclose(best_experts(train, router), found.x, atol=1e-5)


def test_a_drawn_quadratic_has_the_condition_that_was_asked_for() -> None:
    drawn = draw_quadratic(np.random.default_rng(3), 4, 3, 200.0)
    eigenvalues = linalg.eigvalsh(drawn.hessian)
    assert (eigenvalues[0], eigenvalues[-1]) == (pytest.approx(1.0), pytest.approx(200.0))
    assert drawn.value(drawn.centre[:4], drawn.centre[4:]) == 0.0


@pytest.mark.parametrize("mismatch", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.sampled(1)
def test_no_step_contracts_less_than_theorem_f1_says(mismatch: float) -> None:
    covered = 0
    for seed in SEEDS:
        valid, train, start = pair(seed, mismatch)
        found = quadratic_constants(valid, train)
        thetas, phis = alternate(valid, train, start, 25)
        experts, router = fixed_point(valid, train)
        for iterates, norm in ((thetas - experts, train.experts_block), (phis - router, valid.router_block)):
            distances = energy_norms(iterates, norm)
            assert (distances[1:] <= found.rate * (1 + 1e-9) * distances[:-1] + 1e-12 * distances[0]).all(), seed
        if found.rate < 1:
            covered += 1
            bound = found.rate ** np.arange(26) * energy_norms(thetas - experts, train.experts_block)[0]
            assert (energy_norms(thetas - experts, train.experts_block) <= bound * (1 + 1e-9) + 1e-12).all()
    assert covered > 20 or mismatch == 1.0
    assert covered == len(SEEDS) or mismatch > 0


def test_with_one_function_theorem_f1_cannot_be_improved_and_implies_example_1() -> None:
    for seed in SEEDS:
        valid, train, _ = pair(seed, 0.0)
        found = quadratic_constants(valid, train)
        radius = np.abs(linalg.eigvals(step_matrix(valid, train))).max()
        assert found.rate == pytest.approx(radius, rel=1e-8)
        assert found.example_rate is not None
        assert found.wielandt_rate is not None
        assert radius <= found.wielandt_rate * (1 + 1e-9)
        assert found.wielandt_rate < found.example_rate < 1


def test_wielandt_is_attained() -> None:
    """A = B = 1, C = c: eigenvalues 1 + c and 1 - c, and T multiplies by c^2."""
    two = Quadratic(hessian=np.array([[1.0, 0.6], [0.6, 1.0]]), centre=np.zeros(2), experts_size=1)
    found = quadratic_constants(two, two)
    assert found.wielandt_rate == pytest.approx(0.36)
    assert found.rate == pytest.approx(0.36)
    assert found.example_rate == pytest.approx(0.75)


def test_the_fixed_point_is_one_and_it_is_the_minimiser_only_if_both_agree() -> None:
    for seed in range(10):
        valid, train, _ = pair(seed, 0.3)
        experts, router = fixed_point(valid, train)
        np.testing.assert_allclose(best_experts(train, best_router(valid, experts)), experts, atol=1e-8)
        np.testing.assert_allclose(best_router(valid, best_experts(train, router)), router, atol=1e-8)
        # The text below eq. 5 calls it a global minimum of both functions.
        assert valid.value(experts, router) > 1e-3
        assert train.value(experts, router) > 1e-3
        same, _, _ = pair(seed, 0.0)
        np.testing.assert_allclose(np.concatenate(fixed_point(same, same)), same.centre, atol=1e-8)


def test_example_1_fails_in_the_norm_in_which_it_is_printed() -> None:
    """A = diag(1, 100) and a C that couples the flat direction to the steep one: a Euclidean step expands."""
    block = np.diag([1.0, 100.0])
    cross = np.array([[0.9, 2.0]])
    whole = np.block([[block, cross.T], [cross, np.array([[1.0]])]])
    quadratic = Quadratic(hessian=whole, centre=np.zeros(3), experts_size=2)
    assert linalg.eigvalsh(whole)[0] > 0
    found = quadratic_constants(quadratic, quadratic)
    assert found.example_rate is not None
    assert linalg.norm(step_matrix(quadratic, quadratic), 2) > 1.5 > found.example_rate
    thetas, _ = alternate(quadratic, quadratic, np.array([0.0, 1.0]), 1)
    assert linalg.norm(thetas[1]) > 1.5 * linalg.norm(thetas[0])
    energies = energy_norms(thetas, block)
    assert energies[1] <= found.rate * energies[0] * (1 + 1e-12)
    # The Euclidean constants of eq. 6 would not even give convergence.
    assert found.euclidean_router_lipschitz * found.euclidean_experts_lipschitz > 1 > found.rate


def test_the_router_bound_counts_from_the_first_router_not_from_a_starting_one() -> None:
    """Eq. 17 bounds Phi_k by Phi_0, which eq. 12 never uses: put it on the solution, and the bound is 0 and false."""
    quadratic, _, start = pair(1, 0.0)
    _, phis = alternate(quadratic, quadratic, start, 2)
    _, router = fixed_point(quadratic, quadratic)
    assert energy_norms(phis - router, quadratic.router_block)[0] > 1e-3


def test_two_strictly_convex_quadratics_can_drive_each_other_apart() -> None:
    """Section 3.4 says that the contraction property holds for convex quadratics; with two of them it need not."""
    valid = Quadratic(hessian=np.array([[9.0, 2.0], [2.0, 1.0]]), centre=np.zeros(2), experts_size=1)
    train = Quadratic(hessian=np.array([[1.0, 2.0], [2.0, 9.0]]), centre=np.zeros(2), experts_size=1)
    assert min(linalg.eigvalsh(valid.hessian)[0], linalg.eigvalsh(train.hessian)[0]) > 0
    assert quadratic_constants(valid, train).rate == pytest.approx(4.0)
    thetas, _ = alternate(valid, train, np.array([1.0]), 3)
    np.testing.assert_allclose(thetas[:, 0], [1.0, 4.0, 16.0, 64.0])
    assert quadratic_constants(train, valid).rate == pytest.approx(4 / 81)
