"""The token-level router: one bias-free linear map per block and user.

``p_j(x) = softmax over the top k of (phi x)_j`` (CoMiGS eq. 1, App. B), or as a method weighs experts (``gating``).
Logits may come from bf16 products; gates are float32 at least, because those that nearly tie decide between experts.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from comingle.config.settings import Balance, Gating
from comingle.routers.penalties import balance_penalty


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
