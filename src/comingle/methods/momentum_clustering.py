"""Momentum clustering: users are clustered by their momentum on the server."""

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

OWN, DRAW, CENTRES, TOTAL_MOVES, WITHOUT_CENTRES = "own", "draw", "centres", "moved", "left"


@dataclass(frozen=True, kw_only=True)
class Centres(Server):
    """Server of momentum clustering: keeps each user's model, flattened, and the centre of each cluster's momenta.

    ``moved`` is the sum of the centres over all rounds, times ``rate``; ``left`` is 1 until there are centres.
    """

    clusters: int
    quantile: float
    iterations: int
    rate: float
    fixed: bool = False
    kind = "stack"
    knows_starts = True
    one_rank = True  # columns above a user's rank are not trained, but would count as if they had moved
    by_user = frozenset({OWN, DRAW})

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state: the same model for all users, and centres of zero.

        Centres are set in the first round, to the momenta of random participants: those with the smallest random
        numbers (``draw``, one per user). A flag (``left``) is 1 until then. The state also has the sum of all steps of
        each cluster so far (``moved``), for users who join later.
        """
        initial = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        models = flatten([t[:1] for t in setup.models.values()]).repeat(len(setup.users), 1)
        draw = torch.cat([torch.rand(1, generator=generator(setup.seed, u, "momentum")) for u in setup.users])
        zeros = models.new_zeros(self.clusters, models.shape[1])
        return initial | {
            OWN: models,
            DRAW: draw,
            CENTRES: zeros,
            TOTAL_MOVES: zeros.clone(),
            WITHOUT_CENTRES: torch.ones(()),
        }

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Update the centres of the users' momenta, then move each participant's model by its nearest centre.

        A participant has uploaded its model minus its momentum. With ``fixed`` centres (for users who join later) a
        participant gets the initial model, moved by all steps of its cluster.

        Args:
            kept: State of the server, changed in place: each user's model, flattened; the centres; the sum of all steps
                of each cluster; and a flag that is 1 until there are centres.
            received: The uploads, with the indices and aggregation weights of the participants.
        """
        users, centres = list(received.users), kept[CENTRES]
        momenta = kept[OWN][users] - flatten([received.tensors[name] for name in model_of(kept)])
        if not self.fixed:
            if kept[WITHOUT_CENTRES]:  # the first round: centres start at the momenta of random participants
                order = kept[DRAW][users].argsort()
                # % len(order): with fewer participants than clusters, some centres start at the same momentum
                centres.copy_(momenta[order[torch.arange(self.clusters) % len(order)]])
                kept[WITHOUT_CENTRES].zero_()
            for _ in range(self.iterations):
                centres.copy_(threshold_step(centres, momenta, received.weights, self.quantile))
            kept[TOTAL_MOVES].sub_(centres, alpha=self.rate)
        nearest = distances(centres, momenta).argmin(0)
        if self.fixed:
            initial = flatten([t.unsqueeze(0) for t in model_of(kept).values()])
            kept[OWN][users] = initial + kept[TOTAL_MOVES][nearest]
        else:
            kept[OWN][users] -= self.rate * centres[nearest]

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return each user's own model."""
        initial = model_of(kept)  # for names and shapes: the users' models are stored flattened
        parts = kept[OWN][list(users)].split([t.numel() for t in initial.values()], 1)
        return {name: part.view(-1, 1, *t.shape) for part, (name, t) in zip(parts, initial.items(), strict=True)}

    def settled(self) -> Centres:
        """Return a server with fixed centres; a new user moves by the total change of its cluster."""
        return replace(self, fixed=True)


def distances(
    centres: Float[Tensor, "clusters columns"], points: Float[Tensor, "users columns"]
) -> Float[Tensor, "clusters users"]:
    """Return the distances ``|z_i - v_c|``."""
    return torch.stack([torch.linalg.vector_norm(points - centre, dim=1, dtype=torch.float64) for centre in centres])


