"""Momentum clustering: cluster users by their momentum on the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import MODEL_PREFIX, Received, Server, ServerSetup, model_of
from comingle.methods.settings import BelowOne, Count, Models, NotNegative, Range
from comingle.utils.seeds import generator
from comingle.utils.trees import Tree, flatten

OWN, DRAW, CENTRES, MOVED, LEFT = "own", "draw", "centres", "moved", "left"


@dataclass(frozen=True, kw_only=True)
class Centres(Server):
    """Everybody's model in a row, and a centre for each cluster; ``moved`` is what the centres have added up to."""

    clusters: int
    quantile: float
    iterations: int
    rate: float
    stands: bool = False
    kind = "stack"
    knows_starts = True
    one_rank = True  # what is beyond a user's rank has not moved, and would count as if it had
    by_user = frozenset({OWN, DRAW})

    def start(self, setup: ServerSetup) -> Tree:
        """Everybody has the same; ``left`` is 1 until there are centres."""
        first = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        own = flatten([t[:1] for t in setup.models.values()]).repeat(len(setup.users), 1)
        draw = torch.cat([torch.rand(1, generator=generator(setup.seed, u, "momentum")) for u in setup.users])
        still = own.new_zeros(self.clusters, own.shape[1])
        return first | {OWN: own, DRAW: draw, CENTRES: still, MOVED: still.clone(), LEFT: torch.ones(())}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """New centres, and a step of everybody who took part."""
        users, centres = list(received.users), kept[CENTRES]
        momenta = kept[OWN][users] - flatten([received.tensors[name] for name in model_of(kept)])
        if not self.stands:
            if kept[LEFT]:
                order = kept[DRAW][users].argsort()
                centres.copy_(momenta[order[torch.arange(self.clusters) % len(order)]])
                kept[LEFT].zero_()
            for _ in range(self.iterations):
                centres.copy_(threshold_step(centres, momenta, received.weights, self.quantile))
            kept[MOVED].sub_(centres, alpha=self.rate)
        nearest = distances(centres, momenta).argmin(0)
        if self.stands:
            kept[OWN][users] = flatten([t.unsqueeze(0) for t in model_of(kept).values()]) + kept[MOVED][nearest]
        else:
            kept[OWN][users] -= self.rate * centres[nearest]

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Each user's own."""
        first = model_of(kept)
        parts = kept[OWN][list(users)].split([t.numel() for t in first.values()], 1)
        return {name: part.view(-1, 1, *t.shape) for part, (name, t) in zip(parts, first.items(), strict=True)}

    def settled(self) -> Centres:
        """Centres stay; who joins takes what its cluster has moved by."""
        return replace(self, stands=True)


def distances(
    centres: Float[Tensor, "clusters columns"], points: Float[Tensor, "users columns"]
) -> Float[Tensor, "clusters users"]:
    """``|z_i - v_c|``."""
    return torch.stack([torch.linalg.vector_norm(points - centre, dim=1, dtype=torch.float64) for centre in centres])


def threshold_step(
    centres: Float[Tensor, "clusters columns"],
    points: Float[Tensor, "users columns"],
    weights: Float[Tensor, " users"],
    quantile: float,
) -> Float[Tensor, "clusters columns"]:
    """``v_c <- sum_i p_i (z_i if |z_i - v_c| <= tau_c else v_c)``, tau_c a quantile of the distances from v_c."""
    apart = distances(centres, points)
    near = apart <= torch.quantile(apart, quantile, dim=1, keepdim=True)
    shares = (near * weights.to(apart)).to(points)
    return shares @ points + (1 - shares.sum(1, keepdim=True)) * centres


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
class Momentum(ClientHook):
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
