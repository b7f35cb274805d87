"""Federated averaging of all LoRA parameters."""

from __future__ import annotations

from dataclasses import replace

from comingle.methods.base import Method, Placement
from comingle.methods.client import MODEL, Client, joint
from comingle.methods.server import Mean


def fedavg() -> Method:
    """Federated averaging of all LoRA parameters.

    Source: McMahan et al. 2017, arXiv:1602.05629; on LoRA as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base.
    Client: joint steps on training text.  Server: mean over users.
    Differs from the paper: the optimiser's moments stay with their user, as in CoMiGS's public code.
    """
    return Method(
        name="fedavg",
        placement=Placement(generalists=2, shared=MODEL),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )


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
