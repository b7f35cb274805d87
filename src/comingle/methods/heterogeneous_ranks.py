"""LoRA with a rank per user: HetLoRA and FlexLoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.methods.base import Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.partial_sharing import NewOptimisers
from comingle.methods.server import MODEL_PREFIX, Mean, Received, Server, ServerSetup
from comingle.methods.settings import BelowOne, NotNegative
from comingle.utils.trees import ATTENTION, GENERALIST, Tree, lora_pairs


def hetlora(*, regularisation: NotNegative = 5e-3, gamma: BelowOne = 0.99, prune: bool = True) -> Method:
    """HetLoRA: users have different LoRA ranks, larger changes weigh more in the mean, and unused ranks are pruned.

    Source: Cho et al. 2023, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
    arXiv:2401.06432; in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.3 and C.3.  Ranks are ``adapters.rank``.
    Shared: attention, 1 LoRA expert per MLP.  Local: nothing.  Frozen: the base.
    Client: local steps on training text.  A user's last ranks are those from ``gamma`` times its rank on;
    ``regularisation`` times their norm is added to the loss.  With ``prune`` they are dropped if that norm has shrunk
    over the local steps.
    Server: the mean of the users' factors, padded with zeros, with weights proportional to the norms of their changes
    ``B A``; each user gets as many ranks of it as it has.
    Differs from the paper: weights are computed for each linear.  A user's scale alpha / sqrt(rank) stays that of its
    initial rank.  The regularisation is one of the three values that CoMiGS tries.

    Args:
        regularisation: Weight of the norms of a user's last ranks in its objective.
        gamma: Fraction of a user's rank at which its last ranks start.
        prune: Drop a user's last ranks if their norms have decreased over its local steps.
    """
    hooks: tuple[ClientHook, ...] = (TailPenalty(regularisation, gamma),)
    if prune:
        hooks += (Prune(gamma),)
    return Method(
        name="hetlora",
        placement=Placement(shared=frozenset({ATTENTION, GENERALIST})),
        client=Client(phases=joint(routed=False), parts=hooks),
        server=NormWeightedMean(),
    )


@dataclass(frozen=True, kw_only=True)
class NormWeightedMean(Mean):
    """Server of HetLoRA: averages A and B of each linear, with a larger weight for users who have changed it more."""

    kind = "stack"
    clipped_mean = False
    knows_starts = False

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set A and B of each linear to means over users u, with weights proportional to ``p_u |B_u A_u|``.

        p_u is the aggregation weight and ``|B_u A_u|`` the Frobenius norm of the user's change of the linear's weight.
        If all changes are zero, the weights are p_u.

        Args:
            kept: State of the server: A and B of each linear at the largest rank, changed in place.
            received: The uploads, padded to the largest rank, with aggregation weights.
        """
        for name, a, b in lora_pairs(received.tensors):
            p = received.weights.to(a)
            weights = p * change_norm(a, b)
            if not weights.any():
                weights = p
            weights = weights / weights.sum()
            kept[f"{MODEL_PREFIX}{name}.a"].copy_(torch.tensordot(weights, a, dims=1))
            kept[f"{MODEL_PREFIX}{name}.b"].copy_(torch.tensordot(weights, b, dims=1))


def change_norm(
    a: Float[Tensor, "users *experts rank d_in"], b: Float[Tensor, "users *experts rank d_out"]
) -> Float[Tensor, " users"]:
    """Return the Frobenius norm of each user's change ``B A``, over all experts of a linear together.

    ``|B A|^2 = sum_ij (A A^T)_ij (B^T B)_ij`` needs only matrices of the size of the rank.

    Args:
        a: Factors A of the users.
        b: Factors B of the users, transposed.
    """
    products_a = torch.matmul(a, a.mT)  # (users, *experts, rank, rank)
    products_b = torch.matmul(b, b.mT)
    squared_norm = (products_a * products_b).flatten(1).sum(1)
    return squared_norm.clamp(min=0).sqrt()  # rounding may leave a sum just below 0


def last_ranks_mask(ranks: Int[Tensor, " users"], gamma: float, rank: int) -> Float[Tensor, "users rank"]:
    """Return a mask with 1 for those of a user's ranks that pruning may drop: from ``floor(gamma * its rank)`` on.

    The row of a user of rank 4 is ``[0, 0, 1, 1, 0, 0]`` with gamma 0.5 and 6 columns. The first rank is never dropped.

    Args:
        ranks: Rank of each user.
        gamma: Fraction of a user's rank that pruning keeps.
        rank: Number of columns of the mask, the largest rank of all users.
    """
    index = torch.arange(rank, device=ranks.device)
    first_index = smaller_ranks(ranks, gamma).unsqueeze(1)
    is_last = (index >= first_index) & (index < ranks.unsqueeze(1))
    return is_last.double()


