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
class SharedBaseProblem:
    """Clients with quadratic losses, and a model for each cluster; the models' first ``base_size`` entries are shared.

    Client k has the loss ``<A_k (w - m_k), w - m_k> / 2``: ``hessians`` are the A_k, ``centres`` the minimisers m_k.
    ``data_shares`` are the clients' shares p(k) of all data, ``routers`` the true routers pi_c^k.
    """

    hessians: Float[np.ndarray, "clients size size"]
    centres: Float[np.ndarray, "clients size"]
    data_shares: Float[np.ndarray, " clients"]
    routers: Joint
    base_size: int

    @property
    def joint(self) -> Joint:
        """Joint distribution of clients and clusters, ``p(k, c) = p(k) pi_c^k``."""
        return self.data_shares[:, None] * self.routers

    @property
    def client_given_cluster(self) -> Joint:
        """Matrix (clients, clusters) of the probability ``p(k|c)`` of client k in cluster c; columns sum to 1."""
        return self.joint / self.joint.sum(0)


@dataclass(frozen=True, kw_only=True)
class GradientErrors:
    """Expected squared error of the aggregated gradient at given models, and constants of its bound (FLoRAL, eq. 31).

    ``adaptor_variances`` are the sigma_c^2 of eq. 27, ``base_variance`` the sigma^2 of eq. 28, ``heterogeneity`` the
    Delta^2 of eq. 29, ``second_moment`` G^2.
    """

    error: float
    adaptor_variances: Float[np.ndarray, " clusters"]
    base_variance: float
    heterogeneity: float
    second_moment: float


def sharing_bound(
    problem: SharedBaseProblem,
    estimated_routers: Joint,
    *,
    second_moment: float,
    adaptor_variances: Float[np.ndarray, " clusters"],
    base_variance: float,
    heterogeneity: float,
) -> float:
    """Return the bound of FLoRAL's eq. 31 on the expected squared error of the aggregated gradient.

        2 G^2 sum_k p(k) |delta^k|_1^2 + 2 sum_c p(c) |p(.|c)|^2 sigma_c^2 + 4 sigma^2 sum_kc p(k, c)^2 + 4 Delta^2

    ``delta^k`` is the difference between client k's true and estimated router.

    Args:
        problem: Clients and their true routers.
        estimated_routers: One row for each client, (clients, clusters).
        second_moment: G^2, of the gradients.
        adaptor_variances: sigma_c^2, the variance of the adaptors' gradients in each cluster.
        base_variance: sigma^2, the variance of the base's gradient.
        heterogeneity: Delta^2, the mean squared distance of a cluster's gradient of the base from that of all clients.
    """
    router_errors = np.abs(problem.routers - estimated_routers).sum(1)  # |delta^k|_1
    router_term = 2 * second_moment * (problem.data_shares * router_errors**2).sum()

    cluster_shares = problem.joint.sum(0)  # p(c)
    adaptor_noise = cluster_shares * (problem.client_given_cluster**2).sum(0) * adaptor_variances
    adaptor_term = 2 * adaptor_noise.sum()

    base_term = 4 * base_variance * (problem.joint**2).sum()
    heterogeneity_term = 4 * heterogeneity
    return float(router_term + adaptor_term + base_term + heterogeneity_term)


