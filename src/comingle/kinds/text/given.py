"""Text that a program hands over: documents, tables with a column of them, paths, or splits of these."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from comingle.data.bad_rows import BadRows, BadRowsError
from comingle.data.partition import UserText
from comingle.data.repeated import Repeated
from comingle.data.rows import iterate_texts, table_of
from comingle.data.sources import read_documents
from comingle.kinds.text.reading import collect, split_parts, split_whole, token_limits
from comingle.kinds.text.section import TextSection
from comingle.utils.errors import DataError, NoTextError

HANDED = "a list of texts, a file or folder, a datasets.Dataset with a column text, or {train, valid, test} of these"

_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}
"""What splits may be called; ``validation`` is what data sets of the hub have."""


def takes(data: Any) -> bool:
    """Whether it is one user's text, as far as the first document tells."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(_SPLITS) and all(map(_is_source, data.values()))
    return _is_source(data)


def _is_source(data: Any) -> bool:
    if isinstance(data, str | os.PathLike) or _column(data) is not None:
        return True
    return isinstance(data, Sequence) and not isinstance(data, bytes) and (not data or isinstance(data[0], str))


def _column(data: Any) -> str | None:
    """The column of a table that holds its documents: ``text``, or the only one that there is."""
    columns = getattr(data, "column_names", None)
    if not isinstance(columns, list):
        return None
    if "text" in columns:
        return "text"
    holds = getattr((getattr(data, "features", None) or {}).get(columns[0]), "dtype", "") if len(columns) == 1 else ""
    return columns[0] if holds in ("string", "large_string") else None


def given_texts(data: TextSection, given: Mapping[str, Any], seed: int, bad: BadRows | None = None) -> list[UserText]:
    """Split the documents of all users, as :func:`comingle.kinds.text.reading.read_users` does with files.

    Args:
        data: The recipe's section.
        given: Documents, a table or a path by user, or a mapping of these by split.
        seed: Seed of the splits.
        bad: Collects rows that cannot be used; None for a collection of its own.

    Raises:
        DataError: A user's data is not text, or users without text are refused.
    """
    limits = token_limits(data, list(given))
    bad, repeated = bad or BadRows(data.on_bad_row), Repeated(data.deduplicate)
    readers: dict[str, Callable[[], UserText]] = {}
    for name, source in given.items():
        if isinstance(source, Mapping):
            sources = {_SPLITS[str(split)]: partial(_documents, bad, name, part) for split, part in source.items()}
            readers[name] = partial(split_parts, name, sources, data.split, seed, limits[name], repeated)
        else:
            read = partial(_documents, bad, name, source)
            readers[name] = partial(split_whole, name, read, data.split, seed, limits[name], repeated)
    return collect(data, readers, bad, repeated)


def _documents(bad: BadRows, name: str, source: Any, most: int | None) -> list[str]:
    """Documents that are not blank, up to about ``most`` bytes of text."""
    if isinstance(source, str | os.PathLike):
        return _from_path(bad, name, os.fspath(source), most)
    where, documents, left = f"user {name!r}", [], most
    for document in _each(bad, source, where):
        if left is not None and left <= 0:
            break
        left = None if left is None else left - len(document.encode())
        documents.append(document)
    if not documents:
        raise NoTextError(f"{where}: no text in it, a user needs at least one document")
    return documents


def _from_path(bad: BadRows, name: str, path: str, most: int | None) -> list[str]:
    try:
        return read_documents(path, most=most, bad=bad)
    except (NoTextError, BadRowsError):
        raise
    except DataError as error:
        raise DataError(f"user {name!r}: {error!s:.300}; text itself is given as a list of documents") from None


def _each(bad: BadRows, source: Any, where: str) -> Iterator[str]:
    if (column := _column(source)) is not None:
        yield from (document for (document,) in iterate_texts(table_of(source, where, "train"), (column,), bad))
        return
    for number, document in enumerate(source, start=1):
        if not isinstance(document, str):
            bad.add(f"{where}: document {number}", f"is {reprlib.repr(document)}; allowed: text")
        elif document.strip():
            yield document
