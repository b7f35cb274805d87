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
    """Server of momentum clustering: keeps each user's model and the centres of clusters of the users' momenta.

    Its state has, with all tensors of a model flattened to columns,
    - ``own (users, columns)``: each user's model,
    - ``centres (clusters, columns)``: the centres; ``left`` is 1 as long as there are none,
    - ``moved (clusters, columns)``: the sum of each cluster's steps, ``-rate * centre``, over all rounds,
    - ``draw (users,)``: random numbers that choose the users at whose momenta the centres start.
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
        """Return the initial state: one model for each user, at first the same, and centres of zero.

        The first aggregation, as long as WITHOUT_CENTRES is 1, starts the centres at the momenta of the participants
        with the smallest random numbers (DRAW). OWN has the users' models, flattened. TOTAL_MOVES has the sum of each
        cluster's steps, for users who join later.

        Args:
            setup: The users, their initial models, and the run's seed.
        """
        initial_model = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        flat_models = flatten([t[:1] for t in setup.models.values()]).repeat(len(setup.users), 1)  # (users, numbers)
        generators = [generator(setup.seed, user, "momentum") for user in setup.users]
        draw = torch.cat([torch.rand(1, generator=of_user) for of_user in generators])  # chooses the first centres
        zeros = flat_models.new_zeros(self.clusters, flat_models.shape[1])
        return {
            **initial_model,
            OWN: flat_models,
            DRAW: draw,
            CENTRES: zeros,
            TOTAL_MOVES: zeros.clone(),
            WITHOUT_CENTRES: torch.ones(()),
        }

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Move the centres towards the participants' momenta, then each participant's model by its nearest centre.

        With ``fixed`` centres (for users who join later) a participant gets the initial model plus all steps of the
        cluster with the nearest centre.

        Args:
            kept: State of the server, changed in place.
            received: The uploads, each a user's model minus its momentum, with the participants' aggregation weights.
        """
        users = list(received.users)
        uploads = flatten([received.tensors[name] for name in model_of(kept)])  # (users, numbers)
        momenta = kept[OWN][users] - uploads
        centres = kept[CENTRES]  # (clusters, numbers)
        if self.fixed:
            nearest = distances(centres, momenta).argmin(0)
            initial_model = flatten([t.unsqueeze(0) for t in model_of(kept).values()])
            kept[OWN][users] = initial_model + kept[TOTAL_MOVES][nearest]
            return
        if kept[WITHOUT_CENTRES]:
            centres.copy_(self._initial_centres(momenta, kept[DRAW][users]))
            kept[WITHOUT_CENTRES].zero_()
        for _ in range(self.iterations):
            centres.copy_(threshold_step(centres, momenta, received.weights, self.quantile))
        kept[TOTAL_MOVES].sub_(centres, alpha=self.rate)
        nearest = distances(centres, momenta).argmin(0)
        kept[OWN][users] -= self.rate * centres[nearest]

    def _initial_centres(
        self, momenta: Float[Tensor, "users columns"], draw: Float[Tensor, " users"]
    ) -> Float[Tensor, "clusters columns"]:
        """Return the momenta of random users, one for each cluster; with fewer users than clusters some are repeated.

        The users are those with the smallest random numbers.

        Args:
            momenta: Momenta of the participants.
            draw: A random number for each participant.
        """
        order = draw.argsort()
        chosen_users = order[torch.arange(self.clusters) % len(order)]
        return momenta[chosen_users]

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return each user's own model, ``(users, 1, *shape)``, from its flat model in the state."""
        initial_model = model_of(kept)
        sizes = [t.numel() for t in initial_model.values()]
        flat_models = kept[OWN][list(users)]  # (users, numbers)
        models = {}
        for (name, t), flat_tensor in zip(initial_model.items(), flat_models.split(sizes, dim=1), strict=True):
            models[name] = flat_tensor.view(-1, 1, *t.shape)
        return models

    def settled(self) -> Centres:
        """Return a copy of the server with fixed centres, for users who join after the run has ended."""
        return replace(self, fixed=True)


def distances(
    centres: Float[Tensor, "clusters columns"], points: Float[Tensor, "users columns"]
) -> Float[Tensor, "clusters users"]:
    """Return the L2 distance of each centre to each point."""
    rows = [torch.linalg.vector_norm(points - centre, dim=1, dtype=torch.float64) for centre in centres]
    return torch.stack(rows)


