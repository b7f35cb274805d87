"""A user's tensors put into modules of its own, outside of the federation."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from comingle.adapters.clustered import FloralModel
from comingle.models.adapted import share_weights
from comingle.models.mixed import MixedLanguageModel
from comingle.trees import Tree

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def own_copy(net: Module, tensors: Tree, *, shared: Iterable[Tensor] = ()) -> Module:
    """A copy of ``net`` that holds one user's tensors ``(1, ...)``; those in ``shared`` are not copied but the same."""
    own = copy.deepcopy(net, {id(t): t for t in shared})
    values = dict(own.named_parameters()) | dict(own.named_buffers())
    for name, tensor in tensors.items():
        values[name].copy_(tensor[0])
    return own


def own_language_model(model: MixedLanguageModel, tensors: Tree) -> FloralModel:
    """The whole causal language model (``.model``) of one user: its own adaptors over the base's very weights."""
    base = model.base.model
    net = model.net
    assert isinstance(net, FloralModel)
    own = own_copy(net, tensors, shared=(*base.parameters(), *base.buffers()))
    network = share_weights(base)
    setattr(network, network.base_model_prefix, own.model)
    own.model = network
    return own
