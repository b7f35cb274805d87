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
from comingle.models.hardware import without_compiling
from comingle.models.lora import init_zero
from comingle.models.model import FakeWeights, Model
from comingle.models.pretrained import PreTrainedModel
from comingle.models.routers import ClientMixture, Powers, mix_losses, mix_probabilities
from comingle.utils.errors import RecipeError
from comingle.utils.trees import CLIENT_ROUTER, GENERALIST, ROUTER, SPECIALIST, Init, Layout, Slot, Tree

RowsPerComponent = Float[Tensor, "rows heads tokens width"]
"""Keys or values with one row per (user, component, text), the text varying fastest."""

RowsPerText = Float[Tensor, "texts all_heads tokens width"]
"""Keys or values with one row per (user, text), which has the heads of all components of the user."""


@functools.cache
def cache_name(network: type[PreTrainedModel]) -> str:
    """Return the name of the argument of a network's ``forward`` that takes the key-value cache.

    It is ``past_key_values``, and ``cache`` from transformers 5.24 on.
    """
    return "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"


class FoldedCache(Cache):
    """A key-value cache with a row per text, for a network whose input has a row per text and component.

    Callers handle the wrapped cache like that of an ordinary model, with one row per text: its head axis holds the
    heads of all components.

    Args:
        cache: The wrapped cache, with rows as in ``RowsPerText``.
        users: The number of users.
        components: The number of components of each user's mixture.
    """

    def __init__(self, cache: Cache, users: int, components: int) -> None:
        """Wrap a cache with a row per text; arguments are described at the class."""
        super().__init__(layers=cache.layers)
        self.cache, self.users, self.components = cache, users, components

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of a layer to the cache, and return all keys and values of that layer.

        A row of the wrapped cache holds the heads of all components.

        Args:
            key_states: New keys, ``(users * components * texts, heads, tokens, width)``.
            value_states: New values, of the same shape except that their width may differ.
            layer_idx: Index of the layer.
            *args: Passed on to the cache.
            **kwargs: Passed on to the cache.
        """
        new_keys, new_values = self._fold(key_states), self._fold(value_states)
        keys, values = self.cache.update(new_keys, new_values, layer_idx, *args, **kwargs)
        return self._unfold(keys), self._unfold(values)

    def _fold(self, states: RowsPerComponent) -> RowsPerText:
        """Reshape keys or values from a row per component and text to a row per text, as transformers' caches have.

        The components of a text become additional attention heads of its row.

        Args:
            states: ``(users * components * texts, heads, ...)``

        Returns:
            ``(users * texts, components * heads, ...)``
        """
        states = states.unflatten(0, (self.users, self.components, -1))  # (users, components, texts, heads, ...)
        states = states.transpose(1, 2)  # (users, texts, components, heads, ...)
        return states.flatten(2, 3).flatten(0, 1)

    def _unfold(self, states: RowsPerText) -> RowsPerComponent:
        """Reshape keys or values from the cache, which has a row per text, to a row per component and text.

        A user's model is a mixture of components, models over one base, and the network runs a batch row for each
        component and text. The cache has them as additional attention heads of the text's row; :meth:`_fold` puts them
        there.

        Args:
            states: ``(users * texts, components * heads, ...)``

        Returns:
            ``(users * components * texts, heads, ...)``
        """
        states = states.unflatten(0, (self.users, -1))  # (users, texts, components * heads, ...)
        states = states.unflatten(2, (self.components, -1)).transpose(1, 2)  # (users, components, texts, heads, ...)
        return states.flatten(0, 2)


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
        """Return True where a user has a parameter, False for padding.

        Args:
            ranks: LoRA rank of each user; :attr:`ranks` by default.
        """
        mask_of_component = self.inner.mask(ranks)  # of one of the models that a user mixes
        mask_by_tensor = mask_of_component.split([tensor.size for tensor in self.inner.layout.slots], 1)
        # In this model a tensor has the entries of all components, one after another, which have the same mask.
        masks = [mask.repeat(1, self.mixture.clusters) for mask in mask_by_tensor]
        users = len(mask_of_component)
        router_mask = mask_of_component.new_ones(users, self.mixture.num_logits)
        return torch.cat([*masks, router_mask], 1)

    def only(self, users: Sequence[int]) -> EnsembleModel:
        """Return the model restricted to some users."""
        return replace(self, inner=self.inner.only(users))

    # ---------------------------------------------------------------- passes

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Windows, *, train: bool = False, powers: Powers = None
    ) -> Float[Tensor, "users clusters batch context"]:
        """Return each component's next-token losses in nats, computed in one pass per component.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
            batch: Windows of context + 1 tokens.
            train: Ignored, as there is no dropout.
            powers: Exponents of the components' probabilities (inverse temperatures), ``(users, clusters)``; None: 1.
        """
        losses = []
        for component in range(self.mixture.clusters):
            component_tensors = self._component_tensors(tensors, component)
            component_powers = None if powers is None else powers[:, component]
            component_losses, _ = self.inner.losses(component_tensors, users, batch, powers=component_powers)
            losses.append(component_losses)
        return torch.stack(losses, 1)

    def _component_tensors(self, tensors: Tree, component: int) -> Tree:
        """Return the users' tensors of one component, without the router's logits."""
        return {name: t[:, component].contiguous() for name, t in tensors.items() if name != CLIENT_ROUTER}

    def losses(
        self, tensors: Tree, users: Sequence[int], batch: Windows, *, train: bool = False, shares: Tensor | None = None
    ) -> tuple[Float[Tensor, "users batch context"], float]:
        """Return the training losses in nats of the mixture of predictions, and 0.0 as the load-balancing penalty.

        The value is ``-log sum_c pi_c exp(-loss_c)`` with the loss loss_c of component c. The gradient is that of
        ``sum_c loss_c``, as if each component were trained alone.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
            batch: Windows of context + 1 tokens.
            train: Ignored, as there is no dropout.
            shares: Ignored, as users have the mixture weights in ``tensors``; other models accept weights per sample.
        """
        losses = self.component_losses(tensors, users, batch, train=train)
        mixture_loss = mix_losses(losses.detach(), self.shares(tensors).detach())
        plain_sum = losses.sum(1)
        zero = plain_sum - plain_sum.detach()  # with the gradient of `plain_sum`
        return mixture_loss + zero, 0.0

    def predict(self, tensors: Tree, users: Sequence[int], batch: Windows) -> Float[Tensor, "users batch context"]:
        """Return the next-token losses in nats of each user's mixture of its components' probabilities.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
            batch: Windows of context + 1 tokens.
        """
        shares, powers = self.mixing(tensors)
        losses = self.component_losses(tensors, users, batch, powers=powers)
        return mix_losses(losses, shares)

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
        num_users, num_prompts, _width = prompts.shape
        prompts = prompts.to(self.device)
        # The length grows with each token: do not compile.
        with without_compiling(), self.mixed_network(tensors, users) as network:
            new_tokens = continue_greedily(network, prompts.flatten(0, 1), limit)
        return new_tokens.view(num_users, num_prompts, -1)

    @contextmanager
    def mixed_network(self, tensors: Tree, users: Sequence[int]) -> Iterator[PreTrainedModel]:
        """Yield a causal language model whose logits are those of the users' mixtures.

        Its forward pass is replaced in the context. A batch has equally many texts of each user, ordered by user.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
        """
        network, mixing = self.inner.network, self.mixing(tensors)
        self.bind(tensors, users)
        earlier_replacement = vars(network).get("forward")  # None if the class's own forward is in use
        mix_forward(network, lambda: mixing)
        try:
            yield network
        finally:
            del network.forward
            if earlier_replacement is not None:
                setattr(network, "forward", earlier_replacement)  # noqa: B010 (a method, not a Tensor)

    def bind(self, tensors: Tree, users: Sequence[int]) -> None:
        """Put the tensors of some users into the network, for passes that mix the predictions of several models.

        A user's model is a mixture of components. The network, whose adapters have a row for each user, gets a row for
        each user and component instead: those of the first user, then those of the second, and so on.

        Args:
            tensors: The users' trainable tensors, ``(users, clusters, ...)``.
            users: Indices of the users.
        """
        rows = {name: t.flatten(0, 1).contiguous() for name, t in tensors.items() if name != CLIENT_ROUTER}
        user_of_row = []  # such as [4, 4, 7, 7] for users 4 and 7 with two components
        for user in users:
            user_of_row += [user] * self.mixture.clusters
        self.inner.adapters.bind(rows, user_of_row)

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """Replace the frozen base weights by fake tensors without data, to estimate the memory of a run.

        Args:
            fakes: Maker of fake tensors (:class:`comingle.cost.memory.Fakes`).

        Returns:
            The model, and the bytes of the replaced weights.
        """
        inner, size = self.inner.without_weights(fakes)
        return replace(self, inner=inner), size


def mix_forward(network: PreTrainedModel, mixing: Callable[[], Mixing]) -> None:
    """Replace a causal language model's forward so that it mixes the predictions of each user's components.

    The new logits are ``log sum_c pi_c softmax(t_c f_c(x))`` with the logits f_c of component c, the user's mixture
    weight pi_c and the power t_c of the component's probabilities. Each text is repeated for each component.

    Args:
        network: The model, with the components' adapters bound to it.
        mixing: Function that returns pi and t ``(users, components)`` of the users in the batch; t is None for 1.
    """

    original_forward = type(network).forward.__get__(network)  # the class's own, bound to this network
    cache_key = cache_name(type(network))  # name of the argument for the key-value cache

    @wraps(original_forward)
    def mixed_forward(*, input_ids: Int[Tensor, "n width"], **options: Any) -> object:
        """Run the model for each component of each text; return its output with the mixture's logits.

        Args:
            input_ids: Tokens of the users' texts, ordered by user and equally many each.
            **options: Further arguments of the model.
        """
        pi, powers = mixing()
        users, components = pi.shape
        texts = len(input_ids)

        def repeat_per_component(rows: Tensor) -> Tensor:
            """Repeat rows ordered by user and text; the result is ordered by user, component and text."""
            by_user = rows.unflatten(0, (users, -1)).unsqueeze(1)
            return by_user.expand(users, components, *by_user.shape[2:]).flatten(0, 2)

        cache = options.pop(cache_key, None)
        options[cache_key] = None if cache is None else FoldedCache(cache, users, components)
        for key in PER_TEXT_INPUTS:  # arguments with a row for each text, or a single row for all
            value = options.get(key)
            if isinstance(value, Tensor) and len(value) == texts:
                options[key] = repeat_per_component(value)
        output = original_forward(input_ids=repeat_per_component(input_ids), **options)
        # (users, components, texts, tokens, vocab)
        logits = output.logits.float().unflatten(0, (users, components, -1))
        if powers is not None:
            logits = logits * powers.float().view(users, components, 1, 1, 1)
        logits_per_component = logits.flatten(2, 3)  # (users, components, texts * tokens, vocab)
        mixed_logits = mix_probabilities(logits_per_component, pi.float())
        output.logits = mixed_logits.view(texts, -1, logits.shape[-1])
        setattr(output, cache_key, cache)
        return output

    setattr(network, "forward", mixed_forward)  # noqa: B010 (a method, not a Tensor)


PER_TEXT_INPUTS = ("attention_mask", "position_ids")
"""Inputs of a causal language model that have one row per text, besides the tokens."""


def ensemble(inner: AdaptedModel, mixture: ClientMixture, *, generalists: int, specialists: int) -> EnsembleModel:
    """Return an ensemble of components like ``inner``, generalists first.

    Generalist i and specialist i start with equal values; for i = 0 they are the initial values of ``inner``.

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
    draw_of_component = [*range(generalists), *range(specialists)]  # such as [0, 1, 0] for 2 and 1
    roles = (GENERALIST,) * generalists + (SPECIALIST,) * specialists
    slots = []
    for slot in inner.layout.slots:
        shape = (mixture.clusters, *slot.shape)
        slots.append(replace(slot, shape=shape, roles=roles, init=_stacked_init(slot.init, draw_of_component)))
    router = Slot(name=CLIENT_ROUTER, shape=(mixture.num_logits,), roles=(ROUTER,), init=init_zero)
    layout = Layout(slots=(*slots, router))
    return EnsembleModel(
        name=inner.name, layout=layout, device=inner.device, dtype=inner.dtype, inner=inner, mixture=mixture
    )


def _stacked_init(init: Init, draw_of_component: Sequence[int]) -> Init:
    """Return an initialiser of a tensor ``(components, ...)`` that holds all components.

    Args:
        init: Initialiser of one component's tensor, which draws values.
        draw_of_component: Number of the draw with which each component starts. With ``[0, 1, 0]`` values are drawn
            twice, and the first and the last component start equal.
    """

    def draw_all(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        num_draws = max(draw_of_component) + 1
        _components, *component_shape = shape
        draws = [init(tuple(component_shape), generator) for _ in range(num_draws)]
        return torch.stack([draws[number] for number in draw_of_component])

    return draw_all
