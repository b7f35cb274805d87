"""Ensembles: several whole models of one user over one frozen base."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from transformers.cache_utils import Cache

from comingle.models.adapted import AdaptedModel, Windows
from comingle.models.base import Base
from comingle.models.generation import continue_greedily
from comingle.models.lora import init_zero
from comingle.models.model import FakeWeights, Model
from comingle.models.pretrained import PreTrainedModel
from comingle.models.routers import ClientMixture, Powers, mix_losses, mix_probabilities
from comingle.utils.errors import RecipeError
from comingle.utils.trees import CLIENT_ROUTER, GENERALIST, ROUTER, SPECIALIST, Init, Layout, Slot, Tree

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
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
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


WHY_NOT_ONE = (
    "several whole models whose predictions are mixed, which no weights and no format can hold; allowed: generate, "
    "score, comingle chat and comingle serve"
)


Mixing = tuple[Float[Tensor, "users clusters"], Powers]
"""Each user's weights of components, and the powers to which their probabilities are taken, if not to the first."""


@dataclass(frozen=True, kw_only=True)
class EnsembleModel(Model):
    """Components are models of :class:`AdaptedModel`'s kind, ``inner``: ``tensors`` are its own with the components on
    an axis behind the users', and the mixture's logits."""

    name: str
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    inner: AdaptedModel
    mixture: ClientMixture

    @property
    def base(self) -> Base:
        """The frozen base."""
        return self.inner.base

    @property
    def base_parameters(self) -> int:
        """The base's parameters."""
        return self.inner.base_parameters

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """Each user's LoRA rank, that of all its components."""
        return self.inner.ranks

    @property
    def scales(self) -> Float[Tensor, " users"]:
        """Each user's LoRA scale."""
        return self.inner.scales

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """Of each component as of a model by itself."""
        alone, count = self.inner.mask(ranks), self.mixture.clusters
        slots = alone.split([slot.size for slot in self.inner.layout.slots], 1)
        router = alone.new_ones(len(alone), self.mixture.numbers)
        return torch.cat([*(mask.repeat(1, count) for mask in slots), router], 1)

    def only(self, users: Sequence[int]) -> EnsembleModel:
        """Some users."""
        return replace(self, inner=self.inner.only(users))

    # ---------------------------------------------------------------- passes

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Windows, *, train: bool = False, powers: Powers = None
    ) -> Float[Tensor, "users clusters batch context"]:
        """One pass each: in the last bit, what a component has by itself, or to its power."""
        parts = [self._component(tensors, number) for number in range(self.mixture.clusters)]
        own = [None] * len(parts) if powers is None else powers.unbind(1)
        alone = [self.inner.losses(t, users, batch, powers=p)[0] for t, p in zip(parts, own, strict=True)]
        return torch.stack(alone, 1)

    def _component(self, tensors: Tree, number: int) -> Tree:
        return {name: t[:, number].contiguous() for name, t in tensors.items() if name != CLIENT_ROUTER}

    def losses(
        self, tensors: Tree, users: Sequence[int], batch: Windows, *, train: bool = False, shares: Tensor | None = None
    ) -> tuple[Float[Tensor, "users batch context"], float]:
        """What the mixture loses, without powers; a component's gradient is that of its loss, as if it were alone."""
        losses = self.component_losses(tensors, users, batch, train=train)
        mixed, alone = mix_losses(losses.detach(), self.shares(tensors).detach()), losses.sum(1)
        return mixed + (alone - alone.detach()), 0.0

    def predict(self, tensors: Tree, users: Sequence[int], batch: Windows) -> Float[Tensor, "users batch context"]:
        """What the mixture loses."""
        shares, powers = self.mixing(tensors)
        return mix_losses(self.component_losses(tensors, users, batch, powers=powers), shares)

    def shares(self, tensors: Tree) -> Float[Tensor, "users clusters"]:
        """Each user's mixture."""
        return self.mixture.shares(tensors[CLIENT_ROUTER])

    def mixing(self, tensors: Tree) -> Mixing:
        """Each user's mixture, and the powers of what is mixed."""
        return self.shares(tensors), self.mixture.powers(tensors[CLIENT_ROUTER])

    @torch.no_grad()
    def generate(
        self, tensors: Tree, users: Sequence[int], prompts: Int[Tensor, "users batch prompt"], limit: int
    ) -> Int64[Tensor, "users batch new"]:
        """All users and components share every pass."""
        prompts = prompts.to(self.device)
        with torch.compiler.set_stance("force_eager"), self.speaking(tensors, users) as network:
            return continue_greedily(network, prompts.flatten(0, 1), limit).view(*prompts.shape[:2], -1)

    @contextmanager
    def speaking(self, tensors: Tree, users: Sequence[int]) -> Iterator[PreTrainedModel]:
        """The causal language model; within, it computes what these users' mixtures do, user by user in its batch."""
        network, mixing = self.inner.network, self.mixing(tensors)
        self.bind(tensors, users)
        before = vars(network).get("forward")
        mix_forward(network, lambda: mixing)
        try:
            yield network
        finally:
            del network.forward
            if before is not None:
                setattr(network, "forward", before)  # noqa: B010 (a method, not a Tensor)

    def bind(self, tensors: Tree, users: Sequence[int]) -> None:
        """Hand every user's components to the adapters, one after the other."""
        count = self.mixture.clusters
        flat = {name: t.flatten(0, 1).contiguous() for name, t in tensors.items() if name != CLIENT_ROUTER}
        self.inner.adapters.bind(flat, [user for user in users for _ in range(count)])

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """Nobody trains the base."""
        inner, size = self.inner.without_weights(fakes)
        return replace(self, inner=inner), size


