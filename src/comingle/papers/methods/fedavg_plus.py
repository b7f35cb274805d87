"""FedAvg+: the averaged model, tuned by each user before it is used."""

from __future__ import annotations

from dataclasses import replace

from comingle.methods.base import Method
from comingle.methods.client import Client, joint
from comingle.methods.fedavg import fedavg


def fedavg_plus() -> Method:
    """FedAvg whose users tune the global model on their own data before they use it.

    Source: FedAvg+ in FedEM (Marfoq et al. 2021, arXiv:2108.10252), section 4, after Jiang et al. 2019.
    Shared: attention, 2 averaged LoRA experts per MLP; a net with its statistics.  Local: what a user makes of them,
    which is forgotten after use.  Frozen: a language model's base.
    Client: as FedAvg's; at each evaluation and at the end one more local round, from a copy of the global model, on
    batches of its own.  Server: mean over users.
    Differs from the paper: none known.  It evaluates behind the exchange whatever ``evaluation.model`` says.
    """
    return replace(fedavg(), name="fedavg+", client=Client(phases=joint(routed=False), finetunes=True))
