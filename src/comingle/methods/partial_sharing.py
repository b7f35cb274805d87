"""Methods that average a part of a model: one of LoRA's two factors, or all layers but the last or the norms."""

from __future__ import annotations

from typing import ClassVar

from comingle.methods.base import Client, ClientHook, Cohort, Method, Phase, Placement, joint
from comingle.methods.server import Mean
from comingle.utils.trees import ATTENTION, BASE, EXPERT_ROLES, GENERALIST, ROUTER, STATISTICS

A = frozenset({f"{ATTENTION}.a", f"{GENERALIST}.a"})
"""LoRA factors on the input side."""

B = frozenset({f"{ATTENTION}.b", f"{GENERALIST}.b"})
"""LoRA factors on the output side."""


def ffa_lora() -> Method:
    """FFA-LoRA: all users have the same frozen A; they train B, which the server averages.

    Source: Sun et al. 2024, "Improving LoRA in Privacy-preserving Federated Learning", arXiv:2403.12313; in CoMiGS
    (Fan et al. 2025, arXiv:2409.13931), App. C.2.
    Shared: B of attention and of 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base, A.
    Client: local steps on training text, which train B.  Server: mean over users, which is exact: mean(B) A = mean(B
    A).
    Differs from the paper: no difference is known.
    """
    return Method(
        name="ffa-lora",
        placement=Placement(generalists=2, shared=B),
        client=Client(phases=(Phase(roles=B),)),
        server=Mean(),
    )


def fedsa_lora() -> Method:
    """FedSA-LoRA: users train A and B; the server averages A, B stays local.

    Source: Guo et al. 2024, "Selective Aggregation for Low-Rank Adaptation in Federated Learning", arXiv:2410.01463;
    in CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2.
    Shared: A of attention and of 2 averaged LoRA experts per MLP.  Local: their B.  Frozen: the base.
    Client: local steps on training text.  Server: mean over users.
    Differs from the paper: no difference is known.
    """
    return Method(
        name="fedsa-lora",
        placement=Placement(generalists=2, shared=A),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )


class NewOptimisers(ClientHook):
    """Client hook that resets the optimisers at the start of each round, as the LoRA factors to train have changed."""

    only_resets_moments: ClassVar[bool] = True

    def begin(self, cohort: Cohort) -> None:
        """Reset the optimisers' moments of attention, experts and routers."""
        cohort.reset_moments(frozenset({*EXPERT_ROLES, ROUTER}))


def rolora() -> Method:
    """RoLoRA: the first, third, fifth ... round trains and averages B, the others A.

    Source: Chen et al. 2025, "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA",
    arXiv:2502.01755 (before: arXiv:2409.02346), Algorithm 1.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base, and one factor in turn.
    Client: steps on B, or on A, on training text.  Server: mean over users, which is exact: ``mean(B) A = mean(B A)``,
    as the frozen factor is the same for all.
    Differs from the paper: a download has both factors, in case a user was absent when the frozen one was trained; the
    paper sends only the trained one.  Each round begins with a new optimiser.
    """
    train_b = Phase(roles=B, turns=2, turn=0)
    train_a = Phase(roles=A, turns=2, turn=1)
    return Method(
        name="rolora",
        placement=Placement(generalists=2, shared=A | B),
        client=Client(phases=(train_b, train_a), parts=(NewOptimisers(),)),
        server=Mean(),
    )


def fedbn() -> Method:
    """FedBN: the server averages all layers of a net except norm layers, which stay local.

    Source: Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
    arXiv:2102.07623, Algorithm 1.
    Shared: a net without its norm layers.  Local: the norm layers with their running statistics.  Frozen: nothing.
    Client: local steps on training data.  Server: mean of the shared tensors over users.
    Differs from the paper: not only batch norms are local, but group and layer norms too.  Nets without norms are
    refused, because there it would be FedAvg, and so are language models, whose norms are frozen.
    """
    all_but_norms = frozenset({f"{BASE}.body", f"{BASE}.head"})
    norms = frozenset({f"{BASE}.norm"})
    return Method(
        name="fedbn",
        placement=Placement(shared=all_but_norms, needs=norms),
        client=Client(phases=(Phase(roles=frozenset({BASE})),)),
        server=Mean(),
    )


BODY = frozenset({ATTENTION, f"{GENERALIST}.body", f"{BASE}.body", f"{BASE}.norm", STATISTICS})
"""Roles of all but a net's last layer; for a language model, of all LoRA but that of the last MLP."""


def fedper() -> Method:
    """FedPer: the server averages all layers except the last one, which stays local.

    Source: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", arXiv:1912.00818, Algorithms 1
    and 2, with one personalization layer.
    Shared: a net without its last layer, with running statistics of norm layers; on a language model attention and 2
    averaged LoRA experts per MLP, except in the last MLP.  Local: a net's last layer; the experts of a language model's
    last MLP.  Frozen: a language model's base.
    Client: local steps on training data, which train all layers together.  Server: mean of the shared tensors over
    users.
    Differs from the paper: it does not cover language models; as their head is frozen, the last MLP takes its place.
    """
    return Method(
        name="fedper",
        placement=Placement(generalists=2, shared=BODY),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )
