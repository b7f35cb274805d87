"""Linear experts with a softmax router, and the decoupled alternating scheme (CoMiGS eq. 20, 21, 25, 26 and 28)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import linalg, optimize, special

from comingle.papers.theory.losses import Logistic, Loss
from comingle.utils.errors import DivergenceError

Inputs = Float[np.ndarray, "samples features"]
Weights = Float[np.ndarray, "features experts"]
Shares = Float[np.ndarray, "samples experts"]
Vector = Float[np.ndarray, " size"]


@dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """One user's samples and the two weights of eq. 25: ``decay`` (alpha) and ``coupling`` (mu)."""

    inputs: Inputs
    targets: Float[np.ndarray, " samples"]
    num_experts: int
    loss: Loss
    decay: float
    coupling: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """Experts Theta, router Phi, and every sample's shares lambda (rows here, columns of Lambda in the paper)."""

    experts: Weights
    router: Weights
    shares: Shares


def gates(problem: LinearProblem, router: Weights) -> Shares:
    """``pi_Phi(x)``, the softmax of eq. 20, for each sample."""
    return _softmax(problem.inputs @ router)


def coupled_objective(problem: LinearProblem, experts: Weights, router: Weights) -> float:
    """Eq. 21: the mean loss of the routed experts plus weight decay. What one would minimise without decoupling."""
    outputs = (gates(problem, router) * (problem.inputs @ experts)).sum(1)
    return float(problem.loss.value(outputs, problem.targets).mean()) + _penalty(problem, experts, router)


def decoupled_objective(problem: LinearProblem, point: Point) -> float:
    """``F_mu`` of eq. 25: eq. 21 with free shares, plus mu times the mean KL divergence from shares to gates.

    The weight is mu / n as in eq. 25 and 26; eq. 23 prints mu / (2 n). At ``shares = gates`` it equals eq. 21.
    """
    logits = problem.inputs @ point.router
    outputs = (point.shares * (problem.inputs @ point.experts)).sum(1)
    divergence = (
        special.xlogy(point.shares, point.shares).sum(1)
        + special.logsumexp(logits, axis=1)
        - (point.shares * logits).sum(1)
    )
    fit = problem.loss.value(outputs, problem.targets) + problem.coupling * divergence
    return float(fit.mean()) + _penalty(problem, point.experts, point.router)


def best_shares(problem: LinearProblem, experts: Weights, router: Weights) -> Shares:
    """First line of eq. 28: the shares of every sample, exact up to one scalar equation each.

    Stationarity on the simplex gives ``lambda = softmax(b - l'(t) a / mu)`` with ``a = Theta^T x``, ``b = Phi^T x`` and
    the output ``t = <lambda, a>``. Put together, ``t - <softmax(b - l'(t) a / mu), a> = 0``: increasing in t, since l'
    is, with its only root between the smallest and the largest ``a_j``.
    """
    each, logits = problem.inputs @ experts, problem.inputs @ router
    low, high, size = each.min(1), each.max(1), np.abs(each).max(1)
    outputs = (low + high) / 2
    for iteration in range(_ITERATIONS):
        shares = _shares_at(problem, each, logits, outputs)
        mean = (shares * each).sum(1)
        excess = outputs - mean
        open_ = np.abs(excess) > _ROOT_TOLERANCE * size
        if not open_.any():
            break
        low, high = np.where(excess < 0, outputs, low), np.where(excess > 0, outputs, high)
        variance = (shares * (each - mean[:, None]) ** 2).sum(1)
        bend = problem.loss.curvature(outputs, problem.targets)
        newton = outputs - excess / (1 + bend * variance / problem.coupling)
        # Newton's step where it stays inside the bracket; a halving now and then keeps the bracket shrinking.
        inside = (newton > low) & (newton < high) & (iteration % 3 < 2)
        outputs = np.where(open_, np.where(inside, newton, (low + high) / 2), outputs)
    return _shares_at(problem, each, logits, outputs)


