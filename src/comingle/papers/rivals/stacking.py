"""A model that is averaged and a model of one's own, trained apart, whose predictions each user weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, Part, joint
from comingle.methods.cohort import ROUTERS, Cohort
from comingle.methods.server import Mean, Server
from comingle.methods.settings import Range
from comingle.models.routers import ClientMixture
from comingle.papers.rivals.likelihood import best_powers, likeliest
from comingle.utils.trees import CLIENT_ROUTER, GENERALIST

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
class Likeliest(Part):
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
