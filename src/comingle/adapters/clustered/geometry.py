"""How the two factors of an adaptor make up the change of a base weight: shapes, and their matrices.

Every low-rank form of FLoRAL is one product of two matrices per group of channels. A kernel dimension belongs either
to the inner factor (which reads the layer's input) or to the outer one (which writes its output)::

    delta[i, j, s] = sum_w outer[i, w, s_outer] inner[w, j, s_inner]
    matrix[(i, s_outer), (j, s_inner)] = (outer_matrix @ inner_matrix)[(i, s_outer), (j, s_inner)]

A linear has no kernel. Of a convolution, "channel" puts both dimensions into the cheaper factor ("in" and "out" say
which), "balanced-2d" one into each; "linear" is "channel" kept and preconditioned as two matrices (eq. 41); "filter"
is "balanced-2d" whose inner width is rank times the output channels (eq. 39).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

ConvForm = Literal["balanced-2d", "channel", "in", "out", "filter", "linear", "none"]
CONV_FORMS: tuple[str, ...] = get_args(ConvForm)

Clustered = Float[Tensor, "..."]
"""A tensor with any leading dimensions (users, clusters)."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shapes of one adaptor's factors, without users and clusters.

    ``width`` is the inner width of each group, ``inside`` tells which kernel dimensions the inner factor holds.
    ``kind`` "linear" stores both factors as matrices, "conv" as convolution kernels. ``transposed``: the base keeps
    its weight as (d_in, d_out), as the Conv1D of GPT-2 does.
    """

    kind: Literal["linear", "conv"]
    d_in: int
    d_out: int
    width: int = 1
    kernel: tuple[int, ...] = ()
    inside: tuple[bool, ...] = ()
    groups: int = 1
    transposed: bool = False

    @property
    def inner_kernel(self) -> tuple[int, ...]:
        """Kernel of the inner factor: 1 where the dimension belongs to the outer one."""
        return tuple(size if inside else 1 for size, inside in zip(self.kernel, self.inside, strict=True))

    @property
    def outer_kernel(self) -> tuple[int, ...]:
        """Kernel of the outer factor."""
        return tuple(1 if inside else size for size, inside in zip(self.kernel, self.inside, strict=True))

    @property
    def rows(self) -> int:
        """Rows of a group's matrix: output channels times the outer kernel."""
        return self.d_out // self.groups * math.prod(self.outer_kernel)

    @property
    def columns(self) -> int:
        """Columns of a group's matrix: input channels times the inner kernel; also the inner factor's fan-in."""
        return self.d_in // self.groups * math.prod(self.inner_kernel)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of the inner factor."""
        tail = (self.columns,) if self.kind == "linear" else (self.d_in // self.groups, *self.inner_kernel)
        return (self.groups * self.width, *tail)

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """Shape of the outer factor."""
        if self.kind == "linear":
            return (self.groups * self.rows, self.width)
        return (self.d_out, self.width, *self.outer_kernel)

    @property
    def size(self) -> int:
        """Parameters of one adaptor."""
        return math.prod(self.inner_shape) + math.prod(self.outer_shape)

    @property
    def base_size(self) -> int:
        """Entries of the base weight."""
        return self.d_out * self.d_in // self.groups * math.prod(self.kernel)

    def inner_matrix(self, inner: Clustered) -> Float[Tensor, "... groups width columns"]:
        """The inner factor as one matrix per group."""
        lead = inner.shape[: inner.ndim - len(self.inner_shape)]
        return inner.reshape(*lead, self.groups, self.width, self.columns)

    def inner_of(self, matrix: Float[Tensor, "... groups width columns"]) -> Clustered:
        """The inverse of :meth:`inner_matrix`."""
        return matrix.reshape(*matrix.shape[:-3], *self.inner_shape)

    def outer_matrix(self, outer: Clustered) -> Float[Tensor, "... groups rows width"]:
        """The outer factor as one matrix per group."""
        lead = outer.shape[: outer.ndim - len(self.outer_shape)]
        if self.kind == "conv":
            # The rank is the second axis of a convolution kernel; the matrix has it last.
            outer = outer.reshape(*lead, self.d_out, self.width, -1).transpose(-1, -2)
        return outer.reshape(*lead, self.groups, self.rows, self.width)

    def outer_of(self, matrix: Float[Tensor, "... groups rows width"]) -> Clustered:
        """The inverse of :meth:`outer_matrix`."""
        lead = matrix.shape[:-3]
        if self.kind == "conv":
            matrix = matrix.reshape(*lead, self.d_out, -1, self.width).transpose(-1, -2)
        return matrix.reshape(*lead, *self.outer_shape)

    def weight(self, matrix: Float[Tensor, "... groups rows columns"]) -> Clustered:
        """The change of the base weight, in the base weight's own shape."""
        lead = matrix.shape[:-3]
        split = matrix.reshape(
            *lead, self.d_out, *self.outer_kernel, self.d_in // self.groups, *self.inner_kernel
        )  # (..., out, *outer_kernel, in, *inner_kernel)
        first, dims = len(lead), len(self.kernel)
        order = [first, first + dims + 1]
        for dim in range(1, dims + 1):  # of each dimension's two sizes one is 1, so they merge into the kernel's
            order += [first + dim, first + dims + 1 + dim]
        weight = split.permute(*range(first), *order).reshape(*lead, self.d_out, self.d_in // self.groups, *self.kernel)
        return weight.mT if self.transposed else weight

    def with_rank(self, rank: int, form: str = "channel") -> Geometry:
        """The same form with another rank, cut at the rank that a change of the base weight can have at all."""
        unit = self.d_out // self.groups if form == "filter" else 1
        full = math.ceil(min(self.rows, self.columns) / unit)
        return replace(self, width=unit * min(rank, full))


def conv_geometry(form: str, *, d_in: int, d_out: int, kernel: tuple[int, ...], groups: int) -> Geometry:
    """The cheapest arrangement of a form, at rank 1 (App. F.1: the split is chosen so that the rank is largest).

    With one kernel dimension there is nothing to balance: "balanced-2d" and "filter" then give it to the cheaper side.
    """
    kind: Literal["linear", "conv"] = "linear" if form == "linear" else "conv"
    every = [
        Geometry(kind=kind, d_in=d_in, d_out=d_out, kernel=kernel, inside=inside, groups=groups)
        for inside in _splits(form, len(kernel))
    ]
    return min(every, key=lambda geometry: geometry.size).with_rank(1, form)


def _splits(form: str, dims: int) -> Iterator[tuple[bool, ...]]:
    if form in ("balanced-2d", "filter") and dims == 2:
        yield from ((False, True), (True, False))
    else:
        if form != "out":
            yield (True,) * dims
        if form != "in":
            yield (False,) * dims
