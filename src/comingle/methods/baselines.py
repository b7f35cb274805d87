"""Baselines: local training, one model on all text, and the base model as it is."""

from __future__ import annotations

from comingle.methods.base import Client, Method, Placement, joint
from comingle.methods.server import Server


def local() -> Method:
    """Every user fine-tunes alone.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2.
    Shared: nothing.  Local: attention, 2 averaged LoRA experts per MLP.  Frozen: the base.
    Client: joint steps on training text.  Server: none.
    Differs from the paper: none known.
    """
    return Method(
        name="local",
        placement=Placement(generalists=0, specialists=2),
        client=Client(phases=joint(routed=False)),
        server=Server(),
    )


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


def pretrained() -> Method:
    """The pretrained base, unchanged: what everybody has before any training.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2, lower bound.
    Shared: nothing.  Local: nothing.  Frozen: everything.
    Client: none.  Server: none.
    Differs from the paper: none known.
    """
    return Method(name="pretrained", placement=Placement(), client=Client(), server=Server())
