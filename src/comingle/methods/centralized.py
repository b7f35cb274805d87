"""One model on everybody's text."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, joint
from comingle.methods.server import Server


def centralized() -> Method:
    """One model trained on everybody's text: an unrealistic upper bound, since the text would have to leave its owners.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2 and App. B.1.
    Shared: nothing (there is one trainer).  Local: attention, 2 averaged LoRA experts per MLP.  Frozen: the base.
    Client: joint steps on the concatenated training text; the batch is multiplied by the number of users.
    Server: none.
    Differs from the paper: none known.
    """
    return Method(
        name="centralized",
        placement=Placement(generalists=0, specialists=2, pooled=True),
        client=Client(phases=joint(routed=False)),
        server=Server(),
    )
