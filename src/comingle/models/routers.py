"""Token-level and client-level routers, and load-balancing penalties.

Token level: ``p_j(x) = softmax over the top k of (phi x)_j`` (CoMiGS eq. 1, App. B), unless a method defines its own
``gating``. Logits may come from bfloat16 products. Gates are float32 or wider, because near ties decide between
experts.

Client level: ``pi = softmax((theta + noise) / temperature)`` (FLoRAL section 5, "Learning the mixture weights"). Theta
starts at zero, so all clusters start equal. Pi is never clamped; the public code clamps it at 0.01 without
renormalising, which loses the gradient below. The noise is Gaussian and off by default; the paper mentions none, and
the public code adds uniform noise in [0, 1) by default.
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
    """Return the weight ``c_j`` of each expert j in the load-balancing penalty ``n sum_j c_j f_j P_j``.

    n is the number of the user's experts, f_j the share of tokens that pick expert j, P_j its mean probability. Forms:

    - "uniform": all weights are 1 (Fedus et al. 2022).
    - "generalist" (CoMiGS eq. 10): ``c_0 = 2 / ((n-1)^2 + 1)`` for the generalist, which is expert 0, and
      ``c_j = 2 (n-1) / ((n-1)^2 + 1)`` for the others. The factor 2 makes both forms equal at n = 2, as the paper
      states; eq. 10 as printed is this divided by 2n.

    In the form "generalist" the penalty is ``f_0 P_0 + (n-1) sum_{j>0} f_j P_j`` times ``2 n / ((n-1)^2 + 1)``, which
    is 6/5 with three experts and 8/10 with four. CoMiGS's public code has the same sum without this factor.

    Args:
        present: Mask of the experts that each user has.
        balance: "uniform" or "generalist".
    """
    weights = present.double()
    if balance == "generalist":
        others = weights.sum(-1, keepdim=True) - 1  # n - 1
        # A user without specialists keeps its generalist's weight, which is set below.
        weights = weights * others.clamp(min=1) * 2 / (others**2 + 1)
        weights[:, 0] = (2 / (others**2 + 1)).squeeze(-1)
    return weights


def balance_penalty(
    logits: Float[Tensor, "users n experts"],
    picks: Bool[Tensor, "users n experts"],
    present: Bool[Tensor, "users experts"],
    balance: Balance,
) -> Float[Tensor, " users"]:
    """Return each user's load-balancing penalty ``n sum_j c_j f_j P_j`` over its n experts (CoMiGS eq. 10 and 11).

    ``f_j`` is the share of tokens that pick expert j, ``P_j`` the mean of its softmax probability over all of the
    user's experts, ``c_j`` its weight (:func:`balance_weights`). With two experts that every token picks, the sum is
    constant and its gradient zero.

    Args:
        logits: The router's logits, ``n`` tokens per user.
        picks: Mask of the experts that each token picks.
        present: Mask of the experts that each user has.
        balance: "uniform" balances all experts alike, "generalist" weighs the generalist against the specialists.
    """
    share = picks.to(logits.dtype).mean(1)  # (users, experts)
    probability = logits.masked_fill(~present.unsqueeze(1), -torch.inf).softmax(-1).mean(1)
    weights = balance_weights(present, balance).to(logits.dtype)
    return present.sum(-1) * (weights * share * probability).sum(-1)


def init_router(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from N(0, 0.02^2), as GPT-2 initialises its linears."""
    return torch.randn(shape, generator=generator) * 0.02


def gate(
    logits: Float[Tensor, "users n experts"], present: Bool[Tensor, "users experts"], top_k: int
) -> tuple[Float[Tensor, "users n experts"], Bool[Tensor, "users n experts"]]:
    """Return the softmax over each token's ``top_k`` largest logits among its user's experts.

    Args:
        logits: The router's logits, ``n`` tokens per user.
        present: Mask of the experts that each user has.
        top_k: Experts per token.

    Returns:
        The gates, which sum to one and are zero outside the top k, and the mask of the picks.
    """
    logits = logits.masked_fill(~present.unsqueeze(1), -torch.inf)
    picks = present.unsqueeze(1).expand(logits.shape)
    if top_k < logits.shape[-1]:
        top = logits.topk(top_k, dim=-1).indices
        # A user may have fewer experts than k, so that absent experts are among the top.
        picks = torch.zeros_like(picks).scatter(-1, top, True) & picks
    return logits.masked_fill(~picks, -torch.inf).softmax(-1), picks


def uniform_gates(present: Bool[Tensor, "users experts"]) -> Float[Tensor, "users experts"]:
    """Return equal gates over each user's experts, for methods without a router."""
    return present.double() / present.sum(-1, keepdim=True)


