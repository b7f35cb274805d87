"""Aggregation of LoRA products: exact (FedEx-LoRA, FLoRA by stacking, Fed-SB), or of aligned factors (FedRot-LoRA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import Client, ClientHook, Cohort, Method, Phase, Placement
from comingle.methods.partial_sharing import NewOptimisers
from comingle.methods.server import MODEL_PREFIX, Mean, Received
from comingle.methods.settings import CountOrNone, Positive, Share
from comingle.models.lora import IN, MIDDLE, OUT, RESIDUAL, init_a
from comingle.utils.seeds import generator
from comingle.utils.trees import ATTENTION, GENERALIST, Tree, lora_pairs

LORA = frozenset({ATTENTION, GENERALIST})
"""Roles of the LoRA that users train and share."""


def fedex_lora(*, residual_rank: CountOrNone = 0) -> Method:
    """FedEx-LoRA: the server averages A and B, and adds the error ``mean(B_i A_i) - mean(B) mean(A)`` to the weights.

    Source: Singhal et al. 2024, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
    Models", arXiv:2410.09432, section 3: W = W_0 + the sum of all rounds' residuals.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base, and each weight's residual,
    which comes from the server.
    Client: local steps on training text.  Server: means of A and of B; the sum of all residuals.
    Differs from the paper: the residual is kept beside the base, as two factors.  A download has the sum of all rounds'
    residuals, because users may have been absent; the paper's has that of one round.  With ``residual_rank`` above 0
    the residual is approximated by that rank in each round.  All users have the same LoRA rank.

    Args:
        residual_rank: Rank of the residual that is added to each weight; 0 is exact.
    """
    return Method(
        name="fedex-lora",
        placement=Placement(generalists=2, shared=LORA, received=LORA | {RESIDUAL}, residual=residual_rank),
        client=Client(phases=(Phase(roles=LORA),)),
        server=ExactMean(),
    )


@dataclass(frozen=True, kw_only=True)
class ExactMean(Mean):
    """Server of FedEx-LoRA: averages A and B, and adds the error of that to each weight's residual R."""

    kind = "stack"
    clipped_mean = False
    knows_starts = False
    one_rank = True

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set A and B to their means, and R to ``R + s sum_i p_i B_i A_i - s mean(B) mean(A)``.

        R is a weight's residual: a frozen matrix that users add to the weight.

        Args:
            kept: State of the server, changed in place: A and B of each weight, and two factors of its residual.
            received: The uploads A_i and B_i, with aggregation weights p_i and the LoRA scale s, the same for all.
        """
        super().aggregate(kept, received)
        s = float(received.scales[0])
        for name, a, b in lora_pairs(received.tensors):
            mean_a, mean_b = kept[f"{MODEL_PREFIX}{name}.a"], kept[f"{MODEL_PREFIX}{name}.b"]
            factors = weighted_factors(a, b, received)  # their products sum to s sum_i p_i B_i A_i
            factors.append((mean_a, -s * mean_b))
            add_to_residual(kept, name, factors)


def weighted_factors(a: Tensor, b: Tensor, received: Received) -> list[tuple[Tensor, Tensor]]:
    """Return for each participant i the pair ``(A_i, p_i s_i B_i)``, with aggregation weight p_i and LoRA scale s_i.

    :func:`add_to_residual` adds the pairs' products, together ``sum_i p_i s_i B_i A_i``, to a weight's residual.

    Args:
        a: Factors A of all participants.
        b: Factors B of all participants.
        received: The uploads, with weights and scales.
    """
    weights = (received.weights * received.scales).tolist()
    return [(user_a, user_b * weight) for user_a, user_b, weight in zip(a, b, weights, strict=True)]


def add_to_residual(kept: Tree, name: str, products: list[tuple[Tensor, Tensor]]) -> None:
    """Add the products ``A^T B`` of pairs of factors to the residual that users add to a weight.

    The residual is stored as two factors too, ``(*experts, rank, d_in)`` and ``(*experts, rank, d_out)``, whose rank
    does not change.

    Args:
        kept: State of the server, changed in place.
        name: Name of the weight.
        products: Pairs (A, B) to multiply, ``(*experts, rank, d_in)`` and ``(*experts, rank, d_out)`` with any rank.
    """
    factor_in, factor_out = kept[f"{MODEL_PREFIX}{name}.{IN}"], kept[f"{MODEL_PREFIX}{name}.{OUT}"]
    residual = factor_in.mT @ factor_out
    for a, b in products:
        residual = residual + a.mT @ b
    new_in, new_out = factorise(residual, rank=factor_in.shape[-2])
    factor_in.copy_(new_in)
    factor_out.copy_(new_out)


def factorise(
    change: Float[Tensor, "*experts d_in d_out"], rank: int
) -> tuple[Float[Tensor, "*experts rank d_in"], Float[Tensor, "*experts rank d_out"]]:
    """Return two factors with ``change = factor_in^T factor_out``, or the best approximation if ``rank`` is too small.

    Args:
        change: Matrices to factorise.
        rank: Rows of the factors; those beyond the smaller of d_in and d_out are zero.
    """
    d_in, d_out = change.shape[-2:]
    full_rank = min(d_in, d_out)
    if rank >= full_rank:  # exact: one factor is the identity
        identity = torch.eye(full_rank, dtype=change.dtype, device=change.device).expand(*change.shape[:-2], -1, -1)
        if d_in <= d_out:
            factor_in, factor_out = identity, change
        else:
            factor_in, factor_out = change.mT, identity
        zero_rows = (0, 0, 0, rank - full_rank)  # no columns, and rows only at the end
        return torch.nn.functional.pad(factor_in, zero_rows), torch.nn.functional.pad(factor_out, zero_rows)
    left, singular_values, right = torch.linalg.svd(change, full_matrices=False)
    factor_in = left[..., :rank].mT
    factor_out = (singular_values.unsqueeze(-1) * right)[..., :rank, :]
    return factor_in, factor_out


def flora_stacking(*, residual_rank: CountOrNone = 0) -> Method:
    """FLoRA: each round the server adds the users' mean change, ``sum_i p_i B_i A_i`` without error, to the weights.

    Source: Wang et al. 2024, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
    Adaptations", arXiv:2409.05976, Algorithm 1.  Ranks are ``adapters.rank``: one for each user, if it is a list.
    Shared: attention, 2 averaged LoRA experts per MLP, which are uploaded.  Local: nothing.  Frozen: the base, and a
    residual for each weight, which is downloaded.
    Client: reinitialises its LoRA, with its own random A and a new optimiser, then takes local steps on training text.
    Server: adds ``sum_i p_i s_i B_i A_i`` to the residual, with aggregation weight p_i and LoRA scale s_i of user i.
    Differs from the paper: the residual is kept beside the base, as two factors.  A download has the sum over all
    rounds, because users may have been absent; the paper's has that of the last round, as stacked factors.  With
    ``residual_rank`` above 0 the residual is approximated by that rank in each round.

    Args:
        residual_rank: Rank of the residual that is added to each weight; 0 is exact.
    """
    return Method(
        name="flora-stacking",
        placement=Placement(generalists=2, shared=LORA, received=frozenset({RESIDUAL}), residual=residual_rank),
        client=Client(phases=(Phase(roles=LORA),), parts=(Reinitialise(),)),
        server=Stack(),
    )


RESTARTS = "anew"
"""Key of a user's state: the run's seed, and how often its LoRA has been reinitialised."""


class Reinitialise(ClientHook):
    """Client hook of FLoRA that reinitialises LoRA each round: A is drawn at random, B is zero, optimisers are new."""

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return the state of each user, ``(users, 2)``: the run's seed, and how often its LoRA was reinitialised.

        The LoRA factor A is drawn from them and the user's name at each reinitialisation.
        """
        return {RESTARTS: torch.tensor([[seed, 0]]).repeat(len(names), 1)}

    def received(self, cohort: Cohort) -> None:
        """Set B to zero after a download, so that last round's LoRA does not count twice.

        The server has added the product of A and B of all participants to the residuals, frozen matrices that are part
        of the download and that users add to the base's weights.
        """
        for _name, _a, b in lora_pairs(cohort.tensors):
            b.zero_()

    def begin(self, cohort: Cohort) -> None:
        """Draw a new A for each user, with zeros beyond the user's rank, and reset the optimisers' moments.

        Runs before the local steps of each round. A is drawn from the run's seed, the user's name and the number of
        times that the user's LoRA was reinitialised before, so that a resumed run draws the same A.
        """
        cohort.reset_moments(LORA)
        seeds_and_restarts = cohort.kept[RESTARTS].tolist()  # (users, 2): the run's seed, and earlier restarts
        for name, a, _b in lora_pairs(cohort.tensors):  # a: (users, *experts, rank, d_in)
            for user_a, user, (seed, restarts) in zip(a, cohort.names, seeds_and_restarts, strict=True):
                user_generator = generator(seed, user, "anew", f"{name}.a", restarts)
                user_a.copy_(init_a(tuple(user_a.shape), user_generator))
            is_within_rank = torch.arange(a.shape[-2], device=a.device) < cohort.ranks.unsqueeze(1)  # (users, rank)
            a.mul_(is_within_rank.view(len(a), *[1] * (a.dim() - 3), -1, 1))
        cohort.kept[RESTARTS][:, 1] += 1  # the second column counts restarts


