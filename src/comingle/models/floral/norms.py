"""Norm adaptors: a gain and a shift per cluster, both zero at the start (FLoRAL App. F.2).

Layer, group and instance norm normalise by the input alone, so ``norm(x; gamma, beta) + sum_c share_c norm(x; gamma_c,
beta_c)`` is one norm with ``gamma + sum_c share_c gamma_c`` and ``beta + sum_c share_c beta_c``.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from comingle.models.floral.layers import AdaptedLayer, Mixture, Pairs, mix, tensor
from comingle.models.lora import init_zero
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Init

PLAIN_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class AdaptedNorm(AdaptedLayer):
    """Layer, group or instance norm; ``weight`` and ``bias`` are ``(clusters, *shape of gamma)``.

    An instance norm that tracks running statistics keeps one set of them, for the base and the adaptors alike.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, base: nn.Module, *, num_clusters: int, alpha: float, mixture: Mixture):
        super().__init__(base, num_clusters=num_clusters, alpha=alpha, mixture=mixture)
        gamma, beta = base.get_parameter("weight"), base._parameters.get("bias")
        self.weight = self.clustered(tuple(gamma.shape), gamma)
        self.bias = None if beta is None else self.clustered(tuple(beta.shape), beta)

    def mixed(self) -> tuple[Tensor, Tensor | None]:
        """``alpha * sum_c pi_c gamma_c`` and the same of beta."""
        shares = self.shares(self.weight)
        return mix(shares, self.weight), None if self.bias is None else mix(shares, self.bias)

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """Gamma and beta of the base, the mixed adaptors added."""
        gain, shift = self.mixed()
        beta = None if shift is None else tensor(self.base, "bias") + shift
        return tensor(self.base, "weight") + gain, beta

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The base norm with the mixed gamma and beta."""
        weight, bias = self.affine()
        base = self.base
        if isinstance(base, nn.LayerNorm):
            return F.layer_norm(x, base.normalized_shape, weight, bias, base.eps)
        if isinstance(base, nn.GroupNorm):
            return F.group_norm(x, base.num_groups, weight, bias, base.eps)
        return _instance_norm(cast(_InstanceNorm, base), x, weight, bias)

    def initialisers(self) -> dict[str, Init]:
        """All zero."""
        return {"weight": init_zero} if self.bias is None else {"weight": init_zero, "bias": init_zero}

    def pairs(self, prefix: str) -> Pairs:
        """Gamma and beta, both added as they are."""
        names = ["weight"] if self.bias is None else ["weight", "bias"]
        return Pairs(offsets=tuple(self.offset(prefix, name) for name in names))

    def fold(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add the mixed gamma and beta to the base's."""
        tensor(self.base, "weight").data.add_(mix(shares.to(self.weight.dtype), self.weight))
        if self.bias is not None:
            tensor(self.base, "bias").data.add_(mix(shares.to(self.bias.dtype), self.bias))
        return self.base


