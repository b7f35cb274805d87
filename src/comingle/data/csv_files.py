"""Rows of CSV and TSV files, every field as it is typed."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from comingle.data.compressed import OPENERS, UNREADABLE, open_bytes
from comingle.errors import DataError


def reads(config: Any, splits: Mapping[str, Sequence[str]]) -> bool:
    """Whether these files are here, and are read without any option of ``datasets`` but what parts the fields."""
    plain, own = vars(type(config)()), ("name", "version", "data_dir", "data_files", "description", "sep", "delimiter")
    files = [Path(file) for some in splits.values() for file in some]
    asks = any(vars(config)[key] != value for key, value in plain.items() if key not in own)
    return not asks and all(file.exists() and file.suffix.lower() in (".csv", ".tsv", *OPENERS) for file in files)


def read_csv(files: Sequence[str], sep: str) -> Iterator[dict[str, str]]:
    """The rows of files whose first line names the columns; of two columns of one name the first counts.

    ``datasets`` would guess types, and make one user of 007 and 7, and take a field too many in the first row for an
    index, so that texts become users.

    Raises:
        DataError: a row has more fields than there are columns, or quotes are not as they must be.
    """
    for file in files:
        with _opened(file, sep) as (columns, rows):
            for row in rows:
                if len(row) > len(columns):
                    raise csv.Error(f"{len(row)} fields, {len(columns)} columns; quote a text with {sep!r} in it")
                yield dict(zip(reversed(columns), [""] * (len(columns) - len(row)) + row[::-1], strict=True))


def columns_of(files: Sequence[str], sep: str) -> list[str]:
    """The columns of the first file, each once.

    Raises:
        DataError: it cannot be read.
    """
    with _opened(files[0], sep) as (columns, _):
        return list(dict.fromkeys(columns))


@contextmanager
def _opened(file: str, sep: str) -> Iterator[tuple[list[str], Iterator[list[str]]]]:
    """The columns and the rows that are not blank."""
    csv.field_size_limit(2**31 - 1)
    reader: Any = None
    try:
        with TextIOWrapper(open_bytes(Path(file)), encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=sep, strict=True)
            rows = filter(None, reader)
            yield next(rows, []), rows
    except (*UNREADABLE, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: line {reader.line_num if reader else 0}: {error}") from None