def gradient_error(
    problem: SharedBaseProblem, estimated_routers: Joint, models: Float[np.ndarray, "clients clusters size"]
) -> GradientErrors:
    """Return the expected squared error of FLoRAL's aggregated gradient, and the constants of its bound (eq. 31).

    The error is ``E |g_bar - g~|^2``, computed exactly as squared bias plus variance. ``g_bar`` (eq. 25) weights exact
    gradients by the true routers. ``g~`` (eq. 26) weights randomly drawn gradients by the estimated routers: a draw
    from all clients for the base, and a draw from the cluster's clients for the adaptor.

    Args:
        problem: Clients and their true routers. The first ``base_size`` entries of a model are the base, the others the
            adaptor.
        estimated_routers: One row for each client, (clients, clusters).
        models: Model of each client and cluster.
    """
    base, adaptor = slice(None, problem.base_size), slice(problem.base_size, None)
    offsets = models[:, :, None] - problem.centres  # (client, cluster, drawn client, size)
    gradients = np.einsum("dij,kcdj->kcdi", problem.hessians, offsets)
    mean_of_cluster = np.einsum("dc,kcdi->kci", problem.client_given_cluster, gradients)
    mean_of_all = np.einsum("d,kcdi->kci", problem.data_shares, gradients)
    estimated_joint = problem.data_shares[:, None] * estimated_routers

    # Bias: the estimated routers are wrong, and the base's gradient is drawn from all clients, not from the cluster's.
    exact = np.einsum("kc,kci->i", problem.joint, mean_of_cluster)  # g_bar
    mean_of_draws = np.concatenate([mean_of_all[..., base], mean_of_cluster[..., adaptor]], -1)
    bias = exact - np.einsum("kc,kci->i", estimated_joint, mean_of_draws)

    # Variance of the drawn gradients, for each client and cluster.
    base_deviations = (gradients - mean_of_all[:, :, None])[..., base]
    base_variance = (base_deviations**2).sum(-1) @ problem.data_shares
    adaptor_deviations = (gradients - mean_of_cluster[:, :, None])[..., adaptor]
    adaptor_variance = np.einsum("dc,kcd->kc", problem.client_given_cluster, (adaptor_deviations**2).sum(-1))
    noise = (estimated_joint**2 * (base_variance + adaptor_variance)).sum()

    # Constants of the bound.
    base_difference = ((mean_of_cluster - mean_of_all)[..., base] ** 2).sum(-1)
    base_moment = ((gradients[..., base] ** 2).sum(-1) @ problem.data_shares).max()
    squared_adaptor_gradients = (gradients[..., adaptor] ** 2).sum(-1)
    adaptor_moments = np.einsum("dc,kcd->kc", problem.client_given_cluster, squared_adaptor_gradients)
    return GradientErrors(
        error=float((bias**2).sum() + noise),
        adaptor_variances=adaptor_variance.max(0),
        base_variance=float(base_variance.max()),
        heterogeneity=float((problem.joint * base_difference).sum()),
        second_moment=float(base_moment + adaptor_moments.max()),
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
        """Strong convexity mu and smoothness L of the loss f_c: its smallest and largest curvature (Assumption 4.2)."""
        eigenvalues = linalg.eigvalsh(self.hessian)  # in ascending order
        mu, smoothness = float(eigenvalues[0]), float(eigenvalues[-1])
        return mu, smoothness

    def gap(self, points: Points) -> Numbers:
        """Return the excess ``f_c(w) - min f_c`` of the cluster's loss at each point w."""
        offsets = points - self.minimiser
        return np.asarray(np.einsum("...i,ij,...j->...", offsets, self.hessian, offsets) / 2)

    def gradients(self, points: Points) -> Float[np.ndarray, "*batch clients size"]:
        """Return every client's gradient ``A_k (w - m_k)`` at each point w."""
        return np.einsum("kij,...kj->...ki", self.hessians, points[..., None, :] - self.centres)

    def gradient_moments(self, points: Points) -> tuple[Points, Numbers, Numbers]:
        """Return mean, variance and second moment of a random client's gradient, at each point.

        The client is drawn with the probabilities p(k|c), so the mean is the gradient of the cluster's loss f_c.
        """
        gradients = self.gradients(points)
        mean = np.einsum("k,...ki->...i", self.weights, gradients)
        second_moment = np.asarray(np.einsum("k,...ki,...ki->...", self.weights, gradients, gradients))
        variance = np.asarray(second_moment - _squared_norms(mean))
        return mean, variance, second_moment


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Step sizes ``scale / (mu (t + shift))`` of step t; models are averaged after every ``local_steps`` (H) steps."""

    scale: float
    shift: float
    local_steps: int


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Quantities of a run of local SGD, for each step: means over independent runs ("replicas").

    ``p`` are the true weights of clients, ``p_hat`` the estimated ones, w^k the clients' models, ``w~`` their mean
    by ``p_hat``, w* the minimiser of f_c; a gap is ``f_c(w) - f_c(w*)``.

    * ``step_sizes``: eta. ``mismatch``: ``|delta|_1 = |p_hat - p|_1``.
    * ``squared_distance``: ``|w~ - w*|^2``; ``next_squared_distance``: its expectation after the step.
    * ``squared_error``: ``E |g_bar - g~|^2``, the squared error of the aggregated gradient.
    * ``drift``: the mean of ``|w~ - w^k|^2`` by ``p_hat``.
    * ``true_mean_gap`` and ``estimated_mean_gap``: the mean gap of the clients' models by ``p`` and by ``p_hat``.
    * ``lemma_a4_sum``: ``sum_k (4 L eta p^k - p_hat^k)`` times the gap of w^k, the last sum of Lemma A.4.
    * ``average_gap``: the gap of the average of all ``w~`` so far with weights ``(t + s)^2``.

    ``variance`` and ``second_moment`` are sigma^2 and G^2, the largest of a drawn gradient at any point of the run.
    """

    step_sizes: Float[np.ndarray, " steps"]
    mismatch: Float[np.ndarray, " steps"]
    squared_distance: Float[np.ndarray, " steps"]
    next_squared_distance: Float[np.ndarray, " steps"]
    squared_error: Float[np.ndarray, " steps"]
    drift: Float[np.ndarray, " steps"]
    true_mean_gap: Float[np.ndarray, " steps"]
    estimated_mean_gap: Float[np.ndarray, " steps"]
    lemma_a4_sum: Float[np.ndarray, " steps"]
    average_gap: Float[np.ndarray, " steps"]
    variance: float
    second_moment: float


def estimate_weights(cluster: Cluster, initial: Weights, step: int, shift: float, decay: float) -> Weights:
    """Return the estimated weights ``p_hat`` of the clients at the beginning of a round.

    The estimates move from ``initial`` to the true weights p in a straight line: ``|p_hat - p|^2`` is
    ``(1 + t / s)^-decay`` times its first value. FLoRAL's Theorem A.10 has the factor ``(t + s)^-decay``, which is
    wrong, as it is not 1 for t = 0.

    Args:
        cluster: The cluster with the true weights p.
        initial: First estimate of p.
        step: Number of steps before the round, t.
        shift: Shift of the schedule, s.
        decay: Exponent with which the squared mismatch decreases.
    """
    mismatch_factor = (1 + step / shift) ** (-decay / 2)
    return cluster.weights + mismatch_factor * (initial - cluster.weights)


def descend(
    cluster: Cluster,
    schedule: Schedule,
    *,
    initial_weights: Weights,
    decay: float,
    start: Float[np.ndarray, " size"],
    steps: int,
    replicas: int,
    rng: np.random.Generator,
) -> Descent:
    """Run FLoRAL's local SGD (eq. 4) on one cluster, and measure the quantities of :class:`Descent` in every step.

    In each step each client takes an SGD step on the loss of a client that it draws with probability p(k|c). After
    every ``schedule.local_steps`` steps all clients' models are replaced by their mean with the estimated weights.

    Args:
        cluster: The cluster whose clients take part, with the true weights p(k|c).
        schedule: Step sizes and local steps.
        initial_weights: First estimate of the weights.
        decay: Exponent with which the squared distance of estimated and true weights decreases.
        start: First model of all clients.
        steps: Number of steps.
        replicas: Number of independent runs, computed at once; the result has their means.
        rng: Generator of the clients that are drawn in each step.
    """
    mu, _ = cluster.moduli
    num_clients = len(cluster.weights)
    models = np.broadcast_to(start, (replicas, num_clients, len(start))).copy()
    estimated_weights = initial_weights
    weight_sum = 0.0
    weighted_sum = np.zeros((replicas, len(start)))
    measured_steps: list[dict[str, float]] = []
    variance = second_moment = 0.0
    for step in range(steps):
        is_first_of_round = step % schedule.local_steps == 0
        if is_first_of_round:
            estimated_weights = estimate_weights(cluster, initial_weights, step, schedule.shift, decay)
        step_size = schedule.scale / (mu * (step + schedule.shift))

        # Measure the models before the step.
        mean_model = np.einsum("k,rki->ri", estimated_weights, models)  # of the clients, for each replica r
        weight = (step + schedule.shift) ** 2  # Theorems A.9 and A.10 are about the average with these weights
        weight_sum = weight_sum + weight
        weighted_sum = weighted_sum + weight * mean_model
        average_gap = float(cluster.gap(weighted_sum / weight_sum).mean())
        mean_gradients, variances, second_moments = cluster.gradient_moments(models)
        measured = _measure_step(
            cluster, models, mean_model, mean_gradients, variances, estimated_weights=estimated_weights, eta=step_size
        )
        measured_steps.append({"step_sizes": step_size, "average_gap": average_gap, **measured})
        variance = max(variance, float(variances.max()))
        second_moment = max(second_moment, float(second_moments.max()))

        # Take the step.
        drawn = rng.choice(num_clients, size=(replicas, num_clients), p=cluster.weights)
        offsets = models - cluster.centres[drawn]
        models = models - step_size * np.einsum("rkij,rkj->rki", cluster.hessians[drawn], offsets)
        is_last_of_round = (step + 1) % schedule.local_steps == 0
        if is_last_of_round:
            mean_model = np.einsum("k,rki->ri", estimated_weights, models)
            models = np.broadcast_to(mean_model[:, None], models.shape).copy()

    series = {name: np.array([measured[name] for measured in measured_steps]) for name in measured_steps[0]}
    return Descent(**series, variance=variance, second_moment=second_moment)


def _measure_step(
    cluster: Cluster,
    models: Float[np.ndarray, "replicas clients size"],
    mean_model: Float[np.ndarray, "replicas size"],
    mean_gradients: Points,
    variances: Numbers,
    *,
    estimated_weights: Weights,
    eta: float,
) -> dict[str, float]:
    """Return quantities of one step of local SGD, as fields of :class:`Descent`: means over replicas.

    Args:
        cluster: The cluster, with the true weights p of the clients.
        models: The clients' models w^k before the step.
        mean_model: Their mean w~ by the estimated weights.
        mean_gradients: Expectation of a drawn gradient at each client's model.
        variances: Variance of a drawn gradient at each client's model.
        estimated_weights: The estimated weights p_hat of the clients.
        eta: The step size.
    """
    p, p_hat = cluster.weights, estimated_weights
    _, smoothness = cluster.moduli
    minimiser = cluster.minimiser
    # The variance of the aggregated gradient: clients draw independently, so their variances add up.
    noise = (p_hat**2 * variances).sum(-1)
    squared_bias = _squared_norms(np.einsum("k,rki->ri", p - p_hat, mean_gradients))
    expected_next = mean_model - eta * np.einsum("k,rki->ri", p_hat, mean_gradients)
    gaps = cluster.gap(models)  # f_c(w^k) - f_c(w*) of each client
    by_replica = {
        "squared_distance": _squared_norms(mean_model - minimiser),
        "next_squared_distance": _squared_norms(expected_next - minimiser) + eta**2 * noise,
        "squared_error": squared_bias + noise,
        "drift": (p_hat * _squared_norms(mean_model[:, None] - models)).sum(-1),
        "true_mean_gap": gaps @ p,
        "estimated_mean_gap": gaps @ p_hat,
        "lemma_a4_sum": ((4 * smoothness * eta * p - p_hat) * gaps).sum(-1),
    }
    means = {name: float(values.mean()) for name, values in by_replica.items()}
    means["mismatch"] = float(np.abs(p_hat - p).sum())  # equal in all replicas
    return means


def _squared_norms(vectors: Points) -> Numbers:
    """Return the squared Euclidean norm of each vector along the last axis."""
    return np.asarray((vectors * vectors).sum(-1))


# ---------------------------------------------------------------- bounds


def error_bound(run: Descent, cluster: Cluster) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Lemma A.2, on the expected squared error of the aggregated gradient, for each step.

    The bound is ``2 sigma^2 |p|^2 + 2 G^2 |delta|_1^2`` with the true weights p of the clients.
    """
    sigma_squared = run.variance  # of a drawn gradient
    g_squared = run.second_moment  # of a drawn gradient
    delta_norm = run.mismatch  # |p_hat - p|_1 of estimated and true weights
    return 2 * sigma_squared * _squared_norms(cluster.weights) + 2 * g_squared * delta_norm**2


def drift_bound(run: Descent, local_steps: int) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Lemma A.3, on the clients' mean squared distance from their average, for each step.

    The bound is ``4 eta^2 H^2 G^2`` with step size eta, H local steps and second moment G^2 of the gradients.

    Args:
        run: Measured quantities of the run.
        local_steps: Steps between two averages, H.
    """
    return 4 * run.step_sizes**2 * local_steps**2 * run.second_moment


def descent_bound(run: Descent, cluster: Cluster, local_steps: int) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Lemma A.4, on the expected squared distance to the minimum after each step.

        (1 - eta mu) |w~ - w*|^2 + eta^2 (4 sigma^2 |p|^2 + 4 G^2 |delta|_1^2) + 8 L eta^3 H^2 G^2
            + eta sum_k (4 L eta p^k - p_hat^k) (f_c(w^k) - f_c*)

    p are the true and p_hat the estimated weights of the clients, w^k the clients' models, w~ their mean by p_hat and
    w* the minimiser of the cluster's loss f_c.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        local_steps: Steps between two averages, H.
    """
    mu, smoothness = cluster.moduli  # smallest and largest curvature of f_c; L is the largest
    eta = run.step_sizes
    sigma_squared, g_squared = run.variance, run.second_moment  # of a drawn gradient
    delta_norm = run.mismatch  # |delta|_1 = |p_hat - p|_1
    noise = 4 * sigma_squared * _squared_norms(cluster.weights) + 4 * g_squared * delta_norm**2
    drift = 8 * smoothness * eta**3 * local_steps**2 * g_squared
    return (1 - eta * mu) * run.squared_distance + eta**2 * noise + drift + eta * run.lemma_a4_sum


def routed_descent_bound(
    run: Descent, cluster: Cluster, local_steps: int, num_clusters: int
) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Lemma A.7, on the expected squared distance to the minimum after each step.

        (1 - eta mu) |w~ - w*|^2 - eta / 2 sum_k p_hat^k (f_c(w^k) - f_c*)
            + 4 eta^2 sigma^2 |p|^2 + 16 eta^2 G^2 log(K C) + 9 eta^3 L H^2 G^2

    p are the true and p_hat the estimated weights of the K clients, w^k the clients' models, w~ their mean by p_hat and
    w* the minimiser of the cluster's loss f_c. The bound holds for ``eta <= U / (8 L)`` with U from
    :func:`uniformity`; the condition that the paper prints does not fit its proof (eq. 23).

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        local_steps: Steps between two averages, H.
        num_clusters: Number of clusters C.
    """
    mu, smoothness = cluster.moduli  # smallest and largest curvature of f_c; L is the largest
    eta = run.step_sizes
    sigma_squared, g_squared = run.variance, run.second_moment  # of a drawn gradient
    noise = 4 * sigma_squared * _squared_norms(cluster.weights) + _router_noise(run, cluster, num_clusters)
    drift = 9 * smoothness * eta**3 * local_steps**2 * g_squared
    return (1 - eta * mu) * run.squared_distance - eta / 2 * run.estimated_mean_gap + eta**2 * noise + drift


def _router_noise(run: Descent, cluster: Cluster, num_clusters: int) -> float:
    """Return ``16 G^2 log(K C)``, the bound of FLoRAL, Lemma A.7, on the error from wrong routers.

    G^2 is the second moment of the gradients, for K clients and C clusters.
    """
    num_clients = len(cluster.weights)
    return float(16 * run.second_moment * np.log(num_clients * num_clusters))


def local_sgd_bound(run: Descent, cluster: Cluster) -> Float[np.ndarray, " steps"]:
    """Return the bound of local SGD (Stich 2019, Lemma 3.1) on the expected squared distance to the minimum.

        (1 - eta mu) |w~ - w*|^2 + eta^2 E |g - g_bar|^2 - eta / 2 sum_k p^k (f_c(w^k) - f_c*) + 2 eta L E |w~ - w^k|^2

    w^k are the clients' models, w~ their mean, g and g_bar the means of their drawn and exact gradients. The lemma
    has ``f_c(w~)`` in place of the clients' mean of ``f_c(w^k)``, which is no smaller. It holds for
    ``eta <= 1 / (4 L)`` and if the estimated weights of clients are the true ones p (FLoRAL's Corollary A.5).

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
    """
    mu, smoothness = cluster.moduli  # smallest and largest curvature of f_c; L is the largest
    eta = run.step_sizes
    drift = 2 * eta * smoothness * run.drift
    return (1 - eta * mu) * run.squared_distance + eta**2 * run.squared_error - eta * run.true_mean_gap / 2 + drift


def uniformity(weights: Weights, initial: Weights) -> float:
    """Return the factor U of FLoRAL, eq. 24: the largest number in (0, 1] with ``p_hat >= U p`` in every entry.

    The inequality is for all estimates ``p_hat`` on the line from ``initial`` to the true weights p.

    Args:
        weights: The true weights p of the clients.
        initial: The first estimate of p.
    """
    # Along the line p_hat / p moves to 1, so its smallest value is 1 or the first one.
    smallest_initial_ratio = (initial / weights).min()
    return float(min(1.0, smallest_initial_ratio))


def rate_bound(run: Descent, cluster: Cluster, schedule: Schedule) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Theorem A.10, as corrected here, on the excess loss of the average model.

    After T steps of sizes ``eta_t = 3 / (mu (t + s))`` the bound is

        2 / S (s^2 (s - 3) mu D^2 / 3 + 3 / mu sum_t (t + s) A_t + 9 T B / mu^2),    S = sum_t (t + s)^2,

    with ``A_t = 4 sigma^2 |p|^2 + 4 G^2 |delta_t|_1^2`` and ``B = 8 L H^2 G^2``. D is the distance of the start from
    the minimum, mu and L the smallest and largest curvature of the loss, p the true weights of the clients. The average
    is of all mean models so far, with weights ``(t + s)^2``. The bound holds for ``s >= max(H, 24 L / (mu U))`` with U
    of :func:`uniformity`.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes with shift s, and number of local steps H.
    """
    sigma_squared, g_squared = run.variance, run.second_moment  # of a drawn gradient
    delta_norm = run.mismatch  # |delta_t|_1, the distance of estimated and true weights
    noise = 4 * sigma_squared * _squared_norms(cluster.weights) + 4 * g_squared * delta_norm**2  # A_t
    return _corrected_rate_bound(run, cluster, schedule, noise, drift_factor=8)


def routed_rate_bound(
    run: Descent, cluster: Cluster, schedule: Schedule, num_clusters: int
) -> Float[np.ndarray, " steps"]:
    """Return a correction of FLoRAL's Theorem A.9, which bounds the excess loss of the average model.

    The printed theorem is false (:func:`printed_routed_rate`). After T steps of sizes ``eta_t = 3 / (mu (t + s))``,
    where the paper has 1 in place of 3, the bound is

        2 / S (s^2 (s - 3) mu D^2 / 3 + 3 / mu sum_t (t + s) A + 9 T B / mu^2),    S = sum_t (t + s)^2,

    with ``A = 4 sigma^2 |p|^2 + 16 G^2 log(K C)`` and ``B = 9 L H^2 G^2`` for K clients and C clusters. D is the
    distance of the start from the minimum, mu and L the smallest and largest curvature of the loss, p the true weights
    of the clients. The bound holds for all routers.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes with shift s, and number of local steps H.
        num_clusters: Number of clusters C.
    """
    sigma_squared = run.variance  # of a drawn gradient
    noise = 4 * sigma_squared * _squared_norms(cluster.weights) + _router_noise(run, cluster, num_clusters)  # A
    noise_of_each_step = np.full(len(run.step_sizes), noise)
    return _corrected_rate_bound(run, cluster, schedule, noise_of_each_step, drift_factor=9)


def _corrected_rate_bound(
    run: Descent, cluster: Cluster, schedule: Schedule, noise: Float[np.ndarray, " steps"], drift_factor: int
) -> Float[np.ndarray, " steps"]:
    """Return a correction of FLoRAL's Theorems A.9 and A.10, which bound the excess loss of the average model.

        2 / S (s^2 (s - 3) mu D^2 / 3 + 3 / mu sum_t (t + s) A_t + 9 T B / mu^2),    S = sum_t (t + s)^2

    after T steps of sizes ``eta_t = 3 / (mu (t + s))``, where the paper has 1 in place of 3, with
    ``B = drift_factor L H^2 G^2``. The printed theorems are false.
    :func:`rate_bound` and :func:`routed_rate_bound` explain the symbols.

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes with shift s, and number of local steps H.
        noise: A_t of each step t.
        drift_factor: 8 in Theorem A.10, 9 in Theorem A.9.
    """
    mu, smoothness = cluster.moduli  # smallest and largest curvature of the loss; L is the largest
    s = schedule.shift
    g_squared = run.second_moment  # G^2, the largest of a drawn gradient at any point of the run
    squared_start_distance = run.squared_distance[0]  # D^2
    shifted_steps = np.arange(len(run.step_sizes)) + s  # t + s
    drift = drift_factor * smoothness * schedule.local_steps**2 * g_squared  # B
    start_term = s**2 * (s - 3) * mu * squared_start_distance / 3
    num_steps = np.arange(1, len(shifted_steps) + 1)  # T
    noise_term = 3 / mu * (shifted_steps * noise).cumsum()
    drift_term = 9 * num_steps * drift / mu**2
    return 2 / (shifted_steps**2).cumsum() * (start_term + noise_term + drift_term)


def printed_rate(run: Descent, cluster: Cluster, schedule: Schedule, decay: float) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Theorem A.10, as printed, on the excess loss of the average model.

    The printed theorem is false: a run can exceed this bound. :func:`rate_bound` is the correction. After T steps of
    sizes ``1 / (mu (t + s))`` the bound is, with ``P = sigma^2 |p|^2`` and the first squared mismatch
    ``D = |delta_0|_1^2`` of estimated and true weights p,

        12 P (1 / (mu T) + (2 s - 1) / (mu T^2)) + 48 G^2 D / (mu T^(1 + beta))
            + 24 G^2 (s - 1 + 2 D / s^beta) s^2 / (mu T^3) + 48 L H^2 G^2 / (mu^2 T^2).

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes with shift s, and number of local steps H.
        decay: Exponent beta with which the squared mismatch decreases.
    """
    mu, smoothness = cluster.moduli  # smallest and largest curvature of the loss; L is the largest
    s = schedule.shift
    num_steps = np.arange(1, len(run.step_sizes) + 1)  # T
    g_squared = run.second_moment  # of a drawn gradient
    noise = run.variance * _squared_norms(cluster.weights)  # P
    squared_mismatch = run.mismatch[0] ** 2  # D
    noise_term = 12 * noise * (1 / (mu * num_steps) + (2 * s - 1) / (mu * num_steps**2))
    mismatch_term = 48 * g_squared * squared_mismatch / (mu * num_steps ** (1 + decay))
    start_term = 24 * g_squared * (s - 1 + 2 * squared_mismatch * s**-decay) * s**2 / (mu * num_steps**3)
    drift_term = 48 * smoothness * schedule.local_steps**2 * g_squared / (mu**2 * num_steps**2)
    return noise_term + mismatch_term + start_term + drift_term


def printed_routed_rate(
    run: Descent, cluster: Cluster, schedule: Schedule, num_clusters: int
) -> Float[np.ndarray, " steps"]:
    """Return the bound of FLoRAL, Theorem A.9, as printed, on the excess loss of the average model.

    The printed theorem is false: a run can exceed this bound. :func:`routed_rate_bound` is the correction. After T
    steps of sizes ``1 / (mu (t + s))`` the bound is, with ``P = 8 sigma^2 |p|^2 + 32 G^2 log(K C)`` for K clients of
    weights p and C clusters,

        P (1 / (mu T) + (2 s - 1) / (mu T^2)) + 18 L H^2 G^2 / (mu^2 T^2) + 24 (s - 1) s^2 G^2 / (mu T^3).

    Args:
        run: Measured quantities of the run, for each step.
        cluster: The cluster whose clients take part.
        schedule: Step sizes with shift s, and number of local steps H.
        num_clusters: Number of clusters C.
    """
    mu, smoothness = cluster.moduli  # smallest and largest curvature of the loss; L is the largest
    s = schedule.shift
    num_steps = np.arange(1, len(run.step_sizes) + 1)  # T
    sigma_squared, g_squared = run.variance, run.second_moment  # of a drawn gradient
    noise = 8 * sigma_squared * _squared_norms(cluster.weights) + 2 * _router_noise(run, cluster, num_clusters)  # P
    noise_term = noise * (1 / (mu * num_steps) + (2 * s - 1) / (mu * num_steps**2))
    drift_term = 18 * smoothness / mu * schedule.local_steps**2 * g_squared / (mu * num_steps**2)
    start_term = 24 * (s - 1) * s**2 * g_squared / (mu * num_steps**3)
    return noise_term + drift_term + start_term


# ---------------------------------------------------------------- Lemma A.8


@dataclass(frozen=True, kw_only=True)
class Recursion:
    """Non-negative sequences with ``a_(t+1) <= (1 - mu eta_t) a_t - eta_t b_t + eta_t^2 c_t``.

    ``a`` has one entry more than the others.
    """

    step_sizes: Float[np.ndarray, " steps"]
    a: Float[np.ndarray, " steps_plus_one"]
    b: Float[np.ndarray, " steps"]
    c: Float[np.ndarray, " steps"]


def draw_recursion(rng: np.random.Generator, *, mu: float, shift: float, steps: int) -> Recursion:
    """Draw random sequences with ``a_(t+1) = (1 - mu eta_t) a_t - eta_t b_t + eta_t^2 c_t`` to test FLoRAL's Lemma A.8.

    The lemma bounds the sum of all b_t (:func:`sum_bound`). The last b_t is so large that ``a_(t+1)`` is 0, which makes
    the sum equal to its bound.

    Args:
        rng: Source of the draws.
        mu: The modulus of strong convexity.
        shift: Shift s of the step sizes ``eta_t = 1 / (mu (t + s))``.
        steps: Number of steps.
    """
    step_sizes = 1 / (mu * (np.arange(steps) + shift))
    a = [float(rng.exponential())]
    b: list[float] = []
    c = rng.exponential(size=steps)
    for step, eta in enumerate(step_sizes):
        # A random share of this sum becomes eta_t b_t, the rest a_(t+1).
        sum_to_split = (1 - mu * eta) * a[-1] + eta**2 * c[step]
        is_last = step == steps - 1
        share = 1.0 if is_last else float(rng.uniform())
        b.append(share * sum_to_split / eta)
        a.append((1 - share) * sum_to_split)
    return Recursion(step_sizes=step_sizes, a=np.array(a), b=np.array(b), c=c)


def sum_bound(sequences: Recursion, mu: float, shift: float) -> float:
    """Return the bound of FLoRAL, Lemma A.8, on ``sum_t b_t``: ``(s - 1) mu a_0 + sum_t eta_t c_t``.

    The lemma is about non-negative sequences with ``a_(t+1) <= (1 - mu eta_t) a_t - eta_t b_t + eta_t^2 c_t``.

    Args:
        sequences: The sequences a, b and c and the step sizes eta.
        mu: The modulus of strong convexity.
        shift: Shift s of the step sizes ``eta_t = 1 / (mu (t + s))``.
    """
    sum_of_eta_c = sequences.step_sizes @ sequences.c
    return float((shift - 1) * mu * sequences.a[0] + sum_of_eta_c)


Losses = Float[np.ndarray, "*users clusters"]
Shares = Float[np.ndarray, "*users clusters"]


def router(losses: Losses, inverse_temperature: float) -> Shares:
    """Return the router of each user, ``pi_c`` in proportion to ``exp(-eta loss_c)`` (FLoRAL, eq. 5).

    Eq. 5 uses the loss f_c of the whole cluster; appendix C.1 uses the user's own loss.

    Args:
        losses: Loss of each cluster's model; one row for each user, or a single vector.
        inverse_temperature: eta.
    """
    return special.softmax(-inverse_temperature * losses, axis=-1)


def aggregation_weights(
    routers: Float[np.ndarray, "users clusters"], data_amounts: Float[np.ndarray, " users"]
) -> Shares:
    """Return the weights with which users' models are averaged in each cluster (FLoRAL, eq. 2).

    ``p(k|c)`` is in proportion to ``N^k pi_c^k``: the user's amount of data times its router's share of the cluster.

    Args:
        routers: The users' routers pi^k, one row each.
        data_amounts: Amount of data N^k of each user.

    Returns:
        One row for each user; each column (cluster) sums to 1.
    """
    weighted = data_amounts[:, None] * routers
    return weighted / weighted.sum(0)


def mismatch_bound(
    eta: float, true_eta: float, gap: float, lowest_loss: float, num_users: int, num_clusters: int, drift: float
) -> float:
    """Return the bound of FLoRAL, Lemma A.6, on ``|p - p_hat|_1^2`` of the true and estimated weights p(k|c).

    The bound is ``4 eta gap + eta_bar f_c* + 4 log(K C) + 10 L eta^3 H^2 G^2``. Since no two distributions are further
    apart than 4, it says something only for ``K C < 3``.

    Args:
        eta: Inverse temperature of the estimated routers (eq. 5), which is the step size.
        true_eta: eta_bar, the inverse temperature of the true routers.
        gap: By how much the cluster's mean loss exceeds its lowest loss.
        lowest_loss: f_c* of the cluster.
        num_users: K.
        num_clusters: Number of clusters C.
        drift: The term ``10 L eta^3 H^2 G^2``; 0 right after averaging.
    """
    return 4 * eta * gap + true_eta * lowest_loss + 4 * float(np.log(num_users * num_clusters)) + drift


def losses_of_mixture(
    loss: Callable[[Float[np.ndarray, " size"]], float],
    models: Float[np.ndarray, "clusters size"],
    router: Float[np.ndarray, " clusters"],
) -> tuple[float, float]:
    """Return the loss of a user's mixed model, ``f(sum_c pi_c w_c)``, and its mean loss, ``sum_c pi_c f(w_c)``.

    FLoRAL names these two objectives FML and MFL. For a convex f the mean loss is no smaller (Jensen).

    Args:
        loss: The user's loss f.
        models: The model w_c of each cluster.
        router: The user's router pi.
    """
    mixed_model = router @ models
    mean_loss = sum(share * loss(model) for share, model in zip(router, models, strict=True))
    return loss(mixed_model), float(mean_loss)


def logit_gradient(
    gradient: Float[np.ndarray, " size"],
    models: Float[np.ndarray, "clusters size"],
    router: Float[np.ndarray, " clusters"],
) -> Float[np.ndarray, " clusters"]:
    """Return the gradient of a mixed model's loss with respect to the router's logits (FLoRAL, Appendix C.2).

    For the mixture ``w_hat = sum_c pi_c w_c`` it is ``pi_c <grad f(w_hat), w_c - w_hat>`` in entry c.

    Args:
        gradient: Gradient of the loss at the mixture w_hat.
        models: The model w_c of each cluster.
        router: The user's router pi.
    """
    mixed_model = router @ models
    return router * ((models - mixed_model) @ gradient)


def logit_step(
    loss: Callable[[Float[np.ndarray, " size"]], float],
    gradient: Callable[[Float[np.ndarray, " size"]], Float[np.ndarray, " size"]],
    models: Float[np.ndarray, "clusters size"],
    step_size: float,
) -> tuple[Float[np.ndarray, " clusters"], Float[np.ndarray, " clusters"]]:
    """Return the router after one gradient step on its logits, from logits 0, and FLoRAL's approximation of it.

    The approximation is ``softmax(-eta f(w_c))`` (FLoRAL, eq. 5 and 35).

    Args:
        loss: The user's loss f.
        gradient: Gradient of f.
        models: The model w_c of each cluster.
        step_size: Of the gradient step.
    """
    num_clusters = len(models)
    equal_shares = np.full(num_clusters, 1 / num_clusters)  # softmax of the logits 0
    mixed_model = equal_shares @ models
    logits_after_step = -step_size * logit_gradient(gradient(mixed_model), models, equal_shares)
    router_after_step = special.softmax(logits_after_step)

    losses = np.array([loss(model) for model in models])
    eta = step_size / num_clusters  # makes both routers equal if f is affine
    approximation = router(losses, eta)
    return router_after_step, approximation


A2, A3, A4, A5 = "Lemma A.2, gradients", "Lemma A.3, drift", "Lemma A.4, descent", "Corollary A.5, local SGD"
A6, PINSKER = "Lemma A.6, mismatch", "Lemma A.6, Pinsker's inequality"
A7, A8 = "Lemma A.7, descent", "Lemma A.8, sums"
A9, A9_PRINTED = "Theorem A.9, steps 3 / (μ (t + s))", "Theorem A.9 as printed"
A10, PRINTED, SHARING = "Theorem A.10, steps 3 / (μ (t + s))", "Theorem A.10 as printed", "eq. 31, shared base"


NUM_CLUSTERS = 2
"""Number of clusters of clients in the random problems."""


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
    """Run local SGD in random clusters, and yield the curve of each run; the last curve is a counterexample.

    A curve has the excess loss of the average model before every step. The counterexample is a single client whose
    excess loss is above FLoRAL's bounds as printed.

    Args:
        seed: Seed of the random streams.
        settings: Settings of the clusters; ``mismatches`` are how far the initial routers are from the true ones.
    """
    for mismatch in settings.mismatches:
        start = "right" if mismatch == 0 else f"wrong, mismatch {mismatch:g}"
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, 2, instance])  # 2: the random streams of clusters
            yield cluster_curve(f"clusters, routers start {start}", instance, mismatch, settings, rng)
    yield printed_curve(f"clusters, one client, L / μ = {settings.condition:g}", settings)


