"""Files that may be compressed by .gz or .xz."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OPENERS: Mapping[str, Callable[[Path], Any]] = {"": lambda path: path.open("rb"), ".gz": gzip.open, ".xz": lzma.open}
"""How a file's bytes are opened, by its suffix."""

UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading such a file raises where it is damaged or cannot be opened."""


def open_bytes(path: Path) -> Any:
    """The file's bytes, decompressed as its suffix says."""
    return OPENERS.get(path.suffix.lower(), OPENERS[""])(path)
