"""Adapted layers of FLoRAL: linear and convolution layers with one LoRA per cluster.

**Factors.** Every low-rank form of FLoRAL is a product of two matrices per group of channels. A kernel dimension
belongs either to the inner factor (which reads the layer's input) or to the outer one (which writes its output)::

    delta[i, j, s] = sum_w outer[i, w, s_outer] inner[w, j, s_inner]
    matrix[(i, s_outer), (j, s_inner)] = (outer_matrix @ inner_matrix)[(i, s_outer), (j, s_inner)]

A linear layer has no kernel. Forms of a convolution:

- "channel": both kernel dimensions in the cheaper factor; "in" and "out": both in the inner or the outer factor.
- "balanced-2d": one kernel dimension in each factor.
- "linear": as "channel", but stored and preconditioned as two matrices (eq. 41).
- "filter": as "balanced-2d", with an inner width of rank times the output channels (eq. 39).

**Forward pass.** The output is ``base(x) + alpha * sum_c pi_c adaptor_c(x)`` (FLoRAL eq. 1 and (FML)): the weight is
``W + alpha * sum_c pi_c U_c V_c`` (App. F.1), the bias ``bias + alpha * sum_c pi_c bias_c``. No weight change of full
size is computed. Adaptors are stacked parameters whose leading axis is the cluster. The mixture is computed once per
forward pass of the model; all layers read it from one :class:`Mixture`, so the router is registered only once.

The inner factor ``a`` starts at random and the outer factor ``b`` at zero, as in LoRA (Hu et al. 2021) and FLoRAL's
public code (section 3.2 of the paper says the reverse).

A factor uses the layer's stride, padding and dilation in the kernel dimensions that it holds, and stride 1 without
padding in the others. So the pair equals one convolution with the full weight for every padding mode: the inner factor
has no bias and treats each line of the outer dimensions separately, so the outer factor can pad them afterwards.

**Preconditioning** (:func:`precondition`). With the inner factor A (width x columns) and the outer factor B (rows x
width) of an adaptor, before each step::

    linear        G_A <- (B^T B + eps)^-1 G_A            G_B <- G_B (A A^T + eps)^-1
    convolution   G_A <- G_A / (||B^T B||_F + eps)       G_B <- G_B / (||A A^T||_F + eps)

Gradients of biases and norm adaptors are unchanged. The groups of a convolution are blocks of one matrix and share its
norm.

**Centring** (:func:`centre`). ``W += alpha * E_c[B_c A_c]`` and ``B_c, A_c <- B Sigma^(1/2), Sigma^(1/2) A`` of the
truncated SVD of ``B_c A_c - E_c[B_c A_c]`` (p = q = 2), where E_c is the mean under p(c) of eq. 2, so that eq. 30
holds. The model ``W + alpha * sum_c pi_c B_c A_c`` is unchanged for every mixture if the rank of each difference is at
most the adaptor's width; otherwise it is the closest that this width allows. Biases and the gains and shifts of norms
are centred exactly. A batch norm whose adaptors have local statistics is unchanged in training mode (plain form) or in
eval mode (BatchNorA); in the other mode only where the local statistics equal the base's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from comingle.models.lora import init_zero
from comingle.utils.trees import Init

ConvForm = Literal["balanced-2d", "channel", "in", "out", "filter", "linear", "none"]
CONV_FORMS: tuple[str, ...] = get_args(ConvForm)

Clustered = Float[Tensor, "..."]
"""A tensor with any leading dimensions, such as users and clusters."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shapes of a low-rank adaptor's inner and outer factor, without the user and cluster axes.

    The inner factor reads the layer's input, the outer one writes its output.

    Args:
        kind: "linear" stores both factors as matrices, "conv" as convolution kernels.
        d_in: Input channels.
        d_out: Output channels.
        width: Size of the axis that both factors share, of each group; as a rule the rank.
        kernel: Kernel size of a convolution.
        inside: For each kernel dimension whether the inner factor holds it.
        groups: Groups of a convolution.
        transposed: The base stores its weight as (d_in, d_out), like GPT-2's Conv1D.
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
        """Kernel size of the inner factor: 1 in the dimensions of the outer one."""
        return tuple(size if inside else 1 for size, inside in zip(self.kernel, self.inside, strict=True))

    @property
    def outer_kernel(self) -> tuple[int, ...]:
        """Kernel size of the outer factor: 1 in the dimensions of the inner one."""
        return tuple(1 if inside else size for size, inside in zip(self.kernel, self.inside, strict=True))

    @property
    def rows(self) -> int:
        """Rows of a group's matrix: its output channels times the outer kernel."""
        return self.d_out // self.groups * math.prod(self.outer_kernel)

    @property
    def columns(self) -> int:
        """Columns of a group's matrix, its input channels times the inner kernel; also the inner factor's fan-in."""
        return self.d_in // self.groups * math.prod(self.inner_kernel)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of the inner factor."""
        columns = (self.columns,) if self.kind == "linear" else (self.d_in // self.groups, *self.inner_kernel)
        return (self.groups * self.width, *columns)

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """Shape of the outer factor."""
        if self.kind == "linear":
            return (self.groups * self.rows, self.width)
        return (self.d_out, self.width, *self.outer_kernel)

    @property
    def size(self) -> int:
        """Number of parameters of one adaptor."""
        return math.prod(self.inner_shape) + math.prod(self.outer_shape)

    @property
    def base_size(self) -> int:
        """Number of entries of the base weight."""
        return self.d_out * self.d_in // self.groups * math.prod(self.kernel)

    def inner_matrix(self, inner: Clustered) -> Float[Tensor, "... groups width columns"]:
        """Return the factor that reads the input as one matrix per group of channels.

        Rows are the inner width (the rank); columns are a group's input channels times the kernel positions that this
        factor holds.
        """
        lead = inner.shape[: inner.ndim - len(self.inner_shape)]
        return inner.reshape(*lead, self.groups, self.width, self.columns)

    def inner_from_matrix(self, matrix: Float[Tensor, "... groups width columns"]) -> Clustered:
        """Return the factor that reads the input in its stored shape, from one matrix per group of channels.

        The inverse of :meth:`inner_matrix`.
        """
        return matrix.reshape(*matrix.shape[:-3], *self.inner_shape)

    def outer_matrix(self, outer: Clustered) -> Float[Tensor, "... groups rows width"]:
        """Return the factor that writes the output as one matrix per group of channels.

        Rows are a group's output channels times the kernel positions that this factor holds; columns are the inner
        width (the rank).
        """
        lead = outer.shape[: outer.ndim - len(self.outer_shape)]
        if self.kind == "conv":
            # The rank is the second axis of a convolution kernel, but the last axis of the matrix.
            outer = outer.reshape(*lead, self.d_out, self.width, -1).transpose(-1, -2)
        return outer.reshape(*lead, self.groups, self.rows, self.width)

    def outer_from_matrix(self, matrix: Float[Tensor, "... groups rows width"]) -> Clustered:
        """Return the factor that writes the output in its stored shape, from one matrix per group of channels.

        The inverse of :meth:`outer_matrix`. Rows are a group's output channels times the kernel positions that the
        factor holds; columns are the inner width (the rank).
        """
        lead = matrix.shape[:-3]
        if self.kind == "conv":
            matrix = matrix.reshape(*lead, self.d_out, -1, self.width).transpose(-1, -2)
        return matrix.reshape(*lead, *self.outer_shape)

    def weight_from_matrix(self, matrix: Float[Tensor, "... groups rows columns"]) -> Clustered:
        """Return a change of the base weight in the base weight's shape, from one matrix per group of channels.

        A matrix is the product of an adaptor's outer and inner factor. Its rows are a group's output channels times the
        outer factor's kernel positions, its columns the input channels times the inner factor's kernel positions.
        """
        lead = matrix.shape[:-3]
        d_in_of_group = self.d_in // self.groups
        # (..., out, *outer_kernel, in, *inner_kernel)
        split = matrix.reshape(*lead, self.d_out, *self.outer_kernel, d_in_of_group, *self.inner_kernel)
        out_axis, dims = len(lead), len(self.kernel)
        in_axis = out_axis + dims + 1
        order = [out_axis, in_axis]
        for dim in range(1, dims + 1):  # each kernel dimension has size 1 in one of the factors, so both axes merge
            order += [out_axis + dim, in_axis + dim]
        weight = split.permute(*range(out_axis), *order).reshape(*lead, self.d_out, d_in_of_group, *self.kernel)
        return weight.mT if self.transposed else weight

    def with_rank(self, rank: int, form: str = "channel") -> Geometry:
        """Return the shapes for another rank, limited to the largest rank that the base weight can have.

        ``width`` is the size of the axis that both factors share: the rank, or in the form "filter" the rank times a
        group's output channels (FLoRAL, arXiv:2410.03497, eq. 39).

        Args:
            rank: The new rank.
            form: How the two factors divide a convolution's kernel, one of ``CONV_FORMS``; only "filter" matters here.
        """
        width_per_rank = self.d_out // self.groups if form == "filter" else 1
        full_rank = math.ceil(min(self.rows, self.columns) / width_per_rank)
        return replace(self, width=width_per_rank * min(rank, full_rank))


def conv_geometry(form: str, *, d_in: int, d_out: int, kernel: tuple[int, ...], groups: int) -> Geometry:
    """Return the shapes of the two factors of a convolution's low-rank adaptor at rank 1.

    A form allows one or two ways to divide the kernel's dimensions among the factors. The way with the fewest
    parameters is chosen, which allows the largest rank for a given size, as in FLoRAL (App. F.1). A convolution with
    one kernel dimension has nothing to balance, so "balanced-2d" and "filter" put it into the cheaper factor.

    Args:
        form: One of ``CONV_FORMS`` except "none".
        d_in: Input channels.
        d_out: Output channels.
        kernel: Kernel size.
        groups: Groups of channels.
    """
    kind: Literal["linear", "conv"] = "linear" if form == "linear" else "conv"
    candidates = [
        Geometry(kind=kind, d_in=d_in, d_out=d_out, kernel=kernel, inside=inside, groups=groups)
        for inside in _possible_splits(form, len(kernel))
    ]
    return min(candidates, key=lambda geometry: geometry.size).with_rank(1, form)


def _possible_splits(form: str, dims: int) -> Iterator[tuple[bool, ...]]:
    """Yield each way in which a form of convolution may divide ``dims`` kernel dimensions among its two factors.

    A split says for each dimension whether the inner factor (which reads the input) holds it. "balanced-2d" and
    "filter" give one dimension to each factor, "in" gives all to the inner and "out" all to the outer factor. The other
    forms put all into one factor, either of them.

    Args:
        form: One of ``CONV_FORMS`` except "none".
        dims: Number of kernel dimensions: 1 or 2.
    """
    if form in ("balanced-2d", "filter") and dims == 2:
        yield from ((False, True), (True, False))
    else:
        if form != "out":
            yield (True,) * dims
        if form != "in":
            yield (False,) * dims


class Mixture:
    """Holder of the mixture of the current forward pass, shared by all layers of a model."""

    value: Tensor | None = None

    def __deepcopy__(self, memo: Mapping[int, object]) -> Mixture:
        """Return an empty holder: a mixture may hold a graph, and belongs to the original model's forward pass."""
        return Mixture()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Names of a low-rank adaptor's two factors and of the base weight that they change."""

    inner: str
    outer: str
    weight: str
    alpha: float
    geometry: Geometry


@dataclass(frozen=True, kw_only=True)
class Offset:
    """Names of an adaptor that is added without factors (of biases and norms) and of the base's tensor.

    ``dims`` is the number of axes of the base's tensor; the cluster axis comes right before them.
    """

    adaptor: str
    base: str
    alpha: float
    dims: int


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All adaptors of a layer or a model: low-rank ones and added ones."""

    factors: tuple[Pair, ...] = ()
    offsets: tuple[Offset, ...] = ()


class AdaptedLayer(nn.Module, ABC):
    """A frozen or trained base layer, and one set of adaptors for each cluster of users."""

    place = 0
    """Index of the layer among the adapted layers of a model, for a mixture per layer."""

    def __init__(self, base: nn.Module, *, num_clusters: int, alpha: float, mixture: Mixture):
        """Keep the base layer; subclasses add the adaptors.

        Args:
            base: The layer to adapt; it stays a submodule.
            num_clusters: Number of clusters, each with its own adaptors.
            alpha: Factor of the adaptors' output.
            mixture: Holder of the clusters' mixture weights in the current forward pass, common to all layers.
        """
        super().__init__()
        self.base = base
        self.num_clusters = num_clusters
        self.alpha = alpha
        self.mixture = mixture

    def shares(self, like: Tensor) -> Float[Tensor, " clusters"]:
        """Return this layer's mixture weights pi of the current forward pass, times alpha, in the dtype of ``like``.

        The mixture of the pass is one vector for all layers, or one vector for each layer.

        Raises:
            RuntimeError: No forward pass of the model is under way.
        """
        value = self.mixture.value
        if value is None:
            raise RuntimeError("an adapted layer was called outside the model's forward; call it inside model.mixing()")
        return self.alpha * self.of_mixture(value).to(like.dtype)

    def of_mixture(self, mixture: Float[Tensor, "*layers clusters"]) -> Float[Tensor, " clusters"]:
        """Return this layer's row of a mixture per layer, or the mixture itself if all layers share one."""
        return mixture if mixture.ndim == 1 else mixture[self.place]

    @abstractmethod
    def initialisers(self) -> dict[str, Init]:
        """Return the initialiser of each of the layer's own parameters, by name."""

    @abstractmethod
    def pairs(self, prefix: str) -> Pairs:
        """Return the layer's adaptors, with ``prefix`` before their names."""

    @abstractmethod
    def fold(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add the mixed adaptor to the base's tensors in place, and return the base; ``shares`` is ``alpha * pi``."""

    def offset(self, prefix: str, name: str) -> Offset:
        """Return the names of an adaptor without factors (of a bias, gamma or beta) and of the base's tensor.

        Args:
            prefix: Prefix of the names, such as "model.layers.0.".
            name: Name of the adaptor in this layer, which is that of the tensor in the base.
        """
        dims = tensor(self.base, name).ndim
        return Offset(adaptor=f"{prefix}{name}", base=f"{prefix}base.{name}", alpha=self.alpha, dims=dims)

    def reset(self, generator: torch.Generator | None) -> None:
        """Draw new initial values of the adaptors; the base layer keeps its values.

        Args:
            generator: Source of the random numbers; None for torch's global generator.
        """
        with torch.no_grad():
            for name, draw in self.initialisers().items():
                parameter = self.get_parameter(name)
                parameter.copy_(draw(tuple(parameter.shape), generator or torch.default_generator))

    def clustered(self, shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
        """Return a parameter of zeros ``(clusters, *shape)``, in the dtype and on the device of ``like``."""
        return nn.Parameter(torch.zeros(self.num_clusters, *shape, dtype=like.dtype, device=like.device))

    def extra_repr(self) -> str:
        """Return the shapes of the adaptors for ``print(model)``."""
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters(recurse=False)}
        return ", ".join(f"{name}={shape}" for name, shape in shapes.items())


def tensor(module: nn.Module, name: str) -> Tensor:
    """Return a module's parameter or buffer by name, also inside ``torch.func.functional_call``.

    ``functional_call`` replaces parameters by plain tensors for the duration of a call, which
    ``nn.Module.get_parameter`` rejects.
    """
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value


def mix(shares: Float[Tensor, " clusters"], adaptors: Float[Tensor, "clusters ..."]) -> Tensor:
    """Return ``sum_c shares_c adaptors_c``."""
    return torch.tensordot(shares, adaptors, dims=1)


def uniform(fan_in: int) -> Init:
    """Return an initialiser uniform in +-sqrt(6 / fan_in), as FLoRAL's public code draws the inner factor."""
    bound = math.sqrt(6 / fan_in)

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator) * (2 * bound) - bound

    return draw


class LowRankLayer(AdaptedLayer):
    """A layer with low-rank adaptors of its weight and adaptors of its bias.

    Shapes: ``a`` is ``(clusters, *inner_shape)``, ``b`` ``(clusters, *outer_shape)``, ``bias`` ``(clusters, d_out)``.
    There are no factors without a geometry, and no bias adaptor without ``bias`` or if the base has no bias.
    """

    a: nn.Parameter | None
    b: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        base: nn.Module,
        *,
        geometry: Geometry | None,
        bias: bool,
        num_clusters: int,
        alpha: float,
        mixture: Mixture,
    ):
        """Create the factors ``a`` and ``b`` and the adaptors of the bias, each with a leading cluster axis.

        Args:
            base: The layer to adapt.
            geometry: Shapes of the factors; None for no low-rank adaptor.
            bias: Adapt the bias, if the layer has one.
            num_clusters: Number of clusters, each with its own adaptors.
            alpha: Factor of the adaptors' output.
            mixture: Holder of the clusters' mixture weights in the current forward pass.
        """
        super().__init__(base, num_clusters=num_clusters, alpha=alpha, mixture=mixture)
        self.geometry = geometry
        weight, own_bias = base.get_parameter("weight"), base._parameters.get("bias")
        self.a = self.clustered(geometry.inner_shape, weight) if geometry else None
        self.b = self.clustered(geometry.outer_shape, weight) if geometry else None
        self.bias = self.clustered(tuple(own_bias.shape), own_bias) if bias and own_bias is not None else None

    @abstractmethod
    def low_rank(self, x: Tensor, shares: Float[Tensor, " clusters"]) -> Tensor:
        """Return ``sum_c shares_c U_c V_c x``."""

    @abstractmethod
    def spread(self, bias: Float[Tensor, " d_out"]) -> Tensor:
        """Reshape a bias so that it adds to the layer's output."""

    def forward(self, x: Float[Tensor, "*inputs"]) -> Float[Tensor, "*outputs"]:
        """Return ``base(x) + alpha * sum_c pi_c (U_c V_c x + bias_c)``.

        pi are the mixture weights of the current forward pass, V_c and U_c the inner and outer factor of cluster c.
        """
        y = self.base(x)
        shares = self.shares(y)
        if self.geometry is not None:
            y = y + self.low_rank(x, shares)
        if self.bias is not None:
            y = y + self.spread(mix(shares.to(self.bias.dtype), self.bias)).to(y.dtype)
        return y

    def initialisers(self) -> dict[str, Init]:
        """Return initialisers: uniform for ``a``, zero for ``b`` and ``bias``."""
        factors: dict[str, Init] = {}
        if self.geometry is not None:
            factors = {"a": uniform(self.geometry.columns), "b": init_zero}
        return factors if self.bias is None else {**factors, "bias": init_zero}

    def pairs(self, prefix: str) -> Pairs:
        """Return the names of the layer's adaptors: of its weight (two factors) and of its bias, as far as it has them.

        Args:
            prefix: Prefix of the names, such as "model.layers.0.".
        """
        factors: tuple[Pair, ...] = ()
        if self.geometry is not None:
            names = {"inner": f"{prefix}a", "outer": f"{prefix}b", "weight": f"{prefix}base.weight"}
            factors = (Pair(**names, alpha=self.alpha, geometry=self.geometry),)
        return Pairs(factors=factors, offsets=() if self.bias is None else (self.offset(prefix, "bias"),))

    def fold(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add the mixture of the clusters' adaptors to the base's weight and bias in place, and return the base.

        The change of the weight is ``sum_c shares_c U_c V_c``, with the factors U_c (``b``) and V_c (``a``) of cluster
        c. A layer may have adaptors of its bias only. ``shares`` are the mixture weights times alpha.
        """
        if self.geometry is not None and self.a is not None and self.b is not None:
            weight = self.base.get_parameter("weight")
            # Factors as matrices (clusters, groups, rows, rank) and (clusters, groups, rank, columns).
            outer, inner = self.geometry.outer_matrix(self.b), self.geometry.inner_matrix(self.a)
            weighted = outer * shares.to(self.b.dtype).view(-1, 1, 1, 1)
            change = (weighted @ inner).sum(0)
            weight.data.add_(self.geometry.weight_from_matrix(change))
        if self.bias is not None:
            self.base.get_parameter("bias").data.add_(mix(shares.to(self.bias.dtype), self.bias))
        return self.base


def linear_geometry(base: nn.Module) -> Geometry:
    """Return the shapes of the low-rank adaptor of a linear layer or of GPT-2's Conv1D, at rank 1.

    The factors are matrices, ``(1, d_in)`` and ``(d_out, 1)``. Conv1D stores its weight as ``(d_in, d_out)``.
    """
    shape = tuple(base.get_parameter("weight").shape)
    transposed = not isinstance(base, nn.Linear)
    d_out, d_in = reversed(shape) if transposed else shape
    return Geometry(kind="linear", d_in=d_in, d_out=d_out, transposed=transposed)


class AdaptedLinear(LowRankLayer):
    """A linear layer with LoRA adaptors: ``W x + bias + alpha * sum_c pi_c (B_c A_c x + bias_c)``.

    Shapes: ``a`` is (clusters, rank, d_in), ``b`` (clusters, d_out, rank).
    """

    def low_rank(self, x: Float[Tensor, "*batch d_in"], shares: Float[Tensor, " clusters"]) -> Tensor:
        """Return ``sum_c shares_c B_c A_c x`` with two products; the shares scale the columns in between.

        Args:
            x: Input of the layer.
            shares: Mixture weight of each cluster's adaptor, times alpha.
        """
        assert self.a is not None
        assert self.b is not None
        z = F.linear(x, self.a.flatten(0, 1)).unflatten(-1, self.a.shape[:2])  # (*batch, clusters, rank)
        z = z * shares.to(z.dtype).unsqueeze(-1)
        outer = self.b.transpose(0, 1).flatten(1)  # (clusters, d_out, rank) -> (d_out, clusters * rank)
        return F.linear(z.flatten(-2), outer)

    def spread(self, bias: Float[Tensor, " d_out"]) -> Tensor:
        """Return the bias unchanged: outputs are the last axis."""
        return bias


Conv = nn.Conv1d | nn.Conv2d


class AdaptedConv(LowRankLayer):
    """A convolution with low-rank adaptors.

    Shapes: ``a`` is (clusters, groups * width, d_in / groups, *inner kernel), ``b`` (clusters, d_out, width, *outer
    kernel); see :class:`Geometry`. Each group of channels has a low-rank change of its own.
    """

    def low_rank(self, x: Float[Tensor, "*inputs"], shares: Float[Tensor, " clusters"]) -> Tensor:
        """Return ``sum_c shares_c U_c V_c x`` with two convolutions, for all clusters at once.

        V_c reads the input and U_c writes the output. The kernel of U holds the shares as factors. Each kernel
        dimension belongs to V or to U, and only there the base's stride, padding and dilation apply.

        Args:
            x: Input of the layer.
            shares: Mixture weight of each cluster's adaptor, times alpha.
        """
        inner, outer = self._kernels(shares)
        geometry = self.geometry
        assert geometry is not None
        base, inner_dims = cast(Conv, self.base), geometry.inside
        outer_dims = tuple(not is_inner for is_inner in inner_dims)
        z = convolve(base, x, inner, inner_dims)
        return convolve(base, z, outer, outer_dims)

    def _kernels(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return inner and outer kernel of two convolutions that compute the adaptors of all clusters at once.

        The channels between the two convolutions are ordered by group, cluster and rank. The outer kernel has each
        cluster's share as a factor.

        Args:
            shares: Mixture weight of each cluster's adaptor, times alpha.
        """
        geometry = self.geometry
        assert geometry is not None
        assert self.a is not None
        assert self.b is not None
        # (groups, clusters, width, columns) -> (groups * clusters * width, d_in of a group, *inner_kernel)
        inner = geometry.inner_matrix(self.a).transpose(0, 1)
        inner = inner.reshape(-1, geometry.d_in // geometry.groups, *geometry.inner_kernel)
        # (clusters, groups, rows, width) -> (groups, rows, clusters * width); rows are channels and kernel positions
        outer = geometry.outer_matrix(self.b) * shares.to(self.b.dtype).view(-1, 1, 1, 1)
        outer = outer.permute(1, 2, 0, 3).flatten(2)
        # -> (d_out, kernel positions, clusters * width) -> (d_out, clusters * width, *outer_kernel)
        outer = outer.reshape(geometry.d_out, -1, outer.shape[-1]).mT
        return inner, outer.reshape(geometry.d_out, -1, *geometry.outer_kernel)

    def spread(self, bias: Float[Tensor, " d_out"]) -> Tensor:
        """Append an axis of size 1 for each dimension of the image."""
        return bias.view(-1, *(1 for _ in cast(Conv, self.base).kernel_size))


def convolve(base: Conv, x: Tensor, weight: Tensor, inside: tuple[bool, ...]) -> Tensor:
    """Convolve with the base's stride, padding and dilation in some dimensions only.

    A low-rank adaptor is two convolutions, each with the base's settings in its own kernel dimensions.

    Args:
        base: The layer that has stride, padding, dilation and groups.
        x: The input.
        weight: The kernel.
        inside: For each dimension whether the base's settings apply; otherwise stride 1, no padding and no dilation.
    """
    padding: Any = base.padding
    if base.padding_mode != "zeros":
        x, padding = F.pad(x, _padding_amounts(base, inside), mode=base.padding_mode), 0
    elif not isinstance(padding, str):  # "same" and "valid" do not pad where the kernel is 1
        padding = _select(padding, inside, 0)
    function = F.conv1d if isinstance(base, nn.Conv1d) else F.conv2d
    stride, dilation = _select(base.stride, inside, 1), _select(base.dilation, inside, 1)
    return function(x, weight, None, stride, padding, dilation, base.groups)


def _select(values: Any, inside: tuple[bool, ...], other: int) -> tuple[int, ...]:
    """Return the values of the dimensions marked in ``inside``, and ``other`` for the rest."""
    return tuple(value if selected else other for value, selected in zip(values, inside, strict=True))


def _padding_amounts(base: Conv, inside: tuple[bool, ...]) -> list[int]:
    """Return the padding for ``F.pad``: before and after each dimension, last dimension first.

    Args:
        base: The layer that has the padding.
        inside: For each kernel dimension whether it is padded; the others get 0.
    """
    amounts = base._reversed_padding_repeated_twice  # two per dimension, so item i is of dimension -1 - i // 2
    return [amount if inside[-1 - i // 2] else 0 for i, amount in enumerate(amounts)]


Gram = Float[Tensor, "... groups width width"]
"""Products of a factor's matrix with its transpose, one per group."""


def precondition(
    pairs: Pairs, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor], eps: float = 1e-5
) -> dict[str, Tensor]:
    """Return gradients of low-rank factors, each preconditioned by the other factor of its adaptor (FLoRAL eq. 36).

    With inner factor A, outer factor B and their gradients G_A and G_B::

        linear        G_A <- (B^T B + eps)^-1 G_A            G_B <- G_B (A A^T + eps)^-1
        convolution   G_A <- G_A / (||B^T B||_F + eps)       G_B <- G_B / (||A A^T||_F + eps)

    Cost: for a linear two solves of rank x rank per adaptor.

    Args:
        pairs: The adaptors.
        tensors: The factors' values at which the gradients were taken. A user axis before the cluster axis is allowed.
        gradients: Gradients by name. Tensors that are no factors are returned unchanged; factors may be missing.
        eps: Damping of the Gram matrices.
    """
    preconditioned = dict(gradients)
    for pair in pairs.factors:
        inner, outer = tensors[pair.inner], tensors[pair.outer]
        if pair.inner in gradients:
            preconditioned[pair.inner] = _precondition_inner(pair, outer, gradients[pair.inner], eps)
        if pair.outer in gradients:
            preconditioned[pair.outer] = _precondition_outer(pair, inner, gradients[pair.outer], eps)
    return preconditioned


def _precondition_inner(pair: Pair, outer: Tensor, gradient: Tensor, eps: float) -> Tensor:
    """Return the gradient G of an inner factor, preconditioned by the outer factor B (FLoRAL, eq. 36).

    For a linear ``(B^T B + eps)^-1 G``, for a convolution ``G / (||B^T B||_F + eps)``.

    Args:
        pair: The adaptor.
        outer: Its outer factor B.
        gradient: Gradient G of its inner factor.
        eps: Damping.
    """
    geometry = pair.geometry
    b = _at_least_float32(geometry.outer_matrix(outer))
    g = _at_least_float32(geometry.inner_matrix(gradient))
    gram = b.mT @ b
    if geometry.kind == "linear":
        preconditioned = _solve(gram, g, eps)
    else:
        norm = _frobenius_norm(gram)
        preconditioned = g / (norm + eps)
    return geometry.inner_from_matrix(preconditioned).to(gradient.dtype)


def _precondition_outer(pair: Pair, inner: Tensor, gradient: Tensor, eps: float) -> Tensor:
    """Return the gradient G of an outer factor, preconditioned by the inner factor A (FLoRAL, eq. 36).

    For a linear ``G (A A^T + eps)^-1``, for a convolution ``G / (||A A^T||_F + eps)``.

    Args:
        pair: The adaptor.
        inner: Its inner factor A.
        gradient: Gradient G of its outer factor.
        eps: Damping.
    """
    geometry = pair.geometry
    a = _at_least_float32(geometry.inner_matrix(inner))
    g = _at_least_float32(geometry.outer_matrix(gradient))
    gram = a @ a.mT
    if geometry.kind == "linear":
        preconditioned = _solve(gram, g.mT, eps).mT  # gram is symmetric
    else:
        norm = _frobenius_norm(gram)
        preconditioned = g / (norm + eps)
    return geometry.outer_from_matrix(preconditioned).to(gradient.dtype)


def _at_least_float32(matrix: Tensor) -> Tensor:
    """Return at least float32: PyTorch's solvers do not support less."""
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _solve(gram: Gram, right: Float[Tensor, "... groups width n"], eps: float) -> Float[Tensor, "... groups width n"]:
    """Return ``(gram + eps)^-1 right``; not finite, without an error, where the sum is singular in floating point."""
    damped = gram + eps * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    solution, _ = torch.linalg.solve_ex(damped, right)
    return solution


def _frobenius_norm(gram: Gram) -> Float[Tensor, "... 1 1 1"]:
    """Return the Frobenius norm of the block-diagonal matrix of all groups."""
    return torch.linalg.vector_norm(gram, dim=(-3, -2, -1), keepdim=True)


@torch.no_grad()
def centre(pairs: Pairs, tensors: Mapping[str, Tensor], shares: Float[Tensor, " clusters"]) -> dict[str, Tensor]:
    """Move the mean of the clusters' adaptors into the base, so that adaptors hold differences only (FLoRAL eq. 37).

    With the mean E_c over clusters c, weighted by p(c), and the low-rank change ``B_c A_c`` of cluster c::

        W        <- W + alpha E_c[B_c A_c]
        B_c A_c  <- B_c A_c - E_c[B_c A_c]    truncated to the rank of the adaptor by an SVD
        bias     <- bias + alpha E_c[bias_c], bias_c <- bias_c - E_c[bias_c]    also gains and shifts of norms

    Args:
        pairs: The adaptors.
        tensors: Base weights, biases and adaptors by name. A user axis before the cluster axis is allowed if the base's
            tensors have it too.
        shares: Weight p(c) of each cluster in the mean; the weights sum to 1.

    Returns:
        New tensors by name; those that ``pairs`` does not name are unchanged.
    """
    centred = dict(tensors)
    for pair in pairs.factors:
        mean, centred[pair.inner], centred[pair.outer] = _centre_factors(
            pair.geometry, tensors[pair.inner], tensors[pair.outer], shares
        )
        centred[pair.weight] = tensors[pair.weight] + pair.alpha * mean
    for offset in pairs.offsets:  # adaptors (..., clusters, *shape of the base's tensor), which has `dims` axes
        cluster_axis = -offset.dims - 1
        adaptors = tensors[offset.adaptor]
        weights = shares.to(adaptors).view(-1, *(1 for _ in range(offset.dims)))  # (clusters, 1, ...)
        mean = (adaptors * weights).sum(cluster_axis, keepdim=True)
        centred[offset.adaptor] = adaptors - mean
        centred[offset.base] = tensors[offset.base] + offset.alpha * mean.squeeze(cluster_axis)
    return centred


def _centre_factors(
    geometry: Geometry, inner: Tensor, outer: Tensor, shares: Float[Tensor, " clusters"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the clusters' low-rank changes ``B_c A_c`` into their mean and the differences from the mean.

    Each difference is factorised again, truncated to the factors' width (the rank) by an SVD. No difference is computed
    at full size: with the QR decompositions ``[B_1 .. B_C] = Q_B R_B`` and ``[A_1^T .. A_C^T] = Q_A R_A`` a difference
    is ``Q_B (R_B D_c R_A^T) Q_A^T``. The diagonal matrix D_c has ``[k = c] - p(k)`` at the columns of
    cluster k (:func:`_deviations`). So the SVD is that of a square matrix
    with at most C * width rows.

    Args:
        geometry: Shapes of the factors.
        inner: Inner factors A_c, with the cluster axis before those of :attr:`Geometry.inner_shape`.
        outer: Outer factors B_c, with the cluster axis before those of :attr:`Geometry.outer_shape`.
        shares: Weight p(c) of each cluster in the mean.

    Returns:
        The mean in the base weight's shape, and the inner and outer factors of the differences.
    """
    dtype = torch.promote_types(inner.dtype, torch.float32)
    inner_matrices = geometry.inner_matrix(inner.to(dtype))  # (..., clusters, groups, width, columns)
    outer_matrices = geometry.outer_matrix(outer.to(dtype))  # (..., clusters, groups, rows, width)
    # The factors of all clusters side by side: A is (..., groups, clusters * width, columns), B (..., groups, rows,
    # clusters * width).
    all_inner = inner_matrices.movedim(-4, -3).flatten(-3, -2)
    all_outer = outer_matrices.movedim(-4, -2).flatten(-2)
    shares_by_column = shares.to(inner_matrices).repeat_interleave(geometry.width)
    mean = geometry.weight_from_matrix((all_outer * shares_by_column) @ all_inner).to(inner.dtype)

    left, left_core = torch.linalg.qr(all_outer)  # Q_B and R_B
    right, right_core = torch.linalg.qr(all_inner.mT)  # Q_A and R_A
    # R_B D_c R_A^T of each cluster c: (..., clusters, groups, m, n)
    core = (left_core.unsqueeze(-4) * _deviations(shares.to(left), geometry.width)) @ right_core.mT.unsqueeze(-4)
    u, values, v_t = _truncated_svd(core, geometry.width)
    # A singular value counts as zero if it is below the rounding error of products of the factors' size.
    scale = torch.linalg.matrix_norm(left_core) * torch.linalg.matrix_norm(right_core)  # (..., groups)
    is_zero = values <= 10 * torch.finfo(dtype).eps * scale[..., None, :, None]  # (..., clusters, groups, width)
    # Both factors get the square roots of the singular values, so that they have equal norms.
    root = values.sqrt().masked_fill(is_zero, 0)
    new_outer = left.unsqueeze(-4) @ (u * root.unsqueeze(-2))
    # With a singular value of zero both factors would be zero: a saddle point without gradients. There the inner factor
    # keeps its row. Rows were initialised differently in each cluster, so equal clusters can still diverge. The product
    # stays zero.
    new_inner = torch.where(is_zero.unsqueeze(-1), inner_matrices, (root.unsqueeze(-1) * v_t) @ right.mT.unsqueeze(-4))
    return (
        mean,
        geometry.inner_from_matrix(new_inner).to(inner.dtype),
        geometry.outer_from_matrix(new_outer).to(outer.dtype),
    )


def _deviations(shares: Float[Tensor, " clusters"], width: int) -> Float[Tensor, "clusters 1 1 columns"]:
    """Return the diagonals of matrices ``D_c`` with ``B D_c A = B_c A_c - sum_k p(k) B_k A_k`` for each cluster c.

    The columns of B are the outer factors B_k of all clusters k, the rows of A their inner factors A_k. The right side
    is the difference of a cluster's low-rank change from the mean, so the entries for cluster k are ``[k = c] - p(k)``.

    Args:
        shares: Weight p(k) of each cluster in the mean.
        width: Number of columns of a cluster in B.
    """
    deviations = torch.eye(len(shares)).to(shares) - shares
    return deviations.repeat_interleave(width, dim=-1)[:, None, None]


def _truncated_svd(
    core: Float[Tensor, "... m n"], width: int
) -> tuple[Float[Tensor, "... m width"], Float[Tensor, "... width"], Float[Tensor, "... width n"]]:
    """Return the ``width`` largest singular values with their left and right singular vectors.

    The results are padded with zeros if a matrix has fewer singular values.

    Args:
        core: Matrices.
        width: Number of singular values.

    Returns:
        Left vectors as columns, singular values, and right vectors as rows.
    """
    u, values, v = torch.linalg.svd(core, full_matrices=False)
    missing = max(0, width - values.shape[-1])
    u, values = F.pad(u[..., :width], (0, missing)), F.pad(values[..., :width], (0, missing))
    return u, values, F.pad(v[..., :width, :], (0, 0, 0, missing))