def draw_clients(
    rng: np.random.Generator, num_clients: int, size: int, condition: float
) -> tuple[Float[np.ndarray, "clients size size"], Float[np.ndarray, "clients size"]]:
    """Draw Hessian and minimiser of each client's quadratic loss.

    The Hessians have random eigenvectors and eigenvalues from 1 to ``condition``; the minimisers are normal.

    Args:
        rng: Source of the draws.
        num_clients: Number of clients.
        size: Number of variables.
        condition: The largest eigenvalue.
    """
    eigenvectors = np.linalg.qr(rng.standard_normal((num_clients, size, size)))[0]
    eigenvalues = np.geomspace(1, condition, size)
    hessians = (eigenvectors * eigenvalues) @ eigenvectors.transpose(0, 2, 1)
    minimisers = rng.standard_normal((num_clients, size))
    return hessians, minimisers


def cluster_curve(
    scheme: str, instance: int, mismatch: float, settings: ClusterSettings, rng: np.random.Generator
) -> Curve:
    """Draw clients of two clusters, run local SGD on the first cluster, and check FLoRAL's statements.

    Lemmas A.2 to A.5 and A.7 and Theorems A.9 and A.10 (as corrected) are checked on the run. Eq. 31 and Lemmas A.6 and
    A.8 are not about a run: they are checked on random models and random sequences.

    Args:
        scheme: Name of the kind of problem, by which curves are grouped.
        instance: Index of the random problem among those of its kind.
        mismatch: How far the initial routers are from the true ones: 0 are the true ones, 1 uniform routers.
        settings: Settings of the clusters.
        rng: Source of the draws.
    """
    hessians, centres = draw_clients(rng, settings.clients, settings.size, settings.condition)
    data_shares = rng.dirichlet(np.full(settings.clients, 4.0))  # p(k), moderately unequal
    # Of the first cluster in each client's router; no client is in one cluster only.
    first_cluster_shares = rng.uniform(0.05, 0.95, settings.clients)
    routers = np.stack([first_cluster_shares, 1 - first_cluster_shares], 1)
    weights = data_shares * first_cluster_shares / (data_shares @ first_cluster_shares)  # p(k|c), c the first cluster
    cluster = Cluster(hessians=hessians, centres=centres, weights=weights)
    weights_of_uniform_routers = data_shares
    initial_weights = weights + mismatch * (weights_of_uniform_routers - weights)

    mu, smoothness = cluster.moduli
    # The smallest shift for which the corrected Theorem A.10 holds, see :func:`rate_bound`.
    shift = max(settings.local_steps, 24 * smoothness / mu / uniformity(weights, initial_weights))
    # Steps ``3 / (mu (t + shift))``, for which the corrected Theorems A.9 and A.10 are proved.
    schedule = Schedule(scale=3, shift=shift, local_steps=settings.local_steps)
    start = 3 * rng.standard_normal(settings.size)
    run = _descend_by_settings(cluster, schedule, settings, initial_weights, start, settings.replicas, rng)

    local_steps = settings.local_steps
    claims = [
        _tightest_claim(A2, run.squared_error, error_bound(run, cluster)),
        _tightest_claim(A3, run.drift, drift_bound(run, local_steps)),
        _tightest_claim(A4, run.next_squared_distance, descent_bound(run, cluster, local_steps)),
    ]
    has_true_routers = mismatch == 0
    if has_true_routers:  # as Corollary A.5 requires
        claims.append(_tightest_claim(A5, run.next_squared_distance, local_sgd_bound(run, cluster)))
    claims += [
        _tightest_claim(A7, run.next_squared_distance, routed_descent_bound(run, cluster, local_steps, NUM_CLUSTERS)),
        _tightest_claim(A9, run.average_gap, routed_rate_bound(run, cluster, schedule, NUM_CLUSTERS)),
        _tightest_claim(A10, run.average_gap, rate_bound(run, cluster, schedule)),
        _check_sharing(hessians, centres, data_shares, routers, mismatch, rng),
        *_check_mismatch(hessians, centres, data_shares, routers, rng),
        _check_sums(mu, shift, settings.steps, rng),
    ]
    return _make_curve(scheme, instance, run, claims, {"shift": shift, "kappa": smoothness / mu})


