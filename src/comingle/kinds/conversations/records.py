"""Rows as they are, each with its split and its place: for data of which a row is more than a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comingle.data.files import check_regular
from comingle.data.formats import COMPRESSIONS, builder_of
from comingle.data.hub import HUB_PREFIX
from comingle.data.loading import open_splits
from comingle.data.rows import Rows, iterate_batches, values_of
from comingle.kinds.conversations.json_lines import Row, read_json_lines

Record = tuple[str, str, Row]
"""The split that a row is in, where it stands, as ``chats.jsonl: line 3``, and the row."""

_LINES = (".jsonl", ".ndjson")


def read_records(source: str | Sequence[str], *, config: str | None = None) -> Iterator[Record]:
    """The rows of a file, of several, of a folder of them, or of a data set of the hub (``config`` of it).

    A file's own split is "train". Files of JSON lines are read without the package ``datasets``.

    Raises:
        DataError: a source that is missing, unknown or unreadable.
    """
    for one in [source] if isinstance(source, str) else source:
        path = Path(one).expanduser()
        if not one.startswith(HUB_PREFIX) and path.exists():
            check_regular(path)
        if not one.startswith(HUB_PREFIX) and path.is_file() and _is_lines(path):
            yield from (("train", f"{one}: {place}", row) for place, row in read_json_lines(path))
            continue
        with open_splits(one, name=config) as splits:
            for split, rows in splits:
                yield from iterate_records(rows, f"{one}: ", split)


def iterate_records(rows: Rows, where: str, split: str) -> Iterator[Record]:
    """The rows of one split of a data set that is open; class labels by their names.

    Raises:
        DataError: the rows cannot be read to their end.
    """
    number = 0
    for batch in iterate_batches(rows, where):
        columns = {name: values_of(batch, name, rows) for name in batch}
        for values in zip(*columns.values(), strict=True):
            number += 1
            yield split, f"{where}row {number}", dict(zip(columns, values, strict=True))


def field_of(row: Row, column: str) -> Any:
    """What a row has in a column, or under ``meta.set`` in the field ``set`` of a column ``meta``."""
    if column in row:
        return row[column]
    head, _, field = column.partition(".")
    inner = row.get(head)
    return inner.get(field) if field and isinstance(inner, dict) else None


def has_column(row: Row, column: str) -> bool:
    """Whether a row has such a column or field, be it without a value."""
    head, _, field = column.partition(".")
    inner = row.get(head)
    return column in row or (head in row and (inner is None or (isinstance(inner, dict) and field in inner)))


def _is_lines(path: Path) -> bool:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSIONS]
    return builder_of(path) is not None and suffixes[-1:] != [] and suffixes[-1] in _LINES
