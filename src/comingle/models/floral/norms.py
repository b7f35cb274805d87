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
"""Norms that can be adapted, without batch norms."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
"""Batch norms that can be adapted."""


class AdaptedNorm(AdaptedLayer):
    """A norm with adaptors of gamma (``weight``) and beta (``bias``), both ``(clusters, *shape of gamma)``."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, base: nn.Module, *, num_clusters: int, alpha: float, mixture: Mixture):
        """Create zero adaptors of gamma and beta for every cluster.

        Args:
            base: The norm to adapt.
            num_clusters: Number of clusters.
            alpha: Factor of the adaptors' sum, like the scale of LoRA.
            mixture: Holder of the clusters' mixture weights in the current forward pass.
        """
        super().__init__(base, num_clusters=num_clusters, alpha=alpha, mixture=mixture)
        gamma = base.get_parameter("weight")
        beta = base._parameters.get("bias")  # None for a norm without beta
        self.weight = self.clustered(tuple(gamma.shape), gamma)
        self.bias = None if beta is None else self.clustered(tuple(beta.shape), beta)

    def mixed(self) -> tuple[Tensor, Tensor | None]:
        """Return the mixtures ``alpha * sum_c pi_c gamma_c`` and ``alpha * sum_c pi_c beta_c`` of the adaptors."""
        shares = self.shares(self.weight)  # alpha * pi
        mixed_gamma = mix(shares, self.weight)
        mixed_beta = None if self.bias is None else mix(shares, self.bias)
        return mixed_gamma, mixed_beta

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """Return gamma and beta of the whole norm: those of the base plus the mixed adaptors."""
        mixed_gamma, mixed_beta = self.mixed()
        gamma = tensor(self.base, "weight") + mixed_gamma
        beta = None if mixed_beta is None else tensor(self.base, "bias") + mixed_beta
        return gamma, beta

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Apply the base norm with the mixed adaptors added to its gamma and beta."""
        gamma, beta = self.affine()
        base = self.base
        if isinstance(base, nn.LayerNorm):
            return F.layer_norm(x, base.normalized_shape, gamma, beta, base.eps)
        if isinstance(base, nn.GroupNorm):
            return F.group_norm(x, base.num_groups, gamma, beta, base.eps)
        return _instance_norm(cast(_InstanceNorm, base), x, gamma, beta)

    def initialisers(self) -> dict[str, Init]:
        """Return the initialiser of each adaptor by name: all start at zero."""
        return dict.fromkeys(self._adaptor_names(), init_zero)

    def pairs(self, prefix: str) -> Pairs:
        """Return the names of the adaptors of gamma and beta and of the base's tensors that they are added to."""
        return Pairs(offsets=tuple(self.offset(prefix, name) for name in self._adaptor_names()))

    def _adaptor_names(self) -> list[str]:
        """Return the names of the parameters that are added to gamma and, if there is one, to beta."""
        return ["weight"] if self.bias is None else ["weight", "bias"]

    def merge_into_base(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add the clusters' gammas and betas to the base's in place, and return the base, which then needs no adaptors.

        Args:
            shares: Mixture weight of each cluster's adaptor, times alpha.
        """
        mixed_gamma = mix(shares.to(self.weight.dtype), self.weight)
        tensor(self.base, "weight").data.add_(mixed_gamma)
        if self.bias is not None:
            mixed_beta = mix(shares.to(self.bias.dtype), self.bias)
            tensor(self.base, "bias").data.add_(mixed_beta)
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
    y = F.instance_norm(
        batched,
        base.running_mean,
        base.running_var,
        weight,
        bias,
        use_input_stats=base.training or not base.track_running_stats,
        momentum=base.momentum if base.momentum is not None else 0.0,
        eps=base.eps,
    )
    return y.squeeze(0) if lacks_batch_axis else y


class AdaptedBatchNorm(AdaptedNorm):
    """A batch norm whose adaptors have running statistics of their own (FLoRAL, arXiv:2410.03497, App. F.2).

    Output: ``BN(x; gamma, beta) + alpha * sum_c pi_c BN_local(x; gamma_c, beta_c)``. All clusters share one set of
    local statistics (``running_mean``, ``running_var``). In a federation they stay on the client; the base's are
    averaged.

    With ``nora`` (BatchNorA, eq. 42) the adaptor's gain and shift become ``s gamma_c`` and ``beta_c + m sg(gamma_c)``
    with ``s = sigma_local / sigma``, ``m = (mu_local - mu) / sigma`` and the stop-gradient sg. They use the running
    statistics in training mode, too, as batch statistics would give s = 1 and m = 0.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, base: nn.Module, *, nora: bool, num_clusters: int, alpha: float, mixture: Mixture):
        """Create the adaptors, and local running statistics that start as copies of the base's.

        Args:
            base: The batch norm to adapt.
            nora: Use BatchNorA (FLoRAL eq. 42), which rescales the adaptors by the ratio of local and base statistics.
            num_clusters: Number of clusters, each with its own adaptors.
            alpha: Factor of the adaptors' sum, like the scale of LoRA.
            mixture: Holder of the clusters' mixture weights in the current forward pass.
        """
        super().__init__(base, num_clusters=num_clusters, alpha=alpha, mixture=mixture)
        self.nora = nora
        for name in ("running_mean", "running_var"):
            statistic = getattr(base, name)  # None for a batch norm without running statistics
            self.register_buffer(name, None if statistic is None else statistic.clone())

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the output of the base's norm plus that of the adaptors' norm.

        Both normalise by the batch in training mode, and by their own running statistics in eval mode.
        """
        base = cast(_BatchNorm, self.base)
        base._check_input_dim(x)
        gain, shift = self._gain_and_shift()
        uses_batch_statistics = base.training or self.running_mean is None
        if uses_batch_statistics:  # One call computes the sum of both norms.
            gamma = base.weight + gain
            beta = _add_optional(base._parameters.get("bias"), shift)
            return self._normalise_by_batch(x, gamma, beta)
        normalise = partial(F.batch_norm, x, training=False, momentum=0.0, eps=base.eps)
        base_output = normalise(base.running_mean, base.running_var, base.weight, base.bias)
        adaptor_output = normalise(self.running_mean, self.running_var, gain, shift)
        return base_output + adaptor_output

    def _gain_and_shift(self) -> tuple[Tensor, Tensor | None]:
        """Return gain and shift of the adaptors' norm, mixed over clusters.

        With ``nora`` (BatchNorA, FLoRAL eq. 42) they become ``s gain`` and ``shift + m sg(gain)``, with
        ``s = sigma_local / sigma``, ``m = (mu_local - mu) / sigma`` and the stop-gradient sg. mu and sigma are the
        base's running mean and standard deviation, mu_local and sigma_local the adaptors'.
        """
        gain, shift = self.mixed()
        has_running_statistics = self.running_mean is not None
        if not self.nora or not has_running_statistics:
            return gain, shift
        s, m = self._relative_statistics()
        # sg(gain): no gradient of the clusters' gains through the shift, only of the mixture weights.
        detached_gain = mix(self.shares(self.weight), self.weight.detach())
        return s * gain, _add_optional(shift, m * detached_gain)

    def _relative_statistics(self) -> tuple[Tensor, Tensor]:
        """Return ``sigma_local / sigma`` and ``(mu_local - mu) / sigma``.

        mu and sigma are the base's running mean and standard deviation, mu_local and sigma_local the adaptors'.
        """
        mu, var, mu_local, var_local = self._statistics()
        eps = cast(_BatchNorm, self.base).eps
        sigma = (var + eps).sqrt()
        sigma_local = (var_local + eps).sqrt()
        return sigma_local / sigma, (mu_local - mu) / sigma

    def _normalise_by_batch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalise by the batch's statistics; in training update the base's and the local running statistics.

        The base's running statistics are averaged in a federation, the local ones stay on the client.

        Args:
            x: Input of the norm.
            weight: Gain of the whole norm.
            bias: Shift of the whole norm, or None.
        """
        base = cast(_BatchNorm, self.base)
        has_statistics_to_update = base.training and base.running_mean is not None
        if not has_statistics_to_update:
            return F.batch_norm(x, None, None, weight, bias, training=True, momentum=0.0, eps=base.eps)
        assert base.num_batches_tracked is not None
        base.num_batches_tracked.add_(1)
        # Without momentum PyTorch keeps the mean over all batches.
        rate = base.momentum if base.momentum is not None else 1.0 / float(base.num_batches_tracked)
        old_differences = self._local_minus_base()  # read first, as batch_norm updates the base's statistics in place
        y = F.batch_norm(
            x, base.running_mean, base.running_var, weight, bias, training=True, momentum=rate, eps=base.eps
        )
        self._update_local_statistics(old_differences, keep=1.0 - rate)
        return y

    def _local_minus_base(self) -> tuple[Tensor, Tensor]:
        """Return the differences of the client's local running mean and variance from those of the base norm."""
        mean, var, local_mean, local_var = self._statistics()
        return local_mean - mean, local_var - var

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return running mean and variance of the base's norm, then those of the adaptors' norm (local statistics)."""
        mean, var = tensor(self.base, "running_mean"), tensor(self.base, "running_var")
        local_mean, local_var = tensor(self, "running_mean"), tensor(self, "running_var")
        return mean, var, local_mean, local_var

    def _update_local_statistics(self, old_differences: tuple[Tensor, Tensor], *, keep: float) -> None:
        """Update the client's local running mean and variance after ``F.batch_norm`` has updated the base's.

        Both are moving averages over the same batches that started from other values: ``new = keep * old + (1 - keep) *
        batch``. So each step multiplies their difference by ``keep``.

        Args:
            old_differences: Local mean minus base mean, and local variance minus base variance, before the update.
            keep: Weight of the old value in the moving averages.
        """
        old_mean_difference, old_var_difference = old_differences
        mean, var, local_mean, local_var = self._statistics()
        with torch.no_grad():
            local_mean.copy_(mean + keep * old_mean_difference)
            local_var.copy_(var + keep * old_var_difference)

    def merge_into_base(self, shares: Float[Tensor, " clusters"]) -> nn.Module:
        """Add the mixed adaptors to the base's gamma and beta in place, so that outputs in eval mode stay the same.

        The adaptors' norm uses local running statistics (mu_local, sigma_local), the base those of its own (mu,
        sigma). So the mixed ``gain`` and ``shift`` of the adaptors are converted::

            gamma += gain sigma / sigma_local
            beta  += shift + gain (mu - mu_local) / sigma_local

        Args:
            shares: Mixture weight of each cluster's adaptor, times alpha.

        Returns:
            The base.

        Raises:
            RecipeError: Beta has to be changed, but the base has none.
        """
        has_local_statistics = self.running_mean is not None
        if not has_local_statistics or self.nora:  # BatchNorA acts as if normalised by the base's statistics
            return super().merge_into_base(shares)
        if self.bias is None:
            raise RecipeError(
                "merge: a batch norm without bias cannot take adaptors with local statistics; use batch_nora"
            )
        base = cast(_BatchNorm, self.base)
        gain = mix(shares.to(self.weight.dtype), self.weight)
        shift = mix(shares.to(self.bias.dtype), self.bias)
        s, m = self._relative_statistics()  # sigma_local / sigma, (mu_local - mu) / sigma
        base.weight.data.add_(gain / s)
        base.bias.data.add_(shift - m / s * gain)
        return base


def _add_optional(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of the tensors that are not None; None if both are."""
    if a is None:
        return b
    if b is None:
        return a
    return a + b