def printed_curve(scheme: str, settings: ClusterSettings) -> Curve:
    """Run one client without gradient noise, whose excess loss is above FLoRAL's Theorems A.9 and A.10 as printed.

    Local SGD of one client is gradient descent. From a start in the direction of least curvature its excess loss falls
    as ``1 / T^2`` after T steps, more slowly than the printed bounds.

    Args:
        scheme: Name of the kind of problem, by which curves are grouped.
        settings: Settings of the clusters; only condition, decay and number of steps matter.
    """
    hessian = np.diag([1.0, settings.condition])
    cluster = Cluster(hessians=hessian[None], centres=np.zeros((1, 2)), weights=np.ones(1))
    # The smallest shift that the theorems allow: ``s >= max(3 H, 4 kappa / U)`` with H local steps, the ratio kappa of
    # the largest to the smallest curvature, and U of `uniformity`. H and U are 1 here.
    schedule = Schedule(scale=1, shift=max(3.0, 4 * settings.condition), local_steps=1)
    run = _descend_by_settings(
        cluster,
        schedule,
        settings,
        initial_weights=np.ones(1),
        start=np.array([1.0, 0.0]),  # the eigenvector of the smallest eigenvalue, 1
        replicas=1,
        rng=np.random.default_rng(0),  # any seed, as the only client is always drawn
        steps_factor=20,  # enough steps to exceed the bounds
    )
    printed_bound_of_a9 = printed_routed_rate(run, cluster, schedule, num_clusters=1)
    claim_of_a9 = _tightest_claim(A9_PRINTED, run.average_gap, printed_bound_of_a9)
    # A.9 also asks for ``s >= 16 G^2 / (mu U)`` with the gradients' second moment G^2; the smallest curvature mu is 1.
    a9_applies = schedule.shift >= 16 * run.second_moment
    if not a9_applies:
        claim_of_a9 = replace(claim_of_a9, bound=None)
    printed_bound_of_a10 = printed_rate(run, cluster, schedule, settings.decay)
    claim_of_a10 = _tightest_claim(PRINTED, run.average_gap, printed_bound_of_a10)
    claims = [claim_of_a10, claim_of_a9]
    only_instance = 0
    return _make_curve(scheme, only_instance, run, claims, {"shift": schedule.shift, "kappa": settings.condition})