def _shares_at(problem: LinearProblem, each: Shares, logits: Shares, outputs: Vector) -> Shares:
    slopes = problem.loss.slope(outputs, problem.targets)
    return _softmax(logits - slopes[:, None] * each / problem.coupling)


def best_router(problem: LinearProblem, shares: Shares, start: Weights) -> Weights:
    """Second line of eq. 28: multinomial logistic regression on soft targets with weight decay, strongly convex.

    Raises:
        DivergenceError: scipy found no stationary point.
    """
    return _stationary(
        lambda flat: _router_gradient(problem, shares, flat.reshape(start.shape)).ravel(),
        lambda flat: router_curvature(problem, flat.reshape(start.shape)),
        start,
        "the router's step",
    )


def best_experts(problem: LinearProblem, shares: Shares, start: Weights) -> Weights:
    """Third line of eq. 28: ridge regression in closed form for the squared loss, convex for the logistic one.

    The output is linear in Theta: ``<lambda, Theta^T x> = <x lambda^T, Theta>``.

    Raises:
        DivergenceError: scipy found no stationary point.
    """
    features = np.einsum("nd,ne->nde", problem.inputs, shares).reshape(len(shares), -1)
    num, eye = len(features), problem.decay * np.eye(features.shape[1])
    if not isinstance(problem.loss, Logistic):
        normal = features.T @ features / num + eye
        return linalg.solve(normal, features.T @ problem.targets / num, assume_a="pos").reshape(start.shape)
    loss, targets = problem.loss, problem.targets
    return _stationary(
        lambda flat: features.T @ loss.slope(features @ flat, targets) / num + problem.decay * flat,
        lambda flat: (features.T * loss.curvature(features @ flat, targets)) @ features / num + eye,
        start,
        "the experts' step",
    )


def _router_gradient(problem: LinearProblem, shares: Shares, router: Weights) -> Weights:
    pull = problem.inputs.T @ (gates(problem, router) - shares)
    return problem.coupling / len(shares) * pull + problem.decay * router


