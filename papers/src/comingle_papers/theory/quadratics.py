"""Alternation on quadratics (CoMiGS Theorem F.1, Example 1) and on coupled variables (before ICML, App. G.2).

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
from comingle_papers.theory.claims import Claim, Curve, largest_step_ratio

Left = Float[np.ndarray, " left"]
Right = Float[np.ndarray, " right"]
Meeting = Float[np.ndarray, " meeting"]
Matrix = Float[np.ndarray, "rows columns"]

MAX_TANH_CURVATURE = 4 / (3 * np.sqrt(3))
"""The largest ``|tanh''|``."""
_GRADIENT_TOLERANCE = 1e-11
"""Largest absolute entry of the gradient at a minimum, relative to the decay where that is above 1."""


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
        """Return A(x), shape (meeting)."""
        return self.outer_left @ np.sin(self.inner_left @ x)

    def right(self, y: Right) -> Meeting:
        """Return B(y), shape (meeting)."""
        return self.outer_right @ np.tanh(self.inner_right @ y)

    def value(self, x: Left, y: Right) -> float:
        """Return ``decay / 2 |y|^2 + <A(x), B(y)>``."""
        return float(self.decay / 2 * y @ y + self.left(x) @ self.right(y))

    @property
    def left_lipschitz(self) -> float:
        """Bound ``|P| |Q|`` on the Lipschitz constant L_A of A(x)."""
        return _spectral_norm(self.outer_left) * _spectral_norm(self.inner_left)

    @property
    def right_lipschitz(self) -> float:
        """Bound ``|R| |S|`` on the Lipschitz constant L_B of B(y)."""
        return _spectral_norm(self.outer_right) * _spectral_norm(self.inner_right)

    @property
    def max_negative_curvature(self) -> float:
        """Number c such that no eigenvalue of the Hessian of ``<A(x), B(y)>`` in y is below -c, for all x and y.

        The Hessian is ``S^T diag(tanh''(S y) * R^T A(x)) S``. An entry of ``R^T A(x)`` is at most ``|A(x)|`` times the
        norm of a column of R. ``|A(x)|`` is at most ``|P| sqrt(left)``, since every sine is at most 1.
        """
        max_left_norm = _spectral_norm(self.outer_left) * np.sqrt(self.inner_left.shape[0])
        max_column_norm = float(np.linalg.norm(self.outer_right, axis=0).max())  # of R
        return float(MAX_TANH_CURVATURE * max_left_norm * max_column_norm * _spectral_norm(self.inner_right) ** 2)

    @property
    def modulus(self) -> float:
        """Lower bound mu on the strong convexity in y, for every x (the earlier version's Assumption 2).

        A bound that is not positive proves nothing.
        """
        return self.decay - self.max_negative_curvature

    @property
    def lipschitz(self) -> float:
        """Bound ``L_A L_B / mu`` on the Lipschitz constant of the minimiser u_1(x) (the earlier version's eq. 14)."""
        return self.left_lipschitz * self.right_lipschitz / self.modulus


def minimiser(problem: Coupled, x: Left) -> Right:
    """Return the y that minimises ``f(x, y) = decay / 2 |y|^2 + <A(x), R tanh(S y)>`` for a given x.

    This y is the only root of the gradient ``decay y + S^T diag(1 - tanh^2(S y)) R^T A(x)``, found numerically.

    Args:
        problem: The function f, strongly convex in y.
        x: The given x.

    Raises:
        DivergenceError: scipy found no root.
    """
    coefficients = problem.outer_right.T @ problem.left(x)  # R^T A(x): f has the term <R^T A(x), tanh(S y)>
    inner = problem.inner_right  # S

    def gradient(y: Right) -> Right:
        return problem.decay * y + inner.T @ ((1 - np.tanh(inner @ y) ** 2) * coefficients)

    def hessian(y: Right) -> Float[np.ndarray, "right right"]:
        tanh = np.tanh(inner @ y)
        return problem.decay * np.eye(len(y)) + inner.T @ np.diag(-2 * tanh * (1 - tanh**2) * coefficients) @ inner

    solution = optimize.root(gradient, np.zeros(inner.shape[1]), jac=hessian, method="hybr", options={"xtol": 1e-14})
    remaining_gradient = float(np.abs(gradient(solution.x)).max())
    if not remaining_gradient < _GRADIENT_TOLERANCE * max(1.0, problem.decay):
        raise DivergenceError(
            f"a coupled minimum: the gradient stays at {remaining_gradient:.1e}; {_GRADIENT_TOLERANCE:.0e} is allowed"
        )
    return solution.x


def alternate_coupled(
    first: Coupled, second: Coupled, x: Left, steps: int
) -> Float[np.ndarray, "steps_and_start left"]:
    """Minimise two functions in turn (CoMiGS, eq. 7); return the initial x and the x after each step.

    A step is ``y = u_1(x)``, then ``x = u_2(y)`` with the minimisers u_1 and u_2 of the two functions.

    Args:
        first: The function that is minimised in y for a given x.
        second: The function that is minimised in x for a given y. As :func:`minimiser` minimises in the second
            variable, this function takes y first, then x.
        x: The initial x.
        steps: Number of steps, each of two minimisations.
    """
    points = [x]
    for _ in range(steps):
        points.append(minimiser(second, minimiser(first, points[-1])))
    return np.stack(points)


def draw_coupled(rng: np.random.Generator, left: int, right: int, meeting: int, lipschitz: float) -> Coupled:
    """Draw ``f(x, y) = decay / 2 |y|^2 + <A(x), B(y)>`` with ``A(x) = P sin(Q x)`` and ``B(y) = R tanh(S y)``.

    P, Q, R and S are random matrices of norm 1. The y that minimises f is a function u(x). The decay is chosen so that
    the bound on the Lipschitz constant of u (an earlier version of CoMiGS's paper, eq. 14) has the wanted value.

    Args:
        rng: Source of the draws.
        left: Number of entries of x.
        right: Number of entries of y.
        meeting: Number of entries of A(x), and likewise of B(y), since f contains their scalar product.
        lipschitz: The wanted bound (:attr:`Coupled.lipschitz`).
    """

    def draw_matrix(rows: int, columns: int) -> Matrix:
        matrix = rng.standard_normal((rows, columns))
        return matrix / _spectral_norm(matrix)

    matrices = {
        "outer_left": draw_matrix(meeting, left),  # P
        "inner_left": draw_matrix(left, left),  # Q
        "outer_right": draw_matrix(meeting, right),  # R
        "inner_right": draw_matrix(right, right),  # S
    }
    without_decay = Coupled(**matrices, decay=0.0)
    # The bound is L_A L_B / mu, with the Lipschitz constants of A and B and the strong convexity mu of f in y.
    wanted_convexity = without_decay.left_lipschitz * without_decay.right_lipschitz / lipschitz
    # The scalar product may curve f down by ``max_negative_curvature``, for which the decay makes up.
    return Coupled(**matrices, decay=without_decay.max_negative_curvature + wanted_convexity)


def _spectral_norm(matrix: Matrix) -> float:
    """Return the largest singular value of a matrix."""
    return float(linalg.norm(matrix, 2))


P1, P2 = "earlier Proposition 1, |u(x) - u(x')|", "earlier Proposition 2, λ_1 λ_2"
_STEPS_TO_FIXED_POINT = 200
"""Steps from the last point of a run to the fixed point from which distances are measured."""


@dataclass(frozen=True, kw_only=True)
class CoupledSettings:
    """Settings of the coupled functions. ``lipschitz``: L_A L_B / mu; below 1 Proposition 1 promises a contraction."""

    instances: int
    size: int
    meeting: int
    lipschitz: Sequence[float]
    pairs: int
    steps: int


def coupled_curves(seed: int, settings: CoupledSettings) -> Iterator[Curve]:
    """Minimise random pairs of coupled functions in turn, and yield the curve of each pair and Lipschitz constant.

    A curve has the distance from the solution before every step. A pair ("instance") has the same random stream for all
    Lipschitz constants, so its functions differ only in their decay.

    Args:
        seed: Seed of the random streams.
        settings: Settings of the coupled functions ``f(x, y) = decay / 2 |y|^2 + <A(x), B(y)>``: ``size`` is the number
            of entries of x and of y, ``meeting`` that of A(x) and B(y), ``lipschitz`` the constants ``L_A L_B / mu``.
    """
    for lipschitz in settings.lipschitz:
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, 3, instance])  # 3: the random streams of coupled functions
            sizes = settings.size, settings.size, settings.meeting
            first, second = (draw_coupled(rng, *sizes, lipschitz) for _ in range(2))
            start = 3 * rng.standard_normal(settings.size)
            yield coupled_curve(f"coupled, L_A L_B / μ = {lipschitz:g}", instance, first, second, start, settings, rng)


