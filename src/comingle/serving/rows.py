"""Rows of one batch over one base, and their key-value cache.

All rows end at the same position, that of the newest token, and start where their texts do: positions before a row's
start are masked, as with left-padded prompts. A step therefore writes one position for all rows, and every kind of
attention in transformers (causal, sliding window, ALiBi) sees what it sees in ``generate``.

A row holds a copy of its user's adapters. Products with base weights are shared by all rows; products with adapters
are batched, as in training with a batch of one per user.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from comingle.models.adapted import AdaptedModel
from comingle.models.ensembles import EnsembleModel, mix_forward
from comingle.models.floral.model import FloralModel
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import RowsLinear
from comingle.models.lora import OUT, LoraLinear
from comingle.models.model import share_weights
from comingle.models.personal import PersonalModel
from comingle.models.pretrained import PreTrainedModel
from comingle.models.stacked import MixedLanguageModel
from comingle.utils.trees import CLIENT_ROUTER, Tree, lora_pairs

CAPACITY_STEP = 256
"""The cache grows by multiples of this many positions."""

States = Float[Tensor, "rows heads places width"]
Stores = Float[Tensor, "max_rows heads capacity width"]
Window = Float[Tensor, "rows heads window width"]


class _Layer(DynamicLayer):
    """Keys and values of one layer: a window of two larger tensors, into which steps are written."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache = cache
        self.stores: list[Stores] = []

    def update(
        self, key_states: States, value_states: States, *args: object, **kwargs: object
    ) -> tuple[Window, Window]:
        """Write the keys and values of a step after those of earlier steps, and return all of them.

        transformers calls this in every layer. Writing in place avoids the copy of all earlier steps that
        concatenation needs.
        """
        stop, num_new = self.cache.stop, key_states.shape[-2]
        window = slice(self.cache.start, stop + num_new)
        rows = slice(len(self.cache.starts))
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store[rows, :, stop : stop + num_new] = states
        keys, values = (store[rows, :, window] for store in self.stores)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of positions before the current step."""
        return self.cache.stop - self.cache.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the window with the current step, and the window's offset."""
        return self.get_seq_length() + query_length, 0


