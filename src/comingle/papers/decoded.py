"""Rows of data sets as they are decoded, images among them: for what is more than text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from comingle.data.row_files import Table
from comingle.data.tables import iterate_batches, open_splits
from comingle.utils.errors import DataError, list_names


def iterate_values(source: str, columns: Sequence[Sequence[str]], *, split: str) -> Iterator[tuple[Any, ...]]:
    """Rows of one split of a data set as they are decoded, an image as ``PIL.Image``: one value for each column.

    Of each group of names in ``columns`` the first that the data set has is read.

    Raises:
        DataError: an unknown source or split, none of the names of a group, or rows that cannot be read.
    """
    with open_splits(source, decoded=True) as splits:
        for own_split, rows in splits:
            if own_split == split:
                assert not isinstance(rows, Table)
                chosen = _choose_columns(rows.column_names, columns, source)
                for batch in iterate_batches(rows.select_columns(chosen), source):
                    yield from zip(*(batch[name] for name in chosen), strict=True)
                return
        split_names = list_names(own_split for own_split, _ in splits)
        raise DataError(f"{source}: no split {split!r}; found: {split_names}")


def _choose_columns(there: Sequence[str], wanted: Sequence[Sequence[str]], where: str) -> list[str]:
    """Of each group of names the first that was found."""
    chosen = [next((name for name in names if name in there), None) for names in wanted]
    for name, names in zip(chosen, wanted, strict=True):
        if name is None:
            raise DataError(f"{where}: no column {' or '.join(names)}; found: {list_names(there)}")
    return [name for name in chosen if name is not None]