def coupled_curve(
    scheme: str,
    instance: int,
    first: Coupled,
    second: Coupled,
    start: np.ndarray,
    settings: CoupledSettings,
    rng: np.random.Generator,
) -> Curve:
    """Minimise two functions in turn, and check Propositions 1 and 2 of an earlier version of CoMiGS's paper.

    Proposition 1 bounds the Lipschitz constant of a minimiser, here measured on random pairs of points. Proposition 2
    bounds the factor by which the distance of x from the fixed point shrinks in one step. The curve's residual is this
    distance from the fixed point.

    Args:
        scheme: Name of the kind of problem.
        instance: Number of the random problem.
        first: The function that is minimised in y.
        second: The function that is minimised in x.
        start: The initial x.
        settings: Steps, sizes and number of pairs.
        rng: Generator of the random pairs.

    Raises:
        DivergenceError: scipy did not find a minimiser.
    """
    rate = first.lipschitz * second.lipschitz
    rate_bound = rate if rate < 1 else None  # Proposition 2 requires a contraction
    points = alternate_coupled(first, second, start, settings.steps)
    fixed_point = alternate_coupled(first, second, points[-1], _STEPS_TO_FIXED_POINT)[-1]
    residuals = np.linalg.norm(points - fixed_point, axis=1)
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, residuals)),
        claims=(
            Claim(statement=P1, measured=largest_quotient(first, settings, rng), bound=first.lipschitz),
            Claim(statement=P2, measured=largest_step_ratio(residuals), bound=rate_bound),
        ),
        rates={} if rate_bound is None else {P2: rate_bound},
        notes={"mu": first.modulus, "decay": first.decay},
    )


