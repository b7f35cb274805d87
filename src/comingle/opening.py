"""What a finished run needs of what it has read: the base now, the users' data when something asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from comingle.data.answers import UserAnswers
from comingle.data.later import later
from comingle.data.pack import UserData
from comingle.data.samples import UserSamples
from comingle.data.tasks import Task
from comingle.errors import DataError
from comingle.inputs import Inputs, check_base, check_users, read_inputs
from comingle.materials import Materials, describe, get_ready, load_base_of, prepare
from comingle.models.digests import digest_tokenizer
from comingle.recipes import Recipe


def reopen(folder: Path, recipe: Recipe) -> Materials:
    """The materials of a finished run, with everybody's data left where it is.

    What is read later is what the run has read: changed data is refused then, a changed base at once.

    Raises:
        RunError: nothing says what the run has read, or the base or its tokenizer changed.
        BaseModelError: the base cannot be used.
    """
    inputs = read_inputs(folder)
    get_ready(recipe)
    base = None if inputs.kind == "task" else load_base_of(recipe)

    @cache
    def read() -> dict[str, Any]:
        try:
            materials = prepare(recipe, base=base)
        except DataError as error:
            raise DataError(f"{folder}: this needs the users' data, which is not in a run folder: {error}") from None
        check_users(folder, inputs, describe(materials, recipe))
        return {user.name: user for user in materials.people}

    if base is not None:
        check_base(folder, inputs, base.digest, digest_tokenizer(base.tokenizer))
    return _unread(inputs, read, base)


def _unread(inputs: Inputs, read: Callable[[], dict[str, Any]], base: Any) -> Materials:
    kinds = {"text": UserData, "questions": UserAnswers, "task": UserSamples}
    people: tuple[Any, ...] = tuple(
        later(kinds[inputs.kind], name, lambda name=name: read()[name], cluster=of_user.cluster)
        for name, of_user in inputs.users.items()
    )
    task = None
    if inputs.kind == "task":
        settings = {**inputs.task, "input_shape": tuple(inputs.task["input_shape"])}
        task = Task(users=people, **settings)
    return Materials(
        base=base,
        texts=(),
        users=people if inputs.kind == "text" else (),
        answers=people if inputs.kind == "questions" else (),
        task=task,
        unread=True,
    )
