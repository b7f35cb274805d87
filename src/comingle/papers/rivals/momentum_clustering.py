"""Momentum clustering: the server clusters users by their momentum, and each user moves as its cluster does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from comingle.methods.base import Method, Placement
from comingle.methods.client import MODEL, Client, Part, joint
from comingle.methods.cohort import Cohort
from comingle.methods.settings import BelowOne, Count, Models, NotNegative, Range
from comingle.papers.rivals.momentum_server import Centres
from comingle.utils.trees import Tree


def momentum_clustering(
    *,
    clusters: Models = 4,
    momentum: BelowOne = 0.9,
    quantile: Annotated[float, Range(least=0, most=1)] = 0.2,
    iterations: Count = 2,
    server_rate: NotNegative = 1.0,
) -> Method:
    """Momentum clustering: users upload momentum, threshold clustering finds C centres, each user moves by its own.

    Source: Werner et al. 2023, "Provably Personalized and Robust Federated Learning", arXiv:2306.08393, the algorithm
    that is linear in the number of users, which FLoRAL's section 6 tries; as FLoRAL's public code runs it.
    Shared: the net with its statistics; on a language model attention and 1 LoRA expert per MLP.  Local: the momentum.
    Frozen: a language model's base.
    Client: joint steps on training data, which move it by ``-g``; then ``m = momentum m + (1 - momentum) g``, at first
    ``m = g``, and ``x - m`` is what it sends.
    Server: ``iterations`` times each centre becomes the mean over users of ``m_i``, or of the centre itself for who is
    further from it than the ``quantile`` of all distances; then ``x_i = x_i - server_rate v_k``, k the nearest centre.
    Differs from the paper: its text was not at hand, its abstract, its public code and FLoRAL's were.  g is what a
    round of local steps changes, statistics too; in the paper's code, whose momentum and first value in full these are,
    by default one gradient step of rate 0.001, and FLoRAL's server has no momentum.  Many steps of Adam, repeated so
    long, are too much.  The server keeps x_i, for who is absent.  A centre begins at the momentum of a user drawn at
    random (in FLoRAL's code at the mean of random groups, so near each other that they collapse; in the paper's each
    user has a centre, at its own), later where it was.  Means are weighted by ``training.weighting``.  Who joins later
    takes what its nearest cluster has moved by.  Other defaults are FLoRAL's; its recipe has a quantile of 0.1 and 10
    iterations, the paper's code 10 too.
    """
    return Method(
        name="momentum-clustering",
        placement=Placement(shared=MODEL),
        client=Client(phases=joint(routed=False), parts=(Momentum(momentum),)),
        server=Centres(clusters=clusters, quantile=quantile, iterations=iterations, rate=server_rate),
    )


OWN_MOMENTUM, BEGUN = "momentum.", "begun"


@dataclass(frozen=True)
class Momentum(Part):
    """Replaces what a round has changed by a running mean of it over the rounds."""

    decay: float
    looks_back = True

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Nobody has any."""
        return {BEGUN: torch.zeros(len(names), dtype=torch.float64)}

    def start_like(self, tensors: Tree) -> Tree:
        """The momentum of what is shared."""
        return {OWN_MOMENTUM + name: torch.zeros_like(t) for name, t in tensors.items()}

    def end(self, cohort: Cohort) -> None:
        """``m = decay m + (1 - decay) g``, or g for who has none, and ``x - m``."""
        decay = self.decay * cohort.kept[BEGUN]
        for name in (n.removeprefix(OWN_MOMENTUM) for n in cohort.kept if n.startswith(OWN_MOMENTUM)):
            m, began, now = cohort.kept[OWN_MOMENTUM + name], cohort.began[name], cohort.tensors[name]
            m.copy_(torch.lerp(began - now, m, decay.to(m).view(-1, *[1] * (m.dim() - 1))))
            now.copy_(began - m)
        cohort.kept[BEGUN].fill_(1)