def smaller_ranks(ranks: Int[Tensor, " users"], gamma: float) -> Int[Tensor, " users"]:
    """Return the rank that each user has after pruning, ``floor(gamma * rank)`` but at least 1."""
    return (ranks * gamma).floor().long().clamp(min=1)


def tail_norms(tensors: Tree, ranks: Int[Tensor, " users"], gamma: float) -> Float[Tensor, " users"]:
    """Return for each user the sum over its linears of ``|A[tail]| |B[tail]|``, with L2 norms.

    ``tail`` are a user's last ranks, from ``floor(gamma * rank)`` on. The norms are over all experts of a linear
    together. The sum is differentiable.

    Args:
        tensors: LoRA tensors, ``(users, *shape)``.
        ranks: Rank of each user.
        gamma: Fraction of a user's rank at which the tail starts.
    """
    total = torch.zeros(len(ranks), dtype=torch.float64, device=ranks.device)
    for _name, a, b in lora_pairs(tensors):
        mask = last_ranks_mask(ranks, gamma, rank=a.shape[-2])  # (users, rank)
        mask = mask.view(len(ranks), *[1] * (a.dim() - 3), -1, 1)  # for factors (users, *experts, rank, width)
        tail_a, tail_b = (a.double() * mask).flatten(1), (b.double() * mask).flatten(1)
        norm_a = torch.linalg.vector_norm(tail_a, dim=1)
        norm_b = torch.linalg.vector_norm(tail_b, dim=1)
        total = total + norm_a * norm_b
    return total


@dataclass(frozen=True)
class TailPenalty(ClientHook):
    """Client hook of HetLoRA: adds ``weight`` times the norms of a user's last ranks to its objective."""

    weight: float
    gamma: float

    def penalty(self, tensors: Tree, ranks: Int[Tensor, " users"]) -> Float[Tensor, " users"]:
        """Return each user's penalty: ``weight`` times the norms of its last ranks."""
        return self.weight * tail_norms(tensors, ranks, self.gamma)


@dataclass(frozen=True)
class Prune(ClientHook):
    """Client hook of HetLoRA: drops a user's last ranks if their norms have shrunk over its local steps."""

    gamma: float
    language_only = True
    resizes = True
    looks_back = True

    def end(self, cohort: Cohort) -> None:
        """Reduce the LoRA rank of each user whose last ranks have shrunk in the round's local steps.

        The last ranks are the rows of A and columns of B from ``floor(gamma * rank)`` on. They count as shrunk if the
        product of their norms (:func:`tail_norms`) is smaller than at the start of the round; the new rank is then
        ``floor(gamma * rank)``, but at least 1.

        Args:
            cohort: Users who are trained in one batch; ``ranks`` is changed in place.
        """
        ranks = cohort.ranks
        norms_now = tail_norms(cohort.tensors, ranks, self.gamma)
        norms_before = tail_norms(cohort.began, ranks, self.gamma)
        has_shrunk = norms_now < norms_before
        ranks.copy_(torch.where(has_shrunk, smaller_ranks(ranks, self.gamma), ranks))


def flexlora() -> Method:
    """FlexLoRA: users have different LoRA ranks, and the server truncates their mean change to each user's rank.

    Source: Bai et al. 2024, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
    Resources", arXiv:2402.11505; in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.3.  Ranks are ``adapters.rank``.
    Shared: attention, 1 LoRA expert per MLP.  Local: nothing.  Frozen: the base.
    Client: local steps on training text, with a new optimiser each round, as the factors change.
    Server: an SVD ``U S V`` of the mean change ``sum_u p_u s_u B_u A_u``, with aggregation weight p_u and LoRA scale
    s_u.  User u gets the first rows of V as A and the first columns of ``U S / s_u`` as B.
    Differs from the paper: the mean change includes the scale s_u = alpha / sqrt(rank) of the forward pass.  It is
    never formed as a matrix.
    """
    return Method(
        name="flexlora",
        placement=Placement(shared=frozenset({ATTENTION, GENERALIST})),
        client=Client(phases=joint(routed=False), parts=(NewOptimisers(),)),
        server=Redistribute(),
    )


