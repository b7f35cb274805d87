"""Ensembles: mixtures of the predictions of several adapted models over one frozen base."""

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
"""Rows are (user, model, text), the text varying fastest."""

Folded = Float[Tensor, "texts all_heads places width"]
"""Rows are (user, text); a row has the heads of all models."""


@functools.cache
def cache_name(network: type[PreTrainedModel]) -> str:
    """Return the name of the key-value cache in a network's ``forward``.

    It is ``past_key_values``, and ``cache`` from transformers 5.24 on.
    """
    return "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"


class FoldedCache(Cache):
    """A key-value cache with a row per text, presented to the network as a cache with a row per text and model.

    The owner of the cache (transformers' ``generate`` or the chat server) adds, masks and drops rows per text as usual.

    Args:
        cache: The cache, with rows as in ``Folded``.
        users: The number of users.
        models: The number of models of each user.
    """

    def __init__(self, cache: Cache, users: int, models: int) -> None:
        super().__init__(layers=cache.layers)
        self.cache, self.users, self.models = cache, users, models

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of a layer to the cache, and return all keys and values of that layer.

        The network has a row for each user, model and text. The cache has a row for each user and text, which holds the
        heads of all models.

        Args:
            key_states: New keys, ``(users * models * texts, heads, tokens, width)``.
            value_states: New values, of the same shape up to the width.
            layer_idx: Index of the layer.
            *args: Passed on to the cache.
            **kwargs: Passed on to the cache.
        """
        folded = self._fold(key_states), self._fold(value_states)
        keys, values = self.cache.update(*folded, layer_idx, *args, **kwargs)
        return self._unfold(keys), self._unfold(values)

    def _fold(self, states: Wide) -> Folded:
        """Move the model axis from rows to heads."""
        apart = states.unflatten(0, (self.users, self.models, -1))  # (users, models, texts, heads, ...)
        return apart.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _unfold(self, states: Folded) -> Wide:
        """Move the model axis from heads to rows; the inverse of :meth:`_fold`."""
        # (users, texts, models, heads, ...)
        apart = states.unflatten(0, (self.users, -1)).unflatten(2, (self.models, -1))
        return apart.transpose(1, 2).flatten(0, 2)


NO_SINGLE_MODEL = (
    "a mixture of the predictions of several models cannot be merged or exported; allowed: generate, score, "
    "comingle chat and comingle serve"
)


Mixing = tuple[Float[Tensor, "users clusters"], Powers]
"""Each user's mixture weights, and the powers of the components' probabilities (None: 1)."""


@dataclass(frozen=True, kw_only=True)
class EnsembleModel(Model):
    """A mixture of the predictions of several components, each an :class:`AdaptedModel` over the same base.

    Tensors are those of ``inner`` with a component axis after the user axis, and the logits of the mixture weights.
    """

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
        """The number of parameters of the base model."""
        return self.inner.base_parameters

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """Each user's LoRA rank, which is that of all components."""
        return self.inner.ranks

    @property
    def scales(self) -> Float[Tensor, " users"]:
        """Each user's LoRA scale."""
        return self.inner.scales

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """Return True where a user has a parameter: the mask of one model for each component, True for the router.

        Args:
            ranks: Replaces the users' LoRA ranks, for methods that change them.
        """
        one_component, count = self.inner.mask(ranks), self.mixture.clusters
        by_slot = one_component.split([slot.size for slot in self.inner.layout.slots], 1)
        router = one_component.new_ones(len(one_component), self.mixture.num_logits)
        # A slot holds a tensor of all components, one after another.
        return torch.cat([*(mask.repeat(1, count) for mask in by_slot), router], 1)

    def only(self, users: Sequence[int]) -> EnsembleModel:
        """Return the model restricted to some users."""
        return replace(self, inner=self.inner.only(users))

    # ---------------------------------------------------------------- passes

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Windows, *, train: bool = False, powers: Powers = None
    ) -> Float[Tensor, "users clusters batch context"]:
        """Return each component's next-token losses in nats, computed in one pass per component.

        Each component's losses are equal, to the last bit, to those of the component as a model of its own.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
            batch: Windows of context + 1 tokens.
            train: Ignored, as there is no dropout.
            powers: Exponents of the components' probabilities (inverse temperatures), ``(users, clusters)``; None: 1.
        """
        components = [self._component_tensors(tensors, number) for number in range(self.mixture.clusters)]
        powers_of = [None] * len(components) if powers is None else powers.unbind(1)
        losses = []
        for component, exponent in zip(components, powers_of, strict=True):
            component_losses, _ = self.inner.losses(component, users, batch, powers=exponent)  # without the penalty
            losses.append(component_losses)
        return torch.stack(losses, 1)

    def _component_tensors(self, tensors: Tree, number: int) -> Tree:
        """Return the users' tensors of component ``number``, without the router's logits."""
        return {name: t[:, number].contiguous() for name, t in tensors.items() if name != CLIENT_ROUTER}

    def losses(
        self, tensors: Tree, users: Sequence[int], batch: Windows, *, train: bool = False, shares: Tensor | None = None
    ) -> tuple[Float[Tensor, "users batch context"], float]:
        """Return the training losses in nats of the mixture of predictions, and 0.0 as the load-balancing penalty.

        Components train as if they were alone: the value is the mixture's loss, ``-log sum_c pi_c exp(-loss_c)``, but
        each component's gradient is that of its own loss. The exponents that :meth:`predict` applies to the components'
        probabilities are left out in training.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
            batch: Windows of context + 1 tokens.
            train: Ignored, as there is no dropout.
            shares: Ignored, as users have the mixture weights in ``tensors``; other models accept weights per sample.
        """
        losses = self.component_losses(tensors, users, batch, train=train)
        mixed, unweighted = mix_losses(losses.detach(), self.shares(tensors).detach()), losses.sum(1)
        # The value is that of the mixture, the gradient that of the unweighted sum.
        return mixed + (unweighted - unweighted.detach()), 0.0

    def predict(self, tensors: Tree, users: Sequence[int], batch: Windows) -> Float[Tensor, "users batch context"]:
        """Return the mixture's losses in nats."""
        shares, powers = self.mixing(tensors)
        return mix_losses(self.component_losses(tensors, users, batch, powers=powers), shares)

    def shares(self, tensors: Tree) -> Float[Tensor, "users clusters"]:
        """Return each user's mixture weights."""
        return self.mixture.shares(tensors[CLIENT_ROUTER])

    def mixing(self, tensors: Tree) -> Mixing:
        """Return each user's mixture weights, and the powers of the components' probabilities."""
        return self.shares(tensors), self.mixture.powers(tensors[CLIENT_ROUTER])

    @torch.no_grad()
    def generate(
        self, tensors: Tree, users: Sequence[int], prompts: Int[Tensor, "users batch prompt"], limit: int
    ) -> Int64[Tensor, "users batch new"]:
        """Continue prompts greedily; all users and components share each forward pass.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
            prompts: Token ids, padded on the left with ``PAD``.
            limit: Largest number of new tokens.
        """
        prompts = prompts.to(self.device)
        # The length grows with each token: do not compile.
        with torch.compiler.set_stance("force_eager"), self.mixed_network(tensors, users) as network:
            return continue_greedily(network, prompts.flatten(0, 1), limit).view(*prompts.shape[:2], -1)

    @contextmanager
    def mixed_network(self, tensors: Tree, users: Sequence[int]) -> Iterator[PreTrainedModel]:
        """Yield a causal language model whose logits are those of the users' mixtures.

        Its forward pass is replaced in the context. Batches hold equally many texts of each user, ordered by user.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
        """
        network, mixing = self.inner.network, self.mixing(tensors)
        self.bind(tensors, users)
        before = vars(network).get("forward")  # an earlier replacement; None if the class's own is in use
        mix_forward(network, lambda: mixing)
        try:
            yield network
        finally:
            del network.forward
            if before is not None:
                setattr(network, "forward", before)  # noqa: B010 (a method, not a Tensor)

    def bind(self, tensors: Tree, users: Sequence[int]) -> None:
        """Bind each user's components to the adapters as if they were users; rows are ordered by user and component.

        Args:
            tensors: The users' trainable tensors, ``(users, clusters, ...)``.
            users: Indices of the users.
        """
        count = self.mixture.clusters
        flat = {name: t.flatten(0, 1).contiguous() for name, t in tensors.items() if name != CLIENT_ROUTER}
        self.inner.adapters.bind(flat, [user for user in users for _ in range(count)])

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """Return the model with fake base weights, and the size in bytes of the real ones."""
        inner, size = self.inner.without_weights(fakes)
        return replace(self, inner=inner), size


