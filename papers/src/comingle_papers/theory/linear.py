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
    """Return the objective F (CoMiGS, eq. 25), in which each sample's shares of the experts are free variables.

    F is the mean loss with these shares, plus weight decay, plus mu times the mean KL divergence from the shares to the
    router's gates. If the shares are the gates, F equals :func:`coupled_objective`.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    losses = problem.loss.value(_outputs(problem, point), problem.targets)
    logits = problem.inputs @ point.router
    # KL(lambda, pi) = sum lambda ln lambda - sum lambda ln pi, where ln pi = logits - logsumexp(logits).
    negative_entropies = special.xlogy(point.shares, point.shares).sum(1)
    divergences = negative_entropies + special.logsumexp(logits, axis=1) - (point.shares * logits).sum(1)
    mean = float((losses + problem.coupling * divergences).mean())
    return mean + _decay_penalty(problem, point.experts, point.router)


def best_shares(problem: LinearProblem, experts: Weights, router: Weights) -> Shares:
    """Return the shares of every sample that minimise the objective F (CoMiGS, eq. 25), for given experts and router.

    This is the first line of eq. 28. The minimum is ``lambda = softmax(b - l'(t) a / mu)`` with the experts' outputs
    ``a = Theta^T x``, the logits ``b = Phi^T x`` and the mixed output ``t = <lambda, a>``. So t is the root of
    ``t - <softmax(b - l'(t) a / mu), a>``, which increases in t. It lies between the smallest and the largest a_j.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: Weights Theta of the experts, (features, experts).
        router: Weights Phi of the router, (features, experts).
    """
    expert_outputs = problem.inputs @ experts  # a
    logits = problem.inputs @ router  # b
    low, high = expert_outputs.min(1), expert_outputs.max(1)  # the bracket of each sample's root t
    tolerances = _ROOT_TOLERANCE * np.abs(expert_outputs).max(1)
    outputs = (low + high) / 2  # t
    # Newton's method inside the bracket, for all samples at once.
    for iteration in range(_MAX_ROOT_ITERATIONS):
        shares = _shares_at_outputs(problem, expert_outputs, logits, outputs)
        mixed = (shares * expert_outputs).sum(1)
        excess = outputs - mixed  # 0 at the root
        is_unsolved = np.abs(excess) > tolerances
        if not is_unsolved.any():
            break
        low = np.where(excess < 0, outputs, low)
        high = np.where(excess > 0, outputs, high)
        middle = (low + high) / 2

        # The derivative of the excess in t is 1 + l''(t) / mu times the variance of the experts' outputs.
        variance = (shares * (expert_outputs - mixed[:, None]) ** 2).sum(1)
        curvature = problem.loss.curvature(outputs, problem.targets)
        newton = outputs - excess / (1 + curvature * variance / problem.coupling)
        is_in_bracket = (newton > low) & (newton < high)
        allows_newton = iteration % 3 < 2  # every third iteration halves the bracket
        next_outputs = np.where(is_in_bracket & allows_newton, newton, middle)
        outputs = np.where(is_unsolved, next_outputs, outputs)
    return _shares_at_outputs(problem, expert_outputs, logits, outputs)


def _shares_at_outputs(problem: LinearProblem, expert_outputs: Shares, logits: Shares, outputs: Vector) -> Shares:
    """Return the shares of each sample that minimise the objective, given its mixed output t.

    They are ``softmax(b - l'(t) a / mu)`` with the derivative l' of the loss. Since t depends on the shares itself,
    :func:`best_shares` searches the t at which mixing with these shares gives t again.

    Args:
        problem: The samples, the loss, and the weight ``coupling`` (mu).
        expert_outputs: The experts' outputs a, shape (samples, experts).
        logits: The router's logits b, shape (samples, experts).
        outputs: The outputs t at which l' is taken, shape (samples).
    """
    slopes = problem.loss.slope(outputs, problem.targets)  # l'(t)
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

    def gradient(flat_router: Vector) -> Vector:
        return _router_gradient(problem, shares, flat_router.reshape(start.shape)).ravel()

    def hessian(flat_router: Vector) -> Float[np.ndarray, "size size"]:
        return router_curvature(problem, flat_router.reshape(start.shape))

    return _find_stationary(gradient, hessian, start, name="the router's step")


def best_experts(problem: LinearProblem, shares: Shares, start: Weights) -> Weights:
    """Return the experts that minimise the objective F (CoMiGS, eq. 25) for given shares (third line of eq. 28).

    The output is linear in Theta, ``<lambda, Theta^T x> = <x lambda^T, Theta>``. So for the squared loss this is ridge
    regression with the features ``x lambda^T``; the logistic loss is minimised numerically.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        shares: Shares lambda of the experts in each sample, (samples, experts).
        start: Initial value of the search.

    Raises:
        DivergenceError: Scipy found no stationary point.
    """
    num_samples = len(shares)
    loss, targets = problem.loss, problem.targets
    features = np.einsum("nd,ne->nde", problem.inputs, shares).reshape(num_samples, -1)  # x lambda^T, flat
    decay_matrix = problem.decay * np.eye(features.shape[1])

    if not isinstance(loss, Logistic):
        normal_matrix = features.T @ features / num_samples + decay_matrix
        return linalg.solve(normal_matrix, features.T @ targets / num_samples, assume_a="pos").reshape(start.shape)

    def gradient(flat_experts: Vector) -> Vector:
        slopes = loss.slope(features @ flat_experts, targets)
        return features.T @ slopes / num_samples + problem.decay * flat_experts

    def hessian(flat_experts: Vector) -> Float[np.ndarray, "size size"]:
        curvatures = loss.curvature(features @ flat_experts, targets)
        return (features.T * curvatures) @ features / num_samples + decay_matrix

    return _find_stationary(gradient, hessian, start, name="the experts' step")


def _router_gradient(problem: LinearProblem, shares: Shares, router: Weights) -> Weights:
    """Return the gradient of the objective F (CoMiGS, eq. 25) in the router's weights Phi, shape (features, experts).

    F depends on Phi by mu times the mean KL divergence from shares to gates, and by the decay ``alpha / 2 |Phi|^2``.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        shares: Shares lambda of the experts in each sample, (samples, experts).
        router: Weights Phi of the router, (features, experts).
    """
    num_samples = len(shares)
    summed_divergence_gradient = problem.inputs.T @ (gates(problem, router) - shares)
    return problem.coupling / num_samples * summed_divergence_gradient + problem.decay * router


def router_curvature(problem: LinearProblem, router: Weights) -> Float[np.ndarray, "size size"]:
    """Return the Hessian of the objective F (CoMiGS, eq. 25) in the router's weights Phi, row-major.

    The Hessian is ``mu/n sum_i kron(x_i x_i^T, diag(pi_i) - pi_i pi_i^T) + alpha I`` with the input x_i and the gates
    pi_i of sample i of n.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        router: Weights Phi of the router, (features, experts).
    """
    pi = gates(problem, router)
    num_samples, num_experts = pi.shape
    softmax_jacobians = pi[:, :, None] * (np.eye(num_experts) - pi[:, None, :])  # diag(pi_i) - pi_i pi_i^T
    kronecker_sum = np.einsum("na,nb,nef->aebf", problem.inputs, problem.inputs, softmax_jacobians, optimize=True)
    divergence_hessian = problem.coupling / num_samples * kronecker_sum.reshape(router.size, router.size)
    return divergence_hessian + problem.decay * np.eye(router.size)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Iterates of the alternation (CoMiGS, eq. 28).

    ``points[k]`` is ``(Theta_k, Phi_k, Lambda_{k+1})``, and ``values[k]`` is the objective at this point.
    """

    points: list[Point]
    values: list[float]


def alternate(problem: LinearProblem, experts: Weights, router: Weights, steps: int) -> Descent:
    """Minimise the objective F (CoMiGS, eq. 25) by alternation (eq. 28): shares, then router and experts, and so on.

    The result has the point after each optimisation of the shares. The alternation ends early if the shares no longer
    change.

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
        router = best_router(problem, shares, start=points[-1].router)
        experts = best_experts(problem, shares, start=points[-1].experts)
        points.append(_point_at_best_shares(problem, experts, router))
        if np.allclose(points[-1].shares, shares, rtol=0, atol=_UNCHANGED_SHARES_TOLERANCE):
            break
    return Descent(points=points, values=[decoupled_objective(problem, point) for point in points])


def minimum(problem: LinearProblem, near: Point) -> Point:
    """Return the minimum of the objective F (CoMiGS, eq. 25) to machine precision, from a point near it.

    Up to 500 more steps of :func:`alternate` come close to the minimum. Then the gradient of ``min_Lambda F`` in
    experts and router is solved for its root.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        near: A point close to the minimum, such as the last of a descent.

    Raises:
        DivergenceError: No root was found, or F is larger there than after the steps.
    """
    for _ in range(_MAX_APPROACHES):
        nearer = alternate(problem, near.experts, near.router, steps=10).points[-1]
        change = float(np.abs(nearer.shares - near.shares).max())
        near = nearer
        if change < _NEAR_TOLERANCE:
            break
    start = np.stack([near.experts, near.router])

    def gradient_at_best_shares(flat: Vector) -> Vector:
        experts, router = flat.reshape(start.shape)
        return weights_gradient(problem, _point_at_best_shares(problem, experts, router))

    experts, router = _find_stationary(gradient_at_best_shares, None, start, name="the minimum")
    point = _point_at_best_shares(problem, experts, router)
    excess = decoupled_objective(problem, point) - decoupled_objective(problem, near)
    largest_excess = _NEAR_TOLERANCE**2  # near a minimum, F changes by the square of the distance
    if excess > largest_excess:
        raise DivergenceError(
            f"the minimum: the point found is {excess:.1e} above a point of the descent; 0 is allowed"
        )
    return point


def _point_at_best_shares(problem: LinearProblem, experts: Weights, router: Weights) -> Point:
    """Return the point of given experts and router with the shares that minimise the objective F (CoMiGS, eq. 25).

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
    num_samples = len(point.shares)
    slopes = problem.loss.slope(_outputs(problem, point), problem.targets)
    loss_gradient = problem.inputs.T @ (slopes[:, None] * point.shares) / num_samples
    experts_gradient = loss_gradient + problem.decay * point.experts
    router_gradient = _router_gradient(problem, point.shares, point.router)
    return np.concatenate([experts_gradient.ravel(), router_gradient.ravel()])


_MAX_APPROACHES, _NEAR_TOLERANCE = 50, 1e-6
"""Largest number of times that :func:`minimum` takes ten more steps, and the change of shares at which it stops."""
_UNCHANGED_SHARES_TOLERANCE = 1e-14
"""Change of shares in one step at which a descent ends."""
_MAX_ROOT_ITERATIONS, _ROOT_TOLERANCE = 120, 4e-15
"""Limits of the search for the best shares: iterations, and error relative to the experts' largest output."""
_GRADIENT_TOLERANCE = 1e-9
"""Largest absolute entry of the gradient at a stationary point."""


def _find_stationary(
    gradient: Callable[[Vector], Vector],
    hessian: Callable[[Vector], Float[np.ndarray, "size size"]] | None,
    start: np.ndarray,
    name: str,
) -> np.ndarray:
    """Find a point at which a gradient is zero, by root finding.

    Args:
        gradient: The gradient of a flat vector.
        hessian: The derivative of ``gradient``; None for finite differences.
        start: Initial value, of any shape.
        name: Name of the problem, for the error message.

    Returns:
        The stationary point, of the shape of ``start``.

    Raises:
        DivergenceError: The gradient found is not zero.
    """
    solution = optimize.root(gradient, start.ravel(), jac=hessian, method="hybr", options={"xtol": 1e-14})
    remaining_gradient = float(np.abs(gradient(solution.x)).max())
    is_stationary = remaining_gradient < _GRADIENT_TOLERANCE  # False for nan
    if not is_stationary:
        raise DivergenceError(
            f"{name}: the gradient stays at {remaining_gradient:.1e}; below {_GRADIENT_TOLERANCE:.0e} is allowed"
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
    """Draw a problem with normal inputs and targets of random linear experts.

    A random linear router chooses one expert for each sample. For the squared loss the sample's target is the output of
    this expert plus noise. For the logistic loss the target is a label, 1 or -1, drawn with the output as the logit
    of 1.

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
    true_router = rng.standard_normal((features, num_experts))
    chosen_experts = (inputs @ true_router).argmax(1)
    true_experts = rng.standard_normal((features, num_experts))
    expert_outputs = inputs @ true_experts
    outputs = expert_outputs[np.arange(samples), chosen_experts]
    if isinstance(loss, Logistic):
        probability_of_1 = special.expit(outputs)
        targets = np.where(rng.uniform(size=samples) < probability_of_1, 1.0, -1.0)
    else:
        noise = 0.1 * rng.standard_normal(samples)
        targets = outputs + noise
    return LinearProblem(
        inputs=inputs, targets=targets, num_experts=num_experts, loss=loss, decay=decay, coupling=coupling
    )


def printed_decay(input_norm: float, rho: float, coupling: float) -> float:
    """Return the smallest weight decay that Proposition 1 of CoMiGS allows, ``2 |x|^2 max(mu, rho^2 / mu)`` (eq. 27).

    Args:
        input_norm: ``|x|``, the norm of a sample's input.
        rho: The largest absolute derivative of the loss by the output. (The paper omits "absolute".)
        coupling: mu, the weight of the divergence between shares and gates.
    """
    return 2 * input_norm**2 * max(coupling, rho**2 / coupling)


def needed_decay(input_norm: float, rho: float, coupling: float) -> float:
    """Return the weight decay above which one sample's objective (CoMiGS, eq. 26) is strongly convex.

    This weight decay is ``|x|^2 (rho^2 + mu^2) / (2 mu)``, at most half of what the paper asks for
    (:func:`printed_decay`).

    Args:
        input_norm: ``|x|``, the norm of a sample's input.
        rho: The largest absolute derivative of the loss by the output.
        coupling: mu, the weight of the divergence between shares and gates.
    """
    return input_norm**2 * (rho**2 + coupling**2) / (2 * coupling)


@dataclass(frozen=True, kw_only=True)
class LinearConstants:
    """Constants of a problem with linear experts, and bounds on how fast CoMiGS's alternation converges on it.

    ``decay`` is alpha, ``coupling`` mu, ``rho`` the largest absolute derivative of the loss, ``max_loss_curvature`` its
    largest second derivative. ``radius`` bounds ``|(Theta, Phi)|`` over all iterates and the minimum.
    ``max_input_norm`` is the largest ``|x|``, ``input_scale`` the largest eigenvalue of ``X^T X / n``.
    """

    num_samples: int
    num_experts: int
    decay: float
    coupling: float
    max_loss_curvature: float
    radius: float
    rho: float
    max_input_norm: float
    input_scale: float

    @property
    def smallest_share(self) -> float:
        """Lower bound ``1 / (1 + N exp(s))`` on every optimal share, with N + 1 experts.

        Optimal shares are a softmax of the scores ``<phi_j - l' / mu theta_j, x>``. Two of them differ by at most
        ``s = |x| radius sqrt(2 (1 + rho^2 / mu^2))``, as ``|l'| <= rho`` and ``|(Theta, Phi)| <= radius``.
        """
        ratio = self.rho / self.coupling
        max_score_difference = self.max_input_norm * self.radius * float(np.sqrt(2 * (1 + ratio**2)))  # s
        exponential = float(np.exp(min(max_score_difference, 700.0)))  # exp(710) would overflow
        num_specialists = self.num_experts - 1  # N
        return 1 / (1 + num_specialists * exponential)

    @property
    def printed_decay(self) -> float:
        """Smallest weight decay that CoMiGS's Proposition 1 allows (eq. 27) for the largest input."""
        return printed_decay(self.max_input_norm, self.rho, self.coupling)

    @property
    def modulus_weights(self) -> float:
        """Lower bound m_Y on the curvature of the objective F (CoMiGS, eq. 25) in experts and router, for all shares.

        The bound is ``alpha - (rho^2 + mu^2) / (2 mu) * input_scale`` with the weight decay alpha, the weight
        ``coupling`` (mu) of the divergence and the loss's largest slope rho. F is proved to be strongly convex in
        experts and router if it is positive.
        """
        return self.decay - self._rho2_plus_mu2 * self.input_scale / (2 * self.coupling)

    @property
    def modulus_shares(self) -> float:
        """Lower bound m_X on the curvature of the objective F (CoMiGS, eq. 25) in the shares, along the simplex.

        The bound is ``(2 mu - |x|^2 (rho^2 + mu^2) / alpha) / n`` with the largest norm ``|x|`` of n samples, the
        weight decay alpha, the weight ``coupling`` (mu) of the divergence and the loss's largest slope rho.
        """
        return (2 * self.coupling - self._rho2_plus_mu2 * self.max_input_norm**2 / self.decay) / self.num_samples

    @property
    def modulus(self) -> float:
        """Lower bound m on the curvature of the objective F (CoMiGS, eq. 25) in all variables (mu of Theorem F.2).

        F minus ``m / 2`` times the squared norm of all variables is F with the weight decay ``alpha - m``, which must
        be convex. By :attr:`modulus_shares` this holds up to ``n m = 2 mu - |x|^2 (rho^2 + mu^2) / (alpha - m)``, that
        is ``n m^2 - (n alpha + 2 mu) m + 2 mu alpha - |x|^2 (rho^2 + mu^2) = 0``, for n samples of norm at most
        ``|x|``, the weight mu of the divergence and the loss's largest slope rho. If m is not positive, nothing is
        proved.
        """
        n, alpha, mu = self.num_samples, self.decay, self.coupling
        linear = n * alpha + 2 * mu  # minus the coefficient of m
        constant = 2 * mu * alpha - self._rho2_plus_mu2 * self.max_input_norm**2
        product = 4 * n * constant
        # The smaller root of the quadratic equation, in the form without a difference of nearly equal numbers.
        return product / (2 * n * (linear + float(np.sqrt(linear**2 - product))))

    @property
    def smoothness_weights(self) -> float:
        """Upper bound L_Y on the curvature of the objective F (CoMiGS, eq. 25) in experts and router.

        F has no mixed derivatives in experts and router, so L_Y is the larger of two curvatures: the loss's in the
        experts, and the divergence's in the router. The latter is at most ``mu / 2``, since the curvature of a
        log-softmax is at most 1/2. Both are multiplied by ``input_scale``, and weight decay adds alpha.
        """
        max_curvature = max(self.max_loss_curvature, self.coupling / 2)
        return self.decay + max_curvature * self.input_scale

    @property
    def smoothness_shares(self) -> float:
        """Upper bound L_X on the curvature of the objective F (CoMiGS, eq. 25) in the shares.

        The bound holds as long as every share is at least :attr:`smallest_share`.
        """
        divergence_curvature = self.coupling / self.smallest_share
        max_expert_output = self.radius * self.max_input_norm
        return (divergence_curvature + self.max_loss_curvature * max_expert_output**2) / self.num_samples

    @property
    def smoothness(self) -> float:
        """Upper bound L on the curvature of the objective F (CoMiGS, eq. 25) in all variables (Theorem F.2).

        The curvature of a convex function of two blocks of variables is at most the sum of the blocks' curvatures.
        """
        return self.smoothness_weights + self.smoothness_shares

    @property
    def theorem_rate(self) -> float | None:
        """Bound ``(1 - m / L)^2`` of CoMiGS's Theorem F.2 on the ratio of ``F - F*`` after and before a step.

        m and L are the smallest and the largest curvature of the objective F in all variables, F* is its minimum. None
        if m is not positive, so that nothing is proved.
        """
        if self.modulus <= 0:
            return None
        return (1 - self.modulus / self.smoothness) ** 2

    @property
    def block_rate(self) -> float | None:
        """Bound ``(1 - m_Y / L_Y) (1 - m_X / L_X)`` on the factor by which a step multiplies ``F - F*``.

        m and L are the smallest and the largest curvature of the objective F (CoMiGS, eq. 25), in experts and router
        (Y) and in shares (X). F* is its minimum. None if m_Y is not positive, so that nothing is proved.
        """
        m_y, l_y = self.modulus_weights, self.smoothness_weights
        m_x, l_x = self.modulus_shares, self.smoothness_shares
        if m_y <= 0:
            return None
        factor_x = 1 - max(m_x, 0.0) / l_x
        factor_y = 1 - m_y / l_y
        return factor_y * factor_x

    @property
    def _rho2_plus_mu2(self) -> float:
        """``rho^2 + mu^2`` with the loss's largest slope rho and the weight ``coupling`` (mu) of the divergence."""
        return self.rho**2 + self.coupling**2


def constants(problem: LinearProblem, experts: Weights, router: Weights) -> LinearConstants:
    """Return the constants of the bounds on how fast :func:`alternate` descends from these experts and this router.

    :class:`LinearConstants` explains them.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: The initial experts.
        router: The initial router.
    """
    initial_value = decoupled_objective(problem, _point_at_best_shares(problem, experts, router))
    # No step increases F, and no term of F is negative. So alpha / 2 |(Theta, Phi)|^2 stays below its initial value.
    radius = float(np.sqrt(2 * initial_value / problem.decay))
    max_input_norm = float(linalg.norm(problem.inputs, axis=1).max())
    largest_output = radius * max_input_norm
    num_samples = len(problem.inputs)
    return LinearConstants(
        num_samples=num_samples,
        num_experts=problem.num_experts,
        decay=problem.decay,
        coupling=problem.coupling,
        max_loss_curvature=problem.loss.max_curvature,
        radius=radius,
        rho=problem.loss.slope_bound(largest_output, problem.targets),  # largest slope along the descent
        max_input_norm=max_input_norm,
        input_scale=float(linalg.norm(problem.inputs, 2) ** 2) / num_samples,  # largest eigenvalue of X^T X / n
    )


def threshold_decay(problem: LinearProblem, experts: Weights, router: Weights) -> float:
    """Return the smallest weight decay alpha that satisfies the condition of CoMiGS's Proposition 1 (eq. 27).

    The condition is ``alpha >= 2 |x|^2 max(mu, rho^2 / mu)``. Its right side depends on alpha, too: more decay keeps
    outputs smaller, and so the loss's largest slope rho along the descent. The equation is solved for ``log(alpha)``.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        experts: The initial experts.
        router: The initial router.
    """

    def log_decay_above_bound(log_decay: float) -> float:
        decay = float(np.exp(log_decay))
        constants_at_decay = constants(dataclasses.replace(problem, decay=decay), experts, router)
        return log_decay - float(np.log(constants_at_decay.printed_decay))

    log_decays = (-20.0, 20.0)  # decays from 2e-9 to 5e8
    solution = optimize.root_scalar(log_decay_above_bound, bracket=log_decays, method="brentq", xtol=1e-12)
    return float(np.exp(solution.root))


Matrix = Float[np.ndarray, "rows columns"]


def hessian(problem: LinearProblem, point: Point) -> Float[np.ndarray, "size size"]:
    """Return the Hessian of the objective F (CoMiGS, eq. 25) in (Theta, Phi, Lambda), row-major.

    Shares are free variables here, although they must sum to one; :func:`tangent_hessian` respects this.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    # In a direction (H, G, h) the loss contributes l'' (<h, Theta^T x> + <lambda, H^T x>)^2 + 2 l' <h, H^T x>. The
    # paper's proof of Proposition 1 lacks the factor 2 of the last term and of the square's cross term.
    # Experts and router have no mixed derivatives: the loss depends on experts only, the divergence on the router only.
    weights_block = linalg.block_diag(_experts_block(problem, point), router_curvature(problem, point.router))
    cross_block = _cross_block(problem, point)
    shares_block = _shares_block(problem, point)
    return np.block([[weights_block, cross_block], [cross_block.T, shares_block]])


def tangent_hessian(problem: LinearProblem, point: Point) -> Float[np.ndarray, "size size"]:
    """Return :func:`hessian` restricted to the simplex: a sample's shares change only in directions that sum to zero.

    The result has ``2 features experts + samples (experts - 1)`` rows, as experts and router each have
    ``features experts`` weights.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    num_samples, num_experts = point.shares.shape
    zero_sum_directions = linalg.null_space(np.ones((1, num_experts)))  # of one sample's shares
    share_directions = np.kron(np.eye(num_samples), zero_sum_directions)
    weight_directions = np.eye(2 * point.experts.size)
    directions = linalg.block_diag(weight_directions, share_directions)
    return directions.T @ hessian(problem, point) @ directions


def local_rate(problem: LinearProblem, solution: Point) -> float:
    """Return the factor by which a step of the alternation (CoMiGS, eq. 28) multiplies ``F - F*`` near a solution.

    By Example 2 of the paper distances shrink by ``r = |A^-1/2 C^T B^-1/2|^2``, and so ``F - F*`` by ``r^2``. A, B and
    C are blocks of the solution's Hessian: experts and router, shares, mixed.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        solution: The fixed point of the alternation.
    """
    hessian_at_solution = tangent_hessian(problem, solution)
    num_weights = 2 * solution.experts.size  # experts and router have equal shapes
    a = hessian_at_solution[:num_weights, :num_weights]
    b = hessian_at_solution[num_weights:, num_weights:]
    c_transposed = hessian_at_solution[:num_weights, num_weights:]
    # With Cholesky factors in place of the symmetric roots the norm is the same.
    lower_a = linalg.cholesky(a, lower=True)
    lower_b = linalg.cholesky(b, lower=True)
    half_solved = linalg.solve_triangular(lower_a, c_transposed, lower=True)
    solved = linalg.solve_triangular(lower_b, half_solved.T, lower=True)
    return float(linalg.norm(solved, 2) ** 4)  # r^2


def _outputs(problem: LinearProblem, point: Point) -> Float[np.ndarray, " samples"]:
    """Return every sample's output, the experts' outputs mixed by its shares."""
    return (point.shares * (problem.inputs @ point.experts)).sum(1)


def _experts_block(problem: LinearProblem, point: Point) -> Matrix:
    """Return the Hessian of the objective F (CoMiGS, eq. 25) in the experts Theta, row-major.

    The Hessian is ``mean(l'' z z^T) + alpha I`` with the flat matrix ``z = x lambda^T`` of a sample, since the output
    is ``<z, Theta>``. l'' is the loss's second derivative, alpha the weight decay.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    num_samples = len(point.shares)
    z = np.einsum("nd,ne->nde", problem.inputs, point.shares).reshape(num_samples, -1)
    curvature = problem.loss.curvature(_outputs(problem, point), problem.targets)  # l''
    return (z.T * curvature) @ z / num_samples + problem.decay * np.eye(z.shape[1])


def _cross_block(problem: LinearProblem, point: Point) -> Matrix:
    """Return the mixed second derivatives of the objective F (CoMiGS, eq. 25) in weights and shares.

    Rows are the entries of Theta and Phi, columns the entries of Lambda, all row-major. For a sample x, the weight of
    its feature d and expert e, and the share of expert f, the derivative times the number of samples is
    ``l' x_d [e = f] + l'' x_d lambda_e a_f`` in Theta and ``-mu x_d [e = f]`` in Phi, with the experts' outputs a.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    x = problem.inputs
    num_samples, num_experts = point.shares.shape
    outputs = _outputs(problem, point)
    expert_outputs = x @ point.experts  # a
    slope = problem.loss.slope(outputs, problem.targets)  # l'
    curvature = problem.loss.curvature(outputs, problem.targets)  # l''
    # Axes n, d, e, f: sample, feature, expert of the weight, expert of the share.
    same_expert = np.einsum("nd,ef->ndef", x, np.eye(num_experts))  # x_d [e = f]
    through_curvature = np.einsum("n,nd,ne,nf->ndef", curvature, x, point.shares, expert_outputs)
    experts_rows = slope[:, None, None, None] * same_expert + through_curvature
    router_rows = -problem.coupling * same_expert
    stacked = np.concatenate([experts_rows, router_rows], axis=1) / num_samples
    return stacked.transpose(1, 2, 0, 3).reshape(2 * point.experts.size, num_samples * num_experts)


def _shares_block(problem: LinearProblem, point: Point) -> Matrix:
    """Return the Hessian of the objective F (CoMiGS, eq. 25) in the shares Lambda, row-major.

    It is block diagonal. The block of a sample is ``(l'' a a^T + mu diag(1 / lambda)) / n`` with the experts' outputs
    a, the loss's second derivative l'', the sample's shares lambda and the number n of samples.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        point: Experts Theta, router Phi and shares Lambda.
    """
    num_samples, num_experts = point.shares.shape
    a = problem.inputs @ point.experts
    curvature = problem.loss.curvature(_outputs(problem, point), problem.targets)  # l''
    loss_blocks = curvature[:, None, None] * a[:, :, None] * a[:, None, :]
    divergence_blocks = problem.coupling * np.eye(num_experts) / point.shares[:, :, None]
    blocks = (loss_blocks + divergence_blocks) / num_samples
    return np.asarray(linalg.block_diag(*blocks))
