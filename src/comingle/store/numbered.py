"""Names of very many users, which nobody holds as a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from comingle.data.populations import Known, digest_names


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
        """The number in a name, which nobody looks for among the others.

        Raises:
            ValueError: nobody has it.
        """
        number = value.removeprefix(self.prefix)
        if number.isdecimal() and value == f"{self.prefix}{int(number)}" and int(number) < self.size:
            return int(number)
        raise ValueError(f"no user {value!r}")

    @property
    def digest(self) -> str:
        """Of the prefix and how many there are."""
        return digest_names([self.prefix, str(len(self))])
