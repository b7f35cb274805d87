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

EXPERTS, ASSIGNED, TOKENS, EMBEDDINGS = "experts.", "places", "tokens", "embeddings"
EXPERTS_PER_USER = 3
"""Domain experts per user if ``experts`` is 0; the public code has 30 experts for 10 users."""
MIN_EXPERTS = 2
"""Smallest number of domain experts of a user, if there are enough."""


def expert_keys(tensors: Tree, router: str) -> Float[Tensor, "users most rank width"]:
    """Return the keys A_e of an MLP's domain experts: their LoRA factors A of the linear "up".

    Args:
        tensors: Tensors of all users.
        router: Name of the MLP's router, such as "layers.0.mlp.router".
    """
    mlp = router.removesuffix(ROUTER)
    factors = tensors[f"{mlp}up.a"]  # (users, experts, rank, width)
    return factors[:, 1:]  # the first expert is the generalist


def _initial_tensors(setup: ServerSetup, num_experts: int) -> Tree:
    """Return the server's initial shared tensors, generalists among them, and its pool of domain experts.

    In an expert the LoRA factor A is random and the factor B zero.

    Args:
        setup: Data that the server has before the first round.
        num_experts: Domain experts in the pool.
    """
    tensors: Tree = {}
    for name, t in setup.models.items():
        initial = t[0]  # all models have the same initial values
        is_lora_of_mlp = t.dim() == 4  # (models, experts, rank, width)
        if not is_lora_of_mlp:
            tensors[MODEL_PREFIX + name] = initial.clone()
            continue
        generalist = initial[:1]
        tensors[MODEL_PREFIX + name] = generalist.clone()
        random_a = init_a((num_experts, *t.shape[2:]), generator(setup.seed, name, "experts"))
        is_a = name.endswith(".a")
        tensors[EXPERTS + name] = random_a.to(t) if is_a else torch.zeros_like(random_a).to(t)
    return tensors


