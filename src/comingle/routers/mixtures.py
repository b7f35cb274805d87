"""How a user's model is a mixture of components, by one softmax vector per user (a client-level router)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.utils.trees import CLIENT_ROUTER, Tree

Powers = Float[Tensor, "*users clusters"] | None
"""To which components' probabilities are taken, each one over a temperature; None: to the first."""

NEVER = -1e4
"""A logit whose share of a softmax beside zero is exactly zero."""


@dataclass(frozen=True, kw_only=True)
class ClientMixture:
    """C components and a vector pi on the simplex for each user.

    ``of`` says what a component is: adaptors beside a base that all have, or a whole model. ``at`` says where the
    mixture stands: in the weights, so that one pass is enough (FLoRAL's FML), on the components' outputs (an ensemble),
    on their losses (MFL: each component descends on its own, and pi weighs it in the aggregation), on the losses of
    each sample, in shares of which pi is the mean (FedEM), or on their predictions (each component descends on its own
    loss, as if it were alone, and pi weighs probabilities). Of predictions, the placement says how many components are
    shared and how many a user's own, and each has ``experts`` averaged LoRA experts in every MLP of a language model;
    with ``tempered`` each is taken to a power of the user's, whose logarithms stand behind the router's logits.
    With ``optimal`` each user's vector is one-hot at its true cluster. With ``per_layer`` a user has a vector for each
    adapted layer, of adaptors that are mixed in the weights. ``temperature`` divides the router's logits and
    ``noise`` is the deviation of what is added to them in training. ``precondition`` (FLoRAL eq. 36) and ``centre``
    (eq. 37) are options of adaptors.
    """

    clusters: int
    of: Literal["adaptors", "models"] = "adaptors"
    at: Literal["weights", "outputs", "losses", "samples", "predictions"] = "weights"
    experts: int = 1
    tempered: bool = False
    optimal: bool = False
    per_layer: bool = False
    temperature: float = 1.0
    noise: float = 0.0
    precondition: bool = False
    centre: bool = False

    @property
    def merges_models(self) -> bool:
        """Whether whole models are mixed in their weights."""
        return self.of == "models" and self.at == "weights"

    @property
    def trains_apart(self) -> bool:
        """Whether components are whole models that know nothing of each other until they predict."""
        return self.at == "predictions"

    @property
    def numbers(self) -> int:
        """How many a router has for each layer, or for all."""
        return self.clusters * (1 + self.tempered)

    def shares(self, theta: Float[Tensor, "*users numbers"]) -> Float[Tensor, "*users clusters"]:
        """The vector pi that router logits stand for, without noise."""
        return softmax_mixture(theta[..., : self.clusters], self.temperature)

    def powers(self, theta: Float[Tensor, "*users numbers"]) -> Powers:
        """What stands behind the logits."""
        return theta[..., self.clusters :].exp() if self.tempered else None


def mix_probabilities(
    logits: Float[Tensor, "*users clusters batch classes"], shares: Float[Tensor, "*users clusters"]
) -> Float[Tensor, "*users batch classes"]:
    """``log sum_c pi_c softmax(f_c(x))``: logits whose softmax is the mixture of the components' predictions."""
    return (shares.log()[..., None, None] + logits.log_softmax(-1)).logsumexp(-3)


def mix_losses(
    losses: Float[Tensor, "users clusters batch ..."], shares: Float[Tensor, "users clusters"]
) -> Float[Tensor, "users batch ..."]:
    """``-log sum_c pi_c exp(-loss_c)``: what the mixture of the components' predictions loses, in nats.

    Exactly 0 where no component loses anything, as where nothing is predicted.
    """
    weights = shares.log().view(*shares.shape, *(1 for _ in losses.shape[2:])).to(losses)
    return (-torch.logsumexp(weights - losses, 1)).masked_fill((losses == 0).all(1), 0)


def merge_models(tensors: Tree, shares: Float[Tensor, "users clusters"]) -> Tree:
    """``sum_c pi_c w_c`` of whole models (FLoRAL's FML), running statistics too."""
    return {n: torch.einsum("uc,uc...->u...", shares, t) for n, t in tensors.items() if n != CLIENT_ROUTER}


def weigh_gradient(base: Float[Tensor, "users ..."], shares: Float[Tensor, "users clusters"]) -> Tensor:
    """The base once for each component ``(users, clusters, ...)``, with ``pi_c`` of each one's gradient (MFL-WS)."""
    fixed, weights = base.detach().unsqueeze(1), shares.view(*shares.shape, *(1 for _ in base.shape[1:]))
    return fixed + weights * (base.unsqueeze(1) - fixed)


def softmax_mixture(theta: Float[Tensor, "*users clusters"], temperature: float) -> Float[Tensor, "*users clusters"]:
    """``pi_c = exp(theta_c / temperature) / sum_c' exp(theta_c' / temperature)`` (FLoRAL section 5, Algorithm 1)."""
    return (theta / temperature).softmax(-1)
