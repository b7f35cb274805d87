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

    P, Q, R and S are ``outer_left``, ``inner_left``, ``outer_right`` and ``inner_right``. In shapes, ``left`` is the
    number of entries of x, ``right`` that of y, and ``meeting`` that of A(x) and of B(y).

    The paper's function also has a term h(x), which does not change the minimiser in y and is left out here. The inner
    product is not convex, so that strong convexity in y has to come from ``decay``.
    """

    outer_left: Float[np.ndarray, "meeting left"]
    inner_left: Float[np.ndarray, "left left"]
    outer_right: Float[np.ndarray, "meeting right"]
    inner_right: Float[np.ndarray, "right right"]
    decay: float

    def left(self, x: Left) -> Meeting:
        """Return ``A(x) = P sin(Q x)``, the left side of the inner product ``<A(x), B(y)>``."""
        return self.outer_left @ np.sin(self.inner_left @ x)

    def right(self, y: Right) -> Meeting:
        """Return ``B(y) = R tanh(S y)``, the right side of the inner product ``<A(x), B(y)>``."""
        return self.outer_right @ np.tanh(self.inner_right @ y)

    def value(self, x: Left, y: Right) -> float:
        """Return ``decay / 2 |y|^2 + <A(x), B(y)>``."""
        return float(self.decay / 2 * y @ y + self.left(x) @ self.right(y))

    @property
    def left_lipschitz(self) -> float:
        """Bound ``|P| |Q|`` on the Lipschitz constant L_A of ``A(x) = P sin(Q x)``, with spectral norms."""
        return _spectral_norm(self.outer_left) * _spectral_norm(self.inner_left)

    @property
    def right_lipschitz(self) -> float:
        """Bound ``|R| |S|`` on the Lipschitz constant L_B of ``B(y) = R tanh(S y)``, with spectral norms."""
        return _spectral_norm(self.outer_right) * _spectral_norm(self.inner_right)

    @property
    def max_negative_curvature(self) -> float:
        """Number c such that no eigenvalue of the Hessian of ``<A(x), B(y)>`` in y is below -c, for all x and y.

        The Hessian is ``S^T diag(tanh''(S y) * R^T A(x)) S``. An entry of ``R^T A(x)`` is at most ``|A(x)|`` times the
        norm of a column of R. ``|A(x)|`` is at most ``|P| sqrt(left)``, since every sine is at most 1.
        """
        num_sines = self.inner_left.shape[0]  # left
        max_left_norm = _spectral_norm(self.outer_left) * np.sqrt(num_sines)  # |P| sqrt(left)
        max_column_norm = float(np.linalg.norm(self.outer_right, axis=0).max())  # of R
        return float(MAX_TANH_CURVATURE * max_left_norm * max_column_norm * _spectral_norm(self.inner_right) ** 2)

    @property
    def modulus(self) -> float:
        """Lower bound mu on the eigenvalues of the Hessian in y, for all x and y.

        This is Assumption 2 of the version of CoMiGS before ICML. The term ``decay / 2 |y|^2`` adds ``decay`` to every
        eigenvalue, and ``<A(x), B(y)>`` subtracts at most ``max_negative_curvature``. If mu is positive, the function
        is strongly convex in y; else it may or may not be.
        """
        return self.decay - self.max_negative_curvature

    @property
    def lipschitz(self) -> float:
        """Bound ``L_A L_B / mu`` on the Lipschitz constant of the minimiser u_1(x) (the earlier version's eq. 14)."""
        return self.left_lipschitz * self.right_lipschitz / self.modulus


def minimiser(problem: Coupled, x: Left) -> Right:
    """Return the y that minimises ``f(x, y) = decay / 2 |y|^2 + <A(x), R tanh(S y)>`` for a given x.

    This y is the only root of the gradient ``decay y + S^T diag(1 - tanh^2(S y)) R^T A(x)``.

    Args:
        problem: The function f, strongly convex in y.
        x: The given x.

    Raises:
        DivergenceError: scipy found no root.
    """
    coefficients = problem.outer_right.T @ problem.left(x)  # R^T A(x): f has the term <R^T A(x), tanh(S y)>
    s = problem.inner_right
    decay = problem.decay

    def gradient(y: Right) -> Right:
        return decay * y + s.T @ ((1 - np.tanh(s @ y) ** 2) * coefficients)

    def hessian(y: Right) -> Float[np.ndarray, "right right"]:
        tanh = np.tanh(s @ y)
        second_derivative = -2 * tanh * (1 - tanh**2)  # of tanh
        return decay * np.eye(len(y)) + s.T @ np.diag(second_derivative * coefficients) @ s

    start = np.zeros(s.shape[1])
    solution = optimize.root(gradient, start, jac=hessian, method="hybr", options={"xtol": 1e-14})
    remaining_gradient = float(np.abs(gradient(solution.x)).max())
    is_root = remaining_gradient < _GRADIENT_TOLERANCE * max(1.0, decay)  # False for nan
    if not is_root:
        raise DivergenceError(
            f"a coupled minimum: the gradient stays at {remaining_gradient:.1e}; {_GRADIENT_TOLERANCE:.0e} is allowed"
        )
    return solution.x


def alternate_coupled(
    first: Coupled, second: Coupled, initial_x: Left, steps: int
) -> Float[np.ndarray, "steps_and_start left"]:
    """Minimise two functions in turn (CoMiGS, eq. 7); return the initial x and the x after each step.

    A step is ``y = u_1(x)``, then ``x = u_2(y)`` with the minimisers u_1 and u_2 of the two functions.

    Args:
        first: The function of x and y that is minimised in y.
        second: The function of y and x that is minimised in x.
        initial_x: The initial x.
        steps: Number of steps, each of two minimisations.
    """
    xs = [initial_x]
    for _ in range(steps):
        y = minimiser(first, xs[-1])
        xs.append(minimiser(second, y))
    return np.stack(xs)


def draw_coupled(rng: np.random.Generator, left: int, right: int, meeting: int, lipschitz: float) -> Coupled:
    """Draw ``f(x, y) = decay / 2 |y|^2 + <A(x), B(y)>`` with ``A(x) = P sin(Q x)`` and ``B(y) = R tanh(S y)``.

    P, Q, R and S are random matrices of norm 1. The decay is chosen so that the bound ``L_A L_B / mu`` on the Lipschitz
    constant of f's minimiser y, as a function of x, is ``lipschitz``.

    Args:
        rng: Source of the draws.
        left: Number of entries of x.
        right: Number of entries of y.
        meeting: Number of entries of A(x) and of B(y).
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
    # L_A and L_B are the Lipschitz constants of A and B, and mu is the strong convexity of f in y.
    wanted_mu = without_decay.left_lipschitz * without_decay.right_lipschitz / lipschitz
    # mu is the decay minus the largest negative curvature of <A(x), B(y)> in y.
    decay = without_decay.max_negative_curvature + wanted_mu
    return Coupled(**matrices, decay=decay)


def _spectral_norm(matrix: Matrix) -> float:
    """Return the largest singular value of a matrix."""
    return float(linalg.norm(matrix, 2))


P1, P2 = "earlier Proposition 1, |u(x) - u(x')|", "earlier Proposition 2, λ_1 λ_2"
_STEPS_TO_FIXED_POINT = 200
"""Steps from the last point of a run to the fixed point from which distances are measured."""


@dataclass(frozen=True, kw_only=True)
class CoupledSettings:
    """Settings of random functions ``f(x, y) = decay / 2 |y|^2 + <A(x), B(y)>``, see :class:`Coupled`.

    Args:
        instances: Number of random pairs of functions for each constant in ``lipschitz``.
        size: Number of entries of x and of y.
        meeting: Number of entries of A(x) and of B(y).
        lipschitz: Constants ``L_A L_B / mu``; below 1 Proposition 1 promises a contraction.
        pairs: Number of random pairs of points at which the propositions are checked.
        steps: Number of alternating minimisations.
    """

    instances: int
    size: int
    meeting: int
    lipschitz: Sequence[float]
    pairs: int
    steps: int


def coupled_curves(seed: int, settings: CoupledSettings) -> Iterator[Curve]:
    """Minimise random pairs of functions alternately, and yield how fast each pair reaches its fixed point.

    Both functions of a pair have the form ``f(x, y) = decay / 2 |y|^2 + <A(x), B(y)>``. A step minimises the first over
    y at the current x, and then the second at that y, which gives the next x. The paper proves that x converges if the
    constants ``L_A L_B / mu`` of both functions (``settings.lipschitz``) are below 1.

    Args:
        seed: Seed of the random streams.
        settings: Sizes of the functions, the constants, and the number of pairs (``instances``) for each constant.

    Yields:
        For each constant and pair the distances of x from the fixed point, at the start and after each step. Pairs with
        the same number have the same matrices in A and B for all constants; they differ in ``decay`` alone.
    """
    size, inner_size = settings.size, settings.meeting
    stream_of_coupled = 3  # number of the random streams of this function
    for lipschitz in settings.lipschitz:
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, stream_of_coupled, instance])
            first = draw_coupled(rng, size, size, inner_size, lipschitz)
            second = draw_coupled(rng, size, size, inner_size, lipschitz)
            start = 3 * rng.standard_normal(size)
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

    Proposition 1 bounds the Lipschitz constant of a function's minimiser. Proposition 2 bounds the factor by which a
    step multiplies the distance of x from the fixed point, which is the curve's residual.

    Args:
        scheme: Name of the kind of problem, by which curves are grouped.
        instance: Index of the random problem among those of its kind.
        first: The function that is minimised in y.
        second: The function that is minimised in x.
        start: The initial x.
        settings: ``steps``, and the number ``pairs`` of points at which the Lipschitz constant is measured.
        rng: Generator of these pairs.

    Raises:
        DivergenceError: scipy did not find a minimiser.
    """
    rate = first.lipschitz * second.lipschitz
    is_contraction = rate < 1  # as Proposition 2 requires
    rate_bound = rate if is_contraction else None
    points = alternate_coupled(first, second, start, settings.steps)
    fixed_point = alternate_coupled(first, second, points[-1], _STEPS_TO_FIXED_POINT)[-1]
    distances = np.linalg.norm(points - fixed_point, axis=1)
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, distances)),
        claims=(
            Claim(statement=P1, measured=largest_quotient(first, settings, rng), bound=first.lipschitz),
            Claim(statement=P2, measured=largest_step_ratio(distances), bound=rate_bound),
        ),
        rates={} if rate_bound is None else {P2: rate_bound},
        notes={"mu": first.modulus, "decay": first.decay},
    )


