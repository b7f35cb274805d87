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
    - "generalist" (CoMiGS eq. 10, times 2n): ``c_0 = 2 / ((n-1)^2 + 1)`` for the generalist, which is expert 0, and
      ``c_j = 2 (n-1) / ((n-1)^2 + 1)`` for the others. At n = 2 all weights are 1.

    Args:
        present: Mask of the experts that each user has.
        balance: "uniform" or "generalist".
    """
    weights = present.double()
    if balance == "generalist":
        num_others = weights.sum(-1, keepdim=True) - 1  # n - 1
        weights = weights * num_others.clamp(min=1) * 2 / (num_others**2 + 1)
        weights[:, 0] = (2 / (num_others**2 + 1)).squeeze(-1)
    return weights


def balance_penalty(
    logits: Float[Tensor, "users n experts"],
    picks: Bool[Tensor, "users n experts"],
    present: Bool[Tensor, "users experts"],
    balance: Balance,
) -> Float[Tensor, " users"]:
    """Return each user's load-balancing penalty ``E sum_j c_j f_j P_j`` over its E experts (CoMiGS eq. 10 and 11).

    ``f_j`` is the share of tokens with expert j in their top k, ``P_j`` its mean softmax probability, and ``c_j`` its
    weight (:func:`balance_weights`).

    Args:
        logits: The router's logits, ``n`` tokens per user.
        picks: Mask of each token's top-k experts.
        present: Mask of the experts that each user has.
        balance: "uniform" balances all experts alike, "generalist" weighs the generalist against the specialists.
    """
    f = picks.to(logits.dtype).mean(1)  # (users, experts)
    mean_probability = logits.masked_fill(~present.unsqueeze(1), -torch.inf).softmax(-1).mean(1)
    c = balance_weights(present, balance).to(logits.dtype)
    num_experts = present.sum(-1)  # E
    return num_experts * (c * f * mean_probability).sum(-1)


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
        The gates, which sum to one and are zero outside the top k, and True for the experts in each token's top k.
    """
    is_present = present.unsqueeze(1).expand(logits.shape)
    logits = logits.masked_fill(~is_present, -torch.inf)
    picks = is_present
    num_experts = logits.shape[-1]
    if top_k < num_experts:
        top_experts = logits.topk(top_k, dim=-1).indices
        is_top = torch.zeros_like(is_present).scatter(-1, top_experts, value=True)
        picks = is_top & is_present  # a user may have fewer experts than k
    gates = logits.masked_fill(~picks, -torch.inf).softmax(-1)
    return gates, picks


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
        """Return the gates of the tokens ``x``, in float32 or wider; without :attr:`weight` equal for all experts."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.weight is None:
            num_tokens = x.shape[1]
            gates = uniform_gates(self.present).to(dtype)
            return gates.unsqueeze(1).expand(-1, num_tokens, -1)
        logits = torch.bmm(x, self.weight.to(x.dtype).mT).to(dtype)
        return self.choose(logits, x)

    def choose(
        self, logits: Float[Tensor, "users n _"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Return the gates for given logits, and set the load-balancing penalty of the pass.

        Args:
            logits: Products of ``x`` with :attr:`weight`, one logit per row of the weight.
            x: Input of the router, which a method's own gating function (``self.gating``) may read.
        """
        if self.gating is not None:
            gates = self.gating(self, logits, x)  # may set the penalty
        else:
            gates, picks = gate(logits, self.present, self.top_k)
            self.penalty = None
            if self.has_penalty:
                self.penalty = balance_penalty(logits, picks, self.present, self.balance)
        if self.record_gates:
            self.gates = gates.detach()
        return gates

    @property
    def has_penalty(self) -> bool:
        """True if the load-balancing penalty must be computed: there is one, and it depends on the router."""
        experts = self.present.shape[-1]
        if self.balance == "none":
            return False
        if self.top_k < experts:
            return True
        # Every token chooses all experts. The penalty is a weighted sum of each expert's share of the tokens (here 1)
        # times its mean probability, so "uniform" is constant, as the probabilities sum to 1. So is "generalist" with
        # two experts, which have equal weights.
        return self.balance == "generalist" and experts > 2


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
    - "losses": the components' losses (MFL); each component descends on its own loss, and the server weighs the
      user's component by pi when it aggregates.
    - "samples": the losses of each sample, in shares whose mean is pi (FedEM).
    - "predictions": the components' probabilities; each component trains on its own loss as if it were alone. The
      method's placement says how many components are shared and how many are local.

    Args:
        clusters: Number C of components.
        of: What a component is: a set of adaptors beside a common base, or a whole model.
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
        """True if each user's model is the weighted mean of whole models' weights, not of adaptors beside one base."""
        return self.of == "models" and self.at == "weights"

    @property
    def trains_independently(self) -> bool:
        """True if components are trained separately, and only their predictions are mixed."""
        return self.at == "predictions"

    @property
    def num_logits(self) -> int:
        """Number of router parameters of a user, per layer if ``per_layer``.

        There is one logit per component, and with ``tempered`` also one temperature per component.
        """
        return 2 * self.clusters if self.tempered else self.clusters

    def shares(self, theta: Float[Tensor, "*users logits"]) -> Float[Tensor, "*users clusters"]:
        """Return the mixture weights pi, without noise.

        Args:
            theta: The router's parameters: ``clusters`` logits, and if ``tempered`` as many logarithms of exponents.
        """
        logits = theta[..., : self.clusters]
        return softmax_mixture(logits, self.temperature)

    def powers(self, theta: Float[Tensor, "*users logits"]) -> Powers:
        """Return the exponents of the components' probabilities; None unless ``tempered``.

        Args:
            theta: The router's parameters: a logit of each component, then the logarithm of each component's exponent.
        """
        if not self.tempered:
            return None
        log_powers = theta[..., self.clusters :]
        return log_powers.exp()


