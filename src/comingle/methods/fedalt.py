"""FedALT: each user's own LoRA and a frozen mean of all other users' LoRA, mixed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comingle.methods.base import Client, Method, Phase, Placement
from comingle.methods.server import MODEL_PREFIX, Received, Server, ServerSetup, model_of
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Tree, flatten


def fedalt() -> Method:
    """FedALT: an individual LoRA that is never replaced by a mean, a frozen rest-of-world LoRA, and a mixer of the two.

    Source: Bian et al. 2026, "FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World LoRA",
    AAAI 2026, arXiv:2503.11880; its public code (jmbian/FedALT) for what is aggregated.
    Shared: the individual LoRA of each MLP (a specialist), only for the others' means.  Local: attention, the mixer (a
    router).  Frozen: the base, and the rest-of-world LoRA of each MLP (a generalist), which comes from the server.
    Client: joint steps on individual LoRA and mixer on training text, the mixer with its own settings.
    Server: user k gets the plain mean of A and of B over all other users, each as last uploaded.
    Differs from the paper: there is one mixer per MLP, which mixes its outputs; ``adapters: {mix: linear}`` mixes in
    each linear as in the paper, but with weights from the MLP's input, where the paper has a mixer for each linear.
    The attention's LoRA, the only place that the public code adapts, is local.  All individual LoRA start equal.
    Before the first exchange the rest-of-world LoRA contributes nothing.  Users who have never taken part are in no
    mean.
    """
    return Method(
        name="fedalt",
        placement=Placement(
            specialists=1, routed=True, shared=frozenset({SPECIALIST}), received=frozenset({GENERALIST})
        ),
        client=Client(phases=(Phase(roles=frozenset({ATTENTION, SPECIALIST, ROUTER}), optimizer="both"),)),
        server=RestOfWorld(),
    )


OWN, SENT, TOTAL, COUNT = "own", "sent", "total", "count"


@dataclass(frozen=True, kw_only=True)
class RestOfWorld(Server):
    """Server that keeps the last upload of each user, and their sum, so that users who join later get the mean."""

    kind = "stack"
    by_user = frozenset({OWN, SENT})

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state: no uploads, and the initial model, sent while there are no uploads of others.

        Its tensors are ``own`` ``(users, columns)``, each user's last upload, flattened; ``sent`` ``(users,)``, 1 for
        each user who has uploaded something; ``total`` ``(columns,)``, the sum of ``own``; and ``count``, the
        sum of ``sent``.
        """
        initial = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        uploads = flatten([t[:1] for t in setup.models.values()]).expand(len(setup.users), -1)
        counts = {SENT: torch.zeros(len(uploads)), COUNT: torch.zeros(())}
        return initial | counts | {OWN: torch.zeros_like(uploads), TOTAL: torch.zeros_like(uploads[0])}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Store the participants' uploads in place of their previous ones; update the sum and the number of all.

        Args:
            kept: State of the server, changed in place: each user's last upload, flattened (``own``), a 1 for each user
                who has uploaded something (``sent``), and the sums of both (``total``, ``count``).
            received: The uploads, and the indices of the participants.
        """
        users = list(received.users)
        kept[OWN][users] = flatten([received.tensors[name] for name in model_of(kept)]).to(kept[OWN])
        kept[SENT][users] = 1
        kept[TOTAL].copy_(kept[OWN].sum(0))
        kept[COUNT].copy_(kept[SENT].sum())

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return for each user k the mean of all other users' last uploads, ``1 / (K - 1) sum_(j != k) L_j``.

        K is the number of users who have uploaded something. If no other user has, user k gets the initial model.

        Args:
            kept: State of the server: each user's last upload, flattened, and the sum of all; a 1 for each user who has
                uploaded something, and the count of these users.
            users: Indices of the receiving users.
        """
        initial, indices = model_of(kept), list(users)
        num_others = (kept[COUNT] - kept[SENT][indices]).unsqueeze(1)
        mean = (kept[TOTAL] - kept[OWN][indices]) / num_others.clamp(
            min=1
        )  # without others the result is replaced below
        mean = torch.where(num_others > 0, mean, flatten([t.unsqueeze(0) for t in initial.values()]))
        parts = mean.split([t.numel() for t in initial.values()], 1)
        return {name: part.view(-1, 1, *t.shape) for part, (name, t) in zip(parts, initial.items(), strict=True)}
