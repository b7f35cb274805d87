"""What moves a soup of models and its merging weights, out of the users' updates of their merged models.

m users, d models Theta_j, weights w (m x d), theta_i = sum_j w_ij Theta_j (:func:`mix`).
Updates g_i are of the sign of gradients: theta_i as it was sent minus as it came back. p_i = n_i / n.
Source: FedMerge (Chen et al. 2025, arXiv:2504.06768), equations 5 and 6, appendices C and D.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.utils.trees import Tree

MOST_STEPS = 10_000
"""The public code's line search gives up after so many."""


EMPTY = 1e-12
"""A model whose present users weigh less than this together has none."""


def column_shares(
    shares: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """``p_i w_ij / sum_i' p_i' |w_i'j|``: eq. 5's shares, each column scaled so that its magnitudes sum to 1.

    Where no weight is negative a model moves by a mean of its users' updates. Otherwise too it moves the way eq. 5
    says, by no more than the largest of them: a sum with signs, as in the public code, would turn a negative column
    round. A model that nobody present uses has zeros, as in eq. 5, and stays where it is.
    """
    moves = weights.to(shares).unsqueeze(1) * shares
    total = moves.abs().sum(0)
    return torch.where(total > EMPTY, moves / total.clamp(min=EMPTY), 0.0)


def soup_gradient(shares: Float[Tensor, "users models"], updates: Tree) -> Tree:
    """``sum_i shares_ij g_i`` for every model j; with shares ``p_i w_ij`` that is eq. 5."""
    return mix(updates, shares.T)


def inner_products(soup: Tree, updates: Tree, names: Collection[str]) -> Float[Tensor, "users models"]:
    """``<Theta_j, g_i>`` over the tensors in ``names``."""
    parts = [updates[n].flatten(1) @ soup[n].flatten(1).T for n in names]
    return torch.stack(parts).sum(0)


def weight_gradient(
    inner: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """``dL/dw_ij = p_i <Theta_j, g_i>`` (eq. 6)."""
    return weights.to(inner).unsqueeze(1) * inner


def logit_gradient(
    shares: Float[Tensor, "users models"], inner: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """``dL/da_ij = p_i w_ij <Theta_j - theta_i, g_i>`` where w is the row-wise softmax of a (appendix D).

    The merged model is not needed: ``<theta_i, g_i> = sum_k w_ik <Theta_k, g_i>``.
    """
    merged = (shares * inner).sum(1, keepdim=True)
    return weight_gradient(shares * (inner - merged), weights)


def fixed_step(
    gradient: Float[Tensor, "users models"], weights: Float[Tensor, " users"], size: float
) -> Float[Tensor, "users models"]:
    """What to subtract from the weights, its largest entry just above ``size`` (section 4.1, "fixed magnitude").

    The public code adds up small steps ``size p_i G_ij``, where ``p_i G_ij`` is the gradient and the magnitudes of G
    sum to 1, until an entry has moved by more than ``size``: this is where it stops.
    """
    shares = weights.to(gradient).unsqueeze(1)
    total = torch.where(shares > 0, gradient / shares, 0.0).abs().sum()
    step = size * gradient / total
    largest = float(step.abs().max())
    if not largest > 0:  # no gradient at all, which has divided by zero above
        return torch.zeros_like(gradient)
    return step * min(int(size / largest) + 1, MOST_STEPS)


def head(tree: Tree) -> list[str]:
    """The tensors of the last layer of a net; everything where the tensors are LoRA's, which have no last layer."""
    if any(name.endswith(".a") for name in tree):
        return list(tree)
    trained = [name for name, t in tree.items() if not name.rpartition(".")[2].startswith("running")]
    last = trained[-1].rpartition(".")[0]
    return [name for name in trained if name.rpartition(".")[0] == last]


def mix(uploads: Tree, matrix: Float[Tensor, "receivers senders"]) -> Tree:
    """Receiver i gets ``sum_j matrix_ij upload_j``: the identity is Local, a constant row is FedAvg.

    The last bits of what somebody receives do not depend on who receives beside: a product of matrices is rounded by
    its shape, so each sum is added up in the order of its senders. It costs about 1.6 times the product.
    """
    return {name: _mix(t, matrix.to(t)) for name, t in uploads.items()}


def _mix(uploads: Float[Tensor, "senders ..."], matrix: Float[Tensor, "receivers senders"]) -> Tensor:
    sent = uploads.flatten(1)
    mixed = sent.new_zeros(len(matrix), sent.shape[1])
    width = max(_NARROW, _IN_CACHE // max(len(matrix), 1))
    terms = sent.new_empty(len(matrix), min(width, sent.shape[1]))
    columns = matrix.T.unsqueeze(-1)
    for piece, into in zip(sent.split(width, 1), mixed.split(width, 1), strict=True):
        term = terms[:, : piece.shape[1]]
        for column, row in zip(columns, piece, strict=True):
            into.add_(torch.mul(column, row, out=term))
    return mixed.view(len(matrix), *uploads.shape[1:])


_NARROW, _IN_CACHE = 1024, 2**16
"""Numbers at a time: of each receiver at least, and of all together."""
