"""Streaming readers: read, encode and check one user after another.

Each kind of data has a subclass of :class:`StreamingReader`. A run in memory keeps the users as a list
(:func:`comingle.training.kinds.base`); otherwise they are written to disk (:mod:`comingle.data.population_files`).
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

if TYPE_CHECKING:  # these import torch, which reading documents does not need
    from comingle.config.settings import DataSection
    from comingle.data.splits import UserText
    from comingle.models.base import Base

Read = TypeVar("Read")

MAX_LISTED_USERS = 10
"""Number of users that a message lists by name."""


def list_shortages(shortages: Mapping[str, str], count: int | None = None) -> str:
    """Return users with too little data as one line, the first ten by name: ``'ada' (no text) ... and 5 more``.

    Args:
        shortages: Problem of each user, by name; at least of the first ten users.
        count: Number of users with a problem; by default the length of ``shortages``.
    """
    if count is None:
        count = len(shortages)
    first_shortages = islice(shortages.items(), MAX_LISTED_USERS)
    listed = ", ".join(f"{name!r} ({shortage})" for name, shortage in first_shortages)
    if count > MAX_LISTED_USERS:
        listed += f" and {count - MAX_LISTED_USERS} more"
    return listed


@dataclass(kw_only=True)
class FirstUsers:
    """Counter of users for a message that lists the first ten users with details.

    Args:
        first: Details of the first users, by name, such as what each has too little of.
        count: Number of all users that were added.
    """

    first: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def add(self, name: str, detail: object) -> None:
        """Count a user, and keep the detail for the message if the user is one of the first.

        Args:
            name: Name of the user.
            detail: What the message says about the user, such as its shortage of data.
        """
        self.count += 1
        # One more is kept than is listed; the advice at the end of the message considers it too.
        if len(self.first) <= MAX_LISTED_USERS:
            self.first[name] = detail

    @property
    def listed(self) -> str:
        """First ten users with their details, and the number of the others."""
        details = {name: describe_shortage(detail) for name, detail in self.first.items()}
        return list_shortages(details, self.count)


def describe_shortage(shortage: object) -> str:
    """Return a shortage as text: its attribute ``what`` if it has one, such as "train has 10 tokens"."""
    return str(getattr(shortage, "what", shortage))


# -------------------------------------------------------------------- rows and documents


class DocumentLists(ABC):
    """Append-only sequence of lists of documents, which can be read by number after :meth:`finish`."""

    @abstractmethod
    def add(self, documents: Sequence[str]) -> None:
        """Append a list of documents, such as the training documents of a user."""

    @abstractmethod
    def __getitem__(self, number: int) -> Sequence[str]: ...

    def finish(self) -> None:  # noqa: B027 (lists in memory need nothing)
        """End writing; from now on lists can be read."""

    def remove(self) -> None:  # noqa: B027 (lists in memory need nothing)
        """Delete the files of lists that are stored on disk."""


class ListedDocuments(DocumentLists):
    """Lists of documents in memory."""

    def __init__(self) -> None:
        """Create an empty sequence, in memory."""
        self._lists: list[Sequence[str]] = []

    def add(self, documents: Sequence[str]) -> None:
        """Append a list without copying it."""
        self._lists.append(documents)

    def __getitem__(self, number: int) -> Sequence[str]:
        return self._lists[number]


class StoredDocuments(DocumentLists):
    """Lists of documents in the files ``path.pieces`` and ``path.ends``; only one list is in memory at a time.

    Args:
        path: Path of the files without their suffix.
    """

    def __init__(self, path: Path):
        """Create both files, empty; :meth:`add` appends to them.

        Args:
            path: Path of the files without their suffix.
        """
        self._lists_path = path.with_suffix(".pieces")
        """File with each list as JSON, one after another."""
        self._ends_path = path.with_suffix(".ends")
        """File with the end of each list in the other file, in bytes."""
        self._lists_file: Any = open(self._lists_path, "wb")  # noqa: SIM115 (closed by finish or remove)
        self._ends_file: Any = open(self._ends_path, "wb")  # noqa: SIM115 (closed by finish)
        self._end = 0

    def add(self, documents: Sequence[str]) -> None:
        """Append a list as JSON, which can store unpaired surrogates, and its end in bytes."""
        content = json.dumps(list(documents)).encode()
        self._end += len(content)
        self._lists_file.write(content)
        self._ends_file.write(self._end.to_bytes(8, "little"))

    def finish(self) -> None:
        """End writing, and reopen the files for reading."""
        self._lists_file.close()
        self._ends_file.close()
        self._ends = np.memmap(self._ends_path, dtype="<i8", mode="r")
        self._lists_file = open(self._lists_path, "rb")  # noqa: SIM115 (closed by remove)

    def __getitem__(self, number: int) -> Sequence[str]:
        """Read the list with a number, counted from 0 in the order of :meth:`add`; call :meth:`finish` before."""
        start = int(self._ends[number - 1]) if number > 0 else 0
        end = int(self._ends[number])
        self._lists_file.seek(start)
        return json.loads(self._lists_file.read(end - start))

    def remove(self) -> None:
        """Delete the file with the lists and the file with their ends."""
        self._lists_file.close()
        self._ends_file.close()
        self._lists_path.unlink(missing_ok=True)
        self._ends_path.unlink(missing_ok=True)


class Rows(ABC):
    """Store of the rows of all users, which groups the rows by user and split."""

    users: dict[str, Any]
    """Users with rows, in the order of their first rows."""

    @abstractmethod
    def fill(
        self,
        rows: Iterable[tuple[str, str, Any]],
        *,
        pack: Callable[[Any], bytes] = bytes,
        unpack: Callable[[bytes], Any] = bytes,
    ) -> None:
        """Store the rows, as Python objects in memory or as bytes in a file.

        Args:
            rows: User, split and content of each row; iterated once.
            pack: Converts the content of a row to bytes, for a file.
            unpack: Inverse of ``pack``.
        """

    @abstractmethod
    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
        """Yield each of these users with the contents of its rows, in order, by split."""

    @abstractmethod
    def new_document_lists(self, name: str) -> DocumentLists:
        """Create an empty sequence of document lists, in memory or on disk like these rows.

        Args:
            name: Name of its folder on disk; each sequence of these rows needs another one.
        """

    def remove(self) -> None:  # noqa: B027 (nothing is left in memory)
        """Delete the files."""


class ListedRows(Rows):
    """Store of rows in memory."""

    def __init__(self) -> None:
        """Create an empty store of rows, in memory."""
        self.users: dict[str, Any] = {}
        """Rows of each user by split, such as ``{"ada": {"train": [...]}}``."""

    def fill(
        self,
        rows: Iterable[tuple[str, str, Any]],
        *,
        pack: Callable[[Any], bytes] = bytes,
        unpack: Callable[[bytes], Any] = bytes,
    ) -> None:
        """Store the rows in memory, grouped by user and split.

        Args:
            rows: User, split and content of each row; the content is stored as it is.
            pack: Not used, as no row is written to a file.
            unpack: Not used.
        """
        for user, split, content in rows:
            self.users.setdefault(user, {}).setdefault(split, []).append(content)

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
        """Yield users with the contents of their rows by split, such as ``("ada", {"train": [...]})``.

        Args:
            names: Names of the users.
        """
        for name in names:
            yield name, self.users[name]

    def new_document_lists(self, name: str) -> DocumentLists:
        """Create an empty sequence of document lists in memory."""
        return ListedDocuments()


_ROW = np.dtype([("user", "<i4"), ("split", "<i4"), ("end", "<i8")])
"""Entry of the index of rows: numbers of user and split, and end of the content in bytes."""


class StoredRows(Rows):
    """Store of rows in a file below ``folder``; only the rows of one user are in memory at a time."""

    def __init__(self, folder: Path):
        """Start an empty store; :meth:`fill` creates its two files in the folder."""
        self.folder = folder
        self._contents_path, self._index_path = folder / "rows.bin", folder / "rows.index"
        self.users: dict[str, Any] = {}
        """Number of each user with rows, by name."""
        self._splits: dict[str, int] = {}
        """Number of each split, by name."""
        self._unpack: Callable[[bytes], Any] = bytes
        """Converts stored bytes to the content of a row."""

    def fill(
        self,
        rows: Iterable[tuple[str, str, Any]],
        *,
        pack: Callable[[Any], bytes] = bytes,
        unpack: Callable[[bytes], Any] = bytes,
    ) -> None:
        """Write the rows' contents as bytes to one file, and the user, split and end of each row to another.

        Args:
            rows: User, split and content of each row.
            pack: Converts the content of a row to bytes.
            unpack: Inverse of ``pack``, for :meth:`groups`.
        """
        self._unpack = unpack
        end = 0  # of the row in the file of contents, in bytes
        with open(self._contents_path, "wb") as contents_file, open(self._index_path, "wb") as index_file:
            for user, split, content in rows:
                user_number = self.users.setdefault(user, len(self.users))
                split_number = self._splits.setdefault(split, len(self._splits))
                packed = pack(content)
                end += len(packed)
                contents_file.write(packed)
                index_file.write(np.array((user_number, split_number, end), dtype=_ROW).tobytes())

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
        """Yield each of these users with the contents of its rows by split, such as ``("ada", {"train": [...]})``."""
        if not self.users:  # no rows; an empty file cannot be memory-mapped
            return
        index = np.memmap(self._index_path, dtype=_ROW, mode="r")  # "user", "split" and "end" of each row
        # Row numbers sorted by user: those of user u are sorted_rows[starts[u] : starts[u + 1]].
        sorted_rows = index["user"].argsort(kind="stable")
        sorted_rows = sorted_rows.astype(np.int32 if len(index) < 2**31 else np.int64)  # int32 saves memory
        num_rows_of_user = np.bincount(index["user"], minlength=len(self.users))
        starts = np.concatenate([[0], num_rows_of_user.cumsum()])
        splits = list(self._splits)
        with open(self._contents_path, "rb") as contents_file:
            for name in names:
                user = self.users[name]  # its number
                contents_by_split: dict[str, list[Any]] = {}
                for row in sorted_rows[starts[user] : starts[user + 1]].tolist():
                    start = int(index["end"][row - 1]) if row > 0 else 0
                    end = int(index["end"][row])
                    contents_file.seek(start)
                    content = self._unpack(contents_file.read(end - start))
                    split = splits[int(index["split"][row])]
                    contents_by_split.setdefault(split, []).append(content)
                yield name, contents_by_split

    def new_document_lists(self, name: str) -> DocumentLists:
        """Return empty lists for users' documents, which are stored in files beside the rows, not in memory.

        Args:
            name: Name of the files.
        """
        return StoredDocuments(self.folder / name)

    def remove(self) -> None:
        """Delete the file with the rows' contents and the file with their index."""
        for path in (self._contents_path, self._index_path):
            path.unlink(missing_ok=True)