def largest_quotient(problem: Coupled, settings: CoupledSettings, rng: np.random.Generator) -> float:
    """Return the largest ``|u(x) - u(x')| / |x - x'|`` of random pairs, an estimate of the Lipschitz constant of u.

    Args:
        problem: The function whose minimiser in y, for a given x, is u(x).
        settings: The settings, with the number of pairs.
        rng: Source of the draws.
    """
    quotients = []
    for pair in range(settings.pairs):
        is_close = pair % 2 == 1  # the quotients of close pairs approach the local slope of u
        scale = 0.01 if is_close else 1.0
        x = rng.standard_normal(settings.size)
        other_x = x + scale * rng.standard_normal(settings.size)
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
        """Return the objective ``<H (z - c), z - c> / 2`` at ``z = (experts, router)``; c is its minimiser."""
        offset = np.concatenate([experts, router]) - self.centre  # z - c
        return float(offset @ self.hessian @ offset / 2)


def best_router(valid: Quadratic, experts: Float[np.ndarray, " experts"]) -> Float[np.ndarray, " router"]:
    """Return the router that minimises the validation objective for given experts (CoMiGS, eq. 12).

    The router is ``phi* - B^-1 C (theta - theta*)`` with the objective's minimiser ``(theta*, phi*)`` and blocks of its
    Hessian ``[[A, C^T], [C, B]]``.

    Args:
        valid: The validation objective.
        experts: The given experts theta.
    """
    best_theta, best_phi = np.split(valid.centre, [valid.experts_size])  # theta*, phi*
    gradient = valid.cross_block @ (experts - best_theta)  # in the router, at phi*
    return best_phi - linalg.solve(valid.router_block, gradient, assume_a="pos")


