"""The Hessian of the decoupled objective, and the rate that it predicts near a solution (CoMiGS eq. 26, Example 2)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy import linalg

from comingle.papers.theory.linear import LinearProblem, Point, router_curvature

Matrix = Float[np.ndarray, "rows columns"]


def hessian(problem: LinearProblem, point: Point) -> Float[np.ndarray, "size size"]:
    """Second derivatives of eq. 25 in (Theta, Phi, Lambda), row-major, the shares as free coordinates.

    With one sample this is the Hessian of eq. 26. In a direction (H, G, h) the loss contributes
    ``l'' (<h, Theta^T x> + <lambda, H^T x>)^2 + 2 l' <h, H^T x>``. The paper's proof of Proposition 1 has 1 in place of
    the last 2, and of the 2 inside the square.
    """
    top = linalg.block_diag(_experts_block(problem, point), router_curvature(problem, point.router))
    cross = _cross_block(problem, point)
    return np.block([[top, cross], [cross.T, _shares_block(problem, point)]])


def tangent_hessian(problem: LinearProblem, point: Point) -> Float[np.ndarray, "size size"]:
    """:func:`hessian` along the simplex: the directions of each sample's shares that sum to zero."""
    samples, experts = point.shares.shape
    basis = np.kron(np.eye(samples), linalg.null_space(np.ones((1, experts))))
    inner = linalg.block_diag(np.eye(2 * point.experts.size), basis)
    return inner.T @ hessian(problem, point) @ inner


def local_rate(problem: LinearProblem, solution: Point) -> float:
    """What one step of eq. 28 leaves of ``F - F*`` close to a solution.

    Example 2 at the solution: distances shrink by ``r = |A^-1/2 C^T B^-1/2|^2`` with A, B, C the blocks of the Hessian
    (experts and router; shares; mixed), the objective's residual by ``r^2``.
    """
    whole = tangent_hessian(problem, solution)
    size = 2 * solution.experts.size
    # |L_a^-1 C^T L_b^-T| with Cholesky factors equals the norm with symmetric roots.
    lower_a, lower_b = (
        linalg.cholesky(whole[:size, :size], lower=True),
        linalg.cholesky(whole[size:, size:], lower=True),
    )
    half = linalg.solve_triangular(lower_a, whole[:size, size:], lower=True)
    return float(linalg.norm(linalg.solve_triangular(lower_b, half.T, lower=True), 2) ** 4)


def _outputs(problem: LinearProblem, point: Point) -> Float[np.ndarray, " samples"]:
    return (point.shares * (problem.inputs @ point.experts)).sum(1)


def _experts_block(problem: LinearProblem, point: Point) -> Matrix:
    features = np.einsum("nd,ne->nde", problem.inputs, point.shares).reshape(len(point.shares), -1)
    curvature = problem.loss.curvature(_outputs(problem, point), problem.targets)
    return (features.T * curvature) @ features / len(features) + problem.decay * np.eye(features.shape[1])


def _cross_block(problem: LinearProblem, point: Point) -> Matrix:
    """Rows (Theta, Phi), columns Lambda."""
    x, (samples, experts) = problem.inputs, point.shares.shape
    outputs, each = _outputs(problem, point), x @ point.experts
    slope, bend = problem.loss.slope(outputs, problem.targets), problem.loss.curvature(outputs, problem.targets)
    same = np.einsum("nd,ef->ndef", x, np.eye(experts))
    of_experts = slope[:, None, None, None] * same + np.einsum("n,nd,ne,nf->ndef", bend, x, point.shares, each)
    stacked = np.concatenate([of_experts, -problem.coupling * same], axis=1) / samples
    return stacked.transpose(1, 2, 0, 3).reshape(2 * point.experts.size, samples * experts)


def _shares_block(problem: LinearProblem, point: Point) -> Matrix:
    each = problem.inputs @ point.experts
    bend = problem.loss.curvature(_outputs(problem, point), problem.targets)
    blocks = bend[:, None, None] * each[:, :, None] * each[:, None, :]
    blocks = blocks + problem.coupling * np.eye(each.shape[1]) / point.shares[:, :, None]
    return np.asarray(linalg.block_diag(*(blocks / len(blocks))))
