"""FLoRAL's local SGD over clusters beside the bounds of its appendices A and B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from comingle.papers.theory.claims import Claim, Curve
from comingle.papers.theory.clusters import (
    Cluster,
    Descent,
    Schedule,
    descend,
    descent_bound,
    draw_recursion,
    drift_bound,
    error_bound,
    local_sgd_bound,
    printed_rate,
    printed_routed_rate,
    rate_bound,
    routed_descent_bound,
    routed_rate_bound,
    sum_bound,
    uniformity,
)
from comingle.papers.theory.routers import aggregators, mismatch_bound, router
from comingle.papers.theory.sharing import Shared, gradient_error, sharing_bound

A2, A3, A4, A5 = "Lemma A.2, gradients", "Lemma A.3, drift", "Lemma A.4, descent", "Corollary A.5, local SGD"
A6, PINSKER = "Lemma A.6, mismatch", "Lemma A.6, Pinsker's inequality"
A7, A8 = "Lemma A.7, descent", "Lemma A.8, sums"
A9, A9_PRINTED = "Theorem A.9, steps 3 / (μ (t + s))", "Theorem A.9 as printed"
A10, PRINTED, SHARING = "Theorem A.10, steps 3 / (μ (t + s))", "Theorem A.10 as printed", "eq. 31, shared base"


CLUSTERS = 2


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Which clusters. ``mismatches``: how far routers start from the truth, 0 at it, 1 where all are uniform.

    ``condition`` is that of each client's Hessian; ``decay`` is beta, by which the mismatch falls.
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
    """Runs of clusters with noise, and of one client without, on which the printed rate is held."""
    for mismatch in settings.mismatches:
        start = "right" if mismatch == 0 else f"wrong, mismatch {mismatch:g}"
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, 2, instance])
            yield cluster_curve(f"clusters, routers start {start}", instance, mismatch, settings, rng)
    yield printed_curve(f"clusters, one client, L / μ = {settings.condition:g}", settings)


def draw_clients(
    rng: np.random.Generator, clients: int, size: int, condition: float
) -> tuple[Float[np.ndarray, "clients size size"], Float[np.ndarray, "clients size"]]:
    """Hessians with eigenvalues from 1 to ``condition`` in directions of their own, and minimisers."""
    bases = np.linalg.qr(rng.standard_normal((clients, size, size)))[0]
    spectrum = np.geomspace(1, condition, size)
    return (bases * spectrum) @ bases.transpose(0, 2, 1), rng.standard_normal((clients, size))


def cluster_curve(
    scheme: str, instance: int, mismatch: float, settings: ClusterSettings, rng: np.random.Generator
) -> Curve:
    """One of two clusters whose members' shares, amounts of data and objectives are drawn."""
    hessians, centres = draw_clients(rng, settings.clients, settings.size, settings.condition)
    amounts = rng.dirichlet(np.full(settings.clients, 4.0))
    shares = rng.uniform(0.05, 0.95, settings.clients)
    weights = amounts * shares / (amounts @ shares)
    cluster = Cluster(hessians=hessians, centres=centres, weights=weights)
    guessed = weights + mismatch * (amounts - weights)
    mu, smooth = cluster.moduli
    shift = max(settings.local_steps, 24 * smooth / mu / uniformity(weights, guessed))
    schedule = Schedule(scale=3, shift=shift, local_steps=settings.local_steps)
    start = 3 * rng.standard_normal(settings.size)
    found = _descend(cluster, schedule, settings, guessed, start, settings.replicas, rng)
    claims = [
        _tightest(A2, found.error, error_bound(found, cluster)),
        _tightest(A3, found.drift, drift_bound(found, settings.local_steps)),
        _tightest(A4, found.next_squared, descent_bound(found, cluster, settings.local_steps)),
        *([_tightest(A5, found.next_squared, local_sgd_bound(found, cluster))] if mismatch == 0 else []),
        _tightest(A7, found.next_squared, routed_descent_bound(found, cluster, settings.local_steps, CLUSTERS)),
        _tightest(A9, found.averaged, routed_rate_bound(found, cluster, schedule, CLUSTERS)),
        _tightest(A10, found.averaged, rate_bound(found, cluster, schedule)),
        _shared(hessians, centres, amounts, np.stack([shares, 1 - shares], 1), mismatch, rng),
        *_routed(hessians, centres, amounts, shares, rng),
        _summed(mu, shift, settings.steps, rng),
    ]
    return _curve(scheme, instance, found, claims, {"shift": shift, "kappa": smooth / mu})


def printed_curve(scheme: str, settings: ClusterSettings) -> Curve:
    """One client without noise, that starts away from its minimiser where the curvature is least: eq. 4 is gradient
    descent, and what is left of the start falls as ``9 / 8 mu D^2 (s - 1)^2 / T^2`` with s = 4 kappa.
    """
    hessian = np.diag([1.0, settings.condition])
    cluster = Cluster(hessians=hessian[None], centres=np.zeros((1, 2)), weights=np.ones(1))
    schedule = Schedule(scale=1, shift=max(3.0, 4 * settings.condition), local_steps=1)
    rng, start = np.random.default_rng(0), np.array([1.0, 0.0])
    found = _descend(cluster, schedule, settings, np.ones(1), start, 1, rng, longer=20)
    routed = _tightest(A9_PRINTED, found.averaged, printed_routed_rate(found, cluster, schedule, 1))
    if schedule.shift < 16 * found.moment:  # A.9 asks for s >= 16 G^2 / (mu U), and mu and U are 1 here
        routed = replace(routed, bound=None)
    claims = [_tightest(PRINTED, found.averaged, printed_rate(found, cluster, schedule, settings.decay)), routed]
    return _curve(scheme, 0, found, claims, {"shift": schedule.shift, "kappa": settings.condition})


