"""A shared and a local expert with a router, trained together."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, joint
from comingle.methods.server import Mean
from comingle.utils.trees import ATTENTION, GENERALIST, STATISTICS

SHARED_STATISTICS = f"{STATISTICS}.shared"
"""The running statistics of a gated pair's shared extractor."""


def pfedmoe() -> Method:
    """pFedMoE: one shared and one local expert, and a local router, trained together end to end.

    Source: Yi et al. 2024, arXiv:2402.01350; on language models as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 1 generalist per MLP; of nets a feature extractor with its statistics.  Local: 1 specialist per
    MLP, routers; of nets a feature extractor, the head and a gate.  Frozen: a language model's base.
    Client: joint steps on experts and routers on training data, routers (gates) with settings of their own.  On nets
    the gate, linear in the sample, weighs the features of the two extractors for the head.  Server: mean over users.
    Differs from the paper: on language models tokens are routed, block by block, instead of whole samples, as CoMiGS
    applies it, and routers have a constant rate as in CoMiGS's App. B.1.  On nets both extractors have the task's
    architecture up to its last layer; the paper's shared one is smaller, and its gate has two layers behind a norm.
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
