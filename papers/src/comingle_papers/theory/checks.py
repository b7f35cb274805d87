"""Runs the alternating schemes beside their bounds: what each step leaves of the residual, and what was predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import linalg
from threadpoolctl import threadpool_limits

from comingle_papers.theory import linear, quadratics
from comingle_papers.theory.claims import VALUE_FLOOR, Claim, Curve, summarise, worst_step
from comingle_papers.theory.clusters import ClusterSettings, cluster_curves
from comingle_papers.theory.coupled import CoupledSettings, coupled_curves
from comingle_papers.theory.linear import LOSSES

F1, EXAMPLE, WIELANDT = "Theorem F.1", "Example 1", "Example 1 by Wielandt's inequality"
EUCLIDEAN = "Example 1 as printed, spectral norm of T"
BLOCKS, F2, LOCAL = "Theorem F.2, by blocks", "Theorem F.2, joint constants", "Example 2, slope near the solution"
EIGENVALUE = "Proposition 1, smallest eigenvalue"
UNIFORM = "largest share at the solution: 1 / (N + 1)"


@dataclass(frozen=True, kw_only=True)
class QuadraticSettings:
    """Which quadratics. ``mismatches``: how much of the training objective is drawn anew, 0 for none, 1 for all."""

    instances: int
    experts_size: int
    router_size: int
    condition: float
    mismatches: Sequence[float]
    steps: int


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """Which linear experts. ``decays`` are multiples of the smallest alpha that satisfies eq. 27."""

    instances: int
    samples: int
    features: int
    specialists: int
    coupling: float
    losses: Sequence[str]
    decays: Sequence[float]
    steps: int


def check_all(
    seed: int,
    quadratic: QuadraticSettings,
    linears: LinearSettings,
    coupled: CoupledSettings,
    clusters: ClusterSettings,
) -> list[Curve]:
    """Every run of a theory recipe. Each instance has a random stream of its own, whatever else is run.

    Raises:
        DivergenceError: scipy failed on a convex step.
    """
    with threadpool_limits(1):  # matrices are so small that waiting for a second thread takes most of the time
        return [
            *_quadratic_curves(seed, quadratic),
            *_linear_curves(seed, linears),
            *coupled_curves(seed, coupled),
            *cluster_curves(seed, clusters),
        ]


def as_json(seed: int, curves: list[Curve]) -> dict[str, Any]:
    """Rows and curves as plain data."""
    return {
        "seed": seed,
        "rows": [asdict(row) for row in summarise(curves)],
        "curves": [asdict(curve) for curve in curves],
    }


# ---------------------------------------------------------------- quadratics


def _quadratic_curves(seed: int, settings: QuadraticSettings) -> Iterator[Curve]:
    for mismatch in settings.mismatches:
        same = "f_valid = f_train" if mismatch == 0 else f"f_valid ≠ f_train, mismatch {mismatch:g}"
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, 0, instance])
            sizes = settings.experts_size, settings.router_size, settings.condition
            valid, other = quadratics.draw_quadratic(rng, *sizes), quadratics.draw_quadratic(rng, *sizes)
            train = quadratics.perturb(valid, other, mismatch)
            start = 3 * rng.standard_normal(settings.experts_size)
            yield quadratic_curve(f"quadratic, {same}", instance, valid, train, start, settings.steps)


def quadratic_curve(
    scheme: str,
    instance: int,
    valid: quadratics.Quadratic,
    train: quadratics.Quadratic,
    start: Float[np.ndarray, " experts"],
    steps: int,
) -> Curve:
    """Eq. 12 on one pair of quadratics, in the norms of Theorem F.1's constants."""
    bounds = quadratics.constants(valid, train)
    thetas, phis = quadratics.alternate(valid, train, start, steps)
    experts, router = quadratics.fixed_point(valid, train)
    of_experts = quadratics.energy_norms(thetas - experts, train.experts_block)
    of_router = quadratics.energy_norms(phis - router, valid.router_block)
    rate = bounds.rate if bounds.rate < 1 else None
    measured = worst_step(of_experts)
    claims = [
        Claim(statement=f"{F1}, experts", measured=measured, bound=rate),
        Claim(statement=f"{F1}, router", measured=worst_step(of_router), bound=rate),
    ]
    if bounds.same_function:
        printed = float(linalg.norm(quadratics.composition(valid, train), 2))
        claims += [
            Claim(statement=WIELANDT, measured=measured, bound=bounds.wielandt_rate),
            Claim(statement=EXAMPLE, measured=measured, bound=bounds.example_rate),
            Claim(statement=EUCLIDEAN, measured=printed, bound=bounds.example_rate),
        ]
    rates = {F1: rate, EXAMPLE: bounds.example_rate}
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, of_experts)),
        claims=tuple(claims),
        rates={name: value for name, value in rates.items() if value is not None},
        notes={"lambda_1": bounds.router_lipschitz, "lambda_2": bounds.experts_lipschitz},
    )


