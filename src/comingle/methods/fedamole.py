"""FedAMoLE: domain experts choose the users whose data they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from comingle.methods.base import Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import MODEL_PREFIX, NEVER, Received, Server, ServerSetup, model_of, weighted_sums
from comingle.methods.settings import Count, CountOrNone, Range
from comingle.models.lora import init_a
from comingle.models.routers import Router, balance_penalty, gate, init_router
from comingle.utils.errors import DivergenceError, RecipeError
from comingle.utils.seeds import generator
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Init, Tree

EXPERTS, PLACES, TOKENS, EMBEDDINGS = "experts.", "places", "tokens", "embeddings"
EXPERTS_PER_USER = 3
"""Domain experts per user if ``experts`` is 0; the public code has 30 experts for 10 users."""
MIN_EXPERTS = 2
"""Smallest number of domain experts of a user, if there are enough."""


def expert_keys(tensors: Tree, router: str) -> Float[Tensor, "users most rank width"]:
    """Return the LoRA factors A of an MLP's domain experts, which serve as the experts' keys in routing.

    The router compares a key's product with a token's hidden state to a projection of the same state. An expert has a
    factor A for each linear of the MLP; the key is that of the linear named "up".

    Args:
        tensors: Tensors of all users.
        router: Name of the MLP's router.
    """
    return tensors[router.removesuffix(ROUTER) + "up.a"][:, 1:]  # the first expert is the generalist


@dataclass(frozen=True, kw_only=True)
class AssignmentServer(Server):
    """Server of FedAMoLE: averages domain experts, and assigns them to users anew after each round.

    Its state has the shared tensors, all domain experts, and their assignment ``places (users, layers, most)``: indices
    of experts, and the number of experts for an empty place. ``tokens`` and ``embeddings`` are the means that users
    report.
    """

    experts: int
    choices: int
    most: int
    fixed: bool = False
    kind = "stack"
    by_user = frozenset({PLACES, TOKENS})
    one_rank = True
    first_download = True

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state: experts with different initial values, assigned to users at random.

        Later assignments compare two projections of the users' hidden states x: T x, with the shared matrix T of the
        router, and A_e x, with the LoRA factor A of expert e. Users report means of both. The server keeps each user's
        mean of T x as ``tokens`` ``(users, mlps, rank)``, and each expert's mean of A_e x as ``embeddings`` ``(mlps,
        experts, rank)``. Nothing is reported yet, so both start at random values, which makes the first assignment
        random. ``places`` ``(users, mlps, most)`` has the indices of each user's experts.

        Raises:
            RecipeError: The mean number of experts per user is above ``most`` or below 1. A single user is exempt: it
                gets the experts that fit best.
        """
        num_users, num_mlps = len(setup.users), len(layers_of(setup.models))
        num_experts = self.experts or EXPERTS_PER_USER * num_users
        users_per_expert = min(self.choices, num_users)
        choices = num_experts * users_per_expert
        if num_users > 1 and not num_users <= choices <= num_users * self.most:
            raise RecipeError(
                f"method fedamole: got {num_experts} experts that choose {users_per_expert} of {num_users} users each, "
                f"{choices} choices in all; allowed: {num_users} to {num_users * self.most} (method.experts, choices, "
                "most)"
            )
        kept: Tree = {}
        for name, t in setup.models.items():
            if t.dim() != 4:  # not a LoRA of an MLP's experts; all models have the same initial values
                kept[MODEL_PREFIX + name] = t[0].clone()
                continue
            # LoRA of an MLP, (models, experts, rank, width). The first expert is the generalist.
            kept[MODEL_PREFIX + name] = t[0, :1].clone()
            random_a = init_a((num_experts, *t.shape[2:]), generator(setup.seed, name, "experts"))
            kept[EXPERTS + name] = random_a.to(t) if name.endswith(".a") else torch.zeros_like(random_a).to(t)
        factor = next(t for name, t in kept.items() if name.startswith(EXPERTS))
        means_shape = (num_mlps, factor.shape[-2])  # projections have as many numbers as the LoRA rank
        tokens = [torch.randn(means_shape, generator=generator(setup.seed, user, "tokens")) for user in setup.users]
        kept[TOKENS] = torch.stack(tokens).to(factor)
        embeddings = [
            torch.randn(means_shape, generator=generator(setup.seed, expert, "embeddings"))
            for expert in range(num_experts)
        ]
        kept[EMBEDDINGS] = torch.stack(embeddings, 1).to(factor)
        assigned = [self.assign(fit_scores(kept, mlp, range(num_users))) for mlp in range(num_mlps)]
        kept[PLACES] = torch.stack(assigned, 1)
        return kept

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return the tensors to send: the shared ones, and for each user the domain experts that are assigned to it.

        The first ``rank`` rows of a router are the matrix T, which projects a token's hidden state to compare it with
        experts. In uploads, the rows below T have numbers that users report. Downloads have zeros there.

        Args:
            kept: State of the server. ``places`` ``(users, mlps, most)`` has the indices of each user's domain experts.
                A user with fewer than ``most`` experts has empty places, where the index is the number of experts.
            users: Indices of the users.

        Returns:
            Tensors by name, ``(users, 1, *shape)``: each user gets one model.
        """
        sent, places = {}, kept[PLACES][list(users)]  # indices of experts, (users, mlps, most)
        rank = kept[TOKENS].shape[-1]  # ``tokens``: projections by T, (users, mlps, rank)
        for name, t in model_of(kept).items():
            by_user = t.expand(len(users), *t.shape)
            if name.endswith(ROUTER):
                by_user = torch.cat([by_user[:, :rank], torch.zeros_like(by_user[:, rank:])], 1)
            elif EXPERTS + name in kept:
                # The additional last expert, of zeros, fills empty places.
                pool = torch.cat([kept[EXPERTS + name], torch.zeros_like(t)])
                mlp = layers_of(model_of(kept)).index(layer_of(name))
                by_user = torch.cat([by_user, pool[places[:, mlp]]], 1)
            sent[name] = by_user.unsqueeze(1)  # dimension 1: one model per user
        return sent

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Average the uploads, then assign experts to all users anew.

        Shared tensors are averaged over all participants, a domain expert over the participants that had it. If experts
        are ``fixed`` (for users who join later), nothing is averaged and only the participants are reassigned.

        The assignment compares two projections of a user's hidden states x: T x, with the shared matrix T of the
        router, and A_e x, with the LoRA factor A_e of domain expert e.

        Args:
            kept: State of the server, changed in place: shared tensors, domain experts, each user's mean of T x
                (``tokens``), each expert's mean of A_e x over its users (``embeddings``), and the indices of each
                user's domain experts in each MLP (``places``).
            received: The uploads. An uploaded router consists of T and, in the rows below T, the means that the user
                reports.
        """
        users, weights = list(received.users), received.weights
        if not self.fixed:
            # An upload has the generalist and the user's domain experts. Only the generalist, the first, is common to
            # all users.
            common = {n: t[:, :1] if EXPERTS + n in kept else t for n, t in received.tensors.items()}
            for name, mean in weighted_sums(common, dict.fromkeys(common, weights)).items():
                kept[MODEL_PREFIX + name].copy_(mean)
        reassigned = users if self.fixed else list(range(len(kept[PLACES])))
        for number, mlp in enumerate(layers_of(model_of(kept))):
            assigned = kept[PLACES][users, number]
            # Mean projections (users, 1 + most, rank): first T x, then A_e x of each domain expert of the user.
            reported = unpack_means(received.tensors[f"{mlp}{ROUTER}"], kept[TOKENS].shape[-1], self.most)
            kept[TOKENS][users, number] = reported[:, 0].to(kept[TOKENS])
            if not self.fixed:
                set_expert_means(kept[EMBEDDINGS][number], reported[:, 1:], assigned, weights)
                for name in (n for n in received.tensors if layer_of(n) == mlp and EXPERTS + n in kept):
                    set_expert_means(kept[EXPERTS + name], received.tensors[name][:, 1:], assigned, weights)
            kept[PLACES][reassigned, number] = self.assign(fit_scores(kept, number, reassigned))

    def assign(self, scores: Float[Tensor, "experts users"]) -> Int[Tensor, "users most"]:
        """Assign experts to users by how well they fit.

        Each expert chooses ``choices`` users, so that the sum of the scores' softmax over users is maximal. A single
        user would be chosen by all experts, so it gets the ``most`` experts that fit best.

        Args:
            scores: Fit of each expert to each user; larger is better.

        Returns:
            Indices of each user's experts in ascending order, filled up to ``most`` with the number of experts.

        Raises:
            DivergenceError: A score is not finite.
        """
        num_experts, num_users = scores.shape
        if num_nonfinite := int((~scores.isfinite()).sum()):
            advice = "try a smaller training.experts.learning_rate and training.router.learning_rate"
            raise DivergenceError(
                f"method fedamole: {num_nonfinite} of {scores.numel()} scores of experts for users are not finite; "
                f"{advice}"
            )
        if num_users == 1:
            chosen = torch.zeros_like(scores, dtype=torch.bool)
            chosen[scores[:, 0].argsort(descending=True, stable=True)[: self.most]] = True
        else:
            chosen = solve_assignment(scores.double().softmax(1), min(self.choices, num_users), self.most)
        # The index ``num_experts`` stands for a missing expert. Sorting moves it behind those of the chosen experts.
        indices = torch.arange(num_experts, device=scores.device).unsqueeze(1)
        by_user = torch.where(chosen, indices, num_experts).T.sort(1).values
        # Padded, as there may be fewer than ``most`` experts in all.
        return F.pad(by_user, (0, self.most), value=num_experts)[:, : self.most]

    def settled(self) -> AssignmentServer:
        """Return a copy of the server with fixed experts, for users who join after the run has ended.

        A new user takes part in one exchange: it reports mean projections of its data and gets the experts that fit
        best. Then the user trains without further exchanges.
        """
        return replace(self, fixed=True, exchange_every=NEVER)


