"""Clusters of users and mixtures of whole models: IFCA, FedEM and FedLEASE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Phase, Placement, joint
from comingle.methods.fedamole import EXPERTS, set_expert_means
from comingle.methods.fedmerge import mix, server_models_in, state_from_models
from comingle.methods.server import MODEL_PREFIX, NEVER, Mean, Received, Reported, Server, ServerSetup, model_of
from comingle.methods.settings import Count, Models, Range
from comingle.models.routers import ClientMixture, Router, init_router
from comingle.utils.errors import DivergenceError
from comingle.utils.seeds import generator
from comingle.utils.trees import ADAPTOR, ATTENTION, GENERALIST, ROUTER, SPECIALIST, STATISTICS, Init, Tree


def ifca(*, models: Models = 5) -> Method:
    """IFCA: each user picks the one of k models with the lowest loss on its training data, and trains it.

    Source: Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning", arXiv:2006.04088, Algorithm 1
    with model averaging.
    Shared: a whole net, with running statistics of its norm layers; on a language model attention and 1 LoRA expert per
    MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: downloads all models, picks the one with the lowest loss on all of its training data, takes local steps on
    it, and uploads it with its index.
    Server: each model becomes the weighted mean of the uploads for it; a model that no participant picked is unchanged.
    Differs from the paper: means are weighted by ``training.weighting``.  Among equally good models a user keeps the
    one it has, at first a random one, because all LoRA give the same loss before training.

    Args:
        models: Number of models on the server.
    """
    return Method(
        name="ifca",
        placement=Placement(shared=MODEL),
        client=Client(phases=joint(routed=False), parts=(ChooseModel(models),)),
        server=CandidateModels(models=models),
    )


@dataclass(frozen=True)
class ChooseModel(ClientHook):
    """Client hook of IFCA: picks the model with the lowest loss on the training data, and reports its number."""

    models: int
    sweeps = True

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return the index of a random model for each user, which it keeps as long as all models are equally good."""
        generators = [generator(seed, name, "ifca") for name in names]
        choices = [torch.randint(self.models, (1,), generator=each) for each in generators]
        return {CHOICE: torch.cat(choices)}

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree:
        """Return for each user the model with the lowest training loss, and store its index in ``cohort.kept``.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            models: All models, ``(users, models, *shape)``.
            senders: Not used.
        """
        choice = cohort.kept[CHOICE]  # the previous one, until it is replaced
        losses = cohort.training_losses(models)
        choice.copy_(best_model(losses, choice.to(losses.device)))
        users = torch.arange(len(choice))
        return {name: t[users, choice] for name, t in models.items()}

    def report(self, cohort: Cohort) -> Tree:
        """Return the index of the model that each user has picked."""
        return {CHOICE: cohort.kept[CHOICE]}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Specification of the report "choice", which the server checks: the index of a model."""
        return {CHOICE: Reported(most=self.models - 1, whole=True)}

    def shares(self, cohort: Cohort) -> Float[Tensor, "users models"]:
        """Return each user's weight on each model, for display: 1 for the model that it has picked, 0 for others."""
        return torch.nn.functional.one_hot(cohort.kept[CHOICE], self.models).double()


@dataclass(frozen=True, kw_only=True)
class CandidateModels(Mean):
    """Server of IFCA: averages each model over the users who picked it; other models are unchanged."""

    models: int
    clipped_mean = False
    first_download = True

    @property
    def server_models(self) -> int:
        """Number of models that users pick from."""
        return self.models

    def start(self, setup: ServerSetup) -> Tree:
        """Return the server's initial state: all models, which differ."""
        return state_from_models(setup.models)

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set each model to the weighted mean over the participants who picked it; models without any stay unchanged.

        Args:
            kept: State of the server, with the models ``(models, *shape)``; changed in place.
            received: The uploads, with the index of the model that each participant picked.
        """
        models, choice = server_models_in(kept), received.reports[CHOICE]
        has_picked = torch.nn.functional.one_hot(choice, self.models).double()  # (users, models), of 0 and 1
        weights = has_picked * received.weights.unsqueeze(1)
        total_by_model = weights.sum(0)
        is_picked = total_by_model > 0
        shares = weights[:, is_picked] / total_by_model[is_picked]
        for name, means in mix(received.tensors, shares.T).items():
            models[name][is_picked] = means

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return all models for each user, expanded without copying."""
        return {name: t.unsqueeze(0).expand(len(users), *t.shape) for name, t in server_models_in(kept).items()}

    def starts(self, kept: Tree, received: Received) -> Tree:
        """Return the model that each participant picked, as it was before the participant trained it.

        Robust aggregation and step normalisation measure a participant's change from it.
        """
        choice = received.reports[CHOICE]
        return {name: models[choice.to(models.device)] for name, models in server_models_in(kept).items()}


