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
    """Return, for both models of each user, the power ``a`` that minimises the loss of the probabilities ``p^a``.

    A power is an inverse temperature. Each model gets a power of its own, by its loss on the user's validation data. If
    the model gives token v at position t the probability ``p_t(v)``, the values ``p_t(v)^a`` are normalised over the
    vocabulary. The loss is then ``sum_t (log sum_v p_t(v)^a - a log p_t)``, where ``p_t`` is the probability of the
    actual token. It is convex in a, so bisection finds the root of its slope. Of the last interval, the end closer to 1
    is returned, so that no loss exceeds that of a = 1.
    """

    def loss_falls(log_powers: Float64[Tensor, "users 2"]) -> Bool[Tensor, "users 2"]:
        """Return for each power whether the loss decreases as the power grows."""
        with torch.enable_grad():
            powers = log_powers.exp().requires_grad_()
            (slope,) = torch.autograd.grad(cohort.held_out_losses(powers).sum(), powers)
        return slope < 0

    like = cohort.tensors[CLIENT_ROUTER][:, :2]  # only for the shape (users, 2) and the device
    largest_log = torch.full_like(like, math.log(LARGEST_POWER), dtype=torch.float64)
    low, high = bisect(loss_falls, -largest_log, largest_log, POWER_BISECTIONS)
    return torch.where(low >= 0, low, high).exp()  # logarithms, so the end closer to a = 1 is the one closer to 0


def likeliest_weight(losses: Float64[Tensor, "users 2 losses"]) -> Float[Tensor, " users"]:
    """Return the first model's weight w with the largest likelihood of the mixed predictions of two models.

    The weight maximises the log-likelihood ``sum_t log(w exp(-loss_1t) + (1 - w) exp(-loss_2t))`` over the tokens t.
    Its slope in w, ``sum_t (r_t - 1) / (w r_t + 1 - w)`` with ``r_t = exp(loss_2t - loss_1t)``, is decreasing, so
    bisection finds the root. If the slope has no root in [0, 1], w is 0 or 1. If the two models never differ, w is 1/2.

    Args:
        losses: Losses of the two models at each token of a user's validation text.
    """
    margin = losses[:, 1] - losses[:, 0]
    # r / (r + 1) and 1 / (r + 1) take the places of r and 1 in the slope, as r may overflow.
    first, second = margin.sigmoid(), (-margin).sigmoid()

    def rises(weight: Float[Tensor, " users"]) -> Bool[Tensor, " users"]:
        """Return whether the likelihood increases as the weight grows."""
        w = weight.unsqueeze(1)
        return ((first - second) / (w * first + (1 - w) * second)).sum(1) > 0

    low, high = bisect(rises, torch.zeros_like(margin[:, 0]), torch.ones_like(margin[:, 0]), BISECTIONS)
    # Exactly 0 if the likelihood never rises (low has not moved), exactly 1 if it always rises (high has not moved).
    root_or_end = torch.where(low == 0, low, high)
    return torch.where((margin == 0).all(1), 0.5, root_or_end)


def bisect(rises: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """Return the ends of the interval that holds the maximum of a concave objective after some bisections.

    Args:
        rises: Returns whether the objective increases at a point.
        low: Lower ends.
        high: Upper ends.
        times: Number of bisections.
    """
    for _ in range(times):
        middle = (low + high) / 2
        rising = rises(middle)
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
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
    """Sets each user's mixture weight by the likelihood on its validation data, after temperatures if ``tempered``."""

    tempered: bool = False

    roles = ROUTERS
    validates = True
    language_only = True

    def settle(self, cohort: Cohort) -> None:
        """Set each user's router to the logits ``log w, log (1 - w)`` of its two models.

        A user mixes the predictions of two models, with the weight w for the first. The w with the largest likelihood
        on the user's validation data is used. With ``tempered`` the probabilities of each model are raised to a power
        before they are mixed. Each power minimises the validation loss of its model alone. The logarithms of the two
        powers follow the logits in the router.
        """
        powers = best_powers(cohort) if self.tempered else None
        first_weight = likeliest_weight(cohort.held_out_losses(powers))
        # A weight of 0 would have a logit of minus infinity.
        weights = torch.stack([first_weight, 1 - first_weight], 1).clamp(min=torch.finfo(torch.float32).tiny)
        weights_and_powers = weights if powers is None else torch.cat([weights, powers], 1)
        cohort.tensors[CLIENT_ROUTER].copy_(weights_and_powers.log())