def largest_quotient(problem: Coupled, settings: CoupledSettings, rng: np.random.Generator) -> float:
    """Return the largest ``|u(x) - u(x')| / |x - x'|`` of random pairs, an estimate of the Lipschitz constant of u.

    Every second pair is close together, where the quotient approaches the local slope of u.

    Args:
        problem: The function whose minimiser is u.
        settings: The settings, with the number of pairs.
        rng: Source of the draws.
    """
    quotients = []
    for pair in range(settings.pairs):
        distance = 0.01 if pair % 2 else 1.0
        x = rng.standard_normal(settings.size)
        other_x = x + distance * rng.standard_normal(settings.size)
        minimiser_difference = minimiser(problem, x) - minimiser(problem, other_x)
        quotients.append(np.linalg.norm(minimiser_difference) / np.linalg.norm(x - other_x))
    return float(max(quotients))


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """``f(theta, phi) = <H (z - c), z - c> / 2`` with ``z = (theta, phi)``: Example 1, moved to the minimiser c.

    The first ``experts_size`` coordinates are theta. In the paper's letters ``H = [[A, C^T], [C, B]]``.
    """

    hessian: Float[np.ndarray, "size size"]
    centre: Float[np.ndarray, " size"]
    experts_size: int

    @property
    def experts_block(self) -> Matrix:
        """Block A of the Hessian: second derivatives in the experts theta."""
        return self.hessian[: self.experts_size, : self.experts_size]

    @property
    def router_block(self) -> Matrix:
        """Block B of the Hessian: second derivatives in the router phi."""
        return self.hessian[self.experts_size :, self.experts_size :]

    @property
    def cross_block(self) -> Matrix:
        """Block C of the Hessian: mixed second derivatives, rows of the router phi, columns of the experts theta."""
        return self.hessian[self.experts_size :, : self.experts_size]

    def value(self, experts: Float[np.ndarray, " experts"], router: Float[np.ndarray, " router"]) -> float:
        """Return ``<H (z - c), z - c> / 2`` at ``z = (experts, router)``."""
        away = np.concatenate([experts, router]) - self.centre
        return float(away @ self.hessian @ away / 2)


