"""Baselines: local training, one model for all data, and the unchanged base model."""

from __future__ import annotations

from comingle.methods.base import Client, Method, Placement, joint
from comingle.methods.server import Server


def local() -> Method:
    """Fine-tune each user's model alone.

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
    """Train one model on the data of all users: an upper bound, unrealistic because the data would have to be pooled.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2 and App. B.1.
    Shared: nothing (there is a single client).  Local: attention, 2 averaged LoRA experts per MLP.  Frozen: the base.
    Client: joint steps on the concatenated training text; the batch size is multiplied by the number of users.
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
    """Use the pretrained base model unchanged: what all users have before any training.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2, lower bound.
    Shared: nothing.  Local: nothing.  Frozen: everything.
    Client: none.  Server: none.
    Differs from the paper: none known.
    """
    return Method(name="pretrained", placement=Placement(), client=Client(), server=Server())
