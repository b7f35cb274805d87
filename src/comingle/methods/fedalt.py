"""FedALT and FedTreeLoRA: a LoRA of a user or of its cluster, mixed with a frozen mean of all other users' LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.methods.base import Client, Method, Phase, Placement
from comingle.methods.clustered import Merges, agglomerate, cut, require_finite, silhouette
from comingle.methods.server import MODEL_PREFIX, Received, Server, ServerSetup, model_of
from comingle.methods.settings import Count, Range
from comingle.models.lora import init_zero
from comingle.models.routers import Router
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Init, Tree, flatten


def fedalt() -> Method:
    """FedALT: each user trains an individual LoRA, mixed token by token with a frozen mean of all other users' LoRA.

    Source: Bian et al. 2026, "FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World LoRA",
    AAAI 2026, arXiv:2503.11880; its public code (jmbian/FedALT) for what is aggregated.
    Shared: the individual LoRA of each MLP (a specialist); users keep their own and download only means.
    Local: attention, the mixer (a router).
    Frozen: the base, and the rest-of-world LoRA of each MLP (a generalist), which comes from the server.
    Client: local steps on training text, which train attention, individual LoRA and mixer together, the mixer with its
    own settings.
    Server: user k gets the plain mean of A and of B over the most recent uploads of all other users.
    Differs from the paper: one mixer for each MLP mixes its outputs, where the paper has a mixer for each linear.
    With ``adapters: {mix: linear}`` the outputs of each linear are mixed, but all linears of an MLP share one mixer.
    Attention has a local LoRA; the public code adapts nothing but attention.  All individual LoRA start equal.  Before
    the first exchange the rest-of-world LoRA contributes nothing.  Users who have never taken part are in no mean.
    """
    individual_lora, rest_of_world_lora = frozenset({SPECIALIST}), frozenset({GENERALIST})
    phase = Phase(roles=frozenset({ATTENTION, SPECIALIST, ROUTER}), optimizer="both")
    return Method(
        name="fedalt",
        placement=Placement(specialists=1, routed=True, shared=individual_lora, received=rest_of_world_lora),
        client=Client(phases=(phase,)),
        server=RestOfWorld(),
    )


OWN, SENT, TOTAL, COUNT = "own", "sent", "total", "count"


@dataclass(frozen=True, kw_only=True)
class RestOfWorld(Server):
    """Server of FedALT: sends each user the mean of all other users' most recent uploads.

    Its state has
    - ``own (users, columns)``: each user's most recent upload, flattened,
    - ``sent (users,)``: 1 for users who have uploaded something, else 0,
    - ``total (columns,)`` and ``count``: the sums of ``own`` and of ``sent`` over the users.
    """

    kind = "stack"
    by_user = frozenset({OWN, SENT})

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state: the model that users download until others have uploaded, and no uploads yet.

        Zeros stand for each user's most recent upload ("own"), whether it has uploaded ("sent"), the sum of all uploads
        ("total") and their number ("count").

        Args:
            setup: The users, and their initial models.
        """
        initial_model = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        num_users = len(setup.users)
        flat_models = flatten([t[:1] for t in setup.models.values()]).expand(num_users, -1)  # for the shape
        return {
            **initial_model,
            SENT: torch.zeros(num_users),
            COUNT: torch.zeros(()),
            OWN: torch.zeros_like(flat_models),
            TOTAL: torch.zeros_like(flat_models[0]),
        }

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Store the participants' uploads in place of their previous ones, and update sum and number of all uploads.

        From these and a user's own upload, :meth:`download` gets the mean over the other users without summing again.

        Args:
            kept: State of the server, changed in place.
            received: The uploads, and the indices of the participants.
        """
        users = list(received.users)
        kept[OWN][users] = flatten([received.tensors[name] for name in model_of(kept)]).to(kept[OWN])
        kept[SENT][users] = 1
        kept[TOTAL].copy_(kept[OWN].sum(0))
        kept[COUNT].copy_(kept[SENT].sum())

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return for each user the mean of the others' most recent uploads, or the initial model if there are none.

        Args:
            kept: State of the server.
            users: Indices of the receiving users.
        """
        initial_model = model_of(kept)
        indices = list(users)
        # The number and the sum of all users' uploads, without the receiving user's own.
        num_others = (kept[COUNT] - kept[SENT][indices]).unsqueeze(1)
        sum_of_others = kept[TOTAL] - kept[OWN][indices]
        mean = sum_of_others / num_others.clamp(min=1)
        flat_initial_model = flatten([t.unsqueeze(0) for t in initial_model.values()])
        flat_models = torch.where(num_others > 0, mean, flat_initial_model)  # (users, numbers)
        sizes = [t.numel() for t in initial_model.values()]
        download = {}
        for (name, t), flat_tensor in zip(initial_model.items(), flat_models.split(sizes, dim=1), strict=True):
            download[name] = flat_tensor.view(-1, 1, *t.shape)  # one model for each user
        return download


