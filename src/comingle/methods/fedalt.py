"""FedALT: everybody's own LoRA beside a frozen mean of everybody else's, mixed token by token."""

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
    Shared: the individual LoRA of each MLP (a specialist), for the others' means alone.  Local: attention, the mixer (a
    router).  Frozen: the base, and the rest-of-world LoRA of each MLP (a generalist), which comes from the server.
    Client: joint steps on individual LoRA and mixer on training text, the mixer with settings of its own.
    Server: user k gets the plain mean of A and of B over all others, each as it was last sent.
    Differs from the paper: the mixer is one for each MLP, and mixes its outputs; ``adapters: {mix: linear}`` mixes in
    each linear as the paper does, by weights from the MLP's input, where the paper has a mixer for each linear.  The
    attention's LoRA, the one place where the public code adapts, is the user's own alone.  All individual LoRA start
    alike.  Before the first exchange the rest of the world is silent.  Who has never taken part is in nobody's mean.
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
    """Keeps what everybody has last sent, each in a row, and the sum of the rows: who joins later gets their mean."""

    kind = "stack"
    by_user = frozenset({OWN, SENT})

    def start(self, setup: ServerSetup) -> Tree:
        """Nobody has sent anything; what the rest of the world is until then."""
        silent = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        own = flatten([t[:1] for t in setup.models.values()]).expand(len(setup.users), -1)
        counts = {SENT: torch.zeros(len(own)), COUNT: torch.zeros(())}
        return silent | counts | {OWN: torch.zeros_like(own), TOTAL: torch.zeros_like(own[0])}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """What has been sent takes the place of what was."""
        users = list(received.users)
        kept[OWN][users] = flatten([received.tensors[name] for name in model_of(kept)]).to(kept[OWN])
        kept[SENT][users] = 1
        kept[TOTAL].copy_(kept[OWN].sum(0))
        kept[COUNT].copy_(kept[SENT].sum())

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """``1 / (K - 1) sum_(j != k) L_j`` of the K who have sent something."""
        silent, at = model_of(kept), list(users)
        others = (kept[COUNT] - kept[SENT][at]).unsqueeze(1)
        rest = (kept[TOTAL] - kept[OWN][at]) / others.clamp(min=1)
        rest = torch.where(others > 0, rest, flatten([t.unsqueeze(0) for t in silent.values()]))
        parts = rest.split([t.numel() for t in silent.values()], 1)
        return {name: part.view(-1, 1, *t.shape) for part, (name, t) in zip(parts, silent.items(), strict=True)}