@dataclass(frozen=True, kw_only=True)
class Redistribute(Server):
    """Server that keeps factors of the mean change at the largest rank; downloads are truncated to each user's rank."""

    kind = "stack"
    by_user = frozenset({"scales"})

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial factors A and B, the latter times the users' LoRA scale, and each user's LoRA scale."""
        factors = {name: t[0].clone() for name, t in setup.models.items()}
        for name, factor in factors.items():
            if name.endswith(".b"):  # zeros, unless all users start from an adapter, and then have one scale
                factor *= setup.scales[0].to(factor)
        return {**factors, SCALES: setup.scales.clone()}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set A and B of each linear so that ``B A`` is the mean change of its weight, ``sum_u p_u s_u B_u A_u``.

        Args:
            kept: State of the server: A and B of each linear at the largest rank, changed in place.
            received: The uploads A_u and B_u, padded to the largest rank, with aggregation weights p_u and LoRA scales
                s_u.
        """
        for name, a, b in lora_pairs(received.tensors):
            mean_a, mean_b = mean_factors(a, b, received.weights, received.scales)
            kept[f"{name}.a"].copy_(mean_a)
            kept[f"{name}.b"].copy_(mean_b)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return A and ``B / s_u`` for each user u, who multiplies their product by its LoRA scale s_u.

        Args:
            kept: State of the server: A and B of each linear at the largest rank, and each user's LoRA scale.
            users: Indices of the users.
        """
        download = {}
        for name, t in kept.items():
            if name == SCALES:
                continue
            factor = t.expand(len(users), 1, *t.shape)  # one model for each user
            if name.endswith(".b"):
                scales = kept[SCALES][list(users)].to(factor)
                factor = factor / scales.view(-1, *[1] * (factor.dim() - 1))
            download[name] = factor
        return download


SCALES = "scales"
"""Key of the users' scales in the server's state."""


def mean_factors(
    a: Float[Tensor, "users *experts rank d_in"],
    b: Float[Tensor, "users *experts rank d_out"],
    weights: Float[Tensor, " users"],
    scales: Float[Tensor, " users"],
) -> tuple[Float[Tensor, "*experts rank d_in"], Float[Tensor, "*experts rank d_out"]]:
    """Return factors A and B of the mean change ``sum_u p_u s_u A_u^T B_u = A^T B``, truncated to the uploads' rank.

    Rows are in the order of their singular values, so the first rows are the best factors of a smaller rank. Let A be
    all A_u below each other, and B all ``p_u s_u B_u``. With the QR decompositions ``A^T = Q R`` and ``B^T = P T`` the
    change is ``Q (R T^T) P^T``, so an SVD of the small matrix ``R T^T`` is enough.

    Args:
        a: Factors A_u of the users.
        b: Factors B_u of the users.
        weights: Aggregation weights p_u.
        scales: LoRA scales s_u.
    """
    rank = a.shape[-2]
    weights_and_scales = (weights * scales).to(a).view(-1, *[1] * (a.dim() - 1))  # p_u s_u
    Q, R = torch.linalg.qr(_join_ranks(a).mT)
    P, T = torch.linalg.qr(_join_ranks(b * weights_and_scales).mT)
    left, singular_values, right = torch.linalg.svd(R @ T.mT, full_matrices=False)
    new_a = _resize_rank((Q @ left).mT, rank)
    new_b = _resize_rank(singular_values.unsqueeze(-1) * (right @ P.mT), rank)
    signs = _signs(new_a)  # an SVD may choose them differently for another order of users
    return new_a * signs, new_b * signs


def _join_ranks(factors: Float[Tensor, "users *experts rank width"]) -> Float[Tensor, "*experts ranks width"]:
    """Concatenate the factors of all users along the rank."""
    return torch.cat(factors.unbind(0), dim=-2)


def _signs(rows: Float[Tensor, "*experts rank width"]) -> Float[Tensor, "*experts rank 1"]:
    """Return the sign of each row's entry of largest magnitude: -1 for ``[0.5, -2.0]``.

    An SVD leaves the signs of singular vectors open. Multiplied by these, they do not depend on the order of users.
    """
    index_of_largest = rows.abs().argmax(-1, keepdim=True)
    largest = rows.gather(-1, index_of_largest)
    return torch.where(largest < 0, -1.0, 1.0).to(rows)


def _resize_rank(factors: Float[Tensor, "*experts rows width"], rank: int) -> Float[Tensor, "*experts rank width"]:
    """Return the first ``rank`` rows of the factors of an SVD, padded with zeros to ``rank`` if there are fewer.

    The rows are in the order of decreasing singular values, so that the first ones are the best approximation.
    """
    missing_rows = max(0, rank - factors.shape[-2])
    return torch.nn.functional.pad(factors[..., :rank, :], (0, 0, 0, missing_rows))
