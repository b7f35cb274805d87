"""Populations of users made on demand, and their names.

A folder of names has ``names.text`` (all names one after another), ``names.ends`` (where each ends), ``names.index``
(the numbers of the users in the order of their names' hashes), ``names.hashes`` (these hashes), and ``names.sha256``
(the digest of them all, :func:`digest_names`).
"""

from __future__ import annotations

import hashlib
import random
import shutil
import warnings
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar, overload, runtime_checkable

import numpy as np
from jaxtyping import Int64

from comingle.utils.errors import DataError
from comingle.utils.names import name_problem
from comingle.utils.seeds import derive

LOTS = 10_000
"""Up to so many names each has a lot of its own in every draw; of more, numbers are drawn, which takes no longer."""


class Known(Sequence[str]):
    """Names whose ``index`` takes no search."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A digest of the names in their order."""

    def __contains__(self, value: object) -> bool:
        try:
            return isinstance(value, str) and self.index(value) >= 0
        except ValueError:
            return False


class Numbered(Known):
    """Names that are numbers behind a prefix: ``user-0``, ``user-1`` and so on."""

    def __init__(self, prefix: str, count: int):
        self.prefix, self.size = prefix, count

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return [f"{self.prefix}{i}" for i in range(self.size)[at]]
        return f"{self.prefix}{range(self.size)[at]}"

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the number in a name.

        Raises:
            ValueError: no user has the name.
        """
        number = value.removeprefix(self.prefix)
        if number.isdecimal() and value == f"{self.prefix}{int(number)}" and int(number) < self.size:
            return int(number)
        raise ValueError(f"no user {value!r}")

    @property
    def digest(self) -> str:
        """A digest of the prefix and the number of names."""
        return digest_names([self.prefix, str(len(self))])


FILES = ("names.text", "names.ends", "names.index", "names.hashes", "names.sha256")
NAMES, _ENDS, _INDEX, _HASHES, _SUM = FILES


class NamesWriter:
    """Writes names into a folder as they come."""

    def __init__(self, folder: Path):
        self.folder, self._end = folder, 0
        self._open = ExitStack()
        self._text, self._ends = (self._open.enter_context(open(folder / name, "wb")) for name in (NAMES, _ENDS))  # noqa: SIM115 (closed with it)
        self._digest, self._hashes = hashlib.sha256(), array("Q")

    def add(self, name: str) -> None:
        """Write a name.

        Raises:
            DataError: it cannot be one.
        """
        if problem := name_problem([name]):
            raise DataError(problem)
        content = name.encode()
        self._digest.update((b"\0" if len(self._hashes) else b"") + content)
        self._hashes.append(_hash(content))
        self._text.write(content)
        self._end += len(content)
        self._ends.write(self._end.to_bytes(8, "little"))

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def finish(self) -> Names:
        """Write the index; return all names.

        Raises:
            DataError: a name occurs twice.
        """
        self.close()
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        order = hashes.argsort(kind="stable")
        order.astype("<i8").tofile(self.folder / _INDEX)
        hashes[order].astype("<u8").tofile(self.folder / _HASHES)
        (self.folder / _SUM).write_text(self._digest.hexdigest(), encoding="utf-8")
        names = Names(self.folder)
        ranked = hashes[order]
        for at in np.flatnonzero(ranked[1:] == ranked[:-1]).tolist():
            if (name := names[int(order[at])]) == names[int(order[at + 1])]:
                raise DataError(f"user {name!r} twice; names must differ")
        return names


class Names(Known):
    """The names of a folder, or a span of them.

    Raises:
        DataError: its files do not fit each other.
    """

    def __init__(self, folder: Path, span: range | None = None):
        self.folder = folder
        self._text, self._ends = _map(folder / NAMES, "u1"), _map(folder / _ENDS, "<i8")
        self._index, self._hashes = _map(folder / _INDEX, "<i8"), _map(folder / _HASHES, "<u8")
        self.span = range(len(self._ends)) if span is None else span
        self._sum = (folder / _SUM).read_text(encoding="utf-8")
        end = int(self._ends[-1]) if len(self._ends) else 0
        if end != len(self._text) or not len(self._ends) == len(self._index) == len(self._hashes):
            raise DataError(f"{folder}: names of users, in files that do not fit each other")

    def __len__(self) -> int:
        return len(self.span)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return Names(self.folder, self.span[at])
        return self._name(self.span[at])

    def __iter__(self) -> Iterator[str]:
        return map(self._name, self.span)

    def _name(self, number: int) -> str:
        start = int(self._ends[number - 1]) if number else 0
        return self._text[start : int(self._ends[number])].tobytes().decode()

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the number of a name.

        Raises:
            ValueError: no user has it.
        """
        key = np.uint64(_hash(value.encode()))
        for at in range(int(np.searchsorted(self._hashes, key)), len(self._hashes)):
            if self._hashes[at] != key:
                break
            if (number := int(self._index[at])) in self.span and self._name(number) == value:
                return self.span.index(number)
        raise ValueError(f"no user {value!r}")

    @property
    def digest(self) -> str:
        """A digest of the names in their order."""
        whole = len(self) == len(self._ends)
        return self._sum if whole else hashlib.sha256("\0".join(self).encode()).hexdigest()

    def copy_to(self, folder: Path) -> None:
        """Copy the files of all names, not only of a span, to another folder."""
        for name in FILES:
            shutil.copyfile(self.folder / name, folder / name)


