"""Token-level and client-level routers, and load-balancing penalties.

``p_j(x) = softmax over the top k of (phi x)_j`` (CoMiGS eq. 1, App. B), or as a method weighs experts (``gating``).
Logits may come from bf16 products; gates are float32 at least, because those that nearly tie decide between experts.

``pi = softmax((theta + noise) / temperature)`` (FLoRAL section 5, "Learning the mixture weights"). Theta starts at
zero, so the clusters start equal; pi is never clamped (the public code cuts it at 0.01 without renormalising, which
loses the gradient below). The noise is Gaussian and off by default: the paper names none, the public code adds uniform
noise in [0, 1) by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from comingle.config.settings import Balance, Gating
from comingle.utils.errors import RecipeError, is_number
from comingle.utils.trees import CLIENT_ROUTER, Tree


def balance_weights(present: Bool[Tensor, "users experts"], balance: Balance) -> Float[Tensor, "users experts"]:
    """The importance ``c_j`` of each expert's term, n = number of experts of the user.

    ``uniform``: 1 (Fedus et al. 2022). ``generalist`` (CoMiGS eq. 10, expert 0 is the generalist):
    ``c_0 = 2 / ((n-1)^2 + 1)``, ``c_j = 2 (n-1) / ((n-1)^2 + 1)``. The factor 2 makes both forms coincide at n = 2,
    as the paper says they do; eq. 10 as printed is this divided by 2n.

    The public code, with expert 0 half as important as all and two experts a token, has the same sum ``f_0 P_0 + (n-1)
    sum_j f_j P_j`` times 1 where ours has ``2 n / ((n-1)^2 + 1)``: 6/5 with three experts, 8/10 with four.
    """
    weights = present.double()
    if balance == "generalist":
        others = weights.sum(-1, keepdim=True) - 1
        weights = weights * others.clamp(min=1) * 2 / (others**2 + 1)
        weights[:, 0] = (2 / (others**2 + 1)).squeeze(-1)
    return weights


def balance_penalty(
    logits: Float[Tensor, "users n experts"],
    picks: Bool[Tensor, "users n experts"],
    present: Bool[Tensor, "users experts"],
    balance: Balance,
) -> Float[Tensor, " users"]:
    """``n sum_j c_j f_j P_j`` for each user, n = number of experts (CoMiGS eq. 10 and 11).

    ``f_j`` is the share of tokens that pick expert j, ``P_j`` the mean of its softmax probability over all of the
    user's experts. With two experts that every token picks, the sum is constant and its gradient zero.
    """
    share = picks.to(logits.dtype).mean(1)
    probability = logits.masked_fill(~present.unsqueeze(1), -torch.inf).softmax(-1).mean(1)
    weights = balance_weights(present, balance).to(logits.dtype)
    return present.sum(-1) * (weights * share * probability).sum(-1)


def init_router(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """N(0, 0.02^2), as GPT-2 initialises its linears."""
    return torch.randn(shape, generator=generator) * 0.02


def gate(
    logits: Float[Tensor, "users n experts"], present: Bool[Tensor, "users experts"], top_k: int
) -> tuple[Float[Tensor, "users n experts"], Bool[Tensor, "users n experts"]]:
    """Softmax over each token's ``top_k`` largest logits among the experts that its user has.

    Returns the gates (zero off the top k; they sum to one) and the mask of the picks.
    """
    logits = logits.masked_fill(~present.unsqueeze(1), -torch.inf)
    picks = present.unsqueeze(1).expand(logits.shape)
    if top_k < logits.shape[-1]:
        top = logits.topk(top_k, dim=-1).indices
        picks = torch.zeros_like(picks).scatter(-1, top, True) & picks
    return logits.masked_fill(~picks, -torch.inf).softmax(-1), picks


def uniform_gates(present: Bool[Tensor, "users experts"]) -> Float[Tensor, "users experts"]:
    """What a method without a router uses: the average of the experts that a user has."""
    return present.double() / present.sum(-1, keepdim=True)


class Router(nn.Module):
    """One block's router; everything is bound before a forward pass.

    ``weight`` is ``(users, experts, width)``, of as many rows as a method's own ``gating`` has, or None (then the
    experts are averaged), ``present`` marks the experts that each user has, ``keys`` are their LoRA's A that read what
    the router reads, ``(users, experts, rank, width)``. After a forward pass ``penalty`` holds each user's
    load-balancing penalty ``(users,)``, and, where ``watched``, ``gates`` the pass's gates ``(users, n, experts)``.
    """

    weight: Tensor | None = None
    present: Tensor
    keys: Tensor
    gating: Gating | None = None
    top_k: int = 2
    balance: Balance = "none"
    penalty: Tensor | None = None
    watched: bool = False
    gates: Tensor | None = None

    def forward(self, x: Float[Tensor, "users n width"]) -> Float[Tensor, "users n experts"]:
        """Gates, float32 at least."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.weight is None:
            gates = uniform_gates(self.present).to(wide)
            return gates.unsqueeze(1).expand(-1, x.shape[1], -1)
        return self.choose(torch.bmm(x, self.weight.to(x.dtype).mT).to(wide), x)

    def choose(
        self, logits: Float[Tensor, "users n _"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Gates out of logits that somebody has computed from ``x``, as many as :attr:`weight` has rows."""
        if self.gating is not None:
            gates = self.gating(self, logits, x)
        else:
            gates, picks = gate(logits, self.present, self.top_k)
            self.penalty = balance_penalty(logits, picks, self.present, self.balance) if self.balances else None
        if self.watched:
            self.gates = gates.detach()
        return gates

    @property
    def balances(self) -> bool:
        """Whether a penalty can have a gradient: where every expert is always picked, only unequal weights have one."""
        experts = self.present.shape[-1]
        unequal = self.balance == "generalist" and experts > 2
        return self.balance != "none" and (self.top_k < experts or unequal)


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


class ClientRouter(nn.Module):
    """One user's mixture over the clusters, or one for each of so many ``layers``.

    ``noise`` is the standard deviation of Gaussian noise on theta, drawn from torch's global stream at each call of
    :meth:`mixture` in training mode; under ``torch.func.vmap`` that needs ``randomness="different"``.

    Raises:
        RecipeError: fewer than one cluster, a temperature that is not positive, or a negative noise.
    """

    def __init__(
        self,
        num_clusters: int,
        *,
        temperature: float = 1.0,
        noise: float = 0.0,
        layers: int | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if isinstance(num_clusters, bool) or not isinstance(num_clusters, int) or num_clusters < 1:
            raise RecipeError(f"num_clusters: got {num_clusters!r}, needs a whole number of at least 1")
        if not (is_number(temperature) and temperature > 0):
            raise RecipeError(f"router temperature: got {temperature!r}, needs a finite number above 0")
        if not (is_number(noise) and noise >= 0):
            raise RecipeError(f"router noise: got {noise!r}, needs a finite standard deviation of at least 0")
        self.theta = nn.Parameter(torch.zeros(*(() if layers is None else (layers,)), num_clusters, dtype=dtype))
        self.temperature = temperature
        self.noise = noise

    def mixture(self) -> Float[Tensor, "*layers clusters"]:
        """``softmax((theta + noise) / temperature)``; the noise in training mode only."""
        theta = self.theta
        if self.training and self.noise > 0:
            theta = theta + self.noise * torch.randn_like(theta)
        return softmax_mixture(theta, self.temperature)

    def forward(self) -> Float[Tensor, "*layers clusters"]:
        """:meth:`mixture`."""
        return self.mixture()

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"num_clusters={self.theta.shape[-1]}, temperature={self.temperature}, noise={self.noise}"
