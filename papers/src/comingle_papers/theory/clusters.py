"""FLoRAL's local SGD over clusters, its bounds and checks.

Cluster c's model is ``(u, a_c)``; client k has ``f^k(w) = <A_k (w - m_k), w - m_k> / 2``. Aggregation takes the mean
over clients *and* clusters (eq. 25, 26), with weights ``p^k pi_c^k`` and what the routers make of them. The proof takes
two kinds of draws for one gradient: the base's from all clients (eq. 28), an adaptor's from its cluster's (eq. 27).
Here each part of each model has a draw of its own; one that served both would be of one kind or the other.

Client k of K has ``f^k(w) = <A_k (w - m_k), w - m_k> / 2``, the cluster ``f_c = sum_k p_c^k f^k``, ``p_c^k = p(k|c)``.
All clients take H steps from the same model (eq. 4), each step on a client drawn from ``p(.|c)``; then models are
averaged with ``p_hat``, which is what the routers make of ``p``. All expectations over a step's draws are closed forms.

Conditions that the appendix needs, and corrections to it (papers/docs/papers.md, L1 to L9):

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from scipy import linalg, special

from comingle_papers.theory.claims import Claim, Curve

Joint = Float[np.ndarray, "clients clusters"]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Clients with quadratic losses in clusters whose models share their first ``base`` entries.

    Client k has the loss ``<A_k (w - m_k), w - m_k> / 2``: ``hessians`` are the A_k, ``centres`` the minimisers m_k.
    ``amounts`` are the clients' shares p(k) of all data, ``routers`` the true routers pi_c^k.
    """

    hessians: Float[np.ndarray, "clients size size"]
    centres: Float[np.ndarray, "clients size"]
    amounts: Float[np.ndarray, " clients"]
    routers: Joint
    base: int

    @property
    def joint(self) -> Joint:
        """Joint distribution of clients and clusters, ``p(k, c) = p(k) pi_c^k``."""
        return self.amounts[:, None] * self.routers

    @property
    def of_cluster(self) -> Joint:
        """Distribution of the clients in each cluster, ``p(k|c)``; each column (cluster) sums to 1."""
        return self.joint / self.joint.sum(0)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Expected squared error of the aggregated gradient at given models, and constants of its bound (FLoRAL, eq. 31).

    ``adaptors`` are the sigma_c^2 of eq. 27, ``base`` the sigma^2 of eq. 28, ``heterogeneity`` the Delta^2 of eq. 29,
    ``moment`` G^2; all are the largest, or the mean that the assumption names, over the models of all clients.
    """

    error: float
    adaptors: Float[np.ndarray, " clusters"]
    base: float
    heterogeneity: float
    moment: float


def sharing_bound(
    problem: Shared, guessed: Joint, *, moment: float, adaptors: Float[np.ndarray, " clusters"], base: float,
    heterogeneity: float,
) -> float:  # fmt: skip
    """Return the bound of FLoRAL's eq. 31 on the expected squared error of the aggregated gradient.

        2 G^2 sum_k p(k) |delta^k|_1^2 + 2 sum_c p(c) |p(.|c)|^2 sigma_c^2 + 4 sigma^2 sum_kc p(k, c)^2 + 4 Delta^2

    with ``delta^k`` the difference between client k's true and estimated router. The terms come from wrong routers,
    from drawn gradients of the adaptors and of the base, and from clusters that share one base although they differ.

    Args:
        problem: Clients and their true routers.
        guessed: Estimated routers, (clients, clusters).
        moment: G^2, the second moment of the gradients.
        adaptors: sigma_c^2, the variance of the adaptors' gradients in each cluster.
        base: sigma^2, the variance of the base's gradient.
        heterogeneity: Delta^2, the mean squared distance of a cluster's gradient of the base from that of all clients.
    """
    router_errors = np.abs(problem.routers - guessed).sum(1)
    cluster_shares = problem.joint.sum(0)
    adaptor_noise = cluster_shares * (problem.of_cluster**2).sum(0) * adaptors
    return float(
        2 * moment * (problem.amounts * router_errors**2).sum()
        + 2 * adaptor_noise.sum()
        + 4 * base * (problem.joint**2).sum()
        + 4 * heterogeneity
    )


def gradient_error(problem: Shared, guessed: Joint, models: Float[np.ndarray, "clients clusters size"]) -> Errors:
    """Return the expected squared error of the aggregated gradient, and the constants of its bound.

    The gradient is that of FLoRAL, eq. 25 and 26. The error is ``E |g_bar - g~|^2``: ``g_bar`` is the mean of exact
    gradients, weighted by the true routers; ``g~`` is the mean of drawn gradients, weighted by the estimated routers.
    The gradient of a client's model of a cluster is that of a randomly drawn client, with one draw for the base and one
    for the adaptor. The expectation over the draws is a closed form: squared bias plus variance.

    Args:
        problem: Clients and their true routers: ``amounts`` are the clients' shares p(k) of the data, ``joint`` is
            p(k, c) and ``of_cluster`` p(k|c) for client k and cluster c. The first ``base`` entries of a model are the
            base, the others the adaptor.
        guessed: Estimated routers, (clients, clusters).
        models: Model of each client and cluster.
    """
    base, adaptor = slice(None, problem.base), slice(problem.base, None)
    offsets = models[:, :, None] - problem.centres  # (client, cluster, drawn client, size)
    gradients = np.einsum("dij,kcdj->kcdi", problem.hessians, offsets)
    mean_of_cluster = np.einsum("dc,kcdi->kci", problem.of_cluster, gradients)
    mean_of_all = np.einsum("d,kcdi->kci", problem.amounts, gradients)
    guessed_joint = problem.amounts[:, None] * guessed
    # The bias has two sources: wrong routers, and the base's gradient, which is drawn from all clients instead of the
    # cluster's clients.
    exact = np.einsum("kc,kci->i", problem.joint, mean_of_cluster)
    expected = np.concatenate([mean_of_all[..., base], mean_of_cluster[..., adaptor]], -1)
    bias = exact - np.einsum("kc,kci->i", guessed_joint, expected)
    # Variance of the drawn gradients, for each client and cluster.
    base_variance = ((gradients - mean_of_all[:, :, None])[..., base] ** 2).sum(-1) @ problem.amounts
    squared_deviations = ((gradients - mean_of_cluster[:, :, None])[..., adaptor] ** 2).sum(-1)
    adaptor_variance = np.einsum("dc,kcd->kc", problem.of_cluster, squared_deviations)
    noise = (guessed_joint**2 * (base_variance + adaptor_variance)).sum()
    # Constants of the bound.
    base_difference = ((mean_of_cluster - mean_of_all)[..., base] ** 2).sum(-1)
    base_moment = ((gradients[..., base] ** 2).sum(-1) @ problem.amounts).max()
    adaptor_moments = np.einsum("dc,kcd->kc", problem.of_cluster, (gradients[..., adaptor] ** 2).sum(-1))
    return Errors(
        error=float((bias**2).sum() + noise),
        adaptors=adaptor_variance.max(0),
        base=float(base_variance.max()),
        heterogeneity=float((problem.joint * base_difference).sum()),
        moment=float(base_moment + adaptor_moments.max()),
    )


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
        """Hessian of the cluster's loss f_c, the weighted mean of the clients' Hessians."""
        return np.einsum("k,kij->ij", self.weights, self.hessians)

    @property
    def minimiser(self) -> Float[np.ndarray, " size"]:
        """Minimiser of the cluster's loss f_c: ``(sum_k p_k A_k)^-1 sum_k p_k A_k m_k``."""
        weighted_centres = np.einsum("k,kij,kj->i", self.weights, self.hessians, self.centres)
        return linalg.solve(self.hessian, weighted_centres, assume_a="pos")

    @property
    def moduli(self) -> tuple[float, float]:
        """Strong convexity mu and smoothness L of the cluster's loss f_c: its extreme curvatures (Assumption 4.2)."""
        eigenvalues = linalg.eigvalsh(self.hessian)
        return float(eigenvalues[0]), float(eigenvalues[-1])

    def gap(self, points: Points) -> Numbers:
        """Return by how much the cluster's loss f_c at each point exceeds its minimum."""
        offsets = points - self.minimiser
        return np.asarray(np.einsum("...i,ij,...j->...", offsets, self.hessian, offsets) / 2)

    def gradients(self, points: Points) -> Float[np.ndarray, "*batch clients size"]:
        """Return every client's gradient ``A_k (w - m_k)`` at each point w."""
        return np.einsum("kij,...kj->...ki", self.hessians, points[..., None, :] - self.centres)

    def moments(self, points: Points) -> tuple[Points, Numbers, Numbers]:
        """Return mean, variance and second moment of a random client's gradient, at each point.

        The client is drawn with the probabilities p(k|c). The mean is the gradient of the cluster's loss f_c. FLoRAL's
        Assumptions 4.4 and 4.3 bound the variance and the second moment.
        """
        gradients = self.gradients(points)
        mean = np.einsum("k,...ki->...i", self.weights, gradients)
        second_moment = np.einsum("k,...ki,...ki->...", self.weights, gradients, gradients)
        return mean, np.asarray(second_moment - _squared_norms(mean)), np.asarray(second_moment)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps ``scale / (mu (t + shift))``, averaged over clients after every ``local_steps`` of them (H)."""

    scale: float
    shift: float
    local_steps: int


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Measured quantities of a run, by step, about which appendix A makes statements; means over replicas.

    ``p`` are the true weights of clients, ``p_hat`` the estimated ones, w^k the clients' models, ``w~`` their mean
    by ``p_hat``, w* the minimiser of f_c; a gap is ``f_c(w) - f_c(w*)``.

    * ``rates``: step sizes eta. ``mismatch``: ``|delta|_1 = |p_hat - p|_1``.
    * ``squared``: ``|w~ - w*|^2``; ``next_squared``: its expectation after the step, over the step's draws.
    * ``error``: ``E |g_bar - g~|^2``, the squared error of the aggregated gradient.
    * ``drift``: the mean of ``|w~ - w^k|^2`` by ``p_hat``.
    * ``gaps`` and ``trusted_gaps``: the mean gap of the clients' models by ``p`` and by ``p_hat``.
    * ``slack``: ``sum_k (4 L eta p^k - p_hat^k)`` times the gap of w^k, the last sum of Lemma A.4.
    * ``averaged``: the gap of the average of all ``w~`` so far with weights ``(t + s)^2``.

    ``variance`` and ``moment`` are sigma^2 and G^2, the largest variance and second moment of a drawn gradient at any
    point of the run.
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


def estimate_weights(cluster: Cluster, start: Weights, step: int, shift: float, decay: float) -> Weights:
    """Return the estimated weights ``p_hat`` of the clients at the beginning of a round.

    The estimates move from ``start`` to the true weights p in a straight line, so that ``|p_hat - p|^2`` is
    ``(1 + t / s)^-decay`` times its first value. FLoRAL's Theorem A.10 assumes ``(t + s)^-decay`` times the first
    value, which cannot be: for t = 0 the factor would have to be 1, but is ``s^-decay``.

    Args:
        cluster: The cluster with the true weights p.
        start: First estimate of p.
        step: Number of steps before the round, t.
        shift: Shift of the schedule, s.
        decay: Exponent with which the squared mismatch decreases.
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
    """Run FLoRAL's local SGD (eq. 4) on one cluster in many replicas at once, and record quantities of every step.

    In each step each client takes an SGD step on the loss of a client that it draws with probability p(k|c). After
    every H local steps all clients' models are replaced by their mean with the estimated weights ``p_hat``, which
    approach the true weights p from round to round. :class:`Descent` defines the measured quantities.

    Args:
        cluster: The cluster whose clients take part, with the true weights p.
        schedule: Step sizes and local steps.
        guessed: First estimate p_hat of the weights.
        decay: Exponent with which the squared mismatch decreases.
        start: First model of all clients.
        steps: Number of steps.
        replicas: Number of independent runs that are averaged.
        rng: Generator of the drawn clients.
    """
    mu, _ = cluster.moduli
    num_clients = len(cluster.weights)
    models = np.broadcast_to(start, (replicas, num_clients, len(start))).copy()
    estimated, weight_sum, weighted_sum = guessed, 0.0, np.zeros((replicas, len(start)))
    rows: list[dict[str, float]] = []
    variance = moment = 0.0
    for step in range(steps):
        if step % schedule.local_steps == 0:
            estimated = estimate_weights(cluster, guessed, step, schedule.shift, decay)  # p_hat
        rate = schedule.scale / (mu * (step + schedule.shift))
        average = np.einsum("k,rki->ri", estimated, models)  # w~, for each replica r
        weight = (step + schedule.shift) ** 2  # Theorems A.9 and A.10 are about the average with these weights
        weight_sum = weight_sum + weight
        weighted_sum = weighted_sum + weight * average
        moments = cluster.moments(models)
        averaged = float(cluster.gap(weighted_sum / weight_sum).mean())
        rows.append(
            {"rates": rate, "averaged": averaged, **_measure_step(cluster, models, average, moments, estimated, rate)}
        )
        _, gradient_variance, second_moment = moments
        variance = max(variance, float(gradient_variance.max()))
        moment = max(moment, float(second_moment.max()))
        drawn = rng.choice(num_clients, size=(replicas, num_clients), p=cluster.weights)
        offsets = models - cluster.centres[drawn]
        models = models - rate * np.einsum("rkij,rkj->rki", cluster.hessians[drawn], offsets)
        if (step + 1) % schedule.local_steps == 0:
            models = np.broadcast_to(np.einsum("k,rki->ri", estimated, models)[:, None], models.shape).copy()
    columns = np.array([list(row.values()) for row in rows]).T
    return Descent(**dict(zip(rows[0], columns, strict=True)), variance=variance, moment=moment)