def router_curvature(problem: LinearProblem, router: Weights) -> Float[np.ndarray, "size size"]:
    """Hessian of eq. 25 in Phi: ``mu/n sum_i x_i x_i^T (x) (diag(pi_i) - pi_i pi_i^T) + alpha I``."""
    shares_there = gates(problem, router)
    spread = shares_there[:, :, None] * (np.eye(router.shape[1]) - shares_there[:, None, :])
    blocks = np.einsum("na,nb,nef->aebf", problem.inputs, problem.inputs, spread, optimize=True)
    size = router.size
    return problem.coupling / len(shares_there) * blocks.reshape(size, size) + problem.decay * np.eye(size)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Iterates of eq. 28: ``points[k]`` is ``(Theta_k, Phi_k, Lambda_{k+1})`` and ``values[k]`` its objective."""

    points: list[Point]
    values: list[float]


def alternate(problem: LinearProblem, experts: Weights, router: Weights, steps: int) -> Descent:
    """Eq. 28 from given experts and router: shares, then router and experts, which do not see each other.

    Stops before ``steps`` where nothing moves any more.

    Values are taken after the shares' step. There the shares are optimal from the first point on, which the exponent 2k
    of Theorem F.2 needs; see :mod:`comingle.papers.theory.constants`.

    Raises:
        DivergenceError: a convex step failed.
    """
    points = [_at_best_shares(problem, experts, router)]
    for _ in range(steps):
        shares = points[-1].shares
        router = best_router(problem, shares, points[-1].router)
        experts = best_experts(problem, shares, points[-1].experts)
        points.append(_at_best_shares(problem, experts, router))
        if np.allclose(points[-1].shares, shares, rtol=0, atol=_REST):
            break
    return Descent(points=points, values=[decoupled_objective(problem, point) for point in points])


def minimum(problem: LinearProblem, near: Point) -> Point:
    """Where no step of eq. 28 moves: many more of its steps, then root finding on the gradient of ``min_Lambda F``.

    That gradient is F's at the best shares. Where F is strongly convex the point found is its only minimiser; elsewhere
    it is one that the scheme falls to.

    Raises:
        DivergenceError: a convex step failed, or what was found lies above where the steps came to.
    """
    for _ in range(_FURTHER):
        further = alternate(problem, near.experts, near.router, 10).points[-1]
        moved, near = float(np.abs(further.shares - near.shares).max()), further
        if moved < _STILL:
            break
    start = np.stack([near.experts, near.router])
    flat = _stationary(
        lambda flat: weights_gradient(problem, _at_best_shares(problem, *flat.reshape(start.shape))),
        None,
        start,
        "the minimum",
    )
    point = _at_best_shares(problem, *flat)
    above = decoupled_objective(problem, point) - decoupled_objective(problem, near)
    if above > _STILL**2:
        raise DivergenceError(f"the minimum: the point found is {above:.1e} above a point of the descent; 0 is allowed")
    return point


def _at_best_shares(problem: LinearProblem, experts: Weights, router: Weights) -> Point:
    return Point(experts=experts, router=router, shares=best_shares(problem, experts, router))


def weights_gradient(problem: LinearProblem, point: Point) -> Vector:
    """The gradient of eq. 25 in (Theta, Phi), row-major."""
    slopes = problem.loss.slope((point.shares * (problem.inputs @ point.experts)).sum(1), problem.targets)
    pull = problem.inputs.T @ (slopes[:, None] * point.shares) / len(point.shares)
    of_experts = pull + problem.decay * point.experts
    return np.concatenate([of_experts.ravel(), _router_gradient(problem, point.shares, point.router).ravel()])


_FURTHER, _STILL, _REST = 50, 1e-6, 1e-14
_ITERATIONS, _ROOT_TOLERANCE = 120, 4e-15
_GRADIENT_TOLERANCE = 1e-9


def _stationary(
    gradient: Callable[[Vector], Vector],
    hessian: Callable[[Vector], Float[np.ndarray, "size size"]] | None,
    start: np.ndarray,
    what: str,
) -> np.ndarray:
    """Where a gradient is zero. Roots rather than values: a minimum is flat, so values lose half of the digits."""
    solution = optimize.root(gradient, start.ravel(), jac=hessian, method="hybr", options={"xtol": 1e-14})
    left = float(np.abs(gradient(solution.x)).max())
    if not left < _GRADIENT_TOLERANCE:
        raise DivergenceError(f"{what}: the gradient stays at {left:.1e}; below {_GRADIENT_TOLERANCE:.0e} is allowed")
    return solution.x.reshape(start.shape)


def _softmax(scores: Shares) -> Shares:
    """Over the last axis; a tenth of the time of scipy's, which dispatches over array libraries on every call."""
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def _penalty(problem: LinearProblem, experts: Weights, router: Weights) -> float:
    return problem.decay / 2 * float((experts**2).sum() + (router**2).sum())


def draw_linear(
    rng: np.random.Generator,
    *,
    samples: int,
    features: int,
    num_experts: int,
    loss: Loss,
    decay: float,
    coupling: float,
) -> LinearProblem:
    """Normal inputs whose targets come from routed linear experts that were drawn too, with noise (squared: 10%)."""
    inputs = rng.standard_normal((samples, features))
    chosen = (inputs @ rng.standard_normal((features, num_experts))).argmax(1)
    outputs = (inputs @ rng.standard_normal((features, num_experts)))[np.arange(samples), chosen]
    if isinstance(loss, Logistic):
        targets = np.where(rng.uniform(size=samples) < special.expit(outputs), 1.0, -1.0)
    else:
        targets = outputs + 0.1 * rng.standard_normal(samples)
    return LinearProblem(
        inputs=inputs, targets=targets, num_experts=num_experts, loss=loss, decay=decay, coupling=coupling
    )
