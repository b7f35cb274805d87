"""Which layers of a model get adaptors, and which are left and why."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator

from torch import nn

from comingle.adapters.clustered.layer import AdaptedLayer
from comingle.adapters.clustered.norm import BATCH_NORMS, PLAIN_NORMS
from comingle.utils.errors import RecipeError

CONVS = (nn.Conv1d, nn.Conv2d)
ADAPTABLE = "Linear, Conv1D (GPT-2), Conv1d, Conv2d, BatchNorm, InstanceNorm, LayerNorm and GroupNorm with gamma"


def is_linear(module: nn.Module) -> bool:
    """``nn.Linear`` or GPT-2's Conv1D, and none of their subclasses: those may use their weight in another way."""
    gpt2 = sys.modules.get("transformers.pytorch_utils")
    return type(module) is nn.Linear or (gpt2 is not None and type(module) is gpt2.Conv1D)


def is_adaptable(module: nn.Module) -> bool:
    """Whether there is an adaptor for this type, and the layer has a floating weight of its own."""
    weight = module._parameters.get("weight")
    known = is_linear(module) or type(module) in (*CONVS, *PLAIN_NORMS, *BATCH_NORMS)
    return known and weight is not None and weight.is_floating_point()


def find_layers(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The layers that get adaptors, by name.

    Left out are layers that share a parameter with one that gets none (a head tied to its embedding), and the output
    head of a language model.

    Raises:
        RecipeError: two of the layers share a parameter, or one of them has two names, or the model has adaptors.
    """
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            raise RecipeError(f"floral: layer {name!r} has adaptors already; wrap the plain model")
    heads = _output_heads(model)
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if is_adaptable(module) and wanted(module) and id(module) not in heads
    }
    _check_names(layers)
    owners = _owners(model)
    chosen = {id(module) for module in layers.values()}
    partners = {name: _partners(module, owners) for name, module in layers.items()}
    free = {name: module for name, module in layers.items() if set(partners[name]) <= chosen}
    for name in free:
        others = [other for key, other in partners[name].items() if other != name and key != id(free[name])]
        if others:
            raise RecipeError(f"floral: layers {name!r} and {others[0]!r} share a parameter; give each its own")
    return free


def unadapted_leaves(model: nn.Module, adapted: dict[str, nn.Module]) -> tuple[str, ...]:
    """Modules with parameters of their own that got no adaptor, as "head (Linear)"."""
    chosen = {id(module) for module in adapted.values()}
    return tuple(
        f"{name or 'model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if id(module) not in chosen and any(p is not None for p in module._parameters.values())
    )


def _check_names(layers: dict[str, nn.Module]) -> None:
    seen: dict[int, str] = {}
    for name, module in layers.items():
        if (first := seen.setdefault(id(module), name)) != name:
            raise RecipeError(f"floral: {first!r} and {name!r} are one layer; register it once (it may run many times)")


def _owners(model: nn.Module) -> dict[int, dict[int, str]]:
    """For each parameter the modules that hold it, by identity, with their first name."""
    owners: dict[int, dict[int, str]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)][id(module)] = name
    return owners


def _partners(module: nn.Module, owners: dict[int, dict[int, str]]) -> dict[int, str]:
    """All modules that hold one of this module's parameters, itself too."""
    held = [owners[id(p)] for p in module._parameters.values() if p is not None]
    return {key: name for holders in held for key, name in holders.items()}


def _output_heads(model: nn.Module) -> set[int]:
    return {id(head) for module in model.modules() for head in _output_head(module)}


def _output_head(module: nn.Module) -> Iterator[nn.Module]:
    get = getattr(module, "get_output_embeddings", None)
    if callable(get):
        with contextlib.suppress(AttributeError, NotImplementedError):  # transformers' models without a head
            if isinstance(head := get(), nn.Module):
                yield head
