"""What every adapted layer has in common: the original, the clusters' adaptors, and the mixture they read.

The output is ``base(x) + alpha * sum_c pi_c adaptor_c(x)`` (FLoRAL eq. 1 and (FML)). Adaptors are stacked parameters
with the clusters on the leading axis. The mixture is computed once per forward pass of the whole model and read by all
layers from one :class:`Mixture`; the router is registered in one place only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.adapters.clustered.geometry import Geometry
from comingle.utils.trees import Init


class Mixture:
    """Where the layers of one model find the mixture of the forward pass under way."""

    value: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Mixture:
        """An empty one: a mixture may hold a graph, and belongs to its own model's forward pass."""
        return Mixture()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The names of one low-rank adaptor's two factors and of the base weight that they change."""

    inner: str
    outer: str
    weight: str
    alpha: float
    geometry: Geometry


@dataclass(frozen=True, kw_only=True)
class Offset:
    """The names of an adaptor that is added as it is (biases and norms) and of what it is added to.

    ``dims`` is the number of axes of the base's tensor; the clusters' axis comes right before them.
    """

    adaptor: str
    base: str
    alpha: float
    dims: int


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Every adaptor of a model: the low-rank ones and the added ones."""

    factors: tuple[Pair, ...] = ()
    offsets: tuple[Offset, ...] = ()


class AdaptedLayer(nn.Module, ABC):
    """A layer beside its clusters' adaptors; ``place`` is its number among a model's."""

    place = 0

    def __init__(self, base: nn.Module, *, num_clusters: int, alpha: float, mixture: Mixture):
        super().__init__()
        self.base = base
        self.num_clusters = num_clusters
        self.alpha = alpha
        self.mixture = mixture

    def shares(self, like: Tensor) -> Float[Tensor, " clusters"]:
        """``alpha * pi`` in the dtype of ``like``."""
        value = self.mixture.value
        if value is None:
            raise RuntimeError("an adapted layer was called outside the model's forward; call it inside model.mixing()")
        return self.alpha * self.of_mixture(value).to(like.dtype)

    def of_mixture(self, mixture: Float[Tensor, "*layers clusters"]) -> Float[Tensor, " clusters"]:
        """The layer's own vector, where each layer has one."""
        return mixture if mixture.ndim == 1 else mixture[self.place]

    @abstractmethod
    def initialisers(self) -> dict[str, Init]:
        """For each of the layer's own parameters how its initial value is drawn."""

    @abstractmethod
    def pairs(self, prefix: str) -> Pairs:
        """The layer's adaptors, their names led by ``prefix``."""

    @abstractmethod
    def fold(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """The base with the mixed adaptor added to its own tensors, in place; ``shares`` is ``alpha * pi``."""

    def offset(self, prefix: str, name: str) -> Offset:
        """The adaptor ``name`` of the base's tensor of the same name."""
        dims = tensor(self.base, name).ndim
        return Offset(adaptor=f"{prefix}{name}", base=f"{prefix}base.{name}", alpha=self.alpha, dims=dims)

    def reset(self, generator: torch.Generator | None) -> None:
        """Draw the layer's own parameters anew (None: from torch's global stream)."""
        with torch.no_grad():
            for name, draw in self.initialisers().items():
                parameter = self.get_parameter(name)
                parameter.copy_(draw(tuple(parameter.shape), generator or torch.default_generator))

    def clustered(self, shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
        """A parameter of zeros ``(clusters, *shape)``, in the dtype and on the device of ``like``."""
        return nn.Parameter(torch.zeros(self.num_clusters, *shape, dtype=like.dtype, device=like.device))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters(recurse=False)}
        return ", ".join(f"{name}={shape}" for name, shape in shapes.items())


def tensor(module: nn.Module, name: str) -> Tensor:
    """The module's parameter or buffer; ``get_parameter`` refuses what ``torch.func.functional_call`` puts there."""
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value


def mix(shares: Float[Tensor, " clusters"], adaptors: Float[Tensor, "clusters ..."]) -> Tensor:
    """``sum_c shares_c adaptors_c``."""
    return torch.tensordot(shares, adaptors, dims=1)


def uniform(fan_in: int) -> Init:
    """Uniform in +-sqrt(6 / fan_in), the public code's start of the inner factor."""
    bound = math.sqrt(6 / fan_in)

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator) * (2 * bound) - bound

    return draw
