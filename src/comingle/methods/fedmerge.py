"""FedMerge: models on the server, merged into one personal model per user.

m users, d models Theta_j, weights w (m x d), theta_i = sum_j w_ij Theta_j (:func:`mix`).
Updates g_i have the sign of gradients: the downloaded theta_i minus the uploaded one. p_i = n_i / n.
Source: FedMerge (Chen et al. 2025, arXiv:2504.06768), equations 5 and 6, appendices C and D.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import Received, Server, ServerSetup
from comingle.methods.settings import Count, Models, NotNegative, Range
from comingle.models.routers import ZERO_SHARE_LOGIT, softmax_mixture
from comingle.utils.errors import RecipeError
from comingle.utils.seeds import generator
from comingle.utils.trees import Tree

MERGING = "merging"
"""Key of the merging weights ``(users, models)``, or of their logits with ``softmax``."""

_SOUP = "soup."


def start_soup(models: Tree) -> Tree:
    """Return the state of a server that starts with ``models (models, *shape)``.

    Raises:
        RecipeError: There are several models and all are equal, so that merging weights could never change.
    """
    count = len(next(iter(models.values())))
    if count > 1 and all(bool((t == t[:1]).all()) for t in models.values()):
        raise RecipeError(
            f"method.models: the server's {count} models are identical, so merging weights would never change; give a "
            "base with random weights, or models: 1"
        )
    return {_SOUP + name: t.clone() for name, t in models.items()}


def soup_of(memory: Tree) -> Tree:
    """Return the models ``(models, *shape)`` in a state; may be changed in place."""
    return {name.removeprefix(_SOUP): t for name, t in memory.items() if name.startswith(_SOUP)}


MOST_STEPS = 10_000
"""Step limit of the public code's line search."""


EMPTY = 1e-12
"""Total weight of participants below which a model counts as unused."""


