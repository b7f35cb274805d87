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
    """HetLoRA: users have different ranks; matrices with a larger change weigh more; unused ranks are pruned.

    Source: Cho et al. 2023, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
    arXiv:2401.06432; in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.3 and C.3.  Ranks are ``adapters.rank``.
    Shared: attention, 1 LoRA expert per MLP.  Local: nothing.  Frozen: the base.
    Client: joint steps on training text. The last ranks of a user are those from ``gamma`` times its rank on;
    ``regularisation`` times their norm is added to the loss. With ``prune`` a user drops its last ranks if their norm
    has shrunk over its local steps.
    Server: zero-padding, mean weighted by the norm of each user's change, truncated to each user's rank.
    Differs from the paper: weights are computed for each linear; a user's scale alpha / sqrt(rank) stays that of its
    initial rank.  The regularisation is one of the three values that CoMiGS sweeps.

    Args:
        regularisation: Weight of the norms of a user's last ranks in its objective.
        gamma: Fraction of a user's rank at which its last ranks start.
        prune: Drop a user's last ranks if their norms have decreased over its local steps.
    """
    return Method(
        name="hetlora",
        placement=Placement(shared=frozenset({ATTENTION, GENERALIST})),
        client=Client(
            phases=joint(routed=False),
            parts=(TailPenalty(regularisation, gamma), *([Prune(gamma)] if prune else [])),
        ),
        server=NormWeightedMean(),
    )


@dataclass(frozen=True, kw_only=True)
class NormWeightedMean(Mean):
    """Server that weighs users by ``p_u |B_u A_u|`` for each linear, or by ``p_u`` where nothing has changed."""

    kind = "stack"
    clipped_mean = False
    knows_starts = False

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set A and B of each linear to means in which users with a larger weight change count more.

        User u has the weight p_u times the Frobenius norm of its change B_u A_u. While all changes are zero, the
        weights are p_u alone.

        Args:
            kept: State of the server: A and B of each linear at the largest rank, changed in place.
            received: The uploads, padded to the largest rank, with aggregation weights.
        """
        for name, a, b in lora_pairs(received.tensors):
            weights = received.weights.to(a) * change_norm(a, b)
            weights = weights if weights.any() else received.weights.to(a)
            for factor, t in (("a", a), ("b", b)):
                kept[f"{MODEL_PREFIX}{name}.{factor}"].copy_(torch.tensordot(weights / weights.sum(), t, dims=1))


def change_norm(
    a: Float[Tensor, "users *experts rank d_in"], b: Float[Tensor, "users *experts rank d_out"]
) -> Float[Tensor, " users"]:
    """Return the Frobenius norm of each user's change ``B A``, over all experts together.

    The norm is computed from the small matrices ``A A^T`` and ``B B^T``, as ``|B A|^2 = sum_ij (A A^T)_ij (B B^T)_ij``.

    Args:
        a: Factors A of the users.
        b: Factors B of the users.
    """
    squares = (torch.matmul(a, a.mT) * torch.matmul(b, b.mT)).flatten(1).sum(1)
    return squares.clamp(min=0).sqrt()  # rounding may leave a sum just below 0


def last_ranks_mask(ranks: Int[Tensor, " users"], gamma: float, rank: int) -> Float[Tensor, "users rank"]:
    """Return a 0-1 mask of each user's last ranks, from ``floor(gamma * rank)`` on, which pruning may drop.

    The first rank is never among them.

    Args:
        ranks: Rank of each user.
        gamma: Fraction of the rank from which ranks count as last.
        rank: Number of columns of the mask, the largest rank of all users.
    """
    index = torch.arange(rank, device=ranks.device)
    start = smaller_ranks(ranks, gamma).unsqueeze(1)
    return ((index >= start) & (index < ranks.unsqueeze(1))).double()


def smaller_ranks(ranks: Int[Tensor, " users"], gamma: float) -> Int[Tensor, " users"]:
    """Return the rank that each user has after pruning, ``floor(gamma * rank)`` but at least 1."""
    return (ranks * gamma).floor().long().clamp(min=1)


def tail_norms(tensors: Tree, ranks: Int[Tensor, " users"], gamma: float) -> Float[Tensor, " users"]:
    """Return a measure of how much each user uses its last ranks: ``sum over linears of |B[:, tail]| |A[tail]|``.

    ``tail`` are the ranks from ``floor(gamma * rank)`` on, and norms are L2 over all experts of a linear together. The
    measure is differentiable. :class:`TailPenalty` adds it to the loss; :class:`Prune` compares its values before and
    after a round.

    Args:
        tensors: LoRA tensors, ``(users, *shape)``.
        ranks: Rank of each user.
        gamma: Fraction of the rank from which ranks count as last.
    """
    total = torch.zeros(len(ranks), dtype=torch.float64, device=ranks.device)
    for _, a, b in lora_pairs(tensors):
        mask = last_ranks_mask(ranks, gamma, a.shape[-2])  # (users, rank)
        mask = mask.view(len(ranks), *[1] * (a.dim() - 3), -1, 1)  # for factors (users, *experts, rank, width)
        norm_a, norm_b = (torch.linalg.vector_norm((t.double() * mask).flatten(1), dim=1) for t in (a, b))
        total = total + norm_a * norm_b
    return total


@dataclass(frozen=True)
class TailPenalty(ClientHook):
    """Adds ``weight`` times :func:`tail_norms` to the objective."""

    weight: float
    gamma: float

    def penalty(self, tensors: Tree, ranks: Int[Tensor, " users"]) -> Float[Tensor, " users"]:
        """Return the penalty of each user."""
        return self.weight * tail_norms(tensors, ranks, self.gamma)


@dataclass(frozen=True)
class Prune(ClientHook):
    """Drops a user's last ranks if their norm has shrunk over its local steps."""

    gamma: float
    language_only = True
    resizes = True
    looks_back = True

    def end(self, cohort: Cohort) -> None:
        """Reduce the rank of each user whose last ranks have shrunk since the round began."""
        ranks = cohort.ranks
        shrunk = tail_norms(cohort.tensors, ranks, self.gamma) < tail_norms(cohort.began, ranks, self.gamma)
        ranks.copy_(torch.where(shrunk, smaller_ranks(ranks, self.gamma), ranks))


