"""Streaming readers: what users have is read, encoded and checked one user after another.

A kind of data has one reader. In memory a run has the list of what it yields (:func:`comingle.training.kinds.base`); on
disk it is written into one file (:mod:`comingle.data.population_files`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from comingle.data.populations import User
from comingle.utils.errors import DataError, NoTextError

if TYPE_CHECKING:  # which imports torch, as reading documents does not
    from comingle.config.settings import DataSection
    from comingle.data.splits import UserText
    from comingle.models.base import Base

Read = TypeVar("Read")

LISTED = 10
"""Number of users that a message names."""


def list_small(shortages: Mapping[str, str], count: int | None = None) -> str:
    """List users and what is wrong with each: the first ten of ``count``, which is by default all of ``shortages``."""
    count = len(shortages) if count is None else count
    named = [f"{name!r} ({what})" for name, what in islice(shortages.items(), LISTED)]
    return ", ".join(named) + (f" and {count - LISTED} more" if count > LISTED else "")


@dataclass(kw_only=True)
class FirstUsers:
    """The number of users of whom something is to be said, and the first of them by name."""

    first: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def add(self, name: str, what: object) -> None:
        """Count a user; keep what is to be said of one of the first."""
        self.count += 1
        if len(self.first) <= LISTED:
            self.first[name] = what

    @property
    def listed(self) -> str:
        """The first ten, and the number of the others."""
        return list_small({name: describe_shortage(what) for name, what in self.first.items()}, self.count)


def describe_shortage(shortage: object) -> str:
    """Return what a user has too little of; some kinds of data attach advice to it."""
    return str(getattr(shortage, "what", shortage))


# -------------------------------------------------------------------- rows and documents


class DocumentLists(ABC):
    """Lists of documents that are added one after another, then read by number."""

    @abstractmethod
    def add(self, documents: Sequence[str]) -> None:
        """Add a list."""

    @abstractmethod
    def __getitem__(self, number: int) -> Sequence[str]: ...

    def finish(self) -> None:  # noqa: B027 (needed by files alone)
        """Add no more lists; from now on they can be read."""

    def remove(self) -> None:  # noqa: B027 (needed by files alone)
        """Delete what was written."""


class ListedDocuments(DocumentLists):
    """Lists of documents in memory."""

    def __init__(self) -> None:
        self._lists: list[Sequence[str]] = []

    def add(self, documents: Sequence[str]) -> None:
        """Keep a list as it is."""
        self._lists.append(documents)

    def __getitem__(self, number: int) -> Sequence[str]:
        return self._lists[number]


class StoredDocuments(DocumentLists):
    """Lists of documents in the files ``path.pieces`` and ``path.ends``; one is in memory at a time."""

    def __init__(self, path: Path):
        self._paths = path.with_suffix(".pieces"), path.with_suffix(".ends")
        self._files: list[Any] = [open(one, "wb") for one in self._paths]  # noqa: SIM115 (closed by finish or remove)
        self._end = 0

    def add(self, documents: Sequence[str]) -> None:
        """Write a list as JSON, which takes half a pair of surrogates as a document may have it."""
        content = json.dumps(list(documents)).encode()
        self._end += len(content)
        self._files[0].write(content)
        self._files[1].write(self._end.to_bytes(8, "little"))

    def finish(self) -> None:
        """Open the files for reading."""
        for file in self._files:
            file.close()
        self._ends = np.memmap(self._paths[1], dtype="<i8", mode="r")
        self._files = [open(self._paths[0], "rb")]  # noqa: SIM115 (closed by remove)

    def __getitem__(self, number: int) -> Sequence[str]:
        start = int(self._ends[number - 1]) if number else 0
        self._files[0].seek(start)
        return json.loads(self._files[0].read(int(self._ends[number]) - start))

    def remove(self) -> None:
        """Delete both files."""
        for file in self._files:
            file.close()
        for path in self._paths:
            path.unlink(missing_ok=True)


class Rows(ABC):
    """Rows of all users in the order of a file, grouped by user and split."""

    owners: dict[str, Any]
    """The users that have rows, in the order of their first rows."""

    @abstractmethod
    def fill(
        self,
        rows: Iterable[tuple[str, str, Any]],
        *,
        pack: Callable[[Any], bytes] = bytes,
        unpack: Callable[[bytes], Any] = bytes,
    ) -> None:
        """Take the user, split and content of each row.

        Args:
            rows: are read once.
            pack: writes the content of a row for a file.
            unpack: reads it.
        """

    @abstractmethod
    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
        """Yield the content of the rows of each of these users, by split and in order."""

    @abstractmethod
    def documents(self, name: str) -> DocumentLists:
        """Return an empty sequence of lists of documents; ``name`` is unique."""

    def remove(self) -> None:  # noqa: B027 (nothing is left in memory)
        """Delete what was written."""


class ListedRows(Rows):
    """Rows in memory."""

    def __init__(self) -> None:
        self.owners: dict[str, Any] = {}

    def fill(
        self,
        rows: Iterable[tuple[str, str, Any]],
        *,
        pack: Callable[[Any], bytes] = bytes,
        unpack: Callable[[bytes], Any] = bytes,
    ) -> None:
        """Keep the content as it is."""
        for owner, split, content in rows:
            self.owners.setdefault(owner, {}).setdefault(split, []).append(content)

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
        """Yield the rows of each of these users."""
        for name in names:
            yield name, self.owners[name]

    def documents(self, name: str) -> DocumentLists:
        """Return a list of lists."""
        return ListedDocuments()


_ROW = np.dtype([("owner", "<i4"), ("split", "<i4"), ("end", "<i8")])


class StoredRows(Rows):
    """Rows in a file of ``folder``; one user's are in memory at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._contents, self._index = folder / "rows.bin", folder / "rows.index"
        self.owners: dict[str, Any] = {}
        self._splits: dict[str, int] = {}
        self._unpack: Callable[[bytes], Any] = bytes

    def fill(
        self,
        rows: Iterable[tuple[str, str, Any]],
        *,
        pack: Callable[[Any], bytes] = bytes,
        unpack: Callable[[bytes], Any] = bytes,
    ) -> None:
        """Write the rows as they come."""
        end, self._unpack = 0, unpack
        with open(self._contents, "wb") as contents, open(self._index, "wb") as index:
            for owner, split, content in rows:
                number = self.owners.setdefault(owner, len(self.owners))
                part = self._splits.setdefault(split, len(self._splits))
                packed = pack(content)
                end += len(packed)
                contents.write(packed)
                index.write(np.array((number, part, end), dtype=_ROW).tobytes())

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
        """Read the rows of each of these users."""
        if not self.owners:
            return
        rows = np.memmap(self._index, dtype=_ROW, mode="r")
        order = rows["owner"].argsort(kind="stable").astype(np.int32 if len(rows) < 2**31 else np.int64)
        starts = np.concatenate([[0], np.bincount(rows["owner"], minlength=len(self.owners)).cumsum()])
        splits = list(self._splits)
        with open(self._contents, "rb") as contents:
            for name in names:
                number, found = self.owners[name], dict[str, list[Any]]()
                for at in order[starts[number] : starts[number + 1]].tolist():
                    start = int(rows["end"][at - 1]) if at else 0
                    contents.seek(start)
                    content = contents.read(int(rows["end"][at]) - start)
                    found.setdefault(splits[int(rows["split"][at])], []).append(self._unpack(content))
                yield name, found

    def documents(self, name: str) -> DocumentLists:
        """Return lists of documents in a file."""
        return StoredDocuments(self.folder / name)

    def remove(self) -> None:
        """Delete both files."""
        for path in (self._contents, self._index):
            path.unlink(missing_ok=True)


