"""FLoRAL's local SGD for one cluster (section 4, appendix A): the scheme on quadratics, and its bounds as they hold.

Client k of K has ``f^k(w) = <A_k (w - m_k), w - m_k> / 2``, the cluster ``f_c = sum_k p_c^k f^k``, ``p_c^k = p(k|c)``.
Everybody goes on from the same model for H steps (eq. 4), each step on a client drawn from ``p(.|c)``; then models are
averaged with ``p_hat``, which is what the routers make of ``p``. All expectations over a step's draws are closed forms.

What the appendix needs to hold, or has otherwise (docs/papers.md, L1 to L9):

* Lemma A.2 takes the variance of a sum of independent draws, so every client draws for itself, in every step. One draw
  for all, as in eq. 4, has up to ``1 / |p|^2`` times that variance; one draw for H steps is biased within the round.
* Assumption 4.3 bounds gradients everywhere, which no strongly convex function obeys: here along the iterates.
* ``4 L eta p <= p_hat / 2`` asks for ``eta <= U / (8 L)``, and ``U`` bounds ``p_hat / p`` only where ``p_hat`` stays
  between its start and ``p``.
* Lemma A.8 is used with ``a_t = w_t |w_t - w*|^2``, to which it does not apply as the weights ``w_t = (t + s)^2`` grow.
  With ``eta_t = 3 / (mu (t + s))`` the sum telescopes, since ``x^2 (x - 3) <= (x - 1)^3``; with 1 in the place of 3, as
  printed, Theorem A.10 (4.5) is false: what is left of the start falls as ``kappa^2 / T^2``, not as ``kappa / T^2``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import linalg

Points = Float[np.ndarray, "*batch size"]
Weights = Float[np.ndarray, " clients"]
Numbers = Float[np.ndarray, "*batch"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster's clients: their Hessians A_k, minimisers m_k, and weights p(k|c), which sum to 1."""

    hessians: Float[np.ndarray, "clients size size"]
    centres: Float[np.ndarray, "clients size"]
    weights: Weights

    @property
    def hessian(self) -> Float[np.ndarray, "size size"]:
        """That of f_c."""
        return np.einsum("k,kij->ij", self.weights, self.hessians)

    @property
    def minimiser(self) -> Float[np.ndarray, " size"]:
        """Where f_c is lowest."""
        pulled = np.einsum("k,kij,kj->i", self.weights, self.hessians, self.centres)
        return linalg.solve(self.hessian, pulled, assume_a="pos")

    @property
    def moduli(self) -> tuple[float, float]:
        """Mu and L of f_c (Assumption 4.2)."""
        eigenvalues = linalg.eigvalsh(self.hessian)
        return float(eigenvalues[0]), float(eigenvalues[-1])

    def gap(self, points: Points) -> Numbers:
        """``f_c(w) - f_c(w*)``."""
        away = points - self.minimiser
        return np.asarray(np.einsum("...i,ij,...j->...", away, self.hessian, away) / 2)

    def gradients(self, points: Points) -> Float[np.ndarray, "*batch clients size"]:
        """Every client's gradient at each point."""
        return np.einsum("kij,...kj->...ki", self.hessians, points[..., None, :] - self.centres)

    def moments(self, points: Points) -> tuple[Points, Numbers, Numbers]:
        """``grad f_c``, and over a draw the variance and the second moment of gradients (Assumptions 4.4 and 4.3)."""
        each = self.gradients(points)
        mean = np.einsum("k,...ki->...i", self.weights, each)
        second = np.einsum("k,...ki,...ki->...", self.weights, each, each)
        return mean, np.asarray(second - _squares(mean)), np.asarray(second)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps ``scale / (mu (t + shift))``, averaged over clients after every ``local_steps`` of them (H)."""

    scale: float
    shift: float
    local_steps: int


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Means over replicas, by step: what each statement of appendix A is about.

    ``next_squared`` is ``E |w~_(t+1) - w*|^2`` over the step's draws, ``error`` is ``E |g_bar - g~|^2``, ``drift`` is
    ``E_hat |w~ - w^k|^2``, ``gaps`` and ``trusted_gaps`` are the clients' mean gap by ``p`` and by ``p_hat``, ``slack``
    is the last sum of Lemma A.4; ``averaged`` is the gap of the average that ends at each step. ``variance`` and
    ``moment`` are sigma^2 and G^2 over all points that were visited.
    """

    rates: Float[np.ndarray, " steps"]
    mismatch: Float[np.ndarray, " steps"]
    squared: Float[np.ndarray, " steps"]
    next_squared: Float[np.ndarray, " steps"]
    error: Float[np.ndarray, " steps"]
    drift: Float[np.ndarray, " steps"]
    gaps: Float[np.ndarray, " steps"]
    trusted_gaps: Float[np.ndarray, " steps"]
    slack: Float[np.ndarray, " steps"]
    averaged: Float[np.ndarray, " steps"]
    variance: float
    moment: float


