"""The server of FedMerge: a soup of models and everybody's merging weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.server import Received, Server, ServerSetup
from comingle.models.routers import NEVER, softmax_mixture
from comingle.papers.methods.merging import (
    column_shares,
    fixed_step,
    inner_products,
    logit_gradient,
    mix,
    soup_gradient,
    weight_gradient,
)
from comingle.papers.methods.pruning import Keys, keys, largest
from comingle.papers.methods.soups import MERGING, soup_of, start_soup
from comingle.utils.seeds import generator
from comingle.utils.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Merge(Server):
    """The soup and everybody's merging weights (or their logits, with ``softmax``); its settings are ``fedmerge``'s.

    Where so many models are ``chosen`` at random, a user merges these in equal parts, or in ``random`` ones.
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
        """The soup."""
        return self.models

    def start(self, setup: ServerSetup) -> Tree:
        """The models, and weights that are all alike or random choices."""
        value = 0.0 if self.softmax else 1 / self.models
        weights = next(iter(setup.models.values())).new_full((len(setup.users), self.models), value)
        for user, row in zip(setup.users, weights, strict=True) if self.chosen else ():
            draw = generator(setup.seed, user, "fedmerge-fixed")
            order = torch.randperm(self.models, generator=draw)
            row[order[self.chosen :]] = NEVER
            if self.random:  # the logarithms of exponential draws: their softmax is uniform on the simplex
                some = order[: self.chosen]
                row[some] = torch.empty(len(some)).exponential_(generator=draw).log().to(row)
        return start_soup(setup.models) | {MERGING: weights}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Models and weights of those who took part, in the order that the settings say."""
        soup, logits = soup_of(kept), kept[MERGING][list(received.users)]
        sent = mix(soup, self._shares(logits))  # as large as the users' models, so it becomes the updates in place
        updates = {name: t.sub_(received.tensors[name]) for name, t in sent.items()}
        moves = (
            (self._move_models, self._move_weights) if self.models_first else (self._move_weights, self._move_models)
        )
        for _ in range(self.global_iterations):
            for move in moves if self.weight_step else (self._move_models,):
                move(soup, logits, updates, received.weights)
        kept[MERGING][list(received.users)] = logits

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Each user's merged model."""
        merged = mix(soup_of(kept), self._shares(kept[MERGING][list(users)]))
        return {name: t.unsqueeze(1) for name, t in merged.items()}

    def merging_weights(self, kept: Tree) -> Float[Tensor, "users models"]:
        """Everybody's weights."""
        return self._shares(kept[MERGING])

    def settled(self) -> Merge:
        """The models stay; the weights of who joins move by eq. 6."""
        return replace(self, global_rate=0.0)

    def _shares(self, logits: Float[Tensor, "users models"]) -> Float[Tensor, "users models"]:
        return softmax_mixture(logits, 1.0) if self.softmax else logits

    def _move_models(self, soup: Tree, logits: Tensor, updates: Tree, weights: Tensor) -> None:
        shares = self._shares(logits)
        shares = column_shares(shares, weights) if self.column_normalize else weights.to(shares).unsqueeze(1) * shares
        for name, gradient in soup_gradient(shares, updates).items():
            soup[name].sub_(gradient, alpha=self.global_rate)

    def _move_weights(self, soup: Tree, logits: Tensor, updates: Tree, weights: Tensor) -> None:
        names = keys(soup, self.keys)
        inner = inner_products(soup, largest(updates, names, self.share), names).to(logits)
        gradient = (
            logit_gradient(logits.softmax(1), inner, weights) if self.softmax else weight_gradient(inner, weights)
        )
        logits.sub_(fixed_step(gradient, weights, self.weight_step))