# -------------------------------------------------------------------- readers


def read_each(
    readers: Iterable[tuple[str, Callable[[], Read]]],
    without_data: Callable[[str], Read],
    *,
    skips: bool,
    data: str,
    settle: Callable[[], None],
) -> Generator[Read, None, None]:
    """Yield what each user has; when all have been read, refuse users without data unless they are left out later.

    Args:
        readers: the name of each user, and what reads its data.
        without_data: makes a user of this name who has none.
        skips: whether users with too little data are left out, unless that is all of them.
        data: noun for what users have.
        settle: refuses or reports rows that cannot be used, when all users have been read.

    Raises:
        DataError: a reader raised it, or users without data or rows are refused.
    """
    users, empty = 0, FirstUsers()
    for name, read in readers:
        users += 1
        try:
            found = read()
        except NoTextError as error:
            empty.add(name, str(error))
            found = without_data(name)
        yield found
        del found, read  # before the next user is read
    settle()
    if not empty.count or (skips and empty.count < users):
        return
    if empty.count == 1:
        raise DataError(next(iter(empty.first.values())))
    raise DataError(f"{empty.count} of {users} users have no {data}: {empty.listed}")


class SmallUsers(Generic[User]):
    """Counts users and leaves out those who have too little data.

    Args:
        skips: whether users with too little data are left out.
    """

    too_little: str = ""
    """What users who are left out have, in words."""

    def __init__(self, *, skips: bool):
        self.skips = skips
        self.users, self.left_out = 0, FirstUsers()
        self.on_skip: Callable[[str, str], object] = lambda name, what: None
        """Called with each user who is left out, and what it has too little of."""
        self._left_out_line = ""

    def shortage(self, user: User) -> object:
        """Return what a user has too little of (see :func:`describe_shortage`), or None."""
        return None

    def has_enough(self, user: User) -> bool:
        """Count a user; return whether it is not left out."""
        self.users += 1
        if not self.skips or (shortage := self.shortage(user)) is None:
            return True
        self.left_out.add(user.name, shortage)
        self.on_skip(user.name, describe_shortage(shortage))
        return False

    def require_some(self) -> None:
        """Check that not all users are left out.

        Raises:
            DataError: they are.
        """
        if not self.skips or not self.left_out.count:
            return
        count, users, listed = self.left_out.count, self.users, self.left_out.listed
        if count == users:
            raise DataError(f"all {users} users have {self.too_little}: {listed}")
        self._left_out_line = f"{count} of {users} users are left out, as they have {self.too_little}: {listed}"

    @property
    def left_out_lines(self) -> list[str]:
        """The warning about users who were left out, if there are some."""
        return [self._left_out_line] if self._left_out_line else []