def guess(cluster: Cluster, start: Weights, step: int, shift: float, decay: float) -> Weights:
    """``p_hat`` at the beginning of a round: from its start to ``p``, never beyond; ``|delta|^2`` falls as
    ``(1 + t / s)^-decay``. Theorem A.10 has ``(t + s)^-decay`` times the first, which no start but ``p`` itself obeys.
    """
    return cluster.weights + (1 + step / shift) ** (-decay / 2) * (start - cluster.weights)


def descend(
    cluster: Cluster,
    schedule: Schedule,
    *,
    guessed: Weights,
    decay: float,
    start: Float[np.ndarray, " size"],
    steps: int,
    replicas: int,
    rng: np.random.Generator,
) -> Descent:
    """Eq. 4 with steps ``eta_t``, in many replicas at once."""
    mu, smooth = cluster.moduli
    count, weights, best = len(cluster.weights), cluster.weights, cluster.minimiser
    models = np.broadcast_to(start, (replicas, count, len(start))).copy()
    trusted, total, summed = guessed, 0.0, np.zeros((replicas, len(start)))
    rows: list[tuple[float, ...]] = []
    variance = moment = 0.0
    for step in range(steps):
        if step % schedule.local_steps == 0:
            trusted = guess(cluster, guessed, step, schedule.shift, decay)
        rate = schedule.scale / (mu * (step + schedule.shift))
        virtual = np.einsum("k,rki->ri", trusted, models)
        mean, spread, second = cluster.moments(models)
        total, summed = total + (step + schedule.shift) ** 2, summed + (step + schedule.shift) ** 2 * virtual
        noise = (trusted**2 * spread).sum(-1)
        wrong = _squares(np.einsum("k,rki->ri", weights - trusted, mean)) + noise
        moved = virtual - rate * np.einsum("k,rki->ri", trusted, mean)
        gaps = cluster.gap(models)
        slack = ((4 * smooth * rate * weights - trusted) * gaps).sum(-1)
        drift = (trusted * _squares(virtual[:, None] - models)).sum(-1)
        after = _squares(moved - best) + rate**2 * noise
        averaged = cluster.gap(summed / total)
        by_replica = (_squares(virtual - best), after, wrong, drift, gaps @ weights, gaps @ trusted, slack, averaged)
        rows.append((rate, float(np.abs(trusted - weights).sum()), *(float(part.mean()) for part in by_replica)))
        variance, moment = max(variance, float(spread.max())), max(moment, float(second.max()))
        drawn = rng.choice(count, size=(replicas, count), p=weights)
        away = models - cluster.centres[drawn]
        models = models - rate * np.einsum("rkij,rkj->rki", cluster.hessians[drawn], away)
        if (step + 1) % schedule.local_steps == 0:
            models = np.broadcast_to(np.einsum("k,rki->ri", trusted, models)[:, None], models.shape).copy()
    return Descent(**dict(zip(_BY_STEP, np.array(rows).T, strict=True)), variance=variance, moment=moment)


_BY_STEP = (
    "rates",
    "mismatch",
    "squared",
    "next_squared",
    "error",
    "drift",
    "gaps",
    "trusted_gaps",
    "slack",
    "averaged",
)


def _squares(vectors: Points) -> Numbers:
    return np.asarray((vectors * vectors).sum(-1))


# ---------------------------------------------------------------- bounds


def error_bound(found: Descent, cluster: Cluster) -> Float[np.ndarray, " steps"]:
    """Lemma A.2 (eq. 15): ``2 sigma^2 |p|^2 + 2 G^2 |delta|_1^2``."""
    return 2 * found.variance * _squares(cluster.weights) + 2 * found.moment * found.mismatch**2


def drift_bound(found: Descent, local_steps: int) -> Float[np.ndarray, " steps"]:
    """Lemma A.3: ``4 eta^2 H^2 G^2``."""
    return 4 * found.rates**2 * local_steps**2 * found.moment


