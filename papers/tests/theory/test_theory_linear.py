"""Eq. 20 to 28 on linear experts: every sub-step against an optimiser that knows nothing of its closed form."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import optimize, special

from comingle_papers.theory.linear import (
    LinearProblem,
    Point,
    alternate,
    best_experts,
    best_router,
    best_shares,
    coupled_objective,
    decoupled_objective,
    gates,
    hessian,
    local_rate,
    minimum,
    weights_gradient,
)

BOTH = pytest.mark.parametrize("loss", ["logistic", "squared"])


def eq_25(problem: LinearProblem, experts: torch.Tensor, router: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """F_mu written down again, in torch, so that autograd can differentiate it."""
    x, y = torch.from_numpy(problem.inputs), torch.from_numpy(problem.targets)
    t = (shares * (x @ experts)).sum(1)
    losses = torch.nn.functional.softplus(-y * t) if problem.loss.name == "logistic" else (t - y) ** 2 / 2
    logits = x @ router
    divergence = (shares * (shares.log() - logits)).sum(1) + torch.logsumexp(logits, 1)
    return (losses + problem.coupling * divergence).mean() + problem.decay / 2 * (
        (experts**2).sum() + (router**2).sum()
    )


def tensors(point: Point) -> list[torch.Tensor]:
    return [torch.from_numpy(part).requires_grad_() for part in (point.experts, point.router, point.shares)]


# ---------------------------------------------------------------- objective, gradient, Hessian


@BOTH
def test_objective_gradient_and_hessian_are_those_of_autograd(loss, make_problem, make_point) -> None:
    for seed in range(6):
        problem = make_problem(seed, loss, samples=4)
        point = make_point(seed, problem)
        parts = tensors(point)
        value = eq_25(problem, *parts)
        assert decoupled_objective(problem, point) == pytest.approx(value.item(), rel=1e-12)
        gradient = torch.cat([g.ravel() for g in torch.autograd.grad(value, parts[:2])])
        np.testing.assert_allclose(weights_gradient(problem, point), gradient.numpy(), rtol=1e-10, atol=1e-12)
        blocks = torch.autograd.functional.hessian(lambda a, b, c, p=problem: eq_25(p, a, b, c), tuple(parts))
        rows = [torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for row, p in zip(blocks, parts, strict=True)]
        expected = torch.cat(rows).numpy()
        np.testing.assert_allclose(hessian(problem, point), expected, rtol=1e-9, atol=1e-10)


@BOTH
def test_with_the_gates_as_shares_the_decoupled_objective_is_the_coupled_one(loss, make_problem, make_point) -> None:
    problem = make_problem(0, loss)
    point = make_point(0, problem)
    bound = dataclasses.replace(point, shares=gates(problem, point.router))
    coupled = coupled_objective(problem, point.experts, point.router)
    assert decoupled_objective(problem, bound) == pytest.approx(coupled, rel=1e-12)
    # Decoupling is a relaxation, and mu = infinity undoes it.
    for coupling, slack in ((0.1, None), (1e6, 1e-4)):
        freed = dataclasses.replace(problem, coupling=coupling)
        shares = best_shares(freed, point.experts, point.router)
        value = decoupled_objective(freed, dataclasses.replace(point, shares=shares))
        assert value < coupled
        assert slack is None or coupled - value < slack


# ---------------------------------------------------------------- the three steps of eq. 28


@BOTH
@pytest.mark.parametrize("coupling", [0.02, 0.7, 30.0])
@pytest.mark.sampled(1)
def test_the_shares_step_is_the_minimum_over_the_simplex(loss, coupling, make_problem, make_point) -> None:
    problem = make_problem(1, loss, coupling=coupling, samples=5)
    point = make_point(1, problem, scale=2.0)
    shares = best_shares(problem, point.experts, point.router)
    np.testing.assert_allclose(shares.sum(1), 1.0, rtol=1e-12)
    assert (shares >= 0).all()

    def value(free: np.ndarray) -> float:
        candidate = special.softmax(free.reshape(shares.shape), axis=1)
        return decoupled_objective(problem, dataclasses.replace(point, shares=candidate))

    found = optimize.minimize(value, np.zeros(shares.size), method="BFGS", options={"gtol": 1e-9, "maxiter": 3000})
    reached = decoupled_objective(problem, dataclasses.replace(point, shares=shares))
    assert reached <= found.fun + 1e-12
    if coupling > 0.1:  # below, the softmax that BFGS moves through is too flat for it
        assert reached == pytest.approx(found.fun, abs=1e-7)
    # Stationary along the simplex: the derivative by a share is the same for all experts of a sample.
    each, logits = problem.inputs @ point.experts, problem.inputs @ point.router
    slopes = problem.loss.slope((shares * each).sum(1), problem.targets)
    with np.errstate(divide="ignore"):
        derivative = slopes[:, None] * each + coupling * (np.log(shares) - logits)
    spread = np.where(shares > 1e-12, derivative - (shares * derivative).sum(1, keepdims=True), 0.0)
    np.testing.assert_allclose(spread, 0.0, atol=1e-6)


@BOTH
def test_the_experts_and_the_router_steps_are_the_minima_that_scipy_finds(loss, make_problem, make_point) -> None:
    for seed in range(4):
        problem = make_problem(seed, loss)
        point = make_point(seed, problem)
        experts = best_experts(problem, point.shares, point.experts)
        router = best_router(problem, point.shares, point.router)
        for part, got in (("experts", experts), ("router", router)):

            def value(flat: np.ndarray, part: str = part, problem=problem, point=point) -> float:
                moved = dataclasses.replace(point, **{part: flat.reshape(point.experts.shape)})
                return decoupled_objective(problem, moved)

            found = optimize.minimize(value, np.zeros(got.size), method="BFGS", options={"gtol": 1e-8})
            np.testing.assert_allclose(got.ravel(), found.x, atol=2e-5)
            assert value(got.ravel()) <= found.fun + 1e-13


# ---------------------------------------------------------------- the scheme


@BOTH
@pytest.mark.slow
def test_no_step_raises_the_objective_and_the_end_is_the_minimum(loss, make_problem, make_point) -> None:
    for seed in range(2):
        problem = make_problem(seed, loss, decay=4.0, samples=6, features=2)
        start = make_point(seed, problem)
        descent = alternate(problem, start.experts, start.router, 60)
        assert (np.diff(descent.values) <= 1e-14).all()
        end = descent.points[-1]
        solution = minimum(problem, end)
        np.testing.assert_allclose(weights_gradient(problem, solution), 0.0, atol=1e-9)
        shape = start.experts.shape

        def value(flat: np.ndarray, problem=problem, shape=shape) -> float:
            experts, router = flat.reshape(2, *shape)
            shares = best_shares(problem, experts, router)
            return decoupled_objective(problem, Point(experts=experts, router=router, shares=shares))

        found = optimize.minimize(value, np.concatenate([start.experts.ravel(), start.router.ravel()]), method="BFGS")
        assert decoupled_objective(problem, solution) == pytest.approx(found.fun, abs=1e-8)


@pytest.mark.parametrize(("loss", "decay", "seed"), [("logistic", 0.05, 2), ("squared", 0.2, 0), ("squared", 0.2, 3)])
def test_close_to_a_solution_the_residual_shrinks_as_example_2_predicts(
    loss, decay, seed, make_problem, make_point
) -> None:
    """Where experts differ, so that nothing is proved about the whole way."""
    problem = make_problem(seed, loss, decay=decay, samples=20)
    start = make_point(seed, problem)
    descent = alternate(problem, start.experts, start.router, 100)
    solution = minimum(problem, descent.points[-1])
    residuals = np.array(descent.values) - decoupled_objective(problem, solution)
    kept = residuals[residuals > 1e-12 * residuals[0]]
    assert kept[-1] / kept[-2] == pytest.approx(local_rate(problem, solution), rel=5e-3)
    assert float(np.ptp(solution.experts, axis=1).max()) > 1
