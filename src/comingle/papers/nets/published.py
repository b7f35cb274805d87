"""The nets of the papers: FLoRAL's, with the sizes of its section 5 and its public code, and FedMerge's residual nets.

Entry points offer each of them to the core by its name.
"""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from comingle.models.nets import Build, Shape, require_shape
from comingle.papers.nets.resnets import make_resnet

_VGG_CHANNELS = (16, 32, 64, 128, 512)


def mlp_norm(input_shape: Shape, outputs: int) -> nn.Module:
    """Batch norm behind the first layer, before the activation, where the true model normalises (appendix F.2).

    The public code has it behind the activation.
    """
    (inputs,) = require_shape(input_shape, "mlp-norm", 1)
    hidden = 2 * inputs
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def mnist(input_shape: Shape, outputs: int) -> nn.Module:
    """784-200-10."""
    inputs = math.prod(require_shape(input_shape, "mnist", 3))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 200), nn.ReLU(), nn.Linear(200, outputs))


def cifar10(input_shape: Shape, outputs: int) -> nn.Module:
    """Two convolutions without padding: 32 -> 28 -> 14 -> 12 -> 4, so 64 * 4 * 4 = 1024 features, then 64."""
    channels, height, width = require_shape(input_shape, "cifar10", 3, smallest=14)
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


def vgg8(input_shape: Shape, outputs: int, *, norm: bool = False) -> nn.Module:
    """Five 3 x 3 convolutions with max-pooling after each, then 512-512-classes with dropout before each but the last.

    Expressive enough for 10 labels of CIFAR-100 and not for all 100 (FLoRAL, section 5). Convolutions start at
    N(0, 2 / (k k c_out)) with zero bias, as in the public code.
    """
    channels, height, width = require_shape(input_shape, "vgg8", 3, smallest=2 ** len(_VGG_CHANNELS))
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


def vgg8_norm(input_shape: Shape, outputs: int) -> nn.Module:
    """The same with batch norm behind each convolution."""
    return vgg8(input_shape, outputs, norm=True)


def _resnet(layers: int, norm: str, input_shape: Shape, outputs: int) -> nn.Module:
    name = f"resnet{layers}" if norm == "batch" else f"resnet{layers}-{norm}"
    channels, _, _ = require_shape(input_shape, name, 3, smallest=8)
    return make_resnet(layers, channels=channels, outputs=outputs, norm=norm)


resnet9: Build = partial(_resnet, 9, "batch")
resnet18: Build = partial(_resnet, 18, "batch")
resnet34: Build = partial(_resnet, 34, "batch")
resnet50: Build = partial(_resnet, 50, "batch")
resnet101: Build = partial(_resnet, 101, "batch")
resnet152: Build = partial(_resnet, 152, "batch")
resnet9_group: Build = partial(_resnet, 9, "group")
resnet18_group: Build = partial(_resnet, 18, "group")
resnet34_group: Build = partial(_resnet, 34, "group")
resnet50_group: Build = partial(_resnet, 50, "group")
resnet101_group: Build = partial(_resnet, 101, "group")
resnet152_group: Build = partial(_resnet, 152, "group")
