"""Linear experts with a softmax router, their losses, constants and curvature.

**Proposition 1.** One sample's objective (26) is strongly convex if ``alpha >= 2 |x|^2 max(mu, rho^2 / mu)``, where
rho bounds the loss's first derivative *in absolute value*. The paper prints ``rho >= max l'(t)``, which 0 satisfies for
the logistic loss of a positive sample, and then hardly any alpha is asked for. The printed proof does not hold: it
halves the mixed derivative (see :func:`comingle_papers.theory.linear.hessian`), and with the right one its part
``g_1`` need not be convex under (27). The statement does hold. Along the simplex the h_j sum to zero, so
``<d''(lambda) h, h> >= |h|_1^2 >= 2 |h|_2^2``, and minimising the quadratic form over H and G, without the terms in
``l'' >= 0`` and ``s'' >= 0``, leaves

    2 mu |h|^2 - |x|^2 (rho^2 + mu^2) / alpha |h|^2 > 0    if    alpha > |x|^2 (rho^2 + mu^2) / (2 mu).

This is at most half of (27), and a loss without curvature attains it. Minimising over h instead gives, for the mean
over samples, the modulus ``alpha - (rho^2 + mu^2) / (2 mu) * largest eigenvalue of X^T X / n`` in (Theta, Phi): it
takes the inputs' covariance, not their largest norm.

**Theorem F.2.** The gradient of the entropy is not Lipschitz on the simplex, so for (25) the theorem's L does not
exist. Two repairs. (a) The shares of (28) and of the minimum are softmaxes of bounded scores, hence at least some
delta > 0, and the proof only looks at segments between them. There L exists, but is huge. (b) Each half of the proof
needs the modulus and the smoothness of its own block only. The block Y = (Theta, Phi) has no entropy, so its factor
``1 - m_Y / L_Y`` is well below 1 and alone proves the global linear rate of Theorem 3.2.

The exponent 2k needs a start at which one block is optimal, since the first half step uses it; otherwise 2k - 1 is
proved. Eq. 28 has no Lambda_0, and values taken after its first line have this property.

**What the condition costs.** Eq. 25 does not change when experts are renumbered, and a strictly convex function has one
minimiser. Under Proposition 1 it is therefore the same for all experts: they coincide and every gate is 1 / (N + 1),
unless the sets Q and Omega tell experts apart. Where experts specialise, the proposition's condition is violated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import linalg, optimize, special

from comingle.utils.errors import DivergenceError

LossName = Literal["logistic", "squared"]
PerSample = Float[np.ndarray, " samples"]


@dataclass(frozen=True)
class Logistic:
    """``ln(1 + exp(-y t))`` for targets y of -1 or 1."""

    name: LossName = "logistic"
    max_curvature: float = 0.25

    def value(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """Return each sample's loss in nats."""
        return np.logaddexp(0.0, -targets * outputs)

    def slope(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """Return the first derivative of each sample's loss by its output."""
        return -targets * special.expit(-targets * outputs)

    def curvature(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """Return the second derivative of each sample's loss by its output."""
        return special.expit(targets * outputs) * special.expit(-targets * outputs)

    def slope_bound(self, largest_output: float, targets: PerSample) -> float:
        """Return the largest absolute first derivative for outputs up to ``largest_output`` in size; at most 1.

        The absolute derivative at an output t is ``1 / (1 + exp(y t))``. It is largest where t has the sign of -y, and
        this maximum is the same for y = 1 and y = -1.

        Args:
            largest_output: Largest absolute value of an output.
            targets: Not used; the squared loss needs them.
        """
        return float(special.expit(largest_output))


@dataclass(frozen=True)
class Squared:
    """``(t - y)^2 / 2``. Its derivative is bounded only where outputs are, so rho of Proposition 1 needs a ball."""

    name: LossName = "squared"
    max_curvature: float = 1.0

    def value(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """Return each sample's loss."""
        return (outputs - targets) ** 2 / 2

    def slope(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """Return the first derivative of each sample's loss by its output."""
        return outputs - targets

    def curvature(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """Return the second derivative of each sample's loss by its output."""
        return np.ones_like(outputs)

    def slope_bound(self, largest_output: float, targets: PerSample) -> float:
        """Return the largest absolute first derivative for outputs up to ``largest_output`` in size."""
        return largest_output + float(np.abs(targets).max())


Loss = Logistic | Squared
LOSSES: dict[str, Loss] = {"logistic": Logistic(), "squared": Squared()}


Inputs = Float[np.ndarray, "samples features"]
Weights = Float[np.ndarray, "features experts"]
Shares = Float[np.ndarray, "samples experts"]
Vector = Float[np.ndarray, " size"]


@dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """One user's samples and the two weights of CoMiGS, eq. 25: ``decay`` (alpha) and ``coupling`` (mu)."""

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
    """Return the router's softmax weights of the experts for each sample, ``pi_Phi(x)`` of CoMiGS, eq. 20."""
    return _softmax(problem.inputs @ router)


def coupled_objective(problem: LinearProblem, experts: Weights, router: Weights) -> float:
    """Return the mean loss of the routed experts plus weight decay (CoMiGS, eq. 21).

    Here the router's gates mix the experts. :func:`decoupled_objective` replaces the gates by free variables.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: Weights Theta of the experts, (features, experts).
        router: Weights Phi of the router, (features, experts).
    """
    outputs = (gates(problem, router) * (problem.inputs @ experts)).sum(1)
    return float(problem.loss.value(outputs, problem.targets).mean()) + _decay_penalty(problem, experts, router)


def decoupled_objective(problem: LinearProblem, point: Point) -> float:
    """Return the objective F (CoMiGS, eq. 25), in which each sample's shares of the experts are variables of their own.

    F is the mean loss with these shares, plus weight decay, plus mu times the mean KL divergence from the shares to the
    router's gates. If the shares are the gates, F equals :func:`coupled_objective`. For n samples the divergences are
    summed with weight mu / n, as in eq. 25 and 26; eq. 23 of the paper prints mu / (2 n).

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    logits = problem.inputs @ point.router
    outputs = (point.shares * (problem.inputs @ point.experts)).sum(1)
    divergence = (
        special.xlogy(point.shares, point.shares).sum(1)
        + special.logsumexp(logits, axis=1)
        - (point.shares * logits).sum(1)
    )
    fit = problem.loss.value(outputs, problem.targets) + problem.coupling * divergence
    return float(fit.mean()) + _decay_penalty(problem, point.experts, point.router)


def best_shares(problem: LinearProblem, experts: Weights, router: Weights) -> Shares:
    """Return the shares of every sample that minimise the objective F (CoMiGS, eq. 25), for given experts and router.

    This is the first line of eq. 28. Stationarity on the simplex gives ``lambda = softmax(b - l'(t) a / mu)`` with
    ``a = Theta^T x``, ``b = Phi^T x`` and the output ``t = <lambda, a>``. So each sample's t solves one scalar
    equation, ``t - <softmax(b - l'(t) a / mu), a> = 0``. The left side increases in t, since l' does, and has its only
    root between the smallest and the largest a_j.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: Weights Theta of the experts, (features, experts).
        router: Weights Phi of the router, (features, experts).
    """
    expert_outputs, logits = problem.inputs @ experts, problem.inputs @ router
    low, high = expert_outputs.min(1), expert_outputs.max(1)  # the bracket of each sample's root t
    tolerances = _ROOT_TOLERANCE * np.abs(expert_outputs).max(1)
    outputs = (low + high) / 2
    for iteration in range(_ITERATIONS):  # of a bracketed Newton method for t, all samples at once
        shares = _shares_at_outputs(problem, expert_outputs, logits, outputs)
        mixed = (shares * expert_outputs).sum(1)
        excess = outputs - mixed
        is_unsolved = np.abs(excess) > tolerances
        if not is_unsolved.any():
            break
        low, high = np.where(excess < 0, outputs, low), np.where(excess > 0, outputs, high)
        variance = (shares * (expert_outputs - mixed[:, None]) ** 2).sum(1)
        curvature = problem.loss.curvature(outputs, problem.targets)
        newton = outputs - excess / (1 + curvature * variance / problem.coupling)
        # Newton's step where it stays inside the bracket; a halving now and then keeps the bracket shrinking.
        takes_newton = (newton > low) & (newton < high) & (iteration % 3 < 2)
        outputs = np.where(is_unsolved, np.where(takes_newton, newton, (low + high) / 2), outputs)
    return _shares_at_outputs(problem, expert_outputs, logits, outputs)


def _shares_at_outputs(problem: LinearProblem, expert_outputs: Shares, logits: Shares, outputs: Vector) -> Shares:
    """Return ``softmax(b - l'(t) a / mu)`` for each sample: the best shares if t is the output with these shares.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        expert_outputs: The experts' outputs a, shape (samples, experts).
        logits: The router's logits b, shape (samples, experts).
        outputs: t, shape (samples).
    """
    slopes = problem.loss.slope(outputs, problem.targets)
    return _softmax(logits - slopes[:, None] * expert_outputs / problem.coupling)


def best_router(problem: LinearProblem, shares: Shares, start: Weights) -> Weights:
    """Return the router that minimises the objective F (CoMiGS, eq. 25) for given shares (second line of eq. 28).

    This is multinomial logistic regression with the shares as targets and weight decay, which is strongly convex.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        shares: Shares lambda of the experts in each sample, (samples, experts).
        start: Initial value of the search.

    Raises:
        DivergenceError: Scipy found no stationary point.
    """
    return _find_stationary(
        lambda flat: _router_gradient(problem, shares, flat.reshape(start.shape)).ravel(),
        lambda flat: router_curvature(problem, flat.reshape(start.shape)),
        start,
        "the router's step",
    )


def best_experts(problem: LinearProblem, shares: Shares, start: Weights) -> Weights:
    """Return the experts that minimise the objective F (CoMiGS, eq. 25) for given shares (third line of eq. 28).

    The output is linear in Theta, ``<lambda, Theta^T x> = <x lambda^T, Theta>``. For the squared loss this is ridge
    regression in closed form; for the logistic loss it is a convex problem that is solved numerically.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        shares: Shares lambda of the experts in each sample, (samples, experts).
        start: Initial value of the search.

    Raises:
        DivergenceError: Scipy found no stationary point.
    """
    features = np.einsum("nd,ne->nde", problem.inputs, shares).reshape(len(shares), -1)  # x lambda^T, flat
    samples, decay_matrix = len(features), problem.decay * np.eye(features.shape[1])
    if not isinstance(problem.loss, Logistic):
        normal = features.T @ features / samples + decay_matrix
        return linalg.solve(normal, features.T @ problem.targets / samples, assume_a="pos").reshape(start.shape)
    loss, targets = problem.loss, problem.targets
    return _find_stationary(
        lambda flat: features.T @ loss.slope(features @ flat, targets) / samples + problem.decay * flat,
        lambda flat: (features.T * loss.curvature(features @ flat, targets)) @ features / samples + decay_matrix,
        start,
        "the experts' step",
    )


def _router_gradient(problem: LinearProblem, shares: Shares, router: Weights) -> Weights:
    """Return the gradient of the objective F (CoMiGS, eq. 25) in the router's weights Phi, shape (features, experts).

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        shares: Shares lambda of the experts in each sample, (samples, experts).
        router: Weights Phi of the router, (features, experts).
    """
    # F has mu times the mean KL divergence over samples, and the weight decay alpha / 2 |Phi|^2.
    summed_divergence_gradient = problem.inputs.T @ (gates(problem, router) - shares)
    return problem.coupling / len(shares) * summed_divergence_gradient + problem.decay * router


def router_curvature(problem: LinearProblem, router: Weights) -> Float[np.ndarray, "size size"]:
    """Return the Hessian of the objective F (CoMiGS, eq. 25) in the router's weights Phi, row-major.

    The Hessian is ``mu/n sum_i x_i x_i^T (x) (diag(pi_i) - pi_i pi_i^T) + alpha I`` with the Kronecker product ``(x)``
    and the gates pi_i of sample i.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        router: Weights Phi of the router, (features, experts).
    """
    probabilities = gates(problem, router)  # pi
    softmax_jacobian = probabilities[:, :, None] * (np.eye(router.shape[1]) - probabilities[:, None, :])
    blocks = np.einsum("na,nb,nef->aebf", problem.inputs, problem.inputs, softmax_jacobian, optimize=True)
    size = router.size
    return problem.coupling / len(probabilities) * blocks.reshape(size, size) + problem.decay * np.eye(size)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Iterates of the alternation (CoMiGS, eq. 28).

    ``points[k]`` is ``(Theta_k, Phi_k, Lambda_{k+1})``, and ``values[k]`` is the objective at this point.
    """

    points: list[Point]
    values: list[float]


def alternate(problem: LinearProblem, experts: Weights, router: Weights, steps: int) -> Descent:
    """Minimise the objective F (CoMiGS, eq. 25) by alternation (eq. 28): shares, then router and experts, and so on.

    For given shares, the best router and the best experts do not depend on each other. The result has the point and its
    objective after each optimisation of the shares. So the shares of the first point are already optimal, which Theorem
    F.2 of the paper requires. The alternation ends before ``steps`` if the shares no longer change.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: The initial experts.
        router: The initial router.
        steps: Largest number of steps.

    Raises:
        DivergenceError: The best router or the best experts were not found.
    """
    points = [_point_at_best_shares(problem, experts, router)]
    for _ in range(steps):
        shares = points[-1].shares
        router = best_router(problem, shares, points[-1].router)
        experts = best_experts(problem, shares, points[-1].experts)
        points.append(_point_at_best_shares(problem, experts, router))
        if np.allclose(points[-1].shares, shares, rtol=0, atol=_REST_TOLERANCE):
            break
    return Descent(points=points, values=[decoupled_objective(problem, point) for point in points])


def minimum(problem: LinearProblem, near: Point) -> Point:
    """Return the minimum of the objective F (CoMiGS, eq. 25) to machine precision, from a point near it.

    Take up to 500 more steps of :func:`alternate`, then find a root of the gradient of ``min_Lambda F`` in (Theta,
    Phi), which is the gradient of F at the best shares. If F is strongly convex the point is its only minimiser;
    otherwise it is a stationary point to which the steps converge.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        near: A point close to the minimum, such as the last of a descent.

    Raises:
        DivergenceError: The best router or the best experts were not found, or the objective at the stationary point is
            above that of the steps.
    """
    for _ in range(_MAX_APPROACHES):  # of ten steps each
        nearer = alternate(problem, near.experts, near.router, 10).points[-1]
        change = float(np.abs(nearer.shares - near.shares).max())
        near = nearer
        if change < _NEAR_TOLERANCE:
            break
    start = np.stack([near.experts, near.router])

    def gradient_at_best_shares(flat: Vector) -> Vector:
        experts, router = flat.reshape(start.shape)
        return weights_gradient(problem, _point_at_best_shares(problem, experts, router))

    experts, router = _find_stationary(gradient_at_best_shares, None, start, "the minimum")
    point = _point_at_best_shares(problem, experts, router)
    excess = decoupled_objective(problem, point) - decoupled_objective(problem, near)
    if excess > _NEAR_TOLERANCE**2:  # a distance of the tolerance from a minimum changes the value by its square
        raise DivergenceError(
            f"the minimum: the point found is {excess:.1e} above a point of the descent; 0 is allowed"
        )
    return point


def _point_at_best_shares(problem: LinearProblem, experts: Weights, router: Weights) -> Point:
    """Return the point of these experts and this router with the shares that minimise the objective F (CoMiGS, eq. 25).

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: Weights Theta of the experts, (features, experts).
        router: Weights Phi of the router, (features, experts).
    """
    return Point(experts=experts, router=router, shares=best_shares(problem, experts, router))


def weights_gradient(problem: LinearProblem, point: Point) -> Vector:
    """Return the gradient of the objective F (CoMiGS, eq. 25) in experts and router, for fixed shares.

    The result is one vector: the gradient in Theta, then that in Phi, both row-major.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    slopes = problem.loss.slope(_outputs(problem, point), problem.targets)
    loss_gradient = problem.inputs.T @ (slopes[:, None] * point.shares) / len(point.shares)
    experts_gradient = loss_gradient + problem.decay * point.experts
    router_gradient = _router_gradient(problem, point.shares, point.router)
    return np.concatenate([experts_gradient.ravel(), router_gradient.ravel()])


_MAX_APPROACHES, _NEAR_TOLERANCE = 50, 1e-6
"""Largest number of times that :func:`minimum` takes ten more steps, and the change of shares at which it stops."""
_REST_TOLERANCE = 1e-14
"""Change of shares in one step at which a descent has come to rest."""
_ITERATIONS, _ROOT_TOLERANCE = 120, 4e-15
"""Largest number of iterations for the shares; tolerance of their equation relative to the experts' largest output."""
_GRADIENT_TOLERANCE = 1e-9
"""Largest absolute entry of the gradient at a stationary point."""


def _find_stationary(
    gradient: Callable[[Vector], Vector],
    hessian: Callable[[Vector], Float[np.ndarray, "size size"]] | None,
    start: np.ndarray,
    what: str,
) -> np.ndarray:
    """Find a point at which a gradient is zero, by root finding.

    Root finding keeps all digits; minimising the objective would lose half of them.

    Args:
        gradient: The gradient of a flat vector.
        hessian: The derivative of ``gradient``; None for finite differences.
        start: Initial value, of any shape.
        what: Name of the problem, for the error message.

    Returns:
        The stationary point, of the shape of ``start``.

    Raises:
        DivergenceError: The gradient found is not zero.
    """
    solution = optimize.root(gradient, start.ravel(), jac=hessian, method="hybr", options={"xtol": 1e-14})
    remaining_gradient = float(np.abs(gradient(solution.x)).max())
    if not remaining_gradient < _GRADIENT_TOLERANCE:
        raise DivergenceError(
            f"{what}: the gradient stays at {remaining_gradient:.1e}; below {_GRADIENT_TOLERANCE:.0e} is allowed"
        )
    return solution.x.reshape(start.shape)


def _softmax(scores: Shares) -> Shares:
    """Return the softmax over the last axis.

    This function takes a tenth of the time of scipy's softmax, which looks up the kind of array on every call.
    """
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _decay_penalty(problem: LinearProblem, experts: Weights, router: Weights) -> float:
    """Return the weight decay in the objective F (CoMiGS, eq. 25), ``alpha / 2 (|Theta|^2 + |Phi|^2)``.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: Weights Theta of the experts, (features, experts).
        router: Weights Phi of the router, (features, experts).
    """
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
    """Draw a problem with normal inputs and targets of hidden linear experts.

    A hidden linear router chooses one hidden expert for each sample. For the squared loss the sample's target is the
    output of this expert plus noise of standard deviation 0.1. For the logistic loss the target is a label, 1 or -1,
    drawn with the output as the logit of 1.

    Args:
        rng: Generator of all draws.
        samples: Number of samples.
        features: Number of features.
        num_experts: Number of experts.
        loss: Loss of the problem.
        decay: Weight decay of experts and router.
        coupling: Weight mu of the divergence between shares and gates in CoMiGS, eq. 25.
    """
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


def printed_decay(feature_norm: float, slope: float, coupling: float) -> float:
    """Return the smallest weight decay alpha that Proposition 1 of CoMiGS allows (eq. 27).

    This weight decay is ``2 |x|^2 max(mu, rho^2 / mu)``.
    The paper defines rho as a bound on the loss's derivative, but the proposition needs a bound on its absolute value.

    Args:
        feature_norm: ``|x|``, the norm of a sample's input.
        slope: rho, the largest absolute derivative of the loss by the output.
        coupling: mu, the weight of the divergence between shares and gates.
    """
    return 2 * feature_norm**2 * max(coupling, slope**2 / coupling)


def needed_decay(feature_norm: float, slope: float, coupling: float) -> float:
    """Return the weight decay alpha above which one sample's objective (CoMiGS, eq. 26) is strongly convex.

    This weight decay is ``|x|^2 (rho^2 + mu^2) / (2 mu)``, at most half of what the paper asks for
    (:func:`printed_decay`).

    Args:
        feature_norm: ``|x|``, the norm of a sample's input.
        slope: rho, the largest absolute derivative of the loss by the output.
        coupling: mu, the weight of the divergence between shares and gates.
    """
    return feature_norm**2 * (slope**2 + coupling**2) / (2 * coupling)


@dataclass(frozen=True, kw_only=True)
class LinearConstants:
    """Constants of a problem with linear experts, and bounds on how fast CoMiGS's alternation converges on it.

    ``radius`` bounds ``|(Theta, Phi)|`` over all iterates and the minimum: the objective never grows, and everything in
    it but the weight decay is at least 0, so ``alpha / 2 |(Theta, Phi)|^2 <= F_0``. ``slope`` is rho within that
    radius. ``feature_norm`` is the largest ``|x|``, ``feature_scale`` the largest eigenvalue of ``X^T X / n``,
    ``smallest_share`` the delta of the module's docstring.
    """

    num_samples: int
    num_experts: int
    decay: float
    coupling: float
    max_curvature: float
    radius: float
    slope: float
    feature_norm: float
    feature_scale: float

    @property
    def smallest_share(self) -> float:
        """Lower bound ``1 / (1 + N exp(s))`` on every optimal share, with N + 1 experts.

        Optimal shares are a softmax of the scores ``<phi_j - l' / mu theta_j, x>``. Two of them differ by at most
        ``s = |x| radius sqrt(2 (1 + rho^2 / mu^2))``, as ``|l'| <= rho`` and ``|(Theta, Phi)| <= radius``.
        """
        ratio = self.slope / self.coupling
        max_score_difference = self.feature_norm * self.radius * float(np.sqrt(2 * (1 + ratio**2)))
        # exp(710) would overflow.
        return 1 / (1 + (self.num_experts - 1) * float(np.exp(min(max_score_difference, 700.0))))

    @property
    def printed_decay(self) -> float:
        """CoMiGS, eq. 27, for the sample with the largest norm."""
        return printed_decay(self.feature_norm, self.slope, self.coupling)

    @property
    def modulus_weights(self) -> float:
        """m_Y: lower bound on the curvature of the objective F (CoMiGS, eq. 25) in experts and router, for all shares.

        If the bound is positive, F is strongly convex in experts and router; otherwise nothing is proved. The bound is
        ``alpha - (rho^2 + mu^2) / (2 mu) * feature_scale``. Here alpha is the weight decay, rho the largest slope of
        the loss, mu the weight of the divergence, and ``feature_scale`` the largest eigenvalue of ``X^T X / n``.
        """
        return self.decay - self._rho2_plus_mu2 * self.feature_scale / (2 * self.coupling)

    @property
    def modulus_shares(self) -> float:
        """m_X: modulus of strong convexity of the objective F (CoMiGS, eq. 25) in the shares along the simplex.

        The modulus, which holds for all experts and routers, is ``(2 mu - |x|^2 (rho^2 + mu^2) / alpha) / n`` with
        weight decay alpha, largest slope rho of the loss, weight mu of the divergence, n samples and their largest norm
        ``|x|``.
        """
        return (2 * self.coupling - self._rho2_plus_mu2 * self.feature_norm**2 / self.decay) / self.num_samples

    @property
    def modulus(self) -> float:
        """Modulus m of strong convexity of the objective F (CoMiGS, eq. 25) in all variables.

        CoMiGS's Theorem F.2 calls it mu. If m is not positive, nothing is proved.

        F has the modulus m if F minus ``m / 2`` times the squared norm of all variables is convex. This difference is
        an objective with the weight decay ``alpha - m``. The result is the largest m for which the argument of
        :attr:`modulus_shares` shows that the difference is convex. For n samples m solves
        ``n m = 2 mu - |x|^2 (rho^2 + mu^2) / (alpha - m)``, a quadratic equation:
        ``n m^2 - (n alpha + 2 mu) m + 2 mu alpha - |x|^2 (rho^2 + mu^2) = 0``. Here rho is the loss's largest slope and
        mu the weight of the divergence.
        """
        n = self.num_samples
        linear = n * self.decay + 2 * self.coupling
        constant = 2 * self.coupling * self.decay - self._rho2_plus_mu2 * self.feature_norm**2
        product = 4 * n * constant
        # The smaller root of the quadratic equation, in the form without a difference of nearly equal numbers.
        return product / (2 * n * (linear + float(np.sqrt(linear**2 - product))))

    @property
    def smoothness_weights(self) -> float:
        """L_Y: bound on the curvature of F in experts and router, ``alpha + max(sup l'', mu / 2) * feature_scale``.

        alpha is the weight decay, l'' the loss's second derivative, mu the weight of the divergence, and
        ``feature_scale`` the largest eigenvalue of ``X^T X / n``. The divergence adds at most ``mu / 2``, since the
        curvature of a log-softmax is at most 1/2.
        """
        return self.decay + max(self.max_curvature, self.coupling / 2) * self.feature_scale

    @property
    def smoothness_shares(self) -> float:
        """L_X: bound on the curvature of the objective F (CoMiGS, eq. 25) in the shares.

        The bound holds as long as every share is at least :attr:`smallest_share`. The divergence has the curvature
        ``mu / share``. The loss adds at most its largest curvature times the squared output of an expert. Both are
        divided by the number of samples, as F is a mean over samples.
        """
        max_output = self.radius * self.feature_norm
        return (self.coupling / self.smallest_share + self.max_curvature * max_output**2) / self.num_samples

    @property
    def smoothness(self) -> float:
        """L of CoMiGS, Theorem F.2: a bound on the curvature of the objective F in all variables.

        The curvature of a convex function of two blocks of variables is at most the sum of the blocks' curvatures.
        """
        return self.smoothness_weights + self.smoothness_shares

    @property
    def theorem_rate(self) -> float | None:
        """Bound ``(1 - mu / L)^2`` on the factor by which a step multiplies ``F - F*`` (CoMiGS, Theorem F.2).

        ``F - F*`` is the objective's excess over its minimum. mu is here the modulus of strong convexity of F in all
        variables, and L the largest curvature. None if mu is not positive, so that nothing is proved.
        """
        return (1 - self.modulus / self.smoothness) ** 2 if self.modulus > 0 else None

    @property
    def block_rate(self) -> float | None:
        """Upper bound ``(1 - m_Y / L_Y) (1 - m_X / L_X)`` on the ratio of ``F - F*`` after a step to that before it.

        F is the objective (CoMiGS, eq. 25) and F* its minimum. None if m_Y is not positive, so that nothing is proved.
        """
        # The modulus m of strong convexity and the largest curvature L of F: in experts and router (Y), in shares (X).
        m_y, l_y = self.modulus_weights, self.smoothness_weights
        m_x, l_x = self.modulus_shares, self.smoothness_shares
        if m_y <= 0:
            return None
        factor_x = 1 - max(m_x, 0.0) / l_x
        factor_y = 1 - m_y / l_y
        return factor_y * factor_x

    @property
    def _rho2_plus_mu2(self) -> float:
        """``rho^2 + mu^2`` with the loss's largest slope rho and the weight mu of the divergence."""
        return self.slope**2 + self.coupling**2


def constants(problem: LinearProblem, experts: Weights, router: Weights) -> LinearConstants:
    """Return the constants of the bounds on how fast :func:`alternate` descends from these experts and this router.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: The initial experts.
        router: The initial router.
    """
    start = _point_at_best_shares(problem, experts, router)
    # No step increases F, and no term of F is negative. So the weight decay alpha / 2 |(Theta, Phi)|^2 stays below F at
    # the start, which bounds the norm |(Theta, Phi)|.
    radius = float(np.sqrt(2 * decoupled_objective(problem, start) / problem.decay))
    feature_norm = float(linalg.norm(problem.inputs, axis=1).max())
    return LinearConstants(
        num_samples=len(problem.inputs),
        num_experts=problem.num_experts,
        decay=problem.decay,
        coupling=problem.coupling,
        max_curvature=problem.loss.max_curvature,
        radius=radius,
        slope=problem.loss.slope_bound(radius * feature_norm, problem.targets),
        feature_norm=feature_norm,
        feature_scale=float(linalg.norm(problem.inputs, 2) ** 2) / len(problem.inputs),
    )


def threshold_decay(problem: LinearProblem, experts: Weights, router: Weights) -> float:
    """Return the smallest weight decay alpha that satisfies the condition of CoMiGS's Proposition 1 (eq. 27).

    The condition ``alpha >= 2 |x|^2 max(mu, rho^2 / mu)`` contains rho, a bound on the loss's slope along the descent
    from the initial point. rho depends on alpha, since more decay keeps the descent's outputs smaller. So alpha is the
    root of a scalar equation, solved for ``log(alpha)``.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: The initial experts.
        router: The initial router.
    """

    def excess_log_decay(log_decay: float) -> float:
        decay = float(np.exp(log_decay))
        constants_at_decay = constants(dataclasses.replace(problem, decay=decay), experts, router)
        return log_decay - float(np.log(constants_at_decay.printed_decay))

    log_decays = (-20.0, 20.0)  # decays from 2e-9 to 5e8
    solution = optimize.root_scalar(excess_log_decay, bracket=log_decays, method="brentq", xtol=1e-12)
    return float(np.exp(solution.root))


Matrix = Float[np.ndarray, "rows columns"]


def hessian(problem: LinearProblem, point: Point) -> Float[np.ndarray, "size size"]:
    """Return the Hessian of the objective F (CoMiGS, eq. 25) in (Theta, Phi, Lambda), row-major.

    Shares are free variables here, although they must sum to one (:func:`tangent_hessian`). With one sample this is the
    Hessian of the paper's eq. 26. In a direction (H, G, h) of (Theta, Phi, lambda) the loss contributes
    ``l'' (<h, Theta^T x> + <lambda, H^T x>)^2 + 2 l' <h, H^T x>`` with its derivatives l' and l'' at the output. The
    paper's proof of Proposition 1 lacks two factors of 2: that of the last term and that of the square's cross term.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    # Experts and router have no mixed derivatives: the loss sees the experts only, the divergence the router only.
    top = linalg.block_diag(_experts_block(problem, point), router_curvature(problem, point.router))
    cross = _cross_block(problem, point)
    return np.block([[top, cross], [cross.T, _shares_block(problem, point)]])


def tangent_hessian(problem: LinearProblem, point: Point) -> Float[np.ndarray, "size size"]:
    """Return :func:`hessian` restricted to the simplex: a sample's shares change only in directions that sum to zero.

    The result has ``2 features experts + samples (experts - 1)`` rows, as experts and router each have
    ``features experts`` weights.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    num_samples, num_experts = point.shares.shape
    directions_of_sample = linalg.null_space(np.ones((1, num_experts)))  # a basis of those that sum to zero
    basis = np.kron(np.eye(num_samples), directions_of_sample)
    directions = linalg.block_diag(np.eye(2 * point.experts.size), basis)
    return directions.T @ hessian(problem, point) @ directions


def local_rate(problem: LinearProblem, solution: Point) -> float:
    """Return the factor by which a step of the alternation (CoMiGS, eq. 28) multiplies ``F - F*`` near a solution.

    By Example 2 of the paper distances shrink by ``r = |A^-1/2 C^T B^-1/2|^2`` with A, B, C the blocks of the
    solution's Hessian (experts and router; shares; mixed). The objective is quadratic there, so ``F - F*`` shrinks by
    ``r^2``.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        solution: The fixed point of the alternation.
    """
    whole = tangent_hessian(problem, solution)
    weights_size = 2 * solution.experts.size  # experts and router have equal shapes
    # |L_a^-1 C^T L_b^-T| with Cholesky factors L of A and B equals the norm with symmetric roots.
    lower_a = linalg.cholesky(whole[:weights_size, :weights_size], lower=True)
    lower_b = linalg.cholesky(whole[weights_size:, weights_size:], lower=True)
    half_solved = linalg.solve_triangular(lower_a, whole[:weights_size, weights_size:], lower=True)
    solved = linalg.solve_triangular(lower_b, half_solved.T, lower=True)
    return float(linalg.norm(solved, 2) ** 4)  # r^2


def _outputs(problem: LinearProblem, point: Point) -> Float[np.ndarray, " samples"]:
    """Return every sample's output, the experts' outputs mixed by its shares."""
    return (point.shares * (problem.inputs @ point.experts)).sum(1)


def _experts_block(problem: LinearProblem, point: Point) -> Matrix:
    """Return the Hessian of the objective F (CoMiGS, eq. 25) in the experts Theta, row-major.

    The Hessian is ``mean(l'' z z^T) + alpha I``, where z is the matrix ``x lambda^T`` of a sample as a vector: the
    output is the scalar product of z and Theta. l'' is the loss's second derivative, alpha the weight decay.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    features = np.einsum("nd,ne->nde", problem.inputs, point.shares).reshape(len(point.shares), -1)
    curvature = problem.loss.curvature(_outputs(problem, point), problem.targets)
    return (features.T * curvature) @ features / len(features) + problem.decay * np.eye(features.shape[1])


def _cross_block(problem: LinearProblem, point: Point) -> Matrix:
    """Return the mixed second derivatives of the objective F (CoMiGS, eq. 25) in weights and shares.

    Rows are the entries of Theta and Phi, columns the entries of Lambda, all row-major. Take a sample x, its feature d,
    the expert e of the weight and the expert f of the share. The derivative is
    ``l' x_d [e = f] + l'' x_d lambda_e a_f`` in Theta and ``-mu x_d [e = f]`` in Phi, both divided by the number of
    samples. a are the experts' outputs.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    x, (num_samples, num_experts) = problem.inputs, point.shares.shape
    outputs, expert_outputs = _outputs(problem, point), x @ point.experts
    slope = problem.loss.slope(outputs, problem.targets)
    curvature = problem.loss.curvature(outputs, problem.targets)
    # Entries (sample, feature, expert of the weight, expert of the share).
    same_expert = np.einsum("nd,ef->ndef", x, np.eye(num_experts))
    through_curvature = np.einsum("n,nd,ne,nf->ndef", curvature, x, point.shares, expert_outputs)
    experts_rows = slope[:, None, None, None] * same_expert + through_curvature
    router_rows = -problem.coupling * same_expert
    stacked = np.concatenate([experts_rows, router_rows], axis=1) / num_samples
    return stacked.transpose(1, 2, 0, 3).reshape(2 * point.experts.size, num_samples * num_experts)


def _shares_block(problem: LinearProblem, point: Point) -> Matrix:
    """Return the Hessian of the objective F (CoMiGS, eq. 25) in Lambda, row-major: a block for each sample.

    The block of a sample is ``(l'' a a^T + mu diag(1 / lambda)) / n`` with the experts' outputs a, the loss's second
    derivative l'', the sample's shares lambda and the number n of samples.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    expert_outputs = problem.inputs @ point.experts
    curvature = problem.loss.curvature(_outputs(problem, point), problem.targets)
    blocks = curvature[:, None, None] * expert_outputs[:, :, None] * expert_outputs[:, None, :]
    blocks = blocks + problem.coupling * np.eye(expert_outputs.shape[1]) / point.shares[:, :, None]
    return np.asarray(linalg.block_diag(*(blocks / len(blocks))))
