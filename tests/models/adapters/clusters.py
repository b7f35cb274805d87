"""What the tests of clustered adaptors share: adaptors that are not zero, and materialised weights by plain loops."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from comingle.models.floral.layers import AdaptedLayer, Geometry
from comingle.models.floral.model import FloralModel


def scatter(model: nn.Module, scale: float = 0.3) -> None:
    """Move every parameter away from where it starts, adaptors and theta too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def only_layer(model: FloralModel) -> AdaptedLayer:
    (layer,) = model.layers().values()
    return layer


def kernels(geometry: Geometry, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """One cluster's factors as convolution kernels (groups * width, n / g, *k_in) and (m, width, *k_out)."""
    if geometry.kind == "linear" and geometry.kernel:
        a = a.reshape(a.shape[0], -1, *geometry.inner_kernel_size)
        # Row index k1 k2 i + k2 a + b, as in eq. 41.
        b = torch.stack([column.reshape(-1, *geometry.outer_kernel_size) for column in b.unbind(1)], dim=1)
    return a, b


def materialise(geometry: Geometry, a: Tensor, b: Tensor) -> Tensor:
    """``delta[i, j, s, t] = sum_w U[i, w, s_out, t_out] V[w, j, s_in, t_in]`` (eq. 38 to 41), entry by entry."""
    a, b = kernels(geometry, a.detach(), b.detach())
    g, width = geometry.groups, geometry.width
    out_each, in_each = geometry.d_out // g, geometry.d_in // g
    delta = a.new_zeros(geometry.d_out, in_each, *geometry.kernel)
    for i, j in itertools.product(range(geometry.d_out), range(in_each)):
        group = i // out_each
        for place in itertools.product(*(range(size) for size in geometry.kernel)):
            inside = tuple(p if own else 0 for p, own in zip(place, geometry.in_inner, strict=True))
            outside = tuple(0 if own else p for p, own in zip(place, geometry.in_inner, strict=True))
            channels = slice(group * width, (group + 1) * width)
            delta[(i, j, *place)] = b[(i, slice(None), *outside)] @ a[(channels, j, *inside)]
    return delta
