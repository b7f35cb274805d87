"""Gradients through float16, whose smallest numbers are 6e-8 and whose largest is 65,504: the loss is scaled.

Each user's loss is multiplied by a power of two before the backward pass, and its gradients, in float32, are divided
by it. A loss is a mean over targets, so what reaches the head is scaled to about 2^4, whatever the batch. A user whose
gradients overflow takes the pass once more with a smaller scale (Micikevicius et al. 2018, "Mixed Precision Training",
section 3.2, leave such a step out instead and remember the scale): so nothing is skipped or remembered, and a user's
step does not depend on who else is in its cohort.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from comingle.utils.trees import Tree

Pass = Callable[[Float[Tensor, " users"]], tuple[Float[Tensor, " users"], Tree]]
"""From scales to unscaled losses and scaled gradients."""

_HEADROOM, _LOWER, _LOWEST = 2.0**4, 2.0**-4, 2.0**-24


def starting_scales(targets: Int[Tensor, " users"]) -> Float[Tensor, " users"]:
    """``2^4`` times the largest power of two that is not above the number of targets of a user's batch."""
    return _HEADROOM * torch.exp2(torch.log2(targets.clamp(min=1).float()).floor())


def scaled(run: Pass, targets: Int[Tensor, " users"]) -> tuple[Float[Tensor, " users"], Tree]:
    """Losses and gradients ``(users, ...)`` of a pass that is scaled, in float32; not finite where no scale helps."""
    scales = starting_scales(targets)
    while True:
        losses, gradients = run(scales)
        found = Tree({n: g / scales.to(g.device).view(-1, *[1] * (g.dim() - 1)) for n, g in gradients.items()})
        if any(isinstance(g, FakeTensor) for g in found.values()):  # counted, not computed
            return losses, found
        fits = ~losses.isfinite()  # nothing that happens behind the loss made it so
        fits |= torch.stack([g.flatten(1).isfinite().all(1).cpu() for g in found.values()]).all(0)
        if bool((fits | (scales <= _LOWEST)).all()):
            return losses, found
        scales = torch.where(fits, scales, scales * _LOWER)
