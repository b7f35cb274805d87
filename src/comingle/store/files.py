"""A file of records of one size, which are written to places that nobody refers to any more.

A place is never written twice between two snapshots unless by the same row, and not at all while a checkpoint that is
kept, or the best round, refers to it: so whatever a process is doing when it is killed, what the last checkpoint says
is there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from comingle.store.records import check, seal


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
        self._free: deque[int] = deque()

    # ---------------------------------------------------------------- places

    def place(self, before: int) -> int:
        """Where a row is to be written that was at ``before``, -1 for nowhere."""
        if before >= 0 and self._born[before] > self.since:
            return before
        at = self._free.popleft() if self._free else self.end
        self.end = max(self.end, at + 1)
        if at >= len(self._born):
            self._born = np.concatenate([self._born, np.zeros(max(1024, len(self._born)), dtype=np.int64)])
        self._born[at] = self.since + 1
        return at

    def keep(self, used: Sequence[Int64[np.ndarray, " _"]]) -> None:
        """Only these places are referred to, and not written over from now on."""
        self.end = max(self.end, *(int(places.max(initial=-1)) + 1 for places in used))
        taken = np.zeros(self.end, dtype=bool)
        for places in used:
            taken[places] = True
        born = np.zeros(max(self.end, len(self._born)), dtype=np.int64)
        born[: len(self._born)] = self._born
        self._born, self._free = born, deque(np.flatnonzero(~taken).tolist())
        self.snapshot()

    def snapshot(self) -> None:
        """What is there now is not written over before :meth:`keep` is told that nobody refers to it."""
        self.since += 1

    # ---------------------------------------------------------------- bytes

    def write(self, places: Sequence[int], records: np.ndarray) -> None:
        """Records to places.

        Raises:
            OSError: the disk does not take it.
        """
        try:
            for at, record in zip(places, records, strict=True):
                seal(record)
                content, done = record.data, 0
                while done < self.size_bytes:
                    done += os.pwrite(self._handle, content[done:], at * self.size_bytes + done)
        except OSError as error:
            error.filename = str(self.path)  # it need not be the run's
            raise

    def read(self, places: Sequence[int], rows: Sequence[int], into: Sequence[np.ndarray]) -> None:
        """Records of these rows.

        Raises:
            RunError: one is not what was written.
        """
        for at, row, record in zip(places, rows, into, strict=True):
            os.preadv(self._handle, [record.data], at * self.size_bytes)
            check(record, row, self.path)

    def to_disk(self) -> None:
        """Return when everything would outlive a power cut."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