def mix_forward(network: PreTrainedModel, mixing: Callable[[], Mixing]) -> None:
    """Replace a causal language model's forward so that it mixes the predictions of each user's components.

    The new logits are ``log sum_c pi_c softmax(t_c f_c(x))`` with the logits f_c of component c, the user's mixture
    weight pi_c and the power t_c of the component's probabilities. The batch holds each user's texts; the new forward
    repeats them for each component. Its key-value cache has one row per text, with all components' keys and values.

    Args:
        network: The model, with the components' adapters bound to it.
        mixing: Function that returns pi and t ``(users, components)`` of the users in the batch; t is None for 1.
    """

    forward = type(network).forward.__get__(network)  # the class's own, bound to this network
    cache_key = cache_name(type(network))  # name of the key-value cache among the arguments

    @wraps(forward)
    def mixed(*, input_ids: Int[Tensor, "n width"], **options: Any) -> object:
        """Run the model for each component of each text; return its output with the mixture's logits.

        Args:
            input_ids: Tokens of the users' texts, ordered by user and equally many each.
            **options: Further arguments of the model.
        """
        weights, powers = mixing()
        cache = options.pop(cache_key, None)
        (users, count), texts = weights.shape, len(input_ids)

        def repeat(t: Tensor) -> Tensor:
            """Repeat rows (user, text) to rows (user, component, text)."""
            by_user = t.unflatten(0, (users, -1)).unsqueeze(1)
            return by_user.expand(users, count, *by_user.shape[2:]).flatten(0, 2)

        per_text = ((key, options.get(key)) for key in PER_TEXT)  # attention mask and positions
        # A single row for all texts needs no repetition.
        repeated = {key: repeat(t) for key, t in per_text if isinstance(t, Tensor) and len(t) == texts}
        folded = None if cache is None else FoldedCache(cache, users, count)
        out = forward(input_ids=repeat(input_ids), **{cache_key: folded}, **options | repeated)
        logits = out.logits.float().unflatten(0, (users, count, -1))
        logits = logits if powers is None else logits * powers.float().view(users, count, 1, 1, 1)
        out.logits = mix_probabilities(logits.flatten(2, 3), weights.float()).view(texts, -1, logits.shape[-1])
        setattr(out, cache_key, cache)
        return out

    setattr(network, "forward", mixed)  # noqa: B010 (a method, not a Tensor)