def best_router(valid: Quadratic, experts: Float[np.ndarray, " experts"]) -> Float[np.ndarray, " router"]:
    """Return the router that minimises the validation objective for given experts (CoMiGS, eq. 12).

    The router is ``phi* - B^-1 C (theta - theta*)`` with the objective's minimiser ``(theta*, phi*)`` and blocks of its
    Hessian ``[[A, C^T], [C, B]]``.

    Args:
        valid: The validation objective.
        experts: The given experts theta.
    """
    experts_centre, router_centre = np.split(valid.centre, [valid.experts_size])
    gradient = valid.cross_block @ (experts - experts_centre)  # in the router, at phi*
    return router_centre - linalg.solve(valid.router_block, gradient, assume_a="pos")


def best_experts(train: Quadratic, router: Float[np.ndarray, " router"]) -> Float[np.ndarray, " experts"]:
    """Return the experts that minimise the training objective for a given router (CoMiGS, eq. 12).

    The experts are ``theta* - A^-1 C^T (phi - phi*)`` with the objective's minimiser ``(theta*, phi*)`` and blocks of
    its Hessian ``[[A, C^T], [C, B]]``.

    Args:
        train: The training objective.
        router: The given router phi.
    """
    experts_centre, router_centre = np.split(train.centre, [train.experts_size])
    gradient = train.cross_block.T @ (router - router_centre)  # in the experts, at theta*
    return experts_centre - linalg.solve(train.experts_block, gradient, assume_a="pos")


def alternate(
    valid: Quadratic, train: Quadratic, experts: Float[np.ndarray, " experts"], steps: int
) -> tuple[Float[np.ndarray, "steps_and_start experts"], Float[np.ndarray, "steps router"]]:
    """Minimise by router and by experts in turn (CoMiGS, eq. 12), from given experts.

    In each step the router minimises the validation objective, then the experts minimise the training objective.

    Args:
        valid: The validation objective.
        train: The training objective.
        experts: The initial experts.
        steps: Number of steps.

    Returns:
        Experts ``Theta_0 .. Theta_steps`` and routers ``Phi_1 .. Phi_steps``; there is no ``Phi_0``.
    """
    thetas, phis = [experts], []
    for _ in range(steps):
        phis.append(best_router(valid, thetas[-1]))
        thetas.append(best_experts(train, phis[-1]))
    return np.stack(thetas), np.stack(phis)


def composition(valid: Quadratic, train: Quadratic) -> Float[np.ndarray, "experts experts"]:
    """Return the matrix of one whole step from experts to experts, ``T = u_2 u_1`` without its constant part.

    u_1 maps experts to the router that is best on the validation objective. u_2 maps a router to the experts that are
    best on the training objective. The matrix (CoMiGS, eq. 18) is ``A^-1 C^T B^-1 C`` with A, the curvature in the
    experts, and C^T of the training objective, and B, the curvature in the router, and C, the mixed one, of the
    validation objective.
    """
    inner = linalg.solve(valid.router_block, valid.cross_block, assume_a="pos")
    return linalg.solve(train.experts_block, train.cross_block.T @ inner, assume_a="pos")


