"""Small nets that are trained from scratch: modules of one user, which the engine stacks over users.

Each works under ``torch.func.functional_call`` with ``vmap`` over stacked parameters and, with batch norm, over buffers
(``vmap(randomness="different")`` with dropout). Plug-ins add further nets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from comingle.utils.errors import PluginError, RecipeError
from comingle.utils.registry import Registry
from comingle.utils.seeds import derive

Shape = Sequence[int]
"""Shape of a sample, without the batch."""
Build = Callable[..., nn.Module]
"""Function that returns a net, without arguments or for a shape of samples and a number of outputs."""

MAX_HIDDEN = 512
"""Largest number of hidden units of :func:`_mlp`."""


def make_net(name: str, input_shape: Shape, outputs: int, *, seed: int | None = None) -> nn.Module:
    """Return a net for inputs of a shape.

    Args:
        name: A key of :data:`NETS`.
        input_shape: ``(d,)`` or ``(channels, height, width)``, without the batch.
        outputs: Number of classes, or dimensions of a regression's target.
        seed: Seed of the initial weights; None to draw them from torch's global generator.

    Raises:
        RecipeError: The net is unknown, or does not support the shape.
        PluginError: A plug-in's builder is unusable.
    """
    require_net(name)
    if seed is None:
        return _build_net(name, input_shape, outputs)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(derive("net", name, seed))
        return _build_net(name, input_shape, outputs)


def require_net(name: str, *, in_python: str = "call NETS.register") -> None:
    """Raise an error unless a net is registered.

    Args:
        name: Name of the net.
        in_python: How to register a net in Python, for the message.

    Raises:
        RecipeError: The net is unknown.
    """
    if name not in NETS:
        raise RecipeError(
            f"base: no net {name!r}.{NETS.hint(name)} Allowed: {', '.join(NETS)}. If it is your own, give the file "
            f"that registers it as --plugin FILE, or in Python {in_python}"
        )


def _build_net(name: str, input_shape: Shape, outputs: int) -> nn.Module:
    """Call a registered builder and check its result.

    Args:
        name: A key of :data:`NETS`.
        input_shape: Shape of a sample.
        outputs: Number of outputs.

    Raises:
        PluginError: The builder is not a function, or returns something else than a module.
    """
    build = NETS[name]
    if not callable(build) or isinstance(build, nn.Module):
        raise PluginError(f"net {name!r}: got {type(build).__name__}; allowed: a function that returns an nn.Module")
    try:
        arguments = builder_arguments(build, input_shape, outputs)
    except TypeError as error:
        raise PluginError(f"net {name!r}: {error}") from error
    net = build(*arguments)
    if not isinstance(net, nn.Module):
        raise PluginError(f"net {name!r}: its function returned {type(net).__name__}; allowed: an nn.Module")
    return net


def builder_arguments(build: Callable[..., object], input_shape: Shape, outputs: int) -> tuple[Any, ...]:
    """Return the arguments for a function that makes a net: none if it requires none, else shape and outputs.

    Args:
        build: The function, or a class of modules.
        input_shape: Shape of a sample.
        outputs: Number of outputs.

    Raises:
        TypeError: The function takes other arguments.
    """
    shape_and_outputs = (tuple(input_shape), outputs)
    try:
        signature = inspect.signature(build)
    except ValueError:  # a built-in without a signature
        return shape_and_outputs
    for arguments in ((), shape_and_outputs):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return arguments
    raise TypeError(f"its function takes {signature}; allowed: no arguments, or (input_shape, outputs)")


def _linear(input_shape: Shape, outputs: int) -> nn.Module:
    """Build one linear layer on the flattened sample."""
    layer = nn.Linear(prod(input_shape), outputs)
    if len(input_shape) == 1:
        return layer
    return nn.Sequential(nn.Flatten(), layer)


def _mlp(input_shape: Shape, outputs: int) -> nn.Module:
    """Build a net with one hidden layer of twice as many units as inputs, as in FLoRAL (appendix G.2).

    Large inputs, such as images, get ``MAX_HIDDEN`` units. Inputs of several axes are flattened.
    """
    inputs = prod(input_shape)
    hidden = min(2 * inputs, MAX_HIDDEN)
    layers = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)]
    if len(input_shape) == 1:
        return nn.Sequential(*layers)
    return nn.Sequential(nn.Flatten(), *layers)


def _cnn(input_shape: Shape, outputs: int) -> nn.Module:
    """Build a net of two 3 x 3 convolutions, each with ReLU and max-pooling, then 4 x 4 mean pooling and a linear head.

    Args:
        input_shape: ``(channels, height, width)``.
        outputs: Number of outputs of the head.
    """
    channels, _, _ = require_shape(input_shape, "cnn", axes=3, smallest=4)  # pooling halves height and width twice
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 16, outputs),  # 64 channels of 4 x 4 means
    )


def require_shape(shape: Shape, net: str, axes: int, *, smallest: int = 1) -> Shape:
    """Return the shape of a net's inputs, or raise an error if the net does not support it.

    Args:
        shape: Shape of the inputs, without the batch.
        net: Name of the net, for the error.
        axes: Required number of axes: 1, or 3 for images.
        smallest: Smallest height and width of images.

    Raises:
        RecipeError: The shape has another number of axes, an empty axis or too small images.
    """
    is_allowed = len(shape) == axes and min(shape) >= 1
    if is_allowed and axes == 3:
        _, height, width = shape
        is_allowed = min(height, width) >= smallest
    if not is_allowed:
        allowed = "(d,)" if axes == 1 else f"(channels, height, width) with sides of at least {smallest}"
        raise RecipeError(f"net {net!r}: inputs of shape {tuple(shape)}; allowed: {allowed}")
    return shape


_BUILT_IN: Mapping[str, Build] = {"linear": _linear, "mlp": _mlp, "cnn": _cnn}

NETS: Registry[Build] = Registry("comingle.nets", _BUILT_IN)
"""Builders of nets by name, plug-ins included; each takes nothing, or an input shape and a number of outputs."""