def fit_scores(kept: Tree, mlp: int, users: Sequence[int]) -> Float[Tensor, "experts users"]:
    """Return how well experts fit users: ``(mean of A_e x)^T (mean of T x) / sqrt(rank)`` for expert e and each user.

    A_e is the LoRA factor A of the expert, T a projection that all users share, and x are hidden states of tokens. The
    first mean is over the texts of the expert's users, the second over the user's own texts.

    Args:
        kept: State of the server: tensors by name.
        mlp: Index of the MLP.
        users: Indices of the users.
    """
    tokens = kept[TOKENS][list(users), mlp]  # means of T x, (users, rank)
    return kept[EMBEDDINGS][mlp] @ tokens.T / math.sqrt(tokens.shape[1])


def layer_of(name: str) -> str:
    """Return the MLP that a tensor belongs to, such as "layers.0.mlp.", or an empty string."""
    return name[: name.rfind("mlp.") + 4] if "mlp." in name else ""


def layers_of(tensors: Tree) -> list[str]:
    """Return the names of all MLPs with a router."""
    return [name.removesuffix(ROUTER) for name in tensors if name.endswith(f".{ROUTER}")]


def unpack_means(router: Float[Tensor, "users rows width"], rank: int, most: int) -> Float[Tensor, "users means rank"]:
    """Return each user's mean projections of its data, which are packed into its uploaded router.

    The first ``rank`` rows of an uploaded router are T, which projects hidden states x for routing. The rows below hold
    the means, padded to whole rows.

    Args:
        router: Uploaded routers.
        rank: Rank of T.
        most: Largest number of domain experts of a user, for which the router has room.

    Returns:
        Means over the user's tokens ``(users, 1 + most, rank)``: first the mean of T x, then for each domain expert e
        of the user the mean of A_e x with the expert's LoRA factor A_e.
    """
    return router[:, rank:].flatten(1)[:, : (1 + most) * rank].unflatten(1, (1 + most, rank))