# -------------------------------------------------------------------- readers


def read_each(
    readers: Iterable[tuple[str, Callable[[], Read]]],
    *,
    make_empty: Callable[[str], Read],
    skips: bool,
    noun: str,
    report: Callable[[], None],
) -> Generator[Read, None, None]:
    """Yield the data of each user; after the last one, raise one error that lists all users without data.

    Users without data are yielded as empty users. With ``skips`` the caller skips them, so there is an error only if no
    user has data.

    Args:
        readers: Name of each user, and the function that reads its data.
        make_empty: Returns an empty user with this name.
        skips: Whether the caller skips users with too little data.
        noun: Name of the data in the error, such as "conversations".
        report: Called after the last user; raises an error for bad rows or warns of them.

    Raises:
        DataError: A reader raised it, users have no data, or bad rows are refused.
    """
    num_users, empty_users = 0, FirstUsers()
    for name, read in readers:
        num_users += 1
        try:
            user = read()
        except NoTextError as error:
            empty_users.add(name, str(error))
            user = make_empty(name)
        yield user
        del user, read  # free memory before the next user is read
    report()
    num_empty = empty_users.count
    some_have_data = num_empty < num_users
    if num_empty == 0 or (skips and some_have_data):
        return
    if num_empty == 1:
        (message,) = empty_users.first.values()
        raise DataError(message)
    raise DataError(f"{num_empty} of {num_users} users have no {noun}: {empty_users.listed}")


