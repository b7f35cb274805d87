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
    # Where the loss falls, the likelihood rises.
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
    """Stacking: each user mixes the predictions of a shared and a local model, with one weight fitted to its own data.

    A user predicts each next token by ``p = w p_shared + (1 - w) p_local``. The weight w has the largest likelihood on
    its validation text, which trains neither model. So

    - on validation text the mixture's loss is at most that of the better model (Smyth and Wolpert, section 3);
    - on any text its loss is at most ``w loss_shared + (1 - w) loss_local`` (Jensen's inequality), which is never above
      that of the worse model;
    - on new text the fit of w costs about 1 / (2 n) nats per token, with n independent validation tokens.

    With ``temperatures`` the mixture is of ``p_shared^a`` and ``p_local^b``, normalised, where a and b (from 1/4 to 4)
    each have the largest likelihood for their model alone. On validation text neither model is worse than without.

    Source: linear stacking of densities: Smyth and Wolpert 1999, Machine Learning 36, 59-83, here with one split; a
    global and a local model mixed for each user: Peterson, Hanif and Darling 2019, arXiv:1912.06733, Mansour et al.
    2020, arXiv:2002.10619.
    Shared: attention and 2 averaged LoRA experts per MLP of one model.  Local: the same of another model, and w.
    Frozen: the base.
    Client: steps of both models on the same batches of training text, each for its own loss.  Server: mean over users.
    Differs from the paper: w is the same for all tokens, where Peterson et al. compute it from the input.  The two
    models are bit for bit those of ``fedavg`` and ``local``, unless ``clip_norm`` clips the gradients of both together.
    Training costs as much as both methods.  With ``generalists`` 2 or 0 both models are shared, or both local, with
    different initial values.

    Args:
        generalists: Number of its two models that are shared; 0 and 2 are for comparison.
        temperatures: Fit a temperature for each of the two models on validation text, before their weights.
    """
    mixture = ClientMixture(clusters=MODELS, of="models", at="predictions", experts=2, tempered=temperatures)
    if generalists > 0:
        shared, server = frozenset({GENERALIST}), Mean()
    else:
        shared, server = frozenset(), Server()
    return Method(
        name="stacking",
        placement=Placement(generalists=generalists, specialists=MODELS - generalists, shared=shared, mixture=mixture),
        client=Client(phases=joint(routed=False), parts=(FitWeights(tempered=temperatures),)),
        server=server,
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
        """Fit each user's weight w of its first model to its validation data, and store it as a router of logarithms.

        Runs after training and before models are scored, because the best w depends on the trained models.

        The router is ``[log w, log(1 - w)]``, or with ``tempered`` ``[log w, log(1 - w), log a, log b]``. Then the
        models' probabilities are raised to the powers a and b (inverse temperatures) before they are mixed.
        """
        powers = best_powers(cohort) if self.tempered else None
        w = likeliest_weight(cohort.held_out_losses(powers))
        smallest = torch.finfo(torch.float32).tiny  # the logarithm of 0 would be infinite
        weights = torch.stack([w, 1 - w], 1).clamp(min=smallest)
        if powers is None:
            cohort.tensors[CLIENT_ROUTER].copy_(weights.log())
        else:
            cohort.tensors[CLIENT_ROUTER].copy_(torch.cat([weights, powers], 1).log())
