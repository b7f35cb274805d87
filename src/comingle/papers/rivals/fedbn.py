"""FedBN: norms are everybody's own."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client
from comingle.methods.cohort import Phase
from comingle.methods.server import Mean
from comingle.utils.trees import BASE


def fedbn() -> Method:
    """FedBN: all is averaged but the norms, whose weights and running statistics stay with their user.

    Source: Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
    arXiv:2102.07623, Algorithm 1.
    Shared: a net but its norm layers.  Local: norm layers: weights, and running statistics where they have some.
    Frozen: nothing.
    Client: joint steps on training data.  Server: mean over users of what is shared.
    Differs from the paper: norms of other kinds than batch norm (group, layer) are local too.  A net without norms, and
    a language model, whose norms are frozen, are refused: there it would be FedAvg.
    """
    return Method(
        name="fedbn",
        placement=Placement(shared=frozenset({f"{BASE}.body", f"{BASE}.head"}), needs=frozenset({f"{BASE}.norm"})),
        client=Client(phases=(Phase(roles=frozenset({BASE})),)),
        server=Mean(),
    )
