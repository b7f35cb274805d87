"""Numbers on a grid: what of a float leaves a user, and by how much the sum of such numbers may be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.utils.trees import Tree

DTYPES = {32: torch.int32, 64: torch.int64}
"""How a tensor holds numbers modulo ``2^word``; they are read without a sign."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Multiples of ``step`` up to ``bound`` in magnitude, as whole numbers of ``bits`` bits, the sign included.

    A number within the bound is sent as the nearest multiple, so it is wrong by at most half a step, and a sum of n by
    at most n / 2 steps. Rounding is to the nearest and not at random: the same upload is the same bytes again.
    """

    bound: float
    bits: int

    @property
    def levels(self) -> int:
        """The largest whole number."""
        return 2 ** (self.bits - 1) - 1

    @property
    def step(self) -> float:
        """The distance of two neighbours."""
        return self.bound / self.levels

    def slack(self, entries: int) -> float:
        """By how much rounding may lengthen ``entries`` numbers together (L2)."""
        return self.step * math.sqrt(entries) / 2

    def place(self, values: Float[Tensor, ...]) -> Int[Tensor, ...]:
        """The nearest multiples, as whole numbers; what is beyond the bound is put on it."""
        return self.cut((values.double() / self.step).round()).long()

    def cut(self, levels: Tensor) -> Tensor:
        """Whole numbers within the bound."""
        return levels.clamp(-self.levels, self.levels)

    def beyond(self, values: Float[Tensor, "users ..."]) -> list[int]:
        """How many of each user's numbers are out of range, or are none."""
        return (~(values.abs() <= self.bound)).flatten(1).sum(1).tolist()


def flat(tree: Tree) -> Float[Tensor, "users entries"]:
    """Each user's tensors one behind the other, in the order of their names."""
    return torch.cat([tree[name].double().flatten(1) for name in sorted(tree)], 1)


def shaped(row: Float[Tensor, " entries"], like: Tree) -> Tree:
    """The tensors again, with the shapes of ``like``, which has no dimension of users."""
    parts = torch.split(row, [like[name].numel() for name in sorted(like)])
    return {name: part.view(like[name].shape) for name, part in zip(sorted(like), parts, strict=True)}


def as_words(row: Tensor) -> np.ndarray:
    """Whole numbers modulo ``2^word``, without a sign."""
    numbers = row.contiguous().numpy()
    return numbers.view(f"<u{numbers.itemsize}")


def as_tensor(words: np.ndarray) -> Tensor:
    """The same with a sign, as tensors have them."""
    return torch.from_numpy(np.ascontiguousarray(words).view(f"<i{words.itemsize}").copy())
