"""Servers: what happens to stacked uploads between two rounds."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import Context
from comingle.trees import Tree


def mix(uploads: Tree, matrix: Float[Tensor, "receivers senders"]) -> Tree:
    """Receiver i gets ``sum_j matrix_ij upload_j``: the identity is Local, a constant row is FedAvg."""
    return {name: torch.tensordot(matrix.to(t), t, dims=1) for name, t in uploads.items()}


def mean(uploads: Tree, context: Context) -> Tree:
    """Everybody gets the weighted mean (McMahan et al. 2017)."""
    return mix(uploads, context.weights.expand(len(context.weights), -1))


def keep(uploads: Tree, context: Context) -> Tree:
    """Everybody keeps their own: for methods that share nothing."""
    return uploads
