"""Load balancing: keep a router from sending every token to the same expert."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comingle.config.settings import Balance


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
