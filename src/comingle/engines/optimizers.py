"""AdamW and SGD on the rows of many users at once, with a step count, a clipping norm and a mask of each user's own.

Both are elementwise, so one update of a ``(users, columns)`` matrix is exactly what each user's own optimiser would
have done. torch's optimisers keep one step count per tensor; here users may have taken different numbers of steps
(partial participation), so the update is written out. Moments are float32 at least.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.settings import OptimizerSettings

Rows = Float[Tensor, "users columns"]


def learning_rate(settings: OptimizerSettings, step: int, total: int) -> float:
    """Rate of step ``step`` of ``total`` (from 0): constant, or a cosine from the rate to ``final_fraction`` of it."""
    if settings.schedule == "constant":
        return settings.learning_rate
    low = settings.final_fraction * settings.learning_rate
    return low + (settings.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, total))))


def clip(gradient: Rows, norm: float) -> Rows:
    """Scale each user's gradient down to at most ``norm``."""
    norms = gradient.norm(dim=1, keepdim=True)
    return gradient * (norm / norms.clamp(min=norm))


PIECE = 1 << 20
"""Entries of a narrow gradient that are widened at a time, so that caches hold them; measured on CPUs."""


@torch.no_grad()
def descend(settings: OptimizerSettings, rate: float, values: Tensor, gradient: Tensor) -> None:
    """One step of plain SGD, in place on ``values`` ``(users, ...)``; a narrower ``gradient`` counts as it is."""
    if settings.weight_decay:
        values.mul_(1 - rate * settings.weight_decay)
    users = len(values) if gradient.dtype == values.dtype else max(1, PIECE // max(1, values[:1].numel()))
    for some, by in zip(values.split(users), gradient.split(users), strict=True):
        some.sub_(by.to(values.dtype), alpha=rate)


@torch.no_grad()
def update(
    settings: OptimizerSettings,
    rate: float,
    rows: Rows,
    gradient: Rows,
    first: Float[Tensor, "users _"],
    second: Float[Tensor, "users _"],
    steps: Int[Tensor, " users"],
) -> None:
    """One optimiser step of every user, in place on ``rows`` and on the moments ``first`` and ``second``.

    ``steps`` is each user's step count including this one. Moments that the optimiser does not keep may be empty.
    """
    if settings.clip_norm is not None:
        gradient = clip(gradient, settings.clip_norm)
    if settings.name == "sgd":
        if settings.momentum:
            gradient = first.mul_(settings.momentum).add_(gradient)
        descend(settings, rate, rows, gradient)
        return
    if settings.weight_decay:
        rows.mul_(1 - rate * settings.weight_decay)
    beta1, beta2 = settings.betas
    count = steps.to(rows.dtype).unsqueeze(1)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second / (1 - beta2**count)).sqrt_().add_(settings.eps)
    rows.sub_(first / denominator * (rate / (1 - beta1**count)))
