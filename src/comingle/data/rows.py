"""Rows of data sets as tuples of text: columns checked, class labels named, empty rows dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from itertools import islice
from typing import Any

from comingle.errors import DataError, did_you_mean, list_names

_BATCH_ROWS = 1000
_LISTED_CHARACTERS = 300

Rows = Any
"""A ``datasets.Dataset`` or ``IterableDataset``, classes that cannot be named here: their package is optional."""


def iterate_rows(rows: Rows, columns: Sequence[str], where: str) -> Iterator[tuple[str, ...]]:
    """The named columns of every row that has them all, as text; the first column is the document."""
    names = rows.column_names or list(next(iter(rows), {}))  # a stream may only know its columns from a row
    for column in columns:
        if _head(column, names) not in names:
            raise DataError(f"{where}: no column {column!r}; found: {list_names(names)}.{did_you_mean(column, names)}")
    heads = list(dict.fromkeys(_head(column, names) for column in columns))
    for batch in iterate_batches(rows.select_columns(heads), where):
        for document, *others in zip(*(values_of(batch, column, rows) for column in columns), strict=True):
            if document is None or any(other is None for other in others):
                continue
            if not isinstance(document, str):
                got = type(document).__name__
                raise DataError(f"{where}: column {columns[0]!r} holds {got}, a document must be text")
            if dates := [
                name for name, other in zip(columns[1:], others, strict=True) if isinstance(other, date | time)
            ]:
                raise DataError(f"{where}: column {dates[0]!r} holds dates, which would be spelt anew; a name is text")
            if document.strip():
                yield document, *map(str, others)


def iterate_batches(rows: Rows, where: str) -> Iterator[dict[str, Any]]:
    """Rows, many at a time; a stream can also break while it is read."""
    try:
        yield from rows.iter(batch_size=_BATCH_ROWS)
    except DataError:
        raise
    except Exception as error:  # as in comingle.data.loading
        raise DataError(f"{where}: reading stopped: {describe(error)}") from error


def _head(column: str, there: Sequence[str]) -> str:
    """The column itself, or the one whose field it names, as ``meta`` for ``meta.set``."""
    return column if column in there else column.partition(".")[0]


def values_of(batch: Mapping[str, Any], column: str, rows: Rows) -> Sequence[Any]:
    """A column of a batch of rows, or a field of one; class labels by their names."""
    if column in batch:
        return _name_labels(batch[column], rows, column)
    head, _, field = column.partition(".")
    return [row.get(field) if isinstance(row, dict) else None for row in batch[head]]


def _name_labels(values: Sequence[Any], rows: Rows, column: str) -> Sequence[Any]:
    """Class labels are stored as numbers; their names are what people call the users."""
    names = getattr((rows.features or {}).get(column), "names", None)
    return values if names is None else [None if value is None else names[value] for value in values]


def describe(error: BaseException) -> str:
    """The root of an error in one line."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:_LISTED_CHARACTERS] or type(cause).__name__


def choose_users(groups: dict[str, Any], users: Sequence[str] | int | None, where: str) -> dict[str, Any]:
    """Those of all who are wanted: by name, or the first so many.

    Raises:
        DataError: somebody is not there, or there are too few.
    """
    if isinstance(users, int):
        if len(groups) < users:
            raise DataError(f"{where}: {users} users wanted, found {len(groups)}: {list_names(groups)}")
        return dict(islice(groups.items(), users))
    for wanted in users or ():
        if wanted not in groups:
            raise DataError(f"{where}: no user {wanted!r}; found: {list_names(groups)}.{did_you_mean(wanted, groups)}")
    return groups if users is None else {wanted: groups[wanted] for wanted in users}
