"""Mixtures of experts with all experts local or all shared, and pFedMoE."""

from __future__ import annotations

from comingle.methods.base import Client, Method, Placement, alternating, joint
from comingle.methods.server import Mean, Server
from comingle.methods.settings import Count
from comingle.utils.trees import ATTENTION, GENERALIST, STATISTICS

_LOCAL = Placement(generalists=0, specialists=2, routed=True)
_SHARED = Placement(generalists=2, routed=True, shared=frozenset({ATTENTION, GENERALIST}))


def local_moe() -> Method:
    """Train each user alone, with a router over 2 experts that is trained together with them.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part ii.
    Shared: nothing.  Local: attention, 2 experts per MLP, routers.  Frozen: the base.
    Client: joint steps on experts and routers on training text, routers with their own settings.  Server: none.
    Differs from the paper: none known.  Routers have the constant learning rate of App. B.1; in the public code they
    follow the experts' cosine where both are trained together.
    """
    return Method(name="local-moe", placement=_LOCAL, client=Client(phases=joint(routed=True)), server=Server())


def fedavg_moe() -> Method:
    """FedAvg of 2 experts, with a local router trained together with them.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part ii.
    Shared: attention, 2 experts per MLP.  Local: routers.  Frozen: the base.
    Client: joint steps on experts and routers on training text, routers with their own settings.
    Server: mean over users.
    Differs from the paper: routers stay local, as in the public code; the paper does not say.  The
    routers' learning rate is constant as in App. B.1; in the public code it follows the experts' cosine where both are
    trained together.
    """
    return Method(name="fedavg-moe", placement=_SHARED, client=Client(phases=joint(routed=True)), server=Mean())


def local_moe_tr(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """Train each user alone, alternating between 2 experts and their router, on fresh training batches.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part iii.
    Shared: nothing.  Local: attention, 2 experts per MLP, routers.  Frozen: the base.
    Client: alternating; router steps on newly sampled training batches.  Server: none.
    Differs from the paper: none known.

    Args:
        router_every: Local steps of a user between two router phases. A run of fewer local steps trains no router and
            warns.
        router_steps: Optimiser steps of a router phase, each on a fresh batch.
        accumulate_gradients: Keep gradients across phases, as CoMiGS's public code does; the experts then learn from
            the batches of router steps too.
    """
    phases = alternating("train", router_every, router_steps, accumulate=accumulate_gradients)
    return Method(name="local-moe-tr", placement=_LOCAL, client=Client(phases=phases), server=Server())


def fedavg_moe_tr(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """FedAvg of 2 experts, alternating with steps on a local router, on fresh training batches.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part iii.
    Shared: attention, 2 experts per MLP.  Local: routers.  Frozen: the base.
    Client: alternating; router steps on newly sampled training batches.  Server: mean over users.
    Differs from the paper: routers stay local, as in the public code; the paper does not say.

    Args:
        router_every: Local steps of a user between two router phases. A run of fewer local steps trains no router and
            warns.
        router_steps: Optimiser steps of a router phase, each on a fresh batch.
        accumulate_gradients: Keep gradients across phases, as CoMiGS's public code does; the experts then learn from
            the batches of router steps too.
    """
    phases = alternating("train", router_every, router_steps, accumulate=accumulate_gradients)
    return Method(name="fedavg-moe-tr", placement=_SHARED, client=Client(phases=phases), server=Mean())


SHARED_STATISTICS = f"{STATISTICS}.shared"
"""Role of the running statistics of the shared one of two gated nets."""


def pfedmoe() -> Method:
    """pFedMoE: one shared and one local expert, and a local router, trained together end to end.

    Source: Yi et al. 2024, arXiv:2402.01350; on language models as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 1 generalist per MLP; for nets a feature extractor with its statistics.  Local: 1 specialist per
    MLP, routers; for nets a feature extractor, the head and a gate.  Frozen: a language model's base.
    Client: joint steps on experts and routers on training data, routers (gates) with their own settings.  In nets the
    gate, linear in the sample, weighs the features of the two extractors for the head.  Server: mean over users.
    Differs from the paper: on language models tokens are routed, block by block, instead of whole samples, as CoMiGS
    applies it, and routers have a constant learning rate as in CoMiGS's App. B.1.  For nets both extractors have the
    task's architecture up to its last layer; the paper's shared one is smaller, and its gate has two layers after a
    norm.
    """
    return Method(
        name="pfedmoe",
        placement=Placement(
            specialists=1,
            routed=True,
            gated=True,
            shared=frozenset({ATTENTION, GENERALIST, SHARED_STATISTICS}),
        ),
        client=Client(phases=joint(routed=True)),
        server=Mean(),
    )