def _measure_step(
    cluster: Cluster,
    models: Float[np.ndarray, "replicas clients size"],
    average: Float[np.ndarray, "replicas size"],
    moments: tuple[Points, Numbers, Numbers],
    estimated: Weights,
    rate: float,
) -> dict[str, float]:
    """Return quantities of one step of local SGD, as fields of :class:`Descent`: means over replicas.

    Args:
        cluster: The cluster, with the true weights p of the clients.
        models: The clients' models w^k before the step.
        average: Their mean w~ by the estimated weights.
        moments: Mean, variance and second moment of a drawn gradient at each client's model.
        estimated: The estimated weights p_hat of the clients.
        rate: The step size eta.
    """
    (_, smoothness), weights, optimum = cluster.moduli, cluster.weights, cluster.minimiser
    mean, gradient_variance, _ = moments
    # Expectations over the draws of this step: clients draw independently, so their variances add up.
    noise = (estimated**2 * gradient_variance).sum(-1)
    squared_bias = _squared_norms(np.einsum("k,rki->ri", weights - estimated, mean))
    expected_next = average - rate * np.einsum("k,rki->ri", estimated, mean)
    gaps = cluster.gap(models)  # f_c(w^k) - f_c(w*) of each client
    by_replica = {
        "squared": _squared_norms(average - optimum),
        "next_squared": _squared_norms(expected_next - optimum) + rate**2 * noise,
        "error": squared_bias + noise,
        "drift": (estimated * _squared_norms(average[:, None] - models)).sum(-1),
        "gaps": gaps @ weights,
        "trusted_gaps": gaps @ estimated,
        "slack": ((4 * smoothness * rate * weights - estimated) * gaps).sum(-1),  # the last sum of Lemma A.4
    }
    mismatch = float(np.abs(estimated - weights).sum())
    return {"mismatch": mismatch, **{name: float(values.mean()) for name, values in by_replica.items()}}