def mix_forward(network: PreTrainedModel, mixing: Callable[[], Mixing]) -> None:
    """Have a causal language model's logits be those of a mixture of components' probabilities.

    It is called with each user's texts, and passes these on for every component; keys and values of all of a text's
    components are one row of the cache.
    """

    forward, name = type(network).forward.__get__(network), cache_name(type(network))

    @wraps(forward)
    def mixed(*, input_ids: Int[Tensor, "n width"], **options: Any) -> object:
        weights, powers = mixing()
        cache = options.pop(name, None)
        (users, count), texts = weights.shape, len(input_ids)

        def spread(t: Tensor) -> Tensor:
            by_user = t.unflatten(0, (users, -1)).unsqueeze(1)
            return by_user.expand(users, count, *by_user.shape[2:]).flatten(0, 2)

        given = ((key, options.get(key)) for key in PER_TEXT)
        wide = {key: spread(t) for key, t in given if isinstance(t, Tensor) and len(t) == texts}
        folded = None if cache is None else FoldedCache(cache, users, count)
        out = forward(input_ids=spread(input_ids), **{name: folded}, **options | wide)
        logits = out.logits.float().unflatten(0, (users, count, -1))
        logits = logits if powers is None else logits * powers.float().view(users, count, 1, 1, 1)
        out.logits = mix_probabilities(logits.flatten(2, 3), weights.float()).view(texts, -1, logits.shape[-1])
        setattr(out, name, cache)
        return out

    setattr(network, "forward", mixed)  # noqa: B010 (a method, not a Tensor)


PER_TEXT = ("attention_mask", "position_ids")
"""What a causal language model is told of each text besides its tokens."""


def ensemble(inner: AdaptedModel, mixture: ClientMixture, *, generalists: int, specialists: int) -> EnsembleModel:
    """Components like ``inner``, the shared ones first; the first of either kind starts as ``inner`` does.

    Raises:
        RecipeError: they are to have temperatures, and there is more to the head than a product.
    """
    if mixture.tempered and (inner.head.bias is not None or inner.head.softcap is not None):
        what = f"the head of base {inner.name!r} adds a bias or caps what it says"
        raise RecipeError(f"method.temperatures: got true, and {what}; allowed: false, or another base")
    assert generalists + specialists == mixture.clusters
    numbers = [*range(generalists), *range(specialists)]
    roles = (GENERALIST,) * generalists + (SPECIALIST,) * specialists
    slots = [
        replace(s, shape=(mixture.clusters, *s.shape), roles=roles, init=_side_by_side(s.init, numbers))
        for s in inner.layout.slots
    ]
    router = Slot(name=CLIENT_ROUTER, shape=(mixture.numbers,), roles=(ROUTER,), init=init_zero)
    layout = Layout(slots=(*slots, router))
    return EnsembleModel(
        name=inner.name, layout=layout, device=inner.device, dtype=inner.dtype, inner=inner, mixture=mixture
    )


def _side_by_side(init: Init, numbers: Sequence[int]) -> Init:
    """Draws one after the other, of which component c takes number ``numbers[c]``."""

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        drawn = [init(shape[1:], generator) for _ in range(max(numbers) + 1)]
        return torch.stack([drawn[number] for number in numbers])

    return draw
