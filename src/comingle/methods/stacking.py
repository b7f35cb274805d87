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


MODELS = 2


def stacking(*, generalists: Annotated[int, Range(least=0, most=MODELS)] = 1, temperatures: bool = False) -> Method:
    """FedAvg's model and Local's, as they come out of their own runs, and one weight of each user between them.

    A user says ``p = w p_shared + (1 - w) p_own`` of every next token, and w is the likeliest on its validation text,
    which trains neither. Its log-likelihood is concave in w and both ends are allowed, so at each evaluation

    - on validation text the mixture loses no more than the better of the two (Smyth and Wolpert, section 3);
    - on any text it loses at most ``w loss_shared + (1 - w) loss_own`` (Jensen), so never more than the worse one, and
      at most ``loss_shared + log(1 / w)`` and ``loss_own + log(1 / (1 - w))``;
    - one number is fitted: with n independent tokens that costs 1 / (2 n) nats a token on new ones, if n is large.

    With ``temperatures`` both models are taken to a power first, ``p_shared^a`` and ``p_own^b`` up to a factor, each
    the likeliest by itself (from 1/4 to 4; a temperature is one over it). That log-likelihood is concave too, so all
    of the above holds of the two with their temperatures, neither of which is worse on validation text than without.

    Source: linear stacking of densities: Smyth and Wolpert 1999, Machine Learning 36, 59-83, here with one split; a
    global and a local model mixed for each user: Peterson, Hanif and Darling 2019, arXiv:1912.06733, Mansour et al.
    2020, arXiv:2002.10619.
    Shared: attention and 2 averaged LoRA experts per MLP of one model.  Local: the same of another, and w.  Frozen: the
    base.
    Client: joint steps on training text, of both models on the same batches, each by its own loss.  Server: mean.
    Differs from the paper: w is the same for all tokens, where Peterson et al. gate by the input.  Both models are
    what ``fedavg`` and ``local`` train, in every bit, unless a ``clip_norm`` clips the gradients of both by their
    common norm. It has twice the trained parameters and passes of either. With ``generalists`` 2 or 0 both models are
    shared, or both the user's own, from different starts: that is what any second model brings.
    """
    return Method(
        name="stacking",
        placement=Placement(
            generalists=generalists,
            specialists=MODELS - generalists,
            shared=frozenset({GENERALIST} if generalists else ()),
            mixture=ClientMixture(clusters=MODELS, of="models", at="predictions", experts=2, tempered=temperatures),
        ),
        client=Client(phases=joint(routed=False), parts=(Likeliest(tempered=temperatures),)),
        server=Mean() if generalists else Server(),
    )


@dataclass(frozen=True, kw_only=True)
class Likeliest(ClientHook):
    """Weighs each user's models as its validation data is likeliest, after their temperatures if it is ``tempered``."""

    tempered: bool = False

    roles = ROUTERS
    validates = True
    language_only = True

    def settle(self, cohort: Cohort) -> None:
        """By :func:`likeliest`; the weights' logarithms are logits of a softmax that is the weights.

        Logarithms of powers stand behind them.
        """
        powers = best_powers(cohort) if self.tempered else None
        first = likeliest(cohort.held_out_losses(powers))
        weights = torch.stack([first, 1 - first], 1).clamp(min=torch.finfo(torch.float32).tiny)
        cohort.tensors[CLIENT_ROUTER].copy_((weights if powers is None else torch.cat([weights, powers], 1)).log())
