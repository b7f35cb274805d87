"""Rows of one batch over one base, and their key-value cache.

All rows end at the same position, that of the newest token, and start where their texts do: positions before a row's
start are masked, as with left-padded prompts. A step therefore writes one position for all rows, and every kind of
attention in transformers (causal, sliding window, ALiBi) sees what it sees in ``generate``.

A row holds a copy of its user's adapters. Products with base weights are shared by all rows; products with adapters
are batched, as in training with a batch of one per user.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from comingle.models.adapted import AdaptedModel
from comingle.models.base import Base
from comingle.models.ensembles import EnsembleModel, mix_forward
from comingle.models.floral.model import FloralModel
from comingle.models.hardware import return_freed_memory
from comingle.models.kernels import cpu, expert_mlp
from comingle.models.kernels.expert_mlp import RowsLinear
from comingle.models.lora import OUT, LoraLinear
from comingle.models.model import share_weights
from comingle.models.personal import PersonalModel
from comingle.models.pretrained import PreTrainedModel
from comingle.models.quantised import PACKED, quantise_linear
from comingle.models.stacked import MixedLanguageModel
from comingle.utils.files import cache_folder
from comingle.utils.trees import CLIENT_ROUTER, Tree, lora_pairs

CAPACITY_STEP = 256
"""The cache grows by multiples of this many positions."""

States = Float[Tensor, "rows heads positions width"]
"""Keys or values of one layer."""
Stores = Float[Tensor, "max_rows heads capacity width"]
"""Memory for the keys or the values of one layer, with more rows and positions than are in use."""
Window = Float[Tensor, "rows heads window width"]
"""View of the rows and positions in use."""


class _Layer(DynamicLayer):
    """Keys and values of one layer in the cache.

    ``stores`` holds a tensor of keys and one of values, with more rows and positions than are in use.
    """

    def __init__(self, cache: RowCache) -> None:
        """Create a layer without memory, which :class:`RowCache` allocates for all layers when texts are added."""
        super().__init__()
        self.cache = cache  # has the positions in use, which are the same in all layers
        self.stores: list[Stores] = []  # keys and values

    def update(
        self, key_states: States, value_states: States, *args: object, **kwargs: object
    ) -> tuple[Window, Window]:
        """Write the keys and values of new tokens into the cache, and return those of all cached tokens.

        transformers calls this in every layer. Texts in the batch are right-aligned, so the new tokens of all of them
        go to the same positions, from ``cache.stop``. The longest text starts at ``cache.start``.

        Args:
            key_states: Keys of the new tokens.
            value_states: Values of the new tokens.
            args: Further arguments of transformers, not used.
            kwargs: Further arguments of transformers, not used.
        """
        num_rows, num_new = len(self.cache.starts), key_states.shape[-2]
        new_positions = slice(self.cache.stop, self.cache.stop + num_new)
        used_positions = slice(self.cache.start, self.cache.stop + num_new)
        key_store, value_store = self.stores
        key_store[:num_rows, :, new_positions] = key_states
        value_store[:num_rows, :, new_positions] = value_states
        return key_store[:num_rows, :, used_positions], value_store[:num_rows, :, used_positions]

    def get_seq_length(self) -> int:
        """Return the number of cached positions in use."""
        return self.cache.stop - self.cache.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of positions in the mask, with ``query_length`` new ones, and the offset of the first."""
        return self.get_seq_length() + query_length, 0