class RowCache(Cache):
    """Key-value cache of up to ``max_rows`` rows.

    ``starts`` holds the position where each row's text starts; ``start`` and ``stop`` bound the window of all rows.
    """

    def __init__(self, max_rows: int) -> None:
        super().__init__(layers=[])
        self.max_rows, self.starts = max_rows, list[int]()
        self.start = self.stop = self.capacity = 0

    def lengths(self) -> Int[Tensor, " rows"]:
        """Return the number of cached tokens of each row."""
        return self.stop - torch.tensor(self.starts)

    def mask(self) -> Bool[Tensor, "rows places"]:
        """Return which positions of the window and of the next step belong to each row."""
        return torch.arange(self.start, self.stop + 1) >= torch.tensor(self.starts).unsqueeze(1)

    def join(self, prompts: Cache, lengths: Sequence[int]) -> None:
        """Append rows for new prompts, with a copy of their keys and values.

        All rows end at the position ``stop``, since a step writes its keys and values at one position for all rows.
        Shorter texts therefore start later; ``starts`` has the position of each row's first token.

        Args:
            prompts: Keys and values of the left-padded prompts, from the base's forward pass over them.
            lengths: Number of tokens of each prompt.
        """
        prompt_layers: list[Any] = prompts.layers
        if not self.starts:  # there are no rows, so the window of used positions begins again at position 0
            self.start = self.stop = 0
        self._reserve(prompt_layers, max(lengths))
        for own, other in zip(self.layers, prompt_layers, strict=True):
            for store, states in zip(own.stores, (other.keys, other.values), strict=True):
                for row, length in enumerate(lengths):
                    new_row = store[len(self.starts) + row]
                    # Clear an old row's values: attention multiplies masked positions by zero, and 0 * NaN is NaN.
                    new_row[:, : self.stop - length] = 0
                    new_row[:, self.stop - length : self.stop] = states[row, :, -length:]
        self.starts += [self.stop - length for length in lengths]
        self.start = min(self.starts)

    def advance(self) -> None:
        """Extend the window by the step that was written."""
        self.stop += 1
        self._reserve(self.layers, 0)

    def leave(self, row: int) -> None:
        """Remove a row; the last row, with its keys and values in all layers, takes its index.

        If the removed row had the longest text, the window of used positions becomes shorter.
        """
        last = len(self.starts) - 1
        if row != last:
            for layer in self.layers:
                for store in layer.stores:
                    store[row, :, : self.stop] = store[last, :, : self.stop]
        self.starts[row] = self.starts[last]
        self.starts.pop()
        self.start = min(self.starts, default=self.stop)  # without rows the window is empty

    def _reserve(self, like: Sequence[Any], longest: int) -> None:
        """Make room for the next step and for new rows of at most ``longest`` tokens.

        All rows end at ``stop``, so a new row fits if ``longest <= stop``, and a step fits if ``stop < capacity``.
        Otherwise larger tensors are made, in which rows end at the length of the longest row, old or new: that row
        starts at position 0.

        Args:
            like: Layers with keys and values. An empty cache gets tensors of the same shapes and dtypes.
            longest: Number of tokens of the longest new row; 0 without new rows.
        """
        if longest <= self.stop < self.capacity:
            return  # there is room
        if not self.layers:
            self.layers = [_Layer(self) for _ in like]
        stop = max(self.stop - self.start, longest)
        # A multiple of the step with at least half a step to spare, so that the next steps need no larger tensors.
        capacity = -(-(stop + CAPACITY_STEP // 2) // CAPACITY_STEP) * CAPACITY_STEP
        for own, other in zip(self.layers, like, strict=True):
            stores = own.stores or (other.keys, other.values)  # without stores, for their shapes and dtypes only
            own.stores = [self._reallocated(store, stop, capacity) for store in stores]
        shift = stop - self.stop  # all rows have moved by this number of positions
        self.starts = [begin + shift for begin in self.starts]
        self.start, self.stop, self.capacity = self.start + shift, stop, capacity

    def _reallocated(self, store: States, stop: int, capacity: int) -> Stores:
        """Copy the keys or values of all rows to a larger tensor, where they end at position ``stop``.

        Copies the positions from the first token of the longest row to the newest token (``self.start`` to
        ``self.stop``); others are zero.

        Args:
            store: Keys or values of one layer, ``(rows, heads, positions, width)``.
            stop: Position in the new tensor at which all rows end.
            capacity: Number of positions of the new tensor.
        """
        moved = store.new_zeros(self.max_rows, store.shape[1], capacity, store.shape[3])
        if rows := len(self.starts):
            moved[:rows, :, stop - (self.stop - self.start) : stop] = store[:rows, :, self.start : self.stop]
        return moved


class Rows(ABC):
    """``max_rows`` rows of a batch, each with the model of one user."""

    network: PreTrainedModel
    """The causal language model; computes the models of the rows that were bound last."""

    def __init__(self, models: Mapping[str, PersonalModel], max_rows: int) -> None:
        self.user_tensors = {name: self._adapters_of(personal) for name, personal in models.items()}
        self.numbers = {name: personal.row for name, personal in models.items()}
        """Index of each user among all users of the run."""
        first = next(iter(self.user_tensors.values()))
        self.stacked: Tree = {name: t.new_zeros(max_rows, *t.shape[1:]) for name, t in first.items()}
        self.names = [""] * max_rows
        self.copied: list[Tree | None] = [None] * max_rows
        """The tensors that each row has a copy of; None for a row that was never used."""

    def set(self, row: int, name: str) -> None:
        """Assign a row to a user: copy the user's adapters into the row, unless the row has them already."""
        tensors = self.user_tensors[name]
        if self.names[row] != name or self.copied[row] is not tensors:
            for slot, tensor in tensors.items():
                self.stacked[slot][row] = tensor[0]  # from (1, ...), one user, into (max_rows, ...)
            self.names[row], self.copied[row] = name, tensors

    def move(self, row: int, to: int) -> None:
        """Copy a row's adapters to the row ``to``; those of its user may have been replaced since the row was set."""
        if self.copied[to] is not self.copied[row]:
            for tensor in self.stacked.values():
                tensor[to] = tensor[row]
            self.names[to], self.copied[to] = self.names[row], self.copied[row]

    def replace(self, personal: PersonalModel) -> None:
        """Replace a user's model, or add one, for rows that are set from now on; other rows keep their adapters."""
        self.user_tensors[personal.name] = self._adapters_of(personal)
        self.numbers[personal.name] = personal.row

    def bind(self, rows: slice) -> None:
        """Make the network compute the models of these rows' users, from now on, with one text per row."""
        self._bind({name: t[rows] for name, t in self.stacked.items()}, self.names[rows])

    @abstractmethod
    def _adapters_of(self, personal: PersonalModel) -> Tree:
        """Return a user's adapters with shapes ``(1, ...)``."""

    @abstractmethod
    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        """Make the network use stacked adapters ``(rows, ...)`` of the named users."""


class AdaptedRows(Rows):
    """Rows of models with experts and routers."""

    def __init__(self, models: Mapping[str, PersonalModel], max_rows: int) -> None:
        super().__init__(models, max_rows)
        self.model = cast(AdaptedModel, next(iter(models.values())).model)
        self.network = self.model.network

    def _adapters_of(self, personal: PersonalModel) -> Tree:
        return personal.tensors

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        self.model.adapters.bind(tensors, [self.numbers[name] for name in names])


class MixedRows(Rows):
    """Rows of client-level mixtures: C components of rank r, mixed for a user, are one LoRA of rank C r."""

    def __init__(self, models: Mapping[str, PersonalModel], max_rows: int) -> None:
        """Put the base's linear layers that have a LoRA into wrappers that add the LoRA of each row's user.

        Args:
            models: Model by user; all have the same base.
            max_rows: Largest number of rows of a batch.
        """
        super().__init__(models, max_rows)
        any_model = next(iter(models.values())).model
        self.network = share_weights(any_model.base.model)  # other code keeps using the base without wrappers
        inner = self.network.base_model  # without the output layer; names of LoRAs are relative to it
        self.linears: dict[str, LoraLinear] = {}
        # Only the layers' names are needed here: `_bind` sets the factors A and B of the LoRAs.
        for name, _a, _b in lora_pairs(self.stacked):
            # Scale 1, since the stored factors B are multiplied by the LoRA's scale already.
            self.linears[name] = LoraLinear(inner.get_submodule(name), scale=1.0)
            inner.set_submodule(name, self.linears[name])

    def _adapters_of(self, personal: PersonalModel) -> Tree:
        """Return the user's mixture as one LoRA per layer, as factors A and B by name.

        ``sum_c share_c B_c A_c`` over C components of rank r is one product of rank C r, with the shares and the scale
        in B.
        """
        model = cast(MixedLanguageModel, personal.model)
        layers = cast(FloralModel, model.net).layers()
        shares, tree = model.shares(personal.tensors)[0], Tree()  # [0]: the tensors are those of a single user
        for layer_name, a, b in lora_pairs(personal.tensors):
            name = layer_name.removeprefix("model.")
            layer = layers[layer_name]
            layer_shares = layer.own_mixture(shares)  # (clusters,): a mixture may have shares of its own for each layer
            factors = layer.alpha * layer_shares
            scaled_b = b[0] * factors.to(b).view(-1, 1, 1)  # (clusters, d_out, rank)
            tree[f"{name}.a"] = a.flatten(1, 2)  # (1, clusters rank, d_in)
            tree[f"{name}.b"] = scaled_b.mT.flatten(0, 1).unsqueeze(0)  # (1, clusters rank, d_out)
        return tree

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        for name, linear in self.linears.items():
            linear.factors = (tensors[f"{name}.a"], tensors[f"{name}.b"])


class EnsembleRows(Rows):
    """Rows of ensembles: each has the adapters of all of its user's models, and their weights."""

    def __init__(self, models: Mapping[str, PersonalModel], max_rows: int) -> None:
        """Make the network mix the predictions of all models in the ensemble of a row's user.

        Args:
            models: Personal model by user, each an ensemble; all have the same network.
            max_rows: Largest number of rows of a batch.
        """
        super().__init__(models, max_rows)
        self.model = cast(EnsembleModel, next(iter(models.values())).model)
        # For the rows that were bound last: weights of the mixture, and exponents of the probabilities before they are
        # mixed. No rows are bound yet.
        self.network, self.mixing = self.model.inner.network, (torch.empty(0, 0), None)
        mix_forward(self.network, lambda: self.mixing)

    def _adapters_of(self, personal: PersonalModel) -> Tree:
        return personal.tensors

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        self.model.bind(tensors, [self.numbers[name] for name in names])
        self.mixing = self.model.mixing(tensors)


KINDS: dict[type, type[Rows]] = {
    AdaptedModel: AdaptedRows,
    EnsembleModel: EnsembleRows,
    MixedLanguageModel: MixedRows,
}


def rows_of(models: Mapping[str, PersonalModel], max_rows: int) -> Rows:
    """Return rows for the users of one run, of the class for its kind of model.

    The output layer is replaced by one that is faster for few rows.
    """
    any_model = next(iter(models.values())).model  # all models of a run are of one class
    rows = KINDS[type(any_model)](models, max_rows)
    head = rows.network.get_output_embeddings()
    if type(head) is nn.Linear:
        rows.network.set_output_embeddings(RowsLinear(head))
    return rows


def prepare(network: PreTrainedModel) -> None:
    """Prepare a base in place for steps of few rows on a CPU.

    Weights in float32 are stored in column-major order, with which PyTorch's products of few rows are faster. Measured
    with 8 rows on SmolLM2-135M, one thread: 128 ms per step instead of 168 ms; with one row there is little change. If
    compiled code is enabled (:mod:`comingle.models.kernels.expert_mlp`), nothing is changed, since this code reads
    weights in row-major order.

    Other code must not use the base afterwards: transformers cannot save weights in this order.
    """
    for module in network.modules():
        weight = module.weight if isinstance(module, nn.Linear) else None
        if weight is None or expert_mlp.is_enabled() or (weight.device.type, weight.dtype) != ("cpu", torch.float32):
            continue
        weight.data = weight.data.t().contiguous().t()


def without_adapters(personal: PersonalModel) -> PersonalModel:
    """Return a user's model named "pretrained" that computes the same as the base, for comparison with it.

    All factors B of LoRAs and all residuals are set to zero, so that adapters add nothing. In a mixture of models, each
    component then equals the base. A mixture may raise the components' probabilities to learned powers, whose
    logarithms are in the router. The router is set to zero, so these powers are 1, and the mixture equals the base.
    """
    zeroed = (".b", f".{OUT}", CLIENT_ROUTER)  # ends of the names of factors B, residuals and a mixture's router
    tensors = {name: torch.zeros_like(t) if name.endswith(zeroed) else t for name, t in personal.tensors.items()}
    return replace(personal, name="pretrained", tensors=cast(dict[str, Tensor], tensors))