class Router(nn.Module):
    """The router of one block; set its attributes before a forward pass.

    ``weight`` is ``(users, experts, width)``, or has the rows that a method's ``gating`` needs; None averages the
    experts. ``present`` marks the experts that each user has. ``keys`` are the experts' factors A that read the
    router's input, ``(users, experts, rank, width)``. A forward pass sets ``penalty``, each user's load-balancing
    penalty ``(users,)``, and, if ``record_gates``, ``gates`` ``(users, n, experts)``.
    """

    weight: Tensor | None = None
    present: Tensor
    keys: Tensor
    gating: Gating | None = None
    top_k: int = 2
    balance: Balance = "none"
    penalty: Tensor | None = None
    record_gates: bool = False
    gates: Tensor | None = None

    def forward(self, x: Float[Tensor, "users n width"]) -> Float[Tensor, "users n experts"]:
        """Return the gates of the tokens ``x``, in float32 or wider.

        Without :attr:`weight` they are equal for all of a user's experts, otherwise they follow from the logits ``W x``
        (:meth:`choose`).
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.weight is None:
            gates = uniform_gates(self.present).to(dtype)
            return gates.unsqueeze(1).expand(-1, x.shape[1], -1)
        return self.choose(torch.bmm(x, self.weight.to(x.dtype).mT).to(dtype), x)

    def choose(
        self, logits: Float[Tensor, "users n _"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Return the gates for given logits, and set the load-balancing penalty of the pass.

        A method's own :attr:`gating` may compute gates in another way, and set :attr:`penalty` itself.

        Args:
            logits: Products of ``x`` with :attr:`weight`, one logit per row of the weight.
            x: Input of the router, which some gatings read too.
        """
        if self.gating is not None:
            gates = self.gating(self, logits, x)
        else:
            gates, picks = gate(logits, self.present, self.top_k)
            self.penalty = balance_penalty(logits, picks, self.present, self.balance) if self.balances else None
        if self.record_gates:
            self.gates = gates.detach()
        return gates

    @property
    def balances(self) -> bool:
        """Whether the penalty can have a gradient; if every expert is always picked, only unequal weights give one."""
        experts = self.present.shape[-1]
        has_unequal_weights = self.balance == "generalist" and experts > 2  # with two both weights are 1
        return self.balance != "none" and (self.top_k < experts or has_unequal_weights)


Powers = Float[Tensor, "*users clusters"] | None
"""Exponent of each component's probabilities (an inverse temperature); None for 1."""

ZERO_SHARE_LOGIT = -1e4
"""Logit whose softmax beside a logit of zero is exactly zero."""


@dataclass(frozen=True, kw_only=True)
class ClientMixture:
    """A mixture of C components, with a vector pi on the simplex for each user.

    ``at`` is the level at which components are mixed:

    - "weights": one pass with mixed weights (FLoRAL's FML).
    - "outputs": the components' outputs (an ensemble).
    - "losses": the components' losses (MFL); each component descends on its own loss, and pi weighs it in the
      aggregation.
    - "samples": the losses of each sample, in shares whose mean is pi (FedEM).
    - "predictions": the components' probabilities; each component trains on its own loss as if it were alone. The
      placement says how many components are shared and how many are local.

    Args:
        clusters: Number C of components.
        of: A component is a set of adaptors beside a common base, or a whole model.
        at: Level at which components are mixed.
        experts: For "predictions": number of averaged LoRA experts of each component in every MLP.
        tempered: For "predictions": each user has an exponent for each component's probabilities. Their logarithms
            follow the router's logits.
        optimal: Each user's vector is one-hot at its true cluster.
        per_layer: Each user has a vector for each adapted layer; only for adaptors that are mixed in the weights.
        temperature: Divisor of the router's logits.
        noise: Standard deviation of the noise added to the logits in training.
        precondition: Precondition the adaptors' gradients (FLoRAL eq. 36).
        centre: Centre the adaptors (FLoRAL eq. 37).
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
    def trains_independently(self) -> bool:
        """Whether components are whole models that train independently and are mixed only in their predictions."""
        return self.at == "predictions"

    @property
    def num_logits(self) -> int:
        """Number of router parameters of a user, per layer if ``per_layer``."""
        return self.clusters * (1 + self.tempered)

    def shares(self, theta: Float[Tensor, "*users logits"]) -> Float[Tensor, "*users clusters"]:
        """Return pi for the router's logits, without noise."""
        return softmax_mixture(theta[..., : self.clusters], self.temperature)

    def powers(self, theta: Float[Tensor, "*users logits"]) -> Powers:
        """Return the exponents whose logarithms follow the logits; None unless ``tempered``."""
        return theta[..., self.clusters :].exp() if self.tempered else None


