"""Trainable state of all users: parameters, optimizer moments and step counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.data.populations import UserNumbers
from comingle.models.routers import ZERO_SHARE_LOGIT
from comingle.utils.errors import RecipeError, RunError, list_names
from comingle.utils.seeds import generator
from comingle.utils.trees import Layout, Tree

GRADIENTS = "gradients"
"""Key in :attr:`State.kept` of the gradients of each column since its last step, which phases leave to others."""

MOMENTS = frozenset({"first", "second"})
"""Names of the optimizer moments."""


@dataclass(kw_only=True)
class State:
    """Tensors of all users, with users on the leading dimension.

    With several copies per user, row ``copy * users + i`` is a copy of user i. Tensors are updated in place on the
    result of :meth:`take`; :meth:`put` ends the update.

    This class keeps tensors in memory; a :class:`comingle.training.client.Store` may return a subclass that keeps them
    elsewhere.

    Attributes:
        rows: Parameters.
        first: First moments; no columns if no optimizer uses them.
        second: Second moments; no columns if no optimizer uses them.
        iterations: Number of local steps of each user.
        router_steps: Number of router steps of each user.
        ranks: Current LoRA rank of each user.
        versions: Server version that each user last downloaded, as the number of rounds done.
        kept: Tensors that the client hooks of the method keep for each user.
        best: All tensors as they were after the best round, and its number, if the run selects the best round.
    """

    in_memory: ClassVar[bool] = True
    """Whether the tensors hold the rows of all users; otherwise they are empty, and :meth:`take` reads rows."""
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
        """Return all tensors with users on the leading dimension, by name."""
        return {name: getattr(self, name) for name in _USER_TENSORS} | {
            _KEPT_PREFIX + name: t for name, t in self.kept.items()
        }

    def filled(self, tensors: dict[str, Tensor], best: Tree) -> State:
        """Return a state with new tensors in place of those that :meth:`tensors` returns.

        Args:
            tensors: The new tensors, with the same names.
            best: Tensors of the best round, as in :attr:`best`; empty without one.
        """
        return replace(self._with_tensors(tensors), best=best)

    def _with_tensors(self, tensors: dict[str, Tensor]) -> State:
        """Return a state with other tensors, under the names of :meth:`tensors`; ``best`` is unchanged."""
        kept = {name.removeprefix(_KEPT_PREFIX): t for name, t in tensors.items() if name.startswith(_KEPT_PREFIX)}
        return replace(self, **{name: tensors[name] for name in _USER_TENSORS}, kept=kept)

    def copy(self, *, compact: bool = False) -> State:
        """Return a deep copy.

        Args:
            compact: Whether a tensor of zeros takes no memory: a single zero stands for all entries. Such a tensor must
                not be updated in place; :meth:`copy` without ``compact`` makes it a full one again.
        """

        def copy_of(t: Tensor) -> Tensor:
            return t.new_zeros(()).expand(t.shape) if compact and not t.any() else t.clone()

        return self._with_tensors({name: copy_of(t) for name, t in self.tensors().items()})

    def without_moments(self) -> State:
        """Return a state that shares all tensors except the moments, which are empty; for work without steps."""
        return replace(self, first=self.first[:, :0], second=self.second[:, :0])

    def rows_of(self, users: Sequence[int]) -> Float[Tensor, "some columns"]:
        """Return a copy of the parameters of some users; a user may occur twice."""
        return self.rows[list(users)]

    def prefetch(self, users: Sequence[int]) -> None:
        """Start to read the rows that will be taken next."""

    def release(self) -> None:
        """Free the resources of a state made by :meth:`copy`."""

    def remember(self, done: int) -> None:
        """Store a copy of all tensors as those of the best round, after ``done`` rounds."""
        copies = {name: t.clone() for name, t in self.tensors().items()}
        self.best = {**copies, "round": torch.tensor(done)}

    def restored_best(self) -> State:
        """Return the state as it was after the best round."""
        return self._with_tensors({name: self.best[name].clone() for name in self.tensors()})

    def take(self, users: Sequence[int]) -> State:
        """Return the rows of some users: a view if they are consecutive, otherwise a copy."""
        return self._with_tensors({name: t[_slice_or_list(users)] for name, t in self.tensors().items()})

    def put(self, users: Sequence[int], part: State) -> None:
        """Write back the result of :meth:`take`; does nothing if it was a view."""
        index = _slice_or_list(users)
        if isinstance(index, slice):
            return
        for name, t in self.tensors().items():
            t[index] = part.tensors()[name]

    # ---------------------------------------------------------------- the run folder

    def shard(self, number: int, processes: int, users: range, population: int) -> None:
        """Tell a store on disk which rows of the whole run this process has; does nothing for tensors in memory.

        Args:
            number: The process, counted from 0.
            processes: Number of processes.
            users: Numbers of the users of this process among all.
            population: Number of users of all processes.
        """

    def open(self, run: Path, *, anew: bool) -> None:
        """Have a store on disk keep its files in a run folder from now on; does nothing for tensors in memory.

        The caller has locked the folder. With several processes, the first one must call this before the others.

        Args:
            run: The run folder.
            anew: Whether existing files are deleted.
        """

    def save(self, draft: Path, checkpoints: Sequence[Path], write: Callable[[], list[str]]) -> list[str]:
        """Write the tensors for a checkpoint and return the names of its files.

        This class only calls ``write``. A store on disk overrides the method, as most of its tensors are in files
        already.

        Args:
            draft: Folder of the new checkpoint.
            checkpoints: Older checkpoints, which stay readable.
            write: Writes tensors that are in memory and returns the names of the files.
        """
        return write()

    def load(self, checkpoint: Path, read: Callable[[], State]) -> State:
        """Return the state at a checkpoint, by calling ``read``.

        A store on disk overrides this method. It does not call ``read``: it reads a user's tensors at :meth:`take`.

        Args:
            checkpoint: Folder of the checkpoint.
            read: Reads the tensors of all users into memory.
        """
        return read()


_USER_TENSORS = ("rows", "first", "second", "iterations", "router_steps", "ranks", "versions")
"""Attributes of :class:`State` that are tensors with users on the leading dimension."""

_KEPT_PREFIX = "kept/"
"""Prefix of the names of tensors of client hooks in :meth:`State.tensors`."""


def _slice_or_list(users: Sequence[int]) -> slice | list[int]:
    """Return an index for the rows of users: a slice, which makes views, if they are consecutive, otherwise a list."""
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
    common_values: Float[Tensor, " columns"] | None = None,
) -> State:
    """Return the tensors of users before the first round; padding is zero.

    Args:
        layout: Layout of the columns.
        mask: True where a user has a parameter.
        names: Names of the users.
        local: Columns that are drawn from (seed, user, tensor); all other columns start equal for all users.
        ranks: LoRA rank of each user.
        seed: Seed of the run.
        moments: Moments that some optimizer uses; others are empty.
        accumulates: Whether to allocate gradients that phases leave to each other.
        dtype: Dtype of parameters and moments.
        common_values: Initial values that are equal for all users; drawn here if None.
    """
    if common_values is None:
        common_values = draw(layout, seed, "server")
    rows = common_values.repeat(len(names), 1)
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
    """Return initial values of all parameters, with a random stream for each (seed, owner, tensor).

    So the values of a tensor depend on no other user or tensor.

    Args:
        layout: Layout of the columns: each slot is a named tensor that occupies a range of them.
        seed: Seed of the run.
        owner: Name of the user for its local parameters, or "server" for parameters that all users begin with.
        only: Columns that are needed; tensors without any of them stay zero.
    """
    initial_values = torch.zeros(layout.columns)
    for slot in layout.slots:
        span = slice(layout.starts[slot.name], layout.starts[slot.name] + slot.size)
        if only is None or bool(only[span].any()):
            random = generator(seed, owner, "init", slot.name)
            initial_values[span] = slot.init(slot.shape, random).flatten()
    return initial_values


NEEDS_CLUSTERS = (
    "needs the true cluster of every user, which synthetic tasks have; for other data give "
    "data.clusters: {ada: a, ben: a, cem: b}, with every user"
)


def true_clusters(method: str, known: Sequence[int | None], clusters: int) -> Float[Tensor, "rows clusters"]:
    """Return router logits that select the component of each row's true cluster.

    The softmax of a row of logits is exactly one-hot. True cluster c has component ``c mod clusters``, so several true
    clusters share a component if there are more true clusters than components.

    Args:
        method: Name of the method, for the error.
        known: Number of the true cluster of each row, from 0; None if unknown.
        clusters: Number of components of the mixture.

    Raises:
        RecipeError: A true cluster is unknown.
    """
    if any(cluster is None for cluster in known):
        raise RecipeError(f"method {method}: {NEEDS_CLUSTERS}")
    component_of_row = torch.tensor(known) % clusters
    # The logits are 0 for the row's component and -10000 for the others, whose share in a softmax underflows to 0.
    logits = torch.full((len(component_of_row), clusters), ZERO_SHARE_LOGIT)
    return logits.scatter(1, component_of_row.unsqueeze(1), 0.0)


def reorder(state: State, was: Sequence[str], now: Sequence[str]) -> State:
    """Return a state with its users in another order, as a recipe may list them differently when a run is resumed.

    Args:
        state: State with users in the order ``was``.
        was: Names of the users in the state.
        now: The same names in the new order.
    """
    if list(was) == list(now):
        return state
    old_places = UserNumbers(was)(now)
    copies = len(state.rows) // len(was)
    old_rows = [copy * len(was) + place for copy in range(copies) for place in old_places]
    tensors = state.tensors()
    names_by_user = tensors.keys()  # all of them have a row per user; ``best`` also has the number of its round
    reordered = _reorder_users(tensors, names_by_user, old_rows)
    return state.filled(reordered, _reorder_users(state.best, names_by_user, old_rows))


def reorder_kept(kept: Tree, was: Sequence[str], now: Sequence[str], by_user: Collection[str]) -> Tree:
    """Return the tensors that a server keeps, with users in another order; tensors without users are unchanged.

    Args:
        kept: Tensors with users in the order ``was``.
        was: Names of the users.
        now: The same names in the new order; if it is the same object, nothing is compared.
        by_user: Names of the tensors that have users on the leading dimension.
    """
    return kept if was is now else _reorder_users(kept, by_user, UserNumbers(was)(now))


def _reorder_users(tensors: Tree, names: Collection[str], old_rows: Sequence[int]) -> dict[str, Tensor]:
    """Return tensors with their rows in another order; those that hold no value per user are unchanged.

    Args:
        tensors: Tensors by name.
        names: Names of the tensors with users on the leading dimension; a single row stands for all users.
        old_rows: For each row of the result, its number in ``tensors``.
    """
    return {name: t[list(old_rows)] if name in names and len(t) > 1 else t for name, t in tensors.items()}


def check_names(where: Path, was: Sequence[str], now: Sequence[str]) -> None:
    """Check that a checkpoint has these users, in any order.

    Args:
        where: Checkpoint, for the error.
        was: Names of the users in the checkpoint.
        now: Names of the users of the run.

    Raises:
        RunError: A user is missing from the checkpoint or from the run; names the user.
    """
    if list(was) == list(now):
        return
    for name in now:
        if name not in was:
            raise RunError(f"{where}: no user {name!r}; found: {list_names(was)}")
    for name in was:
        if name not in now:
            raise RunError(f"{where}: user {name!r} is not in the recipe, which has: {list_names(now)}")
