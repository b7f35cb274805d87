"""A cache of texts in whose rows several models keep their keys and values, as heads side by side."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache

from comingle.models.pretrained import PreTrainedModel

Wide = Float[Tensor, "rows heads places width"]
"""A row is a text of one of a user's models: users, models and texts in this order."""

Folded = Float[Tensor, "texts all_heads places width"]
"""A row is a text, with the heads of all models."""


@functools.cache
def cache_name(network: type[PreTrainedModel]) -> str:
    """What a network's forward calls its keys and values: ``past_key_values``, from transformers 5.24 on ``cache``."""
    return "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"


class FoldedCache(Cache):
    """What a pass of ``users`` with ``models`` each sees of ``cache``, whose rows are texts.

    Whoever owns the cache (transformers' ``generate``, the server's rows) adds, masks and drops texts as ever.
    """

    def __init__(self, cache: Cache, users: int, models: int) -> None:
        super().__init__(layers=cache.layers)
        self.cache, self.users, self.models = cache, users, models

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add to the cache, and return all that is in it."""
        folded = self._fold(key_states), self._fold(value_states)
        keys, values = self.cache.update(*folded, layer_idx, *args, **kwargs)
        return self._unfold(keys), self._unfold(values)

    def _fold(self, states: Wide) -> Folded:
        apart = states.unflatten(0, (self.users, self.models, -1))
        return apart.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _unfold(self, states: Folded) -> Wide:
        apart = states.unflatten(0, (self.users, -1)).unflatten(2, (self.models, -1))
        return apart.transpose(1, 2).flatten(0, 2)
