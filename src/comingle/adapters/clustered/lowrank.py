"""Low-rank and bias adaptors of the layers that have a weight and a bias: linears and convolutions.

``W + alpha * sum_c pi_c U_c V_c`` (FLoRAL eq. 1, App. F.1) with the inner factor ``a`` drawn at random and the outer
factor ``b`` zero, as in LoRA (Hu et al. 2021) and FLoRAL's public code (its section 3.2 says the reverse), and
``bias + alpha * sum_c pi_c bias_c``. No change of the full size is formed in a forward pass.
"""

from __future__ import annotations

from abc import abstractmethod

from jaxtyping import Float
from torch import Tensor, nn

from comingle.adapters.clustered.geometry import Geometry
from comingle.adapters.clustered.layer import AdaptedLayer, Mixture, Pair, Pairs, mix, uniform
from comingle.adapters.lora import init_zero
from comingle.utils.trees import Init


class LowRankLayer(AdaptedLayer):
    """``a`` is ``(clusters, *inner_shape)``, ``b`` ``(clusters, *outer_shape)``, ``bias`` ``(clusters, d_out)``.

    Without a geometry there are no factors; without ``bias``, or where the base has none, there is no bias adaptor.
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
        super().__init__(base, num_clusters=num_clusters, alpha=alpha, mixture=mixture)
        self.geometry = geometry
        weight, own_bias = base.get_parameter("weight"), base._parameters.get("bias")
        self.a = self.clustered(geometry.inner_shape, weight) if geometry else None
        self.b = self.clustered(geometry.outer_shape, weight) if geometry else None
        self.bias = self.clustered(tuple(own_bias.shape), own_bias) if bias and own_bias is not None else None

    @abstractmethod
    def low_rank(self, x: Tensor, shares: Float[Tensor, " clusters"]) -> Tensor:
        """``sum_c shares_c U_c V_c x``."""

    @abstractmethod
    def spread(self, bias: Float[Tensor, " d_out"]) -> Tensor:
        """A bias in the shape that adds to the layer's output."""

    def forward(self, x: Float[Tensor, "*inputs"]) -> Float[Tensor, "*outputs"]:
        """``base(x) + alpha * sum_c pi_c (U_c V_c x + bias_c)``."""
        y = self.base(x)
        shares = self.shares(y)
        if self.geometry is not None:
            y = y + self.low_rank(x, shares)
        if self.bias is not None:
            y = y + self.spread(mix(shares.to(self.bias.dtype), self.bias)).to(y.dtype)
        return y

    def initialisers(self) -> dict[str, Init]:
        """``a`` uniform, ``b`` and ``bias`` zero."""
        factors: dict[str, Init] = {}
        if self.geometry is not None:
            factors = {"a": uniform(self.geometry.columns), "b": init_zero}
        return factors if self.bias is None else {**factors, "bias": init_zero}

    def pairs(self, prefix: str) -> Pairs:
        """At most one pair and one offset."""
        factors: tuple[Pair, ...] = ()
        if self.geometry is not None:
            names = {"inner": f"{prefix}a", "outer": f"{prefix}b", "weight": f"{prefix}base.weight"}
            factors = (Pair(**names, alpha=self.alpha, geometry=self.geometry),)
        return Pairs(factors=factors, offsets=() if self.bias is None else (self.offset(prefix, "bias"),))

    def fold(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add ``sum_c shares_c U_c V_c`` to the base's weight and the mixed bias to its bias."""
        if self.geometry is not None and self.a is not None and self.b is not None:
            weight = self.base.get_parameter("weight")
            outer = self.geometry.outer_matrix(self.b) * shares.to(self.b.dtype).view(-1, 1, 1, 1)
            change = (outer @ self.geometry.inner_matrix(self.a)).sum(0)
            weight.data.add_(self.geometry.weight(change))
        if self.bias is not None:
            self.base.get_parameter("bias").data.add_(mix(shares.to(self.bias.dtype), self.bias))
        return self.base