CHOICE = "choice"
"""Key of the index of a user's model."""


def best_model(losses: Float[Tensor, "users models"], before: Int[Tensor, " users"]) -> Int[Tensor, " users"]:
    """Return the index of the model with the lowest loss for each user.

    If several models have the lowest loss, a user keeps its previous model if that is one of them, else it gets the
    first.

    Args:
        losses: Loss of each user under each model.
        before: Index of each user's previous model.
    """
    num_models = losses.shape[1]
    is_best = losses == losses.min(1, keepdim=True).values
    is_previous = torch.nn.functional.one_hot(before, num_models)
    preference = is_best * (1 + is_previous)  # 2 for the previous model if it is best, 1 for other best ones, else 0
    return preference.argmax(1)


def fedem(*, models: Models = 3) -> Method:
    """FedEM: all users train M whole models, with a weight for each sample and model, and mix their predictions.

    Source: Marfoq et al. 2021, "Federated Multi-Task Learning under a Mixture of Distributions", arXiv:2108.10252,
    Algorithm 2 (FedEM), eq. 7, 8 and 11.
    Shared: M models with their running statistics.  Local: the mixture pi, M numbers.  Frozen: nothing.
    Client: computes weights q_m(s) ~ pi_m exp(-loss_m(s)) of each training sample s under the downloaded models m, and
    pi = mean_s q(s).  Then local steps on sum_m q_m(s) loss_m(s) with q fixed.
    Server: mean of each model over users.
    Differs from the paper: no difference is known.  A user predicts sum_m pi_m p_m(y|x), in a regression the mean of
    the models' outputs with the weights pi.

    Args:
        models: Number M of models that all users train and mix.
    """
    components = frozenset({ADAPTOR})  # this role is also that of whole models which users mix
    mixture = ClientMixture(clusters=models, of="models", at="samples")
    return Method(
        name="fedem",
        placement=Placement(shared=components | {STATISTICS}, mixture=mixture),
        client=Client(phases=(Phase(roles=components),), parts=(DivideSamples(),)),
        server=Mean(),
    )


class DivideSamples(ClientHook):
    """Client hook of FedEM: gives each training sample its own weights on the models, at the start of a round."""

    sweeps = True

    def begin(self, cohort: Cohort) -> None:
        """Weigh the downloaded models for each training sample by its losses under them, before local steps (FedEM).

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
        """
        cohort.divide_samples()


# ---------------------------------------------------------------- clusters of LoRA


def unit_factors(uploads: Tree) -> Float[Tensor, "users columns"]:
    """Return each user's LoRA factors B, each flattened and divided by its norm; factors of zeros stay zeros.

    Products of two users' rows are then sums of the cosines between their factors.

    Args:
        uploads: Uploaded tensors; names of factors B end in ".b".
    """
    factors = [uploads[name].flatten(1).double() for name in sorted(uploads) if name.endswith(".b")]
    smallest = torch.finfo(torch.float64).tiny  # avoids a division by 0
    return torch.cat([factor / factor.norm(dim=1, keepdim=True).clamp(min=smallest) for factor in factors], 1)


def cosine_distances(
    units: Float[Tensor, "users columns"], others: Float[Tensor, "others columns"], num_layers: int
) -> Float[Tensor, "users others"]:
    """Return the distance of each user to each other one, ``1/L sum_l (1 - cos(B_i^l, B_j^l))`` over L adapted layers.

    For a row of ``others`` that is a mean over users it is the mean distance to these users.

    Source: FedLEASE (Wang et al. 2025, arXiv:2509.15087), its distance d(i, j).

    Args:
        units: The users' factors B as unit vectors (:func:`unit_factors`).
        others: The other users', or means of them.
        num_layers: Number L of adapted linear layers.
    """
    return 1 - units @ others.T / num_layers


Merges = list[tuple[int, int]]
"""Tree of n users: pairs of nodes that are merged, closest first. Nodes from n on are the results of earlier merges."""


def agglomerate(distances: Float[Tensor, "users users"]) -> Merges:
    """Return the tree of agglomerative clustering with average linkage.

    The two closest clusters merge, until one is left. Their distance is the mean distance of their users.

    Args:
        distances: Symmetric distances; the diagonal is ignored.
    """
    from scipy.cluster.hierarchy import linkage

    if len(distances) == 1:
        return []
    above_diagonal = torch.triu_indices(*distances.shape, offset=1)
    condensed = distances.cpu()[above_diagonal[0], above_diagonal[1]]
    steps = linkage(condensed.clamp(min=0).numpy(), method="average")
    return [(int(one), int(other)) for one, other, _distance, _size in steps]


