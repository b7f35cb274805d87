"""Trainable state of all users: parameters, optimizer moments and step counts."""

from __future__ import annotations

import mmap
import sys
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
"""Key in :attr:`State.kept` of gradients that one phase has computed and another phase will use in its next step."""

MOMENTS = frozenset({"first", "second"})
"""Names of the optimizer moments."""

STEP_STATE = MOMENTS | {"iterations", "router_steps"}
"""Names of the tensors that describe the progress of the optimizers: moments and step counts."""


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
        """Return all tensors with users on the leading dimension, by name; those of hooks begin with "kept/"."""
        named = {name: getattr(self, name) for name in _USER_TENSORS}
        for name, t in self.kept.items():
            named[KEPT_PREFIX + name] = t
        return named

    def filled(self, tensors: dict[str, Tensor], best: Tree) -> State:
        """Return a state of the same type and device with all tensors replaced, such as by those of a checkpoint.

        Args:
            tensors: The tensors, under the names of :meth:`tensors`.
            best: Tensors of the best round, as in :attr:`best`; empty without one.
        """
        return replace(self._with_tensors(tensors), best=best)

    def _with_tensors(self, tensors: dict[str, Tensor]) -> State:
        """Return a state with other tensors, under the names of :meth:`tensors`; ``best`` is unchanged."""
        attributes = {name: tensors[name] for name in _USER_TENSORS}
        kept: Tree = {}
        for name, t in tensors.items():
            if name.startswith(KEPT_PREFIX):
                kept[name.removeprefix(KEPT_PREFIX)] = t
        return replace(self, **attributes, kept=kept)

    def copy(self, *, compact: bool = False) -> State:
        """Return a deep copy.

        Args:
            compact: Whether to store a tensor of zeros, such as moments before training, as an expanded single zero,
                which takes no memory. It must not be updated in place; copy it again without ``compact`` before that.
        """
        copies: dict[str, Tensor] = {}
        for name, t in self.tensors().items():
            if compact and not t.any():
                copies[name] = t.new_zeros(()).expand(t.shape)
            else:
                copies[name] = t.clone()
        return self._with_tensors(copies)

    def without_moments(self) -> State:
        """Return a state with empty moments that shares all other tensors; for work without optimizer steps."""
        return replace(self, first=self.first[:, :0], second=self.second[:, :0])

    def rows_of(self, users: Sequence[int]) -> Float[Tensor, "some columns"]:
        """Return a copy of the parameters of some users.

        Args:
            users: Numbers of their rows, in any order; a row may occur twice.
        """
        return self.rows[list(users)]

    def prefetch(self, users: Sequence[int]) -> None:
        """Start to read from disk the users that :meth:`take` needs next; does nothing for tensors in memory.

        Args:
            users: Numbers of their rows.
        """

    def release(self) -> None:
        """Free the resources of a state made by :meth:`copy`."""

    def remember(self, done: int) -> None:
        """Store a copy of all tensors as those of the best round, for ``evaluation.select: best``.

        Args:
            done: Number of rounds that are done.
        """
        copies = {name: t.clone() for name, t in self.tensors().items()}
        self.best = {**copies, "round": torch.tensor(done)}

    def restored_best(self) -> State:
        """Return the state as it was after the best round."""
        return self._with_tensors({name: self.best[name].clone() for name in self.tensors()})

    def take(self, users: Sequence[int]) -> State:
        """Return the state of some users, to train them; :meth:`put` writes it back.

        Args:
            users: Numbers of their rows: of users or, if a method trains several copies of a user's model, of copies.

        Returns:
            A state that is a view if the rows are consecutive, otherwise a copy.
        """
        index = _slice_or_list(users)
        return self._with_tensors({name: t[index] for name, t in self.tensors().items()})

    def put(self, users: Sequence[int], taken: State) -> None:
        """Write back the result of :meth:`take`; does nothing for consecutive rows, as the result was a view.

        Args:
            users: Numbers of the rows, as in :meth:`take`.
            taken: The state of these rows.
        """
        index = _slice_or_list(users)
        was_view = isinstance(index, slice)
        if was_view:
            return
        new_values = taken.tensors()
        for name, t in self.tensors().items():
            t[index] = new_values[name]

    # ---------------------------------------------------------------- the run folder

    def shard(self, number: int, processes: int, users: range, population: int) -> None:
        """Tell a store on disk which users this process has, if those of a run are divided among several processes.

        Does nothing for tensors in memory.

        Args:
            number: The process, counted from 0.
            processes: Number of processes.
            users: Numbers of the users of this process among all.
            population: Number of users of all processes.
        """

    def open(self, run: Path, *, new_run: bool) -> None:
        """Make a store on disk write to a run folder from now on; does nothing for tensors in memory.

        The caller has locked the folder. With several processes, the first one must call this before the others.

        Args:
            run: The run folder.
            new_run: Whether to delete existing records of the folder.
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

KEPT_PREFIX = "kept/"
"""Prefix of the names of tensors of client hooks in :meth:`State.tensors`."""


def _slice_or_list(users: Sequence[int]) -> slice | list[int]:
    """Return an index for the rows of users: a slice, which makes views, if they are consecutive, otherwise a list.

    For example ``slice(3, 6)`` for users 3, 4 and 5.
    """
    first, end = users[0], users[-1] + 1
    is_consecutive = list(users) == list(range(first, end))
    return slice(first, end) if is_consecutive else list(users)


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
    """Return the parameters and optimizer state of users before the first round.

    The trained parameters of a user are a row, in which all its tensors are flattened one after another. Columns that a
    user does not need, such as those of ranks above its LoRA rank, are padding and stay zero.

    Args:
        layout: Layout of the columns: which of them belong to which tensor.
        mask: True where a user has a parameter, False on padding.
        names: Names of the users.
        local: Columns whose initial values differ between users, from a random stream for each (seed, user, tensor);
            others start equal for all users.
        ranks: LoRA rank of each user.
        seed: Seed of the run.
        moments: Moments that some optimizer uses, such as ``{"first"}``; others are empty.
        accumulates: Whether to allocate a tensor that accumulates gradients over phases (:data:`GRADIENTS`).
        dtype: Dtype of parameters and moments.
        common_values: Initial values that are equal for all users; drawn here if None.
    """
    num_users, device = len(names), mask.device
    if common_values is None:
        common_values = draw(layout, seed, "server")
    rows = torch.empty(num_users, layout.columns, dtype=dtype, device=device).copy_(common_values)
    if bool(local.any()):
        for row, name in zip(rows, names, strict=True):
            own_values = torch.where(local, draw(layout, seed, name, only=local), common_values)
            row.copy_(own_values)
    if not bool(mask.all()):
        rows *= mask
    no_columns = rows[:, :0]
    zeros = torch.zeros(num_users, dtype=torch.int64, device=device)
    return State(
        rows=rows,
        first=_untouched_zeros(rows if "first" in moments else no_columns),
        second=_untouched_zeros(rows if "second" in moments else no_columns),
        iterations=zeros,
        router_steps=zeros.clone(),
        ranks=ranks.to(device),
        versions=zeros.clone(),
        kept={GRADIENTS: torch.zeros_like(rows)} if accumulates else {},
    )


_MAPPED_BYTES = 1 << 20
"""Size from which zeros are a mapping of their own."""


def _untouched_zeros(like: Tensor) -> Tensor:
    """Return zeros like a tensor; on Linux large ones take memory only where they are written to.

    For example, the moments of a router's optimizer stay zero if the method has no router.
    """
    if like.device.type != "cpu" or like.nbytes < _MAPPED_BYTES or not sys.platform.startswith("linux"):
        return torch.zeros_like(like)
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def draw(
    layout: Layout, seed: int, owner: str, only: Bool[Tensor, " columns"] | None = None
) -> Float[Tensor, " columns"]:
    """Return initial values of all parameters, with a random stream for each (seed, owner, tensor).

    So the values of a tensor depend on no other user or tensor.

    Args:
        layout: Layout of the columns: each slot is a named tensor that occupies a range of them.
        seed: Seed of the run.
        owner: Name of the user for its local parameters, or "server" for parameters that all users begin with.
        only: True on the columns that are needed; tensors without any of them stay zero. None if all are needed.
    """
    initial_values = torch.zeros(layout.columns)
    for slot in layout.slots:
        start = layout.starts[slot.name]
        columns = slice(start, start + slot.size)
        is_needed = only is None or bool(only[columns].any())
        if is_needed:
            random = generator(seed, owner, "init", slot.name)
            initial_values[columns] = slot.init(slot.shape, random).flatten()
    return initial_values


NEEDS_CLUSTERS = (
    "needs the true cluster of every user, which synthetic tasks have; for other data give "
    "data.clusters: {ada: a, ben: a, cem: b}, with every user"
)


def true_clusters(method: str, known: Sequence[int | None], clusters: int) -> Float[Tensor, "rows clusters"]:
    """Return router logits that select the component of each row's true cluster: their softmax is exactly one-hot.

    True cluster c has component ``c mod clusters``: with 2 components, clusters 0 and 2 share the first one.

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


