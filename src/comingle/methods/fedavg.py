"""Federated averaging of all LoRA parameters."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import MODEL, Client, joint
from comingle.methods.server import Mean
from comingle.methods.settings import NotNegative


def fedavg(*, server_adam_rate: NotNegative = 0.0) -> Method:
    """Federated averaging of all LoRA parameters.

    Source: McMahan et al. 2017, arXiv:1602.05629; on LoRA as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base.
    Client: joint steps on training text.  Server: mean over users; with
    ``server_adam_rate`` above 0 a step of Adam on the model minus that mean (Reddi et al. 2021, arXiv:2003.00295).
    Differs from the paper: the optimiser's moments stay with their user, as in CoMiGS's public code.
    """
    return Method(
        name="fedavg",
        placement=Placement(generalists=2, shared=MODEL),
        client=Client(phases=joint(routed=False)),
        server=Mean(adam_rate=server_adam_rate),
    )
