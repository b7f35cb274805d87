"""The base model as it is."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client
from comingle.methods.server import Server


def pretrained() -> Method:
    """The pretrained base, unchanged: what everybody has before any training.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2, lower bound.
    Shared: nothing.  Local: nothing.  Frozen: everything.
    Client: none.  Server: none.
    Differs from the paper: none known.
    """
    return Method(name="pretrained", placement=Placement(), client=Client(), server=Server())
