"""Clipping: each user's change, all its tensors together, to an L2 norm."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.utils.trees import Tree


def norms(changes: Tree) -> Float[Tensor, " users"]:
    """L2 norm of everything that a user would send, float64, so that a cohort's are those of its users alone."""
    return torch.stack([t.double().reshape(len(t), -1).square().sum(1) for t in changes.values()]).sum(0).sqrt()


def scaled(changes: Tree, factors: Float[Tensor, " users"]) -> Tree:
    """Each user's tensors times a number of its own, float64."""
    return {name: t.double() * factors.view(-1, *[1] * (t.dim() - 1)).to(t.device) for name, t in changes.items()}


def clipped(changes: Tree, bound: Float[Tensor, " users"] | float) -> Tree:
    """``change * min(1, bound / norm)``, float64; what is not finite becomes zero."""
    lengths = norms(changes)
    factors = (bound / lengths.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    kept = scaled(changes, torch.where(lengths.isfinite(), factors, 0.0))
    return {name: t.nan_to_num_(0.0, 0.0, 0.0) for name, t in kept.items()}  # of finite changes nothing is changed


def without_padding(tree: Tree, ranks: Tensor) -> Tree:
    """LoRA factors ``(users, ..., rank, width)`` with zeros beyond each user's rank; 0 stands for no LoRA."""
    if not bool(ranks.any()):
        return tree
    return {name: t * _real(t, ranks) if name.endswith((".a", ".b")) else t for name, t in tree.items()}


def _real(factor: Tensor, ranks: Tensor) -> Tensor:
    within = torch.arange(factor.shape[-2], device=factor.device) < ranks.to(factor.device).unsqueeze(1)
    return within.view(len(ranks), *[1] * (factor.dim() - 3), factor.shape[-2], 1).to(factor)
