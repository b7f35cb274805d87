"""Files that may be compressed by .gz or .xz, with bounds on how far they may expand."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from comingle.utils.errors import DataError

OPENERS: Mapping[str, Callable[[Path], Any]] = {"": lambda path: path.open("rb"), ".gz": gzip.open, ".xz": lzma.open}
"""How a file's bytes are opened, by its suffix."""

UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading such a file raises where it is damaged or cannot be opened."""

MAX_EXPANSION = 200
"""Text compresses to a fifth, logs to a fiftieth; a file that expands further was made to fill memory."""

ALWAYS_EXPANDED = 64 << 20
"""Bytes that any file may expand to, whatever its size."""

MAX_EXPANDED = 8 << 30
"""Bytes that no compressed file may exceed, unless :data:`MAX_EXPANDED_VARIABLE` allows more."""

MAX_EXPANDED_VARIABLE = "COMINGLE_MAX_DECOMPRESSED_BYTES"
"""Environment variable with a limit in place of :data:`MAX_EXPANDED`, in bytes."""


def max_expanded() -> int:
    """Return the number of bytes that a compressed file may expand to.

    Raises:
        DataError: The environment variable is not a positive whole number.
    """
    given = os.environ.get(MAX_EXPANDED_VARIABLE, "").strip()
    if not given:
        return MAX_EXPANDED
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise DataError(f"{MAX_EXPANDED_VARIABLE}: got {given!r:.60}; allowed: a positive whole number of bytes")
    return int(given)


def open_bytes(path: Path) -> Any:
    """Open a file for reading bytes, decompressed as its suffix says.

    Reading raises an ``OSError`` when a compressed file expands to more than 200 times its size and 64 MiB, or to more
    than :func:`max_expanded` bytes.

    Raises:
        OSError: The file cannot be opened.
        DataError: The environment variable of the limit is not a number.
    """
    opener = OPENERS.get(path.suffix.lower())
    if opener is None:
        return OPENERS[""](path)
    limit = max_expanded()
    return io.BufferedReader(_BoundedExpansion(opener(path), path.stat().st_size, limit), buffer_size=1 << 16)


class _BoundedExpansion(io.RawIOBase):
    """The decompressed bytes of a file, up to a bound that follows from its compressed size, and up to a limit.

    Args:
        inner: The decompressing file.
        compressed_bytes: Size of the compressed file.
        limit: Bytes that are decompressed at most.
    """

    def __init__(self, inner: Any, compressed_bytes: int, limit: int):
        self._inner = inner
        self._left = max(ALWAYS_EXPANDED, MAX_EXPANSION * compressed_bytes)
        self._problem = f"expands to more than {MAX_EXPANSION} times its size; decompress it first if that is meant"
        if limit < self._left:
            self._left = limit
            self._problem = f"expands to more than {limit:,} bytes; set {MAX_EXPANDED_VARIABLE} if that is meant"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._inner.read(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise OSError(self._problem)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._inner.close()
        super().close()