def mix_probabilities(
    logits: Float[Tensor, "*users clusters batch classes"], shares: Float[Tensor, "*users clusters"]
) -> Float[Tensor, "*users batch classes"]:
    """Return ``log sum_c pi_c softmax(f_c(x))``: logits whose softmax is the mixture of the components' predictions.

    Args:
        logits: Logits f_c of each component.
        shares: Mixture weights pi.
    """
    return (shares.log()[..., None, None] + logits.log_softmax(-1)).logsumexp(-3)


def mix_losses(
    losses: Float[Tensor, "users clusters batch ..."], shares: Float[Tensor, "users clusters"]
) -> Float[Tensor, "users batch ..."]:
    """Return ``-log sum_c pi_c exp(-loss_c)``: the loss in nats of the mixture of the components' predictions.

    Exactly 0 where all components' losses are 0, as at positions without a target.

    Args:
        losses: Loss of each component in nats.
        shares: Mixture weights pi.
    """
    weights = shares.log().view(*shares.shape, *(1 for _ in losses.shape[2:])).to(losses)
    return (-torch.logsumexp(weights - losses, 1)).masked_fill((losses == 0).all(1), 0)


def merge_models(tensors: Tree, shares: Float[Tensor, "users clusters"]) -> Tree:
    """Return ``sum_c pi_c w_c`` of whole models (FLoRAL's FML), running statistics included."""
    return {n: torch.einsum("uc,uc...->u...", shares, t) for n, t in tensors.items() if n != CLIENT_ROUTER}


def weigh_gradient(base: Float[Tensor, "users ..."], shares: Float[Tensor, "users clusters"]) -> Tensor:
    """Return a tensor of the base once per component, so that the gradient through component c has the weight ``pi_c``.

    Each component's loss is computed alone. A base that all components share then gets the gradient of the mixture
    (weight sharing, FLoRAL's MFL-WS).

    Args:
        base: One tensor of the users' bases.
        shares: Mixture weights pi.

    Returns:
        The copies, ``(users, clusters, ...)``.
    """
    value, weights = base.detach().unsqueeze(1), shares.view(*shares.shape, *(1 for _ in base.shape[1:]))
    return value + weights * (base.unsqueeze(1) - value)  # the difference is zero, but has a gradient


def softmax_mixture(theta: Float[Tensor, "*users clusters"], temperature: float) -> Float[Tensor, "*users clusters"]:
    """Return the mixture weights ``pi = softmax(theta / temperature)`` (FLoRAL section 5, Algorithm 1).

    Args:
        theta: The router's logits.
        temperature: Divisor of the logits.
    """
    return (theta / temperature).softmax(-1)


class ClientRouter(nn.Module):
    """One user's mixture over the clusters, or one for each layer.

    Args:
        num_clusters: Number of clusters.
        temperature: Divisor of theta.
        noise: Standard deviation of Gaussian noise on theta. Each call of :meth:`mixture` in training mode draws it
            from torch's global generator, which under ``torch.func.vmap`` requires ``randomness="different"``.
        layers: Number of layers; None for a single mixture.
        dtype: Dtype of theta.

    Raises:
        RecipeError: The number of clusters is less than 1, the temperature not positive, or the noise negative.
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
        """Create the logits theta, which start at zero, so that all clusters have equal weights.

        Args:
            num_clusters: Number of clusters.
            temperature: Divisor of the logits.
            noise: Standard deviation of the noise that is added to the logits in training.
            layers: Number of adapted layers, for a mixture of each; None for one mixture of all layers.
            dtype: Dtype of the logits.

        Raises:
            RecipeError: An argument is out of range.
        """
        super().__init__()
        if isinstance(num_clusters, bool) or not isinstance(num_clusters, int) or num_clusters < 1:
            raise RecipeError(f"num_clusters: got {num_clusters!r}; allowed: a whole number of at least 1")
        if not (is_number(temperature) and temperature > 0):
            raise RecipeError(f"router temperature: got {temperature!r}; allowed: a finite number above 0")
        if not (is_number(noise) and noise >= 0):
            raise RecipeError(f"router noise: got {noise!r}; allowed: a finite standard deviation of at least 0")
        shape = (num_clusters,) if layers is None else (layers, num_clusters)
        self.theta = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.temperature = temperature
        self.noise = noise

    def mixture(self) -> Float[Tensor, "*layers clusters"]:
        """Return ``softmax((theta + noise) / temperature)``, with noise only in training mode."""
        theta = self.theta
        if self.training and self.noise > 0:
            theta = theta + self.noise * torch.randn_like(theta)
        return softmax_mixture(theta, self.temperature)

    def forward(self) -> Float[Tensor, "*layers clusters"]:
        """Return :meth:`mixture`."""
        return self.mixture()

    def extra_repr(self) -> str:
        """Return the settings for ``print(model)``."""
        return f"num_clusters={self.theta.shape[-1]}, temperature={self.temperature}, noise={self.noise}"
