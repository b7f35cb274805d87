"""FlexLoRA: the server averages true weight changes and gives everybody the best approximation of their own rank."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.adapters.inject import ATTENTION, GENERALIST
from comingle.methods.base import Context, Method
from comingle.methods.clients import joint
from comingle.trees import Tree, lora_pairs


def flexlora() -> Method:
    """FlexLoRA: users of different ranks; the mean weight change is cut to each user's rank by its singular values.

    Source: Bai et al. 2024, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
    Resources", arXiv:2402.11505; in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.3.  Ranks are ``adapters.rank``.
    Shared: attention, 1 LoRA expert per MLP.  Local: nothing.  Frozen: the base.
    Client: joint steps on training text.
    Server: dW = sum_u p_u s_u B_u A_u = U S V; user u gets A = the first rows of V, B = the first columns of U S / s_u.
    Differs from the paper: the rank-stabilised scale s_u = alpha / sqrt(rank) of the forward pass is part of dW; dW
    itself is never formed, its singular values come from those of a matrix as small as the sum of all ranks.
    """
    return Method(
        name="flexlora",
        generalists=1,
        shared=frozenset({ATTENTION, GENERALIST}),
        phases=joint(routed=False),
        server=redistribute,
    )


def redistribute(uploads: Tree, context: Context) -> Tree:
    """One linear after the other; padding beyond a user's rank is left for the engine to cut off."""
    downloads = {}
    for name, a, b in lora_pairs(uploads):
        downloads[f"{name}.a"], downloads[f"{name}.b"] = mean_factors(a, b, context.weights, context.scales)
    return downloads


def mean_factors(
    a: Float[Tensor, "users *experts rank d_in"],
    b: Float[Tensor, "users *experts rank d_out"],
    weights: Float[Tensor, " users"],
    scales: Float[Tensor, " users"],
) -> tuple[Float[Tensor, "users *experts rank d_in"], Float[Tensor, "users *experts rank d_out"]]:
    """Each user's factors of the mean ``sum_u weights_u scales_u A_u^T B_u``, largest singular values first.

    With ``A^T = Q R`` and ``B^T = P T`` of all users side by side, the mean is ``Q (R D T^T) P^T``: only the core, as
    wide as the users' ranks together, is decomposed.
    """
    users, rank = a.shape[0], a.shape[-2]
    each = (weights * scales).to(a).view(-1, *[1] * (a.dim() - 1))
    q, r = torch.linalg.qr(_side_by_side(a).mT)
    p, t = torch.linalg.qr(_side_by_side(b * each).mT)
    left, singular, right = torch.linalg.svd(r @ t.mT, full_matrices=False)
    new_a = _first((q @ left).mT, rank)
    new_b = _first(singular.unsqueeze(-1) * (right @ p.mT), rank)
    signs = _signs(new_a)
    new_a, new_b = new_a * signs, new_b * signs
    shares = scales.to(b).view(-1, *[1] * (b.dim() - 1))
    return new_a.expand(users, *new_a.shape), new_b / shares


def _side_by_side(factors: Float[Tensor, "users *experts rank width"]) -> Float[Tensor, "*experts ranks width"]:
    return torch.cat(factors.unbind(0), dim=-2)


def _signs(rows: Float[Tensor, "*experts rank width"]) -> Float[Tensor, "*experts rank 1"]:
    """-1 or 1 for each row, so that its largest entry becomes positive.

    A decomposition leaves the sign open, and optimisers remember it: it must not follow from who is first.
    """
    largest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0).to(rows)


def _first(factors: Float[Tensor, "*experts found width"], rank: int) -> Float[Tensor, "*experts rank width"]:
    """The first ``rank`` rows; zeros where there are fewer."""
    missing = max(0, rank - factors.shape[-2])
    return torch.nn.functional.pad(factors[..., :rank, :], (0, 0, 0, missing))
