"""Streaming readers: users read, split and tokenised one after another, and their cache.

A kind registers its reader with :func:`in_turn`; users of other kinds are read all at once.

Populations are kept in the user's cache (:func:`comingle.utils.files.cache_folder`), readable by nobody else, under a
name that follows from what was read, by path, size and time of its files, and from all that decides on how it was
encoded. What nobody has used for 30 days goes. Sources that are no files (names of the hub, of plug-ins) are read anew
each time.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, singledispatch
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from filelock import FileLock, Timeout

from comingle.config import Recipe
from comingle.data.populations import Crowd
from comingle.data.text.streams import LISTED, list_small
from comingle.models.base import Base
from comingle.training.kinds.base import Kind, Materials
from comingle.training.storage.population import ABOUT, PopulationWriter, Spool
from comingle.utils.errors import DataError, NoTextError
from comingle.utils.files import cache_folder, make_once
from comingle.utils.records import expand_home

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


_FORM = 3
"""Of the files; what an older version has written is written anew."""

_DAYS_UNUSED = 30


def populated(recipe: Recipe, turns: Turns[Any]) -> tuple[Path, bool]:
    """The folder of a recipe's population, which is written where it is not there; and whether it was there.

    Of several processes on one machine one writes.

    Raises:
        DataError: the cache cannot be written to.
    """
    states = _digest(_states(turns.sources()))
    if states is None:
        folder = Path(tempfile.mkdtemp(prefix="comingle-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        write_in_turn(turns, folder)
        return folder, False
    decides = [_FORM, version("comingle"), recipe.data.model_dump(mode="json"), recipe.data_seed, turns.key(), states]
    home = cache_folder() / "populations"
    target = home / hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(home / f"{target.name}.lock"):
            there = (target / ABOUT).is_file()
            if not there:  # what tidies up may take single files
                shutil.rmtree(target, ignore_errors=True)
            make_once(target, partial(write_in_turn, turns))
            os.utime(target / ABOUT)
        _sweep(home)
    except OSError as error:
        told = f"{home}: cannot be written to: {error.strerror}; COMINGLE_CACHE names another place for it"
        raise DataError(told) from None
    return target, there


def _digest(states: Iterator[list[Any] | None]) -> str | None:
    """Of as many as there may be; None where there is one of what is no file."""
    digest = hashlib.sha256()
    for state in states:
        if state is None:
            return None
        digest.update(json.dumps(state).encode())
    return digest.hexdigest()


def _states(sources: list[str]) -> Iterator[list[Any] | None]:
    """By which a source is known again; None for what is no file or folder."""
    for source in sources:
        path = expand_home(source)
        if not os.path.exists(path):  # which a name that is too long is not either
            yield None
        elif path.is_dir():
            yield from _states_below(path)
        else:
            yield _state(path)


def _states_below(top: Path) -> Iterator[list[Any]]:
    """Folders behind links too, as a class may be one; each once, as links may go round."""
    seen = set[str]()
    for place, folders, files in os.walk(top, followlinks=True):
        real = os.path.realpath(place)
        yield [place, real]  # an empty folder may be a class
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (_state(Path(place) / name) for name in sorted(files))


def _state(path: Path) -> list[Any]:
    """Besides size and time, which an archive may set to what they were, when the file was last changed in any way."""
    try:
        found = path.stat()
    except OSError:  # a link to nowhere, of which reading says what there is to say
        return [str(path.absolute())]
    return [str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _sweep(home: Path) -> None:
    """Delete what nobody has used for long."""
    for about in home.glob(f"*/{ABOUT}"):
        # Another process may have been quicker, or be about to use it.
        with suppress(FileNotFoundError, Timeout), FileLock(home / f"{about.parent.name}.lock", blocking=False):
            if time.time() - about.stat().st_mtime > _DAYS_UNUSED * 86400:
                shutil.rmtree(about.parent, ignore_errors=True)