class SmallUserFilter(Generic[User]):
    """Filter that counts users and skips those with too little data.

    Args:
        skips: Skip users with too little data; otherwise the filter lets all users pass.
    """

    too_little: str = ""
    """Phrase for messages about skipped users, such as "too little text"."""

    def __init__(self, *, skips: bool):
        """Create a filter that has seen no user.

        Args:
            skips: Skip users with too little data; otherwise let all users pass.
        """
        self.skips = skips
        self.num_users = 0
        """Number of users seen so far, including the skipped ones."""
        self.skipped_users = FirstUsers()
        """Number of skipped users, and what the first ones have too little of."""
        self.on_skip: Callable[[str, str], object] = lambda name, shortage: None
        """Called with the name of each skipped user, and what it has too little of."""
        self._skip_warning = ""
        """Warning about skipped users, set by :meth:`raise_if_all_skipped`."""

    def shortage(self, user: User) -> object:
        """Return what a user has too little of (see :func:`describe_shortage`); None if the user has enough data.

        The base class treats all users as having enough.
        """
        return None

    def admit(self, user: User) -> bool:
        """Count a user and return True, or record the user as skipped and return False.

        Users are skipped if they have too little data and the filter was created with ``skips``.
        """
        self.num_users += 1
        if not self.skips:
            return True
        shortage = self.shortage(user)
        if shortage is None:
            return True
        self.skipped_users.add(user.name, shortage)
        self.on_skip(user.name, describe_shortage(shortage))
        return False

    def raise_if_all_skipped(self) -> None:
        """Raise an error if all users are skipped; otherwise store the warning about the skipped ones.

        Call it after the last user. The warning is in ``skip_warnings``.

        Raises:
            DataError: All users are skipped.
        """
        num_skipped = self.skipped_users.count
        if not self.skips or num_skipped == 0:
            return
        listed = self.skipped_users.listed
        if num_skipped == self.num_users:
            raise DataError(f"all {self.num_users} users have {self.too_little}: {listed}")
        self._skip_warning = f"skipped {num_skipped} of {self.num_users} users, which have {self.too_little}: {listed}"

    @property
    def skip_warnings(self) -> list[str]:
        """Warning about skipped users, as a list of zero or one lines."""
        return [self._skip_warning] if self._skip_warning else []