def _map(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@runtime_checkable
class Named(Protocol):
    """What has the name of a user."""

    @property
    def name(self) -> str:
        """The user's name."""
        ...


User = TypeVar("User", bound=Named)


class LazyPopulation(Sequence[User]):
    """Users by number, made when they are asked for.

    Args:
        names: all users' names.
        make: makes the user of a number.
        digest: identifies the users' data.
        largest: the number of a user with most train data; not needed where ``sizes`` are given.
        at_hand: number of users that are kept, those used last.
        sizes: how much each user has to train, to validate and to test on.
        about: what is known of all users together.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[int], User],
        *,
        digest: str,
        largest: int = 0,
        at_hand: int = 1024,
        sizes: Int64[np.ndarray, "users splits"] | None = None,
        about: Mapping[str, int] = MappingProxyType({}),
    ):
        self.names, self.digest, self.at_hand, self.sizes, self.about = names, digest, at_hand, sizes, about
        self.largest = largest if sizes is None else int(sizes[:, 0].argmax())
        self.make = lru_cache(at_hand)(make)

    def part(self, numbers: range) -> LazyPopulation[User]:
        """Return a population of consecutive users."""
        span = slice(numbers.start, numbers.stop)
        return LazyPopulation(
            self.names[span],
            lambda number: self[numbers[number]],
            digest=self.digest,
            at_hand=1,
            sizes=None if self.sizes is None else self.sizes[span],
            about=self.about,
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> User: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[User]: ...
    def __getitem__(self, at: int | slice) -> User | Sequence[User]:
        if isinstance(at, slice):
            return [self.make(i) for i in range(len(self))[at]]
        return self.make(range(len(self))[at])

    def __iter__(self) -> Iterator[User]:
        return map(self.make, range(len(self)))


def listed(users: Sequence[User]) -> Sequence[User]:
    """Return a list of the users, but a lazy population as it is."""
    return users if isinstance(users, LazyPopulation) else list(users)


def part_of(users: Sequence[User], numbers: Sequence[int] | None) -> Sequence[User]:
    """Return the users of these numbers (None: all), without reading them where the population is lazy."""
    if numbers is None:
        return users
    if isinstance(users, LazyPopulation) and isinstance(numbers, range):
        return users.part(numbers)
    return [users[number] for number in numbers]


def names_of(users: Sequence[Named]) -> Sequence[str]:
    """Return all users' names, in order."""
    return users.names if isinstance(users, LazyPopulation) else tuple(user.name for user in users)


class Numbers:
    """The number of each name, which is looked up and not searched for."""

    def __init__(self, names: Sequence[str]):
        self._names = names

    def __call__(self, names: Sequence[str]) -> list[int]:
        """Those of these names."""
        if isinstance(self._names, Known):
            return [self._names.index(name) for name in names]
        return [self._by_name[name] for name in names]

    def there(self, names: Sequence[str]) -> list[int]:
        """Those of the names among these that there are."""
        known = self._names if isinstance(self._names, Known) else self._by_name
        return self([name for name in names if name in known])

    @cached_property
    def _by_name(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self._names)}


def drawn(names: Sequence[str], count: int, *purpose: str | int) -> list[int]:
    """So many of these users, by number, in ascending order; each as likely.

    Each has a lot from (purpose, name) and the lowest are drawn, so that the draw does not depend on the users' order;
    of more than :data:`LOTS` numbers are drawn, and it does.
    """
    if len(names) > LOTS:
        return sorted(random.Random(derive(*purpose)).sample(range(len(names)), count))
    lots = [derive(*purpose, name) for name in names]
    return sorted(sorted(range(len(names)), key=lots.__getitem__)[:count])


def digest_names(names: Sequence[str]) -> str:
    """Return a digest of names in their order."""
    return names.digest if isinstance(names, Known) else hashlib.sha256("\0".join(names).encode()).hexdigest()


def __getattr__(name: str) -> object:
    if name != "Crowd":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("comingle.data.populations.Crowd is now LazyPopulation", DeprecationWarning, stacklevel=2)
    return LazyPopulation