def _squared_norms(vectors: Points) -> Numbers:
    """Return the squared Euclidean norm of each vector along the last axis."""
    return np.asarray((vectors * vectors).sum(-1))


# ---------------------------------------------------------------- bounds


def error_bound(run: Descent, cluster: Cluster) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Lemma A.2, on the expected squared error of the aggregated gradient, for each step.

    The bound is ``2 sigma^2 |p|^2 + 2 G^2 |delta|_1^2``. sigma^2 and G^2 are the variance and the second moment of a
    drawn gradient, p are the true and p_hat the estimated weights of the clients, ``delta = p_hat - p``.
    """
    return 2 * run.variance * _squared_norms(cluster.weights) + 2 * run.moment * run.mismatch**2


def drift_bound(run: Descent, local_steps: int) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Lemma A.3, on the clients' mean squared distance from their average, for each step.

    The bound is ``4 eta^2 H^2 G^2`` with step size eta, H local steps and second moment G^2 of the gradients.

    Args:
        run: Measured quantities of the run; ``rates`` are the step sizes, ``moment`` is G^2.
        local_steps: Steps between two averages, H.
    """
    return 4 * run.rates**2 * local_steps**2 * run.moment


def descent_bound(run: Descent, cluster: Cluster, local_steps: int) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Lemma A.4, on the squared distance to the minimum after each step.

    The bound on ``E |w~_(t+1) - w*|^2`` is

        (1 - eta mu) |w~ - w*|^2 + eta^2 (4 sigma^2 |p|^2 + 4 G^2 |delta|_1^2) + 8 L eta^3 H^2 G^2
            + eta sum_k (4 L eta p^k - p_hat^k) (f_c(w^k) - f_c*)

    p are the true and p_hat the estimated weights of the clients, ``delta = p_hat - p``, w^k the clients' models, w~
    their mean by p_hat, w* the minimum of the cluster's loss f_c; sigma^2 and G^2 bound variance and second moment of
    gradients, mu and L the curvature of f_c; eta is the step size.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        local_steps: Steps between two averages, H.
    """
    mu, smoothness = cluster.moduli
    rate = run.rates
    noise = 4 * run.variance * _squared_norms(cluster.weights) + 4 * run.moment * run.mismatch**2
    drifted = 8 * smoothness * rate**3 * local_steps**2 * run.moment
    return (1 - rate * mu) * run.squared + rate**2 * noise + drifted + rate * run.slack


def routed_descent_bound(
    run: Descent, cluster: Cluster, local_steps: int, clusters: int
) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Lemma A.7, on the squared distance to the minimum after each step.

    Unlike :func:`descent_bound` it does not use the mismatch ``delta``. For K clients and C clusters the bound on
    ``E |w~_(t+1) - w*|^2`` is

        (1 - eta mu) |w~ - w*|^2 - eta / 2 sum_k p_hat^k [f_c(w^k) - f_c*]
            + 4 eta^2 sigma^2 |p|^2 + 16 eta^2 G^2 log(K C) + 9 eta^3 L H^2 G^2.

    The symbols are those of :func:`descent_bound`. The bound follows from Lemma A.4 where ``eta <= U / (8 L)`` with U
    from :func:`uniformity`, as ``|delta|_1^2 <= 4 <= 4 log(K C)`` for ``K C >= 3``. The lemma as printed has another
    condition, ``eta <= gamma / max(5/2, 16 G^2, 4 L)``. The printed condition does not fit eq. 23 of the proof, in
    which ``5/2`` is a factor before the maximum.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        local_steps: Steps between two averages, H.
        clusters: Number of clusters, C.
    """
    mu, smoothness = cluster.moduli
    rate = run.rates
    noise = 4 * run.variance * _squared_norms(cluster.weights) + _router_noise(run, cluster, clusters)
    drifted = 9 * smoothness * rate**3 * local_steps**2 * run.moment
    return (1 - rate * mu) * run.squared - rate / 2 * run.trusted_gaps + rate**2 * noise + drifted