def flexlora() -> Method:
    """FlexLoRA: users have different ranks; the mean weight change is truncated to each user's rank by an SVD.

    Source: Bai et al. 2024, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
    Resources", arXiv:2402.11505; in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.3.  Ranks are ``adapters.rank``.
    Shared: attention, 1 LoRA expert per MLP.  Local: nothing.  Frozen: the base.
    Client: joint steps on training text, with a new optimiser each round, as the factors change.
    Server: dW = sum_u p_u s_u B_u A_u = U S V; user u gets A = the first rows of V, B = the first columns of U S / s_u.
    Differs from the paper: the rank-stabilised scale s_u = alpha / sqrt(rank) of the forward pass is part of dW; dW
    itself is never formed, its singular values come from those of a matrix as small as the sum of all ranks.
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
        """Return the initial factors, as for scale 1, and each user's scale."""
        return {name: t[0].clone() for name, t in setup.models.items()} | {SCALES: setup.scales.clone()}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set A and B of each linear to factors of the mean change of its weight, ``sum_u p_u s_u B_u A_u``.

        p_u are aggregation weights, s_u LoRA scales (:func:`mean_factors`).

        Args:
            kept: State of the server: A and B of each linear at the largest rank, changed in place.
            received: The uploads, padded to the largest rank, with aggregation weights and LoRA scales.
        """
        for name, a, b in lora_pairs(received.tensors):
            factors = mean_factors(a, b, received.weights, received.scales)
            for factor, t in zip("ab", factors, strict=True):
                kept[f"{name}.{factor}"].copy_(t)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return A, and ``B / s_u`` for user u, whose forward pass multiplies ``B A`` by its LoRA scale s_u.

        The second dimension of the tensors, ``(users, 1, *shape)``, is for servers that send several models.

        Args:
            kept: State of the server: A and B of each linear at the largest rank, and each user's LoRA scale.
            users: Indices of the users.
        """
        models = {name: t.expand(len(users), 1, *t.shape) for name, t in kept.items() if name != SCALES}
        for name, t in models.items():
            if name.endswith(".b"):
                scales = kept[SCALES][list(users)].to(t)
                models[name] = t / scales.view(-1, *[1] * (t.dim() - 1))
        return models


SCALES = "scales"
"""Key of the users' scales in the server's state."""


def mean_factors(
    a: Float[Tensor, "users *experts rank d_in"],
    b: Float[Tensor, "users *experts rank d_out"],
    weights: Float[Tensor, " users"],
    scales: Float[Tensor, " users"],
) -> tuple[Float[Tensor, "*experts rank d_in"], Float[Tensor, "*experts rank d_out"]]:
    """Return factors of the users' mean change ``sum_u weights_u scales_u A_u^T B_u``, by a truncated SVD.

    The largest singular values come first, so that the leading rows are the best approximation for a user with a
    smaller rank. The change itself is not formed. Let A have the factors of all users side by side, B those times their
    weights and scales. With the QR decompositions ``A^T = Q R`` and ``B^T = P T`` the change is ``Q (R T^T) P^T``. Only
    the core ``R T^T``, as wide as the sum of all ranks, is decomposed by the SVD.

    Args:
        a: Factors A of the users.
        b: Factors B of the users.
        weights: Aggregation weights.
        scales: LoRA scales.
    """
    rank = a.shape[-2]
    factors = (weights * scales).to(a).view(-1, *[1] * (a.dim() - 1))
    q, r = torch.linalg.qr(_join_ranks(a).mT)
    p, t = torch.linalg.qr(_join_ranks(b * factors).mT)
    left, singular_values, right = torch.linalg.svd(r @ t.mT, full_matrices=False)
    new_a = _resize_rank((q @ left).mT, rank)
    new_b = _resize_rank(singular_values.unsqueeze(-1) * (right @ p.mT), rank)
    # An SVD leaves the signs of the rows open. Fixing them makes the factors independent of the order of users.
    signs = _signs(new_a)
    return new_a * signs, new_b * signs


def _join_ranks(factors: Float[Tensor, "users *experts rank width"]) -> Float[Tensor, "*experts ranks width"]:
    """Concatenate the factors of all users along the rank."""
    return torch.cat(factors.unbind(0), dim=-2)


def _signs(rows: Float[Tensor, "*experts rank width"]) -> Float[Tensor, "*experts rank 1"]:
    """Return a factor of -1 or 1 for each row, which makes the row's entry of largest magnitude positive.

    The rows are singular vectors, whose signs an SVD may choose freely. With these factors the signs do not depend on
    the order of users.
    """
    largest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0).to(rows)


def _resize_rank(factors: Float[Tensor, "*experts found width"], rank: int) -> Float[Tensor, "*experts rank width"]:
    """Return the first ``rank`` rows of factors, padded with zeros if there are fewer."""
    missing = max(0, rank - factors.shape[-2])
    return torch.nn.functional.pad(factors[..., :rank, :], (0, 0, 0, missing))