class StreamingReader(SmallUserFilter[User], ABC, Generic[Read, User]):
    """Base class of streaming readers, which read, encode and check a recipe's users one after another.

    ``Read`` is the type of a user before it is encoded, ``User`` the type that a run uses.

    Args:
        data: The recipe's section ``data``.
        seed: Seed of the splits.
        skips: Skip users with too little data.
    """

    data: DataSection
    seed: int
    """Seed of the splits."""
    base: Base | None = None
    """Base model whose tokenizer encodes the data, if there is one; may be loaded on first access."""

    def __init__(self, data: DataSection, seed: int, *, skips: bool = False):
        """Create a reader, which reads nothing yet; arguments are described at the class."""
        super().__init__(skips=skips)
        self.data, self.seed = data, seed

    @abstractmethod
    def sources(self) -> list[str]:
        """Return the files and folders that are read, or names of other sources."""

    def key(self) -> list[object]:
        """Return settings that affect how users are encoded and checked, as part of the key of the cache of users.

        Later runs with the same key read the encoded users from the cache. The caller adds the state of the sources,
        the recipe's section and the seed.
        """
        return []

    @abstractmethod
    def read(self, rows: Rows) -> Generator[Read, None, None]:
        """Read the sources and yield the data of one user after another.

        Args:
            rows: An empty store, in which a reader of a table with rows of many users groups them by user.

        Raises:
            DataError: A source cannot be read, or users without data are refused.
        """

    @abstractmethod
    def encode(self, unencoded: Read) -> User:
        """Return a user as a run uses it, for example with tokens instead of documents.

        Args:
            unencoded: The user as it was read.
        """

    def refuse(self, small_users: FirstUsers) -> DataError:
        """Return the error for users with too little data; subclasses that check the amount of data override this."""
        raise AssertionError(f"users with too little data: {small_users.listed}")

    def check(self, user: User) -> None:
        """Check that a user's encoded data suffices for training; the base class accepts all users.

        :meth:`stream` calls this method for each user that it does not skip.

        Raises:
            DataError: The user's data does not suffice.
        """

    def inspect(self, unencoded: Read, user: User) -> None:
        """Check a user's data and collect warnings; called for each user before it is written to the cache on disk.

        The base class does nothing. In a run without the cache, all users are in memory and are checked together.

        Args:
            unencoded: The user as read.
            user: The user as encoded, which will be written.

        Raises:
            DataError: The user's data cannot be used for training.
        """

    def report(self) -> None:
        """Raise an error or warn about rows that could not be encoded; called after the last user.

        The base class has no such rows.

        Raises:
            DataError: Rows could not be encoded and are refused.
        """

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return facts about all users, which are stored with the users, and warnings for the start of every run.

        Called after the last user. The base class has no facts, and warns only of skipped users.

        Raises:
            DataError: The users are inconsistent with each other.
        """
        return {}, self.skip_warnings

    def common(self, users: Sequence[User], facts: Mapping[str, Any]) -> object:
        """Return data that all users share besides the base model, such as a task with its loss.

        The base class returns None.

        Args:
            users: All users of the run.
            facts: Facts about all users, the first result of :meth:`summary`.
        """
        return None

    def text(self, unencoded: Read) -> UserText | None:
        """Return a user's documents as plain text, to compare the splits; None if the data is not text."""
        return None

    def stream(self, unencoded_users: Iterable[Read]) -> Iterator[tuple[Read, User]]:
        """Encode users and yield each user that is not skipped, together with its data before encoding.

        Args:
            unencoded_users: The users' data, from :meth:`read`.

        Raises:
            DataError: A user cannot be used, or all users would be skipped.
        """
        for unencoded in unencoded_users:
            user = self.encode(unencoded)
            is_skipped = not self.admit(user)
            if not is_skipped:
                self.check(user)
                yield unencoded, user
            del unencoded, user  # free memory before the next user is read
        self.report()
        self.raise_if_all_skipped()
