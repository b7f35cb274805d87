"""A module's call with other tensors in the place of its own, whatever it uses twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.func import functional_call

from comingle.utils.trees import Tree

_known: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def call_with(net: nn.Module, tensors: Tree, *inputs: Tensor, options: Mapping[str, Any] | None = None) -> Any:
    """``net(*inputs, **options)`` with ``tensors`` by the names that ``named_parameters`` and ``named_buffers`` have.

    What is tied has its tensor everywhere. torch ties by names, of which a module that is used twice has several: it
    would be given the same tensor twice, and keep it.
    """
    if net not in _known:
        _known[net] = _tied(net)
    also = {name: tensors[first] for name, first in _known[net].items() if first in tensors}
    return functional_call(net, tensors | also, inputs, dict(options or {}), tie_weights=False)


def _tied(net: nn.Module) -> dict[str, str]:
    """Further places of a tensor, in other modules, by name: the name of the first."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for prefix, module in net.named_modules():  # each once
        for own, t in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{own}" if prefix else own
            if t is not None and first.setdefault(id(t), name) != name:
                tied[name] = first[id(t)]
    return tied
