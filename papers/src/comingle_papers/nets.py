"""Nets of the papers.

Source: He et al. 2016, in the form of FedMerge (section 4.1, Table 1) and its public code: a 3 x 3 stem without pooling
(32 x 32 images reach the head as 4 x 4), four stages of which the last three halve the image, 1 x 1 convolutions as
shortcuts where the shape changes, batch norm after every convolution, and no biases there. Up to 34 layers a block is
two 3 x 3 convolutions; from 50 on it is 1 x 1, 3 x 3 and 1 x 1 to four times the channels.

    net         blocks          parameters, 100 labels   without the head   of ResNet-9's   Table 1
    resnet9     1, 1, 1, 1       83,852                   77,352             1               1
    resnet18    2, 2, 2, 2      182,252                  175,752             2.2721          2.27
    resnet34    3, 4, 6, 3      341,004                  334,504             4.3244          4.32
    resnet50    3, 4, 6, 3      398,892                  373,192             4.8246          4.82
    resnet101   3, 4, 23, 3     701,356                  675,656             8.7348          8.73
    resnet152   3, 8, 36, 3     950,828                  925,128            11.95997        11.95

Table 1 counts without the head and truncates after the second decimal: then all six agree. With a head of 100 labels
the ratios are 1, 2.17, 4.07, 4.76, 8.36 and 11.34; with the usual 64 channels and that head they are 1, 2.27, 4.31,
4.79, 8.63 and 11.79, which is another table.

With ``norm="group"`` ("resnet9-group" and so on) each norm is over four channels of one image (Wu and He 2018), so that
no statistics are averaged over users: averaged statistics of batch norm fit no user where users' images differ (Hsieh
et al. 2020). The number of parameters is the same.

Differs from the public code: the last map is averaged over all positions. The public code averages squares of 4 x 4,
which is the same for 32 x 32 images; for 64 x 64 images its head gets four positions, so it is four times as wide.
Initial values are PyTorch's, as in the public code.

Entry points register each net by name.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from comingle.models.nets import Build, Shape, require_shape

WIDTH = 8
"""Channels of the first stage; each further one has twice as many."""

EXPANSION = 4
"""Ratio of output channels to inner channels in a block of three convolutions."""

STAGES: dict[int, tuple[int, ...]] = {
    9: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Blocks of each stage, by the number of layers."""

_MIN_BOTTLENECK_LAYERS = 50
"""Smallest number of layers from which on blocks have three convolutions instead of two."""

_GROUP_CHANNELS = 4
"""Channels per group of group norm."""

Norm = Callable[[int], nn.Module]
Layers = tuple[nn.Module, nn.Module]

NORMS: Mapping[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(channels // _GROUP_CHANNELS, channels),
}
"""Normalisation layers by name; each is made from the number of channels."""


class Residual(nn.Module):
    """Module that returns ``relu(body(x) + shortcut(x))``."""

    by_sample = is_relu_of_sum = True

    def __init__(self, body: nn.Module, shortcut: nn.Module):
        """Add the output of a shortcut to that of a body."""
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Float[Tensor, "n c_in h w"]) -> Float[Tensor, "n c_out h_out w_out"]:
        """Return ``relu(body(x) + shortcut(x))``."""
        # Not in place: under ``vmap`` one of the two terms may have a dimension of users that the other lacks.
        return F.relu(self.body(x) + self.shortcut(x))


class Average(nn.Module):
    """Mean of each channel over the image."""

    by_sample = True

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c"]:
        """Return the mean of each channel."""
        # PyTorch's adaptive pooling falls back to a loop over users under ``vmap`` for images with channels last.
        return x.mean((-2, -1))


def make_resnet(layers: int, *, channels: int, outputs: int, norm: str = "batch") -> nn.Module:
    """Return a ResNet of four stages for small images, with FedMerge's few channels: 8 in the first stage.

    The stem does not pool. Each stage but the first halves the image.

    Args:
        layers: Number of layers: 9, 18, 34, 50, 101 or 152. From 50 on blocks are bottlenecks.
        channels: Channels of the images.
        outputs: Outputs of the head.
        norm: Normalisation after each convolution, a key of :data:`NORMS`, such as "batch".
    """
    has_bottlenecks = layers >= _MIN_BOTTLENECK_LAYERS
    convolution = partial(_convolution, NORMS[norm])
    stem = nn.Sequential(*convolution(channels, WIDTH, 3), nn.ReLU())
    parts = OrderedDict[str, nn.Module](stem=stem)
    c_in = WIDTH  # channels of the input of the next block
    for stage_index, num_blocks in enumerate(STAGES[layers]):
        inner_channels = WIDTH * 2**stage_index
        blocks = []
        for block_index in range(num_blocks):
            halves_image = stage_index > 0 and block_index == 0
            stride = 2 if halves_image else 1
            blocks.append(_block(convolution, c_in, inner_channels, stride, has_bottlenecks))
            c_in = EXPANSION * inner_channels if has_bottlenecks else inner_channels
        parts[f"stage{stage_index + 1}"] = nn.Sequential(*blocks)
    parts["pool"] = Average()
    parts["head"] = nn.Linear(c_in, outputs)
    return nn.Sequential(parts)


