"""Rows of tables: their columns and fields, texts with their users, data sets of ``datasets`` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from comingle.data.bad_rows import BadRows
from comingle.data.kinds import word_problem
from comingle.data.row_files import Row, Table, describe, name_in
from comingle.utils.errors import DataError, did_you_mean, list_names

_BATCH_ROWS = 1000

Rows = Any
"""A ``datasets.Dataset`` or ``IterableDataset``, classes that cannot be named here: their package is optional."""


def iterate_texts(table: Table, columns: Sequence[str], bad: BadRows) -> Iterator[tuple[str, ...]]:
    """Yield the named columns of every row that has them all; the first is the document, the others are names.

    Rows without a value in one of them, or whose document is blank, are passed over.

    Args:
        table: the rows.
        columns: the columns; ``meta.set`` is the field ``set`` of a column ``meta``.
        bad: collects rows whose document is no text, or whose name cannot be one.

    Raises:
        DataError: no row has one of the columns.
    """
    heads = [head for column in columns for head in (column, column.partition(".")[0])]
    names, missing = list(table.columns or ()), list(columns)
    if table.columns is not None:
        missing = [column for column in columns if column not in names and column.partition(".")[0] not in names]
        _require(missing, names, table.where)
    empty = True
    for place, row in table.read(bad, heads):
        empty = False
        names = names or list(row)
        missing = [column for column in missing if not has_column(row, column)]
        document, *others = (field_of(row, column) for column in columns)
        if document is None or any(other is None for other in others):
            continue
        with bad.row(f"{table.where}: {place}"):
            text = _document(document, columns[0])
            owners = [name_in(other, column) for other, column in zip(others, columns[1:], strict=True)]
            if text.strip():
                yield text, *owners
    if not empty:
        _require(missing, names, table.where)


def _require(missing: Sequence[str], names: Sequence[str], where: str) -> None:
    for column in missing:
        raise DataError(f"{where}: no column {column!r}; found: {list_names(names)}.{did_you_mean(column, names)}")


def _document(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, a document must be text")
    if not is_unicode(value):
        raise ValueError(f"column {column!r} holds half a pair of surrogates, which is no text")
    if problem := word_problem(value):
        raise ValueError(f"column {column!r} holds {problem}")
    return value


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: JSON may spell half a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def field_of(row: Row, column: str) -> Any:
    """Return the value of a column, or for ``meta.set`` of the field ``set`` in a column ``meta``; None without one."""
    if column in row:
        return row[column]
    head, _, field = column.partition(".")
    inner = row.get(head)
    return inner.get(field) if field and isinstance(inner, dict) else None


def has_column(row: Row, column: str) -> bool:
    """Return whether a row has such a column or field, with or without a value."""
    head, _, field = column.partition(".")
    inner = row.get(head)
    return column in row or (head in row and (inner is None or (isinstance(inner, dict) and field in inner)))


def table_of(rows: Rows, where: str, split: str) -> Table:
    """Return a split of a data set of ``datasets`` as a table; class labels by their names."""
    there = rows.column_names  # a stream may know its columns from a row alone

    def read(_: BadRows, wanted: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
        names = list(there or next(iter(rows), {}))
        chosen = names if wanted is None else [name for name in names if name in wanted]
        labels = {name: getattr((rows.features or {}).get(name), "names", None) for name in chosen}
        number = 0
        for batch in iterate_batches(rows.select_columns(chosen), where):
            columns = [_name_labels(batch[name], labels[name]) for name in chosen]
            for values in zip(*columns, strict=True):
                number += 1
                yield f"row {number}", dict(zip(chosen, values, strict=True))

    return Table(where=where, split=split, read=read, columns=tuple(there) if there else None)


def _name_labels(values: Sequence[Any], names: Sequence[str] | None) -> Sequence[Any]:
    """Class labels are stored as numbers; their names name the users."""
    return values if names is None else [None if value is None else names[value] for value in values]


def iterate_batches(rows: Rows, where: str) -> Iterator[dict[str, Any]]:
    """Rows, many at a time; a stream can also break while it is read."""
    try:
        yield from rows.iter(batch_size=_BATCH_ROWS)
    except DataError:
        raise
    except Exception as error:  # as in comingle.data.loading
        raise DataError(f"{where}: reading stopped: {describe(error)}") from error


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
