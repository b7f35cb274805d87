"""Users' data where costs depend on it and users are on disk: read one after another, once for plan and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import MEMORY
from comingle.data.populations import Crowd
from comingle.data.text.reading import found_here, tokenizer_here
from comingle.models.base import Base
from comingle.training.client import STORES
from comingle.training.kinds.base import Kind, Materials
from comingle.training.kinds.conversations import NOTE, ConversationsKind, as_steps
from comingle.training.kinds.text import TextKind, anybody_validates, section


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
    if found is None or not isinstance(found.users, Crowd):
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


def _read(kind: Kind, recipes: Sequence[Recipe], load_base: Callable[[], Base]) -> Materials | None:
    """As a run of the first recipe will; None where that has no store, or the base's tokenizer is not here."""
    recipe = recipes[0]
    store: Any = None if recipe.runtime.store == MEMORY else STORES[recipe.runtime.store]
    tokenizer = tokenizer_here(recipe.base) if hasattr(store, "read") else None
    if tokenizer is None:
        return None
    base = replace(load_base(), tokenizer=tokenizer)
    return store.read(kind, recipe, lambda: base, validates=anybody_validates(recipes))


def as_long(kind: Kind, recipes: Sequence[Recipe], users: Crowd) -> list[Recipe]:
    """Recipes with text that costs as much as what these users have: as
    :meth:`comingle.training.kinds.base.Kind.as_text`.
    """
    if not isinstance(kind, ConversationsKind) or users.sizes is None:
        return list(recipes)
    counts = dict(zip(users.names, users.sizes[:, 0].tolist(), strict=True))
    return [as_steps(recipe, counts) for recipe in recipes]
