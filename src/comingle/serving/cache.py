"""Keys and values of rows that join and leave while others go on.

All rows end at the same place, the newest token, and begin where their texts do: what lies before a row's beginning is
masked, as with prompts that are filled on the left. So one step writes one place for all rows, and every kind of
attention that transformers has (causal, in a sliding window, with ALiBi) sees what it sees in ``generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 256
"""Places are added so many at a time."""

States = Float[Tensor, "rows heads places width"]
Stores = Float[Tensor, "most heads room width"]
Window = Float[Tensor, "rows heads window width"]


class _Layer(DynamicLayer):
    """One layer's keys and values: a window of two larger tensors, which a step is written into."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache = cache
        self.stores: list[Stores] = []

    def update(self, key_states: States, value_states: States, *args: Any, **kwargs: Any) -> tuple[Window, Window]:
        """Write a step behind the window, and return the window with it."""
        at, count = self.cache.stop, key_states.shape[-2]
        window = slice(self.cache.start, at + count)
        rows = slice(len(self.cache.begins))
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store[rows, :, at : at + count] = states
        keys, values = (store[rows, :, window] for store in self.stores)
        return keys, values

    def get_seq_length(self) -> int:
        """How many places come before the step that is under way."""
        return self.cache.stop - self.cache.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The window with the step, and where it begins."""
        return self.get_seq_length() + query_length, 0


class RowCache(Cache):
    """Up to ``most`` rows; ``begins`` says where each one's text begins, ``start`` and ``stop`` bound the window."""

    def __init__(self, most: int) -> None:
        super().__init__(layers=[])
        self.most, self.begins = most, list[int]()
        self.start = self.stop = self.room = 0

    def lengths(self) -> Int[Tensor, " rows"]:
        """How many tokens of each row are in it."""
        return self.stop - torch.tensor(self.begins)

    def mask(self) -> Bool[Tensor, "rows places"]:
        """Which places of the window and of the step that follows it belong to each row."""
        return torch.arange(self.start, self.stop + 1) >= torch.tensor(self.begins).unsqueeze(1)

    def join(self, prompts: Cache, lengths: Sequence[int]) -> None:
        """Add rows whose prompts, filled on the left, have been read into a cache of their own."""
        read: list[Any] = prompts.layers
        if not self.begins:
            self.start = self.stop = 0
        self._provide(read, max(lengths))
        for own, other in zip(self.layers, read, strict=True):
            for store, states in zip(own.stores, (other.keys, other.values), strict=True):
                for row, length in enumerate(lengths):
                    place = store[len(self.begins) + row]
                    # Zeros, not what a row left here: a masked place counts zero times its values, which a NaN is not.
                    place[:, : self.stop - length] = 0
                    place[:, self.stop - length : self.stop] = states[row, :, -length:]
        self.begins += [self.stop - length for length in lengths]
        self.start = min(self.begins)

    def advance(self) -> None:
        """The step that was written is part of the window."""
        self.stop += 1
        self._provide(self.layers, 0)

    def leave(self, row: int) -> None:
        """Take a row out; the last one takes its place."""
        last = len(self.begins) - 1
        if row != last:
            for layer in self.layers:
                for store in layer.stores:
                    store[row, :, : self.stop] = store[last, :, : self.stop]
        self.begins[row] = self.begins[last]
        self.begins.pop()
        self.start = min(self.begins, default=self.stop)

    def _provide(self, like: Sequence[Any], longest: int) -> None:
        """Room for rows of up to ``longest`` tokens before the window's end, and for a step behind it."""
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