PER_TEXT = ("attention_mask", "position_ids")
"""Inputs of a causal language model that have one row per text, besides the tokens."""


def ensemble(inner: AdaptedModel, mixture: ClientMixture, *, generalists: int, specialists: int) -> EnsembleModel:
    """Return an ensemble of components like ``inner``, generalists first.

    The first generalist and the first specialist start with the initial values of ``inner``.

    Args:
        inner: The model of one component.
        mixture: The mixture weights of each user.
        generalists: The number of shared components.
        specialists: The number of local components of each user.

    Raises:
        RecipeError: The mixture has temperatures, which multiply hidden states in place of logits, but the output head
            has a bias or a soft cap.
    """
    if mixture.tempered and (inner.head.bias is not None or inner.head.softcap is not None):
        reason = f"the head of base {inner.name!r} has a bias or a soft cap"
        raise RecipeError(f"method.temperatures: got true, but {reason}; allowed: false, or another base")
    assert generalists + specialists == mixture.clusters
    # Initial values are drawn several times. Component c starts with draw number ``draws[c]``: generalist i and
    # specialist i both with number i.
    draws = [*range(generalists), *range(specialists)]
    roles = (GENERALIST,) * generalists + (SPECIALIST,) * specialists
    slots = [
        replace(s, shape=(mixture.clusters, *s.shape), roles=roles, init=_stacked_init(s.init, draws))
        for s in inner.layout.slots
    ]
    router = Slot(name=CLIENT_ROUTER, shape=(mixture.num_logits,), roles=(ROUTER,), init=init_zero)
    layout = Layout(slots=(*slots, router))
    return EnsembleModel(
        name=inner.name, layout=layout, device=inner.device, dtype=inner.dtype, inner=inner, mixture=mixture
    )


def _stacked_init(init: Init, draws: Sequence[int]) -> Init:
    """Return an initialiser of a tensor ``(components, ...)`` that holds all components.

    Args:
        init: Initialiser of one component's tensor; it is called ``max(draws) + 1`` times.
        draws: For each component the number of the call whose values it gets; components with the same number start
            equal.
    """

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        values_by_call = [init(shape[1:], generator) for _ in range(max(draws) + 1)]
        return torch.stack([values_by_call[number] for number in draws])

    return draw
