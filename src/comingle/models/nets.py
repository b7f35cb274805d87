"""Small nets that are trained from scratch: plain modules of one user; the engine stacks them over users.

Each works under ``torch.func.functional_call`` with ``vmap`` over stacked parameters (and buffers, where it has batch
norm; with dropout, ``vmap(randomness="different")``). FLoRAL's nets are here, with the sizes of its section 5 and its
public code; FedMerge's residual nets are in :mod:`comingle.models.resnets`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from comingle.data.seeds import derive
from comingle.errors import PluginError, RecipeError
from comingle.models.resnets import STAGES, make_resnet
from comingle.plugins import Registry

Shape = Sequence[int]
Build = Callable[[Shape, int], nn.Module]

_VGG_CHANNELS = (16, 32, 64, 128, 512)


def make_net(name: str, input_shape: Shape, outputs: int, *, seed: int | None = None) -> nn.Module:
    """A net for inputs of this shape (without the batch), with as many outputs.

    Args:
        name: a key of :data:`NETS`.
        input_shape: ``(d,)`` or ``(channels, height, width)``.
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
    (inputs,) = _need(input_shape, "linear", 1)
    return nn.Linear(inputs, outputs)


def _mlp(input_shape: Shape, outputs: int) -> nn.Module:
    """One hidden layer twice as wide as the input, so that it can hold the true model (appendix G.2, m = 2)."""
    (inputs,) = _need(input_shape, "mlp", 1)
    return nn.Sequential(nn.Linear(inputs, 2 * inputs), nn.ReLU(), nn.Linear(2 * inputs, outputs))


def _mlp_norm(input_shape: Shape, outputs: int) -> nn.Module:
    """Batch norm behind the first layer, before the activation, where the true model normalises (appendix F.2).

    The public code has it behind the activation.
    """
    (inputs,) = _need(input_shape, "mlp-norm", 1)
    hidden = 2 * inputs
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _mnist(input_shape: Shape, outputs: int) -> nn.Module:
    """784-200-10."""
    inputs = math.prod(_need(input_shape, "mnist", 3))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 200), nn.ReLU(), nn.Linear(200, outputs))


def _cifar10(input_shape: Shape, outputs: int) -> nn.Module:
    """Two convolutions without padding: 32 -> 28 -> 14 -> 12 -> 4, so 64 * 4 * 4 = 1024 features, then 64."""
    channels, height, width = _need(input_shape, "cifar10", 3, smallest=14)
    places = _cifar10_side(height) * _cifar10_side(width)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(3),
        nn.Flatten(),
        nn.Linear(64 * places, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )


def _cifar10_side(side: int) -> int:
    return ((side - 4) // 2 - 2) // 3


def _vgg8(input_shape: Shape, outputs: int, *, norm: bool = False) -> nn.Module:
    """Five 3 x 3 convolutions with max-pooling after each, then 512-512-classes with dropout before each but the last.

    Expressive enough for 10 labels of CIFAR-100 and not for all 100 (FLoRAL, section 5). Convolutions start at
    N(0, 2 / (k k c_out)) with zero bias, as in the public code.
    """
    channels, height, width = _need(input_shape, "vgg8", 3, smallest=2 ** len(_VGG_CHANNELS))
    layers: list[nn.Module] = []
    for c_in, c_out in zip((channels, *_VGG_CHANNELS), _VGG_CHANNELS, strict=False):
        layers += [_vgg_convolution(c_in, c_out), *([nn.BatchNorm2d(c_out)] if norm else []), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    scale = 2 ** len(_VGG_CHANNELS)
    features = _VGG_CHANNELS[-1] * (height // scale) * (width // scale)
    head = [nn.Dropout(), nn.Linear(features, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(512, outputs))


def _vgg_convolution(c_in: int, c_out: int) -> nn.Conv2d:
    convolution = nn.Conv2d(c_in, c_out, 3, padding=1)
    nn.init.normal_(convolution.weight, std=math.sqrt(2 / (9 * c_out)))
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)
    return convolution


def _vgg8_norm(input_shape: Shape, outputs: int) -> nn.Module:
    return _vgg8(input_shape, outputs, norm=True)


def _resnet(layers: int, norm: str, input_shape: Shape, outputs: int) -> nn.Module:
    name = f"resnet{layers}" if norm == "batch" else f"resnet{layers}-{norm}"
    channels, _, _ = _need(input_shape, name, 3, smallest=8)
    return make_resnet(layers, channels=channels, outputs=outputs, norm=norm)


def _need(shape: Shape, net: str, axes: int, *, smallest: int = 1) -> Shape:
    """The shape, checked: so many axes, images at least that high and wide."""
    if len(shape) != axes or min(shape) < 1 or (axes == 3 and min(shape[1:]) < smallest):
        wanted = "(d,)" if axes == 1 else f"(channels, height, width) with sides of at least {smallest}"
        raise RecipeError(f"net {net!r}: inputs of shape {tuple(shape)}; allowed: {wanted}")
    return shape


_OWN: Mapping[str, Build] = {
    "linear": _linear,
    "mlp": _mlp,
    "mlp-norm": _mlp_norm,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "vgg8": _vgg8,
    "vgg8-norm": _vgg8_norm,
    **{f"resnet{layers}": partial(_resnet, layers, "batch") for layers in STAGES},
    **{f"resnet{layers}-group": partial(_resnet, layers, "group") for layers in STAGES},
}

NETS: Registry[Build] = Registry("comingle.nets", _OWN)
"""Builders by name, of an input shape and a number of outputs; installed plug-ins' too."""