def _descend_by_settings(
    cluster: Cluster,
    schedule: Schedule,
    settings: ClusterSettings,
    initial_weights: Float[np.ndarray, " clients"],
    start: Float[np.ndarray, " size"],
    replicas: int,
    rng: np.random.Generator,
    steps_factor: int = 1,
) -> Descent:
    """Run local SGD on one cluster (:func:`descend`), with decay and number of steps from the settings.

    Args:
        cluster: The cluster whose clients take part.
        schedule: Step sizes and local steps.
        settings: ``decay`` says how fast the estimated weights approach the true ones.
        initial_weights: First estimate of the clients' weights p(k|c).
        start: First model of all clients.
        replicas: Number of independent runs that are averaged.
        rng: Generator of the draws. In each step each client draws one of the clients, and descends that one's loss.
        steps_factor: Factor of the settings' number of steps; the counterexample needs more steps than other runs.
    """
    return descend(
        cluster,
        schedule,
        initial_weights=initial_weights,
        decay=settings.decay,
        start=start,
        steps=steps_factor * settings.steps,
        replicas=replicas,
        rng=rng,
    )


def _check_sharing(
    hessians: Float[np.ndarray, "clients size size"],
    centres: Float[np.ndarray, "clients size"],
    data_shares: Float[np.ndarray, " clients"],
    routers: Float[np.ndarray, "clients clusters"],
    mismatch: float,
    rng: np.random.Generator,
) -> Claim:
    """Check the bound of FLoRAL's eq. 31 on the aggregated gradient's error, at random models.

    The clusters' models share a base, the first half of their entries.

    Args:
        hessians: Hessian of each client.
        centres: Minimiser of each client.
        data_shares: Share of each client in the data, p(k).
        routers: The true routers.
        mismatch: How far the estimated routers are from the true ones: 0 are the true ones, 1 uniform routers.
        rng: Source of the models.
    """
    size, num_clusters = hessians.shape[1], routers.shape[1]
    base_size = size // 2
    problem = SharedBaseProblem(
        hessians=hessians, centres=centres, data_shares=data_shares, routers=routers, base_size=base_size
    )
    uniform_router = 1 / num_clusters
    estimated_routers = routers + mismatch * (uniform_router - routers)

    models = rng.standard_normal((*routers.shape, size))  # a model for each client and cluster
    base_of_first_cluster = models[:, :1, :base_size]
    models[..., :base_size] = base_of_first_cluster  # for all clusters

    errors = gradient_error(problem, estimated_routers, models)
    bound = sharing_bound(
        problem,
        estimated_routers,
        second_moment=errors.second_moment,
        adaptor_variances=errors.adaptor_variances,
        base_variance=errors.base_variance,
        heterogeneity=errors.heterogeneity,
    )
    return Claim(statement=SHARING, measured=errors.error, bound=bound)


