"""ConvLoRA per cluster on ``nn.Conv2d`` and ``nn.Conv1d``: two convolutions, all clusters' channels side by side.

Stride, padding and dilation of a dimension go to the factor that holds that dimension of the kernel; the other factor
keeps the resolution there. So the pair equals one convolution with the materialised weight, for every padding mode:
the inner factor has no bias and works on each line of the outer dimensions alone, so padding them can wait for it.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from comingle.adapters.clustered.lowrank import LowRankLayer

Conv = nn.Conv1d | nn.Conv2d


class AdaptedConv(LowRankLayer):
    """``a`` (clusters, groups * width, d_in / groups, *kernel), ``b`` (clusters, d_out, width, *kernel); see Geometry.

    With groups, each group has a low-rank change of its own.
    """

    def low_rank(self, x: Float[Tensor, "*inputs"], shares: Float[Tensor, " clusters"]) -> Tensor:
        """One convolution to groups * clusters * width channels, one back; the shares scale the outer kernel."""
        inner, outer = self._kernels(shares)
        geometry = self.geometry
        assert geometry is not None
        z = convolve(cast(Conv, self.base), x, inner, geometry.inside)
        return convolve(cast(Conv, self.base), z, outer, tuple(not inside for inside in geometry.inside))

    def _kernels(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Both factors as convolution kernels of all clusters; the channels in between are (group, cluster, width)."""
        geometry = self.geometry
        assert geometry is not None
        assert self.a is not None
        assert self.b is not None
        inner = geometry.inner_matrix(self.a).transpose(0, 1)  # (groups, clusters, width, columns)
        inner = inner.reshape(-1, geometry.d_in // geometry.groups, *geometry.inner_kernel)
        outer = geometry.outer_matrix(self.b) * shares.to(self.b.dtype).view(-1, 1, 1, 1)
        outer = outer.permute(1, 2, 0, 3).flatten(2)  # (groups, rows, clusters * width)
        outer = outer.reshape(geometry.d_out, -1, outer.shape[-1]).mT
        return inner, outer.reshape(geometry.d_out, -1, *geometry.outer_kernel)

    def spread(self, bias: Float[Tensor, " d_out"]) -> Tensor:
        """With one axis of size 1 for each dimension of the image."""
        return bias.view(-1, *(1 for _ in cast(Conv, self.base).kernel_size))


def convolve(base: Conv, x: Tensor, weight: Tensor, inside: tuple[bool, ...]) -> Tensor:
    """Convolve with the base's stride, padding and dilation in the dimensions marked ``inside``, plain in the rest."""
    padding: Any = base.padding
    if base.padding_mode != "zeros":
        x, padding = F.pad(x, _amounts(base, inside), mode=base.padding_mode), 0
    elif not isinstance(padding, str):  # "same" and "valid" already mean nothing where the kernel is 1
        padding = _only(padding, inside, 0)
    function = F.conv1d if isinstance(base, nn.Conv1d) else F.conv2d
    stride, dilation = _only(base.stride, inside, 1), _only(base.dilation, inside, 1)
    return function(x, weight, None, stride, padding, dilation, base.groups)


def _only(values: Any, inside: tuple[bool, ...], other: int) -> tuple[int, ...]:
    return tuple(value if mine else other for value, mine in zip(values, inside, strict=True))


def _amounts(base: Conv, inside: tuple[bool, ...]) -> list[int]:
    """What ``F.pad`` adds before and after each dimension, last dimension first."""
    both = base._reversed_padding_repeated_twice
    return [amount if inside[-1 - i // 2] else 0 for i, amount in enumerate(both)]
