"""Mixtures of experts with all experts local or all shared, and pFedMoE."""

from __future__ import annotations

from comingle.methods.base import Client, Method, Placement, alternating, joint
from comingle.methods.server import Mean, Server
from comingle.methods.settings import Count
from comingle.utils.trees import ATTENTION, GENERALIST, STATISTICS

_LOCAL = Placement(generalists=0, specialists=2, routed=True)
"""Two routed experts in each MLP that stay with their user."""

_SHARED = Placement(generalists=2, routed=True, shared=frozenset({ATTENTION, GENERALIST}))
"""Two routed experts in each MLP that users share, together with attention."""


def local_moe() -> Method:
    """Train 2 experts and their router together, on each user's own data alone.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part ii.
    Shared: nothing.  Local: attention, 2 experts per MLP, routers.  Frozen: the base.
    Client: local steps on training text, which train experts and routers together, routers with their own optimiser
    settings.  Server: none.
    Differs from the paper: no difference is known.  The routers' learning rate is constant, as in App. B.1; in the
    public code it follows the experts' cosine.
    """
    return Method(name="local-moe", placement=_LOCAL, client=Client(phases=joint(routed=True)), server=Server())


def fedavg_moe() -> Method:
    """FedAvg of 2 experts, trained together with a router that stays local.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part ii.
    Shared: attention, 2 experts per MLP.  Local: routers.  Frozen: the base.
    Client: local steps on training text, which train experts and routers together, routers with their own optimiser
    settings.
    Server: mean over users.
    Differs from the paper: routers stay local, as in the public code; the paper does not say.  The routers' learning
    rate is constant, as in App. B.1; in the public code it follows the experts' cosine.
    """
    return Method(name="fedavg-moe", placement=_SHARED, client=Client(phases=joint(routed=True)), server=Mean())


def local_moe_tr(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """Train 2 experts and their router alternately, on each user's own data alone.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part iii.
    Shared: nothing.  Local: attention, 2 experts per MLP, routers.  Frozen: the base.
    Client: alternating steps on experts and on the router, on separate training batches.  Server: none.
    Differs from the paper: no difference is known.

    Args:
        router_every: Local steps on experts from one phase on the routers to the next. A run with fewer local steps
            trains no router and warns.
        router_steps: Optimiser steps in each phase on the routers, each on a fresh batch.
        accumulate_gradients: Let the routers' steps also add to the gradients of the experts, and vice versa, as in
            CoMiGS's public code; the experts then learn from the routers' batches too.
    """
    phases = alternating("train", router_every, router_steps, accumulate=accumulate_gradients)
    return Method(name="local-moe-tr", placement=_LOCAL, client=Client(phases=phases), server=Server())


def fedavg_moe_tr(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """FedAvg of 2 experts, trained alternately with a router that stays local.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part iii.
    Shared: attention, 2 experts per MLP.  Local: routers.  Frozen: the base.
    Client: alternating steps on experts and on the router, on separate training batches.  Server: mean over users.
    Differs from the paper: routers stay local, as in the public code; the paper does not say.

    Args:
        router_every: Local steps on experts from one phase on the routers to the next. A run with fewer local steps
            trains no router and warns.
        router_steps: Optimiser steps in each phase on the routers, each on a fresh batch.
        accumulate_gradients: Let the routers' steps also add to the gradients of the experts, and vice versa, as in
            CoMiGS's public code; the experts then learn from the routers' batches too.
    """
    phases = alternating("train", router_every, router_steps, accumulate=accumulate_gradients)
    return Method(name="fedavg-moe-tr", placement=_SHARED, client=Client(phases=phases), server=Mean())


SHARED_STATISTICS = f"{STATISTICS}.shared"
"""Role of the running statistics of the shared one of two gated nets."""


def pfedmoe() -> Method:
    """pFedMoE: one shared and one local expert, mixed by a local router and trained together with it.

    Source: Yi et al. 2024, arXiv:2402.01350; on language models as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 1 generalist per MLP; for nets a feature extractor with running statistics of norm layers.
    Local: 1 specialist per MLP, routers; for nets a feature extractor, the head and a gate.  Frozen: a language model's
    base.
    Client: local steps on training data, which train experts and routers (gates) together, the latter with their own
    optimiser settings.  In nets the gate, a linear function of the sample, weighs the features of both extractors; the
    head gets their mean.
    Server: mean over users.
    Differs from the paper: language models route each token in each block, as in CoMiGS, where the paper routes whole
    samples; routers have a constant learning rate, as in CoMiGS's App. B.1.  In nets both extractors have the task's
    architecture up to its last layer and the gate is linear; the paper's shared extractor is smaller, and its gate has
    two layers after a norm.
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