def fixed_point(
    valid: Quadratic, train: Quadratic
) -> tuple[Float[np.ndarray, " experts"], Float[np.ndarray, " router"]]:
    """Return experts and router that a step of the alternation does not change (CoMiGS, Assumption 1, eq. 5 and 15).

    A step takes the best router for the experts, ``u_1(Theta)``, then the best experts for this router, ``T(Theta) =
    u_2(u_1(Theta))``. T is affine, so the fixed experts solve ``(I - matrix of T) Theta = T(0)``. A contraction always
    has a fixed point, so where Theorem F.1 applies, Assumption 1 asks for nothing more. If both objectives have the
    same minimiser, the fixed point is that minimiser. Otherwise it minimises neither, contrary to the text below eq. 5.

    Args:
        valid: The validation objective, which the router minimises.
        train: The training objective, which the experts minimise.
    """
    zero_experts = np.zeros(train.experts_size)
    offset = best_experts(train, best_router(valid, zero_experts))  # T(0)
    experts = linalg.solve(np.eye(train.experts_size) - composition(valid, train), offset)
    return experts, best_router(valid, experts)


@dataclass(frozen=True, kw_only=True)
class QuadraticConstants:
    """The constants of CoMiGS's Theorem F.1 and Example 1.

    ``router_lipschitz`` and ``experts_lipschitz`` are lambda_1 and lambda_2 of eq. 6 in the norms ``|Theta|_A`` (A of
    train) and ``|Phi|_B`` (B of valid); the two ``euclidean_...`` are the same in Euclidean norms. ``smallest`` and
    ``largest`` are the mu and L of eq. 19, over both Hessians.
    """

    router_lipschitz: float
    experts_lipschitz: float
    euclidean_router_lipschitz: float
    euclidean_experts_lipschitz: float
    smallest: float
    largest: float
    same_function: bool

    @property
    def rate(self) -> float:
        """Bound ``lambda_1 lambda_2`` (CoMiGS, Theorem F.1) on the factor by which a step multiplies distances.

        The bound proves convergence if it is below 1.
        lambda_1 and lambda_2 are the Lipschitz constants of the best router, as a function of the experts, and of the
        best experts, as a function of the router. With one function for both steps the bound is the spectral radius of
        a whole step's matrix (:func:`composition`), so it cannot be improved.
        """
        return self.router_lipschitz * self.experts_lipschitz

    @property
    def example_rate(self) -> float | None:
        """Bound ``(L - mu) / L`` of CoMiGS, Example 1, on the factor by which a step multiplies the experts' distance.

        mu and L are the smallest and the largest eigenvalue of the objective's Hessian ``[[A, C^T], [C, B]]``. The
        example has one objective for both half steps; None if the two objectives differ.

        A step multiplies the experts' offset from the solution by ``T = A^-1 M`` with ``M = C^T B^-1 C``. The paper
        states the bound for the spectral norm of T, which it takes to be that of ``A^-1/2 M A^-1/2``. But these two
        matrices are only similar: they share eigenvalues, not norms. So the bound holds for the spectral radius of T,
        and for the norm of T that belongs to ``|Theta|_A = sqrt(<A Theta, Theta>)``. In the Euclidean norm a step may
        even increase the distance.
        """
        return 1 - self.smallest / self.largest if self.same_function else None

    @property
    def wielandt_rate(self) -> float | None:
        """Bound ``((L - mu) / (L + mu))^2`` on the factor by which a step multiplies distances.

        The bound follows from Wielandt's inequality. It is the best bound that follows from the smallest curvature mu
        and the largest curvature L alone. None if the two objectives differ.
        """
        return ((self.largest - self.smallest) / (self.largest + self.smallest)) ** 2 if self.same_function else None