def mix_probabilities(
    logits: Float[Tensor, "*users clusters batch classes"], shares: Float[Tensor, "*users clusters"]
) -> Float[Tensor, "*users batch classes"]:
    """Return ``log sum_c pi_c softmax(f_c(x))``: logits whose softmax is the mixture of the components' predictions.

    Args:
        logits: Logits f_c of component c.
        shares: Mixture weights pi.
    """
    log_pi = shares.log()[..., None, None]  # (*users, clusters, 1, 1)
    return (log_pi + logits.log_softmax(-1)).logsumexp(-3)  # over clusters


def mix_losses(
    losses: Float[Tensor, "users clusters batch ..."], shares: Float[Tensor, "users clusters"]
) -> Float[Tensor, "users batch ..."]:
    """Return ``-log sum_c pi_c exp(-loss_c)``: the loss in nats of the mixture of the components' predictions.

    Args:
        losses: Loss of each component in nats; 0 at positions without a target.
        shares: Mixture weights pi.
    """
    num_inner_axes = losses.dim() - 2
    log_pi = shares.log().view(*shares.shape, *[1] * num_inner_axes).to(losses)
    mixed = -torch.logsumexp(log_pi - losses, 1)
    has_no_target = (losses == 0).all(1)
    return mixed.masked_fill(has_no_target, 0)  # exactly 0, without rounding errors


def merge_models(tensors: Tree, shares: Float[Tensor, "users clusters"]) -> Tree:
    """Return each user's weighted mean of whole models, ``sum_c pi_c w_c`` ("FML" in FLoRAL).

    Running statistics of norms are averaged too.

    Args:
        tensors: Tensors w ``(users, clusters, ...)`` by name, and the router, which is left out.
        shares: Mixture weights pi.
    """
    merged = {}
    for name, w in tensors.items():
        if name != CLIENT_ROUTER:
            merged[name] = torch.einsum("uc,uc...->u...", shares, w)
    return merged


def weigh_gradient(base: Float[Tensor, "users ..."], shares: Float[Tensor, "users clusters"]) -> Tensor:
    """Return a copy of a base's tensor for each component, whose gradient through component c is weighted by ``pi_c``.

    So a base that all components share gets the gradient of the mixture (weight sharing, FLoRAL's MFL-WS).

    Args:
        base: One tensor of the users' bases.
        shares: Mixture weights pi.

    Returns:
        The copies, ``(users, clusters, ...)``.
    """
    value = base.detach().unsqueeze(1)
    num_inner_axes = base.dim() - 1
    pi = shares.view(*shares.shape, *[1] * num_inner_axes)
    zero = base.unsqueeze(1) - value  # with the gradient of `base`
    return value + pi * zero


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