def _router_noise(run: Descent, cluster: Cluster, clusters: int) -> float:
    """Return ``16 G^2 log(K C)``, the bound of FLoRAL, Lemma A.7, on the error from wrong routers.

    G^2 is the second moment of the gradients, for K clients and C clusters. Lemma A.4 has ``4 G^2 |delta|_1^2``
    instead, with the mismatch ``delta`` of the clients' weights in the cluster. Lemma A.7 replaces ``|delta|_1^2`` by
    ``4 log(K C)``, the main term of its bound in Lemma A.6.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        clusters: Number of clusters, C.
    """
    return float(16 * run.moment * np.log(len(cluster.weights) * clusters))


def local_sgd_bound(run: Descent, cluster: Cluster) -> Float[np.ndarray, " steps"]:
    """Return the bound of local SGD (Stich 2019, Lemma 3.1) on the squared distance to the minimum, for each step.

    FLoRAL's Corollary A.5 uses the bound for clients whose estimated weights are the true ones. The bound on
    ``E |w~_(t+1) - w*|^2`` is, for step sizes ``eta <= 1 / (4 L)``,

        (1 - mu eta) |w~ - w*|^2 + eta^2 E |g - g_bar|^2 - eta (f_c(w~) - f_c*) / 2 + 2 eta L E |w~ - w^k|^2

    with w^k the clients' models and w~ their mean, g the mean of the clients' drawn gradients and g_bar the mean of
    their exact gradients. mu and L are the smallest and largest curvature of the cluster's loss f_c, whose minimum is
    at w*. The code has the clients' mean of ``f_c(w^k) - f_c*`` in place of ``f_c(w~) - f_c*``. This mean is no
    smaller, since f_c is convex.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
    """
    mu, smoothness = cluster.moduli
    rate = run.rates
    drifted = 2 * rate * smoothness * run.drift
    return (1 - rate * mu) * run.squared + rate**2 * run.error - rate * run.gaps / 2 + drifted


def uniformity(weights: Weights, start: Weights) -> float:
    """Return how far a cluster's estimated client weights fall below the true weights p, as a factor U.

    U (FLoRAL, eq. 24) is the largest number in (0, 1] with ``p_hat >= U p`` in every entry, for all estimates ``p_hat``
    on the line from ``start`` to p.

    Args:
        weights: The true weights p of the clients.
        start: The first estimate of p.
    """
    # On the line, the ratio p_hat / p of an entry lies between its value at ``start`` and 1, its value at p.
    return float(min(1.0, (start / weights).min()))


def rate_bound(run: Descent, cluster: Cluster, schedule: Schedule) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Theorem A.10, as corrected here, on the excess loss of the average model.

    The excess loss is the loss minus its minimum. The average is of all the clients' mean models ``w~`` so far, with
    weights ``(t + s)^2``. After T steps of sizes ``eta_t = 3 / (mu (t + s))`` with shift s the bound is

        2 / S (s^2 (s - 3) mu D^2 / 3 + 3 / mu sum_t (t + s) A_t + 9 T B / mu^2),    S = sum_t (t + s)^2,

    with ``A_t = 4 sigma^2 |p|^2 + 4 G^2 |delta_t|_1^2`` and ``B = 8 L H^2 G^2``. D is the start's distance from the
    minimum, H the number of local steps. mu and L are the smallest and largest curvature of the loss. sigma^2 and G^2
    are variance and second moment of gradients. ``delta_t = p_hat - p`` is the mismatch of the clients' estimated and
    true weights. The bound holds for ``s >= max(H, 24 kappa / U)`` with ``kappa = L / mu`` and U of :func:`uniformity`.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes and local steps.
    """
    noise = 4 * run.variance * _squared_norms(cluster.weights) + 4 * run.moment * run.mismatch**2
    return _rate_bound_of(run, cluster, schedule, noise, drift_factor=8)  # 8 L H^2 G^2 is the drift term of Lemma A.4


def routed_rate_bound(run: Descent, cluster: Cluster, schedule: Schedule, clusters: int) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Theorem A.9, as corrected here, on the excess loss of the average model.

    The excess loss is the loss minus its minimum. After T steps of sizes ``eta_t = 3 / (mu (t + s))`` the bound is

        2 / S (s^2 (s - 3) mu D^2 / 3 + 3 / mu sum_t (t + s) A_t + 9 T B / mu^2),    S = sum_t (t + s)^2,

    with ``A_t = 4 sigma^2 |p|^2 + 16 G^2 log(K C)`` and ``B = 9 L H^2 G^2`` for K clients and C clusters. The other
    symbols are those of :func:`rate_bound`. The bound does not contain the mismatch of the clients' estimated and true
    weights, so it holds for all routers.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes and local steps.
        clusters: Number of clusters, C.
    """
    noise = 4 * run.variance * _squared_norms(cluster.weights) + _router_noise(run, cluster, clusters)
    return _rate_bound_of(run, cluster, schedule, np.full(len(run.rates), noise), drift_factor=9)  # as in Lemma A.7


def _rate_bound_of(
    run: Descent, cluster: Cluster, schedule: Schedule, noise: Float[np.ndarray, " steps"], drift_factor: int
) -> Float[np.ndarray, " steps"]:
    """Return the bound on the average model's excess loss that FLoRAL's Theorems A.9 and A.10, as corrected, share.

    The excess loss is the loss minus its minimum. The bound is

        2 / S (s^2 (s - 3) mu D^2 / 3 + 3 / mu sum_t (t + s) A_t + 9 T B / mu^2),    S = sum_t (t + s)^2,

    after T steps ``eta_t = 3 / (mu (t + s))``, with ``B = drift_factor L H^2 G^2`` and D the distance of the start from
    the minimum. The bound sums the inequality of a single step (Lemma A.4 or A.7) over all steps with weights
    ``(t + s)^2``.

    Args:
        run: Measured quantities of the run, for each step; ``moment`` is G^2, ``squared[0]`` is D^2.
        cluster: The cluster whose clients take part, with moduli mu and L.
        schedule: Step sizes, shift s and local steps H.
        noise: A_t, the noise term of the inequality of step t.
        drift_factor: Factor of ``L H^2 G^2`` in the drift term B.
    """
    mu, smoothness = cluster.moduli
    times = np.arange(len(run.rates)) + schedule.shift
    drift = drift_factor * smoothness * schedule.local_steps**2 * run.moment  # B
    start = schedule.shift**2 * (schedule.shift - 3) * mu * run.squared[0] / 3
    steps = np.arange(1, len(times) + 1)
    return 2 / (times**2).cumsum() * (start + 3 / mu * (times * noise).cumsum() + 9 * steps * drift / mu**2)


