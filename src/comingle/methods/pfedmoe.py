"""A shared and a local expert with a router, trained together."""

from __future__ import annotations

from comingle.adapters.inject import ATTENTION, GENERALIST
from comingle.methods.base import Method
from comingle.methods.clients import joint
from comingle.methods.servers import mean
from comingle.trees import STATISTICS

SHARED_STATISTICS = f"{STATISTICS}.shared"
"""The running statistics of a gated pair's shared net."""


def pfedmoe() -> Method:
    """pFedMoE: one shared and one local expert, and a local router, trained together end to end.

    Source: Yi et al. 2024, arXiv:2402.01350; on language models as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 1 generalist per MLP; of nets one with its statistics.  Local: 1 specialist per MLP, routers; of
    nets one, and a gate.  Frozen: a language model's base.
    Client: joint steps on experts and routers on training data.  Server: mean over users.
    Differs from the paper: on language models tokens are routed, block by block, instead of whole samples, as CoMiGS
    applies it.  On nets the gate mixes outputs; the paper mixes features, which the local net's head then reads.  Both
    nets have the task's architecture; the paper's shared one is smaller.
    """
    return Method(
        name="pfedmoe",
        generalists=1,
        specialists=1,
        routed=True,
        gated=True,
        shared=frozenset({ATTENTION, GENERALIST, SHARED_STATISTICS}),
        phases=joint(routed=True),
        server=mean,
    )
