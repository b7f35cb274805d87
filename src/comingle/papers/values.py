"""Data sets of the Hub whose rows are not documents: a value for each column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from comingle.data.rows import choose_columns, iterate_batches
from comingle.data.sources import open_splits
from comingle.errors import DataError, list_names


def iterate_values(source: str, columns: Sequence[Sequence[str]], *, split: str) -> Iterator[tuple[Any, ...]]:
    """Rows of one split of a data set as they are decoded, an image as ``PIL.Image``: one value for each column.

    Of each group of names in ``columns`` the first that the data set has is read.

    Raises:
        DataError: an unknown source or split, none of the names of a group, or rows that cannot be read.
    """
    with open_splits(source) as splits:
        for own_split, rows in splits:
            if own_split == split:
                chosen = choose_columns(rows.column_names, columns, source)
                for batch in iterate_batches(rows.select_columns(chosen), source):
                    yield from zip(*(batch[name] for name in chosen), strict=True)
                return
        split_names = list_names(own_split for own_split, _ in splits)
        raise DataError(f"{source}: no split {split!r}; found: {split_names}")