@dataclass(frozen=True, kw_only=True)
class AssignmentServer(Server):
    """Server of FedAMoLE: keeps a pool of domain experts, and after each round assigns up to ``most`` to each user.

    Its state has the shared tensors, the pool, and for each MLP
    - ``places (users, mlps, most)``: indices of each user's experts in the pool, then the pool's size for empty places,
    - ``tokens (users, mlps, rank)``: each user's mean of T x, a projection T of its hidden states x,
    - ``embeddings (mlps, experts, rank)``: each expert's mean of A_e x, with its LoRA factor A_e.
    """

    experts: int
    choices: int
    most: int
    fixed: bool = False
    kind = "stack"
    by_user = frozenset({ASSIGNED, TOKENS})
    one_rank = True
    first_download = True
    keeps_adapters = False

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state of the server: a pool of experts, and which of them each user has.

        In each MLP experts are assigned to the users that they fit best, by the product of two vectors: the expert's
        ``embeddings`` (mean of A_e x over tokens x, with its LoRA factor A_e) and the user's ``tokens`` (mean of T x
        with a projection T). Users report them after each round; before the first round both are random.

        Args:
            setup: Initial shared tensors, and the users' names.

        Raises:
            RecipeError: The mean number of experts per user is above ``most`` or below 1. A single user is exempt: it
                gets the experts that fit best.
        """
        num_users, num_mlps = len(setup.users), len(mlps_of(setup.models))
        num_experts = self.experts or EXPERTS_PER_USER * num_users
        self._check_number_of_choices(num_experts, num_users)
        kept = _initial_tensors(setup, num_experts)
        factor = next(t for name, t in kept.items() if name.startswith(EXPERTS))
        rank = factor.shape[-2]
        tokens_by_user = [
            torch.randn((num_mlps, rank), generator=generator(setup.seed, user, "tokens")) for user in setup.users
        ]
        kept[TOKENS] = torch.stack(tokens_by_user).to(factor)
        embeddings_by_expert = [
            torch.randn((num_mlps, rank), generator=generator(setup.seed, expert, "embeddings"))
            for expert in range(num_experts)
        ]
        kept[EMBEDDINGS] = torch.stack(embeddings_by_expert, dim=1).to(factor)
        assigned_by_mlp = [self.assign(fit_scores(kept, mlp, range(num_users))) for mlp in range(num_mlps)]
        kept[ASSIGNED] = torch.stack(assigned_by_mlp, dim=1)
        return kept

    def _check_number_of_choices(self, num_experts: int, num_users: int) -> None:
        """Raise an error unless the experts' choices give each user at least 1 and at most ``most`` experts on average.

        Args:
            num_experts: Domain experts in the pool.
            num_users: Number of users; a single one is exempt.

        Raises:
            RecipeError: The mean number of experts per user is too small or too large.
        """
        if num_users == 1:
            return
        users_per_expert = min(self.choices, num_users)
        choices = num_experts * users_per_expert
        least, most = num_users, num_users * self.most
        if not least <= choices <= most:
            raise RecipeError(
                f"method fedamole: got {num_experts} experts that choose {users_per_expert} of {num_users} users each, "
                f"{choices} choices in all; allowed: {least} to {most} (method.experts, choices, most)"
            )

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return the shared tensors and each user's domain experts, with zeros for missing experts.

        Args:
            kept: State of the server. Its key "places" has the indices ``(users, mlps, most)`` of each user's domain
                experts in the pool, and the pool's size where a user has fewer than ``most``.
            users: Indices of the users.

        Returns:
            Tensors by name, ``(users, 1, *shape)``: each user gets one model.
        """
        model = model_of(kept)
        mlps = mlps_of(model)
        assigned = kept[ASSIGNED][list(users)]  # (users, mlps, most), indices into the pool of domain experts
        rank = kept[TOKENS].shape[-1]
        sent = {}
        for name, t in model.items():
            shared = t.expand(len(users), *t.shape)
            if name.endswith(ROUTER):
                # The first ``rank`` rows of a router are the projection T. The rows below hold a user's report in an
                # upload, and zeros in a download.
                projection, report_rows = shared[:, :rank], shared[:, rank:]
                by_user = torch.cat([projection, torch.zeros_like(report_rows)], dim=1)
            elif EXPERTS + name in kept:
                generalist, missing_expert = shared, torch.zeros_like(t)
                pool = torch.cat([kept[EXPERTS + name], missing_expert])  # the last index stands for no expert
                mlp_index = mlps.index(mlp_of(name))
                by_user = torch.cat([generalist, pool[assigned[:, mlp_index]]], dim=1)
            else:
                by_user = shared
            sent[name] = by_user.unsqueeze(1)  # one model for each user
        return sent

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Average the uploads, then assign experts to users by the means of T x and A_e x that participants report.

        x are a user's hidden states, T is the routers' projection and A_e the LoRA factor A of domain expert e. With
        ``fixed`` experts (for users who join later) nothing is averaged, and only participants get new experts.

        Args:
            kept: State of the server, changed in place.
            received: The uploads. An uploaded router has the reported means in the rows below T.
        """
        users, weights = list(received.users), received.weights
        if not self.fixed:
            self._average_shared_tensors(kept, received)
        users_to_assign = users if self.fixed else list(range(len(kept[ASSIGNED])))
        rank = kept[TOKENS].shape[-1]
        for mlp_index, mlp in enumerate(mlps_of(model_of(kept))):
            means = unpack_means(received.tensors[f"{mlp}{ROUTER}"], rank, self.most)
            mean_tokens, mean_embeddings = means[:, 0], means[:, 1:]  # of T x, and of A_e x for each expert of the user
            kept[TOKENS][users, mlp_index] = mean_tokens.to(kept[TOKENS])
            if not self.fixed:
                assigned = kept[ASSIGNED][users, mlp_index]  # the experts that the participants have just trained
                set_expert_means(kept[EMBEDDINGS][mlp_index], mean_embeddings, assigned, weights)
                for name, t in received.tensors.items():
                    if mlp_of(name) == mlp and EXPERTS + name in kept:
                        domain_experts = t[:, 1:]
                        set_expert_means(kept[EXPERTS + name], domain_experts, assigned, weights)
            scores = fit_scores(kept, mlp_index, users_to_assign)
            kept[ASSIGNED][users_to_assign, mlp_index] = self.assign(scores)

    def _average_shared_tensors(self, kept: Tree, received: Received) -> None:
        """Set the shared tensors, generalists among them, to the weighted means of the uploads, in place.

        Args:
            kept: State of the server.
            received: The uploads. Those of an MLP's experts have the generalist first, then the user's domain experts.
        """
        shared = {}
        for name, t in received.tensors.items():
            has_domain_experts = EXPERTS + name in kept
            shared[name] = t[:, :1] if has_domain_experts else t
        for name, mean in weighted_sums(shared, dict.fromkeys(shared, received.weights)).items():
            kept[MODEL_PREFIX + name].copy_(mean)

    def assign(self, scores: Float[Tensor, "experts users"]) -> Int[Tensor, "users most"]:
        """Return each user's experts: each expert chooses ``choices`` users with large scores.

        The chosen pairs have the largest sum of the scores' softmax over users. A single user, which all experts would
        choose, gets the ``most`` experts with the largest scores.

        Args:
            scores: Fit of each expert to each user; larger is better.

        Returns:
            Indices of each user's experts in ascending order, filled up to ``most`` with the number of experts: ``[0,
            3, 5, 5]`` for the experts 0 and 3 of 5, with ``most`` 4.

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
            is_chosen = torch.zeros_like(scores, dtype=torch.bool)
            best_experts = scores[:, 0].argsort(descending=True, stable=True)[: self.most]
            is_chosen[best_experts] = True
        else:
            users_per_expert = min(self.choices, num_users)
            is_chosen = solve_assignment(scores.double().softmax(1), users_per_expert, self.most)
        missing = num_experts  # the index of a missing expert; sorting moves it behind the chosen ones
        indices = torch.arange(num_experts, device=scores.device).unsqueeze(1)
        experts_by_user = torch.where(is_chosen, indices, missing).T.sort(dim=1).values
        # Padding is needed if there are fewer than ``most`` experts in all.
        return F.pad(experts_by_user, (0, self.most), value=missing)[:, : self.most]

    def settled(self) -> AssignmentServer:
        """Return a copy of the server for users who join after the run has ended: its experts do not change.

        A new user exchanges once: it uploads its report and downloads the experts that fit best.
        """
        return replace(self, fixed=True, exchange_every=NEVER)


