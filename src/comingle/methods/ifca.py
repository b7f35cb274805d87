"""IFCA: clusters of users, each with a model, found by who does best where."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.data.seeds import generator
from comingle.methods.base import Assess, Beginning, Context, Method
from comingle.methods.clients import MODEL, joint
from comingle.methods.servers import mix
from comingle.methods.soups import soup_of, start_soup
from comingle.trees import Tree

PICKED = "picked"
"""Which model each user has, one-hot: ``(users, models)``."""


def ifca(*, models: int = 5) -> Method:
    """IFCA: every user takes the one of k models with the lowest loss on its training data, and trains it.

    Source: Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning", arXiv:2006.04088, Algorithm 1
    with model averaging.
    Shared: the net with its statistics; on a language model attention and 1 LoRA expert per MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: downloads all models, picks one by the loss on all of its training data, joint steps on it, uploads it with
    its number.  Server: each model becomes the weighted mean of those who took it; nobody's model stays as it is.
    Differs from the paper: means are weighted by training samples where ``training.weighting`` says so.  Among equally
    good models a user keeps the one it has, which is at first a random one: LoRA's differ in nothing before training.
    """

    def server(uploads: Tree, context: Context) -> Tree:
        soup, picked = soup_of(context.memory), context.memory[PICKED]
        taken = picked * context.weights.to(picked).unsqueeze(1)
        total = taken.sum(0)
        alive = total > 0
        shares = (taken[:, alive] / total[alive]).T
        for name, mean in mix(uploads, shares).items():
            soup[name][alive] = mean
        return _pick(context.memory, context.assess)

    def memory(beginning: Beginning) -> Tree:
        draws = [generator(beginning.seed, user, "ifca") for user in beginning.users]
        first = torch.cat([torch.randint(models, (1,), generator=draw) for draw in draws])
        return start_soup(beginning.starts) | {PICKED: torch.nn.functional.one_hot(first, models).double()}

    return Method(
        name="ifca",
        shared=MODEL,
        phases=joint(routed=False),
        server=server,
        starts=models,
        memory=memory,
        kept_by_user=frozenset({PICKED}),
        welcome=_pick,
        merging=lambda kept: kept[PICKED],
        picks=models,
    )


def _pick(memory: Tree, assess: Assess) -> Tree:
    """Everybody's new choice, noted in ``memory``, and the models that go with it."""
    soup, picked = soup_of(memory), memory[PICKED]
    best = best_model(assess(soup).to(picked), picked)
    picked.copy_(best)
    chosen = best.argmax(1)
    return {name: t[chosen] for name, t in soup.items()}


def best_model(
    losses: Float[Tensor, "users models"], before: Float[Tensor, "users models"]
) -> Float[Tensor, "users models"]:
    """One-hot at each user's lowest loss; of several at the one it had, if that is among them."""
    least = losses == losses.min(1, keepdim=True).values
    preferred = least * (1 + before)
    return torch.nn.functional.one_hot(preferred.argmax(1), losses.shape[1]).to(losses)