def _check_mismatch(
    hessians: Float[np.ndarray, "clients size size"],
    centres: Float[np.ndarray, "clients size"],
    data_shares: Float[np.ndarray, " clients"],
    routers: Float[np.ndarray, "clients clusters"],
    rng: np.random.Generator,
) -> list[Claim]:
    """Check two bounds on ``|p_hat - p|_1^2``, the mismatch of estimated and true weights p(k|c), at random models.

    The bounds are that of FLoRAL's Lemma A.6 (:func:`mismatch_bound`) and ``2 KL(p | p_hat)`` of Pinsker's inequality.
    The estimated weights follow from the losses of the models, the true ones from the lowest losses (eq. 5). Each
    client has models of its own.

    Args:
        hessians: Hessian of each client.
        centres: Minimiser of each client.
        data_shares: Share of each client in the data, p(k).
        routers: Routers that define the two clusters.
        rng: Source of the models and inverse temperatures.

    Returns:
        The claims of Lemma A.6 and of Pinsker's inequality.
    """
    cluster_weights = aggregation_weights(routers, data_shares).T  # (clusters, clients)
    clusters = [Cluster(hessians=hessians, centres=centres, weights=weights) for weights in cluster_weights]
    lowest_losses = np.array([_cluster_loss(cluster, cluster.minimiser) for cluster in clusters])
    minimisers = np.stack([cluster.minimiser for cluster in clusters])
    num_clients = len(data_shares)
    models = minimisers + rng.standard_normal((num_clients, *minimisers.shape))  # (clients, clusters, size)
    losses = np.stack([_cluster_loss(cluster, models[:, c]) for c, cluster in enumerate(clusters)], axis=1)

    # Inverse temperatures: the estimated one is smaller, so the estimated routers are closer to uniform.
    true_eta = float(rng.uniform(0.05, 1.0))
    estimated_eta = float(rng.uniform(0.1, 1.0)) * true_eta
    true_router = router(lowest_losses, true_eta)  # of all clients
    true_weights = aggregation_weights(np.broadcast_to(true_router, losses.shape), data_shares)  # (clients, clusters)
    estimated_weights = aggregation_weights(router(losses, estimated_eta), data_shares)
    squared_mismatch = np.abs(true_weights - estimated_weights).sum(0) ** 2  # of each cluster

    gaps = (true_weights * (losses - lowest_losses)).sum(0)  # excess of each cluster's mean loss over its lowest
    lemma_bounds = [
        # No drift, as the weights follow from the losses of the same models.
        mismatch_bound(estimated_eta, true_eta, float(gap), float(lowest_loss), num_clients, NUM_CLUSTERS, drift=0.0)
        for gap, lowest_loss in zip(gaps, lowest_losses, strict=True)
    ]
    kl_divergence = (true_weights * np.log(true_weights / estimated_weights)).sum(0)
    return [
        _tightest_claim(A6, squared_mismatch, np.array(lemma_bounds)),
        _tightest_claim(PINSKER, squared_mismatch, 2 * kl_divergence),
    ]


