"""FedALT: each user's own LoRA and a frozen mean of all other users' LoRA, mixed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comingle.methods.base import Client, Method, Phase, Placement
from comingle.methods.server import MODEL_PREFIX, Received, Server, ServerSetup, model_of
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Tree, flatten


def fedalt() -> Method:
    """FedALT: each user trains an individual LoRA, mixed token by token with a frozen mean of all other users' LoRA.

    Source: Bian et al. 2026, "FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World LoRA",
    AAAI 2026, arXiv:2503.11880; its public code (jmbian/FedALT) for what is aggregated.
    Shared: the individual LoRA of each MLP (a specialist); users keep their own and download only means.
    Local: attention, the mixer (a router).
    Frozen: the base, and the rest-of-world LoRA of each MLP (a generalist), which comes from the server.
    Client: local steps on training text, which train attention, individual LoRA and mixer together, the mixer with its
    own settings.
    Server: user k gets the plain mean of A and of B over the most recent uploads of all other users.
    Differs from the paper: one mixer for each MLP mixes its outputs, where the paper has a mixer for each linear.
    With ``adapters: {mix: linear}`` the outputs of each linear are mixed, but all linears of an MLP share one mixer.
    Attention has a local LoRA; the public code adapts nothing but attention.  All individual LoRA start equal.  Before
    the first exchange the rest-of-world LoRA contributes nothing.  Users who have never taken part are in no mean.
    """
    individual_lora, rest_of_world_lora = frozenset({SPECIALIST}), frozenset({GENERALIST})
    phase = Phase(roles=frozenset({ATTENTION, SPECIALIST, ROUTER}), optimizer="both")
    return Method(
        name="fedalt",
        placement=Placement(specialists=1, routed=True, shared=individual_lora, received=rest_of_world_lora),
        client=Client(phases=(phase,)),
        server=RestOfWorld(),
    )


OWN, SENT, TOTAL, COUNT = "own", "sent", "total", "count"


@dataclass(frozen=True, kw_only=True)
class RestOfWorld(Server):
    """Server of FedALT: sends each user the mean of all other users' most recent uploads.

    Its state has
    - ``own (users, columns)``: each user's most recent upload, flattened,
    - ``sent (users,)``: 1 for users who have uploaded something, else 0,
    - ``total (columns,)`` and ``count``: the sums of ``own`` and of ``sent`` over the users.
    """

    kind = "stack"
    by_user = frozenset({OWN, SENT})

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state: the model that users download until others have uploaded, and no uploads yet.

        Zeros stand for each user's most recent upload ("own"), whether it has uploaded ("sent"), the sum of all uploads
        ("total") and their number ("count").

        Args:
            setup: The users, and their initial models.
        """
        initial_model = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        num_users = len(setup.users)
        flat_models = flatten([t[:1] for t in setup.models.values()]).expand(num_users, -1)  # for the shape
        return {
            **initial_model,
            SENT: torch.zeros(num_users),
            COUNT: torch.zeros(()),
            OWN: torch.zeros_like(flat_models),
            TOTAL: torch.zeros_like(flat_models[0]),
        }

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Store the participants' uploads in place of their previous ones, and update sum and number of all uploads.

        From these and a user's own upload, :meth:`download` gets the mean over the other users without summing again.

        Args:
            kept: State of the server, changed in place.
            received: The uploads, and the indices of the participants.
        """
        users = list(received.users)
        kept[OWN][users] = flatten([received.tensors[name] for name in model_of(kept)]).to(kept[OWN])
        kept[SENT][users] = 1
        kept[TOTAL].copy_(kept[OWN].sum(0))
        kept[COUNT].copy_(kept[SENT].sum())

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return for each user the mean of the others' most recent uploads, or the initial model if there are none.

        Args:
            kept: State of the server.
            users: Indices of the receiving users.
        """
        initial_model = model_of(kept)
        indices = list(users)
        # The number and the sum of all users' uploads, without the receiving user's own.
        num_others = (kept[COUNT] - kept[SENT][indices]).unsqueeze(1)
        sum_of_others = kept[TOTAL] - kept[OWN][indices]
        mean = sum_of_others / num_others.clamp(min=1)
        flat_initial_model = flatten([t.unsqueeze(0) for t in initial_model.values()])
        flat_models = torch.where(num_others > 0, mean, flat_initial_model)  # (users, numbers)
        sizes = [t.numel() for t in initial_model.values()]
        download = {}
        for (name, t), flat_tensor in zip(initial_model.items(), flat_models.split(sizes, dim=1), strict=True):
            download[name] = flat_tensor.view(-1, 1, *t.shape)  # one model for each user
        return download
