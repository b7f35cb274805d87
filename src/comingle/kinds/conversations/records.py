"""Rows as they are, each with its split and its place: for data of which a row is more than a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from comingle.data.bad_rows import BadRows
from comingle.data.loading import read_tables
from comingle.data.row_files import Row

Record = tuple[str, str, Row]
"""The split that a row is in, its place, as ``chats.jsonl: line 3``, and the row."""


def read_records(
    source: str | Sequence[str], *, config: str | None = None, bad: BadRows | None = None
) -> Iterator[Record]:
    """Yield the rows of a file, of several, of a folder of them, or of a data set of the hub.

    Args:
        source: files, folders or names.
        config: the configuration of a data set of the hub.
        bad: collects rows that cannot be read; without it they are refused when reading ends.

    Raises:
        DataError: a source that is missing, unknown or unreadable.
    """
    collected = bad or BadRows()
    for table in read_tables(source, name=config):
        for place, row in table.read(collected, None):
            yield table.split, f"{table.where}: {place}", row
    if bad is None:
        collected.settle()
