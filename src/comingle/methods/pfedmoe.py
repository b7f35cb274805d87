"""A shared and a local expert with a router, trained together."""

from __future__ import annotations

from comingle.adapters.inject import ATTENTION, GENERALIST
from comingle.methods.base import Method
from comingle.methods.clients import joint
from comingle.methods.servers import mean


def pfedmoe() -> Method:
    """pFedMoE: one shared and one local expert, and a local router, trained together end to end.

    Source: Yi et al. 2024, arXiv:2402.01350; on language models as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 1 generalist per MLP.  Local: 1 specialist per MLP, routers.  Frozen: the base.
    Client: joint steps on experts and routers on training text.  Server: mean over users.
    Differs from the paper: tokens are routed, block by block, instead of whole samples, as CoMiGS applies it.
    """
    return Method(
        name="pfedmoe",
        generalists=1,
        specialists=1,
        routed=True,
        shared=frozenset({ATTENTION, GENERALIST}),
        phases=joint(routed=True),
        server=mean,
    )
