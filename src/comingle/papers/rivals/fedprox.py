"""FedProx: FedAvg whose users stay near what they downloaded."""

from __future__ import annotations

from dataclasses import replace

from comingle.methods.base import Method
from comingle.methods.client import Client, joint
from comingle.methods.fedavg import fedavg
from comingle.methods.settings import NotNegative
from comingle.papers.methods.fedmerge import Proximal


def fedprox(*, proximal: NotNegative = 0.01) -> Method:
    """FedProx: FedAvg with ``proximal / 2 |theta - theta_t|^2`` in each user's objective, theta_t what it downloaded.

    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", arXiv:1812.06127, Algorithm 2, eq. 2.
    Shared: attention, 2 averaged LoRA experts per MLP; a net with its statistics.  Local: nothing.  Frozen: a language
    model's base.
    Client: joint steps on training data, with the proximal term.  Server: mean over users.
    Differs from the paper: every user takes its local steps, none an inexact number of them (gamma); means are weighted
    as ``training.weighting`` says, where the paper draws users by their share of the data and averages them alike.
    """
    client = Client(phases=joint(routed=False), parts=(Proximal(proximal / 2),))
    return replace(fedavg(), name="fedprox", client=client)
