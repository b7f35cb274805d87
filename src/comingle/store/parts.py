"""What is taken out of a store, as it would be in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from comingle.engines.state import State

_LINE = 64
"""Bytes that processors read at once, to which new tensors are aligned."""


def blank(state: State, nobody: State) -> None:
    """Give a state that is elsewhere the fields of one of nobody, which say of what shape and dtype it is."""
    vars(state).update({one.name: getattr(nobody, one.name) for one in fields(State)})


def aligned(part: State, users: Sequence[int]) -> State:
    """The same where each tensor begins as it would in memory, among everybody's.

    There the rows of consecutive users are a view of all, and the last bit of a product may depend on whether its
    factors begin at a multiple of 64 bytes.
    """
    first = users[0]
    if list(users) != list(range(first, first + len(users))):
        return part
    return part.filled({name: _begun(t, first) for name, t in part.tensors().items()}, {})


def _begun(t: Tensor, row: int) -> Tensor:
    shift = row * t[0].numel() * t.element_size() % _LINE // t.element_size()
    if not shift or t.device.type != "cpu":
        return t
    return t.new_empty(shift + t.numel())[shift:].view(t.shape).copy_(t)
