"""RoLoRA: the two factors of each LoRA are trained and averaged in alternate rounds."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client
from comingle.methods.cohort import Phase
from comingle.methods.server import Mean
from comingle.papers.methods.factors import A, B, NewOptimisers


def rolora() -> Method:
    """RoLoRA: in the first round and every second one after it B is trained and averaged, in the others A.

    Source: Chen et al. 2025, "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA",
    arXiv:2502.01755 (before: arXiv:2409.02346), Algorithm 1.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base, and one factor in turn.
    Client: joint steps on B, or on A, on training text.  Server: mean over users, which is exact: ``mean(B) A = mean(B
    A)``, as the other factor is the same for all.
    Differs from the paper: both factors travel, as who was absent from a round needs the one that is frozen now; the
    paper sends the trained one, half as much.  Each round begins with a new optimiser.
    """
    return Method(
        name="rolora",
        placement=Placement(generalists=2, shared=A | B),
        client=Client(phases=(Phase(roles=B, turns=2), Phase(roles=A, turns=2, turn=1)), parts=(NewOptimisers(),)),
        server=Mean(),
    )