def set_expert_means(
    experts: Float[Tensor, "experts ..."],
    uploads: Float[Tensor, "users most ..."],
    assigned: Int[Tensor, "users most"],
    weights: Float[Tensor, " users"],
) -> None:
    """Set each expert to the weighted mean of its users' uploads, in place; an expert without users is unchanged.

    Args:
        experts: A tensor of all experts.
        uploads: Each user's uploads for up to ``most`` experts.
        assigned: Indices of the experts that ``uploads`` are for. A user with fewer than ``most`` experts has the
            number of experts as index of the rest, whose uploads are ignored.
        weights: Aggregation weights of the users.
    """
    flat = assigned.flatten()  # the expert of each upload
    counts = flat.bincount(minlength=len(experts) + 1)[: len(experts)]  # uploads of each expert
    columns = torch.arange(int(counts.max()), device=experts.device)
    # To compute all means in one product, uploads are sorted by expert: row e of ``positions`` says where in ``flat``
    # the uploads of expert e are. All rows have the largest count as length. Shorter ones are filled with positions of
    # other experts' uploads, which get a share of 0.
    first = (counts.cumsum(0) - counts).unsqueeze(1)
    positions = flat.argsort(stable=True)[(first + columns).clamp(max=len(flat) - 1)]
    weight_by_upload = weights.to(experts).repeat_interleave(assigned.shape[1])
    shares = weight_by_upload[positions] * (columns < counts.unsqueeze(1))
    shares = shares / shares.sum(1, keepdim=True).clamp(min=torch.finfo(experts.dtype).tiny)
    uploads_by_expert = uploads.flatten(0, 1)[positions].to(experts)  # (experts, columns, ...)
    means = torch.einsum("ec,ec...->e...", shares, uploads_by_expert)
    experts.copy_(torch.where((counts > 0).view(-1, *[1] * (experts.dim() - 1)), means, experts))


