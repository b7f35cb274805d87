"""Stacking: a shared and a local model, weighted on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from comingle.methods.base import ROUTERS, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import Mean, Server
from comingle.methods.settings import Range
from comingle.models.routers import ClientMixture
from comingle.utils.trees import CLIENT_ROUTER, GENERALIST

BISECTIONS = 60
"""Halvings of an interval of length 1: beyond the precision of float64 near 1."""

POWER_BISECTIONS, LARGEST_POWER = 8, 4.0
"""Search for powers from 1/4 to 4, with an error of 1.1%.

That costs half the logits' variance times the error's square, about 0.0002 nats.
"""


def best_powers(cohort: Cohort) -> Float64[Tensor, "users 2"]:
    """Return for both models of each user the power a for which ``p^a`` has the lowest loss on validation data.

    A power is an inverse temperature: the probabilities ``p^a`` of the tokens are normalised over the vocabulary. The
    loss ``sum_t (log sum_v p_t(v)^a - a log p_t)`` over positions t and tokens v is convex in a, so bisection finds its
    minimum. The result is never worse than a = 1.
    """

    def loss_falls(log_powers: Float64[Tensor, "users 2"]) -> Bool[Tensor, "users 2"]:
        """Return for each power whether the loss decreases as the power grows."""
        with torch.enable_grad():
            powers = log_powers.exp().requires_grad_()
            total_loss = cohort.held_out_losses(powers).sum()
            (slope,) = torch.autograd.grad(total_loss, powers)
        return slope < 0

    logits = cohort.tensors[CLIENT_ROUTER][:, :2]  # for the shape (users, 2) and the device
    largest_log = torch.full_like(logits, math.log(LARGEST_POWER), dtype=torch.float64)
    low, high = bisect(loss_falls, -largest_log, largest_log, POWER_BISECTIONS)
    closer_to_0 = torch.where(low >= 0, low, high)  # the logarithm of the end that is closer to a = 1
    return closer_to_0.exp()


def likeliest_weight(losses: Float64[Tensor, "users 2 losses"]) -> Float[Tensor, " users"]:
    """Return the first model's weight w that maximises ``sum_t log(w exp(-loss_1t) + (1 - w) exp(-loss_2t))``.

    That is the log-likelihood of a mixture of two models over the tokens t. With ``r_t = exp(loss_2t - loss_1t)`` its
    slope in w is ``sum_t (r_t - 1) / (w r_t + 1 - w)``. It decreases, so bisection finds the maximum in [0, 1]. If the
    models never differ, w is 1/2.

    Args:
        losses: Losses of the two models at each token of a user's validation text.
    """
    log_r = losses[:, 1] - losses[:, 0]
    # The slope does not change if r and 1 are both divided by r + 1, which avoids an overflow of r.
    scaled_r, scaled_1 = log_r.sigmoid(), (-log_r).sigmoid()

    def likelihood_rises(weight: Float[Tensor, " users"]) -> Bool[Tensor, " users"]:
        """Return whether the likelihood increases as the weight grows."""
        w = weight.unsqueeze(1)
        slope = ((scaled_r - scaled_1) / (w * scaled_r + (1 - w) * scaled_1)).sum(1)
        return slope > 0

    zeros, ones = torch.zeros_like(log_r[:, 0]), torch.ones_like(log_r[:, 0])
    low, high = bisect(likelihood_rises, zeros, ones, BISECTIONS)
    never_rises = low == 0
    w = torch.where(never_rises, low, high)  # exactly 0 if it never rises, exactly 1 if it always does
    models_are_equal = (log_r == 0).all(1)
    return torch.where(models_are_equal, 0.5, w)


def bisect(rises: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """Halve intervals with the maximum of a concave objective ``times`` times; return their lower and upper ends.

    Args:
        rises: Returns for each point whether the objective increases there.
        low: Lower ends of the intervals.
        high: Upper ends.
        times: Number of bisections.
    """
    for _ in range(times):
        middle = (low + high) / 2
        maximum_is_above = rises(middle)
        low = torch.where(maximum_is_above, middle, low)
        high = torch.where(maximum_is_above, high, middle)
    return low, high


MODELS = 2


def stacking(*, generalists: Annotated[int, Range(least=0, most=MODELS)] = 1, temperatures: bool = False) -> Method:
    """Stacking: FedAvg's and Local's models, trained as in their own runs, and one mixture weight w for each user.

    A user predicts ``p = w p_shared + (1 - w) p_own`` for each next token. w has the largest likelihood on its
    validation text, which trains neither model. The log-likelihood is concave in w and both ends are allowed, so at
    each evaluation

    - on validation text the mixture's loss is at most that of the better model (Smyth and Wolpert, section 3);
    - on any text its loss is at most ``w loss_shared + (1 - w) loss_own`` (Jensen), so never above that of the worse
      model, and at most ``loss_shared + log(1 / w)`` and ``loss_own + log(1 / (1 - w))``;
    - one number is fitted: with n independent tokens that costs 1 / (2 n) nats per token on new text, if n is large.

    With ``temperatures`` both models are first raised to a power, ``p_shared^a`` and ``p_own^b`` up to normalisation,
    each with the largest likelihood by itself (from 1/4 to 4; a temperature is its inverse). That log-likelihood is
    concave too, so all of the above holds for the two models with their temperatures, neither of which is worse on
    validation text than without.

    Source: linear stacking of densities: Smyth and Wolpert 1999, Machine Learning 36, 59-83, here with one split; a
    global and a local model mixed for each user: Peterson, Hanif and Darling 2019, arXiv:1912.06733, Mansour et al.
    2020, arXiv:2002.10619.
    Shared: attention and 2 averaged LoRA experts per MLP of one model.  Local: the same of another, and w.  Frozen: the
    base.
    Client: joint steps on training text, of both models on the same batches, each by its own loss.  Server: mean.
    Differs from the paper: w is the same for all tokens, where Peterson et al. gate by the input.  Both models are
    bit for bit what ``fedavg`` and ``local`` train, unless a ``clip_norm`` clips the gradients of both by their
    common norm.  It has twice the trained parameters and passes of either.  With ``generalists`` 2 or 0 both models are
    shared, or both local, from different initial values: a control for the gain of any second model.

    Args:
        generalists: Number of its two models that are shared; 0 and 2 are for comparison.
        temperatures: Fit a temperature for each of the two models on validation text, before their weights.
    """
    return Method(
        name="stacking",
        placement=Placement(
            generalists=generalists,
            specialists=MODELS - generalists,
            shared=frozenset({GENERALIST} if generalists else ()),
            mixture=ClientMixture(clusters=MODELS, of="models", at="predictions", experts=2, tempered=temperatures),
        ),
        client=Client(phases=joint(routed=False), parts=(FitWeights(tempered=temperatures),)),
        server=Mean() if generalists else Server(),
    )


@dataclass(frozen=True, kw_only=True)
class FitWeights(ClientHook):
    """Client hook of stacking: fits each user's weights of its two models to validation data.

    With ``tempered`` it fits a temperature of each model before.
    """

    tempered: bool = False

    roles = ROUTERS
    validates = True
    language_only = True

    def settle(self, cohort: Cohort) -> None:
        """Set each user's router to ``[log w, log(1 - w)]``, with the weight w of its first model.

        With ``tempered`` the router is ``[log w, log(1 - w), log a, log b]``: the models' probabilities are raised to
        the powers a and b (inverse temperatures) before they are mixed.
        """
        powers = best_powers(cohort) if self.tempered else None
        w = likeliest_weight(cohort.held_out_losses(powers))
        smallest = torch.finfo(torch.float32).tiny  # the logarithm of 0 would be infinite
        weights = torch.stack([w, 1 - w], 1).clamp(min=smallest)
        if powers is None:
            cohort.tensors[CLIENT_ROUTER].copy_(weights.log())
        else:
            cohort.tensors[CLIENT_ROUTER].copy_(torch.cat([weights, powers], 1).log())