def printed_rate(run: Descent, cluster: Cluster, schedule: Schedule, decay: float) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Theorem A.10, as printed, on the excess loss of the average model.

    The printed theorem is false: a run can exceed this bound. :func:`rate_bound` is the correction and explains the
    symbols. The theorem is about step sizes ``1 / (mu (t + s))`` with ``s >= max(3 H, 4 kappa / U)``. After T steps the
    bound is, with ``P = sigma^2 |p|^2``, the first squared mismatch ``D = |delta_0|_1^2`` and its decay beta,

        12 P (1 / (mu T) + (2 s - 1) / (mu T^2)) + 48 G^2 D / (mu T^(1 + beta))
            + 24 G^2 (s - 1 + 2 D / s^beta) s^2 / (mu T^3) + 48 L H^2 G^2 / (mu^2 T^2).

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes and local steps.
        decay: Exponent beta with which the squared mismatch decreases.
    """
    mu, smoothness = cluster.moduli
    s, steps = schedule.shift, np.arange(1, len(run.rates) + 1)
    noise, moment = run.variance * _squared_norms(cluster.weights), run.moment
    squared_mismatch = run.mismatch[0] ** 2
    noise_term = 12 * noise * (1 / (mu * steps) + (2 * s - 1) / (mu * steps**2))
    mismatch_term = 48 * moment * squared_mismatch / (mu * steps ** (1 + decay))
    start_term = 24 * moment * (s - 1 + 2 * squared_mismatch * s**-decay) * s**2 / (mu * steps**3)
    drift_term = 48 * smoothness * schedule.local_steps**2 * moment / (mu**2 * steps**2)
    return noise_term + mismatch_term + start_term + drift_term


def printed_routed_rate(
    run: Descent, cluster: Cluster, schedule: Schedule, clusters: int
) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Theorem A.9, as printed, on the excess loss of the average model.

    The printed theorem is false: a run can exceed this bound. :func:`routed_rate_bound` is the correction and explains
    the symbols. The theorem is about step sizes ``1 / (mu (t + s))`` with
    ``s >= max(3 H, 4 kappa / U, 16 G^2 / (mu U))`` and about all routers. After T steps the bound is, with
    ``P = 8 sigma^2 |p|^2 + 32 G^2 log(K C)``,

        P (1 / (mu T) + (2 s - 1) / (mu T^2)) + 18 L H^2 G^2 / (mu^2 T^2) + 24 (s - 1) s^2 G^2 / (mu T^3).

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes and local steps.
        clusters: Number of clusters, C.
    """
    mu, smoothness = cluster.moduli
    s, steps = schedule.shift, np.arange(1, len(run.rates) + 1)
    noise = 8 * run.variance * _squared_norms(cluster.weights) + 2 * _router_noise(run, cluster, clusters)
    noise_term = noise * (1 / (mu * steps) + (2 * s - 1) / (mu * steps**2))
    drift_term = 18 * smoothness / mu * schedule.local_steps**2 * run.moment / (mu * steps**2)
    start_term = 24 * (s - 1) * s**2 * run.moment / (mu * steps**3)
    return noise_term + drift_term + start_term


# ---------------------------------------------------------------- Lemma A.8


@dataclass(frozen=True, kw_only=True)
class Recursion:
    """Non-negative sequences with ``a_(t+1) <= (1 - mu eta_t) a_t - eta_t b_t + eta_t^2 c_t``.

    ``rates`` are the eta_t; ``a`` has one entry more than the others.
    """

    rates: Float[np.ndarray, " steps"]
    a: Float[np.ndarray, " more"]
    b: Float[np.ndarray, " steps"]
    c: Float[np.ndarray, " steps"]


def draw_recursion(rng: np.random.Generator, *, mu: float, shift: float, steps: int) -> Recursion:
    """Draw random sequences to test FLoRAL's Lemma A.8, for step sizes ``eta_t = 1 / (mu (t + s))``.

    The sequences a, b and c obey ``a_(t+1) = (1 - mu eta_t) a_t - eta_t b_t + eta_t^2 c_t``. The lemma bounds the sum
    of all b_t (:func:`sum_bound`). The last b_t is as large as a non-negative ``a_(t+1)`` allows. The sum then equals
    its bound.

    Args:
        rng: Source of the draws.
        mu: The modulus of strong convexity.
        shift: Shift s of the step sizes.
        steps: Number of steps.
    """
    rates = 1 / (mu * (np.arange(steps) + shift))
    a, c = [float(rng.exponential())], rng.exponential(size=steps)
    b: list[float] = []
    for step, rate in enumerate(rates):
        available = (1 - mu * rate) * a[-1] + rate**2 * c[step]
        is_last = step == steps - 1
        share = 1.0 if is_last else float(rng.uniform())
        b.append(share * available / rate)
        a.append((1 - share) * available)
    return Recursion(rates=rates, a=np.array(a), b=np.array(b), c=c)


def sum_bound(sequences: Recursion, mu: float, shift: float) -> float:
    """Return the bound of FLoRAL, Lemma A.8, on ``sum_t b_t``: ``(s - 1) mu a_0 + sum_t eta_t c_t``.

    The lemma is about non-negative sequences with ``a_(t+1) <= (1 - mu eta_t) a_t - eta_t b_t + eta_t^2 c_t``.

    Args:
        sequences: The sequences a, b and c and the step sizes eta.
        mu: The modulus of strong convexity.
        shift: Shift s of the step sizes ``eta_t = 1 / (mu (t + s))``.
    """
    return float((shift - 1) * mu * sequences.a[0] + sequences.rates @ sequences.c)


Losses = Float[np.ndarray, "*users clusters"]
Shares = Float[np.ndarray, "*users clusters"]


def router(losses: Losses, inverse_temperature: float) -> Shares:
    """Return users' weights of the clusters by FLoRAL's eq. 5: ``pi_c`` in proportion to ``exp(-eta f(w_c))``.

    In the paper eta is a step size and f the cluster's loss f_c. By this formula all users have the same router right
    after aggregation, when all have the same models. Appendix C.1 derives the formula with the user's own loss f^k.

    Args:
        losses: Loss of each cluster's model; for each user, or for one.
        inverse_temperature: eta.
    """
    return special.softmax(-inverse_temperature * losses, axis=-1)


def aggregation_weights(shares: Float[np.ndarray, "users clusters"], amounts: Float[np.ndarray, " users"]) -> Shares:
    """Return the weights with which users' models are averaged in each cluster (FLoRAL, eq. 2).

    ``p(k|c)`` is in proportion to ``N^k pi_c^k``: the user's amount of data times its router's share of the cluster.

    Args:
        shares: The users' routers, pi.
        amounts: Amount of data of each user.

    Returns:
        One row for each user; each column (cluster) sums to 1.
    """
    weighted = amounts[:, None] * shares
    return weighted / weighted.sum(0)


