"""Which net is trained: one of the registry, or one that a program makes; tried before it is trained."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from comingle.config import Recipe
from comingle.data.samples.reading import MakeNet, Population
from comingle.kinds.language import NETS
from comingle.models.model import call_with
from comingle.models.nets import make_net
from comingle.utils.errors import RecipeError
from comingle.utils.seeds import derive

_TRIED = 2
"""Users, and samples of each, that a net is tried on; batch norm needs two."""


def net_name(recipe: Recipe, population: Population) -> str:
    """Which net is trained, as messages and metrics call it.

    Raises:
        RecipeError: a base is named that is no net.
    """
    if not isinstance(population.net, str):
        name = getattr(population.net, "__name__", "")
        return name if name.isidentifier() else "own"
    if "base" not in recipe.model_fields_set:
        return population.net
    if not recipe.base.startswith(NETS):
        label = recipe.data.label
        raise RecipeError(f"base: got {recipe.base!r} for {label}; allowed: {NETS}NAME, or none for the data's own")
    return recipe.base.removeprefix(NETS)


def net_maker(recipe: Recipe, population: Population) -> Callable[[int], nn.Module]:
    """Makes the net with the initial weights of a seed.

    Raises:
        RecipeError: no such net, one that the samples do not fit, or one that cannot be stacked over users.
    """
    name, shape, outputs = net_name(recipe, population), population.input_shape, population.classes
    own = population.net

    def make(seed: int) -> nn.Module:
        if isinstance(own, str):
            return make_net(name, shape, outputs, seed=seed)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(derive("net", "own", seed))
            return _made(own, name, shape, outputs)

    return make


def _made(own: MakeNet, name: str, shape: Sequence[int], outputs: int) -> nn.Module:
    if isinstance(own, nn.Module):
        kind = type(own).__name__
        raise RecipeError(f"net: got a {kind} that is made already; give what makes one, as lambda: {kind}(...)")
    made = own() if _takes(own) else own(tuple(shape), outputs)
    if not isinstance(made, nn.Module):
        raise RecipeError(f"net {name!r}: its function returned {type(made).__name__}; allowed: an nn.Module")
    return made


def _takes(own: MakeNet, *arguments: Any) -> bool:
    try:
        inspect.signature(own).bind(*arguments)
    except TypeError:
        return False
    return True


def check_net(net: nn.Module, name: str, population: Population) -> bool:
    """Whether users' copies of a net can be run together and give the outputs that the loss takes.

    Returns whether training changes buffers, as running statistics of a batch.

    Raises:
        RecipeError: they cannot, or other outputs.
    """
    _check_parts(net, name)
    net = _tried(lambda: copy.deepcopy(net), f"net {name!r}: cannot be copied").train()
    tensors = {key: p.detach() for key, p in net.named_parameters()}
    buffers = {key: b.detach() for key, b in net.named_buffers() if b.is_floating_point()}
    tensors |= buffers
    like = next(iter(tensors.values()))
    inputs = torch.zeros(_TRIED, _TRIED, *population.input_shape, dtype=like.dtype, device=like.device)

    def call(own: dict[str, Tensor], x: Tensor) -> Any:
        return call_with(net, own, x)

    with torch.no_grad(), torch.random.fork_rng(devices=()):
        shape = population.input_shape
        copies = _copies(tensors, ())
        alone = _tried(lambda: call(copies, inputs[0]), f"net {name!r}: cannot take inputs of {shape}")
        _check_outputs(alone, name, population)
        together = f"net {name!r}: users' copies cannot run together under torch.vmap"
        _tried(lambda: vmap(call, randomness="different")(_copies(tensors, (_TRIED,)), inputs), together)
    return any(copies[key]._version or not torch.equal(copies[key], buffers[key]) for key in buffers)


def _check_parts(net: nn.Module, name: str) -> None:
    """Whether its modules are such that each user can have its own.

    Raises:
        RecipeError: they are not.
    """
    if not any(True for _ in net.parameters()):
        raise RecipeError(f"net {name!r}: nothing in it can be trained; allowed: an nn.Module with parameters")
    for key, t in (*net.named_parameters(), *net.named_buffers()):
        if nn.parameter.is_lazy(t):
            raise RecipeError(f"net {name!r}: {key} has no shape yet; allowed: modules that are not lazy")
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise RecipeError(f"net {name!r}: {key} is not finite; allowed: finite numbers (-1e9 in a mask for -inf)")
    for key, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats:
            why = "without running statistics a sample's output depends on others in evaluation, too"
            raise RecipeError(f"net {name!r}: {key} has track_running_stats=False; allowed: True, as {why}")
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None:
            raise RecipeError(f"net {name!r}: {key} has momentum None, a mean over all batches; allowed: a number")


def _copies(tensors: dict[str, Tensor], users: tuple[int, ...]) -> dict[str, Tensor]:
    return {key: t.expand(*users, *t.shape).clone() for key, t in tensors.items()}


def _tried(run: Callable[[], Any], what: str) -> Any:
    try:
        return run()
    except Exception as error:  # the net is a stranger's, and may raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecipeError(f"{what}: {first}") from error


def _check_outputs(outputs: Any, name: str, population: Population) -> None:
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    loss, wanted = population.measure, (_TRIED, population.classes)
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and len(outputs) == _TRIED:
        if got == wanted or not loss.paired:
            return
    elif not loss.paired:
        raise RecipeError(f"net {name!r}: outputs are {got} for {_TRIED} samples; allowed: ({_TRIED}, outputs)")
    each = "class" if loss.classes else "number of a target"
    raise RecipeError(f"net {name!r}: outputs are {got} for {_TRIED} samples; allowed: {wanted}, one for each {each}")