def threshold_step(
    centres: Float[Tensor, "clusters columns"],
    points: Float[Tensor, "users columns"],
    weights: Float[Tensor, " users"],
    quantile: float,
) -> Float[Tensor, "clusters columns"]:
    """Return each centre v_c moved towards the momenta near it, ``sum_i p_i (z_i if |z_i - v_c| <= tau_c else v_c)``.

    tau_c is a quantile of the distances from v_c. Users further away count as if they were at the centre, so that
    outliers cannot pull it.

    Args:
        centres: Centres v.
        points: Users' momenta z.
        weights: Aggregation weights p; they sum to 1.
        quantile: Quantile of the distances, from 0 to 1.
    """
    distance = distances(centres, points)  # (clusters, users)
    tau = torch.quantile(distance, quantile, dim=1, keepdim=True)
    is_near = distance <= tau
    shares_of_near = (is_near * weights.to(distance)).to(points)
    share_of_centre = 1 - shares_of_near.sum(1, keepdim=True)
    return shares_of_near @ points + share_of_centre * centres


def momentum_clustering(
    *,
    clusters: Models = 4,
    momentum: BelowOne = 0.9,
    quantile: Annotated[float, Range(least=0, most=1)] = 0.2,
    iterations: Count = 2,
    server_rate: NotNegative = 1.0,
) -> Method:
    """Momentum clustering: the server finds C centres of the users' momenta, and moves each user by the nearest one.

    Source: Werner et al. 2023, "Provably Personalized and Robust Federated Learning", arXiv:2306.08393, the algorithm
    that is linear in the number of users, which FLoRAL's section 6 tries; as FLoRAL's public code runs it.
    Shared: a whole net, with running statistics of its norm layers; on a language model attention and 1 LoRA expert per
    MLP.  Local: the momentum.
    Frozen: a language model's base.
    Client: local steps on training data, which change the downloaded model x to ``x - g``.  The momentum becomes ``m =
    momentum m + (1 - momentum) g``, in the first round ``m = g``.  The client uploads ``x - m``.
    Server: ``iterations`` times each centre v becomes the mean over users of their momenta m_i, where users further
    from v than the ``quantile`` of all distances count as if they were at v.  Then user i's model becomes ``x_i -
    server_rate v``, with the centre v nearest to m_i.
    Differs from the paper: g is the change of a whole round, statistics included; in the paper's code it is by default
    one gradient step of rate 0.001, and FLoRAL's server has no momentum.  With many steps of Adam in a round this
    momentum is too large.  Centres start at the momenta of random users, and in later rounds at the centres of the
    round before.  In FLoRAL's code they start at means of random groups, so close together that they collapse; in the
    paper's code each user has a centre.  Means are weighted by ``training.weighting``.  The server keeps x_i for absent
    users.  Users who join later move by all steps of the nearest cluster.  The other defaults are FLoRAL's; its recipe
    has a quantile of 0.1 and 10 iterations, the paper's code also 10.  Written from the public code, FLoRAL's
    code and the abstract.

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
    """Client hook of momentum clustering: uploads the model minus the momentum, a running mean of its changes."""

    decay: float
    looks_back = True

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return a flag for each user that says whether it has a momentum: 0 until its first round ends."""
        return {BEGUN: torch.zeros(len(names), dtype=torch.float64)}

    def start_like(self, tensors: Tree) -> Tree:
        """Return a momentum of zero for each shared tensor."""
        return {OWN_MOMENTUM + name: torch.zeros_like(t) for name, t in tensors.items()}

    def end(self, cohort: Cohort) -> None:
        """Update the momentum and set each model to ``x - m``, which is uploaded.

        x is the model at the start of the round (``cohort.began``), g its decrease over the local steps. The momentum
        becomes ``m = decay m + (1 - decay) g``, and ``m = g`` in a user's first round.
        """
        decay = self.decay * cohort.kept[BEGUN]  # 0 in a user's first round
        for key, m in cohort.kept.items():
            if not key.startswith(OWN_MOMENTUM):
                continue
            name = key.removeprefix(OWN_MOMENTUM)
            x, model = cohort.began[name], cohort.tensors[name]
            g = x - model
            decay_by_user = decay.to(m).view(-1, *[1] * (m.dim() - 1))
            m.copy_(torch.lerp(g, m, decay_by_user))
            model.copy_(x - m)
        cohort.kept[BEGUN].fill_(1)