def column_shares(
    shares: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """Return each user's share in the step of each model: ``p_i w_ij / sum_i' p_i' |w_i'j|`` for user i and model j.

    FedMerge's eq. 5 has the shares ``p_i w_ij``. Here they are scaled so that the magnitudes for each model sum to 1.
    If no weight is negative, a model moves by a mean of its users' updates. With negative weights a model moves in the
    direction of eq. 5, by at most the largest update. The public code divides by the signed sum, which would reverse
    the direction of a model with a negative sum. A model that no participant uses gets zeros, so it is unchanged.

    Args:
        shares: Merging weights w.
        weights: Aggregation weights p.
    """
    moves = weights.to(shares).unsqueeze(1) * shares
    total = moves.abs().sum(0)
    return torch.where(total > EMPTY, moves / total.clamp(min=EMPTY), 0.0)


def soup_gradient(shares: Float[Tensor, "users models"], updates: Tree) -> Tree:
    """Return ``sum_i shares_ij g_i`` for every model j; with shares ``p_i w_ij`` that is eq. 5."""
    return mix(updates, shares.T)


def inner_products(soup: Tree, updates: Tree, names: Collection[str]) -> Float[Tensor, "users models"]:
    """Return the inner product ``<Theta_j, g_i>`` of each model with each user's update, over the tensors in ``names``.

    Args:
        soup: The server's models Theta, ``(models, *shape)``.
        updates: The users' updates g, ``(users, *shape)``.
        names: Tensors to use.
    """
    parts = [updates[n].flatten(1) @ soup[n].flatten(1).T for n in names]
    return torch.stack(parts).sum(0)


def weight_gradient(
    inner: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """Return the gradient of the users' total loss L in the merging weights (FedMerge, eq. 6).

    ``dL/dw_ij = p_i <Theta_j, g_i>`` for user i and model j, with the server's models Theta and the users' updates g,
    which stand for gradients.

    Args:
        inner: Inner products ``<Theta_j, g_i>`` of each model with each user's update.
        weights: Aggregation weights p.
    """
    return weights.to(inner).unsqueeze(1) * inner


def logit_gradient(
    shares: Float[Tensor, "users models"], inner: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """Return the gradient of the logits a, whose row-wise softmax are the merging weights w (FedMerge, appendix D).

    ``dL/da_ij = p_i w_ij <Theta_j - theta_i, g_i>`` for user i and model j, with the server's models Theta, the user's
    merged model ``theta_i = sum_k w_ik Theta_k`` and update ``g_i``. The merged model itself is not needed, as
    ``<theta_i, g_i> = sum_k w_ik <Theta_k, g_i>``.

    Args:
        shares: Merging weights w.
        inner: Inner products ``<Theta_j, g_i>``.
        weights: Aggregation weights p.
    """
    merged = (shares * inner).sum(1, keepdim=True)  # <theta_i, g_i>
    return weight_gradient(shares * (inner - merged), weights)


def fixed_step(
    gradient: Float[Tensor, "users models"], weights: Float[Tensor, " users"], size: float
) -> Float[Tensor, "users models"]:
    """Return the step to subtract from the merging weights, a multiple of the gradient of nearly fixed magnitude.

    FedMerge's section 4.1 has steps of a "fixed magnitude". Its public code gets them by a search: it writes the
    gradient as ``p_i G_ij``, scales it so that the magnitudes of G sum to 1, and takes equal small steps of ``size p_i
    G_ij`` until an entry has moved by more than ``size``, or :data:`MOST_STEPS` are taken. Here the number of small
    steps is computed. The largest entry of the result is just above ``size``.

    Args:
        gradient: Gradient of the merging weights or logits, ``p_i G_ij`` for user i and model j.
        weights: Aggregation weights p.
        size: Magnitude of the step.
    """
    weights = weights.to(gradient).unsqueeze(1)
    total = torch.where(weights > 0, gradient / weights, 0.0).abs().sum()  # of the magnitudes of G
    small_step = size * gradient / total
    largest = float(small_step.abs().max())
    if not largest > 0:  # the gradient is zero, so the division above gave nan
        return torch.zeros_like(gradient)
    num_steps = min(int(size / largest) + 1, MOST_STEPS)
    return small_step * num_steps


def head(tree: Tree) -> list[str]:
    """Return the names of the tensors of a net's last layer.

    For the LoRA of a language model, which adapts no last layer, return the names of all tensors.

    Args:
        tree: Tensors of a model, in the model's order.
    """
    if any(name.endswith(".a") for name in tree):  # factors A of LoRA
        return list(tree)
    # Running statistics have names such as "norm.running_mean". A layer is a name without its last part.
    trained = [name for name in tree if not name.rpartition(".")[2].startswith("running")]
    last_layer = trained[-1].rpartition(".")[0]
    return [name for name in trained if name.rpartition(".")[0] == last_layer]


def mix(uploads: Tree, matrix: Float[Tensor, "receivers senders"]) -> Tree:
    """Return ``sum_j matrix_ij upload_j`` for each receiver i.

    With the identity as matrix each user keeps its own model, as in local training; with equal rows all users get the
    same mean, as in FedAvg.

    The result for one receiver does not depend on the other receivers. A matrix product rounds differently for
    different shapes, so each sum is added up in the order of the senders. This costs about 1.6 times the product.

    Args:
        uploads: Tensors ``(senders, *shape)``.
        matrix: Weight of each sender's upload for each receiver.
    """
    return {name: _mix_in_chunks(t, matrix.to(t)) for name, t in uploads.items()}


def _mix_in_chunks(uploads: Float[Tensor, "senders ..."], matrix: Float[Tensor, "receivers senders"]) -> Tensor:
    """Return ``sum_j matrix_ij upload_j`` for each receiver i, added up in the order of the senders.

    Columns are processed in chunks whose intermediate results fit the cache.

    Args:
        uploads: One tensor of all senders.
        matrix: Weight of each sender's upload for each receiver.
    """
    sent = uploads.flatten(1)
    mixed = sent.new_zeros(len(matrix), sent.shape[1])
    width = max(_MIN_CHUNK, _CACHED_NUMBERS // max(len(matrix), 1))  # there may be no receiver
    buffer = sent.new_empty(len(matrix), min(width, sent.shape[1]))  # reused for the products of all chunks
    weights_by_sender = matrix.T.unsqueeze(-1)
    for chunk, mixed_chunk in zip(sent.split(width, 1), mixed.split(width, 1), strict=True):
        products = buffer[:, : chunk.shape[1]]
        for weights, upload in zip(weights_by_sender, chunk, strict=True):
            mixed_chunk.add_(torch.mul(weights, upload, out=products))
    return mixed.view(len(matrix), *uploads.shape[1:])


_MIN_CHUNK, _CACHED_NUMBERS = 1024, 2**16
"""Chunk size in numbers: at least for each receiver, and for all receivers together (to fit the cache)."""


Keys = Literal["head", "all", "trained", "body", "first"]
"""Tensors of the inner products that move merging weights.

"head" is the last layer, "trained" all but running statistics, "body" all trained ones but the last layer.
"""


def names_for_inner_products(tree: Tree, which: Keys) -> list[str]:
    """Return the names of the tensors that are used to update the merging weights.

    The update follows inner products of models and users' updates, over these tensors alone.

    Args:
        tree: Tensors of a model, in the model's order.
        which: "head" is a net's last layer, "first" its first layer, "trained" all but running statistics, "body" the
            trained ones without the last layer, "all" everything. For LoRA, head, body and all are the same.
    """
    # Running statistics have names such as "norm.running_mean". A layer is a name without its last part.
    trained = [name for name in tree if not name.rpartition(".")[2].startswith("running")]
    if which == "head":
        return head(tree)
    if which == "first":
        first_layer = trained[0].rpartition(".")[0]
        return [name for name in trained if name.rpartition(".")[0] == first_layer]
    if which == "body":
        without_head = [name for name in trained if name not in head(tree)]
        return without_head or trained  # empty for LoRA, whose head is everything
    return trained if which == "trained" else list(tree)


def keep_largest(updates: Tree, names: Collection[str], share: float) -> Tree:
    """Return updates with only the largest numbers of each user, by magnitude, and zeros elsewhere.

    Inner products of models and updates may use only these numbers: FedMerge's section 3 names pruning.

    Args:
        updates: Updates ``(users, *shape)``.
        names: Tensors to return; with a share of 1 all are returned as they are.
        share: Share of a user's numbers to keep, over all of ``names`` together.
    """
    if share == 1:
        return updates
    magnitudes = torch.cat([updates[name].flatten(1) for name in names], 1).abs()
    num_kept = math.ceil(share * magnitudes.shape[1])
    threshold = magnitudes.topk(num_kept, 1).values[:, -1]
    return {n: t * (t.abs() >= threshold.view(-1, *[1] * (t.dim() - 1))) for n, t in updates.items() if n in names}


@dataclass(frozen=True, kw_only=True)
class Merge(Server):
    """Server of FedMerge: keeps d models and the users' merging weights (or logits, with ``softmax``).

    Its settings are those of ``fedmerge``. With ``chosen``, a user merges that many models, drawn at random, with equal
    weights or, with ``random``, random ones.
    """

    models: int
    softmax: bool = True
    column_normalize: bool = True
    models_first: bool = True
    keys: Keys = "head"
    share: float = 1.0
    weight_step: float
    global_rate: float
    global_iterations: int = 1
    chosen: int | None = None
    random: bool = False
    kind = "stack"
    knows_starts = True
    by_user = frozenset({MERGING})
    first_download = True

    @property
    def server_models(self) -> int:
        """Number of models on the server."""
        return self.models

    def start(self, setup: ServerSetup) -> Tree:
        """Return the models and the users' initial merging weights, or their logits with ``softmax``.

        The weights of a user are equal for all models. With the setting ``chosen``, which needs ``softmax``, only that
        many models, drawn at random for each user, have a weight; with ``random`` their weights are random too.
        """
        equal = 0.0 if self.softmax else 1 / self.models  # of logits, or of the weights themselves
        weights = next(iter(setup.models.values())).new_full((len(setup.users), self.models), equal)
        if self.chosen:
            for user, logits in zip(setup.users, weights, strict=True):
                draw = generator(setup.seed, user, "fedmerge-fixed")
                order = torch.randperm(self.models, generator=draw)
                chosen, others = order[: self.chosen], order[self.chosen :]
                logits[others] = ZERO_SHARE_LOGIT  # a weight of 0 in the softmax
                if self.random:  # the logarithms of exponential draws: their softmax is uniform on the simplex
                    logits[chosen] = torch.empty(len(chosen)).exponential_(generator=draw).log().to(logits)
        return start_soup(setup.models) | {MERGING: weights}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Update the models and the participants' merging weights, in the order that ``models_first`` sets.

        A user's update is the merged model that it downloaded minus the one that it uploaded, so it has the sign of a
        gradient. Both steps are repeated ``global_iterations`` times with the same updates.

        Args:
            kept: State of the server, changed in place: the models ``(models, *shape)``, and each user's merging
                weights or logits.
            received: The uploads, with the indices and aggregation weights of the participants.
        """
        soup, logits = soup_of(kept), kept[MERGING][list(received.users)]
        downloaded = mix(soup, self._merging_shares(logits))
        updates = {name: t.sub_(received.tensors[name]) for name, t in downloaded.items()}  # in place, to save memory
        # With a step of 0 the merging weights are frozen.
        steps = (self._move_models, self._move_weights) if self.weight_step else (self._move_models,)
        for _ in range(self.global_iterations):
            for move in steps if self.models_first else reversed(steps):
                move(soup, logits, updates, received.weights)
        kept[MERGING][list(received.users)] = logits

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return each user's merged model."""
        merged = mix(soup_of(kept), self._merging_shares(kept[MERGING][list(users)]))
        return {name: t.unsqueeze(1) for name, t in merged.items()}

    def merging_weights(self, kept: Tree) -> Float[Tensor, "users models"]:
        """Return the merging weights of all users."""
        return self._merging_shares(kept[MERGING])

    def settled(self) -> Merge:
        """Return a server whose models are fixed; the merging weights of new users still move by eq. 6."""
        return replace(self, global_rate=0.0)

    def _merging_shares(self, logits: Float[Tensor, "users models"]) -> Float[Tensor, "users models"]:
        """Return the merging weights: the softmax of the logits, or without ``softmax`` the stored weights."""
        return softmax_mixture(logits, 1.0) if self.softmax else logits

    def _move_models(self, soup: Tree, logits: Tensor, updates: Tree, weights: Tensor) -> None:
        """Take a gradient step on the server's models, in place: the models' updates of FedMerge's eq. 5.

        The gradient of model j is ``sum_i p_i w_ij g_i``, the users' updates g_i with the shares ``p_i w_ij``. With
        ``column_normalize`` the shares of each model are scaled so that their magnitudes sum to 1.

        Args:
            soup: Models ``(models, *shape)``, changed in place.
            logits: Merging weights of the participants, or their logits.
            updates: Updates g of the participants, ``(users, *shape)``.
            weights: Aggregation weights p.
        """
        shares = self._merging_shares(logits)
        shares = column_shares(shares, weights) if self.column_normalize else weights.to(shares).unsqueeze(1) * shares
        for name, gradient in soup_gradient(shares, updates).items():
            soup[name].sub_(gradient, alpha=self.global_rate)

    def _move_weights(self, soup: Tree, logits: Tensor, updates: Tree, weights: Tensor) -> None:
        """Take a gradient step on the participants' merging weights, or on their logits, in place (FedMerge, eq. 6).

        The gradient for user i and model j is ``p_i <Theta_j, g_i>``, or for logits ``p_i w_ij <Theta_j - theta_i,
        g_i>`` with the merged model theta_i. The step is scaled so that its largest entry is just above
        ``weight_step``, whatever the gradient's size. Inner products are over the tensors that the setting ``keys``
        names, and over the ``share`` of an update's largest numbers.

        Args:
            soup: The server's models Theta, ``(models, *shape)``.
            logits: Merging weights w of the participants, or their logits; ``(users, models)``, changed in place.
            updates: Updates g of the participants, ``(users, *shape)``.
            weights: Aggregation weights p.
        """
        names = names_for_inner_products(soup, self.keys)
        inner = inner_products(soup, keep_largest(updates, names, self.share), names).to(logits)
        gradient = (
            logit_gradient(logits.softmax(1), inner, weights) if self.softmax else weight_gradient(inner, weights)
        )
        logits.sub_(fixed_step(gradient, weights, self.weight_step))


def fedmerge(
    *,
    models: Models = 5,
    softmax: bool = True,
    column_normalize: bool = True,
    models_first: bool = True,
    inner_product_keys: Keys = "head",
    inner_product_share: Annotated[float, Range(least=0, most=1, above=True)] = 1.0,
    weight_step: NotNegative = 0.01,
    global_rate: NotNegative = 1.0,
    global_iterations: Count = 1,
    proximal: NotNegative = 0.0,
) -> Method:
    """FedMerge: the server keeps d models and all merging weights; users exchange one merged model each.

    Source: Chen et al. 2025, "FedMerge: Federated Personalization via Model Merging", arXiv:2504.06768, Algorithm 1.
    Shared: the net with its statistics; on a language model attention and 1 LoRA expert per MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: joint steps on the merged model, as in FedAvg; ``proximal`` times |theta - theta_i|^2 is added to the loss.
    Server: the models by eq. 5 and 8, then the weights by eq. 6 and 9; with ``softmax`` the weights are the softmax of
    logits (appendix D).
    Differs from the paper: with eq. 5 the models would move d times less than "the global model is replaced" says, so a
    model moves by a mean over its users, as in the public code (``column_normalize``; false is eq. 5); weights below
    zero (without ``softmax``) count there with their magnitude.  A model that no participant uses is unchanged.  The
    public code moves weights first; its ``proximal`` is 0.01.  The search for the step is in closed form.  Users'
    shares in eq. 5 and 6 are ``training.weighting``, one setting for all methods that a recipe compares: equal by
    default, the paper's n_i / n with ``samples`` (or ``tokens``), as in the published recipes.

    Args:
        models: Number of models on the server.
        softmax: Use the softmax of logits as merging weights (FedMerge, appendix D).
        column_normalize: Move a model by a mean over its users, as the public code does; ``false`` is FedMerge's eq. 5
            as printed.
        models_first: Update the models before the merging weights; the public code updates the weights first.
        inner_product_keys: Tensors whose inner products move the weights (eq. 6): ``head`` (the last layer, as in the
            public code; all of LoRA, which has none), ``all``, ``trained`` (all but running statistics), ``body``
            (trained tensors without the head), ``first`` (the first layer).
        inner_product_share: Share of the entries of ``inner_product_keys`` that are used: those that the user's update
            changed most; above 0. FedMerge's section 3 names pruning without details.
        weight_step: Largest change of a merging weight, or of its logit, in an update; 0 freezes the weights.
        global_rate: Learning rate of the server's models.
        global_iterations: Updates of the server's models and merging weights in a round.
        proximal: Weight of the squared distance to the downloaded model in each user's objective; 0.01 in the public
            code.
    """

    return Method(
        name="fedmerge",
        placement=Placement(shared=MODEL),
        client=Client(
            phases=joint(routed=False), parts=(Proximal(proximal),) if proximal else (), drops_nonfinite=True
        ),
        server=Merge(
            models=models,
            softmax=softmax,
            column_normalize=column_normalize,
            models_first=models_first,
            keys=inner_product_keys,
            share=inner_product_share,
            weight_step=weight_step,
            global_rate=global_rate,
            global_iterations=global_iterations,
        ),
    )


def fedmerge_fixed(
    *,
    models: Models = 15,
    chosen: Models = 5,
    weights: Literal["even", "random"] = "even",
    global_rate: NotNegative = 1.0,
) -> Method:
    """FedMerge with frozen merging weights: each user merges randomly drawn models with equal or random weights.

    Source: Chen et al. 2025 (FedMerge, arXiv:2504.06768), Table 4, "Fixed (``chosen`` / ``models``)".
    Shared: the net with its statistics; on a language model attention and 1 LoRA expert per MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: joint steps on the merged model, as in FedAvg.  Server: the models move as for ``fedmerge``, by a mean over
    the users that merge them; the merging weights do not.
    Differs from the paper: none known; Table 4's caption has even weights, the text below it random ones from an
    unnamed distribution: ours are uniform on the simplex.

    Args:
        models: Number of models on the server.
        chosen: Number of models that each user merges, drawn at random.
        weights: Frozen weights of the chosen models: ``even``, or ``random`` (uniform on the simplex).
        global_rate: Learning rate of the server's models.

    Raises:
        RecipeError: ``chosen`` is above ``models``.
    """
    if chosen > models:
        raise RecipeError(f"method fedmerge-fixed: chosen is {chosen} of {models} models; allowed: 1 to {models}")

    server = Merge(models=models, weight_step=0.0, global_rate=global_rate, chosen=chosen, random=weights == "random")
    return replace(fedmerge(), name="fedmerge-fixed", server=server)


@dataclass(frozen=True)
class Proximal(ClientHook):
    """Adds ``weight |theta - theta_0|^2`` to the objective, theta_0 the model at the start of the round."""

    weight: float
    looks_back = True

    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        """Add the gradient of the term, ``2 weight (theta - theta_0)``."""
        now, before = cohort.tensors, cohort.began
        for name, gradient in gradients.items():
            gradients[name] = gradient + 2 * self.weight * (now[name] - before[name])