def _cluster_loss(cluster: Cluster, points: Float[np.ndarray, "*batch size"]) -> Float[np.ndarray, "*batch"]:
    """Return the cluster's loss f_c, the weighted mean of its clients' losses, at each point."""
    offsets = points[..., None, :] - cluster.centres
    client_losses = np.einsum("...ki,kij,...kj->...k", offsets, cluster.hessians, offsets) / 2
    return np.asarray(client_losses @ cluster.weights)


def _check_sums(mu: float, shift: float, steps: int, rng: np.random.Generator) -> Claim:
    """Check the bound of FLoRAL's Lemma A.8 on ``sum_t b_t`` (:func:`sum_bound`), on random sequences.

    Args:
        mu: The modulus of strong convexity.
        shift: Shift of the step sizes, s.
        steps: Number of steps.
        rng: Source of the draws.
    """
    sequences = draw_recursion(rng, mu=mu, shift=shift, steps=steps)
    return Claim(statement=A8, measured=float(sequences.b.sum()), bound=sum_bound(sequences, mu, shift))


def _tightest_claim(statement: str, measured: Float[np.ndarray, " steps"], bound: Float[np.ndarray, " steps"]) -> Claim:
    """Return the claim ``measured <= bound`` at the step where it comes closest to failing.

    Args:
        statement: Name of the statement.
        measured: The measured value at each step.
        bound: The bound at each step.
    """
    tightest_step = int(np.argmax(measured / bound))
    return Claim(statement=statement, measured=float(measured[tightest_step]), bound=float(bound[tightest_step]))


def _make_curve(scheme: str, instance: int, run: Descent, claims: list[Claim], notes: dict[str, float]) -> Curve:
    """Return the curve of a run; its residual is the excess loss of the average of all models so far.

    Args:
        scheme: Name of the kind of problem, by which curves are grouped.
        instance: Index of the random problem among those of its kind.
        run: The measured run.
        claims: The paper's statements about the run.
        notes: Constants of the problem, by name.
    """
    residuals = tuple(map(float, run.average_gap))
    no_rates: dict[str, float] = {}  # the bounds do not fall by the same factor in each step
    return Curve(
        scheme=scheme, instance=instance, residuals=residuals, claims=tuple(claims), rates=no_rates, notes=notes
    )
