"""Users' names in files: found by number and by name, and none of them held in memory.

A folder has ``names.text`` (all names one after another), ``names.ends`` (where each ends), and ``names.index``: the
numbers of the users in the order of their names' hashes, behind which ``names.hashes`` has these. ``names.sha256`` is
the digest of them all (:func:`comingle.data.populations.digest_names`).
"""

from __future__ import annotations

import hashlib
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import overload

import numpy as np

from comingle.data.populations import Known
from comingle.utils.errors import DataError
from comingle.utils.names import name_problem

FILES = ("names.text", "names.ends", "names.index", "names.hashes", "names.sha256")
NAMES, _ENDS, _INDEX, _HASHES, _SUM = FILES


class NamesWriter:
    """Names as they come."""

    def __init__(self, folder: Path):
        self.folder, self._end = folder, 0
        self._open = ExitStack()
        self._text, self._ends = (self._open.enter_context(open(folder / name, "wb")) for name in (NAMES, _ENDS))  # noqa: SIM115 (closed with it)
        self._digest, self._hashes = hashlib.sha256(), array("Q")

    def add(self, name: str) -> None:
        """Write one down.

        Raises:
            DataError: no name.
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
        """All of them.

        Raises:
            DataError: one is there twice.
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
    """The names of a folder, or of some who follow one another.

    Raises:
        DataError: its files are torn.
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
        """The number of a name.

        Raises:
            ValueError: nobody has it.
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
        """By which the same names in the same order are known again."""
        whole = len(self) == len(self._ends)
        return self._sum if whole else hashlib.sha256("\0".join(self).encode()).hexdigest()

    def copy_to(self, folder: Path) -> None:
        """Have all of them, not only some, in another folder too."""
        for name in FILES:
            shutil.copyfile(self.folder / name, folder / name)


def _map(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