def descent_bound(found: Descent, cluster: Cluster, local_steps: int) -> Float[np.ndarray, " steps"]:
    """Lemma A.4, of ``E |w~_(t+1) - w*|^2``."""
    mu, smooth = cluster.moduli
    rate = found.rates
    noise = 4 * found.variance * _squares(cluster.weights) + 4 * found.moment * found.mismatch**2
    drifted = 8 * smooth * rate**3 * local_steps**2 * found.moment
    return (1 - rate * mu) * found.squared + rate**2 * noise + drifted + rate * found.slack


def routed_descent_bound(
    found: Descent, cluster: Cluster, local_steps: int, clusters: int
) -> Float[np.ndarray, " steps"]:
    """Return the bound of Lemma A.7 on ``E |w~_(t+1) - w*|^2``, for K clients and C ``clusters``:

        (1 - eta mu) |w~ - w*|^2 - eta / 2 E_hat [f_c(w^k) - f_c*]
            + 4 eta^2 sigma^2 |p|^2 + 16 eta^2 G^2 log(K C) + 9 eta^3 L H^2 G^2.

    It follows from Lemma A.4 where ``eta <= U / (8 L)``, as ``|delta|_1^2 <= 4 <= 4 log(K C)`` for ``K C >= 3``. The
    lemma asks for ``eta <= gamma / max(5/2, 16 G^2, 4 L)``; its own eq. 23 has ``5/2`` as a factor of the others.
    """
    mu, smooth = cluster.moduli
    rate = found.rates
    noise = 4 * found.variance * _squares(cluster.weights) + _router_noise(found, cluster, clusters)
    drifted = 9 * smooth * rate**3 * local_steps**2 * found.moment
    return (1 - rate * mu) * found.squared - rate / 2 * found.trusted_gaps + rate**2 * noise + drifted


def _router_noise(found: Descent, cluster: Cluster, clusters: int) -> float:
    """Return ``16 G^2 log(K C)``, which Lemma A.6 leaves of ``4 G^2 |delta|_1^2``."""
    return float(16 * found.moment * np.log(len(cluster.weights) * clusters))


def local_sgd_bound(found: Descent, cluster: Cluster) -> Float[np.ndarray, " steps"]:
    """Local SGD's own descent (Stich 2019, Lemma 3.1) of ``E |w~_(t+1) - w*|^2``, where ``p_hat = p`` (Corollary A.5).

    ``(1 - mu eta) |w~ - w*|^2 + eta^2 E |g - g_bar|^2 - eta (f_c(w~) - f*) / 2 + 2 eta L E |w~ - w^k|^2``, here with
    the clients' mean gap, which is no smaller, in the place of ``f_c(w~) - f*``; it asks for ``eta <= 1 / (4 L)``.
    """
    mu, smooth = cluster.moduli
    rate = found.rates
    drifted = 2 * rate * smooth * found.drift
    return (1 - rate * mu) * found.squared + rate**2 * found.error - rate * found.gaps / 2 + drifted


def uniformity(weights: Weights, start: Weights) -> float:
    """The U with which ``p_hat >= U p`` holds as long as p_hat stays between its start and p; U_c of eq. 24."""
    return float(min(1.0, (start / weights).min()))


def rate_bound(found: Descent, cluster: Cluster, schedule: Schedule) -> Float[np.ndarray, " steps"]:
    """Theorem A.10 as it holds, of the gap of the average after each step: for ``eta_t = 3 / (mu (t + s))`` and
    ``s >= max(H, 24 kappa / U)``,

        2 / S (s^2 (s - 3) mu D^2 / 3 + 3 / mu sum_t (t + s) A_t + 9 T B / mu^2),    S = sum_t (t + s)^2,

    with ``A_t = 4 sigma^2 |p|^2 + 4 G^2 |delta_t|_1^2``, ``B = 8 L H^2 G^2`` and D the distance of the start.
    """
    noise = 4 * found.variance * _squares(cluster.weights) + 4 * found.moment * found.mismatch**2
    return _telescoped(found, cluster, schedule, noise, 8)


def routed_rate_bound(
    found: Descent, cluster: Cluster, schedule: Schedule, clusters: int
) -> Float[np.ndarray, " steps"]:
    """Return the corrected bound of Theorem A.9: that of :func:`rate_bound`, but from Lemma A.7 instead of Lemma A.4.

    ``A = 4 sigma^2 |p|^2 + 16 G^2 log(K C)`` and ``B = 9 L H^2 G^2``, whatever the routers are.
    """
    noise = 4 * found.variance * _squares(cluster.weights) + _router_noise(found, cluster, clusters)
    return _telescoped(found, cluster, schedule, np.full(len(found.rates), noise), 9)