def fit_scores(kept: Tree, mlp: int, users: Sequence[int]) -> Float[Tensor, "experts users"]:
    """Return how well domain expert e fits each user: ``(mean of A_e x)^T (mean of T x) / sqrt(rank)``.

    A_e is the expert's LoRA factor A and T the routers' projection. The first mean is over hidden states x of the users
    who had the expert, the second over the user's own.

    Args:
        kept: State of the server, with both means.
        mlp: Index of the MLP.
        users: Indices of the users.
    """
    embeddings = kept[EMBEDDINGS][mlp]  # means of A_e x, (experts, rank)
    tokens = kept[TOKENS][list(users), mlp]  # means of T x, (users, rank)
    rank = tokens.shape[1]
    return embeddings @ tokens.T / math.sqrt(rank)


def mlp_of(name: str) -> str:
    """Return the MLP that a tensor belongs to: "layers.0.mlp." for "layers.0.mlp.up.a"; else an empty string."""
    if "mlp." not in name:
        return ""
    return name[: name.rfind("mlp.") + len("mlp.")]


def mlps_of(tensors: Tree) -> list[str]:
    """Return the names of all MLPs with a router, such as "layers.0.mlp."."""
    return [name.removesuffix(ROUTER) for name in tensors if name.endswith(f".{ROUTER}")]


