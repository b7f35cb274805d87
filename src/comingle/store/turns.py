"""Users who are read, split and tokenised one after another: who has too little is found on the way.

How that is done for the users of a kind is registered with :func:`in_turn`; users of other kinds are read all at once.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import singledispatch
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from comingle.config import Recipe
from comingle.data.populations import Crowd
from comingle.data.text.streams import LISTED, list_small
from comingle.kinds.base import Kind, Materials
from comingle.models.base import Base
from comingle.store.grouping import Spool
from comingle.store.tokens import PopulationWriter
from comingle.utils.errors import DataError, NoTextError

SKIPPED = "skipped.jsonl"
"""In the folder of a population: a line for each user who was left out, and what of the user had too little."""

HEARD = 100
"""So many warnings of the reading are said again."""

logger = logging.getLogger("comingle")

Read = TypeVar("Read")


@dataclass(kw_only=True)
class Some:
    """The first of those of whom something is to be said, and how many there are."""

    first: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def add(self, name: str, what: Any) -> None:
        """One more."""
        self.count += 1
        if len(self.first) <= LISTED:
            self.first[name] = what

    @property
    def told(self) -> str:
        """Of ten of them what is wrong."""
        return list_small({name: getattr(what, "what", what) for name, what in self.first.items()}, self.count)


class _Heard(logging.Handler):
    """What is warned of while the users are read, which is said again where they need not be: the first lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines, self.count = list[str](), 0

    def emit(self, record: logging.LogRecord) -> None:
        """One more."""
        self.count += 1
        if self.count <= HEARD:
            self.lines.append(record.getMessage())

    def __enter__(self) -> _Heard:
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)

    @property
    def told(self) -> list[str]:
        """With a line on how many more there were."""
        more = self.count - HEARD
        return [*self.lines, *([f"{more} more such lines were said when the users were read"] if more > 0 else [])]


class Turns(ABC, Generic[Read]):
    """How users are read in turn; ``Read`` is what was read of one, before it is encoded.

    ``skips`` says whether users with too little are left out. ``nothing`` and ``too_little`` say in words of what.
    """

    skips: bool
    nothing: str
    too_little: str

    @abstractmethod
    def sources(self) -> list[str]:
        """What is read: files and folders, or names that are none."""

    def key(self) -> list[Any]:
        """What decides on how it is encoded, besides the recipe's section ``data`` and the seed of its data."""
        return []

    @abstractmethod
    def readers(self, spool: Spool) -> Iterator[tuple[str, Callable[[], Read]]]:
        """Each user's name, and what reads it; ``spool`` is for rows that have to be grouped.

        Raises:
            DataError: a source cannot be read.
        """

    @abstractmethod
    def nobody(self, name: str) -> Read:
        """A user of whom there was nothing to read."""

    @abstractmethod
    def encode(self, read: Read) -> Any:
        """The user, as a run has it."""

    @abstractmethod
    def lack(self, user: Any) -> Any:
        """What the user has too little of, a text or what has one as ``what``; None where it is enough."""

    def before(self, folder: Path) -> Iterator[Turns[Any]]:
        """By what all are read, from end to end, before anybody's data is known: where it follows from that of others.

        What it writes below ``folder`` is there until :meth:`close`.
        """
        yield from ()

    def close(self) -> None:
        """Nothing more is asked for, be it that all are read or that somebody cannot be."""

    def keep(self, writer: PopulationWriter, read: Read, user: Any) -> None:
        """Write down one who has enough."""
        writer.add(user)

    @abstractmethod
    def refused(self, small: Some, users: int) -> DataError:
        """What is said where some have too little, and are not to be left out."""

    def settle(self) -> None:
        """Refuse the rows that could not be used, or warn of them; all users have been read.

        Raises:
            DataError: they are refused.
        """

    def end(self) -> tuple[dict[str, Any], list[str]]:
        """When all have been read: what else there is to be known of all, and what a run says of them.

        Raises:
            DataError: the users do not fit each other.
        """
        return {}, []

    @abstractmethod
    def materials(self, users: Crowd, about: dict[str, Any]) -> Materials:
        """What a run needs, of users who lie in a file; ``about`` is what is known of all of them."""


@singledispatch
def in_turn(kind: Kind, recipe: Recipe, base: Base | None, validates: bool) -> Turns[Any] | None:
    """How a kind's users are read in turn; None where it, or this recipe, needs all of them at once."""
    return None


def write_in_turn(turns: Turns[Any], folder: Path) -> None:
    """Read everybody and write down who has enough.

    Raises:
        DataError: a source cannot be read, or somebody has too little and is not to be left out.
    """
    with PopulationWriter(folder) as writer, _Heard() as heard:
        left_out, told = 0, list[str]()
        try:
            with open(folder / SKIPPED, "w", encoding="utf-8") as skipped:
                for one in (*turns.before(folder), turns):
                    users, small = _written(one, writer, Spool(folder), skipped)
                    left_out += small.count
                    if small.count:
                        lack = f"as they have {turns.too_little}: {small.told}"
                        told.append(f"{small.count} of {users} users are left out, {lack}")
        finally:
            turns.close()
        more, said = turns.end()
        about = {"told": [*told, *said], "heard": heard.told, "skipped": left_out}
        writer.finish(about | more)


def _written(turns: Turns[Any], writer: PopulationWriter, spool: Spool, skipped: TextIO) -> tuple[int, Some]:
    """How many there were, and who was left out."""
    users, empty, small = 0, Some(), Some()
    for name, read in turns.readers(spool):
        users += 1
        try:
            found = read()
        except NoTextError as error:
            empty.add(name, str(error))
            found = turns.nobody(name)
        user = turns.encode(found)
        if (lack := turns.lack(user)) is not None:
            small.add(name, lack)
            skipped.write(json.dumps([name, getattr(lack, "what", lack)]) + "\n")
        elif turns.skips or not (empty.count or small.count):  # else there is no run, but who is named
            turns.keep(writer, found, user)
    spool.remove()
    turns.settle()
    _check(turns, empty, small, users)
    return users, small


def _check(turns: Turns[Any], empty: Some, small: Some, users: int) -> None:
    if empty.count and (not turns.skips or empty.count == users):
        if empty.count == 1:
            raise DataError(next(iter(empty.first.values())))
        raise DataError(f"{empty.count} of {users} users have no {turns.nothing}: {empty.told}")
    if small.count and not turns.skips:
        raise turns.refused(small, users)
    if small.count == users:
        raise DataError(f"all {users} users have {turns.too_little}: {small.told}")