class RowCache(Cache):
    """Key-value cache of up to ``max_rows`` rows, which all end at the position before ``stop``.

    ``starts`` has the position of each row's first token, and ``start`` is the smallest of them.
    """

    def __init__(self, max_rows: int) -> None:
        """Create a cache for at most ``max_rows`` texts of a batch, which allocates memory when texts are added."""
        super().__init__(layers=[])
        self.max_rows = max_rows
        self.starts: list[int] = []  # position of each row's first token
        self.start = 0  # the smallest of them
        self.stop = 0  # position of the next token of every row
        self.capacity = 0  # number of positions that are allocated
        self.row_capacity = 0  # number of rows that are allocated

    def lengths(self) -> Int[Tensor, " rows"]:
        """Return the number of cached tokens of each row."""
        return self.stop - torch.tensor(self.starts)

    def mask(self) -> Bool[Tensor, "rows positions"]:
        """Return for each row which positions have a token of the row, from ``start`` up to that of the next token."""
        return torch.arange(self.start, self.stop + 1) >= torch.tensor(self.starts).unsqueeze(1)

    def join(self, prompts: Cache, lengths: Sequence[int]) -> None:
        """Add texts whose prompts were just read to the batch, each as a row with the keys and values of its prompt.

        Rows are right-aligned: the next token of each goes to position ``stop``, so the row of a shorter prompt starts
        later.

        Args:
            prompts: Keys and values of the prompts, which are padded on the left.
            lengths: Number of tokens of each prompt.
        """
        prompt_layers: list[Any] = prompts.layers
        if not self.starts:  # without rows, the next ones may start at position 0
            self.start = self.stop = 0
        self._reserve(prompt_layers, max(lengths), num_new_rows=len(lengths))
        first_new_row = len(self.starts)
        new_starts = [self.stop - length for length in lengths]
        for layer, prompt_layer in zip(self.layers, prompt_layers, strict=True):
            for store, states in zip(layer.stores, (prompt_layer.keys, prompt_layer.values), strict=True):
                for i, (row_start, length) in enumerate(zip(new_starts, lengths, strict=True)):
                    new_row = store[first_new_row + i]
                    # Clear an old row's values: attention multiplies masked positions by zero, and 0 * NaN is NaN.
                    new_row[:, :row_start] = 0
                    new_row[:, row_start : self.stop] = states[i, :, -length:]
        self.starts += new_starts
        self.start = min(self.starts)

    def advance(self) -> None:
        """Go to the next position, after a forward pass has cached one more token of every row; make room for it."""
        self.stop += 1
        self._reserve(self.layers, longest_new_row=0, num_new_rows=0)

    def leave(self, row: int) -> None:
        """Remove the cached keys and values of a text of the batch, and move the last row to its index.

        Args:
            row: Index of the text's row.
        """
        last = len(self.starts) - 1
        if row != last:
            for layer in self.layers:
                for store in layer.stores:
                    store[row, :, : self.stop] = store[last, :, : self.stop]
        self.starts[row] = self.starts[last]
        self.starts.pop()
        self.start = min(self.starts, default=self.stop)

    def _reserve(self, template_layers: Sequence[Any], longest_new_row: int, num_new_rows: int) -> None:
        """Move all rows to new tensors if the present ones lack room for one more token or for the new rows.

        Rows are right-aligned: the last token of each is at position ``stop - 1``. The next token of every row goes to
        ``stop``. A new row needs as many positions before ``stop`` as it has tokens. In the new tensors the longest
        row, old or new, starts at position 0.

        Args:
            template_layers: Layers from which a cache without tensors copies shapes and dtypes.
            longest_new_row: Number of tokens of the longest new row; 0 without new rows.
            num_new_rows: Number of new rows.
        """
        num_rows = len(self.starts) + num_new_rows
        new_rows_fit = longest_new_row <= self.stop and num_rows <= self.row_capacity
        next_token_fits = self.stop < self.capacity
        if new_rows_fit and next_token_fits:
            return
        if not self.layers:
            self.layers = [_Layer(self) for _ in template_layers]
        longest_old_row = self.stop - self.start
        new_stop = max(longest_old_row, longest_new_row)
        # Leave at least half a step of free positions, and round up to whole steps.
        num_steps = math.ceil((new_stop + CAPACITY_STEP // 2) / CAPACITY_STEP)
        new_capacity = num_steps * CAPACITY_STEP
        new_row_capacity = min(self.max_rows, 1 << (num_rows - 1).bit_length())  # a power of two
        fits = num_rows <= self.row_capacity and new_stop < self.capacity
        is_oversized = self.row_capacity * self.capacity > 4 * new_row_capacity * new_capacity
        if not self.starts and fits and not is_oversized:  # there is nothing to move
            self.start = self.stop = new_stop
            return
        new_row_capacity = max(new_row_capacity, self.row_capacity) if self.starts else new_row_capacity
        for layer, template in zip(self.layers, template_layers, strict=True):
            old_stores = layer.stores or [template.keys, template.values]
            layer.stores = [self._enlarged(store, new_stop, new_capacity, new_row_capacity) for store in old_stores]
        shift = new_stop - self.stop  # all rows move by as many positions as their common end
        self.starts = [row_start + shift for row_start in self.starts]
        self.start, self.stop, self.capacity = self.start + shift, new_stop, new_capacity
        self.row_capacity = new_row_capacity

    def _enlarged(self, store: States, new_stop: int, new_capacity: int, new_row_capacity: int) -> Stores:
        """Return another tensor with the cached keys or values of all rows, and zeros elsewhere.

        Rows are texts of one batch. They are right-aligned: the last token of each is at position ``new_stop - 1``.

        Args:
            store: Keys or values of one layer. Without rows, only its shape and dtype are used.
            new_stop: Position in the new tensor after the last token of each row, where the next token goes.
            new_capacity: Number of positions of the new tensor.
            new_row_capacity: Number of rows of the new tensor.
        """
        _rows, heads, _positions, width = store.shape
        enlarged = store.new_zeros(new_row_capacity, heads, new_capacity, width)
        num_rows, longest_row = len(self.starts), self.stop - self.start
        if num_rows:
            used = store[:num_rows, :, self.start : self.stop]
            enlarged[:num_rows, :, new_stop - longest_row : new_stop] = used
        return enlarged


BLOCK_TOKENS = 32
"""Number of tokens of a block of :class:`PrefixCache`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixBlock:
    """Keys and values of ``BLOCK_TOKENS`` consecutive tokens of prompts.

    Args:
        key: Block before it (user and version of the model for the first one), and its tokens.
        user: The user whose model has computed it.
        layers: Keys and values ``(1, heads, BLOCK_TOKENS, width)`` of each layer.
    """

    key: tuple[object, tuple[int, ...]]
    user: str
    layers: list[tuple[States, States]]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class PrefixCache:
    """Cache of the keys and values of the first tokens of prompts, for later prompts of the user that begin alike.

    Keys and values depend on the adapters. So no prefix is shared between users, and a prefix is dropped when the
    user's model is replaced. Prefixes consist of whole blocks; the least recently used blocks are evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache.

        Args:
            max_bytes: Largest size in bytes; 0 to cache nothing.
        """
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._versions: Counter[str] = Counter()  # how often a user's model was replaced
        # Least recently used first. A block is used later than those after it, so that it is evicted after them.
        self._blocks: OrderedDict[tuple[object, tuple[int, ...]], PrefixBlock] = OrderedDict()

    def version(self, user: str) -> int:
        """Return the version of a user's model, which :meth:`drop` increments."""
        return self._versions[user]

    def find(self, user: str, prompt: Sequence[int]) -> list[PrefixBlock]:
        """Return the blocks of the longest cached prefix of a prompt, without the prompt's last token.

        Args:
            user: The user whose model reads the prompt.
            prompt: Tokens of the prompt.
        """
        blocks: list[PrefixBlock] = []
        for key in self._keys(user, prompt[:-1], blocks):
            if key not in self._blocks:
                break
            blocks.append(self._blocks[key])
        self._touch(blocks)
        return blocks

    def add(self, user: str, version: int, prompt: Sequence[int], layers: Sequence[tuple[States, States]]) -> None:
        """Keep the keys and values of a prompt's whole blocks, unless the user's model was replaced meanwhile.

        Args:
            user: The user whose model has read the prompt.
            version: Version of the model, from :meth:`version`.
            prompt: Tokens of the prompt.
            layers: Keys and values ``(1, heads, tokens, width)`` of the prompt, of each layer.
        """
        if version != self._versions[user]:
            return
        bytes_per_token = sum(keys.nbytes + values.nbytes for keys, values in layers) // len(prompt)
        blocks: list[PrefixBlock] = []
        for key in self._keys(user, prompt, blocks):
            start = len(blocks) * BLOCK_TOKENS
            tokens = slice(start, start + BLOCK_TOKENS)
            if tokens.stop * bytes_per_token > self.max_bytes:
                break
            block = self._blocks.get(key)
            if block is None:
                copies = [(keys[:, :, tokens].clone(), values[:, :, tokens].clone()) for keys, values in layers]
                block = self._blocks[key] = PrefixBlock(key=key, user=user, layers=copies)
                self.num_bytes += block.num_bytes
            blocks.append(block)
        self._touch(blocks)
        while self.num_bytes > self.max_bytes:
            _key, evicted = self._blocks.popitem(last=False)
            self.num_bytes -= evicted.num_bytes

    def drop(self, user: str) -> None:
        """Drop all prefixes of a user, whose model is replaced."""
        self._versions[user] += 1
        for block in [block for block in self._blocks.values() if block.user == user]:
            del self._blocks[block.key]
            self.num_bytes -= block.num_bytes

    def _keys(
        self, user: str, tokens: Sequence[int], blocks: Sequence[PrefixBlock]
    ) -> Iterator[tuple[object, tuple[int, ...]]]:
        """Yield the keys of the whole blocks of tokens, one after the other.

        Args:
            user: The user.
            tokens: The tokens.
            blocks: The blocks of the keys that were yielded; the caller appends each before the next.
        """
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            before: object = blocks[-1] if blocks else (user, self._versions[user])
            yield before, tuple(tokens[start : start + BLOCK_TOKENS])

    def _touch(self, blocks: Sequence[PrefixBlock]) -> None:
        """Mark a prefix as used, its first block as the last."""
        for block in reversed(blocks):
            self._blocks.move_to_end(block.key)


def prefilled_cache(prefixes: Sequence[Sequence[PrefixBlock]], lengths: Sequence[int]) -> DynamicCache:
    """Return a cache with the keys and values of the first tokens of several texts, padded with zeros on the left.

    Args:
        prefixes: Blocks of each text.
        lengths: How many of the tokens in the blocks of each text are wanted.
    """
    longest = max(lengths)
    cache = DynamicCache()
    if longest == 0:
        return cache
    some_blocks = next(blocks for blocks, length in zip(prefixes, lengths, strict=True) if length)
    for layer, like in enumerate(some_blocks[0].layers):
        padded = []
        for which, template in enumerate(like):  # keys, then values
            states = template.new_zeros(len(prefixes), template.shape[1], longest, template.shape[3])
            for row, (blocks, length) in enumerate(zip(prefixes, lengths, strict=True)):
                if length:
                    joined = torch.cat([block.layers[layer][which] for block in blocks], 2)
                    states[row, :, longest - length :] = joined[0, :, :length]
            padded.append(states)
        cache.update(padded[0], padded[1], layer)
    return cache


TRIM_BYTES = 64 << 20
"""Evicted bytes after which malloc's free memory is returned to the system."""


class AdapterCache(MutableMapping[str, Tree]):
    """Adapters by user: those used last are in memory, up to a number of bytes; others are read when needed.

    Only :meth:`prefetch` reads in another thread; all other methods are for one thread.
    """

    def __init__(self, names: Collection[str], read: Callable[[str], Tree], max_bytes: int | None) -> None:
        """Create a cache without adapters.

        Args:
            names: All users.
            read: Returns a user's adapters, from disk for example.
            max_bytes: Largest size of the adapters in memory; those of one user always stay. None for no limit.
        """
        self.names, self.max_bytes, self._read = names, max_bytes, read
        self.num_bytes = 0
        """Size of the adapters in memory that may be evicted."""
        self.num_reads = 0
        """Number of times that a user's adapters were read."""
        self._untrimmed_bytes = 0  # evicted since free memory was last returned to the system
        self._given: dict[str, Tree] = {}  # never evicted
        self._recent: OrderedDict[str, Tree] = OrderedDict()  # least recently used first
        self._reading: dict[str, Future[Tree]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="comingle-adapters")

    def __getitem__(self, name: str) -> Tree:
        """Return a user's adapters; read them if they are not in memory."""
        if name in self._given:
            return self._given[name]
        if name not in self._recent:
            future = self._reading.pop(name, None)
            self._keep(name, self._read(name) if future is None else future.result())
        self._recent.move_to_end(name)
        return self._recent[name]

    def __setitem__(self, name: str, tensors: Tree) -> None:
        """Use these adapters from now on; they stay in memory."""
        self._forget(name)
        self._given[name] = tensors

    def __delitem__(self, name: str) -> None:
        """Remove a user's adapters from memory; they are read again when needed."""
        self._given.pop(name, None)
        self._forget(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.names, *(name for name in self._given if name not in self.names)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._given or name in self.names

    def is_available(self, name: str) -> bool:
        """Return whether a user's adapters can be used without waiting for the disk; always True without a limit."""
        if self.max_bytes is None or name in self._given or name in self._recent:
            return True
        return name in self._reading and self._reading[name].done()

    def prefetch(self, names: Iterable[str]) -> None:
        """Start to read adapters that are needed next, up to half of the limit; does nothing without a limit.

        Args:
            names: Users in the order in which their adapters are needed.
        """
        if self.max_bytes is None:
            return
        names = list(names)
        for name in [name for name, future in self._reading.items() if future.done() and name not in names]:
            future = self._reading.pop(name)  # such as that of a cancelled request
            if future.exception() is None:
                self._keep(name, future.result())
        most = max(1, self.max_bytes // max(1, 2 * self._bytes_per_user))
        for name in names:
            if len(self._reading) >= most:
                break
            if not self.is_available(name) and name not in self._reading:
                self._reading[name] = self._thread.submit(self._read, name)
        self._evict()

    @property
    def _bytes_per_user(self) -> int:
        """Mean size of the adapters of a user in memory; 0 if there are none."""
        return self.num_bytes // max(1, len(self._recent))

    def _keep(self, name: str, tensors: Tree) -> None:
        """Add adapters that were read, and evict others if there are too many."""
        self.num_reads += 1
        self._recent[name] = tensors
        self.num_bytes += _num_bytes(tensors)
        self._evict()

    def _evict(self) -> None:
        """Drop the least recently used adapters until the others, and those that are being read, fit the limit."""
        if self.max_bytes is None:
            return
        limit = self.max_bytes - len(self._reading) * self._bytes_per_user
        while self.num_bytes > limit and len(self._recent) > 1:
            num_bytes = _num_bytes(self._recent.popitem(last=False)[1])
            self.num_bytes -= num_bytes
            self._untrimmed_bytes += num_bytes
        if self._untrimmed_bytes >= TRIM_BYTES:
            return_freed_memory()
            self._untrimmed_bytes = 0

    def _forget(self, name: str) -> None:
        """Drop what was read of a user, and what is being read."""
        future = self._reading.pop(name, None)
        if future is not None:
            future.cancel()
        if name in self._recent:
            self.num_bytes -= _num_bytes(self._recent.pop(name))


def _num_bytes(tensors: Tree) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


class Rows(ABC):
    """``max_rows`` rows of a batch, each with a copy of one user's adapters."""

    network: PreTrainedModel
    """The causal language model; computes the models of the rows that were bound last."""
    mixes_predictions = False
    """True if the network returns a mixture of several models' predictions."""

    def __init__(self, models: Mapping[str, PersonalModel], max_rows: int, cache_bytes: int | None = None) -> None:
        """Allocate memory for a copy of a user's adapters per row of a batch; a row is a text of one user.

        Args:
            models: Model by user; all have the same base and tensors of the same shapes.
            max_rows: Largest number of rows of a batch.
            cache_bytes: Size of the adapters in memory besides those of rows; None if all models are in memory anyway.
        """
        self.user_indices: dict[str, int] = {}
        """Index among all users of the run, of each user whose adapters were used."""

        def read(name: str) -> Tree:
            personal = models[name]
            self.user_indices.setdefault(name, personal.row)  # `replace` may have set it in the meantime
            return self._adapters_of(personal)

        self.user_tensors = AdapterCache(models.keys(), read, cache_bytes)
        any_tensors = self.user_tensors[next(iter(models))]
        self.stacked: Tree = {key: t.new_zeros(max_rows, *t.shape[1:]) for key, t in any_tensors.items()}
        """The adapters of all rows by name, with shapes ``(max_rows, ...)``; zero until :meth:`set` assigns a user."""
        # Slices of `stacked`: making them anew takes as long as copying small adapters.
        self._tensors_by_row = [[tensor[row] for tensor in self.stacked.values()] for row in range(max_rows)]
        self.names = [""] * max_rows
        """The user of each row."""
        self.copied: list[tuple[str, int] | None] = [None] * max_rows
        """User and version of the adapters that were copied into each row; None for a row that was never used."""
        self._versions: Counter[str] = Counter()  # number of times that a user's model was replaced

    def set(self, row: int, name: str) -> None:
        """Assign a row of the batch to a user: copy the user's adapters into the row, unless it has them already.

        Args:
            row: Index of the row; ``stacked`` has the adapters of all rows, in tensors ``(max_rows, ...)``.
            name: The user whose text the row will generate.
        """
        wanted = (name, self._versions[name])
        if self.copied[row] == wanted:
            return
        tensors = self.user_tensors[name]
        for key, tensor in zip(self.stacked, self._tensors_by_row[row], strict=True):
            tensor.copy_(tensors[key].squeeze(0))  # without the axis of users
        self.names[row], self.copied[row] = name, wanted

    def forget(self, name: str) -> None:
        """Drop a user's adapters from memory; rows that have a copy keep it."""
        del self.user_tensors[name]
        self._versions[name] += 1

    def move(self, source: int, target: int) -> None:
        """Copy the adapters of a row of the batch to another row, when its text moves there.

        Args:
            source: Index of the row whose text moves.
            target: Index of the row that the text gets.
        """
        if self.copied[target] == self.copied[source]:  # both are of the same user's adapters
            return
        for tensor, moved in zip(self._tensors_by_row[target], self._tensors_by_row[source], strict=True):
            tensor.copy_(moved)
        self.names[target], self.copied[target] = self.names[source], self.copied[source]

    def replace(self, personal: PersonalModel) -> None:
        """Replace or add a user's model, for rows that are assigned to the user from now on.

        Rows of the batch that have a copy of the user's old adapters keep it, so that texts that are being generated
        continue with the old model.

        Args:
            personal: The new model; its tensors have the same shapes as the other users'.
        """
        self.user_tensors[personal.name] = self._adapters_of(personal)
        self.user_indices[personal.name] = personal.row
        self._versions[personal.name] += 1

    def bind(self, rows: slice) -> None:
        """Make the network use the adapters of these rows in the following forward passes.

        Args:
            rows: Rows of ``stacked``, which has a copy of the adapters for each text of a batch; one for each text of
                the following batches, in order.
        """
        tensors_of_rows = {key: tensor[rows] for key, tensor in self.stacked.items()}
        self._bind(tensors_of_rows, self.names[rows])

    @abstractmethod
    def _adapters_of(self, personal: PersonalModel) -> Tree:
        """Return a user's adapters with shapes ``(1, ...)``."""

    @abstractmethod
    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        """Make the network use stacked adapters ``(rows, ...)`` of the named users."""


class AdaptedRows(Rows):
    """Rows of models with experts and routers."""

    def __init__(self, models: Mapping[str, PersonalModel], max_rows: int, cache_bytes: int | None = None) -> None:
        """Allocate the adapters of all rows of a batch, in which each row is a text of one user.

        Args:
            models: Model by user; all have the same network.
            max_rows: Largest number of rows of a batch.
            cache_bytes: As in :class:`Rows`.
        """
        super().__init__(models, max_rows, cache_bytes)
        self.model = cast(AdaptedModel, next(iter(models.values())).model)  # all users share one, with own tensors
        self.network = self.model.network

    def _adapters_of(self, personal: PersonalModel) -> Tree:
        return personal.tensors

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        self.model.adapters.bind(tensors, [self.user_indices[name] for name in names])


class LoraRows(Rows):
    """Rows of models with one LoRA per linear layer, of scale 1 and with names relative to the base without head."""

    def __init__(self, models: Mapping[str, PersonalModel], max_rows: int, cache_bytes: int | None = None) -> None:
        """Add to each adapted linear layer a LoRA that may differ between the rows of a batch.

        The network is a copy of the base that shares its weights. A row is a text of one user.

        Args:
            models: Model by user; all have the same base.
            max_rows: Largest number of rows of a batch.
            cache_bytes: As in :class:`Rows`.
        """
        super().__init__(models, max_rows, cache_bytes)
        any_model = next(iter(models.values())).model
        self.network = share_weights(any_model.base.model)
        without_head = self.network.base_model  # names of LoRAs are relative to it
        self.linears: dict[str, LoraLinear] = {}
        for name, _a, _b in lora_pairs(self.stacked):  # `_bind` sets the factors A and B
            self.linears[name] = LoraLinear(without_head.get_submodule(name), scale=1.0)
            without_head.set_submodule(name, self.linears[name])

    def _adapters_of(self, personal: PersonalModel) -> Tree:
        return personal.tensors

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        for name, linear in self.linears.items():
            linear.factors = (tensors[f"{name}.a"], tensors[f"{name}.b"])


class MixedRows(LoraRows):
    """Rows of models that mix the LoRAs of several clusters, with shares that each user learns."""

    def _adapters_of(self, personal: PersonalModel) -> Tree:
        """Return the user's mixture as one LoRA per layer.

        The mixture ``alpha sum_c share_c B_c A_c`` of C clusters' LoRAs of rank r equals one LoRA of rank C r: its
        factor A concatenates the ``A_c``, and its factor B the ``alpha share_c B_c``.
        """
        model = cast(MixedLanguageModel, personal.model)
        layers = cast(FloralModel, model.net).layers()
        shares = model.shares(personal.tensors).squeeze(0)  # of the only user
        tree = Tree()
        # a: (1, clusters, rank, d_in); b: (1, clusters, d_out, rank)
        for layer_name, a, b in lora_pairs(personal.tensors):
            name = layer_name.removeprefix("model.")
            layer = layers[layer_name]
            layer_shares = layer.mixture_of_layer(shares)  # (clusters,): shares may differ between layers
            scales = layer.alpha * layer_shares
            scaled_b = b.squeeze(0) * scales.to(b).view(-1, 1, 1)  # (clusters, d_out, rank)
            tree[f"{name}.a"] = a.flatten(1, 2)  # (1, clusters rank, d_in)
            # Transpose each factor to (rank, d_out), then stack the clusters: (1, clusters rank, d_out).
            tree[f"{name}.b"] = scaled_b.mT.flatten(0, 1).unsqueeze(0)
        return tree


class EnsembleRows(Rows):
    """Rows of users' ensembles: several models whose predicted probabilities are mixed."""

    mixes_predictions = True

    def __init__(self, models: Mapping[str, PersonalModel], max_rows: int, cache_bytes: int | None = None) -> None:
        """Make the network mix the predictions of several models, those in the ensemble of each row's user.

        Args:
            models: Ensemble by user; all have the same network.
            max_rows: Largest number of rows of a batch.
            cache_bytes: As in :class:`Rows`.
        """
        super().__init__(models, max_rows, cache_bytes)
        self.model = cast(EnsembleModel, next(iter(models.values())).model)
        self.network = self.model.inner.network
        # Of rows in use: weights of the models, and exponents to which their probabilities are raised (None for 1).
        # The network's forward pass reads them; `bind` replaces them.
        self.mixing = (torch.empty(0, 0), None)
        mix_forward(self.network, lambda: self.mixing)

    def _adapters_of(self, personal: PersonalModel) -> Tree:
        return personal.tensors

    def _bind(self, tensors: Tree, names: Sequence[str]) -> None:
        self.model.bind(tensors, [self.user_indices[name] for name in names])
        self.mixing = self.model.mixing(tensors)


@dataclass(frozen=True, kw_only=True)
class LoraModel:
    """A base with one LoRA per user, in files of PEFT; see :class:`LoraRows` for its tensors."""

    base: Base
    routed: bool = False

    @property
    def device(self) -> torch.device:
        """Device of the base."""
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base."""
        return self.base.dtype


ROWS_BY_MODEL: dict[type, type[Rows]] = {
    LoraModel: LoraRows,
    AdaptedModel: AdaptedRows,
    EnsembleModel: EnsembleRows,
    MixedLanguageModel: MixedRows,
}


def rows_of(models: Mapping[str, PersonalModel], max_rows: int, cache_bytes: int | None = None) -> Rows:
    """Return the copies of users' adapters, one per row of a batch, for the kind of model that the users have.

    The network's output layer is replaced by one that is faster for batches of few rows, and its attention by native
    code if that is in use.

    Args:
        models: Model by user, all of one run.
        max_rows: Largest number of rows of a batch.
        cache_bytes: As in :class:`Rows`.
    """
    any_model = next(iter(models.values())).model  # all models of a run are of one class
    rows_class = ROWS_BY_MODEL[type(any_model)]
    rows = rows_class(models, max_rows, cache_bytes)
    base = any_model.base
    may_use_kernels = expert_mlp.is_enabled() and expert_mlp.fits(base.device, base.dtype) and base.attention == "auto"
    if may_use_kernels and cpu.enable(cache_folder() / "native"):
        cpu.use_attention(rows.network)  # for prompts that are read whole
    head = rows.network.get_output_embeddings()
    if type(head) is nn.Linear:
        rows.network.set_output_embeddings(_fast_head(head, is_packed=any_model.base.quantised == PACKED))
    return rows


def _fast_head(head: nn.Linear, *, is_packed: bool) -> nn.Linear:
    """Return an output layer that is faster than ``head`` for few rows, and packed if the base's weights are."""
    if is_packed:
        return quantise_linear(head.weight, cast(Any, head.bias), PACKED, head.weight.device)
    return RowsLinear(head)


def reorder_weights(network: PreTrainedModel) -> None:
    """Store a base's float32 weights on a CPU in column-major order, in place, for faster batches of few rows.

    Measured with 8 rows on SmolLM2-135M, one thread: 128 ms per step instead of 168 ms. Other code must not use the
    base afterwards, since transformers cannot save weights in this order.
    """
    if expert_mlp.is_enabled():  # its compiled code reads weights in row-major order
        return
    for module in network.modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = module.weight
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            weight.data = weight.data.t().contiguous().t()  # same shape; the copy in memory is transposed


def without_adapters(personal: PersonalModel) -> PersonalModel:
    """Return a copy of a user's model that computes the same as the base, with the name "pretrained".

    The factors B of all LoRAs and all residuals are set to zero, so that adapters add nothing. An ensemble's router
    holds logarithms of the mixture weights, and perhaps of exponents of the models' probabilities. With zeros all
    weights are equal and all exponents 1, so the mixture predicts as the base does.
    """
    suffixes_to_zero = (".b", f".{OUT}", CLIENT_ROUTER)  # factors B, residuals, routers of ensembles
    tensors: dict[str, Tensor] = {}
    for name, tensor in personal.tensors.items():
        tensors[name] = torch.zeros_like(tensor) if name.endswith(suffixes_to_zero) else tensor
    return replace(personal, name="pretrained", tensors=tensors)
