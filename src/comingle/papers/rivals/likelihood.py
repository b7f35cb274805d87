"""Weights and temperatures of two models with which a user's validation data is likeliest."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from comingle.methods.cohort import Cohort
from comingle.utils.trees import CLIENT_ROUTER

BISECTIONS = 60
"""Of an interval of length 1: further than float64 can tell apart near 1."""

POWER_BISECTIONS, LARGEST_POWER = 8, 4.0
"""Powers from 1/4 to 4, to 1.1%: half the logits' variance times its square is what that costs, about 0.0002 nats."""


def best_powers(cohort: Cohort) -> Float64[Tensor, "users 2"]:
    """For each model by itself the power a with the lowest ``sum_t log sum_v p_t(v)^a - a log p_t``, convex in a.

    Its slope is 0 there; of the last interval it is the end at 1's side, so that no loss is above that of a = 1.
    """

    def falls(logs: Float64[Tensor, "users 2"]) -> Bool[Tensor, "users 2"]:
        with torch.enable_grad():
            powers = logs.exp().requires_grad_()
            (slope,) = torch.autograd.grad(cohort.held_out_losses(powers).sum(), powers)
        return slope < 0

    most = torch.full_like(cohort.tensors[CLIENT_ROUTER][:, :2], math.log(LARGEST_POWER), dtype=torch.float64)
    low, high = halved(falls, -most, most, POWER_BISECTIONS)
    return torch.where(low >= 0, low, high).exp()


def likeliest(losses: Float64[Tensor, "users 2 losses"]) -> Float[Tensor, " users"]:
    """The first model's weight w that maximises ``sum_t log(w exp(-loss_1t) + (1 - w) exp(-loss_2t))``.

    Its slope in w, ``sum_t (r_t - 1) / (w r_t + 1 - w)`` with ``r_t = exp(loss_2t - loss_1t)``, falls from end to end,
    so halving finds where it is 0, or the end beyond which that is. A half where the two models never differ.
    """
    ahead = losses[:, 1] - losses[:, 0]
    # Divided by r + 1, so that neither a very large nor a very small ratio overflows.
    first, second = ahead.sigmoid(), (-ahead).sigmoid()

    def rises(weight: Float[Tensor, " users"]) -> Bool[Tensor, " users"]:
        w = weight.unsqueeze(1)
        return ((first - second) / (w * first + (1 - w) * second)).sum(1) > 0

    low, high = halved(rises, torch.zeros_like(ahead[:, 0]), torch.ones_like(ahead[:, 0]), BISECTIONS)
    return torch.where((ahead == 0).all(1), 0.5, torch.where(low == 0, low, high))


def halved(rises: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """The interval in which something stops to rise, halved so often."""
    for _ in range(times):
        middle = (low + high) / 2
        rising = rises(middle)
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    return low, high
