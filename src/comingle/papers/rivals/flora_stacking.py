"""FLoRA by stacking: everybody's LoRA side by side go into the weights, and everybody starts anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, Part
from comingle.methods.cohort import Cohort, Phase
from comingle.methods.server import Mean, Received
from comingle.methods.settings import CountOrNone
from comingle.models.lora import RESIDUAL, init_a
from comingle.papers.rivals.fedex import add_to
from comingle.utils.seeds import generator
from comingle.utils.trees import ATTENTION, GENERALIST, Tree, lora_pairs

LORA = frozenset({ATTENTION, GENERALIST})


def flora_stacking(*, residual_rank: CountOrNone = 0) -> Method:
    """FLoRA: the stack of everybody's LoRA, ``sum_i p_i B_i A_i`` without error, goes into the weights each round.

    Source: Wang et al. 2024, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
    Adaptations", arXiv:2409.05976, Algorithm 1.  Ranks are ``adapters.rank``: each user's own, if it is a list.
    Shared: attention, 2 averaged LoRA experts per MLP, for the stack.  Local: nothing.  Frozen: the base, and what all
    stacks have added to each weight, which comes from the server.
    Client: takes the weights, starts its LoRA anew, with an A of its own and a new optimiser, joint steps on training
    text.
    Server: adds ``sum_i p_i s_i B_i A_i``.
    Differs from the paper: what is added stands beside the base, as two factors; a download has the sum of all rounds'
    stacks, as users may have been absent, the paper's the last stack.  With ``residual_rank`` it
    is the best approximation of that rank, once a round; 0 is exact.
    """
    return Method(
        name="flora-stacking",
        placement=Placement(generalists=2, shared=LORA, received=frozenset({RESIDUAL}), residual=residual_rank),
        client=Client(phases=(Phase(roles=LORA),), parts=(Anew(),)),
        server=Stack(),
    )


TIMES = "anew"
"""What a user keeps: the run's seed, and how often its LoRA has started."""


class Anew(Part):
    """LoRA start anew each round: A is drawn, B is zero, and optimisers have not taken a step."""

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Nobody's has."""
        return {TIMES: torch.tensor([[seed, 0]]).repeat(len(names), 1)}

    def received(self, cohort: Cohort) -> None:
        """What was trained is in the weights now."""
        for _, _, b in lora_pairs(cohort.tensors):
            b.zero_()

    def begin(self, cohort: Cohort) -> None:
        """Another A of each user, in its rank."""
        cohort.forget(LORA)
        for name, a, _ in lora_pairs(cohort.tensors):
            for own, user, (seed, times) in zip(a, cohort.names, cohort.kept[TIMES].tolist(), strict=True):
                own.copy_(init_a(tuple(own.shape), generator(seed, user, "anew", f"{name}.a", times)))
            places = torch.arange(a.shape[-2], device=a.device) < cohort.ranks.unsqueeze(1)
            a.mul_(places.view(len(a), *[1] * (a.dim() - 3), -1, 1))
        cohort.kept[TIMES][:, 1] += 1


@dataclass(frozen=True, kw_only=True)
class Stack(Mean):
    """What all stacks have added to each weight."""

    kind = "stack"
    clipped_mean = False
    knows_starts = False

    def aggregate(self, kept: Tree, received: Received) -> None:
        """One more stack."""
        weights = (received.weights * received.scales).tolist()
        for name, a, b in lora_pairs(received.tensors):
            add_to(kept, name, [(t, b[i] * weights[i]) for i, t in enumerate(a)])
