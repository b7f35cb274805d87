"""FedMerge: a soup of models on the server, from which everybody gets one merged model of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.data.seeds import generator
from comingle.errors import RecipeError
from comingle.methods.base import Beginning, Context, Method
from comingle.methods.clients import MODEL, joint
from comingle.methods.merging import (
    column_shares,
    fixed_step,
    inner_products,
    logit_gradient,
    soup_gradient,
    weight_gradient,
)
from comingle.methods.servers import mix
from comingle.methods.soups import MERGING, soup_of, start_soup, start_weights
from comingle.routers.mixtures import NEVER, softmax_mixture
from comingle.trees import Tree, head


def fedmerge(
    *,
    models: int = 5,
    softmax: bool = True,
    column_normalize: bool = True,
    models_first: bool = True,
    inner_product_keys: str = "head",
    weight_step: float = 0.01,
    global_rate: float = 1.0,
    global_iterations: int = 1,
    proximal: float = 0.0,
) -> Method:
    """FedMerge: d models and everybody's merging weights live on the server; one merged model travels each way.

    Source: Chen et al. 2025, "FedMerge: Federated Personalization via Model Merging", arXiv:2504.06768, Algorithm 1.
    Shared: the net with its statistics; on a language model attention and 1 LoRA expert per MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: joint steps on the merged model, as in FedAvg; ``proximal`` times |theta - theta_i|^2 is added to the loss.
    Server: the models by eq. 5 and 8, then the weights by eq. 6 and 9 (before the models without ``models_first``),
    their largest entry by ``weight_step``; with ``softmax`` the weights are that of logits (appendix D).  Inner
    products are over the last layer ("head", the paper's pruning), or over all ("all", and always so for LoRA).
    Differs from the paper: with eq. 5 the models would move d times less than "the global model is replaced" says, so
    what moves a model is a mean over its users, as in the public code (``column_normalize``; false is eq. 5); weights
    below zero (without ``softmax``) count there with their magnitude.  A model of which nobody present has a part stays
    as it is.  That code moves weights first; its ``proximal`` is 0.01.  The search for the step is in closed form.
    """

    def move_models(soup: Tree, logits: Tensor, updates: Tree, weights: Tensor) -> None:
        shares = _shares(logits, softmax)
        shares = column_shares(shares, weights) if column_normalize else weights.to(shares).unsqueeze(1) * shares
        for name, gradient in soup_gradient(shares, updates).items():
            soup[name].sub_(gradient, alpha=global_rate)

    def move_weights(soup: Tree, logits: Tensor, updates: Tree, weights: Tensor) -> None:
        names = head(soup) if inner_product_keys == "head" else list(soup)
        inner = inner_products(soup, updates, names).to(logits)
        found = logit_gradient(logits.softmax(1), inner, weights) if softmax else weight_gradient(inner, weights)
        logits.sub_(fixed_step(found, weights, weight_step))

    moves = (move_models, move_weights) if models_first else (move_weights, move_models)

    def server(uploads: Tree, context: Context) -> Tree:
        soup, logits = soup_of(context.memory), context.memory[MERGING]
        sent = mix(soup, _shares(logits, softmax))  # as large as everybody's models, so it becomes the updates in place
        updates = {name: t.sub_(uploads[name]) for name, t in sent.items()}
        for _ in range(global_iterations):
            for move in moves if weight_step else (move_models,):
                move(soup, logits, updates, context.weights)
        return mix(soup, _shares(logits, softmax))

    def memory(beginning: Beginning) -> Tree:
        logits = start_weights(beginning, models, 0.0 if softmax else 1 / models)
        return start_soup(beginning.starts) | {MERGING: logits}

    return Method(
        name="fedmerge",
        shared=MODEL,
        phases=joint(routed=False),
        server=server,
        starts=models,
        memory=memory,
        welcome=lambda kept, _: mix(soup_of(kept), _shares(kept[MERGING], softmax)),
        merging=lambda kept: _shares(kept[MERGING], softmax),
        proximal=proximal,
        forgiving=True,
    )


def fedmerge_fixed(*, models: int = 15, chosen: int = 5, global_rate: float = 1.0) -> Method:
    """FedMerge with frozen merging weights: each user merges some models, drawn at random, in equal parts.

    Source: Chen et al. 2025 (FedMerge, arXiv:2504.06768), Table 4, "Fixed (``chosen`` / ``models``)".
    Shared: as by ``fedmerge``.  Local: nothing.  Frozen: a language model's base.
    Client: as by ``fedmerge``.  Server: the models alone move.
    Differs from the paper: none known.
    """
    if chosen > models:
        raise RecipeError(f"method fedmerge-fixed: chosen is {chosen} of {models} models; allowed: 1 to {models}")

    def memory(beginning: Beginning) -> Tree:
        logits = start_weights(beginning, models, NEVER)
        for user, row in zip(beginning.users, logits, strict=True):
            order = torch.randperm(models, generator=generator(beginning.seed, user, "fedmerge-fixed"))
            row[order[:chosen]] = 0.0
        return start_soup(beginning.starts) | {MERGING: logits}

    method = fedmerge(models=models, weight_step=0.0, global_rate=global_rate)
    return replace(method, name="fedmerge-fixed", memory=memory)


def _shares(logits: Float[Tensor, "users models"], softmax: bool) -> Float[Tensor, "users models"]:
    return softmax_mixture(logits, 1.0) if softmax else logits
