"""The alternating scheme on quadratics, with exact minimisers (CoMiGS eq. 5, 6, 12 to 19, Theorem F.1, Example 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import linalg

Matrix = Float[np.ndarray, "rows columns"]


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
        """A: curvature in theta."""
        return self.hessian[: self.experts_size, : self.experts_size]

    @property
    def router_block(self) -> Matrix:
        """B: curvature in phi."""
        return self.hessian[self.experts_size :, self.experts_size :]

    @property
    def cross_block(self) -> Matrix:
        """C: phi against theta."""
        return self.hessian[self.experts_size :, : self.experts_size]

    def value(self, experts: Float[np.ndarray, " experts"], router: Float[np.ndarray, " router"]) -> float:
        """The function's value."""
        away = np.concatenate([experts, router]) - self.centre
        return float(away @ self.hessian @ away / 2)


def best_router(valid: Quadratic, experts: Float[np.ndarray, " experts"]) -> Float[np.ndarray, " router"]:
    """``u_1``: the router that minimises the validation objective for given experts (first line of eq. 12)."""
    away = experts - valid.centre[: valid.experts_size]
    return valid.centre[valid.experts_size :] - linalg.solve(
        valid.router_block, valid.cross_block @ away, assume_a="pos"
    )


def best_experts(train: Quadratic, router: Float[np.ndarray, " router"]) -> Float[np.ndarray, " experts"]:
    """``u_2``: the experts that minimise the training objective for a given router (second line of eq. 12)."""
    away = router - train.centre[train.experts_size :]
    return train.centre[: train.experts_size] - linalg.solve(
        train.experts_block, train.cross_block.T @ away, assume_a="pos"
    )


def alternate(
    valid: Quadratic, train: Quadratic, experts: Float[np.ndarray, " experts"], steps: int
) -> tuple[Float[np.ndarray, "steps_and_start experts"], Float[np.ndarray, "steps router"]]:
    """Eq. 12 from given experts: ``Theta_0 .. Theta_steps`` and ``Phi_1 .. Phi_steps``. There is no ``Phi_0``."""
    thetas, phis = [experts], []
    for _ in range(steps):
        phis.append(best_router(valid, thetas[-1]))
        thetas.append(best_experts(train, phis[-1]))
    return np.stack(thetas), np.stack(phis)


def composition(valid: Quadratic, train: Quadratic) -> Float[np.ndarray, "experts experts"]:
    """The linear part of ``T = u_2 u_1`` (eq. 18): ``A^-1 C^T B^-1 C``, A and C^T of train, B and C of valid."""
    inner = linalg.solve(valid.router_block, valid.cross_block, assume_a="pos")
    return linalg.solve(train.experts_block, train.cross_block.T @ inner, assume_a="pos")


def fixed_point(
    valid: Quadratic, train: Quadratic
) -> tuple[Float[np.ndarray, " experts"], Float[np.ndarray, " router"]]:
    """The point of Assumption 1 (eq. 5 and 15): ``Theta = T(Theta)``, and ``Phi = u_1(Theta)``, so ``Phi = P(Phi)``.

    A contraction always has one, so where Theorem F.1 applies, Assumption 1 asks for nothing more. It is the common
    minimiser where both functions have the same; otherwise it minimises neither, unlike the text below eq. 5 says.
    """
    start = np.zeros(train.experts_size)
    offset = best_experts(train, best_router(valid, start))  # T(0)
    experts = linalg.solve(np.eye(train.experts_size) - composition(valid, train), offset)
    return experts, best_router(valid, experts)


@dataclass(frozen=True, kw_only=True)
class QuadraticConstants:
    """The constants of Theorem F.1 and of Example 1.

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
        """Theorem F.1: ``lambda_1 lambda_2``, a bound on each step's contraction; it says nothing from 1 on.

        With one function for both steps this is the spectral radius of T, so it cannot be improved.
        """
        return self.router_lipschitz * self.experts_lipschitz

    @property
    def example_rate(self) -> float | None:
        """Example 1: ``(L - mu) / L``, for one function only.

        The paper states it for the spectral norm, by ``|A^-1 M| = |A^-1/2 M A^-1/2|``. These two matrices are similar,
        so they share eigenvalues, not norms. The bound holds in the norm ``|Theta|_A``, in which the right-hand side is
        the norm of T, and for the spectral radius; a Euclidean step may even expand.
        """
        return 1 - self.smallest / self.largest if self.same_function else None

    @property
    def wielandt_rate(self) -> float | None:
        """``((L - mu) / (L + mu))^2``, by Wielandt's inequality: the best bound that mu and L alone allow."""
        return ((self.largest - self.smallest) / (self.largest + self.smallest)) ** 2 if self.same_function else None


def constants(valid: Quadratic, train: Quadratic) -> QuadraticConstants:
    """The constants of Theorem F.1 from the two Hessians.

    In energy norms ``|B^1/2 (B^-1 C) A^-1/2| = |B^-1/2 C A^-1/2|``, and alike for the other operator. The product of
    the Euclidean constants can exceed 1 where the product in energy norms is far below.
    """
    a_root, b_root = _inverse_root(train.experts_block), _inverse_root(valid.router_block)
    router = linalg.solve(valid.router_block, valid.cross_block, assume_a="pos")
    experts = linalg.solve(train.experts_block, train.cross_block.T, assume_a="pos")
    eigenvalues = np.concatenate([linalg.eigvalsh(valid.hessian), linalg.eigvalsh(train.hessian)])
    return QuadraticConstants(
        router_lipschitz=_norm(b_root @ valid.cross_block @ a_root),
        experts_lipschitz=_norm(a_root @ train.cross_block.T @ b_root),
        euclidean_router_lipschitz=_norm(router),
        euclidean_experts_lipschitz=_norm(experts),
        smallest=float(eigenvalues.min()),
        largest=float(eigenvalues.max()),
        same_function=np.array_equal(valid.hessian, train.hessian),
    )


def energy_norms(
    rows: Float[np.ndarray, "rows size"], curvature: Float[np.ndarray, "size size"]
) -> Float[np.ndarray, " rows"]:
    """``sqrt(<A x, x>)`` of each row x."""
    return np.sqrt(np.einsum("ki,ij,kj->k", rows, curvature, rows))


def draw_quadratic(rng: np.random.Generator, experts_size: int, router_size: int, condition: float) -> Quadratic:
    """A strictly convex quadratic with eigenvalues from 1 to ``condition``, log-uniform, and a normal minimiser."""
    size = experts_size + router_size
    exponents = np.concatenate([[0.0, 1.0], rng.uniform(size=size - 2)])
    basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
    hessian = (basis * condition**exponents) @ basis.T
    return Quadratic(hessian=(hessian + hessian.T) / 2, centre=rng.standard_normal(size), experts_size=experts_size)


def perturb(quadratic: Quadratic, other: Quadratic, mismatch: float) -> Quadratic:
    """A convex combination of two quadratics' Hessians and minimisers: ``mismatch`` 0 is the first, 1 the second."""
    if mismatch == 0:
        return quadratic
    return Quadratic(
        hessian=(1 - mismatch) * quadratic.hessian + mismatch * other.hessian,
        centre=(1 - mismatch) * quadratic.centre + mismatch * other.centre,
        experts_size=quadratic.experts_size,
    )


def _inverse_root(matrix: Matrix) -> Matrix:
    values, vectors = linalg.eigh(matrix)
    return (vectors / np.sqrt(values)) @ vectors.T


def _norm(matrix: Matrix) -> float:
    return float(linalg.norm(matrix, 2))
