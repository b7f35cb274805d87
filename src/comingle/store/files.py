"""A file of records of one size, which are written to places that nobody refers to any more.

A place is never written twice between two snapshots unless by the same row, and not at all while a checkpoint that is
kept, or the best round, refers to it: so whatever a process is doing when it is killed, what the last checkpoint says
is there. What others say that were put aside need not be: sums tell.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt32

from comingle.store.records import UNKNOWN, check, seal

LOOKED_AT = 1024
"""Up to so many records are looked at when a checkpoint is loaded; the others when they are read."""


class RecordFile:
    """Records ``size_bytes`` long; ``path`` may be of a file that no folder has any more."""

    def __init__(self, path: Path, size_bytes: int, *, writes: bool, lives: bool = True):
        self.path, self.size_bytes = path, size_bytes
        flags = (os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY) | getattr(os, "O_NOFOLLOW", 0)
        self._handle = os.open(path, flags, 0o600)
        if not lives:
            os.unlink(path)
        self.end = 0
        self.since = 0
        """Which snapshot was the last; places that were first written after it may be written again."""
        self._born = np.zeros(0, dtype=np.int64)
        self._sums = np.zeros(0, dtype=np.uint32)
        """Of the records by place; touched by the thread that reads and writes, by others while it does neither."""
        self._free: deque[int] = deque()

    # ---------------------------------------------------------------- places

    def place(self, before: int) -> int:
        """Where a row is to be written that was at ``before``, -1 for nowhere."""
        if before >= 0 and self._born[before] > self.since:
            return before
        at = self._free.popleft() if self._free else self.end
        self.end = max(self.end, at + 1)
        self._born = _grown(self._born, at + 1)
        self._born[at] = self.since + 1
        return at

    def keep(self, used: Sequence[Int64[np.ndarray, " _"]]) -> None:
        """Only these places are referred to, and not written over from now on."""
        self.end = max(self.end, *(int(places.max(initial=-1)) + 1 for places in used))
        taken = np.zeros(self.end, dtype=bool)
        for places in used:
            taken[places] = True
        self._born, self._free = _grown(self._born, self.end), deque(np.flatnonzero(~taken).tolist())
        self.snapshot()

    def snapshot(self) -> None:
        """What is there now is not written over before :meth:`keep` is told that nobody refers to it."""
        self.since += 1

    # ---------------------------------------------------------------- sums

    def sums(self, places: Int64[np.ndarray, " some"]) -> UInt32[np.ndarray, " some"]:
        """Of the records at these places, -1 for nowhere."""
        self._sums = _grown(self._sums, int(places.max(initial=-1)) + 1)
        found, there = np.full(len(places), UNKNOWN, dtype=np.uint32), places >= 0
        found[there] = self._sums[places[there]]
        return found

    def expect(
        self, places: Int64[np.ndarray, " some"], rows: Int64[np.ndarray, " some"], sums: UInt32[np.ndarray, " some"]
    ) -> None:
        """Records of these rows are to have these sums, says a checkpoint; the heads of some are looked at now.

        Raises:
            RunError: one of them is another.
        """
        self._sums = _grown(self._sums, int(places.max(initial=-1)) + 1)
        self._sums[places] = sums
        some = slice(None, None, max(1, math.ceil(len(places) / LOOKED_AT)))
        for at, row, known in zip(places[some].tolist(), rows[some].tolist(), sums[some].tolist(), strict=True):
            head = os.pread(self._handle, 8, at * self.size_bytes)
            if known not in (int.from_bytes(head, sys.byteorder), UNKNOWN):
                self.read([at], [row], [np.empty(self.size_bytes, dtype=np.uint8)])  # says what is wrong

    # ---------------------------------------------------------------- bytes

    def write(self, places: Sequence[int], records: np.ndarray) -> None:
        """Records to places.

        Raises:
            OSError: the disk does not take it.
        """
        self._sums = _grown(self._sums, max(places, default=-1) + 1)
        try:
            for at, record in zip(places, records, strict=True):
                self._sums[at] = seal(record)
                content, done = record.data, 0
                while done < self.size_bytes:
                    done += os.pwrite(self._handle, content[done:], at * self.size_bytes + done)
        except OSError as error:
            error.filename = str(self.path)  # it need not be the run's
            raise

    def read(self, places: Sequence[int], rows: Sequence[int], into: Sequence[np.ndarray]) -> None:
        """Records of these rows.

        Raises:
            RunError: one is not what was written, or another than is expected.
        """
        self._sums = _grown(self._sums, max(places, default=-1) + 1)
        for at, row, record in zip(places, rows, into, strict=True):
            got = os.preadv(self._handle, [record.data], at * self.size_bytes)
            record[got:] = 0  # of a file that was cut off, else what happened to be in memory
            check(record, row, int(self._sums[at]), self.path)

    def to_disk(self) -> None:
        """Return when everything would outlive a power cut."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    """The same with room for so many, zeros at first."""
    more = size - len(array)
    return np.concatenate([array, np.zeros(max(1024, len(array), more), array.dtype)]) if more > 0 else array