def cut(merges: Merges, clusters: int) -> Int[Tensor, " users"]:
    """Return each user's cluster after all but the last merges of a tree, numbered by the clusters' first users.

    Args:
        merges: The tree.
        clusters: Number of clusters, from 1 to the number of users.
    """
    num_users = len(merges) + 1
    members = {user: [user] for user in range(num_users)}
    for step, (one, other) in enumerate(merges[: num_users - clusters]):
        members[num_users + step] = members.pop(one) + members.pop(other)
    labels = torch.zeros(num_users, dtype=torch.int64)
    for label, users in enumerate(sorted(members.values(), key=min)):
        labels[users] = label
    return labels


def silhouette(distances: Float[Tensor, "users users"], labels: Int[Tensor, " users"]) -> float:
    """Return the mean silhouette of clusters, ``mean_i (b_i - a_i) / max(a_i, b_i)`` (Rousseeuw 1987).

    a_i is user i's mean distance to the other users of its cluster, b_i the smallest mean distance to the users of
    another cluster. A user that is alone in its cluster counts as 0.

    Args:
        distances: Distances of users, with zeros on the diagonal.
        labels: Cluster of each user; there are at least two clusters.
    """
    in_cluster = torch.nn.functional.one_hot(labels).to(distances)  # (users, clusters)
    sizes = in_cluster.sum(0)
    sums = distances @ in_cluster
    a = (sums * in_cluster).sum(1) / (sizes[labels] - 1).clamp(min=1)
    b = (sums / sizes).masked_fill(in_cluster.bool(), torch.inf).min(1).values
    scores = ((b - a) / torch.maximum(a, b)).nan_to_num(0.0)  # 0 / 0 for users at the same point
    return float(scores.masked_fill(sizes[labels] == 1, 0.0).mean())


def best_clusters(distances: Float[Tensor, "users users"], most: int) -> Int[Tensor, " users"]:
    """Return the clusters of 2 to ``most`` with the largest silhouette; of equal ones the fewest.

    A silhouette says nothing of as many clusters as users, so that 1 or 2 users are one cluster.

    Args:
        distances: Distances of users, with zeros on the diagonal.
        most: Largest number of clusters.
    """
    num_users = len(distances)
    merges = agglomerate(distances)
    candidates = [cut(merges, clusters) for clusters in range(2, min(most, num_users - 1) + 1)]
    if not candidates:
        return cut(merges, 1)
    return max(candidates, key=lambda labels: silhouette(distances, labels))


# ---------------------------------------------------------------- FedLEASE


OWN_CLUSTER, NUM_CLUSTERS, CENTRES = "cluster", "clusters", "centres"