class StreamingReader(SmallUsers[User], ABC, Generic[Read, User]):
    """Reads the users of a recipe one after another.

    ``Read`` is what a user has before it is encoded, ``User`` the user as a run has it.
    """

    data: DataSection
    seed: int
    """Seed of the splits."""
    base: Base | None = None
    """The base whose tokens users' data is encoded in, where there is one; may be loaded when it is asked for."""

    def __init__(self, data: DataSection, seed: int, *, skips: bool = False):
        super().__init__(skips=skips)
        self.data, self.seed = data, seed

    @abstractmethod
    def sources(self) -> list[str]:
        """Return the files and folders that are read, or names of other sources."""

    def key(self) -> list[object]:
        """Return what determines how users are encoded, besides their data, the recipe's section and the seed."""
        return []

    @abstractmethod
    def read(self, rows: Rows) -> Generator[Read, None, None]:
        """Yield what each user has; ``rows`` groups the rows of all users.

        Raises:
            DataError: a source cannot be read, or users without data are refused.
        """

    @abstractmethod
    def encode(self, read: Read) -> User:
        """Return the user as a run has it."""

    def refuse(self, small: FirstUsers) -> DataError:
        """Return the error for users who have too little data and are not left out."""
        raise AssertionError(small.listed)

    def check(self, user: User) -> None:
        """Check a user who is not left out.

        Raises:
            DataError: the user cannot be trained.
        """

    def inspect(self, read: Read, user: User) -> None:
        """Check a user who is not kept in memory, as a run in memory does later, and note what it warns of.

        Raises:
            DataError: the user cannot be trained.
        """

    def settle(self) -> None:
        """Refuse or report what could not be encoded; called when all users have been encoded.

        Raises:
            DataError: it is refused.
        """

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return what is known of all users together, and the warnings of a run with them.

        Raises:
            DataError: the users do not fit each other.
        """
        return {}, self.left_out_lines

    def common(self, users: Sequence[User], about: Mapping[str, Any]) -> object:
        """Return what users have in common besides the base; ``about`` is what :meth:`summary` returned."""
        return None

    def text(self, read: Read) -> UserText | None:
        """Return the documents of a user, where it has some."""
        return None

    def stream(self, read: Iterable[Read]) -> Iterator[tuple[Read, User]]:
        """Encode users and yield those who are not left out.

        Raises:
            DataError: a user cannot be used, or all would be left out.
        """
        for found in read:
            user = self.encode(found)
            if self.has_enough(user):
                self.check(user)
                yield found, user
            del found, user  # before the next user is read
        self.settle()
        self.require_some()
