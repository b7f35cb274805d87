"""What a server receives, made by hand, for tests of servers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comingle.methods.server import Received, Server, ServerSetup
from comingle.utils.trees import Tree


def received(uploads: Tree, weights: Sequence[float], **beside: Any) -> Received:
    """Uploads of so many users, with rank 1 and scale 1 where nothing else is said."""
    shares = torch.tensor(weights, dtype=torch.float64)
    ones = torch.ones(len(shares), dtype=torch.float64)
    plain = {"users": range(len(shares)), "ranks": ones.long(), "scales": ones}
    return Received(tensors=uploads, weights=shares, **{**plain, **beside})


def started(server: Server, first: Tree, users: int) -> Tree:
    """What a server keeps where the model that users start from is ``first``."""
    scales = torch.ones(users, dtype=torch.float64)
    models = {name: t.unsqueeze(0) for name, t in first.items()}
    return server.start(ServerSetup(models=models, users=[f"user-{i}" for i in range(users)], scales=scales, seed=0))


def downloaded(server: Server, kept: Tree, user: int) -> dict[str, Tensor]:
    """The one model that a user gets."""
    models = {name: t.squeeze(0) for name, t in server.download(kept, [user]).items()}
    assert all(len(t) == 1 for t in models.values())
    return {name: t[0] for name, t in models.items()}