@dataclass(frozen=True, kw_only=True)
class ClusterExperts(Server):
    """Server of FedLEASE: clusters users by their first uploads, and keeps an expert and a router for each cluster.

    Its state has the model of users without a cluster and
    - ``experts.NAME (max_experts, *shape)``: of each tensor the means of each cluster, zeros where there is none,
    - ``cluster (users,)``: each user's cluster, or ``max_experts`` as long as it has none,
    - ``clusters``: the number of clusters, 0 until they are made,
    - ``centres (max_experts, columns)``: the means of each cluster's first factors B as unit vectors.
    """

    max_experts: int
    kind = "stack"
    by_user = frozenset({OWN_CLUSTER})
    one_rank = True
    first_download = True
    keeps_adapters = False

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state: users have their own LoRA, none of the others, and no cluster.

        Args:
            setup: Initial models, and the users' names.
        """
        kept: Tree = {}
        num_columns = 0
        for name, t in setup.models.items():
            own = t[0, :1] if _is_of_experts(t[0]) else t[0]
            kept[MODEL_PREFIX + name] = own.clone()
            kept[EXPERTS + name] = own.new_zeros(self.max_experts, *own.shape)
            num_columns += own.numel() if name.endswith(".b") else 0
        some_tensor = next(iter(kept.values()))
        kept[OWN_CLUSTER] = torch.full((len(setup.users),), self.max_experts)
        kept[NUM_CLUSTERS] = torch.tensor(0)
        kept[CENTRES] = torch.zeros(self.max_experts, num_columns, dtype=torch.float64, device=some_tensor.device)
        return kept

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Average each expert over the participants of its cluster; give a cluster to participants that have none.

        In the first exchange the clusters are made, and an expert starts as the mean of its users' LoRA. Later a new
        participant joins the cluster whose users were closest on average, and counts from its next upload on.

        Args:
            kept: State of the server, changed in place.
            received: The uploads: a LoRA and a router of each participant.

        Raises:
            DivergenceError: A factor B is not finite.
        """
        users = list(received.users)
        units = unit_factors(received.tensors)
        clusters = kept[OWN_CLUSTER][users]
        if not kept[NUM_CLUSTERS]:
            clusters = self._make_clusters(kept, units, _num_layers(received.tensors)).to(clusters)
        for name, t in received.tensors.items():  # a participant without a cluster is in no mean
            set_expert_means(kept[EXPERTS + name], t.unsqueeze(1), clusters.unsqueeze(1), received.weights)
        num_clusters = int(kept[NUM_CLUSTERS])
        distances = cosine_distances(units, kept[CENTRES][:num_clusters], _num_layers(received.tensors))
        has_none = clusters == self.max_experts
        kept[OWN_CLUSTER][users] = torch.where(has_none, distances.argmin(1).to(clusters), clusters)

    def _make_clusters(
        self, kept: Tree, units: Float[Tensor, "users columns"], num_layers: int
    ) -> Int[Tensor, " users"]:
        """Return the participants' clusters, and store their number and centres.

        Args:
            kept: State of the server, changed in place.
            units: The participants' factors B as unit vectors.
            num_layers: Number of adapted linear layers.
        """
        require_finite(units, "fedlease")
        distances = cosine_distances(units, units, num_layers).fill_diagonal_(0)
        clusters = best_clusters(distances, self.max_experts).to(units.device)
        in_cluster = torch.nn.functional.one_hot(clusters).to(units)
        means = in_cluster.T @ units / in_cluster.sum(0).unsqueeze(1)
        kept[CENTRES][: len(means)] = means.to(kept[CENTRES])
        kept[NUM_CLUSTERS].fill_(len(means))
        return clusters

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return each user's expert and router, and then the other clusters' experts, with zeros for missing ones.

        Args:
            kept: State of the server.
            users: Indices of the users.

        Returns:
            Tensors by name, ``(users, 1, *shape)``: each user gets one model.
        """
        clusters = kept[OWN_CLUSTER][list(users)]
        order = self._order_of_experts(clusters.device)[clusters]  # (users, max_experts)
        sent = {}
        for name, initial in model_of(kept).items():
            # The two last rows are for users without a cluster: the initial model, and an expert that is missing.
            pool = torch.cat([kept[EXPERTS + name], initial.unsqueeze(0), torch.zeros_like(initial).unsqueeze(0)])
            # (users, max_experts, rank, width) in MLPs, (users, rows, width) in attention and routers
            by_user = pool[order].flatten(1, 2) if _is_of_experts(initial) else pool[clusters]
            sent[name] = by_user.unsqueeze(1)  # one model for each user
        return sent

    def _order_of_experts(self, device: torch.device) -> Int[Tensor, "clusters max_experts"]:
        """Return for each cluster the indices of its own expert and then of the others; last for users without one."""
        most = self.max_experts
        rows = [[own, *(other for other in range(most) if other != own)] for own in range(most)]
        rows.append([most, *[most + 1] * (most - 1)])
        return torch.tensor(rows, device=device)

    def settled(self) -> ClusterExperts:
        """Return a copy of the server for users who join after the run has ended.

        A new user exchanges once, which changes no expert: it uploads its LoRA and downloads the experts, with that of
        the closest cluster as its own.
        """
        return replace(self, exchange_every=NEVER)


def _is_of_experts(t: Tensor) -> bool:
    """Return whether one user's tensor is a LoRA factor of an MLP, ``(experts, rank, width)``."""
    return t.dim() == 3


def _num_layers(uploads: Tree) -> int:
    """Return the number of adapted linear layers: of LoRA factors B."""
    return sum(name.endswith(".b") for name in uploads)


def require_finite(factors: Tensor, method: str) -> None:
    """Raise an error unless all LoRA factors B that a server clusters are finite.

    Args:
        factors: The users' factors.
        method: Name of the method, for the message.

    Raises:
        DivergenceError: A number is not finite.
    """
    if num_nonfinite := int((~factors.isfinite()).sum()):
        raise DivergenceError(
            f"method {method}: {num_nonfinite} of {factors.numel()} numbers in the users' LoRA factors B are not "
            "finite; try a smaller training.experts.learning_rate"
        )