def quadratic_constants(valid: Quadratic, train: Quadratic) -> QuadraticConstants:
    """Return the constants in the bounds of CoMiGS's Theorem F.1 and Example 1, from the Hessians of two objectives.

    Each Hessian is ``[[A, C^T], [C, B]]``, with the curvature A in the experts and B in the router. Here A is from the
    training objective, which the experts minimise, and B from the validation objective, which the router minimises.

    - ``router_lipschitz`` is lambda_1, the norm of ``B^-1 C`` with C of valid. This matrix maps a change of the experts
      to the change of the best router.
    - ``experts_lipschitz`` is lambda_2, the norm of ``A^-1 C^T`` with C of train. This matrix maps a change of the
      router to the change of the best experts.
    - Both norms are operator norms between ``|Theta|_A = sqrt(<A Theta, Theta>)`` and ``|Phi|_B``. So lambda_1 is the
      spectral norm of ``B^1/2 (B^-1 C) A^-1/2 = B^-1/2 C A^-1/2``, and lambda_2 that of ``A^-1/2 C^T B^-1/2``.
    - ``euclidean_router_lipschitz`` and ``euclidean_experts_lipschitz`` are the spectral norms of ``B^-1 C`` and ``A^-1
      C^T`` themselves. Their product can exceed 1, which proves nothing, while ``lambda_1 lambda_2`` is far below 1.
    - ``smallest`` and ``largest`` are the extreme eigenvalues of the two Hessians.
    - ``same_function`` is whether the two Hessians are equal.

    Args:
        valid: The validation objective, which the router minimises.
        train: The training objective, which the experts minimise.
    """
    experts_inverse_root, router_inverse_root = _inverse_root(train.experts_block), _inverse_root(valid.router_block)
    router_map = linalg.solve(valid.router_block, valid.cross_block, assume_a="pos")
    experts_map = linalg.solve(train.experts_block, train.cross_block.T, assume_a="pos")
    eigenvalues = np.concatenate([linalg.eigvalsh(valid.hessian), linalg.eigvalsh(train.hessian)])
    return QuadraticConstants(
        router_lipschitz=_spectral_norm(router_inverse_root @ valid.cross_block @ experts_inverse_root),
        experts_lipschitz=_spectral_norm(experts_inverse_root @ train.cross_block.T @ router_inverse_root),
        euclidean_router_lipschitz=_spectral_norm(router_map),
        euclidean_experts_lipschitz=_spectral_norm(experts_map),
        smallest=float(eigenvalues.min()),
        largest=float(eigenvalues.max()),
        same_function=np.array_equal(valid.hessian, train.hessian),
    )


def energy_norms(
    rows: Float[np.ndarray, "rows size"], curvature: Float[np.ndarray, "size size"]
) -> Float[np.ndarray, " rows"]:
    """Return the norm ``sqrt(<A x, x>)`` of each row x, with A a positive definite ``curvature``."""
    return np.sqrt(np.einsum("ki,ij,kj->k", rows, curvature, rows))


def draw_quadratic(rng: np.random.Generator, experts_size: int, router_size: int, condition: float) -> Quadratic:
    """Draw a strictly convex quadratic with log-uniform eigenvalues from 1 to ``condition`` and a normal minimiser.

    Args:
        rng: Source of the draws.
        experts_size: Entries of theta.
        router_size: Entries of phi.
        condition: The largest eigenvalue.
    """
    size = experts_size + router_size
    # Exponents 0 and 1 make the smallest eigenvalue exactly 1 and the largest exactly ``condition``.
    exponents = np.concatenate([[0.0, 1.0], rng.uniform(size=size - 2)])
    basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
    hessian = (basis * condition**exponents) @ basis.T
    symmetric = (hessian + hessian.T) / 2  # without rounding errors
    return Quadratic(hessian=symmetric, centre=rng.standard_normal(size), experts_size=experts_size)


def interpolate(quadratic: Quadratic, other: Quadratic, mismatch: float) -> Quadratic:
    """Interpolate two quadratics' Hessians and minimisers: ``mismatch`` 0 gives the first, 1 the second.

    Args:
        quadratic: The first quadratic.
        other: The second quadratic.
        mismatch: The weight of the second.
    """
    if mismatch == 0:  # without rounding, since CoMiGS's Example 1 is about two equal functions
        return quadratic
    return Quadratic(
        hessian=(1 - mismatch) * quadratic.hessian + mismatch * other.hessian,
        centre=(1 - mismatch) * quadratic.centre + mismatch * other.centre,
        experts_size=quadratic.experts_size,
    )


def _inverse_root(matrix: Matrix) -> Matrix:
    """Return the inverse of the symmetric square root of a positive definite matrix."""
    values, vectors = linalg.eigh(matrix)
    return (vectors / np.sqrt(values)) @ vectors.T
