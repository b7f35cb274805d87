"""FedBN and FedPer: norm layers or the last layer stay local."""

from __future__ import annotations

from comingle.methods.base import Client, Method, Phase, Placement, joint
from comingle.methods.server import Mean
from comingle.utils.trees import ATTENTION, BASE, GENERALIST, STATISTICS


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
