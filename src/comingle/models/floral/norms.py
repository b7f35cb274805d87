"""Norm adaptors: a gain and a shift per cluster, which start at zero (FLoRAL App. F.2).

Layer, group and instance norm normalise by the input alone, so ``norm(x; gamma, beta) + sum_c share_c norm(x; gamma_c,
beta_c)`` is one norm with ``gamma + sum_c share_c gamma_c`` and ``beta + sum_c share_c beta_c``.
"""

from __future__ import annotations

from functools import partial
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
    """A layer, group or instance norm with adaptors; ``weight`` and ``bias`` are ``(clusters, *shape of gamma)``.

    An instance norm that tracks running statistics has one set, shared by base and adaptors.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, base: nn.Module, *, num_clusters: int, alpha: float, mixture: Mixture):
        """Create zero adaptors of gamma and beta: one of each for every cluster of users.

        Args:
            base: The norm to adapt.
            num_clusters: Number of clusters.
            alpha: Factor of the adaptors' sum, like the scale of LoRA.
            mixture: Holder of the clusters' mixture weights in the current forward pass.
        """
        super().__init__(base, num_clusters=num_clusters, alpha=alpha, mixture=mixture)
        gamma, beta = base.get_parameter("weight"), base._parameters.get("bias")  # a norm may lack beta
        self.weight = self.clustered(tuple(gamma.shape), gamma)
        self.bias = None if beta is None else self.clustered(tuple(beta.shape), beta)

    def mixed(self) -> tuple[Tensor, Tensor | None]:
        """Return ``alpha * sum_c pi_c gamma_c`` and ``alpha * sum_c pi_c beta_c``."""
        shares = self.shares(self.weight)
        return mix(shares, self.weight), None if self.bias is None else mix(shares, self.bias)

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """Return gamma and beta of the whole norm: the base's plus ``alpha * sum_c pi_c`` of the clusters'."""
        gain, shift = self.mixed()
        beta = None if shift is None else tensor(self.base, "bias") + shift
        return tensor(self.base, "weight") + gain, beta

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Apply the base norm with another gamma and beta: the base's plus the clusters' adaptors, mixed."""
        weight, bias = self.affine()
        base = self.base
        if isinstance(base, nn.LayerNorm):
            return F.layer_norm(x, base.normalized_shape, weight, bias, base.eps)
        if isinstance(base, nn.GroupNorm):
            return F.group_norm(x, base.num_groups, weight, bias, base.eps)
        return _instance_norm(cast(_InstanceNorm, base), x, weight, bias)

    def initialisers(self) -> dict[str, Init]:
        """Return zero initialisers."""
        return {"weight": init_zero} if self.bias is None else {"weight": init_zero, "bias": init_zero}

    def pairs(self, prefix: str) -> Pairs:
        """Return the names of the adaptors of gamma and beta and of the base's tensors that they are added to."""
        names = ["weight"] if self.bias is None else ["weight", "bias"]
        return Pairs(offsets=tuple(self.offset(prefix, name) for name in names))

    def merge_into_base(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add the clusters' gammas and betas, weighted by ``shares``, to the base's in place, and return the base."""
        tensor(self.base, "weight").data.add_(mix(shares.to(self.weight.dtype), self.weight))
        if self.bias is not None:
            tensor(self.base, "bias").data.add_(mix(shares.to(self.bias.dtype), self.bias))
        return self.base


def _instance_norm(base: _InstanceNorm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run the forward pass of ``nn.InstanceNorm`` with another gamma and beta.

    Args:
        base: The norm, with its settings and running statistics.
        x: The input, with or without a batch axis.
        weight: Gamma to use in place of the norm's own.
        bias: Beta to use in place of the norm's own; None for no beta.
    """
    base._check_input_dim(x)
    lacks_batch_axis = x.dim() == base._get_no_batch_dim()
    batched = x.unsqueeze(0) if lacks_batch_axis else x
    use_input = base.training or not base.track_running_stats  # instead of running statistics
    mean, var = base.running_mean, base.running_var
    momentum = base.momentum if base.momentum is not None else 0.0  # without momentum nn.InstanceNorm passes 0 too
    y = F.instance_norm(batched, mean, var, weight, bias, use_input, momentum, base.eps)
    return y.squeeze(0) if lacks_batch_axis else y


class AdaptedBatchNorm(AdaptedNorm):
    """A batch norm whose adaptors have running statistics of their own (FLoRAL, arXiv:2410.03497, App. F.2).

    Output: ``BN(x; gamma, beta) + alpha * sum_c pi_c BN_local(x; gamma_c, beta_c)``. All clusters see the same input,
    so they share one set of local statistics (``running_mean``, ``running_var``), which starts as a copy of the base's.
    In a federation local statistics stay on the client; the base's are averaged.

    ``nora`` selects BatchNorA (eq. 42). The adaptor's gain and shift become ``s gamma_c`` and ``beta_c + m
    sg(gamma_c)`` with ``s = sigma_local / sigma`` and ``m = (mu_local - mu) / sigma``, from the running statistics
    before the step. Training mode uses them too, as batch statistics would give s = 1 and m = 0. The stop-gradient sg
    applies to the original gamma_c, as in the paper. Sigma includes epsilon, so in eval mode the output is exactly the
    base's norm with ``gamma + gamma_c`` and ``beta + beta_c``. Without running statistics both forms are equal.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, base: nn.Module, *, nora: bool, num_clusters: int, alpha: float, mixture: Mixture):
        """Create the adaptors, and local running statistics that start as copies of the base's.

        Args:
            base: The batch norm to adapt; without running statistics there are no local ones.
            nora: Use BatchNorA (FLoRAL eq. 42), which rescales the adaptors by the ratio of local and base statistics.
            num_clusters: Number of clusters, each with its own adaptors.
            alpha: Factor of the adaptors' sum, like the scale of LoRA.
            mixture: Holder of the clusters' mixture weights in the current forward pass.
        """
        super().__init__(base, num_clusters=num_clusters, alpha=alpha, mixture=mixture)
        self.nora = nora
        mean, var = cast(_BatchNorm, base).running_mean, cast(_BatchNorm, base).running_var
        self.register_buffer("running_mean", None if mean is None else mean.clone())
        self.register_buffer("running_var", None if var is None else var.clone())

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the output of the base's norm plus that of the adaptors' norm, mixed over clusters.

        In training mode both normalise by the same batch, so one call computes the sum. In eval mode each has its own
        running statistics.
        """
        base = cast(_BatchNorm, self.base)
        base._check_input_dim(x)
        gain, shift = self._gain_and_shift()
        if base.training or self.running_mean is None:
            return self._normalise_by_batch(x, base.weight + gain, _add_present(base._parameters.get("bias"), shift))
        normalise = partial(F.batch_norm, x, training=False, momentum=0.0, eps=base.eps)  # statistics do not change
        y = normalise(base.running_mean, base.running_var, base.weight, base.bias)
        return y + normalise(self.running_mean, self.running_var, gain, shift)

    def _gain_and_shift(self) -> tuple[Tensor, Tensor | None]:
        """Return gain and shift of the adaptors' norm, mixed over clusters.

        With ``nora`` (BatchNorA, FLoRAL eq. 42) they are changed to::

            gain   <-  sigma_ratio * gain                    with sigma_ratio = sigma_local / sigma
            shift  <-  shift + mean_offset * detached_gain   with mean_offset = (mu_local - mu) / sigma

        mu and sigma are the base's running mean and standard deviation, mu_local and sigma_local the adaptors'.
        """
        gain, shift = self.mixed()
        has_running_statistics = self.running_mean is not None
        if not self.nora or not has_running_statistics:
            return gain, shift
        sigma_ratio, mean_offset = self._relative_statistics()
        # `gain` again, without a gradient for the clusters' gains; the mixture weights keep theirs.
        detached_gain = mix(self.shares(self.weight), self.weight.detach())
        return sigma_ratio * gain, _add_present(shift, mean_offset * detached_gain)

    def _relative_statistics(self) -> tuple[Tensor, Tensor]:
        """Return ``sigma_local / sigma`` and ``(mu_local - mu) / sigma``.

        mu and sigma are the mean and standard deviation of the base's running statistics, mu_local and sigma_local
        those of the adaptors'. The two results convert between inputs normalised by the one and by the other::

            (x - mu) / sigma = (sigma_local / sigma) (x - mu_local) / sigma_local + (mu_local - mu) / sigma
        """
        mean, var, local_mean, local_var = self._statistics()
        eps = cast(_BatchNorm, self.base).eps
        deviation = (var + eps).sqrt()
        return (local_var + eps).sqrt() / deviation, (local_mean - mean) / deviation

    def _normalise_by_batch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalise by the batch's statistics; in training update the base's and the local running statistics.

        Args:
            x: Input of the norm.
            weight: Sum of the base's gamma and the adaptors' gain.
            bias: Sum of the base's beta and the adaptors' shift, if there is any.
        """
        base = cast(_BatchNorm, self.base)
        if not base.training or base.running_mean is None:
            return F.batch_norm(x, None, None, weight, bias, training=True, momentum=0.0, eps=base.eps)
        assert base.num_batches_tracked is not None
        base.num_batches_tracked.add_(1)
        # Without momentum PyTorch keeps the plain mean over all batches.
        rate = base.momentum if base.momentum is not None else 1.0 / float(base.num_batches_tracked)
        # Computed first, because F.batch_norm updates the base's running statistics in place.
        local_minus_base = self._local_minus_base()
        statistics = (base.running_mean, base.running_var)
        y = F.batch_norm(x, *statistics, weight, bias, training=True, momentum=rate, eps=base.eps)
        self._update_local_statistics(local_minus_base, keep=1.0 - rate)
        return y

    def _local_minus_base(self) -> tuple[Tensor, Tensor]:
        """Return the differences of the local running mean and variance from the base's."""
        mean, var, local_mean, local_var = self._statistics()
        return local_mean - mean, local_var - var

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the base's running mean and variance, then the local ones."""
        names = ("running_mean", "running_var")
        mean, var = (tensor(self.base, name) for name in names)
        local_mean, local_var = (tensor(self, name) for name in names)
        return mean, var, local_mean, local_var

    def _update_local_statistics(self, local_minus_base: tuple[Tensor, Tensor], *, keep: float) -> None:
        """Update the local running mean and variance after ``F.batch_norm`` has updated the base's.

        Both are moving averages with the same rate over the same batch, so their difference shrinks by the factor
        ``1 - rate`` and the batch's own statistics are not needed again.

        Args:
            local_minus_base: Local mean and variance minus the base's, before the update.
            keep: ``1 - rate``, the weight of the old value in the moving averages.
        """
        mean, var, local_mean, local_var = self._statistics()
        with torch.no_grad():
            local_mean.copy_(mean + keep * local_minus_base[0])
            local_var.copy_(var + keep * local_minus_base[1])

    def merge_into_base(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Merge the adaptors into the base's gamma and beta in place, and return the base, an ordinary batch norm.

        In eval mode the result computes the same as this layer: the base's norm plus the adaptors' norm. ``gain`` is
        the sum of the clusters' gammas weighted by ``shares``, ``shift`` that of their betas. The adaptors' norm
        normalises by its own running statistics (mu_local, sigma_local), but the result by the base's (mu, sigma)::

            gamma += gain sigma / sigma_local
            beta  += shift + gain (mu - mu_local) / sigma_local

        Two cases need no conversion, so that ``gamma += gain`` and ``beta += shift``. The base may have no running
        statistics; then both norms use those of the batch. Or the layer may use BatchNorA (``nora``; FLoRAL eq. 42),
        whose forward pass already applies the inverse conversion to the adaptors.

        Args:
            shares: Mixture weight of each cluster's adaptor, times alpha.

        Raises:
            RecipeError: The conversion changes beta, but the base has none.
        """
        if self.running_mean is None or self.nora:  # no conversion, as in a layer norm
            return super().merge_into_base(shares)
        if self.bias is None:  # nothing can hold the difference of the means
            raise RecipeError(
                "merge: a batch norm without bias cannot take adaptors with local statistics; use batch_nora"
            )
        base = cast(_BatchNorm, self.base)
        gain, shift = mix(shares.to(self.weight.dtype), self.weight), mix(shares.to(self.bias.dtype), self.bias)
        sigma_ratio, mean_offset = self._relative_statistics()  # sigma_local / sigma, (mu_local - mu) / sigma
        base.weight.data.add_(gain / sigma_ratio)
        base.bias.data.add_(shift - mean_offset / sigma_ratio * gain)
        return base


def _add_present(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of the tensors that are not None; None if both are."""
    return b if a is None else a if b is None else a + b
