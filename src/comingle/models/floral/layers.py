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
from collections.abc import Mapping
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
    """Shapes of a low-rank adaptor's inner factor (reads the input) and outer factor (writes the output).

    Leading axes of factors, such as users and clusters, are not part of the shapes.

    Args:
        kind: "linear" stores both factors as matrices, "conv" as convolution kernels.
        d_in: Input channels.
        d_out: Output channels.
        width: Size of the axis that both factors share, of each group; as a rule the rank.
        kernel: Kernel size of a convolution, such as (3, 3).
        in_inner: For each kernel dimension whether the inner factor holds it; otherwise the outer factor does.
        groups: Groups of a convolution.
        transposed: The base stores its weight as (d_in, d_out), like GPT-2's Conv1D.
    """

    kind: Literal["linear", "conv"]
    d_in: int
    d_out: int
    width: int = 1
    kernel: tuple[int, ...] = ()
    in_inner: tuple[bool, ...] = ()
    groups: int = 1
    transposed: bool = False

    @property
    def inner_kernel_size(self) -> tuple[int, ...]:
        """Kernel size of the inner factor.

        The two factors of a convolution's adaptor divide the kernel dimensions among them, such as (3, 1) and (1, 3)
        for a 3x3 kernel: a dimension has the base's size in one factor, and 1 in the other.
        """
        return tuple(size if in_inner else 1 for size, in_inner in zip(self.kernel, self.in_inner, strict=True))

    @property
    def outer_kernel_size(self) -> tuple[int, ...]:
        """Kernel size of the outer factor: the base's size where ``inner_kernel_size`` is 1, and 1 elsewhere."""
        return tuple(1 if in_inner else size for size, in_inner in zip(self.kernel, self.in_inner, strict=True))

    @property
    def rows(self) -> int:
        """Number of rows of the outer factor's matrix for one group of a grouped convolution (:meth:`outer_matrix`).

        There is a row for each pair of an output channel of the group and an entry of the outer factor's kernel.
        """
        return self.d_out // self.groups * math.prod(self.outer_kernel_size)

    @property
    def columns(self) -> int:
        """Number of columns of the inner factor's matrix for one group of a grouped convolution; its fan-in.

        There is a column for each pair of an input channel of the group and an entry of the inner factor's kernel.
        """
        return self.d_in // self.groups * math.prod(self.inner_kernel_size)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape in which the inner factor is stored as a parameter: of a weight with ``groups * width`` outputs."""
        if self.kind == "linear":
            return (self.groups * self.width, self.columns)
        return (self.groups * self.width, self.d_in // self.groups, *self.inner_kernel_size)

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """Shape in which the outer factor is stored as a parameter: of a weight with ``d_out`` outputs."""
        if self.kind == "linear":
            return (self.groups * self.rows, self.width)
        return (self.d_out, self.width, *self.outer_kernel_size)

    @property
    def size(self) -> int:
        """Number of parameters of one adaptor."""
        return math.prod(self.inner_shape) + math.prod(self.outer_shape)

    @property
    def base_size(self) -> int:
        """Number of entries of the base weight."""
        return self.d_out * self.d_in // self.groups * math.prod(self.kernel)

    def inner_matrix(self, inner: Clustered) -> Float[Tensor, "... groups width columns"]:
        """Reshape the inner factor to one matrix ``(width, columns)`` per group of a grouped convolution.

        ``outer_matrix @ inner_matrix`` is the adaptor's change of the base weight. A column is a pair of an input
        channel of the group and an entry of the inner factor's kernel; a linear has one group and ``d_in`` columns.
        """
        num_leading = inner.ndim - len(self.inner_shape)
        return inner.reshape(*inner.shape[:num_leading], self.groups, self.width, self.columns)

    def inner_from_matrix(self, matrix: Float[Tensor, "... groups width columns"]) -> Clustered:
        """Reshape matrices to the stored shape of the inner factor, the inverse of :meth:`inner_matrix`."""
        leading = matrix.shape[:-3]
        return matrix.reshape(*leading, *self.inner_shape)

    def outer_matrix(self, outer: Clustered) -> Float[Tensor, "... groups rows width"]:
        """Reshape the outer factor to one matrix ``(rows, width)`` per group of a grouped convolution.

        Its product with :meth:`inner_matrix` is the adaptor's change of the base weight. A row is a pair of an output
        channel of the group and an entry of the outer factor's kernel; a linear has one group and ``d_out`` rows.
        """
        num_leading = outer.ndim - len(self.outer_shape)
        leading = outer.shape[:num_leading]
        if self.kind == "conv":  # (d_out, width, *outer_kernel_size) -> (d_out, kernel positions, width)
            outer = outer.reshape(*leading, self.d_out, self.width, -1).transpose(-1, -2)
        return outer.reshape(*leading, self.groups, self.rows, self.width)

    def outer_from_matrix(self, matrix: Float[Tensor, "... groups rows width"]) -> Clustered:
        """Reshape matrices to the stored shape of the outer factor, the inverse of :meth:`outer_matrix`."""
        leading = matrix.shape[:-3]
        if self.kind == "conv":  # (d_out, kernel positions, width) -> (d_out, width, kernel positions)
            matrix = matrix.reshape(*leading, self.d_out, -1, self.width).transpose(-1, -2)
        return matrix.reshape(*leading, *self.outer_shape)

    def weight_from_matrix(self, matrix: Float[Tensor, "... groups rows columns"]) -> Clustered:
        """Reshape products ``outer_matrix @ inner_matrix`` to the shape of the base weight, to merge adaptors into it.

        A linear has the weight ``(d_out, d_in)``, a convolution ``(d_out, d_in / groups, *kernel)``.
        """
        leading = matrix.shape[:-3]
        d_in_of_group = self.d_in // self.groups
        split = matrix.reshape(*leading, self.d_out, *self.outer_kernel_size, d_in_of_group, *self.inner_kernel_size)
        # For a 2-d convolution with kernel axes 1 and 2:
        # (..., out, outer 1, outer 2, in, inner 1, inner 2) -> (..., out, in, outer 1, inner 1, outer 2, inner 2)
        out_axis, dims = len(leading), len(self.kernel)
        in_axis = out_axis + 1 + dims
        axes = [out_axis, in_axis]
        for dim in range(1, dims + 1):
            axes += [out_axis + dim, in_axis + dim]
        permuted = split.permute(*range(out_axis), *axes)
        # A kernel dimension has size 1 in one of the factors, so its two axes become one of the full size.
        weight = permuted.reshape(*leading, self.d_out, d_in_of_group, *self.kernel)
        return weight.mT if self.transposed else weight

    def with_rank(self, rank: int, form: str = "channel") -> Geometry:
        """Return the shapes for another rank, limited to the largest rank that the base weight can have.

        Args:
            rank: The new rank.
            form: How the two factors of a convolution divide its kernel, one of ``CONV_FORMS``. For "filter" the width
                is the rank times a group's output channels (FLoRAL, arXiv:2410.03497, eq. 39), for other forms the
                rank.
        """
        width_per_rank = self.d_out // self.groups if form == "filter" else 1
        largest_width = min(self.rows, self.columns)
        largest_rank = math.ceil(largest_width / width_per_rank)  # the smallest rank with at least this width
        return replace(self, width=width_per_rank * min(rank, largest_rank))


def conv_geometry(form: str, *, d_in: int, d_out: int, kernel: tuple[int, ...], groups: int) -> Geometry:
    """Return the shapes of the two factors of a convolution's low-rank adaptor at rank 1.

    If the form allows two ways to divide the kernel's dimensions among the factors, take the one with the fewest
    parameters (FLoRAL, arXiv:2410.03497, App. F.1).

    Args:
        form: One of ``CONV_FORMS`` except "none".
        d_in: Input channels.
        d_out: Output channels.
        kernel: Kernel size.
        groups: Groups of channels.
    """
    kind: Literal["linear", "conv"] = "linear" if form == "linear" else "conv"
    candidates = [
        Geometry(kind=kind, d_in=d_in, d_out=d_out, kernel=kernel, in_inner=in_inner, groups=groups)
        for in_inner in _possible_divisions(form, len(kernel))
    ]
    smallest = min(candidates, key=lambda geometry: geometry.size)
    return smallest.with_rank(1, form)  # for "filter" the width is larger than 1


def _possible_divisions(form: str, dims: int) -> list[tuple[bool, ...]]:
    """Return the ways to divide kernel dimensions among the inner and the outer factor.

    A way is a tuple that says for each dimension whether the inner factor has it, such as ``(True, False)``. The caller
    takes the way with the fewest parameters.

    Args:
        form: One of ``CONV_FORMS`` except "none": "in" and "out" give the whole kernel to the inner or the outer
            factor, "balanced-2d" and "filter" one dimension to each, "channel" and "linear" the whole kernel to either.
        dims: Number of kernel dimensions: 1 or 2.
    """
    all_in_inner, all_in_outer = (True,) * dims, (False,) * dims
    if form == "in":
        return [all_in_inner]
    if form == "out":
        return [all_in_outer]
    if form in ("balanced-2d", "filter") and dims == 2:
        return [(False, True), (True, False)]
    return [all_in_inner, all_in_outer]  # "channel", "linear" and all forms with a 1d kernel


class Mixture:
    """Holder of the mixture of the current forward pass, shared by all layers of a model."""

    value: Tensor | None = None

    def __deepcopy__(self, memo: Mapping[int, object]) -> Mixture:
        """Return an object without a mixture for a copied model: the mixture belongs to the original's current pass."""
        return Mixture()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Names of a low-rank adaptor's two factors, and of the base weight to which ``alpha * outer @ inner`` is added."""

    inner: str
    outer: str
    weight: str
    alpha: float
    geometry: Geometry


@dataclass(frozen=True, kw_only=True)
class Offset:
    """Names of an adaptor without factors (of a bias or norm), and of the base's tensor to which it is added.

    ``dims`` is the number of axes of the base's tensor. The adaptor has the cluster axis right before them.
    """

    adaptor: str
    base: str
    alpha: float
    dims: int


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Names of all adaptors of a layer or a model: low-rank ones (``factors``) and others (``offsets``)."""

    factors: tuple[Pair, ...] = ()
    offsets: tuple[Offset, ...] = ()


class AdaptedLayer(nn.Module, ABC):
    """A base layer with one set of adaptors for each cluster of users, which are added in a weighted mixture."""

    layer_index = 0
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
        """Return the factors by which the clusters' adaptors are added: alpha times this layer's mixture weights.

        alpha scales all adaptors, like the scale of LoRA; the mixture weights are those of the current forward pass.

        Args:
            like: Tensor whose dtype the result gets.

        Raises:
            RuntimeError: No forward pass of the model is under way.
        """
        mixture = self.mixture.value
        if mixture is None:
            raise RuntimeError("an adapted layer was called outside the model's forward; call it inside model.mixing()")
        return self.alpha * self.mixture_of_layer(mixture).to(like.dtype)

    def mixture_of_layer(self, mixture: Float[Tensor, "*layers clusters"]) -> Float[Tensor, " clusters"]:
        """Return the weights with which this layer mixes the adaptors of the clusters.

        Args:
            mixture: Weights of the clusters, the same for all adapted layers, or a row of weights for each layer.
        """
        is_shared = mixture.ndim == 1
        return mixture if is_shared else mixture[self.layer_index]

    @abstractmethod
    def initialisers(self) -> dict[str, Init]:
        """Return the initialiser of each of the layer's own parameters, by name."""

    @abstractmethod
    def pairs(self, prefix: str) -> Pairs:
        """Return the names of the adaptors and of the base's tensors that they change, each after ``prefix``."""

    @abstractmethod
    def merge_into_base(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add the mixed adaptors to the base's tensors in place, and return the base.

        Args:
            shares: Mixture weight of each cluster's adaptor, times alpha.
        """

    def offset(self, prefix: str, name: str) -> Offset:
        """Describe an adaptor that is added to a bias, or to gamma ("weight") or beta ("bias") of a norm.

        Args:
            prefix: Prefix of the names, such as "model.layers.0.".
            name: "bias" or "weight": name of the adaptor in this layer, and of the tensor in its base.
        """
        dims = tensor(self.base, name).ndim  # the axes after the adaptor's cluster axis
        return Offset(adaptor=f"{prefix}{name}", base=f"{prefix}base.{name}", alpha=self.alpha, dims=dims)

    def reset(self, generator: torch.Generator | None) -> None:
        """Draw new initial values of the adaptors; the base layer keeps its values.

        Args:
            generator: Source of the random numbers; None for torch's global generator.
        """
        generator = generator or torch.default_generator
        with torch.no_grad():
            for name, draw in self.initialisers().items():
                parameter = self.get_parameter(name)
                parameter.copy_(draw(tuple(parameter.shape), generator))

    def clustered(self, shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
        """Return a parameter of zeros ``(clusters, *shape)``, in the dtype and on the device of ``like``."""
        return nn.Parameter(torch.zeros(self.num_clusters, *shape, dtype=like.dtype, device=like.device))

    def extra_repr(self) -> str:
        """Return the shapes of the adaptors for ``print(model)``."""
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters(recurse=False)}
        return ", ".join(f"{name}={shape}" for name, shape in shapes.items())


def tensor(module: nn.Module, name: str) -> Tensor:
    """Return a module's parameter or buffer by name.

    Unlike ``nn.Module.get_parameter``, it works inside ``torch.func.functional_call``, where parameters are plain
    tensors.
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
    """A layer with low-rank adaptors of its weight (factors ``a`` and ``b``), adaptors of its ``bias``, or both.

    Shapes: the inner factor ``a`` is ``(clusters, *inner_shape)``, the outer factor ``b`` ``(clusters, *outer_shape)``,
    ``bias`` ``(clusters, d_out)``. Without a ``geometry`` ``a`` and ``b`` are None.
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
        self.a = self.b = self.bias = None
        if geometry is not None:
            weight = base.get_parameter("weight")
            self.a = self.clustered(geometry.inner_shape, weight)
            self.b = self.clustered(geometry.outer_shape, weight)
        base_bias = base._parameters.get("bias")
        if bias and base_bias is not None:
            self.bias = self.clustered(tuple(base_bias.shape), base_bias)

    @abstractmethod
    def low_rank(self, x: Tensor, shares: Float[Tensor, " clusters"]) -> Tensor:
        """Return the low-rank part of the layer's output: ``sum_c shares_c b_c a_c x`` over clusters c.

        Args:
            x: Input of the layer.
            shares: Weight of each cluster's factors ``b_c`` and ``a_c``.
        """

    @abstractmethod
    def broadcastable(self, bias: Float[Tensor, " d_out"]) -> Tensor:
        """Reshape a bias so that it can be added to the layer's output."""

    def forward(self, x: Float[Tensor, "*inputs"]) -> Float[Tensor, "*outputs"]:
        """Return ``base(x) + sum_c shares_c (b_c a_c x + bias_c)``; shares are alpha times the mixture weights."""
        y = self.base(x)
        shares = self.shares(y)
        if self.geometry is not None:
            y = y + self.low_rank(x, shares)
        if self.bias is not None:
            mixed_bias = mix(shares.to(self.bias.dtype), self.bias)
            y = y + self.broadcastable(mixed_bias).to(y.dtype)
        return y

    def initialisers(self) -> dict[str, Init]:
        """Return initialisers by name: uniform for ``a``, zero for ``b`` and ``bias``."""
        by_name: dict[str, Init] = {}
        if self.geometry is not None:
            by_name["a"] = uniform(self.geometry.columns)
            by_name["b"] = init_zero
        if self.bias is not None:
            by_name["bias"] = init_zero
        return by_name

    def pairs(self, prefix: str) -> Pairs:
        """Return which tensors of this layer are adaptors, and to which tensor of the base layer each is added.

        A layer has a low-rank adaptor of the weight (two factors, "a" and "b"), an adaptor of the bias, or both.

        Args:
            prefix: Prefix of the tensors' names, such as "model.layers.0.".
        """
        factors: tuple[Pair, ...] = ()
        if self.geometry is not None:
            pair = Pair(
                inner=f"{prefix}a",
                outer=f"{prefix}b",
                weight=f"{prefix}base.weight",
                alpha=self.alpha,
                geometry=self.geometry,
            )
            factors = (pair,)
        offsets: tuple[Offset, ...] = ()
        if self.bias is not None:
            offsets = (self.offset(prefix, "bias"),)
        return Pairs(factors=factors, offsets=offsets)

    def merge_into_base(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add ``sum_c shares_c b_c a_c`` to the base's weight and ``sum_c shares_c bias_c`` to its bias, in place.

        Args:
            shares: Mixture weight of each cluster's adaptor, times alpha.

        Returns:
            The base.
        """
        if self.geometry is not None and self.a is not None and self.b is not None:
            inner = self.geometry.inner_matrix(self.a)  # (clusters, groups, width, columns)
            outer = self.geometry.outer_matrix(self.b)  # (clusters, groups, rows, width)
            weighted_outer = outer * shares.to(self.b.dtype).view(-1, 1, 1, 1)
            change = (weighted_outer @ inner).sum(0)  # over clusters: (groups, rows, columns)
            weight = self.base.get_parameter("weight")
            weight.data.add_(self.geometry.weight_from_matrix(change))
        if self.bias is not None:
            mixed_bias = mix(shares.to(self.bias.dtype), self.bias)
            self.base.get_parameter("bias").data.add_(mixed_bias)
        return self.base


def linear_geometry(base: nn.Module) -> Geometry:
    """Return the shapes of the low-rank adaptor of a linear layer or of GPT-2's Conv1D, at rank 1."""
    is_conv1d = not isinstance(base, nn.Linear)
    if is_conv1d:
        d_in, d_out = base.get_parameter("weight").shape
    else:
        d_out, d_in = base.get_parameter("weight").shape
    return Geometry(kind="linear", d_in=d_in, d_out=d_out, transposed=is_conv1d)


class AdaptedLinear(LowRankLayer):
    """A linear layer with LoRA factors ``a`` (clusters, rank, d_in) and ``b`` (clusters, d_out, rank)."""

    def low_rank(self, x: Float[Tensor, "*batch d_in"], shares: Float[Tensor, " clusters"]) -> Tensor:
        """Return ``sum_c b_c (shares_c a_c x)`` with two matrix products for all clusters.

        Args:
            x: Input of the layer.
            shares: Mixture weight of each cluster's adaptor, times alpha.
        """
        assert self.a is not None
        assert self.b is not None
        clusters, rank = self.a.shape[:2]
        all_a = self.a.flatten(0, 1)  # (clusters * rank, d_in)
        z = F.linear(x, all_a).unflatten(-1, (clusters, rank))  # (*batch, clusters, rank)
        z = z * shares.to(z.dtype).unsqueeze(-1)
        all_b = self.b.transpose(0, 1).flatten(1)  # (clusters, d_out, rank) -> (d_out, clusters * rank)
        return F.linear(z.flatten(-2), all_b)

    def broadcastable(self, bias: Float[Tensor, " d_out"]) -> Tensor:
        """Return the bias unchanged, as outputs have ``d_out`` as their last axis."""
        return bias


Conv = nn.Conv1d | nn.Conv2d


class AdaptedConv(LowRankLayer):
    """A convolution with low-rank adaptors, whose factors ``a`` and ``b`` are convolution kernels.

    Shapes: ``a`` is (clusters, groups * width, d_in / groups, *inner_kernel_size), ``b`` (clusters, d_out, width,
    *outer_kernel_size); see :class:`Geometry`.
    """

    def low_rank(self, x: Float[Tensor, "*inputs"], shares: Float[Tensor, " clusters"]) -> Tensor:
        """Return the sum of all clusters' adaptors with two convolutions, first by ``a`` and then by ``b``.

        Each kernel dimension belongs to ``a`` or to ``b``. Each convolution has the base's stride, padding and dilation
        in the dimensions of its own factor only, so that together they apply once.

        Args:
            x: Input of the layer.
            shares: Mixture weight of each cluster's adaptor, times alpha.
        """
        geometry = self.geometry
        assert geometry is not None
        base = cast(Conv, self.base)
        inner_kernel, outer_kernel = self._kernels(shares)
        in_outer = tuple(not in_inner for in_inner in geometry.in_inner)
        z = convolve(base, x, inner_kernel, geometry.in_inner)
        return convolve(base, z, outer_kernel, in_outer)

    def _kernels(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return an inner and an outer kernel with the factors of all clusters side by side.

        The channels between the two convolutions are ordered by group, cluster and width. The outer kernel is
        multiplied by the shares.

        Args:
            shares: Mixture weight of each cluster's adaptor, times alpha.
        """
        geometry = self.geometry
        assert geometry is not None
        assert self.a is not None
        assert self.b is not None
        inner = geometry.inner_matrix(self.a).transpose(0, 1)  # (groups, clusters, width, columns)
        # (groups * clusters * width, d_in of a group, *inner_kernel_size)
        inner_kernel = inner.reshape(-1, geometry.d_in // geometry.groups, *geometry.inner_kernel_size)
        # (clusters, groups, rows, width); rows are a group's output channels times kernel positions
        outer = geometry.outer_matrix(self.b) * shares.to(self.b.dtype).view(-1, 1, 1, 1)
        side_by_side = outer.permute(1, 2, 0, 3).flatten(2)  # (groups, rows, clusters * width)
        all_widths = side_by_side.shape[-1]
        by_channel = side_by_side.reshape(geometry.d_out, -1, all_widths)  # (d_out, kernel positions, all widths)
        outer_kernel = by_channel.mT.reshape(geometry.d_out, -1, *geometry.outer_kernel_size)
        return inner_kernel, outer_kernel

    def broadcastable(self, bias: Float[Tensor, " d_out"]) -> Tensor:
        """Reshape a bias to ``(d_out, 1)`` or ``(d_out, 1, 1)``, so that it is added at all positions of the output."""
        dims = len(cast(Conv, self.base).kernel_size)
        return bias.view(-1, *[1] * dims)


def convolve(base: Conv, x: Tensor, weight: Tensor, applies: tuple[bool, ...]) -> Tensor:
    """Convolve with one factor of an adaptor, without bias.

    Each kernel dimension belongs to one factor. Only that factor has the base's stride, padding and dilation there.

    Args:
        base: The adapted layer, which has stride, padding, dilation and groups.
        x: The input.
        weight: The factor's kernel.
        applies: For each dimension whether the base's stride, padding and dilation apply, such as (True, False). The
            other dimensions have stride 1, no padding and no dilation.
    """
    padding: Any = base.padding
    if base.padding_mode != "zeros":
        x = F.pad(x, _padding_amounts(base, applies), mode=base.padding_mode)
        padding = 0
    elif not isinstance(padding, str):  # "same" and "valid" do not pad where the kernel is 1
        padding = _select(padding, applies, other=0)
    stride = _select(base.stride, applies, other=1)
    dilation = _select(base.dilation, applies, other=1)
    function = F.conv1d if isinstance(base, nn.Conv1d) else F.conv2d
    return function(x, weight, None, stride, padding, dilation, base.groups)


def _select(values: Any, applies: tuple[bool, ...], *, other: int) -> tuple[int, ...]:
    """Return the value of each dimension if it applies there, else ``other``.

    For example, values (2, 3) that apply as (True, False) with ``other=1`` become (2, 1).
    """
    return tuple(value if is_applied else other for value, is_applied in zip(values, applies, strict=True))


def _padding_amounts(base: Conv, applies: tuple[bool, ...]) -> list[int]:
    """Return the padding for ``F.pad``: before and after each dimension, last dimension first.

    An adaptor has two convolutions, each with some of the kernel dimensions, and pads only in its own dimensions.

    Args:
        base: The convolution that is adapted, whose padding is used.
        applies: For each spatial dimension whether this convolution of the adaptor pads it; the others get 0.
    """
    both_sides = list(base._reversed_padding_repeated_twice)  # such as [1, 1, 2, 2]: last dimension first
    amounts = []
    for is_padded, before, after in zip(reversed(applies), both_sides[::2], both_sides[1::2], strict=True):
        amounts += [before, after] if is_padded else [0, 0]
    return amounts


Gram = Float[Tensor, "... groups width width"]
"""Products of a factor's matrix with its transpose, one per group."""


def precondition(
    pairs: Pairs, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor], eps: float = 1e-5
) -> dict[str, Tensor]:
    """Return gradients of low-rank factors, each preconditioned by the other factor of its adaptor (FLoRAL eq. 36).

    With inner factor A, outer factor B and their gradients G_A and G_B::

        linear        G_A <- (B^T B + eps)^-1 G_A            G_B <- G_B (A A^T + eps)^-1
        convolution   G_A <- G_A / (||B^T B||_F + eps)       G_B <- G_B / (||A A^T||_F + eps)

    Args:
        pairs: Names of the tensors of each low-rank adaptor.
        tensors: Factors by name, at which the gradients were taken. A user axis before the cluster axis is allowed.
        gradients: Gradients by name. Those of tensors that are not factors are returned unchanged.
        eps: Damping of the Gram matrices ``B^T B`` and ``A A^T``.
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
        pair: Names of the tensors of the low-rank adaptor.
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
        pair: Names of the tensors of the low-rank adaptor.
        inner: Its inner factor A.
        gradient: Gradient G of its outer factor.
        eps: Damping.
    """
    geometry = pair.geometry
    a = _at_least_float32(geometry.inner_matrix(inner))
    g = _at_least_float32(geometry.outer_matrix(gradient))
    gram = a @ a.mT
    if geometry.kind == "linear":
        preconditioned = _solve(gram, g.mT, eps).mT  # G (gram + eps)^-1, as gram is symmetric
    else:
        norm = _frobenius_norm(gram)
        preconditioned = g / (norm + eps)
    return geometry.outer_from_matrix(preconditioned).to(gradient.dtype)


def _at_least_float32(matrix: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, as PyTorch's solvers do not support them."""
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _solve(gram: Gram, right: Float[Tensor, "... groups width n"], eps: float) -> Float[Tensor, "... groups width n"]:
    """Return ``(gram + eps)^-1 right``; not finite, without an error, where the sum is singular in floating point."""
    damped = gram + eps * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    solution, _ = torch.linalg.solve_ex(damped, right)
    return solution


def _frobenius_norm(gram: Gram) -> Float[Tensor, "... 1 1 1"]:
    """Return the Frobenius norm of a Gram matrix, by which the gradients of a convolution's adaptor are divided.

    It is over all groups of channels, as their matrices are the blocks of one block-diagonal matrix.
    The axes of groups and matrices stay, with size 1.
    """
    return torch.linalg.vector_norm(gram, dim=(-3, -2, -1), keepdim=True)


@torch.no_grad()
def centre(pairs: Pairs, tensors: Mapping[str, Tensor], shares: Float[Tensor, " clusters"]) -> dict[str, Tensor]:
    """Move the mean of the clusters' adaptors into the base, so that adaptors hold differences only (FLoRAL eq. 37).

    With the mean E_c over clusters c, weighted by p(c), and the low-rank change ``B_c A_c`` of cluster c::

        W        <- W + alpha E_c[B_c A_c]
        B_c A_c  <- B_c A_c - E_c[B_c A_c]    truncated to the rank of the adaptor by an SVD
        bias     <- bias + alpha E_c[bias_c], bias_c <- bias_c - E_c[bias_c]    also gains and shifts of norms

    Args:
        pairs: Names of the tensors of each low-rank adaptor.
        tensors: Base weights, biases and adaptors by name. A user axis before the cluster axis is allowed if the base's
            tensors have it too.
        shares: Weight p(c) of each cluster in the mean; the weights sum to 1.

    Returns:
        New tensors by name; those that ``pairs`` does not name are unchanged.
    """
    centred = dict(tensors)
    for pair in pairs.factors:
        inner, outer = tensors[pair.inner], tensors[pair.outer]
        mean, new_inner, new_outer = _centre_factors(pair.geometry, inner, outer, shares)
        centred[pair.inner] = new_inner
        centred[pair.outer] = new_outer
        centred[pair.weight] = tensors[pair.weight] + pair.alpha * mean
    for offset in pairs.offsets:
        adaptors = tensors[offset.adaptor]  # (..., clusters, *shape of the base's tensor with `dims` axes)
        cluster_axis = -1 - offset.dims
        weights = shares.to(adaptors).view(-1, *[1] * offset.dims)
        mean = (adaptors * weights).sum(cluster_axis, keepdim=True)
        centred[offset.adaptor] = adaptors - mean
        centred[offset.base] = tensors[offset.base] + offset.alpha * mean.squeeze(cluster_axis)
    return centred


def _centre_factors(
    geometry: Geometry, inner: Tensor, outer: Tensor, shares: Float[Tensor, " clusters"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the clusters' low-rank changes ``B_c A_c`` into their mean and factors of the differences from the mean.

    :func:`centre` adds the mean to the base weight, and the factors become the new adaptors.

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
    # The factors of all clusters side by side.
    all_inner = inner_matrices.movedim(-4, -3).flatten(-3, -2)  # (..., groups, clusters * width, columns)
    all_outer = outer_matrices.movedim(-4, -2).flatten(-2)  # (..., groups, rows, clusters * width)
    shares_by_column = shares.to(inner_matrices).repeat_interleave(geometry.width)
    mean = geometry.weight_from_matrix((all_outer * shares_by_column) @ all_inner).to(inner.dtype)
    new_inner, new_outer, is_zero = _factors_of_differences(all_inner, all_outer, shares, geometry.width)
    # Where the new column of the outer factor is zero, the row of the inner factor keeps its old values: if both were
    # zero, neither would get a gradient.
    new_inner = torch.where(is_zero.unsqueeze(-1), inner_matrices, new_inner)
    return (
        mean,
        geometry.inner_from_matrix(new_inner).to(inner.dtype),
        geometry.outer_from_matrix(new_outer).to(outer.dtype),
    )


def _factors_of_differences(
    all_inner: Float[Tensor, "... groups all_widths columns"],
    all_outer: Float[Tensor, "... groups rows all_widths"],
    shares: Float[Tensor, " clusters"],
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return low-rank factors of the difference of each cluster's change from the mean, ``B_c A_c - E_c[B_c A_c]``.

    E_c is the mean over clusters c, weighted by p(c). ``all_widths`` is the factors' width times the number of
    clusters.

    With the QR decompositions ``[B_1 .. B_C] = Q_B R_B`` and ``[A_1^T .. A_C^T] = Q_A R_A`` the difference of cluster c
    is ``Q_B (R_B D_c R_A^T) Q_A^T`` with a diagonal matrix D_c (:func:`_deviations`). So the SVD that truncates it to
    the factors' width is that of the small matrix ``R_B D_c R_A^T`` (``core``).

    Args:
        all_inner: Inner factors A_c of all clusters, stacked as rows.
        all_outer: Outer factors B_c of all clusters, side by side.
        shares: Weight p(c) of each cluster in the mean.
        width: Width of the factors.

    Returns:
        The inner factors ``(..., clusters, groups, width, columns)``, the outer factors ``(..., clusters, groups, rows,
        width)``, and which singular values count as zero ``(..., clusters, groups, width)``.
    """
    q_b, r_b = torch.linalg.qr(all_outer)
    q_a, r_a = torch.linalg.qr(all_inner.mT)
    d = _deviations(shares.to(q_b), width)
    core = (r_b.unsqueeze(-4) * d) @ r_a.mT.unsqueeze(-4)  # R_B D_c R_A^T: (..., clusters, groups, m, n)
    u, values, v_t = _truncated_svd(core, width)
    # A singular value counts as zero if it is below the rounding error of the product of the factors.
    product_norm = torch.linalg.matrix_norm(r_b) * torch.linalg.matrix_norm(r_a)  # (..., groups)
    rounding_error = 10 * torch.finfo(q_b.dtype).eps * product_norm
    is_zero = values <= rounding_error[..., None, :, None]  # (..., clusters, groups, width)
    # Both factors get the square roots of the singular values, so that they have equal norms.
    root = values.sqrt().masked_fill(is_zero, 0)
    outer = q_b.unsqueeze(-4) @ (u * root.unsqueeze(-2))
    inner = (root.unsqueeze(-1) * v_t) @ q_a.mT.unsqueeze(-4)
    return inner, outer, is_zero


def _deviations(shares: Float[Tensor, " clusters"], width: int) -> Float[Tensor, "clusters 1 1 columns"]:
    """Return the diagonal of the matrix D_c of each cluster c, with ``B D_c A = B_c A_c - sum_k p(k) B_k A_k``.

    ``B = [B_1 .. B_C]`` has ``width`` columns of each cluster k, and ``A`` has the A_k as rows. The diagonal has
    ``1 - p(k)`` at the columns of the cluster k = c, and ``-p(k)`` at those of other clusters. For two clusters with
    p = 0.5 and width 1 the diagonals are (0.5, -0.5) and (-0.5, 0.5).

    Args:
        shares: Weight p(k) of each cluster in the mean.
        width: Number of columns of each B_k.
    """
    deviations = torch.eye(len(shares)).to(shares) - shares
    return deviations.repeat_interleave(width, dim=-1)[:, None, None]


def _truncated_svd(
    core: Float[Tensor, "... m n"], width: int
) -> tuple[Float[Tensor, "... m width"], Float[Tensor, "... width"], Float[Tensor, "... width n"]]:
    """Return the ``width`` largest singular values with their left and right singular vectors.

    The results are padded with zeros if a matrix has fewer singular values.

    Args:
        core: Matrices to decompose.
        width: Number of singular values to return.

    Returns:
        Left vectors as columns, singular values, and right vectors as rows.
    """
    u, values, v_t = torch.linalg.svd(core, full_matrices=False)
    num_missing = max(0, width - values.shape[-1])
    u = F.pad(u[..., :width], (0, num_missing))
    values = F.pad(values[..., :width], (0, num_missing))
    v_t = F.pad(v_t[..., :width, :], (0, 0, 0, num_missing))
    return u, values, v_t