def best_experts(train: Quadratic, router: Float[np.ndarray, " router"]) -> Float[np.ndarray, " experts"]:
    """Return the experts that minimise the training objective for a given router (CoMiGS, eq. 12).

    The experts are ``theta* - A^-1 C^T (phi - phi*)`` with the objective's minimiser ``(theta*, phi*)`` and blocks of
    its Hessian ``[[A, C^T], [C, B]]``.

    Args:
        train: The training objective.
        router: The given router phi.
    """
    best_theta, best_phi = np.split(train.centre, [train.experts_size])  # theta*, phi*
    gradient = train.cross_block.T @ (router - best_phi)  # in the experts, at theta*
    return best_theta - linalg.solve(train.experts_block, gradient, assume_a="pos")


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
        The initial experts and those after each step, and the router of each step.
    """
    thetas, phis = [experts], []
    for _ in range(steps):
        phis.append(best_router(valid, thetas[-1]))
        thetas.append(best_experts(train, phis[-1]))
    return np.stack(thetas), np.stack(phis)


def step_matrix(valid: Quadratic, train: Quadratic) -> Float[np.ndarray, "experts experts"]:
    """Return the matrix that maps a change of the experts to the change after one alternation (CoMiGS, eq. 18).

    A step takes the best router on the validation objective, then the best experts on the training objective. With
    Hessians ``[[A, C^T], [C, B]]`` the matrix is ``A^-1 C^T B^-1 C``: ``B^-1 C`` of the validation objective, ``A^-1
    C^T`` of the training objective.
    """
    router_change = linalg.solve(valid.router_block, valid.cross_block, assume_a="pos")  # B^-1 C
    return linalg.solve(train.experts_block, train.cross_block.T @ router_change, assume_a="pos")


def fixed_point(
    valid: Quadratic, train: Quadratic
) -> tuple[Float[np.ndarray, " experts"], Float[np.ndarray, " router"]]:
    """Return experts and router that a step of the alternation does not change (CoMiGS, Assumption 1, eq. 5 and 15).

    A step takes the best router for the experts, then the best experts for this router: ``T(Theta) = M Theta + T(0)``
    with the matrix M of a step. So the fixed experts solve ``(I - M) Theta = T(0)``.

    Args:
        valid: The validation objective, which the router minimises.
        train: The training objective, which the experts minimise.
    """
    zero_experts = np.zeros(train.experts_size)
    step_from_zero = best_experts(train, best_router(valid, zero_experts))  # T(0)
    experts = linalg.solve(np.eye(train.experts_size) - step_matrix(valid, train), step_from_zero)
    return experts, best_router(valid, experts)


@dataclass(frozen=True, kw_only=True)
class QuadraticConstants:
    """The constants of CoMiGS's Theorem F.1 and Example 1.

    ``router_lipschitz`` and ``experts_lipschitz`` are lambda_1 and lambda_2 of eq. 6 in the norms ``|Theta|_A`` (A of
    train) and ``|Phi|_B`` (B of valid); the two ``euclidean_...`` are the same in Euclidean norms.
    ``smallest_eigenvalue`` and ``largest_eigenvalue`` are the mu and L of eq. 19, over both Hessians.
    """

    router_lipschitz: float
    experts_lipschitz: float
    euclidean_router_lipschitz: float
    euclidean_experts_lipschitz: float
    smallest_eigenvalue: float
    largest_eigenvalue: float
    same_function: bool

    @property
    def rate(self) -> float:
        """Bound ``lambda_1 lambda_2`` (CoMiGS, Theorem F.1) on the factor by which a step multiplies distances.

        lambda_1 and lambda_2 are the Lipschitz constants of the best router, as a function of the experts, and of the
        best experts, as a function of the router. Convergence is proved if the bound is below 1.
        """
        return self.router_lipschitz * self.experts_lipschitz

    @property
    def example_rate(self) -> float | None:
        """Bound ``(L - mu) / L`` of CoMiGS, Example 1, on the factor by which a step multiplies the experts' distance.

        mu and L are the smallest and the largest eigenvalue of the objective's Hessian ``[[A, C^T], [C, B]]``. The
        bound holds in the norm ``sqrt(<A Theta, Theta>)``; in the Euclidean norm, for which the paper states it, a step
        may even increase the distance. None if experts and router have different objectives.
        """
        if not self.same_function:
            return None
        return 1 - self.smallest_eigenvalue / self.largest_eigenvalue

    @property
    def wielandt_rate(self) -> float | None:
        """Bound ``((L - mu) / (L + mu))^2`` on the factor by which a step multiplies distances.

        It follows from Wielandt's inequality, and is the best bound in terms of the objective's smallest and largest
        curvature mu and L. None if experts and router have different objectives.
        """
        if not self.same_function:
            return None
        smallest, largest = self.smallest_eigenvalue, self.largest_eigenvalue
        return ((largest - smallest) / (largest + smallest)) ** 2


def quadratic_constants(valid: Quadratic, train: Quadratic) -> QuadraticConstants:
    """Return the constants in the bounds of CoMiGS's Theorem F.1 and Example 1, from the Hessians of two objectives.

    Each Hessian is ``[[A, C^T], [C, B]]``, with the curvature A in the experts and B in the router.

    - ``router_lipschitz`` (lambda_1) is the norm of ``B^-1 C``, the change of the best router with the experts.
    - ``experts_lipschitz`` (lambda_2) is the norm of ``A^-1 C^T``, the change of the best experts with the router.

    Both are operator norms between ``|Theta|_A = sqrt(<A Theta, Theta>)`` and ``|Phi|_B``, so they are the spectral
    norms of ``B^-1/2 C A^-1/2`` and ``A^-1/2 C^T B^-1/2``.

    Args:
        valid: The validation objective, which the router minimises.
        train: The training objective, which the experts minimise.
    """
    a_inverse_root = _inverse_root(train.experts_block)  # A^-1/2
    b_inverse_root = _inverse_root(valid.router_block)  # B^-1/2
    router_matrix = linalg.solve(valid.router_block, valid.cross_block, assume_a="pos")  # B^-1 C
    experts_matrix = linalg.solve(train.experts_block, train.cross_block.T, assume_a="pos")  # A^-1 C^T
    eigenvalues = np.concatenate([linalg.eigvalsh(valid.hessian), linalg.eigvalsh(train.hessian)])
    return QuadraticConstants(
        router_lipschitz=_spectral_norm(b_inverse_root @ valid.cross_block @ a_inverse_root),
        experts_lipschitz=_spectral_norm(a_inverse_root @ train.cross_block.T @ b_inverse_root),
        euclidean_router_lipschitz=_spectral_norm(router_matrix),
        euclidean_experts_lipschitz=_spectral_norm(experts_matrix),
        smallest_eigenvalue=float(eigenvalues.min()),
        largest_eigenvalue=float(eigenvalues.max()),
        same_function=np.array_equal(valid.hessian, train.hessian),
    )


def energy_norms(
    vectors: Float[np.ndarray, "vectors size"], curvature: Float[np.ndarray, "size size"]
) -> Float[np.ndarray, " vectors"]:
    """Return the norm ``sqrt(<A x, x>)`` of each vector x, with A a positive definite ``curvature``."""
    return np.sqrt(np.einsum("ki,ij,kj->k", vectors, curvature, vectors))


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
    eigenvalues = condition**exponents
    eigenvectors, _ = np.linalg.qr(rng.standard_normal((size, size)))
    hessian = (eigenvectors * eigenvalues) @ eigenvectors.T
    symmetric_hessian = (hessian + hessian.T) / 2  # up to rounding, ``hessian`` is symmetric already
    return Quadratic(hessian=symmetric_hessian, centre=rng.standard_normal(size), experts_size=experts_size)


def interpolate(quadratic: Quadratic, other: Quadratic, mismatch: float) -> Quadratic:
    """Interpolate two quadratics' Hessians and minimisers: ``mismatch`` 0 gives the first, 1 the second.

    Args:
        quadratic: The first quadratic.
        other: The second quadratic.
        mismatch: The weight of the second.
    """
    if mismatch == 0:
        return quadratic  # without rounding, so that both objectives are one function, as in CoMiGS's Example 1
    return Quadratic(
        hessian=(1 - mismatch) * quadratic.hessian + mismatch * other.hessian,
        centre=(1 - mismatch) * quadratic.centre + mismatch * other.centre,
        experts_size=quadratic.experts_size,
    )


def _inverse_root(matrix: Matrix) -> Matrix:
    """Return ``M^-1/2``, the inverse of the symmetric square root of a positive definite matrix M."""
    eigenvalues, eigenvectors = linalg.eigh(matrix)
    return (eigenvectors / np.sqrt(eigenvalues)) @ eigenvectors.T