def unpack_means(router: Float[Tensor, "users rows width"], rank: int, most: int) -> Float[Tensor, "users means rank"]:
    """Return the means that users report in their uploaded routers: of T x, then of A_e x for each domain expert.

    The first ``rank`` rows of a router are the projection T of hidden states x. The rows below have the means, followed
    by padding. A_e is the LoRA factor A of expert e.

    Args:
        router: Uploaded routers.
        rank: LoRA rank, which is the length of a mean.
        most: Largest number of domain experts of a user.
    """
    num_means = 1 + most
    means_and_padding = router[:, rank:].flatten(1)
    return means_and_padding[:, : num_means * rank].unflatten(1, (num_means, rank))


def set_expert_means(
    experts: Float[Tensor, "experts ..."],
    uploads: Float[Tensor, "users most ..."],
    assigned: Int[Tensor, "users most"],
    weights: Float[Tensor, " users"],
) -> None:
    """Set each expert to the weighted mean of the uploads for it, in place; without uploads it is unchanged.

    Args:
        experts: A tensor of all experts.
        uploads: Each user's uploads for up to ``most`` experts.
        assigned: Index of the expert that each upload is for. With 3 experts, 3 marks an upload to ignore.
        weights: Aggregation weights of the users.
    """
    most = assigned.shape[1]
    # For each expert the indices of its uploads, padded to the same length for all experts.
    indices, is_padding = _uploads_by_expert(assigned.flatten(), len(experts))  # (experts, columns)
    weight_by_upload = weights.to(experts).repeat_interleave(most)
    upload_weights = weight_by_upload[indices] * ~is_padding
    upload_weights = upload_weights / upload_weights.sum(1, keepdim=True).clamp(min=torch.finfo(experts.dtype).tiny)
    uploads_by_expert = uploads.flatten(0, 1)[indices].to(experts)  # (experts, columns, ...)
    means = torch.einsum("ec,ec...->e...", upload_weights, uploads_by_expert)
    has_uploads = (~is_padding).any(1).view(-1, *[1] * (experts.dim() - 1))
    experts.copy_(torch.where(has_uploads, means, experts))


def _uploads_by_expert(
    expert_by_upload: Int[Tensor, " uploads"], num_experts: int
) -> tuple[Int[Tensor, "experts columns"], Bool[Tensor, "experts columns"]]:
    """Return a row for each expert with the indices of the uploads for it, and a mask of the rows' padding.

    For ``expert_by_upload = [1, 0, 1]`` the rows are ``[1, p]`` and ``[0, 2]`` with a padding p.

    Args:
        expert_by_upload: Index of the expert that each upload is for; ``num_experts`` for an upload to ignore.
        num_experts: Number of experts.
    """
    # In the example: num_uploads [1, 2], sorted_by_expert [1, 0, 2], start_of_expert [0, 1].
    num_uploads = expert_by_upload.bincount(minlength=num_experts + 1)[:num_experts]  # for each expert
    sorted_by_expert = expert_by_upload.argsort(stable=True)  # indices of uploads
    start_of_expert = num_uploads.cumsum(0) - num_uploads  # in ``sorted_by_expert``
    columns = torch.arange(int(num_uploads.max()), device=expert_by_upload.device)
    positions = start_of_expert.unsqueeze(1) + columns  # in ``sorted_by_expert``, (experts, columns)
    indices = sorted_by_expert[positions.clamp(max=len(sorted_by_expert) - 1)]
    is_padding = columns >= num_uploads.unsqueeze(1)
    return indices, is_padding


