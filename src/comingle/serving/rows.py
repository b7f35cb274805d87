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

ROOM = 256
"""The cache grows by multiples of this many positions."""

States = Float[Tensor, "rows heads places width"]
Stores = Float[Tensor, "most heads room width"]
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
        """Write a step after the window, and return the window with it."""
        at, count = self.cache.stop, key_states.shape[-2]
        window = slice(self.cache.start, at + count)
        rows = slice(len(self.cache.begins))
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store[rows, :, at : at + count] = states
        keys, values = (store[rows, :, window] for store in self.stores)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of positions before the current step."""
        return self.cache.stop - self.cache.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the window with the current step, and the window's offset."""
        return self.get_seq_length() + query_length, 0


class RowCache(Cache):
    """Key-value cache of up to ``most`` rows.

    ``begins`` holds the position where each row's text begins; ``start`` and ``stop`` bound the window of all rows.
    """

    def __init__(self, most: int) -> None:
        super().__init__(layers=[])
        self.most, self.begins = most, list[int]()
        self.start = self.stop = self.room = 0

    def lengths(self) -> Int[Tensor, " rows"]:
        """Return the number of cached tokens of each row."""
        return self.stop - torch.tensor(self.begins)

    def mask(self) -> Bool[Tensor, "rows places"]:
        """Return which positions of the window and of the next step belong to each row."""
        return torch.arange(self.start, self.stop + 1) >= torch.tensor(self.begins).unsqueeze(1)

    def join(self, prompts: Cache, lengths: Sequence[int]) -> None:
        """Add rows whose left-padded prompts have been read into the cache ``prompts``."""
        read: list[Any] = prompts.layers
        if not self.begins:
            self.start = self.stop = 0
        self._provide(read, max(lengths))
        for own, other in zip(self.layers, read, strict=True):
            for store, states in zip(own.stores, (other.keys, other.values), strict=True):
                for row, length in enumerate(lengths):
                    place = store[len(self.begins) + row]
                    # Clear an old row's values: attention multiplies masked positions by zero, and 0 * NaN is NaN.
                    place[:, : self.stop - length] = 0
                    place[:, self.stop - length : self.stop] = states[row, :, -length:]
        self.begins += [self.stop - length for length in lengths]
        self.start = min(self.begins)

    def advance(self) -> None:
        """Extend the window by the step that was written."""
        self.stop += 1
        self._provide(self.layers, 0)

    def leave(self, row: int) -> None:
        """Remove a row and move the last one to its index."""
        last = len(self.begins) - 1
        if row != last:
            for layer in self.layers:
                for store in layer.stores:
                    store[row, :, : self.stop] = store[last, :, : self.stop]
        self.begins[row] = self.begins[last]
        self.begins.pop()
        self.start = min(self.begins, default=self.stop)

    def _provide(self, like: Sequence[Any], longest: int) -> None:
        """Reserve room for rows of up to ``longest`` tokens before the window's end, and for a step after it."""
        if longest <= self.stop < self.room:
            return
        if not self.layers:
            self.layers = [_Layer(self) for _ in like]
        stop = max(self.stop - self.start, longest)
        room = -(-(stop + ROOM // 2) // ROOM) * ROOM
        for own, other in zip(self.layers, like, strict=True):
            own.stores = [self._moved(store, stop, room) for store in own.stores or (other.keys, other.values)]
        shift = stop - self.stop
        self.begins = [begin + shift for begin in self.begins]
        self.start, self.stop, self.room = self.start + shift, stop, room

    def _moved(self, store: States, stop: int, room: int) -> Stores:
        moved = store.new_zeros(self.most, store.shape[1], room, store.shape[3])
        if rows := len(self.begins):
            moved[:rows, :, stop - (self.stop - self.start) : stop] = store[:rows, :, self.start : self.stop]
        return moved


class Rows(ABC):
    """``most`` rows of a batch, each with the model of one user."""

    network: PreTrainedModel
    """The causal language model; computes the models of the rows that were bound last."""

    def __init__(self, people: Mapping[str, PersonalModel], most: int) -> None:
        self.own = {name: self._tree(person) for name, person in people.items()}
        first = next(iter(self.own.values()))
        self.stacked: Tree = {name: t.new_zeros(most, *t.shape[1:]) for name, t in first.items()}
        self.names = [""] * most

    def set(self, row: int, name: str) -> None:
        """Assign a row to a user."""
        if self.names[row] != name:
            for slot, tensor in self.own[name].items():
                self.stacked[slot][row] = tensor[0]
            self.names[row] = name

    def move(self, row: int, to: int) -> None:
        """Copy a row over another."""
        self.set(to, self.names[row])

    def bind(self, rows: slice) -> None:
        """Make the network compute the models of these rows' users, one text per row."""
        self._bind({name: t[rows] for name, t in self.stacked.items()}, self.names[rows])

    @abstractmethod
    def _tree(self, person: PersonalModel) -> Tree:
        """Return a user's adapters with shapes ``(1, ...)``."""

    @abstractmethod
    def _bind(self, tensors: Tree, names: Sequence[str]) -> None: ...


class AdaptedRows(Rows):
    """Rows of models with experts and routers."""

    def __init__(self, people: Mapping[str, PersonalModel], most: int) -> None:
        super().__init__(people, most)
        self.model = cast(AdaptedModel, next(iter(people.values())).model)
        self.numbers = {name: person.row for name, person in people.items()}
        self.network = self.model.network

    def _tree(self, person: PersonalModel) -> Tree:
        return person.tensors

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        self.model.adapters.bind(tensors, [self.numbers[name] for name in names])


class MixedRows(Rows):
    """Rows of client-level mixtures: C components of rank r, mixed for a user, are one LoRA of rank C r."""

    def __init__(self, people: Mapping[str, PersonalModel], most: int) -> None:
        super().__init__(people, most)
        self.network = share_weights(next(iter(people.values())).model.base.model)
        inner = self.network.base_model
        self.linears: dict[str, LoraLinear] = {}
        for name, _, _ in lora_pairs(self.stacked):
            self.linears[name] = LoraLinear(inner.get_submodule(name), scale=1.0)
            inner.set_submodule(name, self.linears[name])

    def _tree(self, person: PersonalModel) -> Tree:
        model = cast(MixedLanguageModel, person.model)
        layers = cast(FloralModel, model.net).layers()
        shares, tree = model.shares(person.tensors)[0], Tree()
        for stem, a, b in lora_pairs(person.tensors):
            name = stem.removeprefix("model.")
            layer = layers[stem]
            wide = b[0] * (layer.alpha * layer.of_mixture(shares)).to(b).view(-1, 1, 1)  # (clusters, d_out, rank)
            tree[f"{name}.a"] = a.flatten(1, 2)
            tree[f"{name}.b"] = wide.mT.flatten(0, 1).unsqueeze(0)
        return tree

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        for name, linear in self.linears.items():
            linear.factors = (tensors[f"{name}.a"], tensors[f"{name}.b"])


class EnsembleRows(Rows):
    """Rows of ensembles: each has the adapters of all of its user's models, and their weights."""

    def __init__(self, people: Mapping[str, PersonalModel], most: int) -> None:
        super().__init__(people, most)
        self.model = cast(EnsembleModel, next(iter(people.values())).model)
        self.numbers = {name: person.row for name, person in people.items()}
        self.network, self.mixing = self.model.inner.network, (torch.empty(0, 0), None)
        mix_forward(self.network, lambda: self.mixing)

    def _tree(self, person: PersonalModel) -> Tree:
        return person.tensors

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        self.model.bind(tensors, [self.numbers[name] for name in names])
        self.mixing = self.model.mixing(tensors)


KINDS: dict[type, type[Rows]] = {
    AdaptedModel: AdaptedRows,
    EnsembleModel: EnsembleRows,
    MixedLanguageModel: MixedRows,
}


def rows_of(people: Mapping[str, PersonalModel], most: int) -> Rows:
    """Return rows for the users of one run."""
    rows = KINDS[type(next(iter(people.values())).model)](people, most)
    head = rows.network.get_output_embeddings()
    if type(head) is nn.Linear:
        rows.network.set_output_embeddings(RowsLinear(head))
    return rows


def prepare(network: PreTrainedModel) -> None:
    """Prepare a base in place for steps of few rows on a CPU.

    Compiled code (:mod:`comingle.models.kernels.expert_mlp`), if enabled, takes weights as they are. Otherwise float32
    weights are stored in column-major order, with which PyTorch's products of few rows are faster. Do not use it for a
    base that is shared with other code: transformers cannot save weights in this order. Measured with 8 rows on
    SmolLM2-135M, one thread: 128 ms per step instead of 168 ms; with one row there is little change.
    """
    for module in network.modules():
        weight = module.weight if isinstance(module, nn.Linear) else None
        if weight is None or expert_mlp.is_enabled() or (weight.device.type, weight.dtype) != ("cpu", torch.float32):
            continue
        weight.data = weight.data.t().contiguous().t()


def pretrained(person: PersonalModel) -> PersonalModel:
    """Return a user's model that behaves as the base does: adapters add zeros, mixtures leave logits unchanged."""
    adds = (".b", f".{OUT}", CLIENT_ROUTER)  # A router of zeros gives all models equal weights and exponent 1.
    silent = {name: torch.zeros_like(t) if name.endswith(adds) else t for name, t in person.tensors.items()}
    return replace(person, name="pretrained", tensors=cast(dict[str, Tensor], silent))