def _descend(
    cluster: Cluster,
    schedule: Schedule,
    settings: ClusterSettings,
    guessed: Float[np.ndarray, " clients"],
    start: Float[np.ndarray, " size"],
    replicas: int,
    rng: np.random.Generator,
    longer: int = 1,
) -> Descent:
    return descend(
        cluster,
        schedule,
        guessed=guessed,
        decay=settings.decay,
        start=start,
        steps=longer * settings.steps,
        replicas=replicas,
        rng=rng,
    )


def _shared(
    hessians: Float[np.ndarray, "clients size size"],
    centres: Float[np.ndarray, "clients size"],
    amounts: Float[np.ndarray, " clients"],
    routers: Float[np.ndarray, "clients clusters"],
    mismatch: float,
    rng: np.random.Generator,
) -> Claim:
    """Eq. 31 where the two clusters' models have the first half of their numbers in common."""
    base = hessians.shape[1] // 2
    problem = Shared(hessians=hessians, centres=centres, amounts=amounts, routers=routers, base=base)
    guessed = routers + mismatch * (1 / routers.shape[1] - routers)
    models = rng.standard_normal((*routers.shape, hessians.shape[1]))
    models[..., :base] = models[:, :1, :base]
    found = gradient_error(problem, guessed, models)
    bound = sharing_bound(
        problem,
        guessed,
        moment=found.moment,
        adaptors=found.adaptors,
        base=found.base,
        heterogeneity=found.heterogeneity,
    )
    return Claim(statement=SHARING, measured=found.error, bound=bound)


def _routed(
    hessians: Float[np.ndarray, "clients size size"],
    centres: Float[np.ndarray, "clients size"],
    amounts: Float[np.ndarray, " clients"],
    shares: Float[np.ndarray, " clients"],
    rng: np.random.Generator,
) -> list[Claim]:
    """Lemma A.6 where clients have models of their own, and the first step of its proof.

    Eq. 5 with cluster losses gives all clients one router, unless their models differ (L4).
    """
    weights = aggregators(np.stack([shares, 1 - shares], 1), amounts).T
    found = [Cluster(hessians=hessians, centres=centres, weights=one) for one in weights]
    lowest = np.array([_value(cluster, cluster.minimiser) for cluster in found])
    models = np.stack([cluster.minimiser for cluster in found]) + rng.standard_normal(
        (len(amounts), *centres[:CLUSTERS].shape)
    )
    losses = np.stack([_value(cluster, models[:, c]) for c, cluster in enumerate(found)], axis=1)
    final = float(rng.uniform(0.05, 1.0))
    rate = float(rng.uniform(0.1, 1.0)) * final
    truth = aggregators(np.broadcast_to(router(lowest, final), losses.shape), amounts)
    guessed = aggregators(router(losses, rate), amounts)
    apart = np.abs(truth - guessed).sum(0) ** 2
    gaps = (truth * (losses - lowest)).sum(0)
    bounds = [
        mismatch_bound(rate, final, float(gap), float(low), len(amounts), CLUSTERS, drift=0.0)
        for gap, low in zip(gaps, lowest, strict=True)
    ]
    divergence = 2 * (truth * np.log(truth / guessed)).sum(0)
    return [_tightest(A6, apart, np.array(bounds)), _tightest(PINSKER, apart, divergence)]


def _value(cluster: Cluster, points: Float[np.ndarray, "*batch size"]) -> Float[np.ndarray, "*batch"]:
    """f_c at some points."""
    away = points[..., None, :] - cluster.centres
    each = np.einsum("...ki,kij,...kj->...k", away, cluster.hessians, away) / 2
    return np.asarray(each @ cluster.weights)


def _summed(mu: float, shift: float, steps: int, rng: np.random.Generator) -> Claim:
    """Lemma A.8 on drawn sequences."""
    found = draw_recursion(rng, mu=mu, shift=shift, steps=steps)
    return Claim(statement=A8, measured=float(found.b.sum()), bound=sum_bound(found, mu, shift))


def _tightest(statement: str, measured: Float[np.ndarray, " steps"], bound: Float[np.ndarray, " steps"]) -> Claim:
    """The step at which most of the bound is used."""
    worst = int(np.argmax(measured / bound))
    return Claim(statement=statement, measured=float(measured[worst]), bound=float(bound[worst]))


def _curve(scheme: str, instance: int, found: Descent, claims: list[Claim], notes: dict[str, float]) -> Curve:
    residuals = tuple(map(float, found.averaged))
    return Curve(scheme=scheme, instance=instance, residuals=residuals, claims=tuple(claims), rates={}, notes=notes)
