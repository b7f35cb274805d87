"""Rows belong to names: a run goes on with the same users in whatever order its recipe has them now."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torch import Tensor

from comingle.data.populations import Numbers
from comingle.engines.state import State
from comingle.utils.errors import RunError, list_names
from comingle.utils.trees import Tree


def reorder(state: State, was: Sequence[str], now: Sequence[str]) -> State:
    """A state whose users stand in the order ``was``, in the order ``now``; the names are the same."""
    if list(was) == list(now):
        return state
    at = Numbers(was)(now)
    copies = len(state.rows) // len(was)
    rows = [copy * len(was) + i for copy in range(copies) for i in at]
    by_user = state.tensors()
    return state.filled(_taken(by_user, by_user, rows), _taken(state.best, by_user, rows))


def reorder_kept(kept: Tree, was: Sequence[str], now: Sequence[str], by_user: Collection[str]) -> Tree:
    """What a server keeps, in another order of users; ``by_user`` names what has them on its leading dimension."""
    return kept if was is now else _taken(kept, by_user, Numbers(was)(now))


def _taken(tensors: Tree, names: Collection[str], at: Sequence[int]) -> dict[str, Tensor]:
    return {name: t[list(at)] if name in names and len(t) > 1 else t for name, t in tensors.items()}


def check_names(where: Path, was: Sequence[str], now: Sequence[str]) -> None:
    """Whether a checkpoint is of these users, in any order.

    Raises:
        RunError: somebody is new or gone; says who.
    """
    if list(was) == list(now):
        return
    for name in now:
        if name not in was:
            raise RunError(f"{where}: no user {name!r} in it; it has: {list_names(was)}")
    for name in was:
        if name not in now:
            raise RunError(f"{where}: has a user {name!r} whom the recipe has not; it has: {list_names(now)}")
