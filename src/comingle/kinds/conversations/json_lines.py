"""Files with a JSON mapping on every line, read without the package ``datasets``, which not everybody installs.

For rows that say more than a text; :mod:`comingle.data.sources` reads the text of files in any format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from comingle.data.compressed import UNREADABLE, open_bytes
from comingle.errors import DataError

Row = Mapping[str, Any]


def read_json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file, plain or compressed by .xz or .gz, each with its place; blank lines are passed over.

    Raises:
        DataError: the file cannot be read, or a line is no mapping.
    """
    try:
        with TextIOWrapper(open_bytes(path), encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", _row(line, f"{path}: line {number}")
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as JSON lines: {error}") from None


def _row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is no mapping of columns to values")
    return row
