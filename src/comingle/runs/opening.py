"""What a finished run needs of what it has read: the base now, the users' data when something asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import MEMORY
from comingle.data.populations import Crowd
from comingle.models.folders import digest_tokenizer
from comingle.runs.given import NOTHING, Given, lending
from comingle.runs.session import describe, get_ready, prepare
from comingle.training.client import STORES
from comingle.training.kinds.base import Kind, Materials, kind_of, later
from comingle.utils.errors import DataError, RunError
from comingle.utils.inputs import DATE, POPULATION, check_base, check_users, read_inputs


def reopen(folder: Path, recipe: Recipe, given: Given = NOTHING) -> Materials:
    """The materials of a finished run, with everybody's data left where it is.

    What is ``given`` is taken as it is handed over. What is read later is what the run has read: changed data is
    refused then, a changed base at once.

    Raises:
        RunError: nothing says what the run has read, or the base or its tokenizer changed.
        BaseModelError: the base cannot be used.
    """
    inputs = read_inputs(folder)
    given = replace(given, date=str(inputs.settings.get(DATE, "")))
    get_ready(recipe)
    kind = kind_of(recipe)
    given.check_base(recipe)
    base = given.load_base(recipe) if kind.needs_base else None

    @cache
    def read() -> Sequence[Any]:
        try:
            with lending([given.method]):
                materials = prepare(recipe, base=base, given=given)
        except DataError as error:
            raise DataError(f"{folder}: this needs the users' data, which is not in a run folder: {error}") from None
        check_users(folder, inputs, describe(materials, recipe))
        return materials.users

    @cache
    def by_name() -> dict[str, Any]:
        return {user.name: user for user in read()}

    if base is not None:
        check_base(folder, inputs, base.digest, digest_tokenizer(base.tokenizer))
    if POPULATION in inputs.settings:
        users = _in_files(folder, recipe, kind, read)
    else:
        users = tuple(
            later(kind.user, name, lambda name=name: by_name()[name], cluster=of_user.cluster)
            for name, of_user in inputs.users.items()
        )
    return kind.reopened(base, users, inputs.settings, net=given.net)


def _in_files(folder: Path, recipe: Recipe, kind: Kind, read: Callable[[], Sequence[Any]]) -> Crowd:
    """Users who are too many to be listed; ``read`` yields them by number, when somebody's data is asked for."""
    store: Any = None if recipe.runtime.store == MEMORY else STORES[recipe.runtime.store]
    names = store.names(folder) if hasattr(store, "names") else None
    if names is None:
        raise RunError(f"{folder}: a program handed its users over, who are too many to be listed; resume it to go on")

    def make(number: int) -> Any:
        return later(kind.user, names[number], lambda: read()[number])

    return Crowd(names, make, digest="")
