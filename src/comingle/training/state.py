"""Trainable state of all users: parameters, moments and step counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.data.populations import UserNumbers
from comingle.models.routers import NEVER
from comingle.utils.errors import RecipeError, RunError, list_names
from comingle.utils.seeds import generator
from comingle.utils.trees import Layout, Tree

GRADIENTS = "gradients"
"""In :attr:`State.kept`: each column's gradients since it was last stepped, where phases leave them to each other."""

MOMENTS = frozenset({"first", "second"})
"""What an optimiser may remember of each column."""


@dataclass(kw_only=True)
class State:
    """Row i belongs to user i; with several copies of everybody's tensors the copies' users follow one another.

    ``iterations`` counts a user's local iterations, ``router_steps`` its router steps; ``ranks`` are the LoRA ranks
    that it has now, ``versions`` the rounds after which the server had what it last downloaded, ``kept`` what parts of
    the method keep of each user. Where a run selects its best round, ``best`` is what everybody had after it,
    with the number of the round. Updates happen in place on what :meth:`take` yields; :meth:`put` ends
    them.

    This is the interface of all storage, and keeps users' tensors in memory. A package registers another one as an
    entry point of the group ``comingle.stores``, under the value that ``runtime.store`` has in a recipe. The entry
    point is called with a :class:`comingle.training.client.Clients` and returns a subclass. It may have ``read``, with
    a kind and the arguments of the kind's ``read``, which reads a recipe's users, and ``names``, with a run folder.
    """

    in_memory: ClassVar[bool] = True
    """Whether the tensors have all users' rows; else they have none, and are reached by :meth:`take` alone."""
    rows: Float[Tensor, "users columns"]
    first: Float[Tensor, "users _"]
    second: Float[Tensor, "users _"]
    iterations: Int[Tensor, " users"]
    router_steps: Int[Tensor, " users"]
    ranks: Int[Tensor, " users"]
    versions: Int[Tensor, " users"]
    kept: Tree = field(default_factory=dict)
    best: Tree = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has the rows on its leading dimension, by name."""
        return {name: getattr(self, name) for name in _USERS} | {_KEPT + name: t for name, t in self.kept.items()}

    def filled(self, tensors: dict[str, Tensor], best: Tree) -> State:
        """A state with other tensors, by the names of :meth:`tensors`."""
        return replace(self._with(tensors), best=best)

    def _with(self, tensors: dict[str, Tensor]) -> State:
        by_part = {name.removeprefix(_KEPT): t for name, t in tensors.items() if name.startswith(_KEPT)}
        return replace(self, **{name: tensors[name] for name in _USERS}, kept=by_part)

    def copy(self) -> State:
        """The same, to be changed without changing this."""
        return self._with({name: t.clone() for name, t in self.tensors().items()})

    def without_moments(self) -> State:
        """The same tensors, to be changed in place, but for what optimisers remember: for all that takes no steps."""
        return replace(self, first=self.first[:, :0], second=self.second[:, :0])

    def rows_of(self, users: Sequence[int]) -> Float[Tensor, "some columns"]:
        """A copy of these users' tensors alone, for a look; somebody may be there twice."""
        return self.rows[list(users)]

    def prefetch(self, users: Sequence[int]) -> None:
        """These will be taken next."""

    def release(self) -> None:
        """What :meth:`copy` has made is needed no more."""

    def remember(self, done: int) -> None:
        """Keep a copy of everybody's tensors as the best of all rounds, after ``done`` rounds."""
        copies = {name: t.clone() for name, t in self.tensors().items()}
        self.best = {**copies, "round": torch.tensor(done)}

    def restored_best(self) -> State:
        """As it was in the best round."""
        return self._with({name: self.best[name].clone() for name in self.tensors()})

    def take(self, users: Sequence[int]) -> State:
        """These users' rows: a view where they are consecutive, a copy otherwise."""
        return self._with({name: t[_index(users)] for name, t in self.tensors().items()})

    def put(self, users: Sequence[int], part: State) -> None:
        """Write back what :meth:`take` took; nothing is left to do where that was a view."""
        index = _index(users)
        if isinstance(index, slice):
            return
        for name, t in self.tensors().items():
            t[index] = part.tensors()[name]

    # ---------------------------------------------------------------- the run folder

    def shard(self, number: int, processes: int, users: range, population: int) -> None:
        """Hold the rows of consecutive users in one of several processes.

        Args:
            number: the process, from 0.
            processes: how many there are.
            users: numbers of its users among all.
            population: number of users of all processes.
        """

    def open(self, run: Path, *, anew: bool) -> None:
        """Keep the tensors in a locked run folder from now on, where they are not in memory.

        Of several processes the first one does so before the others.

        Args:
            run: the folder.
            anew: whether what lies there is deleted.
        """

    def save(self, draft: Path, checkpoints: Sequence[Path], write: Callable[[], list[str]]) -> list[str]:
        """Write the tensors for a checkpoint; return the names of its files.

        Args:
            draft: folder of the new checkpoint.
            checkpoints: the older ones, which stay readable.
            write: writes tensors that are in memory, and returns the names of the files.
        """
        return write()

    def load(self, checkpoint: Path, read: Callable[[], State]) -> State:
        """Return the state at a checkpoint.

        Args:
            checkpoint: its folder.
            read: reads tensors that are in memory.
        """
        return read()