def fedlease(*, max_experts: Annotated[int, Range(least=2, most=999)] = 4, warmup_rounds: Count = 1) -> Method:
    """FedLEASE: users are clustered by their LoRA, train their cluster's expert and route to those of all clusters.

    Source: Wang et al. 2025, "Adaptive LoRA Experts Allocation and Selection for Federated Fine-Tuning", NeurIPS 2025,
    arXiv:2509.15087, and its public code (lei-wang-link/FedLEASE).
    Shared: 1 LoRA expert per MLP, attention and routers, each within a cluster.  Local: nothing.  Frozen: the base, and
    the other clusters' experts, which come from the server.
    Client: in the first ``warmup_rounds`` rounds local steps on the user's own LoRA, without exchange.  Then local
    steps that train the expert of its cluster and the router together, the router with its own settings.  With M
    clusters a router has 2M - 1 outputs: M for the user's own expert and one for each other.  A token's weights are the
    softmax over the M largest, so that its own expert always takes part, with 0 to M - 1 others.
    Server: after the warm-up, agglomerative clustering with the distance ``1/L sum_l (1 - cos(B_i^l, B_j^l))`` over L
    layers, for the number of clusters from 2 to ``max_experts`` with the largest silhouette.  Experts start as the
    means of their clusters' LoRA; then an expert and its router become means over the cluster's participants.
    Differs from the paper: there is one router for each MLP, which mixes its outputs, where the paper has one for each
    linear; with ``adapters: {mix: linear}`` it mixes in each linear.  Attention has the LoRA of the user's cluster.
    Means are weighted by ``training.weighting``.  Users who miss the first exchange start from the initial LoRA and
    join the closest cluster with their first upload, which is in no mean; so do users who join later.  With fewer than
    three participants in the first exchange there is one cluster.  A download has ``max_experts`` experts, with zeros
    for missing ones.  ``adapters.top_k`` and the balancing penalty are ignored.  Written from the public code and
    summaries of the paper: average linkage, the softmax over the chosen outputs and ``max_experts`` are the code's,
    whose warm-up has 5 rounds.

    Args:
        max_experts: Largest number of clusters, each with an expert.
        warmup_rounds: Rounds in which users train their own LoRA before they are clustered.
    """
    own = frozenset({ATTENTION, GENERALIST, ROUTER})
    return Method(
        name="fedlease",
        placement=Placement(
            specialists=max_experts - 1,
            routed=True,
            gating=AdaptiveGating(),
            shared=own,
            received=own | {SPECIALIST},
        ),
        client=Client(phases=(Phase(roles=own, optimizer="both"),)),
        server=ClusterExperts(max_experts=max_experts, exchange_from=warmup_rounds),
    )


@dataclass(frozen=True)
class AdaptiveGating:
    """Gating of FedLEASE: of 2M - 1 outputs for M experts, the M largest count, and M outputs are for the first expert.

    So a token uses its user's own expert, which is the first one, and 0 to M - 1 others.
    """

    def __str__(self) -> str:
        """Return how experts are weighted, to complete an error message "its experts are ..."."""
        return "weighted by an adaptive number of outputs"

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Init]:
        """Return the number of rows of an MLP's router tensor ``(rows, width)``, and its initialiser.

        Args:
            experts: Largest number of experts, M: there are M rows for the first one, then one for each other.
            rank: LoRA rank, not used.
            width: Width of the router's input, not used.
        """
        return 2 * experts - 1, init_router

    def __call__(
        self, router: Router, products: Float[Tensor, "users n rows"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Return the experts' weights for each token: the softmax over its user's M largest outputs.

        M is the number of the user's experts. The rows of the first expert beyond its M-th do not count.

        Args:
            router: The router, with the A factors of all experts as ``keys``.
            products: Products of the router's rows with x.
            x: Inputs of the MLP for n tokens of each user.
        """
        # Downloads pad missing experts with zeros, also their factors A.
        has_expert = router.keys.flatten(2).any(-1)  # (users, experts)
        most = has_expert.shape[1]
        is_one_of_m = torch.arange(most, device=products.device) < has_expert.sum(1, keepdim=True)  # first M of most
        has_output = torch.cat([is_one_of_m, has_expert[:, 1:]], 1).unsqueeze(1)  # (users, 1, rows)
        logits = products.masked_fill(~has_output, -torch.inf)
        largest = logits.topk(most, dim=-1).indices
        picks = torch.zeros_like(logits, dtype=torch.bool)
        picks = picks.scatter(-1, largest, is_one_of_m.unsqueeze(1).expand(largest.shape))
        weights = logits.masked_fill(~picks, -torch.inf).softmax(-1)
        return torch.cat([weights[..., :most].sum(-1, keepdim=True), weights[..., most:]], -1)
