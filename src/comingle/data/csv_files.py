"""Rows of CSV and TSV files, every field as it is typed."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from itertools import zip_longest
from pathlib import Path

from comingle.data.compressed import UNREADABLE, open_bytes
from comingle.errors import DataError

_LONGEST = 2**31 - 1


def read_csv(files: Sequence[str], sep: str) -> Iterator[dict[str, str]]:
    """The rows of files whose first line names the columns.

    ``datasets`` would guess types, and make one user of 007 and 7, and take a field too many in the first row for an
    index, so that texts become users.

    Raises:
        DataError: a row has more fields than there are columns, or quotes are not closed.
    """
    csv.field_size_limit(_LONGEST)
    for file in files:
        line = 0
        try:
            with TextIOWrapper(open_bytes(Path(file)), encoding="utf-8-sig", newline="") as lines:
                rows = csv.reader(lines, delimiter=sep, strict=True)
                columns = next(rows, [])
                if len(set(columns)) < len(columns):
                    raise csv.Error(f"two columns of one name: {', '.join(columns)}")
                line = rows.line_num
                for row in filter(None, rows):
                    if len(row) > len(columns):
                        raise csv.Error(f"{len(row)} fields, {len(columns)} columns; quote a text with {sep!r} in it")
                    line = rows.line_num
                    yield dict(zip_longest(columns, row, fillvalue=""))
        except (*UNREADABLE, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{file}: cannot be read beyond line {line}: {error}") from None
