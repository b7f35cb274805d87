"""Two coupled variables (CoMiGS before ICML, App. G.2) and their checks.

That earlier version shows that ``u_1(x) = argmin_y f_1(x, y)`` is a contraction by another way than
Theorem F.1's: for ``f_1 = h(x) + g(y) + <A(x), B(y)>`` with Lipschitz A and B, and f_1 strongly convex in y.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import linalg, optimize

from comingle.utils.errors import DivergenceError
from comingle_papers.theory.claims import Claim, Curve, worst_step

Left = Float[np.ndarray, " left"]
Right = Float[np.ndarray, " right"]
Meeting = Float[np.ndarray, " meeting"]
Matrix = Float[np.ndarray, "rows columns"]

STEEPEST_BEND = 4 / (3 * np.sqrt(3))
"""The largest ``|tanh''|``."""
_TOLERANCE = 1e-11


@dataclass(frozen=True, kw_only=True)
class Coupled:
    """``decay / 2 |y|^2 + <A(x), B(y)>`` with ``A(x) = P sin(Q x)`` and ``B(y) = R tanh(S y)``.

    The assumption's h(x) is left out, as no step in y sees it. The inner product is not convex, so that strong
    convexity in y has to come from ``decay``.
    """

    outer_left: Float[np.ndarray, "meeting left"]
    inner_left: Float[np.ndarray, "left left"]
    outer_right: Float[np.ndarray, "meeting right"]
    inner_right: Float[np.ndarray, "right right"]
    decay: float

    def left(self, x: Left) -> Meeting:
        """A(x)."""
        return self.outer_left @ np.sin(self.inner_left @ x)

    def right(self, y: Right) -> Meeting:
        """B(y)."""
        return self.outer_right @ np.tanh(self.inner_right @ y)

    def value(self, x: Left, y: Right) -> float:
        """f_1, but for h(x)."""
        return float(self.decay / 2 * y @ y + self.left(x) @ self.right(y))

    @property
    def left_lipschitz(self) -> float:
        """L_A, at most ``|P| |Q|``."""
        return _norm(self.outer_left) * _norm(self.inner_left)

    @property
    def right_lipschitz(self) -> float:
        """L_B, at most ``|R| |S|``."""
        return _norm(self.outer_right) * _norm(self.inner_right)

    @property
    def bend(self) -> float:
        """How far ``<A(x), B(y)>`` bends down along y, at most, for any x."""
        largest = _norm(self.outer_left) * np.sqrt(self.inner_left.shape[0])
        steepest = float(np.linalg.norm(self.outer_right, axis=0).max())
        return float(STEEPEST_BEND * largest * steepest * _norm(self.inner_right) ** 2)

    @property
    def modulus(self) -> float:
        """mu_1 of Assumption 2: f_1 is strongly convex in y by at least that, for every x, where it is above 0."""
        return self.decay - self.bend

    @property
    def lipschitz(self) -> float:
        """Eq. 14: ``L_A L_B / mu``, by which two minimisers are further apart than their x at most."""
        return self.left_lipschitz * self.right_lipschitz / self.modulus


def minimiser(problem: Coupled, x: Left) -> Right:
    """``u_1(x)``: the only root of ``decay y + S^T diag(1 - tanh^2(S y)) R^T A(x)``.

    Raises:
        DivergenceError: scipy found none.
    """
    pull, inner = problem.outer_right.T @ problem.left(x), problem.inner_right

    def gradient(y: Right) -> Right:
        return problem.decay * y + inner.T @ ((1 - np.tanh(inner @ y) ** 2) * pull)

    def hessian(y: Right) -> Float[np.ndarray, "right right"]:
        height = np.tanh(inner @ y)
        return problem.decay * np.eye(len(y)) + inner.T @ np.diag(-2 * height * (1 - height**2) * pull) @ inner

    found = optimize.root(gradient, np.zeros(inner.shape[1]), jac=hessian, method="hybr", options={"xtol": 1e-14})
    left = float(np.abs(gradient(found.x)).max())
    if not left < _TOLERANCE * max(1.0, problem.decay):
        raise DivergenceError(f"a coupled minimum: the gradient stays at {left:.1e}; {_TOLERANCE:.0e} is allowed")
    return found.x


def alternate(first: Coupled, second: Coupled, x: Left, steps: int) -> Float[np.ndarray, "steps_and_start left"]:
    """Eq. 7: ``y = u_1(x)``, ``x = u_2(y)``; of ``second`` the roles are changed, as its step is in x."""
    points = [x]
    for _ in range(steps):
        points.append(minimiser(second, minimiser(first, points[-1])))
    return np.stack(points)


def draw_coupled(rng: np.random.Generator, left: int, right: int, meeting: int, lipschitz: float) -> Coupled:
    """Random maps of norm 1 on vectors of so many entries, and the decay at which :attr:`Coupled.lipschitz` is that."""

    def map_(rows: int, columns: int) -> Matrix:
        drawn = rng.standard_normal((rows, columns))
        return drawn / _norm(drawn)

    maps = {
        "outer_left": map_(meeting, left),
        "inner_left": map_(left, left),
        "outer_right": map_(meeting, right),
        "inner_right": map_(right, right),
    }
    bare = Coupled(**maps, decay=0.0)
    return Coupled(**maps, decay=bare.bend + bare.left_lipschitz * bare.right_lipschitz / lipschitz)


def _norm(matrix: Matrix) -> float:
    return float(linalg.norm(matrix, 2))


P1, P2 = "earlier Proposition 1, |u(x) - u(x')|", "earlier Proposition 2, λ_1 λ_2"
_FURTHER = 200


@dataclass(frozen=True, kw_only=True)
class CoupledSettings:
    """Which functions. ``lipschitz``: L_A L_B / mu, below 1 where Proposition 1 promises a contraction."""

    instances: int
    size: int
    meeting: int
    lipschitz: Sequence[float]
    pairs: int
    steps: int


def coupled_curves(seed: int, settings: CoupledSettings) -> Iterator[Curve]:
    """A pair of functions for each instance, one for each step."""
    for lipschitz in settings.lipschitz:
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, 3, instance])
            one, two = (draw_coupled(rng, settings.size, settings.size, settings.meeting, lipschitz) for _ in range(2))
            start = 3 * rng.standard_normal(settings.size)
            yield coupled_curve(f"coupled, L_A L_B / μ = {lipschitz:g}", instance, one, two, start, settings, rng)


def coupled_curve(
    scheme: str,
    instance: int,
    one: Coupled,
    two: Coupled,
    start: np.ndarray,
    settings: CoupledSettings,
    rng: np.random.Generator,
) -> Curve:
    """Eq. 7, its fixed point (which further steps lead to), and quotients of random pairs.

    Raises:
        DivergenceError: scipy failed on a convex step.
    """
    rate = one.lipschitz * two.lipschitz
    points = alternate(one, two, start, settings.steps)
    goal = alternate(one, two, points[-1], _FURTHER)[-1]
    residuals = np.linalg.norm(points - goal, axis=1)
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, residuals)),
        claims=(
            Claim(statement=P1, measured=largest_quotient(one, settings, rng), bound=one.lipschitz),
            Claim(statement=P2, measured=worst_step(residuals), bound=rate if rate < 1 else None),
        ),
        rates={P2: rate} if rate < 1 else {},
        notes={"mu": one.modulus, "decay": one.decay},
    )


def largest_quotient(problem: Coupled, settings: CoupledSettings, rng: np.random.Generator) -> float:
    """``|u(x) - u(x')| / |x - x'|`` of the worst of some pairs, half of which lie close together."""
    quotients = []
    for number in range(settings.pairs):
        x = rng.standard_normal(settings.size)
        other = x + (0.01 if number % 2 else 1.0) * rng.standard_normal(settings.size)
        moved = minimiser(problem, x) - minimiser(problem, other)
        quotients.append(np.linalg.norm(moved) / np.linalg.norm(x - other))
    return float(max(quotients))
