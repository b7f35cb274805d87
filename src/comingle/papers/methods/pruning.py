"""Which numbers of users' updates say where merging weights move (FedMerge, section 3: pruning, and no more of it)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch

from comingle.papers.methods.merging import head
from comingle.utils.trees import Tree

Keys = Literal["head", "all", "trained", "body", "first"]
"""Which tensors tell merging weights where to move: the last layer, all, all but running statistics, all that is
trained but the last layer, the first layer."""


def keys(tree: Tree, which: Keys) -> list[str]:
    """The names of those tensors; LoRA have no last layer, so that head, body and all are one."""
    trained = [name for name in tree if not name.rpartition(".")[2].startswith("running")]
    if which == "first":
        return [name for name in trained if name.rpartition(".")[0] == trained[0].rpartition(".")[0]]
    if which == "body":
        return [name for name in trained if name not in head(tree)] or trained
    return head(tree) if which == "head" else trained if which == "trained" else list(tree)


def largest(updates: Tree, names: Collection[str], share: float) -> Tree:
    """Of each user's update in ``names`` the share of numbers that are largest in magnitude, zeros for the others."""
    if share == 1:
        return updates
    sizes = torch.cat([updates[name].flatten(1) for name in names], 1).abs()
    cut = sizes.topk(math.ceil(share * sizes.shape[1]), 1).values[:, -1]
    return {n: t * (t.abs() >= cut.view(-1, *[1] * (t.dim() - 1))) for n, t in updates.items() if n in names}
