"""Everybody alone."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, joint
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
