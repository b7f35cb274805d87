"""FedEx-LoRA: the mean of the factors, and in the weights what makes it the mean of the products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client
from comingle.methods.cohort import Phase
from comingle.methods.server import MODEL_PREFIX, Mean, Received
from comingle.methods.settings import CountOrNone
from comingle.models.lora import IN, OUT, RESIDUAL
from comingle.utils.trees import ATTENTION, GENERALIST, Tree, lora_pairs

LORA = frozenset({ATTENTION, GENERALIST})


def fedex_lora(*, residual_rank: CountOrNone = 0) -> Method:
    """FedEx-LoRA: A and B are averaged, and what that misses, ``mean(B_i A_i) - mean(B) mean(A)``, goes into weights.

    Source: Singhal et al. 2024, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
    Models", arXiv:2410.09432, section 3: W = W_0 + the sum of all rounds' residuals.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base, and each weight's residual,
    which comes from the server.
    Client: joint steps on training text.  Server: means of A and of B; the sum of all residuals.
    Differs from the paper: the residual stands beside the base, as two factors, instead of being added to it; a
    download has the sum of all rounds' residuals, as users may have been absent, the paper's that of one round.  With
    ``residual_rank`` it is the best approximation of that rank, once a round; 0 is exact.  Users have one rank.
    """
    return Method(
        name="fedex-lora",
        placement=Placement(generalists=2, shared=LORA, received=LORA | {RESIDUAL}, residual=residual_rank),
        client=Client(phases=(Phase(roles=LORA),)),
        server=ExactMean(),
    )


@dataclass(frozen=True, kw_only=True)
class ExactMean(Mean):
    """The mean of A and of B, and the residual of the weights."""

    kind = "stack"
    clipped_mean = False
    knows_starts = False
    one_rank = True

    def aggregate(self, kept: Tree, received: Received) -> None:
        """``R + s sum_i p_i B_i A_i - s mean(B) mean(A)`` in place of R, then both means."""
        super().aggregate(kept, received)
        for name, a, b in lora_pairs(received.tensors):
            mean_a, mean_b = kept[f"{MODEL_PREFIX}{name}.a"], kept[f"{MODEL_PREFIX}{name}.b"]
            weights = received.weights * received.scales
            parts = [(t, b[i] * float(weights[i])) for i, t in enumerate(a)]
            add_to(kept, name, [*parts, (mean_a, -float(received.scales[0]) * mean_b)])


def add_to(kept: Tree, name: str, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add products ``A^T B`` of some (A, B) to a weight's residual."""
    ends = kept[f"{MODEL_PREFIX}{name}.{IN}"], kept[f"{MODEL_PREFIX}{name}.{OUT}"]
    change = sum((a.mT @ b for a, b in parts), ends[0].mT @ ends[1])
    for end, t in zip(ends, factored(change, ends[0].shape[-2]), strict=True):
        end.copy_(t)


def factored(
    change: Float[Tensor, "*experts d_in d_out"], rank: int
) -> tuple[Float[Tensor, "*experts rank d_in"], Float[Tensor, "*experts rank d_out"]]:
    """Factors of ``change = I^T O``: exact where the rank is that of the smaller side, else the best of that rank."""
    d_in, d_out = change.shape[-2:]
    one = torch.eye(min(d_in, d_out), dtype=change.dtype, device=change.device).expand(*change.shape[:-2], -1, -1)
    if rank >= min(d_in, d_out):
        first, second = (one, change) if d_in <= d_out else (change.mT, one)
        missing = (0, 0, 0, rank - min(d_in, d_out))
        return torch.nn.functional.pad(first, missing), torch.nn.functional.pad(second, missing)
    left, values, right = torch.linalg.svd(change, full_matrices=False)
    return left[..., :rank].mT, (values.unsqueeze(-1) * right)[..., :rank, :]
