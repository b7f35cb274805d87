"""Gradient preconditioning and centring of FLoRAL's adaptors (FLoRAL, appendices D and E).

With the inner factor I (width x columns) and the outer factor O (rows x width) of one adaptor, before each step::

    linear        G_I <- (O^T O + eps)^-1 G_I            G_O <- G_O (I I^T + eps)^-1
    convolution   G_I <- G_I / (||O^T O||_F + eps)       G_O <- G_O / (||I I^T||_F + eps)

Biases and norm adaptors keep their gradients. Groups of a convolution are blocks of one matrix: they share the norm.

``W += alpha * E_c[O_c I_c]`` and ``O_c, I_c <- O Sigma^(1/2), Sigma^(1/2) I`` of the truncated SVD of
``O_c I_c - E_c[O_c I_c]`` (p = q = 2), where E_c is the mean under p(c) of eq. 2, so that eq. 30 holds. The model
``W + alpha * sum_c pi_c O_c I_c`` is unchanged for every mixture where each difference has a rank of at most the
adaptor's width, and as close as that width allows otherwise. Biases and the gains and shifts of norms are centred
exactly. A batch norm whose adaptors have local statistics is unchanged in training mode (plain form) or in eval mode
(BatchNorA); in the other mode as far as its statistics are the base's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from comingle.models.floral.layers import Geometry, Pair, Pairs

Gram = Float[Tensor, "... groups width width"]


def precondition(
    pairs: Pairs, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor], eps: float = 1e-5
) -> dict[str, Tensor]:
    """New gradients; ``tensors`` are the values at which they were taken.

    Leading dimensions (users) before the clusters are allowed. A pair of which neither factor has a gradient is passed
    over; what is not a factor is handed on as it is. Costs one solve of width x width for each adaptor.
    """
    made = dict(gradients)
    for pair in pairs.factors:
        inner, outer = tensors[pair.inner], tensors[pair.outer]
        if pair.inner in gradients:
            made[pair.inner] = _inner(pair, outer, gradients[pair.inner], eps)
        if pair.outer in gradients:
            made[pair.outer] = _outer(pair, inner, gradients[pair.outer], eps)
    return made


def _inner(pair: Pair, outer: Tensor, gradient: Tensor, eps: float) -> Tensor:
    matrix = _wide(pair.geometry.outer_matrix(outer))
    gram, g = matrix.mT @ matrix, _wide(pair.geometry.inner_matrix(gradient))
    made = _solve(gram, g, eps) if pair.geometry.kind == "linear" else g / (_norm(gram) + eps)
    return pair.geometry.inner_of(made).to(gradient.dtype)


def _outer(pair: Pair, inner: Tensor, gradient: Tensor, eps: float) -> Tensor:
    matrix = _wide(pair.geometry.inner_matrix(inner))
    gram, g = matrix @ matrix.mT, _wide(pair.geometry.outer_matrix(gradient))
    made = _solve(gram, g.mT, eps).mT if pair.geometry.kind == "linear" else g / (_norm(gram) + eps)
    return pair.geometry.outer_of(made).to(gradient.dtype)


def _wide(matrix: Tensor) -> Tensor:
    """At least float32: there is no solver below."""
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _solve(gram: Gram, right: Float[Tensor, "... groups width n"], eps: float) -> Float[Tensor, "... groups width n"]:
    """``(gram + eps)^-1 right``; where the sum is singular in floating point, not finite rather than an error."""
    damped = gram + eps * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_ex(damped, right)[0]


def _norm(gram: Gram) -> Float[Tensor, "... 1 1 1"]:
    """Frobenius norm of the block-diagonal matrix of all groups."""
    return torch.linalg.vector_norm(gram, dim=(-3, -2, -1), keepdim=True)


@torch.no_grad()
def centre(pairs: Pairs, tensors: Mapping[str, Tensor], shares: Float[Tensor, " clusters"]) -> dict[str, Tensor]:
    """New tensors: base weights, biases, and every adaptor; the rest is handed on as it is.

    ``shares`` are the clusters' p(c), which sum to 1. Leading dimensions (users) before the clusters are allowed; the
    base then needs the same ones.
    """
    made = dict(tensors)
    for pair in pairs.factors:
        mean, made[pair.inner], made[pair.outer] = _centre(
            pair.geometry, tensors[pair.inner], tensors[pair.outer], shares
        )
        made[pair.weight] = tensors[pair.weight] + pair.alpha * mean
    for offset in pairs.offsets:
        axis = -offset.dims - 1
        adaptors = tensors[offset.adaptor]
        mean = (adaptors * shares.to(adaptors).view(-1, *(1 for _ in range(offset.dims)))).sum(axis, keepdim=True)
        made[offset.adaptor] = adaptors - mean
        made[offset.base] = tensors[offset.base] + offset.alpha * mean.squeeze(axis)
    return made


def _centre(
    geometry: Geometry, inner: Tensor, outer: Tensor, shares: Float[Tensor, " clusters"]
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of the clusters' changes, in the base weight's shape, and the factors of what is left.

    Everything happens in the span of all clusters' factors: with ``O = [O_1 .. O_C] = Q_O R_O`` and the rows of
    ``I`` likewise, a difference is ``Q_O (R_O D_c R_I^T) Q_I^T`` with a diagonal ``D_c``, so the SVD is one of
    at most (C * width) squared. No difference is formed at full size.
    """
    dtype = torch.promote_types(inner.dtype, torch.float32)
    rows = geometry.inner_matrix(inner.to(dtype))  # (..., clusters, groups, width, columns)
    columns = geometry.outer_matrix(outer.to(dtype))  # (..., clusters, groups, rows, width)
    wide_rows = rows.movedim(-4, -3).flatten(-3, -2)  # (..., groups, clusters * width, columns)
    wide_columns = columns.movedim(-4, -2).flatten(-2)  # (..., groups, rows, clusters * width)
    shares_by_column = shares.to(rows).repeat_interleave(geometry.width)
    mean = geometry.weight((wide_columns * shares_by_column) @ wide_rows).to(inner.dtype)

    left, left_core = torch.linalg.qr(wide_columns)
    right, right_core = torch.linalg.qr(wide_rows.mT)
    core = (left_core.unsqueeze(-4) * _deviations(shares.to(left), geometry.width)) @ right_core.mT.unsqueeze(-4)
    u, values, v = _truncated_svd(core, geometry.width)
    scale = torch.linalg.matrix_norm(left_core) * torch.linalg.matrix_norm(right_core)
    zero = values <= 10 * torch.finfo(dtype).eps * scale[..., None, :, None]
    root = values.sqrt().masked_fill(zero, 0)
    new_outer = left.unsqueeze(-4) @ (u * root.unsqueeze(-2))
    # Where a singular value is zero both factors would be, a saddle at which neither has a gradient. There the inner
    # factor keeps its row (each cluster its own, so clusters that agree can still part); the product is zero still.
    new_inner = torch.where(zero.unsqueeze(-1), rows, (root.unsqueeze(-1) * v) @ right.mT.unsqueeze(-4))
    return mean, geometry.inner_of(new_inner).to(inner.dtype), geometry.outer_of(new_outer).to(outer.dtype)


def _deviations(shares: Float[Tensor, " clusters"], width: int) -> Float[Tensor, "clusters 1 1 columns"]:
    """For each cluster what its difference from the mean takes of each cluster's columns: 1 - p(c) or -p(c)."""
    deviations = torch.eye(len(shares)).to(shares) - shares
    return deviations.repeat_interleave(width, dim=-1)[:, None, None]


def _truncated_svd(
    core: Float[Tensor, "... m n"], width: int
) -> tuple[Float[Tensor, "... m width"], Float[Tensor, "... width"], Float[Tensor, "... width n"]]:
    """The ``width`` largest singular triples, filled up with zeros where the matrix has fewer."""
    u, values, v = torch.linalg.svd(core, full_matrices=False)
    missing = max(0, width - values.shape[-1])
    u, values = F.pad(u[..., :width], (0, missing)), F.pad(values[..., :width], (0, missing))
    return u, values, F.pad(v[..., :width, :], (0, 0, 0, missing))