@dataclass(frozen=True, kw_only=True)
class Stack(Mean):
    """Server of FLoRA: adds the users' products ``B_i A_i`` to each weight's residual."""

    kind = "stack"
    clipped_mean = False
    knows_starts = False
    keeps_adapters = False

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Add ``sum_i p_i s_i B_i A_i`` over the participants to each weight's residual.

        A residual is a frozen matrix that users add to a weight.

        Args:
            kept: State of the server, changed in place: two factors of each weight's residual.
            received: The uploads A_i and B_i, with aggregation weights p_i and LoRA scales s_i.
        """
        for name, a, b in lora_pairs(received.tensors):
            add_to_residual(kept, name, weighted_factors(a, b, received))


FACTORS = frozenset({f"{ATTENTION}.a", f"{ATTENTION}.b", f"{GENERALIST}.a", f"{GENERALIST}.b"})
"""Roles of the factors A and B."""

MIDDLES = frozenset({f"{ATTENTION}.{MIDDLE}", f"{GENERALIST}.{MIDDLE}"})
"""Roles of the matrices R between the factors A and B."""


def fed_sb(*, first_rate: Positive = 5e-5) -> Method:
    """Fed-SB: users train and average a small matrix R between frozen factors B and A, which is exact.

    Source: Singhal et al. 2025, "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in
    (Private) Federated LoRA Fine-Tuning", arXiv:2502.15436, on LoRA-SB (Ponkshe et al. 2024, arXiv:2411.19557), and
    their public code.
    Shared: R of size rank by rank, of attention and of 1 LoRA expert per MLP; in the first exchange also A and B.
    Local: nothing.  Frozen: the base, and A and B after the first exchange.
    Client: before its first local steps each user approximates the first update of full fine-tuning by ``D =
    -first_rate sign(G)``, with the gradient G of each weight on one batch, and sets B, R and A to the largest singular
    vectors and values of D.  Then local steps on training text train R.
    Server: in the first exchange an SVD of the mean change ``sum_u p_u B_u R_u A_u``, with aggregation weight p_u,
    whose factors all users get; after it the mean of R: ``B mean(R) A = mean(B R A)``.
    Differs from the paper: its code computes one G from samples of all users together, which no server has here.  All
    users have the same LoRA rank.  Written from the public code and the abstracts.

    Args:
        first_rate: Learning rate of the first update of full fine-tuning, that of the first step of a warm-up.
    """
    shared = FACTORS | MIDDLES
    return Method(
        name="fed-sb",
        placement=Placement(shared=shared, once=FACTORS, middle=True),
        client=Client(phases=(Phase(roles=MIDDLES),), parts=(FirstUpdate(first_rate),)),
        server=MiddleMean(),
    )


@dataclass(frozen=True)
class FirstUpdate(ClientHook):
    """Client hook of Fed-SB: sets B, R and A from the first update of full fine-tuning."""

    first_rate: float
    language_only = True

    def begin(self, cohort: Cohort) -> None:
        """Set B, R and A of users whose factors B are still zero, before the local steps of a round.

        Args:
            cohort: Users who are trained in one batch, with their tensors, which are changed in place.
        """
        has_factors = torch.stack([b.flatten(1).any(1) for _name, _a, b in lora_pairs(cohort.tensors)]).any(0)
        for user in (~has_factors).nonzero().flatten().tolist():
            scale = float(cohort.scales[user])
            for name, gradient in cohort.weight_gradients(user).items():
                update = first_update(gradient, self.first_rate)
                rank = cohort.tensors[f"{name}.a"].shape[-2]
                for suffix, factor in zip(("a", "b", MIDDLE), svd_factors(update, rank, scale), strict=True):
                    cohort.tensors[f"{name}.{suffix}"][user] = factor


def first_update(gradient: Tensor, rate: float) -> Tensor:
    """Return the first update of full fine-tuning with Adam, ``-rate sign(gradient)``."""
    return -rate * gradient.sign()


def svd_factors(
    update: Float[Tensor, "*experts d_in d_out"], rank: int, scale: float = 1.0
) -> tuple[
    Float[Tensor, "*experts rank d_in"], Float[Tensor, "*experts rank d_out"], Float[Tensor, "*experts rank rank"]
]:
    """Return A, B and R for which ``scale B R A`` is the best approximation of an update of a weight (LoRA-SB).

    With the SVD ``U S V^T`` of the update ``(d_out, d_in)``, truncated to ``rank``: ``B = U``, ``A = V^T`` and
    ``R = S / scale``.

    Args:
        update: Updates of the weights, transposed.
        rank: LoRA rank; rows beyond the smaller of d_in and d_out are zero.
        scale: LoRA scale.
    """
    # of the transposed update `left` belongs to d_in, `right` to d_out
    left, singular_values, right = torch.linalg.svd(update, full_matrices=False)
    missing = max(0, rank - singular_values.shape[-1])
    a = torch.nn.functional.pad(left.mT[..., :rank, :], (0, 0, 0, missing))
    b = torch.nn.functional.pad(right[..., :rank, :], (0, 0, 0, missing))
    middle = torch.nn.functional.pad(singular_values[..., :rank], (0, missing)) / scale
    return a, b, torch.diag_embed(middle)


@dataclass(frozen=True, kw_only=True)
class MiddleMean(Mean):
    """Server of Fed-SB: makes common factors of the users' first changes, then averages the matrices R."""

    kind = "stack"
    clipped_mean = False
    knows_starts = False
    keeps_adapters = False
    one_rank = True

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set R to its mean over users; in the first exchange, A, B and R to an SVD of the mean ``B_u R_u A_u``.

        Args:
            kept: State of the server: A, B and R of each weight, changed in place.
            received: The uploads R_u, and in the first exchange A_u and B_u, with aggregation weights.
        """
        pairs = list(lora_pairs(received.tensors))
        if not pairs:  # later exchanges have R alone
            super().aggregate(kept, received)
            return
        for name, a, b in pairs:
            r = received.tensors[f"{name}.{MIDDLE}"]
            weights = received.weights.to(a).view(-1, *[1] * (a.dim() - 1))
            mean_change = ((r @ a).mT @ (weights * b)).sum(0)  # (*experts, d_in, d_out)
            factors = svd_factors(mean_change, rank=a.shape[-2])
            for suffix, factor in zip(("a", "b", MIDDLE), factors, strict=True):
                kept[f"{MODEL_PREFIX}{name}.{suffix}"].copy_(factor)


def fedrot_lora(*, rotation_strength: Share = 1.0) -> Method:
    """FedRot-LoRA: users rotate their factors A and B towards the download before the server averages them.

    Source: Zhang et al. 2026, "FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA", arXiv:2602.23638,
    and its public code.
    Shared: attention, 1 expert per MLP.  Local: nothing.  Frozen: the base.
    Client: local steps on training text, with a new optimiser each round.  Then it replaces A and B of each LoRA by
    ``R^T A`` and ``B R``, whose product is the same, with the orthogonal R that brings A (in rounds 2, 4, ...) or B (in
    rounds 3, 5, ...) closest to the downloaded one.  The first round has no rotation.
    Server: mean of A and of B over users.
    Differs from the paper: LoRA is where ``adapters`` puts it.  Written from its code, abstract and introduction.

    Args:
        rotation_strength: 1 for the closest orthogonal matrix R; below 1 for the rotation closest to ``(1 - strength) I
            + strength R``; 0 for none, which is FedIT with new optimisers.
    """
    return Method(
        name="fedrot-lora",
        placement=Placement(shared=LORA),
        client=Client(phases=(Phase(roles=LORA),), parts=(NewOptimisers(), Rotate(rotation_strength))),
        server=Mean(),
    )


@dataclass(frozen=True)
class Rotate(ClientHook):
    """Client hook of FedRot-LoRA: rotates the factors of each LoRA after local steps; their product stays the same."""

    strength: float
    language_only = True
    looks_back = True

    def end(self, cohort: Cohort) -> None:
        """Rotate each user's factors towards those of the round's start: A in rounds 2, 4, ..., B in rounds 3, 5, ...

        ``round_number`` starts at 0.

        Args:
            cohort: Users who are trained in one batch, with their tensors, which are changed in place.
        """
        if cohort.round_number == 0 or self.strength == 0:
            return
        aligned = "a" if cohort.round_number % 2 else "b"
        for name, a, b in lora_pairs(cohort.tensors):
            for rank in cohort.ranks.unique().tolist():  # ranks that a user does not have stay zero
                users = cohort.ranks == rank
                of_users = {"a": a[users][..., :rank, :], "b": b[users][..., :rank, :]}
                reference = cohort.began[f"{name}.{aligned}"][users][..., :rank, :]
                rotation = self._rotation(of_users[aligned], reference)
                a[users, ..., :rank, :] = rotation.mT @ of_users["a"]
                b[users, ..., :rank, :] = rotation.mT @ of_users["b"]

    def _rotation(self, factors: Tensor, reference: Tensor) -> Tensor:
        if self.strength == 1:
            return procrustes(factors, reference)
        return soften(procrustes(factors, reference, reflections=False), self.strength)


def procrustes(
    factors: Float[Tensor, "*batch rank width"],
    reference: Float[Tensor, "*batch rank width"],
    *,
    reflections: bool = True,
) -> Float[Tensor, "*batch rank rank"]:
    """Return the orthogonal R with the smallest ``|R^T factors - reference|`` (Frobenius norm), for each pair.

    With the SVD ``U S V^T`` of ``factors reference^T`` it is ``R = U V^T``. The closest rotation is ``R = U D V^T``,
    where D is the identity but for the sign of its last entry, which makes the determinant 1.

    Args:
        factors: Factors A, or B transposed.
        reference: Factors to align with.
        reflections: Whether R may have the determinant -1.
    """
    left, _values, right = torch.linalg.svd(factors.double() @ reference.double().mT)
    if not reflections:
        left[..., -1] *= torch.linalg.det(left @ right).sign().unsqueeze(-1)
    return (left @ right).to(factors)


def soften(rotation: Float[Tensor, "*batch rank rank"], strength: float) -> Float[Tensor, "*batch rank rank"]:
    """Return the orthogonal matrix closest to ``(1 - strength) I + strength R``.

    Args:
        rotation: Matrices R.
        strength: Weight of R, from 0 to 1.
    """
    identity = torch.eye(rotation.shape[-1], dtype=rotation.dtype, device=rotation.device)
    left, _values, right = torch.linalg.svd((1 - strength) * identity + strength * rotation)
    return left @ right
