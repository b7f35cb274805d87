"""The server of momentum clustering: everybody's model, and centres of what everybody moves by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.server import MODEL_PREFIX, Received, Server, ServerSetup, model_of
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
