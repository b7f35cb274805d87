"""Servers: what happens to stacked uploads between two rounds."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import Context, Server
from comingle.trees import Tree


def mix(uploads: Tree, matrix: Float[Tensor, "receivers senders"]) -> Tree:
    """Receiver i gets ``sum_j matrix_ij upload_j``: the identity is Local, a constant row is FedAvg."""
    return {name: torch.tensordot(matrix.to(t), t, dims=1) for name, t in uploads.items()}


def mean(uploads: Tree, context: Context) -> Tree:
    """Everybody gets the weighted mean (McMahan et al. 2017)."""
    return {name: _one_for_all(torch.tensordot(context.weights.to(t), t, dims=1), t) for name, t in uploads.items()}


def mean_by_cluster(uploads: Tree, context: Context) -> Tree:
    """The weighted mean, of each component by how much its users make of it (FLoRAL, Algorithm 1, lines 11 and 12)."""
    shares = aggregation_weights(context.reports["mixture"], context.weights)
    components = {name: t for name, t in uploads.items() if name in context.clustered}
    rest = {name: t for name, t in uploads.items() if name not in context.clustered}
    means = {n: _one_for_all(torch.einsum("uc,uc...->c...", shares.to(t), t), t) for n, t in components.items()}
    return mean(rest, context) | means


def aggregation_weights(
    mixtures: Float[Tensor, "users clusters"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users clusters"]:
    """``p(k|c) = pi_c^k p(k) / sum_k' pi_c^k' p(k')`` (FLoRAL eq. 2).

    A component that nobody present makes anything of has been changed by nobody: its plain mean keeps it as it is.
    """
    joint = mixtures.to(weights) * weights.unsqueeze(1)
    total = joint.sum(0)
    return torch.where(total > EMPTY, joint / total.clamp(min=EMPTY), weights.unsqueeze(1))


def cluster_weights(
    mixtures: Float[Tensor, "users clusters"], weights: Float[Tensor, " users"]
) -> Float[Tensor, " clusters"]:
    """``p(c) = sum_k p(k) pi_c^k`` (FLoRAL eq. 2)."""
    return weights @ mixtures.to(weights)


def centred(server: Server) -> Server:
    """``server``, and then the components' mean under p(c) moves into the base (FLoRAL App. E, eq. 30 and 37)."""

    def serve(uploads: Tree, context: Context) -> Tree:
        assert context.centre is not None
        downloads = server(uploads, context)
        one = {name: t[:1] for name, t in downloads.items()}
        found = context.centre(one, cluster_weights(context.reports["mixture"], context.weights))
        return {name: found[name].expand(t.shape) for name, t in downloads.items()}

    return serve


EMPTY = 1e-12
"""A cluster with less weight than this has no users."""


def _one_for_all(answer: Tensor, uploads: Tensor) -> Tensor:
    return answer.expand(uploads.shape)


def keep(uploads: Tree, context: Context) -> Tree:
    """Everybody keeps their own: for methods that share nothing."""
    return uploads
