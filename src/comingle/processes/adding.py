"""Sums over users that do not depend on which process has whom, to the last bit.

Floating-point sums depend on their order, sums of whole numbers do not. So each term is rounded to a grid that is the
same for all (as in pre-rounded reproducible summation: Demmel and Nguyen 2015, "Parallel Reproducible Summation",
section 3), and added as a whole number of 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from comingle.utils.errors import DivergenceError
from comingle.utils.trees import Tree

_BITS = 61
"""A sum needs one bit for its sign, and one more where its terms are rounded up."""

_POWER = 1000
"""By no more powers of two at once is multiplied: float64 has none from 2^1024 on."""

_AT_ONCE = 2**22
"""So many numbers are made float64 at once."""


def terms(t: Float[Tensor, "users ..."], weights: Float[Tensor, "users ..."]) -> Float[Tensor, "users ..."]:
    """``weight_u t_u`` in float64, in which products of float32 are exact; weights may have ``t``'s components."""
    factors = weights.to(t).double()
    return t.double() * factors.view(*factors.shape, *[1] * (t.dim() - factors.dim()))


def largest_terms(tensors: Tree, weights: Tree) -> Float[Tensor, " tensors"]:
    """The largest magnitude of each tensor's terms; 0 where nobody is here."""
    return torch.stack([_largest(t, weights[name]) for name, t in tensors.items()])


def _largest(t: Tensor, weights: Tensor) -> Float[Tensor, ""]:
    found = [terms(some, of).abs().max() for some, of in _portions(t, weights) if some.numel()]
    return torch.stack(found).max().cpu() if found else torch.zeros((), dtype=torch.float64)


def shifts_of(largest: Float[Tensor, " tensors"], users: int) -> list[int]:
    """By which power of two each tensor's terms are multiplied so that the sum of all users' fits into 64 bits.

    A term is rounded to half a unit: a sum is off by at most ``users 2^(log2(users) - 61)`` of its largest term.

    Raises:
        DivergenceError: a term is not finite.
    """
    if not bool(largest.isfinite().all()):
        raise DivergenceError("the sum of the users' uploads is not finite; try a smaller learning rate")
    room = _BITS - math.ceil(math.log2(max(users, 2)))
    return [room - math.frexp(value)[1] if value else 0 for value in largest.tolist()]


def whole_sums(tensors: Tree, weights: Tree, shifts: Sequence[int]) -> Int64[Tensor, " entries"]:
    """``sum_u round(weight_u t_u 2^shift)`` of those who are here, all tensors one after another."""
    return torch.cat(
        [_whole(t, weights[name], shift).flatten() for (name, t), shift in zip(tensors.items(), shifts, strict=True)]
    )


def _whole(t: Tensor, weights: Tensor, shift: int) -> Int64[Tensor, ...]:
    total = torch.zeros(t.shape[1:], dtype=torch.int64, device=t.device)
    for some, of in _portions(t, weights):
        total += _scaled(terms(some, of), shift).round().long().sum(0)
    return total


def _scaled(t: Float[Tensor, "*shape"], shift: int) -> Float[Tensor, "*shape"]:
    """``t 2^shift``, to the last bit where float64 has it."""
    first = min(max(shift, -_POWER), _POWER)
    t = t * 2.0**first
    return t if first == shift else t * 2.0 ** (shift - first)


def sums_of(whole: Int64[Tensor, " entries"], like: Tree, shifts: Sequence[int]) -> Tree:
    """The same as tensors of ``like``'s shapes ``(users, *shape)`` and dtypes, without the users."""
    parts = whole.split([t[:0].new_empty(t.shape[1:]).numel() for t in like.values()])
    named = zip(like.items(), parts, shifts, strict=True)
    return {name: _scaled(part.double(), -shift).to(t.dtype).view(t.shape[1:]) for (name, t), part, shift in named}


def reduced(
    tensors: Tree,
    weights: Tree,
    users: int,
    *,
    largest: Callable[[Tensor], Tensor],
    total: Callable[[Tensor], Tensor],
) -> Tree:
    """``sum_u weight_u t_u`` over so many users; ``largest`` and ``total`` put together what each process has found."""
    shifts = shifts_of(largest(largest_terms(tensors, weights)), users)
    return sums_of(total(whole_sums(tensors, weights, shifts)), tensors, shifts)


def _portions(t: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = max(1, _AT_ONCE // max(1, t[:1].numel()))
    return list(zip(t.split(size), weights.split(size), strict=True))