def reorder(state: State, old_names: Sequence[str], new_names: Sequence[str]) -> State:
    """Return a state with its users in another order, as a recipe may list them differently when a run is resumed.

    Args:
        state: State with users in the order ``old_names``.
        old_names: Names of the users in the state.
        new_names: The same names in the new order.
    """
    if list(old_names) == list(new_names):
        return state
    old_numbers = UserNumbers(old_names)(new_names)  # [2, 0, 1] if the last user comes first now
    num_copies = len(state.rows) // len(old_names)  # of each user's tensors
    old_rows = [copy * len(old_names) + number for copy in range(num_copies) for number in old_numbers]
    tensors = state.tensors()
    has_users = tensors.keys()  # names of tensors with users on the leading dimension; in ``best``, "round" has none
    reordered_tensors = _reorder_users(tensors, has_users, old_rows)
    reordered_best = _reorder_users(state.best, has_users, old_rows)
    return state.filled(reordered_tensors, reordered_best)


def reorder_kept(kept: Tree, old_names: Sequence[str], new_names: Sequence[str], by_user: Collection[str]) -> Tree:
    """Return the tensors that a server keeps, with users in another order; tensors without users are unchanged.

    Args:
        kept: Tensors with users in the order ``old_names``.
        old_names: Names of the users.
        new_names: The same names in the new order.
        by_user: Names of the tensors that have users on the leading dimension.
    """
    if old_names is new_names:  # the same object: millions of names are not compared
        return kept
    old_numbers = UserNumbers(old_names)(new_names)  # [2, 0, 1] if the last user comes first now
    return _reorder_users(kept, by_user, old_numbers)


def _reorder_users(tensors: Tree, names: Collection[str], old_rows: Sequence[int]) -> dict[str, Tensor]:
    """Return tensors with their rows in another order; those without users are unchanged.

    Args:
        tensors: Tensors by name.
        names: Names of the tensors with users on the leading dimension. Those with a single row have the same values
            for all users and are unchanged.
        old_rows: For each row of the result, its number in ``tensors``.
    """
    reordered: dict[str, Tensor] = {}
    for name, t in tensors.items():
        has_row_per_user = name in names and len(t) > 1
        reordered[name] = t[list(old_rows)] if has_row_per_user else t
    return reordered


def check_names(checkpoint: Path, stored_names: Sequence[str], run_names: Sequence[str]) -> None:
    """Check that a checkpoint has these users, in any order.

    Args:
        checkpoint: Folder of the checkpoint, for the error.
        stored_names: Names of the users in the checkpoint.
        run_names: Names of the users of the run.

    Raises:
        RunError: A user is missing from the checkpoint or from the run; names the user.
    """
    if list(stored_names) == list(run_names):
        return
    for name in run_names:
        if name not in stored_names:
            raise RunError(f"{checkpoint}: no user {name!r}; found: {list_names(stored_names)}")
    for name in stored_names:
        if name not in run_names:
            raise RunError(f"{checkpoint}: user {name!r} is not in the recipe, which has: {list_names(run_names)}")