def _block(
    convolution: Callable[..., Layers], c_in: int, inner_channels: int, stride: int, is_bottleneck: bool
) -> Residual:
    """Return a residual block, with a 1 x 1 convolution as shortcut if the shape changes.

    Args:
        convolution: Makes a convolution and its norm, from input and output channels, kernel and stride.
        c_in: Channels of the input.
        inner_channels: Channels inside the block. A bottleneck outputs ``EXPANSION`` times this number of channels,
            any other block exactly this number.
        stride: Stride of the first 3 x 3 convolution.
        is_bottleneck: Whether the block has three convolutions instead of two.
    """
    if is_bottleneck:
        c_out = EXPANSION * inner_channels
        shapes = [
            (c_in, inner_channels, 1, 1),
            (inner_channels, inner_channels, 3, stride),
            (inner_channels, c_out, 1, 1),
        ]
    else:
        c_out = inner_channels
        shapes = [(c_in, inner_channels, 3, stride), (inner_channels, inner_channels, 3, 1)]
    body: list[nn.Module] = []
    for shape in shapes:
        body += [*convolution(*shape), nn.ReLU()]
    del body[-1]  # the last ReLU follows the addition of the shortcut, in ``Residual``
    keeps_shape = stride == 1 and c_in == c_out
    shortcut = nn.Identity() if keeps_shape else nn.Sequential(*convolution(c_in, c_out, 1, stride))
    return Residual(nn.Sequential(*body), shortcut)


def _convolution(norm: Norm, c_in: int, c_out: int, kernel: int, stride: int = 1) -> Layers:
    """Return a convolution and its norm; padding keeps the image's size, apart from the stride.

    Args:
        norm: Makes the norm from the number of channels.
        c_in: Channels of the input.
        c_out: Channels of the output.
        kernel: Side of the kernel.
        stride: Stride of the convolution.
    """
    convolution = nn.Conv2d(c_in, c_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, norm(c_out)


_VGG_CHANNELS = (16, 32, 64, 128, 512)
"""Output channels of the five convolutions of VGG-8."""


def mlp_norm(input_shape: Shape, outputs: int) -> nn.Module:
    """Return an MLP with batch norm before the activation, for FLoRAL's task "mlp-norm" (appendix F.2)."""
    (inputs,) = require_shape(input_shape, "mlp-norm", axes=1)
    hidden = 2 * inputs  # a wider hidden layer than that of the task's true models
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def mnist(input_shape: Shape, outputs: int) -> nn.Module:
    """Return an MLP with one hidden layer of 200 units, FLoRAL's net for MNIST."""
    inputs = math.prod(require_shape(input_shape, "mnist", 3))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 200), nn.ReLU(), nn.Linear(200, outputs))


def cifar10(input_shape: Shape, outputs: int) -> nn.Module:
    """Return FLoRAL's net for CIFAR-10: two convolutions without padding, each with max-pooling, and one hidden layer.

    Images of 32 x 32 become maps of 28 x 28 (convolution), 14 x 14 (pooling), 12 x 12 and 4 x 4.

    Args:
        input_shape: Channels, height and width of the images.
        outputs: Number of classes.
    """
    channels, height, width = require_shape(input_shape, "cifar10", 3, smallest=14)  # leaves maps of 1 x 1
    num_positions = _cifar10_side(height) * _cifar10_side(width)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(3),
        nn.Flatten(),
        nn.Linear(64 * num_positions, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )


def _cifar10_side(side: int) -> int:
    """Return the side of the feature maps before the hidden layer of :func:`cifar10`: 4 for images of side 32."""
    after_first_pooling = (side - 4) // 2
    return (after_first_pooling - 2) // 3


def vgg8(input_shape: Shape, outputs: int, *, norm: bool = False) -> nn.Module:
    """Return FLoRAL's VGG-8: five 3 x 3 convolutions, each with max-pooling, and three linear layers.

    The net is expressive enough for 10 labels of CIFAR-100 and not for all 100 (FLoRAL, section 5).

    Args:
        input_shape: Channels, height and width of the images.
        outputs: Number of classes.
        norm: Whether batch norm follows each convolution.
    """
    reduction = 2 ** len(_VGG_CHANNELS)  # each pooling halves the image
    channels, height, width = require_shape(input_shape, "vgg8", 3, smallest=reduction)
    layers: list[nn.Module] = []
    c_in = channels
    for c_out in _VGG_CHANNELS:
        layers.append(_vgg_convolution(c_in, c_out))
        if norm:
            layers.append(nn.BatchNorm2d(c_out))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        c_in = c_out
    num_features = c_in * (height // reduction) * (width // reduction)
    hidden_layers = [
        nn.Dropout(),
        nn.Linear(num_features, 512),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(512, 512),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *hidden_layers, nn.Linear(512, outputs))


def _vgg_convolution(c_in: int, c_out: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution with weights of N(0, 2 / (9 c_out)) and zero bias, as in FLoRAL's public code."""
    convolution = nn.Conv2d(c_in, c_out, 3, padding=1)
    nn.init.normal_(convolution.weight, std=math.sqrt(2 / (9 * c_out)))
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)
    return convolution


def vgg8_norm(input_shape: Shape, outputs: int) -> nn.Module:
    """Return :func:`vgg8` with batch norm after each convolution."""
    return vgg8(input_shape, outputs, norm=True)


def _resnet(layers: int, norm: str, input_shape: Shape, outputs: int) -> nn.Module:
    """Return a ResNet for images; the registered nets, such as ``resnet9``, are its partial applications.

    Args:
        layers: Number of layers: 9, 18, 34, 50, 101 or 152.
        norm: Normalisation after each convolution, a key of :data:`NORMS`, such as "batch".
        input_shape: Channels, height and width of the images.
        outputs: Outputs of the head.
    """
    name = f"resnet{layers}" if norm == "batch" else f"resnet{layers}-{norm}"
    channels, _, _ = require_shape(input_shape, name, 3, smallest=8)  # three stages halve the image
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