def solve_assignment(scores: Float[Tensor, "experts users"], choices: int, most: int) -> Bool[Tensor, "experts users"]:
    """Return which users each expert chooses so that the chosen scores have the largest sum (FedAMoLE's RSEA).

    An integer program finds the optimum. It has one variable for each pair of expert and user: 1 if it is chosen, or 0.

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
    largest_gain = max(float(np.abs(gain).max()), 1e-300)  # 1e-300: scores may all be equal
    cost = -gain / largest_gain  # the solver minimises
    # Matrices that sum the variables of each expert, and of each user.
    sums_by_expert = kron(eye_array(num_experts), np.ones((1, num_users)))
    sums_by_user = kron(np.ones((1, num_experts)), eye_array(num_users))
    result = milp(
        cost,
        integrality=np.ones(gain.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(sums_by_expert, choices, choices),
            LinearConstraint(sums_by_user, least, most),
        ],
    )
    assert result.success, result.message
    is_chosen = torch.from_numpy(result.x > 0.5)  # the solver returns floats close to 0 and 1
    return is_chosen.view(num_experts, num_users).to(scores.device)


SHARED = frozenset({ATTENTION, GENERALIST, SPECIALIST, ROUTER})
"""Roles that users upload."""


def fedamole(
    *,
    experts: CountOrNone = 0,
    choices: Count = 2,
    most: Annotated[int, Range(least=1, most=999)] = 8,
    instances: Count = 16,
) -> Method:
    """FedAMoLE: a LoRA expert that all users share, and domain experts that the server assigns to users each round.

    Source: Zhang et al. 2024, "Personalized Federated Fine-Tuning for LLMs via Data-Driven Heterogeneous Model
    Architectures", arXiv:2411.19128, and its public code (zyc140345/FedAMoLE), whose defaults these are.
    Shared: attention, 1 generalist per MLP; a user's domain experts in each MLP (specialists), up to ``most`` of
    ``experts``; the routers' projection T.  Local: nothing.  Frozen: the base.
    Client: local steps on training text, which train all of these together, the router with its own settings, with new
    optimisers each round.  Domain expert e has the weight softmax_e of ``(A_e x)^T (T x) / sqrt(rank)`` over the top k
    of the user's experts, where A_e is its LoRA factor and x the token.  Then the client sends its means of T x and of
    each A_e x.
    Server: means of the shared tensors over users, and of a domain expert and its A_e x over the users who have it.
    Then expert e gets a score for each user, the softmax over users of ``(A_e x)^T (T x) / sqrt(rank)`` for these
    means.  Each expert chooses ``choices`` users, and each user is chosen by 2 (if there are enough experts) to
    ``most`` experts, so that the sum of the chosen scores is maximal.
    Differs from the paper: there is one router and one assignment for each MLP, instead of each linear; A_e is that of
    the linear ``up``.  An MLP's output is one half of the generalist's and one half of the domain experts' mixture;
    ``adapters: {mix: linear}`` with twice the alpha is the paper's sum inside each linear.  Attention has a shared LoRA
    only.  The means of T x and A_e x are over directions of random training windows, computed with averaged experts,
    instead of all tokens of held-out windows.  Means over users are weighted by ``training.weighting``.  An expert
    without participants is unchanged, and absent users count with their most recent T x.  Missing experts are sent as
    zeros.  Users who join later get the experts that fit best.  Written from the public code and the abstract
    of the paper's fourth version.

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
    """Gating of FedAMoLE: domain expert e has the logit ``(A_e x)^T (T x)`` for input x.

    A_e is the expert's LoRA factor A and T a projection that all experts share.
    """

    def __str__(self) -> str:
        """Return how experts are weighted, to complete an error message "its experts are ..."."""
        return "weighted by pairs of projections"

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Init]:
        """Return the number of rows of an MLP's router tensor ``(rows, width)``, and its initialiser.

        The first ``rank`` rows are the projection T. The rows below are for a user's report, which is uploaded with the
        router: the mean of T x, and the mean of A_e x for each domain expert, ``rank`` numbers each.

        Args:
            experts: Number of experts: the generalist and the domain experts.
            rank: LoRA rank.
            width: Width of the router's input.
        """
        num_domain_experts = experts - 1
        num_means = 1 + num_domain_experts  # of T x, and of each A_e x
        report_rows = math.ceil(num_means * rank / width)
        return rank + report_rows, init_router

    def multiply_adds(self, experts: int, entries: int, width: int) -> int:
        """Return the multiply-adds of ``(A_e x)^T (T x)`` for all domain experts e and one token x, given T x.

        An expert takes ``rank * width`` for A_e x and ``rank`` for the product with T x.

        Args:
            experts: Number of experts, including the generalist, which has no such products.
            entries: Numbers in the A factors of all experts, ``experts * rank * width``.
            width: Width of the router's input.
        """
        sum_of_ranks = entries // width  # experts * rank
        for_all_experts = entries + sum_of_ranks  # experts * (rank * width + rank)
        return for_all_experts * (experts - 1) // experts  # without the generalist

    def __call__(
        self, router: Router, products: Float[Tensor, "users n rows"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Return the experts' weights for each token: one half for the generalist, the rest by softmax.

        Domain expert e has the logit ``(A_e x)^T (T x) / sqrt(rank)``, with the projection T and the expert's LoRA
        factor A_e. An expert with A_e = 0 is missing and gets no weight. The load-balancing penalty is stored in
        ``router.penalty``.

        Args:
            router: The router, with the A factors of all experts as ``keys``.
            products: Products of the router's rows with x; the first ``rank`` rows are T.
            x: Inputs of the MLP for n tokens of each user.
        """
        keys = router.keys[:, 1:]  # A_e of the domain experts, (users, experts, rank, width)
        num_experts, rank = keys.shape[1:3]
        is_present = keys.flatten(2).any(-1)
        A_x = torch.bmm(x, keys.flatten(1, 2).to(x.dtype).mT).unflatten(-1, (num_experts, rank))
        T_x = products[..., :rank, None]
        logits = (A_x.to(products.dtype) @ T_x).squeeze(-1) / math.sqrt(rank)
        gates, picks = gate(logits, is_present, router.top_k)
        leaves_out_experts = router.top_k < num_experts
        # If each token used all experts, the penalty would be constant.
        if router.balance != "none" and leaves_out_experts:
            router.penalty = balance_penalty(logits, picks, is_present, "uniform")
        generalist_gate = torch.full_like(gates[..., :1], 0.5)
        return torch.cat([generalist_gate, gates / 2], -1)


@dataclass(frozen=True)
class ReportEmbeddings(ClientHook):
    """Client hook of FedAMoLE: reports means of T x and A_e x over a user's text, by which the server assigns experts.

    x are hidden states, T is the router's projection and A_e the LoRA factor A of domain expert e.
    """

    instances: int
    language_only = True

    def begin(self, cohort: Cohort) -> None:
        """Reset the optimisers, as the server may have assigned other experts to the user."""
        cohort.reset_moments(SHARED)

    def end(self, cohort: Cohort) -> None:
        """Write T x and each A_e x into the rows of the user's router below T, which are uploaded with it.

        Here x stands for all hidden states of the user: it is the mean of their unit vectors, times ``sqrt(width)``,
        which is the length of a vector after a norm layer.
        """
        for name, direction in cohort.router_directions(self.instances, whole=True).items():
            router = cohort.tensors[name]
            keys = expert_keys(cohort.tensors, name)  # A_e, (users, experts, rank, width)
            rank, width = keys.shape[2:]
            x = direction.unsqueeze(-1) * math.sqrt(width)  # (users, width, 1)
            T, report_rows = router[:, :rank], router[:, rank:]
            report = torch.cat([T @ x, keys.flatten(1, 2) @ x], dim=1).squeeze(-1)
            num_unused = report_rows[0].numel() - report.shape[1]  # at the end of the rows, filled with 0
            report_rows.copy_(F.pad(report, (0, num_unused)).view(report_rows.shape))