def mismatch_bound(
    rate: float, true_temperature: float, gap: float, lowest: float, users: int, clusters: int, drift: float
) -> float:
    """Return the bound of FLoRAL, Lemma A.6, on ``|delta_c|_1^2``, the mismatch of estimated and true weights p(k|c).

    The bound is ``4 eta gap + eta_bar f_c* + 4 log(K C) + 10 L eta^3 H^2 G^2``. For ``K C >= 3`` it says nothing: the
    squared L1 distance of two distributions is at most 4, and the term ``4 log(K C)`` alone exceeds 4.

    Args:
        rate: Step size eta, also the inverse temperature of the estimated routers (eq. 5).
        true_temperature: eta_bar, the inverse temperature of the true routers.
        gap: By how much the cluster's mean loss exceeds its lowest loss.
        lowest: Lowest loss of the cluster, f_c*.
        users: Number of users, K.
        clusters: Number of clusters, C.
        drift: The term ``10 L eta^3 H^2 G^2`` of the drift between averages; 0 right after averaging.
    """
    return 4 * rate * gap + true_temperature * lowest + 4 * float(np.log(users * clusters)) + drift


def mixed_loss(
    loss: Callable[[Float[np.ndarray, " size"]], float],
    models: Float[np.ndarray, "clusters size"],
    shares: Float[np.ndarray, " clusters"],
) -> tuple[float, float]:
    """Return the loss of a user's mixed model, and its mean loss over the clusters' models.

    FLoRAL has two objectives. The one it calls FML is the loss of the mixed model, ``f(sum_c pi_c w_c)``. The one it
    calls MFL is the mean loss, ``sum_c pi_c f(w_c)``. For a convex f the mean loss is no smaller (Jensen).

    Args:
        loss: The user's loss f.
        models: The model w_c of each cluster.
        shares: The user's router pi.
    """
    mean_loss = sum(share * loss(model) for share, model in zip(shares, models, strict=True))
    return loss(shares @ models), float(mean_loss)


def logit_gradient(
    gradient: Float[np.ndarray, " size"],
    models: Float[np.ndarray, "clusters size"],
    shares: Float[np.ndarray, " clusters"],
) -> Float[np.ndarray, " clusters"]:
    """Return the gradient of a mixed model's loss with respect to the router's logits (FLoRAL, Appendix C.2).

    For the mixture ``w_hat = sum_c pi_c w_c`` it is ``pi_c <grad f(w_hat), w_c - w_hat>`` in entry c.

    Args:
        gradient: Gradient of the loss at the mixture w_hat.
        models: The model of each cluster.
        shares: The user's router, pi.
    """
    return shares * ((models - shares @ models) @ gradient)


def logit_step(
    loss: Callable[[Float[np.ndarray, " size"]], float],
    gradient: Callable[[Float[np.ndarray, " size"]], Float[np.ndarray, " size"]],
    models: Float[np.ndarray, "clusters size"],
    rate: float,
) -> tuple[Float[np.ndarray, " clusters"], Float[np.ndarray, " clusters"]]:
    """Return the router after one gradient step on its logits, and FLoRAL's approximation of it.

    The step starts from logits 0. The approximation is ``softmax(-eta f(w_c))`` (FLoRAL, eq. 5 and 35).

    Args:
        loss: The user's loss f.
        gradient: Gradient of f.
        models: The model w_c of each cluster.
        rate: Step size of the gradient step.
    """
    num_clusters = len(models)
    equal_shares = np.full(num_clusters, 1 / num_clusters)  # softmax of the logits 0
    mixed_model = equal_shares @ models
    logits_after_step = -rate * logit_gradient(gradient(mixed_model), models, equal_shares)
    router_after_step = special.softmax(logits_after_step)

    losses = np.array([loss(model) for model in models])
    eta = rate / num_clusters  # makes both routers equal if f is affine
    approximation = router(losses, eta)
    return router_after_step, approximation


A2, A3, A4, A5 = "Lemma A.2, gradients", "Lemma A.3, drift", "Lemma A.4, descent", "Corollary A.5, local SGD"
A6, PINSKER = "Lemma A.6, mismatch", "Lemma A.6, Pinsker's inequality"
A7, A8 = "Lemma A.7, descent", "Lemma A.8, sums"
A9, A9_PRINTED = "Theorem A.9, steps 3 / (μ (t + s))", "Theorem A.9 as printed"
A10, PRINTED, SHARING = "Theorem A.10, steps 3 / (μ (t + s))", "Theorem A.10 as printed", "eq. 31, shared base"


