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
    """Return the A factors of the domain experts that share a router's input."""
    return tensors[router.removesuffix(ROUTER) + "up.a"][:, 1:]


@dataclass(frozen=True, kw_only=True)
class AssignmentServer(Server):
    """Server that averages experts and assigns them to users.

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
        """Return the initial state: experts with different initial values, assigned at random.

        The assignment follows from random values in place of the means that users have not reported yet.

        Raises:
            RecipeError: The number of experts per user is above ``most`` or below 1.
        """
        users, layers = len(setup.users), layers_of(setup.models)
        experts = self.experts or EXPERTS_PER_USER * users
        chosen = experts * min(self.choices, users)
        if users > 1 and not users <= chosen <= users * self.most:
            raise RecipeError(
                f"method fedamole: got {experts} experts that choose {min(self.choices, users)} of {users} users each, "
                f"{chosen} choices in all; allowed: {users} to {users * self.most} (method.experts, choices, most)"
            )
        kept: Tree = {}
        for name, t in setup.models.items():
            kept[MODEL_PREFIX + name] = t[0, :1].clone() if t.dim() == 4 else t[0].clone()
            if t.dim() == 4:
                drawn = init_a((experts, *t.shape[2:]), generator(setup.seed, name, "experts"))
                kept[EXPERTS + name] = drawn.to(t) if name.endswith(".a") else torch.zeros_like(drawn).to(t)
        own = next(t for name, t in kept.items() if name.startswith(EXPERTS))
        size = (len(layers), own.shape[-2])
        drawn = [torch.randn(size, generator=generator(setup.seed, name, "tokens")) for name in setup.users]
        kept[TOKENS] = torch.stack(drawn).to(own)
        drawn = [torch.randn(size, generator=generator(setup.seed, e, "embeddings")) for e in range(experts)]
        kept[EMBEDDINGS] = torch.stack(drawn, 1).to(own)
        all_users = range(users)
        kept[PLACES] = torch.stack([self.assign(fit_scores(kept, layer, all_users)) for layer in range(len(layers))], 1)
        return kept

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return the shared tensors and each user's domain experts; the rows for reports are zero."""
        sent, places = {}, kept[PLACES][list(users)]
        rank = kept[TOKENS].shape[-1]
        for name, t in model_of(kept).items():
            own = t.expand(len(users), *t.shape)
            if name.endswith(ROUTER):
                own = torch.cat([own[:, :rank], torch.zeros_like(own[:, rank:])], 1)
            elif EXPERTS + name in kept:
                pool = torch.cat([kept[EXPERTS + name], torch.zeros_like(t)])  # the last one fills empty places
                layer = layers_of(model_of(kept)).index(layer_of(name))
                own = torch.cat([own, pool[places[:, layer]]], 1)
            sent[name] = own.unsqueeze(1)
        return sent

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Average the uploads, then assign experts anew; once experts are fixed, only reassign the participants."""
        users, layers = list(received.users), layers_of(model_of(kept))
        common = {n: t[:, :1] if EXPERTS + n in kept else t for n, t in received.tensors.items()}
        sums = {} if self.fixed else weighted_sums(common, dict.fromkeys(common, received.weights))
        for name, t in sums.items():
            kept[MODEL_PREFIX + name].copy_(t)
        for number, layer in enumerate(layers):
            assigned = kept[PLACES][users, number]
            means = unpack_means(received.tensors[f"{layer}{ROUTER}"], kept[TOKENS].shape[-1], self.most)
            kept[TOKENS][users, number] = means[:, 0].to(kept[TOKENS])
            if not self.fixed:
                move_means(kept[EMBEDDINGS][number], means[:, 1:], assigned, received.weights)
                for name in (n for n in received.tensors if layer_of(n) == layer and EXPERTS + n in kept):
                    move_means(kept[EXPERTS + name], received.tensors[name][:, 1:], assigned, received.weights)
            reassigned = users if self.fixed else list(range(len(kept[PLACES])))
            kept[PLACES][reassigned, number] = self.assign(fit_scores(kept, number, reassigned))

    def assign(self, scores: Float[Tensor, "experts users"]) -> Int[Tensor, "users most"]:
        """Return the indices of each user's experts, from how well they fit; a single user gets those that fit best.

        Raises:
            DivergenceError: A score is not finite.
        """
        experts, users = scores.shape
        if lost := int((~scores.isfinite()).sum()):
            advice = "try a smaller training.experts.learning_rate and training.router.learning_rate"
            raise DivergenceError(
                f"method fedamole: {lost} of {scores.numel()} scores of experts for users are not finite; {advice}"
            )
        if users == 1:
            chosen = torch.zeros_like(scores, dtype=torch.bool)
            chosen[scores[:, 0].argsort(descending=True, stable=True)[: self.most]] = True
        else:
            chosen = solve_assignment(scores.double().softmax(1), min(self.choices, users), self.most)
        # Sorting moves the index ``experts``, which stands for an empty place, behind the chosen ones.
        numbers = torch.arange(experts, device=scores.device).unsqueeze(1)
        listed = torch.where(chosen, numbers, experts).T.sort(1).values
        return torch.nn.functional.pad(listed, (0, self.most), value=experts)[:, : self.most]

    def settled(self) -> AssignmentServer:
        """Return a server with fixed experts.

        A new user reports its means for one round, gets experts, and trains on without further exchanges.
        """
        return replace(self, fixed=True, exchange_every=NEVER)


def fit_scores(kept: Tree, layer: int, users: Sequence[int]) -> Float[Tensor, "experts users"]:
    """Return the scores ``(mean of A_e x)^T (mean of T x) / sqrt(rank)`` of experts and users.

    Args:
        kept: State of the server.
        layer: Index of the MLP.
        users: Indices of the users.
    """
    tokens = kept[TOKENS][list(users), layer]
    return kept[EMBEDDINGS][layer] @ tokens.T / math.sqrt(tokens.shape[1])


def layer_of(name: str) -> str:
    """Return the MLP that a tensor belongs to, such as "layers.0.mlp.", or an empty string."""
    return name[: name.rfind("mlp.") + 4] if "mlp." in name else ""


def layers_of(tensors: Tree) -> list[str]:
    """Return the names of all MLPs with a router."""
    return [name.removesuffix(ROUTER) for name in tensors if name.endswith(f".{ROUTER}")]


def unpack_means(router: Float[Tensor, "users rows width"], rank: int, most: int) -> Float[Tensor, "users means rank"]:
    """Return the means of T x and of each A_e x from the rows below T in uploaded routers.

    Args:
        router: Uploaded routers.
        rank: Rank of T.
        most: Number of places for domain experts.

    Returns:
        Means ``(users, 1 + most, rank)``, that of T x first.
    """
    return router[:, rank:].flatten(1)[:, : (1 + most) * rank].unflatten(1, (1 + most, rank))


def move_means(
    kept: Float[Tensor, "experts ..."],
    sent: Float[Tensor, "users most ..."],
    assigned: Int[Tensor, "users most"],
    weights: Float[Tensor, " users"],
) -> None:
    """Set each expert to the weighted mean of its users' uploads, in place; an expert without users is unchanged.

    Args:
        kept: The experts.
        sent: Uploaded experts of each user.
        assigned: Their indices; the number of experts stands for an empty place.
        weights: Aggregation weights of the users.
    """
    flat = assigned.flatten()
    counts = flat.bincount(minlength=len(kept) + 1)[: len(kept)]
    places = torch.arange(int(counts.max()), device=kept.device)
    # Row e of ``rows`` numbers the uploads of expert e, padded to the largest number; padding has a share of 0.
    first = (counts.cumsum(0) - counts).unsqueeze(1)
    rows = flat.argsort(stable=True)[(first + places).clamp(max=len(flat) - 1)]
    weight_by_upload = weights.to(kept).repeat_interleave(assigned.shape[1])
    shares = weight_by_upload[rows] * (places < counts.unsqueeze(1))
    shares = shares / shares.sum(1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
    mean = torch.einsum("eh,eh...->e...", shares, sent.flatten(0, 1)[rows].to(kept))
    kept.copy_(torch.where((counts > 0).view(-1, *[1] * (kept.dim() - 1)), mean, kept))


def solve_assignment(scores: Float[Tensor, "experts users"], choices: int, most: int) -> Bool[Tensor, "experts users"]:
    """Return which expert chooses which user, so that the sum of the chosen scores is maximal.

    This is RSEA, an integer program.

    Args:
        scores: Score of each expert and user.
        choices: Users that each expert chooses.
        most: Largest number of experts per user.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import eye_array, kron

    experts, users = scores.shape
    least = min(MIN_EXPERTS, experts * choices // users)
    # Scores are centred and scaled for the solver; the optimum is the same.
    gain = (scores - scores.mean()).flatten().cpu().numpy()
    result = milp(
        -gain / max(float(np.abs(gain).max()), 1e-300),
        integrality=np.ones(gain.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(kron(eye_array(experts), np.ones((1, users))), choices, choices),
            LinearConstraint(kron(np.ones((1, experts)), eye_array(users)), least, most),
        ],
    )
    assert result.success, result.message
    return torch.from_numpy(result.x > 0.5).view(experts, users).to(scores.device)


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
        experts: Domain experts per MLP; 0 is three for each user.
        choices: Users that each expert chooses.
        most: Largest number of domain experts of a user.
        instances: Windows for the means.
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
        """Return the number of router rows and their initialiser.

        The first rows are T; the rows below hold the reported means of T x and of each A_e x.

        Args:
            experts: Number of places for experts.
            rank: LoRA rank.
            width: Width of the router's input.
        """
        return rank + -(-experts * rank // width), init_router

    def multiplies(self, experts: int, entries: int, width: int) -> int:
        """Return the multiply-adds per token beyond those of the router's rows: with A, and of pairs.

        Args:
            experts: Number of experts.
            entries: Numbers in the A factors of all experts.
            width: Width of the router's input.
        """
        return (entries + entries // width) * (experts - 1) // experts

    def __call__(
        self, router: Router, products: Float[Tensor, "users n rows"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Return the weights: one half for the first expert, the other half by softmax; zero places have no expert."""
        keys = router.keys[:, 1:]
        held, rank = keys.flatten(2).any(-1), keys.shape[2]
        seen = torch.bmm(x, keys.flatten(1, 2).to(x.dtype).mT).unflatten(-1, keys.shape[1:3])
        logits = (seen.to(products.dtype) @ products[..., :rank, None]).squeeze(-1) / math.sqrt(rank)
        gates, picks = gate(logits, held, router.top_k)
        if router.balance != "none" and router.top_k < keys.shape[1]:
            router.penalty = balance_penalty(logits, picks, held, "uniform")
        return torch.cat([torch.full_like(gates[..., :1], 0.5), gates / 2], -1)


@dataclass(frozen=True)
class ReportEmbeddings(ClientHook):
    """Reports the mean projections by T and by each expert's A of a user's own text."""

    instances: int
    language_only = True

    def begin(self, cohort: Cohort) -> None:
        """Reset the optimisers, as the experts in these places may be others now."""
        cohort.reset_moments(SHARED)

    def end(self, cohort: Cohort) -> None:
        """Write the means into the router's rows below T.

        Inputs are scaled to a mean square of 1, as after a norm layer.
        """
        for name, direction in cohort.router_directions(self.instances, whole=True).items():
            router, keys = cohort.tensors[name], expert_keys(cohort.tensors, name)
            rank, x = keys.shape[2], direction.unsqueeze(-1) * math.sqrt(direction.shape[-1])
            means = torch.cat([router[:, :rank] @ x, (keys.flatten(1, 2) @ x)], 1).squeeze(-1)
            below = router[:, rank:]
            below.copy_(F.pad(means, (0, below[0].numel() - means.shape[1])).view(below.shape))
