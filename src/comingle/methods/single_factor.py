"""Methods that average one of LoRA's two factors: FFA-LoRA, FedSA-LoRA and RoLoRA."""

from __future__ import annotations

from typing import ClassVar

from comingle.methods.base import Client, ClientHook, Cohort, Method, Phase, Placement, joint
from comingle.methods.server import Mean
from comingle.utils.trees import ATTENTION, EXPERT_ROLES, GENERALIST, ROUTER

A = frozenset({f"{ATTENTION}.a", f"{GENERALIST}.a"})
B = frozenset({f"{ATTENTION}.b", f"{GENERALIST}.b"})


def ffa_lora() -> Method:
    """FFA-LoRA: A is frozen at an initial value that all users share, B is trained and averaged.

    Source: Sun et al. 2024, "Improving LoRA in Privacy-preserving Federated Learning", arXiv:2403.12313; in CoMiGS
    (Fan et al. 2025, arXiv:2409.13931), App. C.2.
    Shared: B of attention and of 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base, A.
    Client: joint steps on B on training text.  Server: mean over users, which is exact: mean(B) A = mean(B A).
    Differs from the paper: none known.  It trains and sends fewer parameters than the other methods with 2 experts.
    """
    return Method(
        name="ffa-lora",
        placement=Placement(generalists=2, shared=B),
        client=Client(phases=(Phase(roles=B),)),
        server=Mean(),
    )


def fedsa_lora() -> Method:
    """FedSA-LoRA: both factors are trained, A is averaged, B is local.

    Source: Guo et al. 2024, "Selective Aggregation for Low-Rank Adaptation in Federated Learning", arXiv:2410.01463;
    in CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2.
    Shared: A of attention and of 2 averaged LoRA experts per MLP.  Local: their B.  Frozen: the base.
    Client: joint steps on training text.  Server: mean over users.
    Differs from the paper: none known.
    """
    return Method(
        name="fedsa-lora",
        placement=Placement(generalists=2, shared=A),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )


class NewOptimisers(ClientHook):
    """Resets the optimisers at the start of each round, as their moments belong to other factors."""

    only_resets_moments: ClassVar[bool] = True

    def begin(self, cohort: Cohort) -> None:
        """Reset the moments of all experts and routers."""
        cohort.reset_moments(frozenset({*EXPERT_ROLES, ROUTER}))


def rolora() -> Method:
    """RoLoRA: rounds train and average B and A in turn, B first.

    Source: Chen et al. 2025, "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA",
    arXiv:2502.01755 (before: arXiv:2409.02346), Algorithm 1.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base, and one factor in turn.
    Client: joint steps on B, or on A, on training text.  Server: mean over users, which is exact: ``mean(B) A = mean(B
    A)``, as the other factor is the same for all.
    Differs from the paper: both factors are exchanged, as a user who was absent from a round needs the one that is
    frozen now; the paper sends the trained one, half as much.  Each round begins with a new optimiser.
    """
    # Each phase runs in one of two rounds: B in the first, third ..., A in the second, fourth ...
    return Method(
        name="rolora",
        placement=Placement(generalists=2, shared=A | B),
        client=Client(phases=(Phase(roles=B, turns=2), Phase(roles=A, turns=2, turn=1)), parts=(NewOptimisers(),)),
        server=Mean(),
    )
