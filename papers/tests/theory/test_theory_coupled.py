"""The earlier version's Assumption 3 and Propositions 1 and 2 against independent computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize

from comingle_papers.theory.quadratics import (
    P1,
    P2,
    Coupled,
    CoupledSettings,
    alternate_coupled,
    coupled_curves,
    draw_coupled,
    minimiser,
)

SETTINGS = CoupledSettings(instances=2, size=3, meeting=2, lipschitz=(0.6, 3.0), pairs=10, steps=12)


def drawn(seed: int, lipschitz: float = 0.8) -> tuple[Coupled, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return draw_coupled(rng, 4, 3, 2, lipschitz), rng


def in_torch(problem: Coupled, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p, q, r, s = (torch.from_numpy(m) for m in (problem.outer_left, problem.inner_left, problem.outer_right,
                                                 problem.inner_right))  # fmt: skip
    return problem.decay / 2 * y @ y + (p @ (q @ x).sin()) @ (r @ (s @ y).tanh())


@pytest.mark.parametrize("seed", range(4))
def test_the_step_is_the_minimum_that_scipy_finds(seed: int) -> None:
    problem, rng = drawn(seed)
    x = 2 * rng.standard_normal(4)
    found = optimize.minimize(lambda y: problem.value(x, y), rng.standard_normal(3), method="BFGS", tol=1e-12)
    np.testing.assert_allclose(minimiser(problem, x), found.x, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_strongly_convex_by_the_modulus_at_least(seed: int) -> None:
    """Assumption 2, by autograd: the smallest curvature anywhere, and eq. 11 itself."""
    problem, rng = drawn(seed)
    for _ in range(50):
        x, y = 2 * rng.standard_normal(4), rng.standard_normal(3)
        tensors = torch.from_numpy(x), torch.from_numpy(y)
        assert float(in_torch(problem, *tensors)) == pytest.approx(problem.value(x, y))
        bends = torch.autograd.functional.hessian(lambda v, at=tensors[0]: in_torch(problem, at, v), tensors[1])
        assert float(torch.linalg.eigvalsh(bends)[0]) >= problem.modulus > 0
        best = minimiser(problem, x)
        above = problem.value(x, y) - problem.value(x, best)
        assert above >= problem.modulus / 2 * np.sum((y - best) ** 2) - 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_the_maps_are_lipschitz_by_the_constants(seed: int) -> None:
    problem, rng = drawn(seed)
    for _ in range(50):
        x, y = rng.standard_normal((2, 4)), rng.standard_normal((2, 3))
        of_left = np.linalg.norm(problem.left(x[0]) - problem.left(x[1]))
        assert of_left <= problem.left_lipschitz * np.linalg.norm(x[0] - x[1])
        of_right = np.linalg.norm(problem.right(y[0]) - problem.right(y[1]))
        assert of_right <= problem.right_lipschitz * np.linalg.norm(y[0] - y[1])


@pytest.mark.parametrize("lipschitz", [0.5, 0.95, 2.0])
def test_minimisers_are_no_further_apart_than_eq_14_says(lipschitz: float) -> None:
    problem, rng = drawn(5, lipschitz)
    assert problem.lipschitz == pytest.approx(lipschitz)
    for _ in range(100):
        x, other = rng.standard_normal((2, 4))
        apart = np.linalg.norm(minimiser(problem, x) - minimiser(problem, other))
        assert apart <= lipschitz * np.linalg.norm(x - other) * (1 + 1e-9)


def test_the_bound_is_attained_in_the_limit() -> None:
    """One coordinate, ``decay y + (1 - tanh^2 y) sin x = 0``: near 0 the slope is -1 / decay, and mu is nearly that."""
    one = np.ones((1, 1))
    problem = Coupled(outer_left=one, inner_left=one, outer_right=one, inner_right=one, decay=1e3)
    x = np.array([1e-3])
    slope = float(minimiser(problem, x)[0] - minimiser(problem, -x)[0]) / 2e-3
    assert slope == pytest.approx(-1e-3, rel=1e-5)
    assert 0.999 < abs(slope) / problem.lipschitz <= 1


def test_the_proof_has_the_wrong_sign_which_cauchy_and_schwarz_do_not_see() -> None:
    """Below eq. 13: the right-hand side is minus the inner product that is printed."""
    problem, rng = drawn(6)
    x, other = rng.standard_normal((2, 4))
    best, of_other = minimiser(problem, x), minimiser(problem, other)
    right = problem.value(x, of_other) - problem.value(x, best) + problem.value(other, best)
    right -= problem.value(other, of_other)
    printed = (problem.left(x) - problem.left(other)) @ (problem.right(best) - problem.right(of_other))
    assert right == pytest.approx(-printed)
    assert right >= problem.modulus * np.sum((best - of_other) ** 2)


def test_convexity_of_g_is_not_enough() -> None:
    """h and g may be convex as Assumption 3 says while f_1 bends down in y: then eq. 11 has no mu."""
    one = np.ones((1, 1))
    problem = Coupled(outer_left=one, inner_left=one, outer_right=one, inner_right=one, decay=0.1)
    x, y = torch.tensor([1.5]).double(), torch.tensor([0.66]).double()
    bend = torch.autograd.functional.hessian(lambda v: in_torch(problem, x, v), y)
    assert float(bend) < 0
    assert problem.modulus < 0


def test_the_scheme_goes_to_its_fixed_point_by_both_constants() -> None:
    one, rng = drawn(7, 0.7)
    two = draw_coupled(rng, 3, 4, 2, 0.9)
    points = alternate_coupled(one, two, 3 * rng.standard_normal(4), 200)
    goal = points[-1]
    np.testing.assert_allclose(minimiser(two, minimiser(one, goal)), goal, atol=1e-12)
    away = np.linalg.norm(points[:20] - goal, axis=1)
    assert (away[1:] <= 0.63 * away[:-1] + 1e-12).all()


def test_every_claim_holds_and_covers_what_its_condition_says() -> None:
    curves = list(coupled_curves(3, SETTINGS))
    assert [curve.scheme for curve in curves[::2]] == ["coupled, L_A L_B / μ = 0.6", "coupled, L_A L_B / μ = 3"]
    for curve, covered in zip(curves, (True, True, False, False), strict=True):
        first, second = curve.claims
        assert (first.statement, second.statement) == (P1, P2)
        assert first.covered
        assert second.covered == covered
        assert first.holds
        assert second.holds
        assert first.measured > 0
