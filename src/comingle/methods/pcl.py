"""PCL: everybody averages everybody's model by how well it does on their own validation text."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.adapters.inject import ATTENTION, GENERALIST
from comingle.methods.base import Context, Method
from comingle.methods.clients import joint
from comingle.methods.servers import mix
from comingle.trees import Tree


def collaboration(losses_nats: Float[Tensor, "users users"]) -> Float[Tensor, "users users"]:
    """Row i: ``softmax_j(-perplexity of user j's model on user i's validation text)`` (Wagner et al. 2024, strategy 2).

    An absent user (NaN) is listened to by nobody and listens to itself.
    """
    # A perplexity that overflows is infinitely bad, as is that of somebody absent; a finite one stays next to it.
    scores = -torch.nan_to_num(losses_nats, nan=torch.inf).exp()
    alone = torch.eye(len(scores), dtype=torch.bool, device=scores.device) & scores.isinf()
    return scores.masked_fill(alone, torch.finfo(scores.dtype).min).softmax(1)


def listen(uploads: Tree, context: Context) -> Tree:
    """Everybody averages the others' models with weights of their own."""
    return mix(uploads, collaboration(context.validate()))


def pcl(*, exchange_from: int = 5, exchange_every: int = 2) -> Method:
    """Personalised collaborative fine-tuning with a graph of who helps whom, found on validation text.

    Source: Wagner et al. 2024, "Personalized Collaborative Fine-Tuning for On-Device Large Language Models",
    arXiv:2404.09753, strategy 2; as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base.
    Client: joint steps on training text; after rounds 5, 7, 9 ... (``exchange_from``, ``exchange_every``; the public
    code counts from 0, so there they are 4, 6, 8) every model is sent to every user and scored on the user's validation
    text, at the user: the scores do not travel.
    Server: none; user i keeps sum_j w_ij model_j, row i of w the softmax of minus the perplexities.
    Differs from the paper: the whole validation text is scored instead of 20 random batches; those who sit a round out
    are not listened to.
    """
    return Method(
        name="pcl",
        generalists=2,
        shared=frozenset({ATTENTION, GENERALIST}),
        phases=joint(routed=False),
        server=listen,
        exchange_from=exchange_from,
        exchange_every=exchange_every,
        peers=True,
        validates=True,
    )
