"""Files that may be compressed by .gz or .xz, with a bound on how far a small file may expand."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OPENERS: Mapping[str, Callable[[Path], Any]] = {"": lambda path: path.open("rb"), ".gz": gzip.open, ".xz": lzma.open}
"""How a file's bytes are opened, by its suffix."""

UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading such a file raises where it is damaged or cannot be opened."""

MAX_EXPANSION = 200
"""Text compresses to a fifth, logs to a fiftieth; a file that expands further was made to fill memory."""

ALWAYS_EXPANDED = 64 << 20
"""Bytes that any file may expand to."""


def open_bytes(path: Path) -> Any:
    """Open a file for reading bytes, decompressed as its suffix says.

    Reading raises an ``OSError`` when a compressed file expands to more than 200 times its size and 64 MiB.
    """
    opener = OPENERS.get(path.suffix.lower())
    if opener is None:
        return OPENERS[""](path)
    return io.BufferedReader(_BoundedExpansion(opener(path), path.stat().st_size), buffer_size=1 << 16)


class _BoundedExpansion(io.RawIOBase):
    """The decompressed bytes of a file, up to a bound that follows from its compressed size."""

    def __init__(self, inner: Any, compressed_bytes: int):
        self._inner = inner
        self._left = max(ALWAYS_EXPANDED, MAX_EXPANSION * compressed_bytes)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._inner.read(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise OSError(f"expands to more than {MAX_EXPANSION} times its size; decompress it first if that is meant")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._inner.close()
        super().close()
