"""Collections of users, in memory or read on access, and indexed sequences of user names.

:class:`StoredNames` reads a folder with these files:

- ``names.text``: all names, concatenated as UTF-8.
- ``names.ends``: the end of each name in ``names.text``, in bytes.
- ``names.hashes``: 64-bit hashes of the names, sorted.
- ``names.index``: the user number that belongs to each of these hashes.
- ``names.sha256``: the digest of all names (:func:`digest_names`).
"""

from __future__ import annotations

import hashlib
import random
import shutil
import warnings
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar, overload, runtime_checkable

import numpy as np
from jaxtyping import Int64

from comingle.utils.errors import DataError
from comingle.utils.names import name_problem

MAX_HASHED_NAMES = 10_000
"""Largest number of names for which :func:`draw_users` hashes each name; above it, it samples user numbers."""


class IndexedNames(Sequence[str]):
    """Sequence of names whose ``index`` and ``in`` need no linear search."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """SHA-256 digest of the names in their order, in hex."""

    def __contains__(self, value: object) -> bool:
        """Return whether a value is one of the names, by looking up its index."""
        try:
            return isinstance(value, str) and self.index(value) >= 0  # `index` raises an error for an unknown name
        except ValueError:
            return False


class NumberedNames(IndexedNames):
    """Names that consist of a prefix and a number: ``user-0``, ``user-1`` and so on.

    Args:
        prefix: Beginning of all names.
        count: Number of names.
    """

    def __init__(self, prefix: str, count: int):
        """Name ``count`` users by a prefix and their number, without storing the names."""
        self.prefix, self.size = prefix, count

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        """Return the name at a position, made from the prefix and the position; for a slice, a list of names."""
        if isinstance(at, slice):
            return [f"{self.prefix}{i}" for i in range(self.size)[at]]
        return f"{self.prefix}{range(self.size)[at]}"

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the number in a name, which is its position in the sequence.

        Args:
            value: The name.
            start: Ignored, as a name has one position; part of ``Sequence.index``.
            stop: Ignored, like ``start``.

        Raises:
            ValueError: No user has the name.
        """
        digits = value.removeprefix(self.prefix)
        if digits.isdecimal():
            number = int(digits)
            if value == f"{self.prefix}{number}" and number < self.size:
                return number
        raise ValueError(f"no user {value!r}")

    @property
    def digest(self) -> str:
        """SHA-256 digest of the prefix and the number of names, in hex."""
        return digest_names([self.prefix, str(len(self))])


FILES = ("names.text", "names.ends", "names.index", "names.hashes", "names.sha256")
"""Files of a folder of names."""
NAMES, _ENDS, _INDEX, _HASHES, _SUM = FILES


class StoredNamesWriter:
    """Writer that appends names to a folder one at a time.

    Args:
        folder: Existing folder for the files.
    """

    def __init__(self, folder: Path):
        """Open the files for names and their ends; the folder must exist."""
        self.folder = folder
        self._open_files = ExitStack()
        self._text_file = self._open_files.enter_context(open(folder / NAMES, "wb"))  # noqa: SIM115 (closed by close)
        self._ends_file = self._open_files.enter_context(open(folder / _ENDS, "wb"))  # noqa: SIM115 (closed by close)
        self._end = 0
        """End of the last name in the text, in bytes."""
        self._hashes = array("Q")
        """64-bit hash of each name; :meth:`finish` makes an index of them."""
        self._digest = hashlib.sha256()
        """Digest of all names so far."""

    def add(self, name: str) -> None:
        """Append a name.

        Raises:
            DataError: The name is not a valid user name.
        """
        if problem := name_problem([name]):
            raise DataError(problem)
        content = name.encode()
        is_first = len(self._hashes) == 0
        separator = b"" if is_first else b"\0"
        self._digest.update(separator + content)  # gives the same digest as `digest_names`
        self._hashes.append(_hash(content))
        self._text_file.write(content)
        self._end += len(content)
        self._ends_file.write(self._end.to_bytes(8, "little"))

    def close(self) -> None:
        """Close the files."""
        self._open_files.close()

    def finish(self) -> StoredNames:
        """Write the index for finding names, and return all names.

        Raises:
            DataError: A name occurs twice.
        """
        self.close()
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        user_of_hash = hashes.argsort(kind="stable")  # user number of each sorted hash
        sorted_hashes = hashes[user_of_hash]
        user_of_hash.astype("<i8").tofile(self.folder / _INDEX)
        sorted_hashes.astype("<u8").tofile(self.folder / _HASHES)
        (self.folder / _SUM).write_text(self._digest.hexdigest(), encoding="utf-8")
        names = StoredNames(self.folder)
        # Equal names have equal hashes, which are neighbours; equal hashes may belong to different names.
        equals_next = sorted_hashes[1:] == sorted_hashes[:-1]
        for position in np.flatnonzero(equals_next).tolist():
            name, next_name = names[int(user_of_hash[position])], names[int(user_of_hash[position + 1])]
            if name == next_name:
                raise DataError(f"user {name!r} occurs twice; names must be unique")
        return names


