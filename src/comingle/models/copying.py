"""Copies of modules: one user's own, or over the very same weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from comingle.models.pretrained import PreTrainedModel
from comingle.utils.trees import Tree

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def own_copy(net: Module, tensors: Tree, *, shared: Iterable[Tensor] = ()) -> Module:
    """A copy of ``net`` that holds one user's tensors ``(1, ...)``; those in ``shared`` are not copied but the same."""
    copied = copy.deepcopy(net, {id(t): t for t in shared})
    values = dict(copied.named_parameters()) | dict(copied.named_buffers())
    for name, tensor in tensors.items():
        values[name].copy_(tensor[0])
    return copied


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module structure over the very same parameters and buffers."""
    kept: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept)