def _telescoped(
    found: Descent, cluster: Cluster, schedule: Schedule, noise: Float[np.ndarray, " steps"], drifts: int
) -> Float[np.ndarray, " steps"]:
    mu, smooth = cluster.moduli
    times = np.arange(len(found.rates)) + schedule.shift
    drifted = drifts * smooth * schedule.local_steps**2 * found.moment
    start = schedule.shift**2 * (schedule.shift - 3) * mu * found.squared[0] / 3
    taken = np.arange(1, len(times) + 1)
    return 2 / (times**2).cumsum() * (start + 3 / mu * (times * noise).cumsum() + 9 * taken * drifted / mu**2)


def printed_rate(found: Descent, cluster: Cluster, schedule: Schedule, decay: float) -> Float[np.ndarray, " steps"]:
    """Theorem A.10 as printed, for steps ``1 / (mu (t + s))``, ``s >= max(3 H, 4 kappa / U)``; it need not hold."""
    mu, smooth = cluster.moduli
    s, taken = schedule.shift, np.arange(1, len(found.rates) + 1)
    noise, moment = found.variance * _squares(cluster.weights), found.moment
    first = found.mismatch[0] ** 2
    of_noise = 12 * noise * (1 / (mu * taken) + (2 * s - 1) / (mu * taken**2))
    of_mismatch = 48 * moment * first / (mu * taken ** (1 + decay))
    of_start = 24 * moment * (s - 1 + 2 * first * s**-decay) * s**2 / (mu * taken**3)
    return of_noise + of_mismatch + of_start + 48 * smooth * schedule.local_steps**2 * moment / (mu**2 * taken**2)


def printed_routed_rate(
    found: Descent, cluster: Cluster, schedule: Schedule, clusters: int
) -> Float[np.ndarray, " steps"]:
    """Return the bound of Theorem A.9 as printed, which need not hold.

    Its steps are ``1 / (mu (t + s))`` with ``s >= max(3 H, 4 kappa / U, 16 G^2 / (mu U))``.
    """
    mu, smooth = cluster.moduli
    s, taken = schedule.shift, np.arange(1, len(found.rates) + 1)
    noise = 8 * found.variance * _squares(cluster.weights) + 2 * _router_noise(found, cluster, clusters)
    of_noise = noise * (1 / (mu * taken) + (2 * s - 1) / (mu * taken**2))
    of_drift = 18 * smooth / mu * schedule.local_steps**2 * found.moment / (mu * taken**2)
    return of_noise + of_drift + 24 * (s - 1) * s**2 * found.moment / (mu * taken**3)


# ---------------------------------------------------------------- Lemma A.8


@dataclass(frozen=True, kw_only=True)
class Recursion:
    """Non-negative sequences with ``a_(t+1) <= (1 - mu eta_t) a_t - eta_t b_t + eta_t^2 c_t``; ``a`` has one more."""

    rates: Float[np.ndarray, " steps"]
    a: Float[np.ndarray, " more"]
    b: Float[np.ndarray, " steps"]
    c: Float[np.ndarray, " steps"]


def draw_recursion(rng: np.random.Generator, *, mu: float, shift: float, steps: int) -> Recursion:
    """Draw sequences that obey Lemma A.8's recursion with equality, for steps ``1 / (mu (t + s))``.

    The last ``b`` takes all that is left, so that the lemma's two sides are equal as well.
    """
    rates = 1 / (mu * (np.arange(steps) + shift))
    a, c = [float(rng.exponential())], rng.exponential(size=steps)
    b: list[float] = []
    for step, rate in enumerate(rates):
        whole = (1 - mu * rate) * a[-1] + rate**2 * c[step]
        taken = 1.0 if step == steps - 1 else float(rng.uniform())
        b.append(taken * whole / rate)
        a.append((1 - taken) * whole)
    return Recursion(rates=rates, a=np.array(a), b=np.array(b), c=c)


def sum_bound(found: Recursion, mu: float, shift: float) -> float:
    """Return the bound of Lemma A.8 on ``sum_t b_t``: ``(s - 1) mu a_0 + sum_t eta_t c_t``."""
    return float((shift - 1) * mu * found.a[0] + found.rates @ found.c)
