"""The constants of Proposition 1 and of Theorem F.2, from the data (CoMiGS eq. 24, 27 and 30).

**Proposition 1.** One sample's objective (26) is strongly convex if ``alpha >= 2 |x|^2 max(mu, rho^2 / mu)``, where
rho bounds the loss's first derivative *in absolute value*. The paper prints ``rho >= max l'(t)``, which 0 satisfies for
the logistic loss of a positive sample, and then hardly any alpha is asked for. The printed proof does not hold: it
halves the mixed derivative (see :func:`comingle.papers.theory.curvature.hessian`), and with the right one its part
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
from dataclasses import dataclass

import numpy as np
from scipy import linalg, optimize

from comingle.papers.theory.linear import LinearProblem, Point, Weights, best_shares, decoupled_objective


def printed_decay(feature_norm: float, slope: float, coupling: float) -> float:
    """The alpha of Proposition 1, eq. 27: ``2 |x|^2 max(mu, rho^2 / mu)``, rho an absolute value."""
    return 2 * feature_norm**2 * max(coupling, slope**2 / coupling)


def needed_decay(feature_norm: float, slope: float, coupling: float) -> float:
    """The alpha above which one sample's objective (26) is strongly convex: ``|x|^2 (rho^2 + mu^2) / (2 mu)``."""
    return feature_norm**2 * (slope**2 + coupling**2) / (2 * coupling)


@dataclass(frozen=True, kw_only=True)
class LinearConstants:
    """What the bounds of a descent are made of.

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
        """``1 / (1 + N exp(s))``, s the largest difference of two scores ``<phi_j - l' / mu theta_j, x>``."""
        ratio = self.slope / self.coupling
        spread = self.feature_norm * self.radius * float(np.sqrt(2 * (1 + ratio**2)))
        return 1 / (1 + (self.num_experts - 1) * float(np.exp(min(spread, 700.0))))

    @property
    def printed_decay(self) -> float:
        """Eq. 27 for the sample with the largest norm."""
        return printed_decay(self.feature_norm, self.slope, self.coupling)

    @property
    def modulus_weights(self) -> float:
        """m_Y: strong convexity in (Theta, Phi), whatever the shares do; nothing is proved where it is not positive."""
        return self.decay - self._pull * self.feature_scale / (2 * self.coupling)

    @property
    def modulus_shares(self) -> float:
        """m_X: strong convexity in the shares along the simplex, whatever (Theta, Phi) do."""
        return (2 * self.coupling - self._pull * self.feature_norm**2 / self.decay) / self.num_samples

    @property
    def modulus(self) -> float:
        """mu of Theorem F.2, in all variables: m with ``n m = 2 mu - |x|^2 (rho^2 + mu^2) / (alpha - m)``."""
        n, pull = self.num_samples, self._pull * self.feature_norm**2
        middle = n * self.decay + 2 * self.coupling
        product = 4 * n * (2 * self.coupling * self.decay - pull)
        # The smaller root of n m^2 - middle m + product / (4 n), without cancellation.
        return product / (2 * n * (middle + float(np.sqrt(middle**2 - product))))

    @property
    def smoothness_weights(self) -> float:
        """L_Y: ``alpha + max(sup l'', mu / 2)`` times the feature scale; a softmax has curvature up to 1/2."""
        return self.decay + max(self.max_curvature, self.coupling / 2) * self.feature_scale

    @property
    def smoothness_shares(self) -> float:
        """L_X, where every share is at least :attr:`smallest_share`."""
        outputs = self.radius * self.feature_norm
        return (self.coupling / self.smallest_share + self.max_curvature * outputs**2) / self.num_samples

    @property
    def smoothness(self) -> float:
        """L of Theorem F.2 there: two blocks of a convex function are at most as smooth as their sum."""
        return self.smoothness_weights + self.smoothness_shares

    @property
    def theorem_rate(self) -> float | None:
        """``(1 - mu / L)^2`` of Theorem F.2, repair (a): what one step leaves of ``F - F*``; None if unproved."""
        return (1 - self.modulus / self.smoothness) ** 2 if self.modulus > 0 else None

    @property
    def block_rate(self) -> float | None:
        """``(1 - m_Y / L_Y)(1 - m_X / L_X)``, repair (b), the second factor only where m_X > 0; None if unproved."""
        if self.modulus_weights <= 0:
            return None
        of_shares = 1 - max(self.modulus_shares, 0.0) / self.smoothness_shares
        return (1 - self.modulus_weights / self.smoothness_weights) * of_shares

    @property
    def _pull(self) -> float:
        return self.slope**2 + self.coupling**2


def constants(problem: LinearProblem, experts: Weights, router: Weights) -> LinearConstants:
    """The constants for every descent that starts from these experts and this router."""
    start = Point(experts=experts, router=router, shares=best_shares(problem, experts, router))
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
    """The smallest alpha that satisfies eq. 27 with the rho that belongs to it.

    rho depends on the radius and so on alpha, and falls as alpha grows; hence one scalar equation.
    """

    def lacking(logarithm: float) -> float:
        decay = float(np.exp(logarithm))
        constants_there = constants(dataclasses.replace(problem, decay=decay), experts, router)
        return logarithm - float(np.log(constants_there.printed_decay))

    return float(np.exp(optimize.root_scalar(lacking, bracket=(-20.0, 20.0), method="brentq", xtol=1e-12).root))
