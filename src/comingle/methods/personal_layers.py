"""FedBN and FedPer: norm layers or the last layer stay local."""

from __future__ import annotations

from comingle.methods.base import Client, Method, Phase, Placement, joint
from comingle.methods.server import Mean
from comingle.utils.trees import ATTENTION, BASE, GENERALIST, STATISTICS


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


BODY = frozenset({ATTENTION, f"{GENERALIST}.body", f"{BASE}.body", f"{BASE}.norm", STATISTICS})
"""All but a net's last layer; of a language model all LoRA but that of the last MLP."""


def fedper() -> Method:
    """FedPer: base layers are shared, the last layer is personal.

    Source: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", arXiv:1912.00818, Algorithms 1
    and 2, with one personalization layer.
    Shared: a net but its last layer, with its statistics; on a language model attention and 2 averaged LoRA experts per
    MLP, but not those of the last MLP.  Local: a net's last layer; 2 experts of a language model's last MLP.
    Frozen: a language model's base.
    Client: joint steps on training data, on all layers together.  Server: mean over users of what is shared.
    Differs from the paper: on language models, of which it says nothing, what is personal is the LoRA of the last MLP,
    the last module of the blocks, as the head beyond is frozen.
    """
    return Method(
        name="fedper",
        placement=Placement(generalists=2, shared=BODY),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )
