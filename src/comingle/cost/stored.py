"""Costs of users on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import MEMORY
from comingle.data.populations import LazyPopulation
from comingle.data.text.reading import found_here, tokenizer_here
from comingle.models.base import Base
from comingle.training.client import STORES
from comingle.training.kinds.base import Kind, RunData
from comingle.training.kinds.conversations import NOTE, ConversationsKind, as_steps
from comingle.training.kinds.text import TextKind, anybody_validates, section
from comingle.training.state import MOMENTS, State
from comingle.training.storage.disk import BEHIND
from comingle.training.storage.files import Form, forms_of


def as_text(
    kind: Kind, recipes: Sequence[Recipe], users: int | None, load_base: Callable[[], Base]
) -> tuple[list[Recipe], set[str], str]:
    """As :meth:`comingle.training.kinds.base.Kind.as_text`; of users on disk no more than one is in memory.

    ``load_base`` gives a base that needs no weights. Where its tokenizer is not here, users are read all at once.

    Raises:
        DataError: what a run would refuse of data that lies on this machine.
    """
    reads = users is None and is_read(kind, recipes[0])
    found = _read(kind, recipes, load_base) if reads else None
    if found is None or not isinstance(found.users, LazyPopulation):
        return kind.as_text(recipes, users)
    return as_long(kind, recipes, found.users), set(found.skipped), NOTE if isinstance(kind, ConversationsKind) else ""


@singledispatch
def is_read(kind: Kind, recipe: Recipe) -> bool:
    """Whether users' data is looked at before costs are counted in tokens."""
    return False


@is_read.register
def _conversations(kind: ConversationsKind, recipe: Recipe) -> bool:
    return not recipe.data.given


@is_read.register
def _text(kind: TextKind, recipe: Recipe) -> bool:
    return not recipe.data.given and found_here(section(recipe))[0]


def _read(kind: Kind, recipes: Sequence[Recipe], load_base: Callable[[], Base]) -> RunData | None:
    """As a run of the first recipe will; None where that has no store, or the base's tokenizer is not here."""
    recipe = recipes[0]
    store: Any = None if recipe.runtime.store == MEMORY else STORES[recipe.runtime.store]
    tokenizer = tokenizer_here(recipe.base) if hasattr(store, "read") else None
    if tokenizer is None:
        return None
    base = replace(load_base(), tokenizer=tokenizer)
    return store.read(kind, recipe, lambda: base, validates=anybody_validates(recipes))


def as_long(kind: Kind, recipes: Sequence[Recipe], users: LazyPopulation) -> list[Recipe]:
    """Recipes with text that costs as much as what these users have: as
    :meth:`comingle.training.kinds.base.Kind.as_text`.
    """
    if not isinstance(kind, ConversationsKind) or users.sizes is None:
        return list(recipes)
    counts = dict(zip(users.names, users.sizes[:, 0].tolist(), strict=True))
    return [as_steps(recipe, counts) for recipe in recipes]


READ_AHEAD = 1
"""Cohorts whose records are read while others train."""

PLACES_BYTES = 20
"""Of each user, whoever takes part: where its two records are (8 bytes each), and which version it has (4)."""


@dataclass(frozen=True, kw_only=True)
class UserBytes:
    """A user's tensors: its model and its method's parts, what optimisers remember, and the records of both."""

    params: int
    moments: int
    params_record: int
    moments_record: int

    @property
    def record(self) -> int:
        """Both records."""
        return self.params_record + self.moments_record


def user_bytes(state: State, store: str) -> UserBytes:
    """Of one of the users of a state that is in memory."""
    moments = None if store == MEMORY else STORES[store].moments
    forms: Mapping[str, Form] = forms_of(state, moments)
    sizes = {name: t[:1].nbytes for name, t in state.tensors().items()}
    remembered = sum(size for name, size in sizes.items() if name in MOMENTS)
    return UserBytes(
        params=sum(sizes.values()) - remembered,
        moments=remembered,
        params_record=forms["params"].bytes,
        moments_record=forms["moments"].bytes,
    )


def held_params(user: UserBytes, at_once: int, users: int) -> int:
    """Bytes of models in memory: a cohort at work, one read ahead, others to be written; and everybody's places."""
    return at_once * (user.params + (READ_AHEAD + BEHIND) * user.params_record) + PLACES_BYTES * users


def held_moments(user: UserBytes, at_once: int) -> int:
    """The same of what optimisers remember; what waits to be written are models or this, so it is counted once."""
    return at_once * (user.moments + READ_AHEAD * user.moments_record)


def taken_bytes(user: UserBytes) -> int:
    """Of a model that is read to be sent: the record, and the tensors that are made of it."""
    return user.params_record + user.params


def received_bytes(user: UserBytes) -> int:
    """Of a model that is read and changed by a download; while it is packed, as many wait to be written."""
    return user.params + (1 + BEHIND) * user.params_record


def ever_present(users: int, present: int, rounds: int) -> float:
    """How many users will have taken part, where so many are drawn each round: ``U (1 - (1 - p)^R)`` in the mean."""
    return users * (1 - (1 - present / users) ** rounds)


@dataclass(frozen=True, kw_only=True)
class Writes:
    """Who writes records: ``users`` in all, ``present`` in a round, ``evaluated`` each ``evaluate_every`` rounds.

    ``every`` so many rounds there is a checkpoint, of which ``keep`` are kept.
    """

    users: int
    present: int
    evaluated: int
    rounds: int
    evaluate_every: int
    every: int
    keep: int

    @property
    def older(self) -> int:
        """How many rounds lie between the checkpoints whose records are still there, and now.

        A record's place is free once no checkpoint names it, which is known when the next has been written.
        """
        return min(self.every * (self.keep + 1), max(0, self.rounds - self.every))

    def models(self) -> float:
        """How many records of models there are at most: of who took part, or was evaluated, and those written over."""
        known = ever_present(self.users, self.present, self.rounds)
        known += self.evaluated * (1 - known / self.users)
        often = math.ceil(self.older / self.evaluate_every)
        return known + self._written_over(known) + self.evaluated * min(often, self.older // self.every)

    def moments(self) -> float:
        """The same of what optimisers remember, which only those have who took part."""
        known = ever_present(self.users, self.present, self.rounds)
        return known + self._written_over(known)

    def _written_over(self, known: float) -> float:
        return self.older / self.every * min(known, self.present * self.every)


def store_bytes(user: UserBytes, writes: Writes) -> int:
    """Bytes on disk at the end of a run, at most; how many will have taken part is taken in the mean."""
    return int(user.params_record * writes.models() + user.moments_record * writes.moments())