# ---------------------------------------------------------------- FedTreeLoRA


FIRST_FACTORS, IN_TREE, LABELS = "first", "sent", "labels"


def factors_by_layer(uploads: Tree) -> list[Float[Tensor, "users columns"]]:
    """Return all LoRA factors B of each transformer layer, flattened to one vector for each user.

    Args:
        uploads: Uploaded tensors; factors B have names such as "layers.0.mlp.up.b".
    """
    names = sorted(name for name in uploads if name.endswith(".b"))
    layers = sorted({layer_of(name) for name in names})
    return [flatten([uploads[name] for name in names if layer_of(name) == layer]).double() for layer in layers]


def layer_of(name: str) -> int:
    """Return the transformer layer that a tensor belongs to: 3 for "layers.3.mlp.up.a"."""
    return int(name.split(".")[1])


def frobenius_distances(
    factors: Float[Tensor, "users columns"], others: Float[Tensor, "others columns"]
) -> Float[Tensor, "users others"]:
    """Return the distances ``|B_i - B_j|`` of the users' factors B in a layer (FedTreeLoRA's D^(l)).

    Args:
        factors: All factors B of the layer, for each user.
        others: The same of other users.
    """
    return torch.cdist(factors, others, compute_mode="donot_use_mm_for_euclid_dist")


def choose_clusters(
    merges: Merges, distances: Sequence[Float[Tensor, "users users"]], threshold: float, window: int
) -> Int[Tensor, "users layers"]:
    """Return each user's cluster in each layer: cuts of one tree, into more clusters for deeper layers.

    Layer l has c clusters, ``c' <= c < min(users, c' + window)``, with c' of the layer before and c' = 1 for the first.
    The c with the largest silhouette in the layer's distances wins; c = 1 scores ``threshold``. A user alone is one
    cluster.

    Source: FedTreeLoRA (Bian et al. 2026, arXiv:2603.13282), adaptive layer-wise depth alignment.

    Args:
        merges: Tree of all users.
        distances: The users' distances in each layer.
        threshold: Score tau of a single cluster.
        window: Size K of the range of numbers of clusters.
    """
    num_users = len(merges) + 1
    num_clusters, labels = 1, []
    for of_layer in distances:
        most = max(num_clusters, min(num_users - 1, num_clusters + window - 1))
        cuts = {number: cut(merges, number) for number in range(num_clusters, most + 1)}
        scores = {
            number: threshold if number == 1 else silhouette(of_layer.cpu(), users) for number, users in cuts.items()
        }
        num_clusters = max(cuts, key=lambda number: scores[number])  # the fewest of equally good ones
        labels.append(cuts[num_clusters])
    return torch.stack(labels, 1)