# ---------------------------------------------------------------- linear experts


def _linear_curves(seed: int, settings: LinearSettings) -> Iterator[Curve]:
    for name in settings.losses:
        for multiple in settings.decays:
            for instance in range(settings.instances):
                rng = np.random.default_rng([seed, 1, instance])
                problem = linear.draw_linear(
                    rng,
                    samples=settings.samples,
                    features=settings.features,
                    num_experts=settings.specialists + 1,
                    loss=LOSSES[name],
                    decay=1.0,
                    coupling=settings.coupling,
                )
                experts, router = rng.standard_normal((2, settings.features, settings.specialists + 1))
                decay = multiple * linear.threshold_decay(problem, experts, router)
                problem = dataclasses.replace(problem, decay=decay)
                scheme = f"linear, {name}, α = {multiple:g} × eq. 27"
                yield linear_curve(scheme, instance, problem, experts, router, settings.steps)


def linear_curve(
    scheme: str,
    instance: int,
    problem: linear.LinearProblem,
    experts: linear.Weights,
    router: linear.Weights,
    steps: int,
) -> Curve:
    """Eq. 28 on one problem: the residual is ``F - F*``, taken where the shares are optimal.

    Raises:
        DivergenceError: scipy failed on a convex step, or found no minimum.
    """
    bounds = linear.constants(problem, experts, router)
    descent = linear.alternate(problem, experts, router, steps)
    solution = linear.minimum(problem, descent.points[-1])
    lowest = linear.decoupled_objective(problem, solution)
    residuals = np.array(descent.values) - lowest
    measured = worst_step(residuals, floor=VALUE_FLOOR * max(1.0, abs(lowest)))
    modulus = bounds.modulus if bounds.modulus > 0 else None
    uniform = 1 / problem.num_experts if bounds.modulus_weights > 0 else None
    rates = {BLOCKS: bounds.block_rate, F2: bounds.theorem_rate, LOCAL: linear.local_rate(problem, solution)}
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, residuals)),
        claims=(
            Claim(statement=BLOCKS, measured=measured, bound=bounds.block_rate),
            Claim(statement=F2, measured=measured, bound=bounds.theorem_rate),
            Claim(statement=EIGENVALUE, measured=_least(problem, descent.points), bound=modulus, at_least=True),
            Claim(statement=UNIFORM, measured=float(solution.shares.max()), bound=uniform),
        ),
        rates={name: value for name, value in rates.items() if value is not None},
        notes={
            "alpha": problem.decay,
            "rho": bounds.slope,
            "experts_apart": float(np.ptp(solution.experts, axis=1).max()),
        },
    )


def _least(problem: linear.LinearProblem, points: list[linear.Point]) -> float:
    """The smallest eigenvalue of the Hessian along the simplex, over five points of a descent."""
    chosen = {round(i) for i in np.linspace(0, len(points) - 1, 5)}
    return min(float(linalg.eigvalsh(linear.tangent_hessian(problem, points[i]))[0]) for i in chosen)
