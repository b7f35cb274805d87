"""Methods that average a part of a model: one of LoRA's two factors, or all layers but the last or the norms."""

from __future__ import annotations

from typing import ClassVar

from comingle.methods.base import Client, ClientHook, Cohort, Method, Phase, Placement, joint
from comingle.methods.server import Mean
from comingle.utils.trees import ATTENTION, BASE, EXPERT_ROLES, GENERALIST, ROUTER, STATISTICS

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


def fedbn() -> Method:
    """FedBN: all is averaged but the norm layers, whose weights and running statistics stay local.

    Source: Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
    arXiv:2102.07623, Algorithm 1.
    Shared: a net without its norm layers.  Local: norm layers: weights, and running statistics where they have some.
    Frozen: nothing.
    Client: joint steps on training data.  Server: mean of the shared tensors over users.
    Differs from the paper: norms of other kinds than batch norm (group, layer) are local too.  Nets without norms, and
    language models, whose norms are frozen, are refused: there it would be FedAvg.
    """
    return Method(
        name="fedbn",
        placement=Placement(shared=frozenset({f"{BASE}.body", f"{BASE}.head"}), needs=frozenset({f"{BASE}.norm"})),
        client=Client(phases=(Phase(roles=frozenset({BASE})),)),
        server=Mean(),
    )


BODY = frozenset({ATTENTION, f"{GENERALIST}.body", f"{BASE}.body", f"{BASE}.norm", STATISTICS})
"""Roles of all but a net's last layer; for a language model, of all LoRA but that of the last MLP."""


def fedper() -> Method:
    """FedPer: base layers are shared, the last layer is local.

    Source: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", arXiv:1912.00818, Algorithms 1
    and 2, with one personalization layer.
    Shared: a net without its last layer, with its statistics; on a language model attention and 2 averaged LoRA experts
    per MLP, but not those of the last MLP.  Local: a net's last layer; 2 experts of a language model's last MLP.
    Frozen: a language model's base.
    Client: joint steps on training data, on all layers together.  Server: mean of the shared tensors over users.
    Differs from the paper: on language models, which it does not cover, the local part is the LoRA of the last MLP, the
    last module of the blocks, as the head after it is frozen.
    """
    return Method(
        name="fedper",
        placement=Placement(generalists=2, shared=BODY),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )
