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

MERGING_WEIGHTS = "merging"
"""Key of the merging weights ``(users, models)``, or of their logits with ``softmax``."""

_MODELS_PREFIX = "soup."
"""Prefix of the models' tensors in the server's state; part of checkpoints."""


def state_from_models(models: Tree) -> Tree:
    """Return the part of a server's state that holds its models, as copies under keys such as "soup.head.weight".

    Args:
        models: Initial models, ``(models, *shape)``.

    Raises:
        RecipeError: There are several models and all are equal, so merging weights could never change.
    """
    any_tensor = next(iter(models.values()))
    num_models = len(any_tensor)
    all_equal = all(bool((t == t[:1]).all()) for t in models.values())
    if num_models > 1 and all_equal:
        raise RecipeError(
            f"method.models: the server's {num_models} models are identical, so merging weights would never change; "
            "give a base with random weights, or models: 1"
        )
    return {_MODELS_PREFIX + name: t.clone() for name, t in models.items()}


def server_models_in(kept: Tree) -> Tree:
    """Return the server's models ``(models, *shape)`` from its state, without copying them."""
    return {name.removeprefix(_MODELS_PREFIX): t for name, t in kept.items() if name.startswith(_MODELS_PREFIX)}


MOST_STEPS = 10_000
"""Step limit of the public code's line search."""


EMPTY = 1e-12
"""Total weight of participants below which a model counts as unused."""


def column_shares(
    shares: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """Return ``p_i w_ij / sum_k p_k |w_kj|``: the factor of user i's update in the step of model j.

    FedMerge's eq. 5 has the factors ``p_i w_ij``. The division makes a model's step a mean of its users' updates. A
    model that no participant uses has factors of 0. The public code divides by the sum of ``p_k w_kj``; if that is
    negative, it reverses the model's step.

    Args:
        shares: Merging weights w.
        weights: Aggregation weights p.
    """
    eq_5_factors = weights.to(shares).unsqueeze(1) * shares
    total_by_model = eq_5_factors.abs().sum(0)
    scaled = eq_5_factors / total_by_model.clamp(min=EMPTY)
    return torch.where(total_by_model > EMPTY, scaled, 0.0)


def models_gradient(shares: Float[Tensor, "users models"], updates: Tree) -> Tree:
    """Return the gradient of each of the server's models j, ``sum_i shares_ij g_i`` over the users' updates g_i.

    With ``shares_ij = p_i w_ij`` it is eq. 5 of FedMerge (Chen et al. 2025, arXiv:2504.06768); p are the aggregation
    weights and w the merging weights.
    """
    return mix(updates, shares.T)


def inner_products(models: Tree, updates: Tree, names: Collection[str]) -> Float[Tensor, "users models"]:
    """Return the inner product ``<Theta_j, g_i>`` of each model with each user's update.

    Args:
        models: The server's models Theta, ``(models, *shape)``.
        updates: The users' updates g, ``(users, *shape)``.
        names: Tensors over which the product is summed.
    """
    products_by_tensor = [updates[name].flatten(1) @ models[name].flatten(1).T for name in names]
    return torch.stack(products_by_tensor).sum(0)


def weight_gradient(
    inner: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """Return the loss's gradient in the merging weight w_ij of user i and model j, ``p_i <Theta_j, g_i>`` (eq. 6).

    Source: FedMerge (Chen et al. 2025, arXiv:2504.06768), eq. 6.

    Args:
        inner: Inner products ``<Theta_j, g_i>`` of the server's models Theta and the users' updates g, ``(users,
            models)``.
        weights: Aggregation weights p.
    """
    return weights.to(inner).unsqueeze(1) * inner


def logit_gradient(
    shares: Float[Tensor, "users models"], inner: Float[Tensor, "users models"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users models"]:
    """Return the loss's gradient in the logit a_ij of user i and model j, ``p_i w_ij <Theta_j - theta_i, g_i>``.

    The merging weights w are the softmax of each user's logits, and ``theta_i = sum_j w_ij Theta_j`` is the user's
    merged model.

    Source: FedMerge (Chen et al. 2025, arXiv:2504.06768), appendix D.

    Args:
        shares: Merging weights w.
        inner: Inner products ``<Theta_j, g_i>`` of the server's models Theta and the users' updates g.
        weights: Aggregation weights p.
    """
    inner_of_merged = (shares * inner).sum(1, keepdim=True)  # <theta_i, g_i> = sum_j w_ij <Theta_j, g_i>
    difference = inner - inner_of_merged  # <Theta_j - theta_i, g_i>
    return weight_gradient(shares * difference, weights)


def fixed_step(
    gradient: Float[Tensor, "users models"], weights: Float[Tensor, " users"], size: float
) -> Float[Tensor, "users models"]:
    """Return the gradient scaled so that its largest entry is just above ``size``, as the step to subtract.

    FedMerge's public code (for the "fixed magnitude" of section 4.1) repeats the small step ``size p_i G_ij``, where
    ``p_i G_ij`` is the gradient and the magnitudes of G sum to 1. It stops when an entry has moved by more than
    ``size``, or after :data:`MOST_STEPS`. Here the number of small steps is computed.

    Args:
        gradient: Gradient of the merging weights or logits, ``p_i G_ij`` for user i and model j.
        weights: Aggregation weights p.
        size: Magnitude of the step.
    """
    weights = weights.to(gradient).unsqueeze(1)
    G = torch.where(weights > 0, gradient / weights, 0.0)
    sum_of_magnitudes = G.abs().sum()
    small_step = size * gradient / sum_of_magnitudes
    largest_entry = float(small_step.abs().max())
    if not largest_entry > 0:  # nan or 0, as the gradient is zero
        return torch.zeros_like(gradient)
    num_small_steps = min(int(size / largest_entry) + 1, MOST_STEPS)
    return small_step * num_small_steps


def head(tree: Tree) -> list[str]:
    """Return the names of the tensors of a net's last layer, such as ``["head.weight", "head.bias"]``, or of all LoRA.

    By default FedMerge computes the inner products of models and updates, which move the merging weights, over these
    tensors only. LoRA does not adapt a language model's head, so its inner products are over all tensors.

    Args:
        tree: Tensors of a model by name, from the first layer to the last.
    """
    is_lora = any(name.endswith(".a") for name in tree)
    if is_lora:
        return list(tree)
    trained = _without_statistics(tree)
    return _names_in_layer(trained, _layer(trained[-1]))


def mix(uploads: Tree, matrix: Float[Tensor, "receivers senders"]) -> Tree:
    """Return each receiver's weighted sum of the uploads, ``sum_j matrix_ij upload_j`` for receiver i.

    Each sum is added up in the order of the senders, so that it has the same bits for any number of receivers. A matrix
    product would be about 1.6 times faster, but its rounding depends on the shapes.

    Args:
        uploads: Tensors ``(senders, *shape)``.
        matrix: Weight of each sender's upload for each receiver.
    """
    return {name: _mix_in_chunks(t, matrix.to(t)) for name, t in uploads.items()}


def _mix_in_chunks(uploads: Float[Tensor, "senders ..."], matrix: Float[Tensor, "receivers senders"]) -> Tensor:
    """Return ``sum_j matrix_ij upload_j`` for each receiver i, added up in the order of the senders.

    The columns of the flattened uploads are divided into chunks whose products fit the processor's cache.

    Args:
        uploads: One tensor of all senders.
        matrix: Weight of each sender's upload for each receiver.
    """
    num_receivers = len(matrix)
    sent = uploads.flatten(1)  # (senders, columns)
    mixed = sent.new_zeros(num_receivers, sent.shape[1])
    width = max(_MIN_CHUNK, _CACHED_NUMBERS // max(num_receivers, 1))  # columns of a chunk; there may be no receiver
    buffer = sent.new_empty(num_receivers, min(width, sent.shape[1]))  # reused for the products of all chunks
    weights_by_sender = matrix.T.unsqueeze(-1)  # (senders, receivers, 1)
    for sent_chunk, mixed_chunk in zip(sent.split(width, dim=1), mixed.split(width, dim=1), strict=True):
        products = buffer[:, : sent_chunk.shape[1]]
        for weights, upload in zip(weights_by_sender, sent_chunk, strict=True):
            torch.mul(weights, upload, out=products)
            mixed_chunk.add_(products)
    return mixed.view(num_receivers, *uploads.shape[1:])


_MIN_CHUNK, _CACHED_NUMBERS = 1024, 2**16
"""Chunk size in numbers: at least for each receiver, and for all receivers together (to fit the cache)."""


Keys = Literal["head", "all", "trained", "body", "first"]
"""Tensors of the inner products that move merging weights.

"head" is the last layer, "trained" all but running statistics, "body" all trained ones but the last layer.
"""


def names_for_inner_products(tree: Tree, which: Keys) -> list[str]:
    """Return the names of the tensors whose inner products ``<Theta_j, g_i>`` move the merging weights.

    Args:
        tree: Tensors of a model, in the model's order.
        which: "head" is a net's last layer, "first" its first layer, "trained" all but running statistics, "body" the
            trained ones without the last layer, "all" everything. For LoRA, head, body and all are the same.
    """
    trained = _without_statistics(tree)
    if which == "head":
        return head(tree)
    if which == "first":
        return _names_in_layer(trained, _layer(trained[0]))
    if which == "body":
        without_head = [name for name in trained if name not in head(tree)]
        return without_head or trained  # LoRA has nothing besides its head
    if which == "trained":
        return trained
    return list(tree)


def _without_statistics(names: Collection[str]) -> list[str]:
    """Return the names of trained tensors, without running statistics such as "norm.running_mean"."""
    return [name for name in names if not name.rpartition(".")[2].startswith("running")]


def _layer(name: str) -> str:
    """Return the layer of a tensor: "head" for "head.weight"."""
    return name.rpartition(".")[0]


def _names_in_layer(names: Collection[str], layer: str) -> list[str]:
    """Return the names of the tensors of a layer."""
    return [name for name in names if _layer(name) == layer]


def keep_largest(updates: Tree, names: Collection[str], share: float) -> Tree:
    """Return updates in which only each user's largest numbers, by magnitude, are kept; the others are 0.

    This is the pruning that FedMerge's section 3 mentions.

    Args:
        updates: Updates ``(users, *shape)``.
        names: Tensors to prune and return. With a share of 1, all ``updates`` are returned.
        share: Fraction of a user's numbers to keep, over all of ``names`` together.
    """
    if share == 1:
        return updates
    magnitudes = torch.cat([updates[name].flatten(1) for name in names], dim=1).abs()  # (users, numbers)
    num_kept = math.ceil(share * magnitudes.shape[1])
    smallest_kept = magnitudes.topk(num_kept, dim=1).values[:, -1]  # of each user
    pruned = {}
    for name, update in updates.items():
        if name in names:
            threshold = smallest_kept.view(-1, *[1] * (update.dim() - 1))  # (users, 1, ...)
            pruned[name] = update * (update.abs() >= threshold)
    return pruned


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
    by_user = frozenset({MERGING_WEIGHTS})
    first_download = True

    @property
    def server_models(self) -> int:
        """Number of models on the server."""
        return self.models

    @property
    def merging_setting(self) -> str:
        """Name of the setting that sizes steps on merging weights; empty if these are frozen."""
        return "method.weight_step" if self.weight_step else ""

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial models, and the users' merging weights or, with ``softmax``, the logits of these.

        Each user has equal weights for all models. With ``chosen`` above 0, which needs ``softmax``, a user has weights
        above 0 only for that many models, drawn at random. They are equal, or with ``random`` drawn at random too.

        Args:
            setup: The server's initial models, the users' names and the run's seed, from which weights are drawn.
        """
        equal_value = 0.0 if self.softmax else 1 / self.models  # equal logits, or equal weights with the sum 1
        any_tensor = next(iter(setup.models.values()))
        weights_or_logits = any_tensor.new_full((len(setup.users), self.models), equal_value)
        if self.chosen:
            for user, logits in zip(setup.users, weights_or_logits, strict=True):
                user_generator = generator(setup.seed, user, "fedmerge-fixed")
                random_order = torch.randperm(self.models, generator=user_generator)
                chosen, others = random_order[: self.chosen], random_order[self.chosen :]
                logits[others] = ZERO_SHARE_LOGIT  # a weight of 0 in the softmax
                if self.random:
                    # The softmax of logarithms of exponential draws is uniform on the simplex.
                    draws = torch.empty(len(chosen)).exponential_(generator=user_generator)
                    logits[chosen] = draws.log().to(logits)
        return state_from_models(setup.models) | {MERGING_WEIGHTS: weights_or_logits}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Move the models and the participants' merging weights by the participants' updates.

        A participant's update is the merged model that it downloaded minus the model that it uploaded. The same updates
        are used ``global_iterations`` times.

        Args:
            kept: State of the server, changed in place: the models ``(models, *shape)``, and each user's merging
                weights or logits.
            received: The uploads, with the indices and aggregation weights of the participants.
        """
        users = list(received.users)
        models = server_models_in(kept)
        logits = kept[MERGING_WEIGHTS][users]  # or merging weights; a copy, which is written back below
        downloaded = mix(models, self._merging_shares(logits))
        updates = {name: t.sub_(received.tensors[name]) for name, t in downloaded.items()}  # in place, to save memory
        weights_are_frozen = self.weight_step == 0
        if weights_are_frozen:
            moves = [self._move_models]
        elif self.models_first:
            moves = [self._move_models, self._move_weights]
        else:
            moves = [self._move_weights, self._move_models]
        for _ in range(self.global_iterations):
            for move in moves:
                move(models, logits, updates, received.weights)
        kept[MERGING_WEIGHTS][users] = logits

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return each user's merged model, ``(users, 1, *shape)``: the sum of the models times the user's weights."""
        merged = mix(server_models_in(kept), self._merging_shares(kept[MERGING_WEIGHTS][list(users)]))
        return {name: t.unsqueeze(1) for name, t in merged.items()}  # one model for each user

    def merging_weights(self, kept: Tree) -> Float[Tensor, "users models"]:
        """Return each user's weight on each of the server's models."""
        return self._merging_shares(kept[MERGING_WEIGHTS])

    def settled(self) -> Merge:
        """Return a server whose models are fixed; the merging weights of new users still move by eq. 6."""
        return replace(self, global_rate=0.0)

    def _merging_shares(self, logits: Float[Tensor, "users models"]) -> Float[Tensor, "users models"]:
        """Return the merging weights: the softmax of the logits, or without ``softmax`` the stored weights."""
        if not self.softmax:
            return logits  # these are weights then
        return softmax_mixture(logits, temperature=1.0)

    def _move_models(self, models: Tree, logits: Tensor, updates: Tree, weights: Tensor) -> None:
        """Subtract ``global_rate`` times ``sum_i p_i w_ij g_i`` from each model j, in place (FedMerge, eq. 5).

        With ``column_normalize`` the shares ``p_i w_ij`` of each model are scaled so that their magnitudes sum to 1.

        Args:
            models: The server's models ``(models, *shape)``, changed in place.
            logits: Merging weights w of the participants, or their logits.
            updates: Updates g of the participants, ``(users, *shape)``.
            weights: Aggregation weights p.
        """
        merging_weights = self._merging_shares(logits)
        if self.column_normalize:
            shares = column_shares(merging_weights, weights)
        else:
            shares = weights.to(merging_weights).unsqueeze(1) * merging_weights  # p_i w_ij
        for name, gradient in models_gradient(shares, updates).items():
            models[name].sub_(gradient, alpha=self.global_rate)

    def _move_weights(self, models: Tree, logits: Tensor, updates: Tree, weights: Tensor) -> None:
        """Take a gradient step on the participants' merging weights, or on their logits, in place (FedMerge, eq. 6).

        The step is scaled so that its largest entry is just above ``weight_step``, as in the public code
        (:func:`fixed_step`). Its gradient is computed from the inner products
        ``<Theta_j, g_i>`` of models and updates, over the tensors that ``keys`` names and, with ``share`` below 1, over
        the largest numbers of each update only.

        Args:
            models: The server's models Theta, ``(models, *shape)``.
            logits: Merging weights of the participants, or their logits; ``(users, models)``, changed in place.
            updates: Updates g of the participants, ``(users, *shape)``.
            weights: Aggregation weights p.
        """
        names = names_for_inner_products(models, self.keys)
        pruned_updates = keep_largest(updates, names, self.share)
        inner = inner_products(models, pruned_updates, names).to(logits)
        if self.softmax:
            gradient = logit_gradient(logits.softmax(1), inner, weights)
        else:
            gradient = weight_gradient(inner, weights)
        logits.sub_(fixed_step(gradient, weights, size=self.weight_step))


def fedmerge(
    *,
    models: Models = 5,
    softmax: bool = True,
    column_normalize: bool = True,
    models_first: bool = True,
    inner_product_keys: Keys = "head",
    inner_product_share: Annotated[float, Range(least=0, most=1, above=True)] = 1.0,
    weight_step: NotNegative = 0.5,
    global_rate: NotNegative = 1.0,
    global_iterations: Count = 1,
    proximal: NotNegative = 0.0,
) -> Method:
    """FedMerge: the server keeps d models, and merges them for each user with the user's own merging weights.

    Source: Chen et al. 2025, "FedMerge: Federated Personalization via Model Merging", arXiv:2504.06768, Algorithm 1.
    Shared: a whole net, with running statistics of its norm layers; on a language model attention and 1 LoRA expert per
    MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: local steps on its merged model theta_i; ``proximal`` times |theta - theta_i|^2 is added to the loss.
    Server: a step on the models by eq. 5 and 8, then one on the merging weights by eq. 6 and 9.
    Differs from the paper: a model moves by a mean over its users, as in the public code, where eq. 5
    (``column_normalize: false``) would move it d times less.  Negative merging weights (without ``softmax``) count in
    that mean with their magnitude.  A model that no participant uses is unchanged.  The number of small steps on the
    merging weights is computed; the public code counts them.  That code moves the weights first, and its ``proximal``
    is 0.01.  ``weight_step`` is 0.5 by default, as runs have about 20 rounds here and 500 in the paper.  Users' shares
    p_i in eq. 5 and 6 are ``training.weighting``: equal by default, the paper's n_i / n with ``samples`` (or
    ``tokens``), as in the published recipes.

    Args:
        models: Number of models on the server.
        softmax: Use the softmax of logits as merging weights (FedMerge, appendix D).
        column_normalize: Move a model by a mean over its users, as the public code does; ``false`` is FedMerge's eq. 5.
        models_first: Update the models before the merging weights; the public code updates the weights first.
        inner_product_keys: Tensors whose inner products move the weights (eq. 6): ``head`` (the last layer, as in the
            public code; all of LoRA, which has none), ``all``, ``trained`` (all but running statistics), ``body``
            (trained tensors without the head), ``first`` (the first layer).
        inner_product_share: Share of the numbers of ``inner_product_keys`` that is used, above 0: those that the user
            has changed most. FedMerge's section 3 names pruning without details.
        weight_step: Largest change of a merging weight's logit in an update, or without ``softmax`` of the weight
            itself; 0 freezes the weights. The paper has 0.01 for 500 rounds; take that without ``softmax``, too.
        global_rate: Learning rate of the server's models.
        global_iterations: Updates of the server's models and merging weights in a round.
        proximal: Weight of the squared distance to the downloaded model in each user's objective; 0.01 in the public
            code.
    """
    hooks = (Proximal(proximal),) if proximal else ()
    server = Merge(
        models=models,
        softmax=softmax,
        column_normalize=column_normalize,
        models_first=models_first,
        keys=inner_product_keys,
        share=inner_product_share,
        weight_step=weight_step,
        global_rate=global_rate,
        global_iterations=global_iterations,
    )
    return Method(
        name="fedmerge",
        placement=Placement(shared=MODEL),
        client=Client(phases=joint(routed=False), parts=hooks, drops_nonfinite=True),
        server=server,
    )


def fedmerge_fixed(
    *,
    models: Models = 15,
    chosen: Models = 5,
    weights: Literal["even", "random"] = "even",
    global_rate: NotNegative = 1.0,
) -> Method:
    """FedMerge with frozen merging weights: each user merges some random models, with equal or random weights.

    Source: Chen et al. 2025 (FedMerge, arXiv:2504.06768), Table 4, "Fixed (``chosen`` / ``models``)".
    Shared: a whole net, with running statistics of its norm layers; on a language model attention and 1 LoRA expert per
    MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: local steps on the merged model.  Server: moves each model by a mean over the users who merge it.
    Differs from the paper: no difference is known.  Table 4's caption has even weights, the text below it random ones
    from an unnamed distribution; ours are uniform on the simplex.

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
    """Client hook that adds ``weight |theta - theta_0|^2`` to the objective; the round started at the model theta_0."""

    weight: float
    looks_back = True

    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        """Add the gradient of the proximal term, ``2 weight (theta - theta_0)``, to each tensor's gradient.

        Args:
            cohort: Users who are trained in one batch: their models theta, and theta_0 at the start of the round.
            gradients: Gradients ``(users, *shape)`` by tensor, which are replaced by the sums.
        """
        theta, theta_0 = cohort.tensors, cohort.began
        for name, gradient in gradients.items():
            gradients[name] = gradient + 2 * self.weight * (theta[name] - theta_0[name])