_USERS = ("rows", "first", "second", "iterations", "router_steps", "ranks", "versions")
_KEPT = "kept/"


def _index(users: Sequence[int]) -> slice | list[int]:
    first, last = users[0], users[-1] + 1
    return slice(first, last) if list(users) == list(range(first, last)) else list(users)


def initial_state(
    layout: Layout,
    mask: Bool[Tensor, "users columns"],
    *,
    names: Sequence[str],
    local: Bool[Tensor, " columns"],
    ranks: Int[Tensor, " users"],
    seed: int,
    moments: frozenset[str] = MOMENTS,
    accumulates: bool = False,
    dtype: torch.dtype = torch.float32,
    first: Float[Tensor, " columns"] | None = None,
) -> State:
    """Every user's tensors before the first round.

    What is ``local`` is drawn from (seed, user, tensor); all else, shared or frozen, starts equal for all users.
    Padding is zero. Of the ``moments`` that no optimiser uses nothing is kept. With ``accumulates`` there is room for
    gradients that phases leave to each other. ``first`` is what all start with, where it has been drawn already.
    """
    rows = (draw(layout, seed, "server") if first is None else first).repeat(len(names), 1)
    for row, name in zip(rows, names, strict=True):
        row.copy_(torch.where(local, draw(layout, seed, name, only=local), row))
    rows = rows.to(mask.device, dtype) * mask
    zeros = torch.zeros(len(names), dtype=torch.int64, device=mask.device)
    return State(
        rows=rows,
        first=torch.zeros_like(rows if "first" in moments else rows[:, :0]),
        second=torch.zeros_like(rows if "second" in moments else rows[:, :0]),
        iterations=zeros,
        router_steps=zeros.clone(),
        ranks=ranks.to(mask.device),
        versions=zeros.clone(),
        kept={GRADIENTS: torch.zeros_like(rows)} if accumulates else {},
    )


def draw(
    layout: Layout, seed: int, owner: str, only: Bool[Tensor, " columns"] | None = None
) -> Float[Tensor, " columns"]:
    """One random stream per (seed, owner, tensor), so a user's start depends on no other user or tensor.

    ``only`` says which columns are wanted; tensors without any are not drawn.
    """
    drawn = torch.zeros(layout.columns)
    for slot in layout.slots:
        span = slice(layout.starts[slot.name], layout.starts[slot.name] + slot.size)
        if only is None or bool(only[span].any()):
            drawn[span] = slot.init(slot.shape, generator(seed, owner, "init", slot.name)).flatten()
    return drawn


NEEDS_CLUSTERS = (
    "needs users whose true clusters are known, as in made tasks; name them as data.clusters: {ada: a, ben: a, cem: b},"
    " with every user"
)


def true_clusters(method: str, known: Sequence[int | None], clusters: int) -> Float[Tensor, "rows clusters"]:
    """Logits whose softmax is exactly one-hot at each row's true cluster.

    Raises:
        RecipeError: somebody's is not known, and ``method`` needs it.
    """
    if any(cluster is None for cluster in known):
        raise RecipeError(f"method {method}: {NEEDS_CLUSTERS}")
    at = torch.tensor(known) % clusters
    return torch.full((len(at), clusters), NEVER).scatter(1, at.unsqueeze(1), 0.0)


def reorder(state: State, was: Sequence[str], now: Sequence[str]) -> State:
    """A state whose users stand in the order ``was``, in the order ``now``; the names are the same."""
    if list(was) == list(now):
        return state
    at = UserNumbers(was)(now)
    copies = len(state.rows) // len(was)
    rows = [copy * len(was) + i for copy in range(copies) for i in at]
    by_user = state.tensors()
    return state.filled(_taken(by_user, by_user, rows), _taken(state.best, by_user, rows))


def reorder_kept(kept: Tree, was: Sequence[str], now: Sequence[str], by_user: Collection[str]) -> Tree:
    """What a server keeps, in another order of users; ``by_user`` names what has them on its leading dimension."""
    return kept if was is now else _taken(kept, by_user, UserNumbers(was)(now))


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