class StoredNames(IndexedNames):
    """Memory-mapped names of a folder that :class:`StoredNamesWriter` has written: all names, or consecutive ones.

    Args:
        folder: Folder with the files of the names.
        span: Numbers of the users whose names the sequence holds; all users by default.

    Raises:
        DataError: The files have inconsistent lengths.
    """

    def __init__(self, folder: Path, span: range | None = None):
        """Memory-map the files of a folder, so that a name is read from disk only when it is accessed.

        Args:
            folder: Folder that :class:`StoredNamesWriter` has written.
            span: Numbers of the users whose names this sequence holds, which are consecutive; None for all users.

        Raises:
            DataError: The files have inconsistent lengths.
        """
        self.folder = folder
        self._text = _map_array(folder / NAMES, "u1")
        """All names, concatenated."""
        self._ends = _map_array(folder / _ENDS, "<i8")
        """End of each name in the text, in bytes."""
        self._hashes = _map_array(folder / _HASHES, "<u8")
        """Sorted hashes of the names, to find a name by binary search."""
        self._index = _map_array(folder / _INDEX, "<i8")
        """User number of each of these hashes."""
        self._digest_of_folder = (folder / _SUM).read_text(encoding="utf-8")
        self.span = range(len(self._ends)) if span is None else span
        text_end = int(self._ends[-1]) if len(self._ends) else 0
        have_equal_lengths = len(self._ends) == len(self._index) == len(self._hashes)
        if text_end != len(self._text) or not have_equal_lengths:
            raise DataError(f"{folder}: the files of user names are inconsistent")

    def __len__(self) -> int:
        return len(self.span)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        """Return the name at a position of this sequence, or for a slice a sequence that reads its names on access."""
        if isinstance(at, slice):
            return StoredNames(self.folder, self.span[at])
        return self._name_of(self.span[at])

    def __iter__(self) -> Iterator[str]:
        return map(self._name_of, self.span)

    def _name_of(self, number: int) -> str:
        """Return the name of a user of the folder, given by number."""
        start = int(self._ends[number - 1]) if number > 0 else 0
        end = int(self._ends[number])
        return self._text[start:end].tobytes().decode()

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the position of a name in the sequence.

        Args:
            value: The name.
            start: Ignored, as a name has one position; part of ``Sequence.index``.
            stop: Ignored, like ``start``.

        Raises:
            ValueError: No user has the name.
        """
        name_hash = np.uint64(_hash(value.encode()))
        first = int(np.searchsorted(self._hashes, name_hash))
        for position in range(first, len(self._hashes)):  # several names may have the same hash
            if self._hashes[position] != name_hash:
                break
            number = int(self._index[position])
            if number in self.span and self._name_of(number) == value:
                return self.span.index(number)
        raise ValueError(f"no user {value!r}")

    @property
    def digest(self) -> str:
        """SHA-256 digest of the names in their order, in hex.

        The digest of all names of the folder is stored there. That of a sequence with only some of them is computed.
        """
        is_whole_folder = len(self) == len(self._ends)
        if is_whole_folder:
            return self._digest_of_folder
        return hashlib.sha256("\0".join(self).encode()).hexdigest()

    def copy_to(self, folder: Path) -> None:
        """Copy the files to another folder; they have all names, even if this sequence holds only some of them."""
        for name in FILES:
            shutil.copyfile(self.folder / name, folder / name)


def _map_array(path: Path, dtype: str) -> np.ndarray:
    """Map a file into memory as a read-only array; an empty file, which cannot be mapped, is an empty array."""
    is_empty = path.stat().st_size == 0
    if is_empty:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _hash(content: bytes) -> int:
    """Return a 64-bit hash of a name's bytes; :class:`StoredNames` looks names up by it."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@runtime_checkable
