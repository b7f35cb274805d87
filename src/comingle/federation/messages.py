"""Tasks and answers between server and clients, and which tasks a client accepts.

    magic "CMGT" · format version · length of the words · CRC-32 of the words · words · the messages, one after another

The words are JSON. Each message is the bytes that :mod:`comingle.protocol.wire` packs and checks. Nothing is executed.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from comingle.config import Recipe
from comingle.federation.public import House
from comingle.privacy.accounting import Work
from comingle.protocol.wire import FORMAT, MAX_BYTES
from comingle.training.plan import work_of
from comingle.training.settings import RunPlan
from comingle.utils.errors import MessageError

_MAGIC = b"CMGT"
_PREFIX = struct.Struct("<4sHII")
MAX_WORDS = 16 << 20
"""Longer words are refused before they are read."""

_WRONG = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What words can be that are not those of a task or an answer."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a user is to do, in this order, as the ``serial``-th task of run ``run``.

    ``round`` is what its steps are about: the round to train (from 0), or how many are done. ``about`` holds what else
    the steps need.
    """

    run: str
    serial: int
    user: str
    todo: tuple[str, ...]
    round: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """As bytes; equal tasks are equal bytes."""
        words = {"todo": list(self.todo), "round": self.round, "about": dict(self.about)}
        return _pack("task", self.run, self.serial, self.user, words, self.messages)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a user answers to the task of the same run and number: ``told`` in words, and its upload."""

    run: str
    serial: int
    user: str
    told: Mapping[str, Any]
    messages: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """As bytes."""
        return _pack("answer", self.run, self.serial, self.user, {"told": dict(self.told)}, self.messages)

    @property
    def refused(self) -> str:
        """Why the user did not do what it was asked; empty if it did."""
        return str(self.told.get("refused", ""))


def unpack_task(data: bytes) -> Task:
    """The task that was packed.

    Raises:
        MessageError: not such bytes.
    """
    words, messages = _unpack("task", data)
    with _refused("task"):
        return Task(
            run=str(words["run"]),
            serial=int(words["serial"]),
            user=str(words["user"]),
            todo=tuple(str(step) for step in words["todo"]),
            round=int(words["round"]),
            about=dict(words["about"]),
            messages=messages,
        )


def unpack_answer(data: bytes) -> Answer:
    """The answer that was packed.

    Raises:
        MessageError: not such bytes.
    """
    words, messages = _unpack("answer", data)
    with _refused("answer"):
        return Answer(
            run=str(words["run"]),
            serial=int(words["serial"]),
            user=str(words["user"]),
            told=dict(words["told"]),
            messages=messages,
        )


def _pack(kind: str, run: str, serial: int, user: str, words: Mapping[str, Any], messages: tuple[bytes, ...]) -> bytes:
    every = {"kind": kind, "run": run, "serial": serial, "user": user, "lengths": [len(one) for one in messages]}
    header = json.dumps(every | dict(words), separators=(",", ":"), allow_nan=False).encode()
    return b"".join([_PREFIX.pack(_MAGIC, FORMAT, len(header), zlib.crc32(header)), header, *messages])


def _unpack(kind: str, data: bytes) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        raise MessageError(f"{kind}: {len(data)} bytes that do not begin as one of comingle does")
    _, version, length, check = _PREFIX.unpack_from(data)
    if version != FORMAT:
        raise MessageError(f"{kind}: of format {version}; allowed: {FORMAT}")
    if length > MAX_WORDS or len(data) > MAX_BYTES:
        raise MessageError(f"{kind}: {len(data)} bytes, of which {length} are words; at most {MAX_BYTES}, {MAX_WORDS}")
    start = _PREFIX.size + length
    if zlib.crc32(data[_PREFIX.size : start]) != check:
        raise MessageError(f"{kind}: its checksum is wrong, so something has changed on the way")
    with _refused(kind):
        words = json.loads(data[_PREFIX.size : start], parse_constant=_refuse)
        lengths = [int(one) for one in words["lengths"]]
        if words["kind"] != kind:
            raise MessageError(f"{kind}: got one of kind {words['kind']!r}")
    if min(lengths, default=0) < 0 or start + sum(lengths) != len(data):
        raise MessageError(f"{kind}: has {len(data)} bytes and says that it has {start + sum(lengths)}")
    ends = [start + sum(lengths[: i + 1]) for i in range(len(lengths))]
    return words, tuple(data[end - size : end] for end, size in zip(ends, lengths, strict=True))


@contextmanager
def _refused(kind: str) -> Iterator[None]:
    """Whatever is wrong with words is the message's fault."""
    try:
        yield
    except MessageError:
        raise
    except _WRONG as error:
        raise MessageError(f"{kind}: not one of comingle's ({type(error).__name__}: {error})") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


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


def check_task(task: Task, plan: RunPlan, steps: Collection[str], *, counted: bool) -> None:
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
    _check_number("round", task.round, plan.training.rounds)
    _check_number("done", task.about.get("done", 0), plan.training.rounds)
    said, own = task.about.get("local_steps", 0), plan.training.local_steps
    _check_number("local_steps", said, _MOST_STEPS)
    if not counted and said not in (0, own):
        raise MessageError(f"task: local_steps is {said}; the recipe's are {own}")


def _check_number(what: str, got: Any, most: int) -> None:
    if type(got) is not int or not 0 <= got <= most:
        raise MessageError(f"task: {what} is {str(got)[:70]!r}; allowed: 0 to {most}")


def counts_samples(recipe: Recipe) -> bool:
    """Whether users pass over what they have; else all take the iterations that the recipe says."""
    return "training.local_steps" in type(recipe.data).unread


def most_steps(house: House, max_samples: int) -> int:
    """Local iterations of a round that a user may have: ``local_epochs`` passes over at most so many samples."""
    plan = house.plan
    if not counts_samples(house.recipe):
        return plan.training.local_steps
    return plan.training.local_epochs * max(1, -(-max_samples // plan.training.batch_size))


def works_of(house: House, examples: Mapping[str, int]) -> dict[str, Work]:
    """What each user does, where privacy hides examples, of which these have said that they have so many."""
    plan = house.plan
    return {
        name: work_of(plan, name, examples=count, iterations=most_steps(house, count))
        for name, count in examples.items()
    }


def check_steps(steps: int, house: House, max_samples: int) -> None:
    """Whether a user may have so many local iterations in a round.

    Raises:
        MessageError: it may not.
    """
    most = most_steps(house, max_samples)
    if not counts_samples(house.recipe) and steps != most:
        raise MessageError(f"answer: says that it takes {steps:,} local steps; the recipe's are {most:,}")
    if not steps <= most:
        why = f"allowed: up to {most:,} (network.max_samples is {max_samples:,})"
        raise MessageError(f"answer: says that it takes {steps:,} local steps; {why}")