CLUSTERS = 2


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Settings of the checks on clusters of clients.

    ``mismatches``: how far routers start from the truth; 0 is the truth, 1 is uniform routers. ``condition`` is the
    condition number of each client's Hessian. ``decay`` is beta, the exponent with which the squared mismatch falls.
    """

    instances: int
    clients: int
    size: int
    condition: float
    mismatches: Sequence[float]
    decay: float
    local_steps: int
    steps: int
    replicas: int


def cluster_curves(seed: int, settings: ClusterSettings) -> Iterator[Curve]:
    """Yield a curve for each random cluster of clients and each initial error of the routers, and a counterexample.

    A curve has the excess loss of the average model before every step of local SGD. The counterexample is a single
    client without gradient noise, whose excess loss is above FLoRAL's bounds as printed.

    Args:
        seed: Seed of the random streams.
        settings: Settings of the clusters.
    """
    for mismatch in settings.mismatches:
        start = "right" if mismatch == 0 else f"wrong, mismatch {mismatch:g}"
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, 2, instance])  # 2: the random streams of clusters
            yield cluster_curve(f"clusters, routers start {start}", instance, mismatch, settings, rng)
    yield printed_curve(f"clusters, one client, L / μ = {settings.condition:g}", settings)


def draw_clients(
    rng: np.random.Generator, clients: int, size: int, condition: float
) -> tuple[Float[np.ndarray, "clients size size"], Float[np.ndarray, "clients size"]]:
    """Draw clients' quadratic losses: Hessians with eigenvalues from 1 to ``condition``, and minimisers.

    Args:
        rng: Source of the draws.
        clients: Number of clients.
        size: Number of variables.
        condition: The largest eigenvalue.

    Returns:
        The Hessians, with random eigenvectors, and the minimisers.
    """
    bases = np.linalg.qr(rng.standard_normal((clients, size, size)))[0]
    spectrum = np.geomspace(1, condition, size)
    return (bases * spectrum) @ bases.transpose(0, 2, 1), rng.standard_normal((clients, size))


def cluster_curve(
    scheme: str, instance: int, mismatch: float, settings: ClusterSettings, rng: np.random.Generator
) -> Curve:
    """Draw clients of two clusters, run local SGD on the first cluster, and check FLoRAL's statements on the run.

    Checked are bounds on the run's quantities in each step (Lemmas A.2 to A.5 and A.7) and on its convergence (Theorems
    A.9 and A.10 as corrected). Three further statements are checked on newly drawn models or sequences instead of the
    run: on the base that clusters share (eq. 31), on the mismatch of routers (Lemma A.6) and on sums (Lemma A.8).

    Args:
        scheme: Name of the kind of problem.
        instance: Number of the random problem.
        mismatch: How far the initial routers are from the true ones: 0 are the true ones, 1 uniform routers.
        settings: Settings of the clusters.
        rng: Source of the draws.
    """
    hessians, centres = draw_clients(rng, settings.clients, settings.size, settings.condition)
    amounts = rng.dirichlet(np.full(settings.clients, 4.0))  # clients' shares of the data, moderately unequal
    shares = rng.uniform(0.05, 0.95, settings.clients)  # of the first cluster in each client's router
    weights = amounts * shares / (amounts @ shares)  # p(k|c) of the clients in the first cluster
    cluster = Cluster(hessians=hessians, centres=centres, weights=weights)
    guessed = weights + mismatch * (amounts - weights)  # uniform routers give the weights ``amounts``
    mu, smoothness = cluster.moduli
    # The smallest shift for which the corrected Theorem A.10 holds, see :func:`rate_bound`.
    shift = max(settings.local_steps, 24 * smoothness / mu / uniformity(weights, guessed))
    schedule = Schedule(scale=3, shift=shift, local_steps=settings.local_steps)  # steps 3 / (mu (t + shift))
    start = 3 * rng.standard_normal(settings.size)
    run = _descend_by_settings(cluster, schedule, settings, guessed, start, settings.replicas, rng)
    claims = [
        _tightest_claim(A2, run.error, error_bound(run, cluster)),
        _tightest_claim(A3, run.drift, drift_bound(run, settings.local_steps)),
        _tightest_claim(A4, run.next_squared, descent_bound(run, cluster, settings.local_steps)),
        # Corollary A.5 is for true routers.
        *([_tightest_claim(A5, run.next_squared, local_sgd_bound(run, cluster))] if mismatch == 0 else []),
        _tightest_claim(A7, run.next_squared, routed_descent_bound(run, cluster, settings.local_steps, CLUSTERS)),
        _tightest_claim(A9, run.averaged, routed_rate_bound(run, cluster, schedule, CLUSTERS)),
        _tightest_claim(A10, run.averaged, rate_bound(run, cluster, schedule)),
        _check_sharing(hessians, centres, amounts, np.stack([shares, 1 - shares], 1), mismatch, rng),
        *_check_mismatch(hessians, centres, amounts, shares, rng),
        _check_sums(mu, shift, settings.steps, rng),
    ]
    return _make_curve(scheme, instance, run, claims, {"shift": shift, "kappa": smoothness / mu})


def printed_curve(scheme: str, settings: ClusterSettings) -> Curve:
    """Check FLoRAL's Theorems A.9 and A.10 as printed on one client, from a start in the direction of least curvature.

    Local SGD of one client is gradient descent without noise. With ``s = 4 kappa`` the excess loss of the average model
    then falls as ``9 / 8 mu D^2 (s - 1)^2 / T^2`` after T steps, where D is the distance of the start from the minimum.
    The printed bounds fall faster. So after enough steps the excess loss is above the bounds, and the theorems as
    printed are false.

    Args:
        scheme: Name of the kind of problem.
        settings: Settings of the clusters; only condition, decay and number of steps matter.
    """
    hessian = np.diag([1.0, settings.condition])
    cluster = Cluster(hessians=hessian[None], centres=np.zeros((1, 2)), weights=np.ones(1))
    # The smallest shift that the theorems allow: s >= max(3 H, 4 kappa / U), where H and U are 1 here.
    schedule = Schedule(scale=1, shift=max(3.0, 4 * settings.condition), local_steps=1)
    run = _descend_by_settings(
        cluster,
        schedule,
        settings,
        guessed=np.ones(1),
        start=np.array([1.0, 0.0]),  # the eigenvector of the smallest eigenvalue, 1
        replicas=1,
        rng=np.random.default_rng(0),  # any seed, as the only client is always drawn
        steps_factor=20,  # enough steps to exceed the bounds
    )
    claim_of_a9 = _tightest_claim(A9_PRINTED, run.averaged, printed_routed_rate(run, cluster, schedule, clusters=1))
    if schedule.shift < 16 * run.moment:  # A.9 asks for s >= 16 G^2 / (mu U), and mu and U are 1 here
        claim_of_a9 = replace(claim_of_a9, bound=None)
    claim_of_a10 = _tightest_claim(PRINTED, run.averaged, printed_rate(run, cluster, schedule, settings.decay))
    claims = [claim_of_a10, claim_of_a9]
    only_instance = 0
    return _make_curve(scheme, only_instance, run, claims, {"shift": schedule.shift, "kappa": settings.condition})


def _descend_by_settings(
    cluster: Cluster,
    schedule: Schedule,
    settings: ClusterSettings,
    guessed: Float[np.ndarray, " clients"],
    start: Float[np.ndarray, " size"],
    replicas: int,
    rng: np.random.Generator,
    steps_factor: int = 1,
) -> Descent:
    """Run local SGD on one cluster (:func:`descend`), with decay and number of steps from the settings of the checks.

    Args:
        cluster: The cluster whose clients take part.
        schedule: Step sizes and local steps.
        settings: Settings of the checks: ``decay`` says how fast the estimated weights approach the true ones.
        guessed: First estimate of the clients' weights p(k|c).
        start: First model of all clients.
        replicas: Number of independent runs that are averaged.
        rng: Generator of the drawn clients.
        steps_factor: Factor of the settings' number of steps.
    """
    return descend(
        cluster,
        schedule,
        guessed=guessed,
        decay=settings.decay,
        start=start,
        steps=steps_factor * settings.steps,
        replicas=replicas,
        rng=rng,
    )


def _check_sharing(
    hessians: Float[np.ndarray, "clients size size"],
    centres: Float[np.ndarray, "clients size"],
    amounts: Float[np.ndarray, " clients"],
    routers: Float[np.ndarray, "clients clusters"],
    mismatch: float,
    rng: np.random.Generator,
) -> Claim:
    """Check the bound of FLoRAL's eq. 31 on the aggregated gradient's error, at random models.

    FLoRAL is the paper whose statements this module checks. The models of both clusters share a base, the first half of
    their entries. The bound (:func:`sharing_bound`) has terms for wrong routers, for gradient noise, and for the shared
    base. Its constants are measured at the same models.

    Args:
        hessians: Hessian of each client.
        centres: Minimiser of each client.
        amounts: Share of each client in the data, p(k).
        routers: The true routers.
        mismatch: How far the estimated routers are from the true ones: 0 are the true ones, 1 uniform routers.
        rng: Source of the models.
    """
    size, num_clusters = hessians.shape[1], routers.shape[1]
    num_shared = size // 2  # entries of a model that belong to the base
    problem = Shared(hessians=hessians, centres=centres, amounts=amounts, routers=routers, base=num_shared)
    guessed = routers + mismatch * (1 / num_clusters - routers)
    models = rng.standard_normal((*routers.shape, size))  # a model for each client and cluster
    models[..., :num_shared] = models[:, :1, :num_shared]  # every cluster gets the base of the first
    errors = gradient_error(problem, guessed, models)
    bound = sharing_bound(
        problem,
        guessed,
        moment=errors.moment,  # G^2, the second moment of the gradients
        adaptors=errors.adaptors,  # sigma_c^2, the variance of the adaptors' gradients in each cluster
        base=errors.base,  # sigma^2, the variance of the base's gradient
        heterogeneity=errors.heterogeneity,  # Delta^2, by how much the clusters' gradients of the base differ
    )
    return Claim(statement=SHARING, measured=errors.error, bound=bound)


def _check_mismatch(
    hessians: Float[np.ndarray, "clients size size"],
    centres: Float[np.ndarray, "clients size"],
    amounts: Float[np.ndarray, " clients"],
    shares: Float[np.ndarray, " clients"],
    rng: np.random.Generator,
) -> list[Claim]:
    """Check FLoRAL's Lemma A.6 on random models, and Pinsker's inequality, with which the lemma's proof begins.

    Both bound the squared mismatch ``|p_hat - p|_1^2`` of the estimated and the true weights p(k|c) of clients in a
    cluster. Pinsker's bound is ``2 KL(p | p_hat)``, that of the lemma is :func:`mismatch_bound`. The estimated weights
    follow from the losses of the models. Each client gets models of its own for both clusters, since with equal models
    all clients would have the same router (eq. 5).

    Args:
        hessians: Hessian of each client.
        centres: Minimiser of each client.
        amounts: Share of each client in the data, p(k).
        shares: Share of the first of two clusters in each client's true router.
        rng: Source of the models and rates.

    Returns:
        The claims of Lemma A.6 and of Pinsker's inequality.
    """
    weights = aggregation_weights(np.stack([shares, 1 - shares], 1), amounts).T  # (clusters, clients)
    clusters = [Cluster(hessians=hessians, centres=centres, weights=of_cluster) for of_cluster in weights]
    lowest = np.array([_cluster_loss(cluster, cluster.minimiser) for cluster in clusters])
    minimisers = np.stack([cluster.minimiser for cluster in clusters])
    models = minimisers + rng.standard_normal((len(amounts), *minimisers.shape))  # (clients, clusters, size)
    losses = np.stack([_cluster_loss(cluster, models[:, c]) for c, cluster in enumerate(clusters)], axis=1)
    true_temperature = float(rng.uniform(0.05, 1.0))  # eta_bar, an inverse temperature of routers
    rate = float(rng.uniform(0.1, 1.0)) * true_temperature  # eta, the inverse temperature of the estimated routers
    true_routers = np.broadcast_to(router(lowest, true_temperature), losses.shape)  # from the lowest losses, eq. 5
    true_weights = aggregation_weights(true_routers, amounts)  # p(k|c), (clients, clusters)
    guessed_weights = aggregation_weights(router(losses, rate), amounts)
    squared_mismatch = np.abs(true_weights - guessed_weights).sum(0) ** 2
    gaps = (true_weights * (losses - lowest)).sum(0)  # excess of each cluster's mean loss over its lowest
    bounds = [
        mismatch_bound(rate, true_temperature, float(gap), float(low), len(amounts), CLUSTERS, drift=0.0)
        for gap, low in zip(gaps, lowest, strict=True)
    ]
    divergence = (true_weights * np.log(true_weights / guessed_weights)).sum(0)  # KL
    return [
        _tightest_claim(A6, squared_mismatch, np.array(bounds)),
        _tightest_claim(PINSKER, squared_mismatch, 2 * divergence),
    ]


def _cluster_loss(cluster: Cluster, points: Float[np.ndarray, "*batch size"]) -> Float[np.ndarray, "*batch"]:
    """Return the cluster's loss f_c, the weighted mean of its clients' losses, at each point."""
    offsets = points[..., None, :] - cluster.centres
    client_losses = np.einsum("...ki,kij,...kj->...k", offsets, cluster.hessians, offsets) / 2
    return np.asarray(client_losses @ cluster.weights)


def _check_sums(mu: float, shift: float, steps: int, rng: np.random.Generator) -> Claim:
    """Check FLoRAL's Lemma A.8 on random sequences with ``a_(t+1) = (1 - mu eta_t) a_t - eta_t b_t + eta_t^2 c_t``.

    The lemma bounds ``sum_t b_t`` by ``(s - 1) mu a_0 + sum_t eta_t c_t`` for steps ``eta_t = 1 / (mu (t + s))``.

    Args:
        mu: The modulus of strong convexity.
        shift: Shift of the step sizes, s.
        steps: Number of steps.
        rng: Source of the draws.
    """
    sequences = draw_recursion(rng, mu=mu, shift=shift, steps=steps)
    return Claim(statement=A8, measured=float(sequences.b.sum()), bound=sum_bound(sequences, mu, shift))


def _tightest_claim(statement: str, measured: Float[np.ndarray, " steps"], bound: Float[np.ndarray, " steps"]) -> Claim:
    """Return the claim that a bound holds, at the step where it comes closest to failing: the largest measured / bound.

    Args:
        statement: Name of the statement.
        measured: The measured value at each step.
        bound: The bound at each step.
    """
    tightest = int(np.argmax(measured / bound))
    return Claim(statement=statement, measured=float(measured[tightest]), bound=float(bound[tightest]))


def _make_curve(scheme: str, instance: int, run: Descent, claims: list[Claim], notes: dict[str, float]) -> Curve:
    """Return the curve of a run. Its residual is the excess loss of the average of all models so far.

    Args:
        scheme: Name of the kind of problem.
        instance: Number of the random problem.
        run: The measured run.
        claims: The paper's statements about the run.
        notes: Constants of the problem, by name.
    """
    residuals = tuple(map(float, run.averaged))
    no_rates: dict[str, float] = {}  # the bounds do not fall by the same factor in each step
    return Curve(
        scheme=scheme, instance=instance, residuals=residuals, claims=tuple(claims), rates=no_rates, notes=notes
    )