class Named(Protocol):
    """Protocol of objects with a user name."""

    @property
    def name(self) -> str:
        """Name of the user."""
        ...


User = TypeVar("User", bound=Named)


class UserCollection(Sequence[User]):
    """Users of a run, with what is known about all of them without reading each.

    Attributes:
        in_memory: Whether a user's data stays in memory once it is read.
        sizes: Amount of train, valid and test data of each user; None if unknown.
        about: Totals over all users, by name, that were counted when the users were written.
        digest: Digest that identifies all users' data; empty for users in memory.
    """

    in_memory: bool
    digest: str = ""
    sizes: Int64[np.ndarray, "users splits"] | None = None
    about: Mapping[str, int] = MappingProxyType({})

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """Names of all users, in order."""

    @property
    @abstractmethod
    def largest_users(self) -> Sequence[int]:
        """Numbers of one or more users, among them one with the most training data.

        The largest number of local steps in a round is computed from these users, without reading all others.
        """

    @abstractmethod
    def select(self, numbers: Sequence[int]) -> UserCollection[User]:
        """Return the users with these numbers."""


class UserList(tuple[User, ...], UserCollection[User]):
    """Users in memory."""

    __slots__ = ()
    in_memory = True

    @property
    def names(self) -> Sequence[str]:
        """Names of all users, in order."""
        return tuple(user.name for user in self)

    @property
    def largest_users(self) -> Sequence[int]:
        """Numbers of all users, since their sizes can be compared in memory."""
        return range(len(self))

    def select(self, numbers: Sequence[int]) -> UserList[User]:
        """Return the users with these numbers."""
        return UserList(self[number] for number in numbers)


class LazyPopulation(UserCollection[User]):
    """Users that are created on access."""

    in_memory = False

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[int], User],
        *,
        digest: str,
        largest: int = 0,
        cache_size: int = 1024,
        sizes: Int64[np.ndarray, "users splits"] | None = None,
        about: Mapping[str, int] = MappingProxyType({}),
    ):
        """Initialise the population without creating users.

        Args:
            names: Names of all users.
            make: Function that creates a user from its number.
            digest: Digest that identifies the users' data.
            largest: Number of a user with the most training data, from whose data the largest number of local steps in
                a round is computed. Ignored if ``sizes`` is given, from which it follows.
            cache_size: Number of most recently used users that are cached.
            sizes: Amount of train, valid and test data of each user, such as tokens or conversations; None if unknown.
            about: Numbers about all users together, by name, such as the number with validation data ("valid").
        """
        self._names, self.digest, self.cache_size, self.sizes, self.about = names, digest, cache_size, sizes, about
        self.largest = largest
        if sizes is not None:
            train_sizes = sizes[:, 0]
            self.largest = int(train_sizes.argmax())
        self.make = lru_cache(cache_size)(make)

    @property
    def names(self) -> Sequence[str]:
        """Names of all users, in order."""
        return self._names

    @property
    def largest_users(self) -> Sequence[int]:
        """Number of a user with the most training data, as the only entry of a list."""
        return [self.largest]

    def select(self, numbers: Sequence[int]) -> UserCollection[User]:
        """Return the users with these numbers.

        For a ``range`` of consecutive numbers, the result is a lazy population that shares the cache of this one. For
        another sequence of numbers, the users are read into memory.
        """
        if not isinstance(numbers, range):
            return UserList(self[number] for number in numbers)

        def user_at(position: int) -> User:
            return self[numbers[position]]

        span = slice(numbers.start, numbers.stop)
        return LazyPopulation(
            self.names[span],
            user_at,
            digest=self.digest,
            largest=numbers.index(self.largest) if self.largest in numbers else 0,
            cache_size=1,  # users are cached by this population
            sizes=None if self.sizes is None else self.sizes[span],
            about=self.about,  # the totals stay those of all users
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> User: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[User]: ...
    def __getitem__(self, at: int | slice) -> User | Sequence[User]:
        """Return the user with a number, created if it is not in the cache; for a slice, a list of users."""
        if isinstance(at, slice):
            return [self.make(i) for i in range(len(self))[at]]
        return self.make(range(len(self))[at])

    def __iter__(self) -> Iterator[User]:
        return map(self.make, range(len(self)))


def as_users(users: Iterable[User]) -> UserCollection[User]:
    """Return the users as a collection; return a collection unchanged."""
    return users if isinstance(users, UserCollection) else UserList(users)


class UserNumbers:
    """Lookup table from user names to user numbers.

    Args:
        names: Names of all users, in the order of their numbers.
    """

    def __init__(self, names: Sequence[str]):
        """Look up numbers in a sequence of names."""
        self._names = names

    def __call__(self, names: Sequence[str]) -> list[int]:
        """Return the user number of each name, in the order of the names.

        Raises:
            KeyError: A name is unknown; a ``ValueError`` if the names are :class:`IndexedNames`.
        """
        if isinstance(self._names, IndexedNames):
            return [self._names.index(name) for name in names]
        return [self._by_name[name] for name in names]

    def existing(self, names: Sequence[str]) -> list[int]:
        """Return the user numbers of the names that belong to a user; skip unknown names."""
        known = self._names if isinstance(self._names, IndexedNames) else self._by_name
        return self([name for name in names if name in known])

    @cached_property
    def _by_name(self) -> Mapping[str, int]:
        """Number of each user by name; not used for :class:`IndexedNames`, which find a number without this table."""
        return {name: i for i, name in enumerate(self._names)}


def draw_users(names: Sequence[str], count: int, *purpose: str | int) -> list[int]:
    """Draw ``count`` users uniformly without replacement; return their numbers in ascending order.

    Among at most :data:`MAX_HASHED_NAMES` users, the draw takes those with the smallest hash of (purpose, name), so the
    result does not depend on the order of ``names``. Among more, it samples numbers with a generator seeded by
    ``purpose``, which is fast, but the result depends on the order.

    Args:
        names: Names of all users.
        count: Number of users to draw.
        *purpose: Purpose and seed of the draw, which determine its result.
    """
    from comingle.utils.seeds import derive  # imports torch, which reading documents does not need

    numbers = range(len(names))
    if len(names) > MAX_HASHED_NAMES:
        return sorted(random.Random(derive(*purpose)).sample(numbers, count))
    hashes = [derive(*purpose, name) for name in names]
    by_hash = sorted(numbers, key=hashes.__getitem__)
    return sorted(by_hash[:count])


def digest_names(names: Sequence[str]) -> str:
    """Return the SHA-256 digest of names in their order, in hex."""
    if isinstance(names, IndexedNames):
        return names.digest
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def __getattr__(name: str) -> object:
    """Return :class:`LazyPopulation` for its former name, with a warning.

    Raises:
        AttributeError: The module has no attribute of another name.
    """
    if name != "Crowd":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("comingle.data.populations.Crowd is now LazyPopulation", DeprecationWarning, stacklevel=2)
    return LazyPopulation