def _instance_norm(base: _InstanceNorm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``nn.InstanceNorm``'s forward with another gamma and beta; like it, takes an input without a batch."""
    base._check_input_dim(x)
    batched = x if x.dim() != base._get_no_batch_dim() else x.unsqueeze(0)
    of_batch = base.training or not base.track_running_stats
    mean, var = base.running_mean, base.running_var
    momentum = base.momentum if base.momentum is not None else 0.0
    y = F.instance_norm(batched, mean, var, weight, bias, of_batch, momentum, base.eps)
    return y if batched is x else y.squeeze(0)


class AdaptedBatchNorm(AdaptedNorm):
    """Batch norm with adaptors that have running statistics of their own (App. F.2).

    ``BN(x; gamma, beta) + alpha * sum_c pi_c BN_local(x; gamma_c, beta_c)``. All clusters see the same input, so one
    set of local statistics (``running_mean``, ``running_var``) is what each of them would have; in a federation they
    stay with the user while the base's are averaged. They start as the base's.

    ``nora`` is BatchNorA (eq. 42): the adaptor's arguments become ``s gamma_c`` and ``beta_c + m sg(gamma_c)`` with
    ``s = sigma_local / sigma`` and ``m = (mu_local - mu) / sigma`` out of the running statistics as they were before
    the step, in training mode too (where a batch's own statistics would give s = 1 and m = 0). sg is on the original
    gamma_c, as in the paper. Sigma includes epsilon, so in eval mode the output is exactly the base's norm with
    ``gamma + gamma_c`` and ``beta + beta_c``. Without running statistics both forms are the same.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, base: nn.Module, *, nora: bool, num_clusters: int, alpha: float, mixture: Mixture):
        super().__init__(base, num_clusters=num_clusters, alpha=alpha, mixture=mixture)
        self.nora = nora
        mean, var = cast(_BatchNorm, base).running_mean, cast(_BatchNorm, base).running_var
        self.register_buffer("running_mean", None if mean is None else mean.clone())
        self.register_buffer("running_var", None if var is None else var.clone())

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Both norms; in training mode they share the batch's statistics and are one call."""
        base = cast(_BatchNorm, self.base)
        base._check_input_dim(x)
        gain, shift = self._arguments()
        if base.training or self.running_mean is None:
            return self._normalise_by_batch(x, base.weight + gain, _sum(base._parameters.get("bias"), shift))
        y = F.batch_norm(x, base.running_mean, base.running_var, base.weight, base.bias, False, 0.0, base.eps)
        return y + F.batch_norm(x, self.running_mean, self.running_var, gain, shift, False, 0.0, base.eps)

    def _arguments(self) -> tuple[Tensor, Tensor | None]:
        """The adaptor's gamma and beta, reparameterised where that is asked for."""
        gain, shift = self.mixed()
        if not self.nora or self.running_mean is None:
            return gain, shift
        ratio, drift = self._relative()
        fixed = mix(self.shares(self.weight), self.weight.detach())  # the mixture's gradient goes through it
        return ratio * gain, _sum(shift, drift * fixed)

    def _relative(self) -> tuple[Tensor, Tensor]:
        """``sigma_local / sigma`` and ``(mu_local - mu) / sigma``."""
        mean, var, own_mean, own_var = self._statistics()
        eps = cast(_BatchNorm, self.base).eps
        deviation = (var + eps).sqrt()
        return (own_var + eps).sqrt() / deviation, (own_mean - mean) / deviation

    def _normalise_by_batch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        base = cast(_BatchNorm, self.base)
        if not base.training or base.running_mean is None:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, base.eps)
        assert base.num_batches_tracked is not None
        base.num_batches_tracked.add_(1)
        rate = base.momentum if base.momentum is not None else 1.0 / float(base.num_batches_tracked)
        ahead = self._lead()
        y = F.batch_norm(x, base.running_mean, base.running_var, weight, bias, True, rate, base.eps)
        self._follow(ahead, 1.0 - rate)
        return y

    def _lead(self) -> list[Tensor]:
        """By how much the local statistics differ from the base's."""
        mean, var, own_mean, own_var = self._statistics()
        return [own_mean - mean, own_var - var]

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The base's running mean and variance, then the local ones."""
        names = ("running_mean", "running_var")
        main, adapted = ([tensor(module, name) for name in names] for module in (self.base, self))
        return main[0], main[1], adapted[0], adapted[1]

    def _follow(self, ahead: list[Tensor], keep: float) -> None:
        """Move the local statistics as the base's moved.

        Both are averages with one rate over one batch, so their difference shrinks by ``1 - rate``; the batch's
        statistics need no second pass.
        """
        mean, var, own_mean, own_var = self._statistics()
        with torch.no_grad():
            own_mean.copy_(mean + keep * ahead[0])
            own_var.copy_(var + keep * ahead[1])

    def fold(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add the mixed adaptor, with the meaning of eval mode.

        Plain: ``gamma += g sigma / sigma_local`` and ``beta += s + (mu - mu_local) / sigma_local g``, which is the sum
        of both norms. BatchNorA: ``gamma += g``, ``beta += s``.

        Raises:
            RecipeError: the plain form on a norm without a bias, which has nowhere to put the difference of the means.
        """
        if self.running_mean is None or self.nora:
            return super().fold(shares)
        if self.bias is None:
            raise RecipeError(
                "merge: a batch norm without bias cannot take adaptors with local statistics; use batch_nora"
            )
        base = cast(_BatchNorm, self.base)
        gain, shift = mix(shares.to(self.weight.dtype), self.weight), mix(shares.to(self.bias.dtype), self.bias)
        ratio, drift = self._relative()
        base.weight.data.add_(gain / ratio)
        base.bias.data.add_(shift - drift / ratio * gain)
        return base


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