def threshold_step(
    centres: Float[Tensor, "clusters columns"],
    points: Float[Tensor, "users columns"],
    weights: Float[Tensor, " users"],
    quantile: float,
) -> Float[Tensor, "clusters columns"]:
    """Return each centre moved to the mean of the momenta near it.

    The new centre is ``sum_i p_i (z_i if |z_i - v_c| <= tau_c else v_c)``, where tau_c is a quantile of the
    distances from v_c. Users further away count as if they were at the centre, so that outliers cannot pull it.

    Args:
        centres: Centres v.
        points: Users' momenta z.
        weights: Aggregation weights p.
        quantile: Quantile of the distances, from 0 to 1.
    """
    from_centre = distances(centres, points)
    is_near = from_centre <= torch.quantile(from_centre, quantile, dim=1, keepdim=True)
    shares = (is_near * weights.to(from_centre)).to(points)
    return shares @ points + (1 - shares.sum(1, keepdim=True)) * centres


def momentum_clustering(
    *,
    clusters: Models = 4,
    momentum: BelowOne = 0.9,
    quantile: Annotated[float, Range(least=0, most=1)] = 0.2,
    iterations: Count = 2,
    server_rate: NotNegative = 1.0,
) -> Method:
    """Momentum clustering: users upload momentum, threshold clustering finds C centres, each user moves by its centre.

    Source: Werner et al. 2023, "Provably Personalized and Robust Federated Learning", arXiv:2306.08393, the algorithm
    that is linear in the number of users, which FLoRAL's section 6 tries; as FLoRAL's public code runs it.
    Shared: the net with its statistics; on a language model attention and 1 LoRA expert per MLP.  Local: the momentum.
    Frozen: a language model's base.
    Client: joint steps on training data, which change the downloaded model x by ``-g``; then the momentum becomes ``m =
    momentum m + (1 - momentum) g``, in the first round ``m = g``; the client uploads ``x - m``.
    Server: ``iterations`` times each centre v_c becomes the mean over users of ``m_i``, or of the centre itself for
    users further from it than the ``quantile`` of all distances; then ``x_i = x_i - server_rate v_k``, where v_k is the
    centre nearest to m_i.
    Differs from the paper: we had its abstract and public code, and FLoRAL's code, not its text.  g is the change of a
    round of local steps, statistics included; in the paper's code, which has this momentum and first value, it is by
    default one gradient step of rate 0.001, and FLoRAL's server has no momentum.  With many steps of Adam in a round
    this momentum is too large.  The server keeps x_i for absent users.  A centre starts at the momentum of a
    random user (in FLoRAL's code at the mean of random groups, so close together that they collapse; in the paper's
    each user has a centre, at its own), and later rounds start from the last centres.  Means are weighted by
    ``training.weighting``.  Users who join later move by the total change of the nearest cluster.  The other defaults
    are FLoRAL's; its recipe has a quantile of 0.1 and 10 iterations, the paper's code also 10.

    Args:
        clusters: Number C of clusters of users, each with a centre of momentum.
        momentum: Fraction of a user's momentum that is kept in each round, below 1.
        quantile: Quantile of the users' distances to a centre; users further away do not move it.
        iterations: Steps of threshold clustering in a round.
        server_rate: Size of a user's step in a round, as a multiple of its centre.
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
    """Replaces the change of a round by its running mean over the rounds."""

    decay: float
    looks_back = True

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return for each user a flag of 0, which says that it has no momentum yet."""
        return {BEGUN: torch.zeros(len(names), dtype=torch.float64)}

    def start_like(self, tensors: Tree) -> Tree:
        """Return a momentum of zero for each shared tensor."""
        return {OWN_MOMENTUM + name: torch.zeros_like(t) for name, t in tensors.items()}

    def end(self, cohort: Cohort) -> None:
        """Update the momentum and set each model to ``x - m``, which is uploaded.

        x is the model at the start of the round (``cohort.began``), g its decrease over the local steps. The momentum
        becomes ``m = decay m + (1 - decay) g``, and ``m = g`` in a user's first round.
        """
        decay = self.decay * cohort.kept[BEGUN]  # 0 for a user without momentum yet, whose flag BEGUN is 0
        for name in (n.removeprefix(OWN_MOMENTUM) for n in cohort.kept if n.startswith(OWN_MOMENTUM)):
            momentum, before, now = cohort.kept[OWN_MOMENTUM + name], cohort.began[name], cohort.tensors[name]
            weight = decay.to(momentum).view(-1, *[1] * (momentum.dim() - 1))
            momentum.copy_(torch.lerp(before - now, momentum, weight))
            now.copy_(before - momentum)
        cohort.kept[BEGUN].fill_(1)