@dataclass(frozen=True, kw_only=True)
class TreeOfUsers(Server):
    """Server of FedTreeLoRA: cuts one tree of users into clusters for each layer, into more for deeper layers.

    Its state has the model of users outside the tree and
    - ``own (users, columns)``: each user's most recent upload, flattened,
    - ``first (users, columns)``: the factors B of its first upload,
    - ``sent (users,)``: 1 for users in the tree, else 0,
    - ``labels (users, layers)``: the cluster of each user in each layer.
    """

    threshold: float
    window: int
    kind = "stack"
    by_user = frozenset({OWN, FIRST_FACTORS, IN_TREE, LABELS})
    one_rank = True
    first_download = True
    keeps_adapters = False

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state: users have their own LoRA, no external expert, and no place in a tree.

        Args:
            setup: Initial models, and the users' names.
        """
        models = {name: t[:, :1] if t.dim() == 4 else t for name, t in setup.models.items()}  # (models, experts, ...)
        num_users = len(setup.users)
        flat_model = flatten([t[:1] for t in models.values()])
        factors = factors_by_layer({name: t[:1] for name, t in models.items()})
        return {
            **{MODEL_PREFIX + name: t[0].clone() for name, t in models.items()},
            OWN: torch.zeros_like(flat_model.expand(num_users, -1)),
            FIRST_FACTORS: torch.zeros_like(torch.cat(factors, 1).expand(num_users, -1)),
            IN_TREE: torch.zeros(num_users),
            LABELS: torch.zeros(num_users, len(factors), dtype=torch.int64),
        }

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Store the participants' uploads, build a tree of the first ones, and put later users beside the closest one.

        The tree's distance is the mean over layers of ``|B_i - B_j|``.

        Args:
            kept: State of the server, changed in place.
            received: The uploads, and the indices of the participants.

        Raises:
            DivergenceError: A factor B is not finite.
        """
        users = torch.tensor(received.users, device=kept[OWN].device)
        kept[OWN][users] = flatten([received.tensors[name] for name in model_of(kept)]).to(kept[OWN])
        is_new = kept[IN_TREE][users] == 0
        if not is_new.any():
            return
        new_users = users[is_new]
        factors = factors_by_layer({name: t[is_new.to(t.device)] for name, t in received.tensors.items()})
        if kept[IN_TREE].any():
            kept[LABELS][new_users] = _labels_of_closest(kept, factors)
        else:
            require_finite(torch.cat(factors, 1), "fedtreelora")
            distances = [frobenius_distances(of_layer, of_layer) for of_layer in factors]
            merges = agglomerate(torch.stack(distances).mean(0))
            kept[LABELS][new_users] = choose_clusters(merges, distances, self.threshold, self.window).to(kept[LABELS])
        kept[FIRST_FACTORS][new_users] = torch.cat(factors, 1)
        kept[IN_TREE][new_users] = 1

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return each layer's means over the users of the user's cluster, and over all others as second expert.

        Args:
            kept: State of the server.
            users: Indices of the users.

        Returns:
            Tensors by name, ``(users, 1, *shape)``: each user gets one model.
        """
        initial_model = model_of(kept)
        indices = list(users)
        counted = kept[IN_TREE].to(kept[OWN])
        is_in_tree = counted[indices].bool()
        layers = sorted({layer_of(name) for name in initial_model})
        sizes = [t.numel() for t in initial_model.values()]
        download = {}
        for (name, initial), uploads in zip(initial_model.items(), kept[OWN].split(sizes, dim=1), strict=True):
            labels = kept[LABELS][:, layers.index(layer_of(name))]
            cluster_means, external_means = means_of_clusters(uploads, labels, counted)
            shape = (len(indices), *initial.shape)
            own = cluster_means[labels[indices]].view(shape)
            own = torch.where(is_in_tree.view(-1, *[1] * initial.dim()), own, initial)
            parts = [own]
            if initial.dim() == 3:  # of an MLP: (experts, rank, width)
                external = external_means[labels[indices]].view(shape)
                parts.append(external * is_in_tree.view(-1, *[1] * initial.dim()))
            download[name] = torch.cat(parts, 1).unsqueeze(1)  # one model for each user
        return download


def _labels_of_closest(kept: Tree, factors: Sequence[Float[Tensor, "users columns"]]) -> Int[Tensor, "users layers"]:
    """Return for each new user the clusters of the closest user in the tree, by the tree's distance.

    Args:
        kept: State of the server, with the tree's users.
        factors: The new users' factors B of each layer.
    """
    tree_users = kept[IN_TREE].nonzero().flatten()
    first_factors = kept[FIRST_FACTORS][tree_users].split([of_layer.shape[1] for of_layer in factors], 1)
    distances = [frobenius_distances(new, first) for new, first in zip(factors, first_factors, strict=True)]
    return kept[LABELS][tree_users[torch.stack(distances).mean(0).argmin(1)]]


def means_of_clusters(
    uploads: Float[Tensor, "users columns"], labels: Int[Tensor, " users"], counted: Float[Tensor, " users"]
) -> tuple[Float[Tensor, "clusters columns"], Float[Tensor, "clusters columns"]]:
    """Return the plain mean of the uploads over the users of each cluster, and over all other users.

    A mean over no users is zero.

    Args:
        uploads: An upload of each user.
        labels: Cluster of each user.
        counted: 1 for users that count, else 0.
    """
    in_cluster = torch.nn.functional.one_hot(labels).to(uploads) * counted.unsqueeze(1)  # (users, clusters)
    sizes = in_cluster.sum(0).unsqueeze(1)
    sums = in_cluster.T @ uploads
    rest_sizes = sizes.sum(0) - sizes
    rest = (in_cluster.sum(1, keepdim=True) - in_cluster).T @ uploads
    return sums / sizes.clamp(min=1), rest / rest_sizes.clamp(min=1)


def fedtreelora(
    *,
    threshold: Annotated[float, Range(least=-1, most=1)] = 0.1,
    window: Annotated[int, Range(least=1, most=10_000)] = 3,
    warmup_rounds: Count = 1,
) -> Method:
    """FedTreeLoRA: users share first layers with all, and deeper layers with ever smaller clusters of one tree.

    Source: Bian et al. 2026, "FedTreeLoRA: Reconciling Statistical and Functional Heterogeneity in Federated LoRA
    Fine-Tuning", ICML 2026, arXiv:2603.13282.
    Shared: attention, 1 LoRA expert per MLP (a generalist), each within the layer's cluster.  Local: a number for each
    MLP, in its router.  Frozen: the base, and an external expert per MLP (a specialist), which comes from the server.
    Client: in the first ``warmup_rounds`` rounds local steps on the user's own LoRA, without exchange.  Then local
    steps on attention, the cluster's expert and the number together, the latter with the router's settings.  The
    cluster's expert has the weight lambda, from 0 to 1, and the external one ``1 - lambda``.
    Server: after the warm-up a tree by agglomerative clustering, with the mean over layers of ``|B_i - B_j|``.  Layer l
    has c clusters, ``c' <= c < min(users, c' + window)``, with c' of the layer before and c' = 1 for the first.  The c
    with the largest silhouette in the layer's distances wins; c = 1 scores ``threshold``.  Then the cluster's expert is
    the plain mean of A and of B over the most recent uploads of the layer's cluster, the external one that over all
    other users.
    Differs from the paper: an expert is a whole MLP with its LoRA, whose outputs are mixed, with one lambda for each
    MLP; with ``adapters: {mix: linear}`` the outputs of each linear are mixed, as in the paper.  Attention has the
    cluster's LoRA only.  lambda is the sigmoid of a number that starts at 0; a user without external expert has 1.
    Absent users count with their most recent upload.  Users who miss the first exchange start from the initial LoRA,
    and their first upload puts them beside the closest user of the tree.  Users who join later train alone.
    Written from summaries of the paper with its equations: average linkage, the form of lambda and the defaults are
    ours.

    Args:
        threshold: Score of a single cluster, from -1 to 1; more clusters need a larger silhouette.
        window: A layer has fewer than this many clusters more than the layer before.
        warmup_rounds: Rounds in which users train their own LoRA before they are clustered.
    """
    own = frozenset({ATTENTION, GENERALIST})
    return Method(
        name="fedtreelora",
        placement=Placement(
            specialists=1,
            routed=True,
            gating=ScalarGating(),
            shared=own,
            received=own | {SPECIALIST},
        ),
        client=Client(phases=(Phase(roles=own | {ROUTER}, optimizer="both"),)),
        server=TreeOfUsers(threshold=threshold, window=window, exchange_from=warmup_rounds),
    )


@dataclass(frozen=True)
class ScalarGating:
    """Gating of FedTreeLoRA: the first of two experts has the weight lambda for all tokens, the second the rest."""

    def __str__(self) -> str:
        """Return how experts are weighted, to complete an error message "its experts are ..."."""
        return "weighted by a number of the user"

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Init]:
        """Return the number of rows of an MLP's router tensor ``(rows, width)``, and its initialiser.

        The first entry of the single row is the logit of lambda; the other entries stay zero.

        Args:
            experts: Number of experts, not used.
            rank: LoRA rank, not used.
            width: Width of the router's input, not used.
        """
        return 1, init_zero

    def __call__(
        self, router: Router, products: Float[Tensor, "users n rows"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Return the experts' weights: lambda and ``1 - lambda``, or 1 and 0 if the second expert is missing.

        An expert whose LoRA factor A is zero is missing: downloads pad missing experts with zeros.

        Args:
            router: The router, with the logits of lambda in its weight and the A factors of the experts as ``keys``.
            products: Products of the router's row with x, for their dtype.
            x: Inputs of the MLP for n tokens of each user, not used.
        """
        assert router.weight is not None, "without its router a model averages its experts"
        has_external = router.keys[:, 1].flatten(1).any(1)
        share = torch.where(has_external, router.weight[:, 0, 0].to(products.dtype).sigmoid(), 1.0)
        shares = torch.stack([share, 1 - share], 1).unsqueeze(1)  # (users, 1, experts)
        return shares.expand(-1, products.shape[1], -1)
