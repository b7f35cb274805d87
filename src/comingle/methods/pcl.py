"""PCL: each user averages all users' models, weighted by their perplexity on its own validation text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import Received, Server
from comingle.methods.settings import Count
from comingle.utils.trees import ATTENTION, GENERALIST, Tree


def collaboration_weights(
    losses_nats: Float[Tensor, "users senders"], is_own: Float[Tensor, "users senders"]
) -> Float[Tensor, "users senders"]:
    """Return the weight of sender j's model in user i's mean: ``softmax_j(-perplexity_ij)`` on i's validation text.

    If all perplexities of a user overflow to infinity, it keeps its own model.

    Source: Wagner et al. 2024, arXiv:2404.09753, strategy 2.

    Args:
        losses_nats: Mean validation losses of users under senders' models; a perplexity is the exponential of a loss.
        is_own: 1 where the sender is the user, else 0.
    """
    perplexities = losses_nats.exp()
    all_are_infinite = perplexities.isinf().all(1, keepdim=True)
    weights = (-perplexities).softmax(1)
    return torch.where(all_are_infinite, is_own.to(weights), weights)


class AverageByPerplexity(ClientHook):
    """Client hook of PCL: averages the models of all senders by how well they predict the user's validation text."""

    language_only = True
    validates = True

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree:
        """Return each user's mean of the senders' models, with larger weights for those with a lower validation loss.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            models: Models of all senders, ``(users, senders, *shape)``, the same for each user.
            senders: Names of the senders.
        """
        losses_nats = cohort.validation_losses(models)  # (users, senders)
        # 1 where the sender is the user itself, whose model is kept if no model is usable.
        is_own = torch.tensor([[sender == user for sender in senders] for user in cohort.names]).to(losses_nats)
        weights = collaboration_weights(losses_nats, is_own)  # (users, senders)
        return {name: torch.einsum("us,us...->u...", weights.to(t), t) for name, t in models.items()}


@dataclass(frozen=True, kw_only=True)
class Relay(Server):
    """Server that sends all uploads of a round to its participants."""

    kind = "stack"
    peer_to_peer = True

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Keep the uploads and their senders until users download them, right after the round."""
        kept.update(received.tensors)
        kept[SENDERS] = torch.tensor(received.users)

    def senders(self, kept: Tree) -> Sequence[int]:
        """Return the indices of the users whose uploads the server keeps: the round's participants."""
        return kept[SENDERS].tolist() if SENDERS in kept else []

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return the uploads of all participants of the last round for each user, who weighs them on its own data.

        Args:
            kept: State of the server: the uploads by tensor, ``(senders, *shape)``, and the senders.
            users: Indices of the receiving users.

        Returns:
            Tensors by name, ``(users, senders, *shape)``, expanded without copying.
        """
        uploads = {name: t for name, t in kept.items() if name != SENDERS}
        return {name: t.unsqueeze(0).expand(len(users), *t.shape) for name, t in uploads.items()}


SENDERS = "senders"
"""Key of the indices of the users who sent the uploads."""


def pcl(*, exchange_from: Count = 5, exchange_every: Count = 2) -> Method:
    """PCL: each user averages all users' models, with larger weights for those that predict its validation text well.

    Source: Wagner et al. 2024, "Personalized Collaborative Fine-Tuning for On-Device Large Language Models",
    arXiv:2404.09753, strategy 2; as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base.
    Client: local steps on training text.  After rounds 5, 7, 9 ... (``exchange_from``, ``exchange_every``) user i
    downloads the models of all participants j, computes their perplexity_ij on its validation text, and continues with
    sum_j w_ij model_j, where ``w_ij = softmax_j(-perplexity_ij)``.
    Server: sends all uploads to all participants.
    Differs from the paper: perplexities are those of the whole validation text, instead of 20 random batches.  Only
    participants of the round are averaged.  (The public code counts rounds from 0, so it exchanges after 4, 6, 8 ...)

    Args:
        exchange_from: First round, counted from 1, after which users exchange models.
        exchange_every: Rounds from one exchange to the next.
    """
    return Method(
        name="pcl",
        placement=Placement(generalists=2, shared=frozenset({ATTENTION, GENERALIST})),
        client=Client(phases=joint(routed=False), parts=(AverageByPerplexity(),)),
        server=Relay(exchange_from=exchange_from, exchange_every=exchange_every),
    )
