"""Small nets that are trained from scratch: plain modules of one user; the engine stacks them over users.

Each works under ``torch.func.functional_call`` with ``vmap`` over stacked parameters (and buffers, where it has batch
norm; with dropout, ``vmap(randomness="different")``). Three are here; plug-ins have others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import nn

from comingle.utils.errors import PluginError, RecipeError
from comingle.utils.registry import Registry
from comingle.utils.seeds import derive

Shape = Sequence[int]
Build = Callable[[Shape, int], nn.Module]

WIDEST = 512
"""Hidden units of :func:`_mlp` at most."""


def make_net(name: str, input_shape: Shape, outputs: int, *, seed: int | None = None) -> nn.Module:
    """A net for inputs of this shape (without the batch), with as many outputs.

    Args:
        name: a key of :data:`NETS`.
        input_shape: as ``(d,)`` or ``(channels, height, width)``.
        outputs: classes, or dimensions of a regression's target.
        seed: initial weights follow it alone; without it they are drawn from torch's global generator.

    Raises:
        RecipeError: an unknown net, or inputs that it cannot take.
        PluginError: a plug-in that cannot be used.
    """
    if name not in NETS:
        raise RecipeError(f"no net {name!r}.{NETS.hint(name)} Allowed: {', '.join(NETS)}")
    if seed is None:
        return _made(name, input_shape, outputs)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(derive("net", name, seed))
        return _made(name, input_shape, outputs)


def _made(name: str, input_shape: Shape, outputs: int) -> nn.Module:
    build = NETS[name]
    if not callable(build):
        raise PluginError(f"net {name!r}: got {type(build).__name__}; allowed: a function that makes an nn.Module")
    net = build(input_shape, outputs)
    if not isinstance(net, nn.Module):
        raise PluginError(f"net {name!r}: its function returned {type(net).__name__}; allowed: an nn.Module")
    return net


def _linear(input_shape: Shape, outputs: int) -> nn.Module:
    layer = nn.Linear(prod(input_shape), outputs)
    return layer if len(input_shape) == 1 else nn.Sequential(nn.Flatten(), layer)


def _mlp(input_shape: Shape, outputs: int) -> nn.Module:
    """One hidden layer twice as wide as the input (FLoRAL, appendix G.2, m = 2), up to :data:`WIDEST`."""
    inputs = prod(input_shape)
    hidden = min(2 * inputs, WIDEST)
    layers = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)]
    return nn.Sequential(*layers) if len(input_shape) == 1 else nn.Sequential(nn.Flatten(), *layers)


def _cnn(input_shape: Shape, outputs: int) -> nn.Module:
    """Two 3 x 3 convolutions of 32 and 64 channels with max-pooling after each, means over 4 x 4 places, one layer."""
    channels, _, _ = require_shape(input_shape, "cnn", 3, smallest=4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 16, outputs),
    )


def require_shape(shape: Shape, net: str, axes: int, *, smallest: int = 1) -> Shape:
    """The shape, checked: so many axes, images at least that high and wide.

    Raises:
        RecipeError: another shape.
    """
    if len(shape) != axes or min(shape) < 1 or (axes == 3 and min(shape[1:]) < smallest):
        wanted = "(d,)" if axes == 1 else f"(channels, height, width) with sides of at least {smallest}"
        raise RecipeError(f"net {net!r}: inputs of shape {tuple(shape)}; allowed: {wanted}")
    return shape


_OWN: Mapping[str, Build] = {"linear": _linear, "mlp": _mlp, "cnn": _cnn}

NETS: Registry[Build] = Registry("comingle.nets", _OWN)
"""Builders by name, of an input shape and a number of outputs; installed plug-ins' too."""