def solve_assignment(scores: Float[Tensor, "experts users"], choices: int, most: int) -> Bool[Tensor, "experts users"]:
    """Return which expert chooses which user, so that the sum of the chosen scores is maximal.

    An integer program with one binary variable for each pair of expert and user finds the optimum. FedAMoLE calls this
    assignment RSEA.

    Args:
        scores: Score of each expert and user.
        choices: Users that each expert chooses.
        most: Largest number of experts per user; the smallest is :data:`MIN_EXPERTS` if there are enough choices.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import eye_array, kron

    num_experts, num_users = scores.shape
    least = min(MIN_EXPERTS, num_experts * choices // num_users)
    # Scores are centred and scaled for the solver; the optimum is the same.
    gain = (scores - scores.mean()).flatten().cpu().numpy()
    # Matrices that sum the variables of each expert, and of each user.
    users_of_expert = kron(eye_array(num_experts), np.ones((1, num_users)))
    experts_of_user = kron(np.ones((1, num_experts)), eye_array(num_users))
    result = milp(
        -gain / max(float(np.abs(gain).max()), 1e-300),  # 1e-300: scores may all be equal
        integrality=np.ones(gain.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(users_of_expert, choices, choices),
            LinearConstraint(experts_of_user, least, most),
        ],
    )
    assert result.success, result.message
    # The solver returns floats close to 0 and 1.
    return torch.from_numpy(result.x > 0.5).view(num_experts, num_users).to(scores.device)


SHARED = frozenset({ATTENTION, GENERALIST, SPECIALIST, ROUTER})


def fedamole(
    *,
    experts: CountOrNone = 0,
    choices: Count = 2,
    most: Annotated[int, Range(least=1, most=999)] = 8,
    instances: Count = 16,
) -> Method:
    """FedAMoLE: a shared LoRA expert that is always active, and domain experts that the server reassigns each round.

    Source: Zhang et al. 2024, "Personalized Federated Fine-Tuning for LLMs via Data-Driven Heterogeneous Model
    Architectures", arXiv:2411.19128, and its public code (zyc140345/FedAMoLE), whose defaults these are.
    Shared: attention, 1 generalist per MLP; up to ``most`` of ``experts`` domain experts per MLP, in the places of
    specialists; the routers' token projection T.  Local: nothing.  Frozen: the base.
    Client: joint steps on all of it on training text, the router with its own settings, both optimisers new in each
    round.  Domain expert e weighs ``softmax over the top k of (A_e x)^T (T x) / sqrt(rank)``, over the experts that the
    user has.  Then the client sends the mean of T x and of each A_e x over ``instances`` windows.
    Server: means of the shared tensors over users, of a domain expert over the users who have it, and likewise of A_e
    x. From these and T x each expert gets a softmax over users; an integer program maximises the sum of the chosen
    values, where each expert chooses ``choices`` users (all, if there are fewer) and each user is chosen at least twice
    (once, if there are fewer experts) and at most ``most`` times.
    Differs from the paper: we had its code and its abstract, not its equations.  There is one router and one assignment
    for each MLP, instead of each linear; A_e is that of ``up``.  An MLP's output is one half of the shared expert's and
    one half of the mixture of whole experts; ``adapters: {mix: linear}`` with twice the alpha is the paper's sum inside
    each linear.  The attention has a shared LoRA only.  For the means, x is the direction of a window's mean, over
    random training windows and with averaged experts, instead of every token of held-out windows.  Means are weighted
    by ``training.weighting``; an expert without participants is unchanged, and absent users count with their last T x.
    Empty places are sent as zeros.  Users who join later get the experts that fit best.

    Args:
        experts: Domain experts for each MLP on the server; 0 is three for each user.
        choices: Users that each domain expert chooses.
        most: Largest number of domain experts that may choose one user.
        instances: Training windows over which a user averages the projections that it reports.
    """
    return Method(
        name="fedamole",
        placement=Placement(
            specialists=most,
            routed=True,
            gating=PairGating(),
            shared=SHARED,
        ),
        client=Client(phases=joint(routed=True), parts=(ReportEmbeddings(instances),)),
        server=AssignmentServer(experts=experts, choices=choices, most=most),
    )


@dataclass(frozen=True)
class PairGating:
    """Gating that weighs domain experts by the product of two projections of the input: the expert's A, and T."""

    def __str__(self) -> str:
        return "weighted by pairs of projections"

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Init]:
        """Return the number of rows of an MLP's router tensor ``(rows, width)``, and its initialiser.

        The first ``rank`` rows are the projection T. Users report the mean of T x over their tokens x, and the mean of
        A_e x for the LoRA factor A of each domain expert e. Each mean has ``rank`` numbers. Reports need no message of
        their own: they are stored in further rows of the router, which is uploaded in any case.

        Args:
            experts: Number of experts, including the generalist. There are as many means: one for each domain expert,
                and that of T x.
            rank: LoRA rank.
            width: Width of the router's input.
        """
        report_rows = math.ceil(experts * rank / width)
        return rank + report_rows, init_router

    def multiply_adds(self, experts: int, entries: int, width: int) -> int:
        """Return the multiply-adds per token that the gating takes beyond the products with the router tensor.

        For each of the ``experts - 1`` domain experts the LoRA factor A is multiplied by the token's hidden state,
        which takes ``rank * width``, and the result by the projection T of the same state, which takes ``rank``.

        Args:
            experts: Number of experts, including the generalist, which has no such products.
            entries: Numbers in the A factors of all experts, ``experts * rank * width``.
            width: Width of the router's input.
        """
        ranks_of_all = entries // width  # experts * rank
        products_of_all = entries + ranks_of_all
        return products_of_all * (experts - 1) // experts  # without the generalist's

    def __call__(
        self, router: Router, products: Float[Tensor, "users n rows"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Return the experts' weights for n tokens of each user: one half for the generalist, the rest by softmax.

        Domain expert e has the logit ``(A_e x)^T (T x) / sqrt(rank)``, where T is the projection in the router and A_e
        the expert's LoRA factor A. A user may have fewer domain experts than the model has room for; missing experts
        have A = 0 and get no weight. If the router has a load-balancing penalty, it is computed here too.

        Args:
            router: The router, with the A factors of all experts as ``keys``.
            products: Products of the router's rows with x, of which the first ``rank`` are T x.
            x: Inputs of the MLP.
        """
        keys = router.keys[:, 1:]  # of the domain experts
        rank = keys.shape[2]
        occupied = keys.flatten(2).any(-1)  # False for missing experts
        expert_projections = torch.bmm(x, keys.flatten(1, 2).to(x.dtype).mT).unflatten(-1, keys.shape[1:3])
        token_projection = products[..., :rank, None]
        logits = (expert_projections.to(products.dtype) @ token_projection).squeeze(-1) / math.sqrt(rank)
        gates, picks = gate(logits, occupied, router.top_k)
        if router.balance != "none" and router.top_k < keys.shape[1]:
            router.penalty = balance_penalty(logits, picks, occupied, "uniform")
        generalist_gate = torch.full_like(gates[..., :1], 0.5)
        return torch.cat([generalist_gate, gates / 2], -1)


@dataclass(frozen=True)
class ReportEmbeddings(ClientHook):
    """Client hook of FedAMoLE: reports mean projections of a user's text, by which the server assigns experts.

    The projections are T x and A_e x of hidden states x, with the router's matrix T and each expert's LoRA factor A_e.
    """

    instances: int
    language_only = True

    def begin(self, cohort: Cohort) -> None:
        """Reset the optimisers, as the experts in these places may be others now."""
        cohort.reset_moments(SHARED)

    def end(self, cohort: Cohort) -> None:
        """Write each user's mean projections T x and A_e x into the user's router, which is uploaded afterwards.

        T is the projection in the first rows of the router, and A_e the LoRA factor A of domain expert e. The server
        assigns experts by the products of these projections. They are written to the rows below T, which have no other
        use. The input x is a mean of unit vectors, scaled to a mean square of 1, as after a norm layer.
        """
        for name, direction in cohort.router_directions(self.instances, whole=True).items():
            router, keys = cohort.tensors[name], expert_keys(cohort.tensors, name)
            rank, x = keys.shape[2], direction.unsqueeze(-1) * math.sqrt(direction.shape[-1])
            means = torch.cat([router[:, :rank] @ x, (keys.flatten(1, 2) @ x)], 1).squeeze(-1)
            report_rows = router[:, rank:]
            padding = report_rows[0].numel() - means.shape[1]
            report_rows.copy_(F.pad(means, (0, padding)).view(report_rows.shape))
