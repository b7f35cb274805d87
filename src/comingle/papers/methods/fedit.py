"""One LoRA for all users of a language model, and one for all beside one of each user's own."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, joint
from comingle.methods.cohort import Phase
from comingle.methods.server import Mean
from comingle.utils.trees import ATTENTION, GENERALIST

SHARED = frozenset({ATTENTION, GENERALIST})


def fedit() -> Method:
    """FedIT: federated averaging of one LoRA.

    Source: Zhang et al. 2024, "Towards Building the FederatedGPT: Federated Instruction Tuning", arXiv:2305.05644; in
    FedMerge (Chen et al. 2025, arXiv:2504.06768), Table 5.
    Shared: attention, 1 expert per MLP.  Local: nothing.  Frozen: the base.
    Client: joint steps on training text.  Server: mean of A and of B over users.
    Differs from the paper: LoRA is where ``adapters`` says, on attention and MLP; the paper adapts attention alone.
    """
    return Method(
        name="fedit",
        placement=Placement(shared=SHARED),
        client=Client(phases=(Phase(roles=SHARED),)),
        server=Mean(),
    )


def fedlora() -> Method:
    """FedLoRA: a small adapter that all share, beside a model of each user's own.

    Source: Yi et al. 2023, "FedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning",
    arXiv:2310.13283; in FedMerge (Chen et al. 2025, arXiv:2504.06768), Table 5.
    Shared: attention, 1 expert per MLP.  Local: 1 expert per MLP, averaged with the shared one.  Frozen: the base.
    Client: joint steps on training text.  Server: mean over users.
    Differs from the paper: there each user has a whole model of its own, of any architecture, and model and adapter
    are trained in turns.  Over one frozen language model, where FedMerge compares it without saying how, what is a
    user's own is an expert, and both are trained together.
    """
    return Method(
        name="fedlora",
        placement=Placement(specialists=1, shared=SHARED),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )
