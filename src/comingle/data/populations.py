"""Populations of users made on demand."""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Int64

from comingle.utils.seeds import derive

LOTS = 10_000
"""Up to so many names each has a lot of its own in every draw; of more, numbers are drawn, which takes no longer."""


class Known(Sequence[str]):
    """Names whose ``index`` is looked up and not searched for."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """By which the same names in the same order are known again."""

    def __contains__(self, value: object) -> bool:
        try:
            return isinstance(value, str) and self.index(value) >= 0
        except ValueError:
            return False


class Crowd(Sequence[Any]):
    """Users by number, made when they are asked for; the last ``at_hand`` of them are kept.

    ``digest`` says whether their data is the same; ``largest`` is the number of one of those who have most, unless
    ``sizes`` say how much everybody has to train on, to validate and to test. ``about`` is what is known of all of
    them together.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[int], Any],
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

    def part(self, numbers: range) -> Crowd:
        """Some who follow one another, as a crowd of their own."""
        span = slice(numbers.start, numbers.stop)
        return Crowd(
            self.names[span],
            lambda number: self[numbers[number]],
            digest=self.digest,
            at_hand=1,
            sizes=None if self.sizes is None else self.sizes[span],
            about=self.about,
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self.make(i) for i in range(len(self))[at]]
        return self.make(range(len(self))[at])

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(len(self)))


def listed(users: Sequence[Any]) -> Sequence[Any]:
    """The same as a list, but for a crowd."""
    return users if isinstance(users, Crowd) else list(users)


def names_of(users: Sequence[Any]) -> Sequence[str]:
    """Everybody's name, in order."""
    return users.names if isinstance(users, Crowd) else tuple(user.name for user in users)


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
    """By which the same names in the same order are known again."""
    return names.digest if isinstance(names, Known) else hashlib.sha256("\0".join(names).encode()).hexdigest()
