"""FedAMoLE: domain experts choose the users whose data they fit, and each user mixes those that have chosen it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, Part, joint
from comingle.methods.cohort import Cohort
from comingle.methods.settings import Count, CountOrNone, Range
from comingle.models.routers import Router, balance_penalty, gate, init_router
from comingle.papers.rivals.fedamole_server import Assigning, keys_of
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Init

SHARED = frozenset({ATTENTION, GENERALIST, SPECIALIST, ROUTER})


def fedamole(
    *,
    experts: CountOrNone = 0,
    choices: Count = 2,
    most: Annotated[int, Range(least=1, most=999)] = 8,
    instances: Count = 16,
) -> Method:
    """FedAMoLE: a shared LoRA expert that is always on, and domain experts that the server assigns anew each round.

    Source: Zhang et al. 2024, "Personalized Federated Fine-Tuning for LLMs via Data-Driven Heterogeneous Model
    Architectures", arXiv:2411.19128, and its public code (zyc140345/FedAMoLE), whose defaults these are.
    Shared: attention, 1 generalist per MLP; up to ``most`` of ``experts`` domain experts per MLP (0: three for each
    user), in the places of specialists; the routers' token projection T.  Local: nothing.  Frozen: the base.
    Client: joint steps on all of it on training text, the router with settings of its own, both optimisers new in each
    round.  Domain expert e weighs ``softmax over the top k of (A_e x)^T (T x) / sqrt(rank)``, of those that the user
    has.  Then it sends the mean of T x and of each A_e x over ``instances`` windows.
    Server: means of what all have, of a domain expert over those who have it, and of A_e x likewise.  By these and T x
    each expert has a softmax over users; an integer program maximises the sum of the chosen, where each expert chooses
    ``choices`` users (all, where there are fewer) and each user is chosen at least twice (once, where there are fewer
    experts), at most ``most`` times.
    Differs from the paper: its code and its abstract were at hand, not its equations.  One router and one assignment
    for each MLP, in place of each linear; A_e is that of ``up``.  An MLP's output is half the shared expert's, half the
    mixture's of whole experts; ``adapters: {mix: linear}`` with twice the alpha is the paper's sum inside each linear.
    The attention has a shared LoRA alone.  x of the means is the direction of a window's mean, of random training
    windows and experts averaged, in place of every token of held-out ones.  Means are by ``training.weighting``; an
    expert none of whose users took part stays, and who is absent counts by its last T x.  Empty places travel as zeros.
    Who joins later takes those that fit best.
    """
    return Method(
        name="fedamole",
        placement=Placement(
            specialists=most,
            routed=True,
            gating=Pairs(),
            shared=SHARED,
        ),
        client=Client(phases=joint(routed=True), parts=(Embedded(instances),)),
        server=Assigning(experts=experts, choices=choices, most=most),
    )


@dataclass(frozen=True)
class Pairs:
    """Weighs domain experts by the products of two projections of what a router reads: the expert's A, and T."""

    def __str__(self) -> str:
        return "weighed by pairs of projections"

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Init]:
        """T, and below it the rows in which a user tells the means of T x and of each A_e x."""
        return rank + -(-experts * rank // width), init_router

    def multiplies(self, experts: int, entries: int, width: int) -> int:
        """Multiply-adds of a token besides those with a router's rows: with A, of so many ``entries``, and of pairs."""
        return (entries + entries // width) * (experts - 1) // experts

    def __call__(
        self, router: Router, products: Float[Tensor, "users n rows"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """One half for the first expert; of the others' half as their softmax says. A place of zeros has no expert."""
        keys = router.keys[:, 1:]
        held, rank = keys.flatten(2).any(-1), keys.shape[2]
        seen = torch.bmm(x, keys.flatten(1, 2).to(x.dtype).mT).unflatten(-1, keys.shape[1:3])
        logits = (seen.to(products.dtype) @ products[..., :rank, None]).squeeze(-1) / math.sqrt(rank)
        gates, picks = gate(logits, held, router.top_k)
        if router.balance != "none" and router.top_k < keys.shape[1]:
            router.penalty = balance_penalty(logits, picks, held, "uniform")
        return torch.cat([torch.full_like(gates[..., :1], 0.5), gates / 2], -1)


@dataclass(frozen=True)
class Embedded(Part):
    """What each expert, and T, make of a user's own text."""

    instances: int
    language_only = True

    def begin(self, cohort: Cohort) -> None:
        """Other experts may be in these places now; the optimisers are new."""
        cohort.forget(SHARED)

    def end(self, cohort: Cohort) -> None:
        """Below T; what is read has a mean square of 1, as behind a norm."""
        for name, direction in cohort.router_directions(self.instances, whole=True).items():
            router, keys = cohort.tensors[name], keys_of(cohort.tensors, name)
            rank, x = keys.shape[2], direction.unsqueeze(-1) * math.sqrt(direction.shape[-1])
            told = torch.cat([router[:, :rank] @ x, (keys.flatten(1, 2) @ x)], 1).squeeze(-1)
            below = router[:, rank:]
            below.copy_(F.pad(told, (0, below[0].numel() - told.shape[1])).view(below.shape))
