"""SDFLoRA: a shared LoRA whose products are averaged and cut back to its rank, and a private one."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, joint
from comingle.papers.methods.factors import NewOptimisers
from comingle.papers.methods.flexlora import Redistribute
from comingle.utils.trees import ATTENTION, GENERALIST


def sdflora() -> Method:
    """SDFLoRA: each user has a shared LoRA, stacked and compressed to its rank by the server, and a private one.

    Source: Shen et al. 2026, "SDFLoRA: Selective Decoupled Federated LoRA for Privacy-preserving Fine-tuning with
    Heterogeneous Clients", arXiv:2601.11219 (second version), and its public code.  Ranks are ``adapters.rank``.
    Shared: attention, 1 LoRA expert per MLP.  Local: 1 LoRA expert per MLP.  Frozen: the base.
    Client: joint steps on both on training text, with a new optimiser each round, as shared factors are others then.
    Server: the stack of the shared factors, whose product is ``sum_u p_u s_u B_u A_u``, cut to each user's rank by its
    singular values; privacy's noise (``mechanism: local``) reaches the shared LoRA alone.
    Differs from the paper: both LoRA are experts of a whole MLP whose outputs are averaged (in the linears with
    ``adapters: {mix: linear}``), in the place of a learnt weighted sum in each linear; the attention has a shared LoRA
    alone; both LoRA have one rank.  The paper's abstract and code were at hand, not its equations.
    """
    return Method(
        name="sdflora",
        placement=Placement(specialists=1, shared=frozenset({ATTENTION, GENERALIST})),
        client=Client(phases=joint(routed=False), parts=(NewOptimisers(),)),
        server=Redistribute(),
    )
