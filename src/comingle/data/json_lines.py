"""Files with a JSON mapping on every line."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from comingle.errors import DataError

Row = Mapping[str, Any]


def read_json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file, plain or compressed by .xz or .gz, each with its place; blank lines are passed over.

    Raises:
        DataError: the file cannot be read, or a line is no mapping.
    """
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", _row(line, f"{path}: line {number}")
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as JSON lines: {error}") from None


def _row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is no mapping of columns to values")
    return row
