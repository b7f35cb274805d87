"""Whether a task is one that a user may be given: nothing of it is done before it has been looked at as a whole."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from comingle.config.settings import Training
from comingle.federation.tasks import Task
from comingle.utils.errors import MessageError

_RUN = re.compile(r"[A-Za-z0-9]{1,64}")
_MOST_STEPS = 10_000_000
"""As in a recipe, where they depend on how much data users have."""
_NEEDS_MESSAGE = ("receive", "hear", "share", "mask", "unmask")


def check_address(task: Task, user: str) -> None:
    """Whether a task is for this user; its run gives a folder its name.

    Raises:
        MessageError: it is not.
    """
    if task.user != user:
        raise MessageError(f"task: for user {task.user!r}, and this is {user!r}")
    if not _RUN.fullmatch(task.run):
        raise MessageError(f"task: of run {task.run[:70]!r}; a run is called by up to 64 letters and digits")


def check_task(task: Task, training: Training, steps: Collection[str], *, counted: bool) -> None:
    """Whether its steps are known, each once, with the messages that they need, about a round that there is.

    Local iterations are ``counted`` from users' data, or as many as the recipe says.

    Raises:
        MessageError: something is not so.
    """
    if not task.todo:
        raise MessageError(f"task: no step; allowed: join, {', '.join(steps)}")
    for at, step in enumerate(task.todo):
        if step not in steps:
            raise MessageError(f"task: no step {step[:70]!r}; allowed: join, {', '.join(steps)}")
        if step in task.todo[:at]:
            raise MessageError(f"task: step {step!r} twice")
    needed = sum(step in _NEEDS_MESSAGE for step in task.todo)
    if len(task.messages) < needed:
        raise MessageError("task: a step needs a message that is not there")
    if len(task.messages) > needed:
        raise MessageError("task: a message that no step needs")
    _check_number("round", task.round, training.rounds)
    _check_number("done", task.about.get("done", 0), training.rounds)
    said, own = task.about.get("local_steps", 0), training.local_steps
    _check_number("local_steps", said, _MOST_STEPS)
    if not counted and said not in (0, own):
        raise MessageError(f"task: local_steps is {said}; the recipe's are {own}")


def _check_number(what: str, got: Any, most: int) -> None:
    if type(got) is not int or not 0 <= got <= most:
        raise MessageError(f"task: {what} is {str(got)[:70]!r}; allowed: 0 to {most}")
