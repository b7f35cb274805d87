"""Sources of users' documents: files, folders, and rows of data sets.

:mod:`comingle.data.tables` reads the rows.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from comingle.config.settings import PATHS, DataSection, OwnUsersSection
from comingle.data.files import (
    check_regular,
    has_row_suffix,
    is_saved_dataset,
    looks_like_path,
    read_text_file,
    read_text_folder,
    warn_longer,
)
from comingle.data.row_files import BadRows
from comingle.data.streaming import ListedRows, Rows
from comingle.data.tables import choose_users, iterate_texts, read_tables
from comingle.utils.errors import DataError, NoTextError
from comingle.utils.names import HUB_PREFIX, is_named, name_problem, parse_hub_name
from comingle.utils.records import expand_home

Groups = dict[str, dict[str, list[str]]]
"""Documents by user and split."""


def read_documents(
    path: str | Path, *, column: str = "text", max_bytes: int | None = None, bad_rows: BadRows | None = None
) -> list[str]:
    """Read the documents of one user.

    - A folder: each text file below it is a document (:func:`comingle.data.files.read_text_folder`). A folder written
      by ``save_to_disk``: its rows.
    - A ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file: ``column`` of its rows.
    - Any other file: blocks of paragraphs (:func:`comingle.data.files.read_text_file`).
    - ``demo:NAME``: a demo user.
    - ``hub:NAME?config=C&split=S&documents=N``: ``column`` of the rows of a data set of the hub. All splits are read
      unless one is named. With ``documents``, only the first N rows are streamed.

    Files may be compressed by ``.xz`` or ``.gz``. Blank documents are dropped.

    Args:
        path: Path or name of the source.
        column: Column that holds the documents of rows.
        max_bytes: Number of bytes of text after which reading ends, approximately, with a warning; None for all.
        bad_rows: Collects bad rows; None to raise an error for them.

    Raises:
        NoTextError: The source has no text.
        DataError: The path or column does not exist, the path is a device or pipe, or the file is unreadable.
    """
    collected = bad_rows or BadRows()
    if str(path).startswith(HUB_PREFIX):
        max_rows = parse_hub_name(str(path)).documents
        documents = _read_rows(str(path), column, max_rows, max_bytes, collected)
    elif is_named(str(path)):
        from comingle.data.demo import read_demo

        documents = read_demo(str(path))
    else:
        path = expand_home(path)
        check_regular(path)
        documents = [document for document in _read_path(path, column, max_bytes, collected) if document.strip()]
    if bad_rows is None:
        collected.report()
    if not documents:
        raise NoTextError(f"{path}: no text; at least one document is needed")
    return documents


def check_sources(data: DataSection) -> None:
    """Check that the files and folders that a recipe names for its users exist, before anything is loaded.

    Names of demo users and of data sets on the hub are not checked.

    Args:
        data: The recipe's section ``data``.

    Raises:
        DataError: A file or folder does not exist; names the key in the recipe.
    """
    is_built_in_kind = data.kind in ("text", "conversations", "samples")
    if not isinstance(data, OwnUsersSection) or not is_built_in_kind:
        return
    for name, files in (data.users or {}).items():
        for key in PATHS:
            source = getattr(files, key)
            is_url = source is not None and "://" in source
            if source is None or is_named(source) or is_url:
                continue
            # A source of conversations that is no file may be a name on the hub without "hub:", or a pattern such as
            # data/*.jsonl, which reading checks later.
            is_pattern = any(character in source for character in "*?[")
            may_not_be_path = data.kind == "conversations" and (not looks_like_path(source) or is_pattern)
            path = expand_home(source)
            if not os.path.exists(path) and not may_not_be_path:
                where = f"data.users.{name}" if key == "path" else f"data.users.{name}.{key}"
                raise DataError(f"{where}: {path}: no such file or folder")


def read_dataset(source: str | Path | Sequence[str | Path], **options: Any) -> Groups:
    """Return the documents of a data set by user and split, all in memory.

    Args:
        source: A file or folder of rows, a hub name, or a list of these.
        **options: Further arguments of :func:`group_documents`: ``user`` (column with the user, required), ``text``
            (column with the document), ``users`` (names, or number of first users) and others.

    Raises:
        DataError: A source, column or user is unknown, a name is invalid, or rows are unreadable or missing.
    """
    rows = ListedRows()  # filled by the next line
    user_names = group_documents(source, rows, **options)
    return dict(rows.groups(user_names))


def group_documents(
    source: str | Path | Sequence[str | Path],
    rows: Rows,
    *,
    user: str,
    text: str = "text",
    users: Sequence[str] | int | None = None,
    **options: Any,
) -> Iterable[str]:
    """Store the documents of a data set in ``rows``, and return the names of the selected users.

    ``rows.groups(names)`` then yields the documents of each user.

    Args:
        source: A data set, as for :func:`iterate_documents`.
        rows: Empty store of the rows.
        user: Column that names a row's user.
        text: Column that holds the document.
        users: Names of the users to select, or the number of first users; None for all.
        **options: Further arguments of :func:`iterate_documents`.

    Returns:
        The names of the users, in the order of ``users`` if it is a list, else in that of their first rows.

    Raises:
        DataError: A source, column or user is unknown, a name is invalid, or rows are unreadable or missing.
    """

    # For a store on disk. `surrogatepass` also encodes unpaired surrogates.
    def to_bytes(document: str) -> bytes:
        return document.encode("utf-8", "surrogatepass")

    def from_bytes(content: bytes) -> str:
        return content.decode("utf-8", "surrogatepass")

    where = source_label(source)
    documents = iterate_documents(source, user=user, text=text, users=users, **options)
    rows.fill(documents, pack=to_bytes, unpack=from_bytes)
    if not rows.users:  # no row has a user
        bad_rows = options.get("bad_rows")
        if bad_rows is not None:
            bad_rows.report()  # raises an error if rows are bad, which may be why no row has a user
        raise no_texts_error(source, text, user, name=options.get("name"), data_files=options.get("data_files"))
    names = choose_users(rows.users, users, where)
    if problem := name_problem(names):
        raise DataError(f"{where}: column {user!r}: {problem}")
    return names


def no_texts_error(source: str | Path | Sequence[str | Path], text: str, user: str, **options: Any) -> DataError:
    """Return the error for a source in which no row has both a text and a user, or which has no rows at all.

    Reads the source once more to tell these two cases apart.

    Args:
        source: A data set, as for :func:`iterate_documents`.
        text: Column that holds the document.
        user: Column that names a row's user.
        **options: Further arguments of :func:`comingle.data.tables.read_tables`.
    """
    label = source_label(source)
    all_columns = None
    for table in read_tables(source, **options):
        for _row in table.read(BadRows("skip"), all_columns):
            return DataError(f"{label}: no row has both text in column {text!r} and a user in column {user!r}")
    return DataError(f"{label}: no rows")


def source_label(source: str | Path | Sequence[str | Path]) -> str:
    """Return the name of a source in messages."""
    return str(source) if isinstance(source, str | Path) else ", ".join(map(str, source))


def iterate_documents(
    source: str | Path | Sequence[str | Path],
    *,
    user: str,
    text: str = "text",
    split: str | None = None,
    users: Sequence[str] | int | None = None,
    name: str | None = None,
    data_files: str | Sequence[str] | Mapping[str, object] | None = None,
    max_documents: int | None = None,
    bad_rows: BadRows | None = None,
) -> Iterator[tuple[str, str, str]]:
    """Yield user, split and document of each row of a data set.

    Skips rows without text, user or split.

    Args:
        source: A local file, several files, a folder of them, a folder written by ``save_to_disk``, or a hub name,
            plain or as ``hub:NAME?config=C&split=S``.
        user: Column that names a row's user. Class labels are replaced by their names, numbers by their digits.
            ``meta.set`` is the field ``set`` of a column ``meta``.
        text: Column that holds the document.
        split: Column that names a row's split; None for the data set's own splits (a plain file is "train").
        users: Names of the users to select, or the number of first users; None for all.
        name: Configuration of a hub data set.
        data_files: Passed on to ``datasets.load_dataset``.
        max_documents: Number of first documents of each user and split to keep. Rows of ``hub:NAME`` are then streamed;
            with ``users``, streaming ends when all of them have that many.
        bad_rows: Collects bad rows; None to raise an error for them when reading ends.

    Raises:
        DataError: A source or column is unknown, or rows are unreadable.
    """
    where = source_label(source)
    if where.startswith(HUB_PREFIX) and parse_hub_name(where).documents:
        raise DataError(f"{where}: documents applies only to the source of a single user; use max_documents instead")
    columns = [text, user] if split is None else [text, user, split]
    counts: dict[str, Counter[str]] = {}  # number of documents so far, by user and split
    collected = bad_rows or BadRows()
    for table in read_tables(source, name=name, data_files=data_files, stream=max_documents is not None):
        rows = iterate_texts(table, columns, collected)
        yield from _within_limits(counts, rows, table.split, users, max_documents)
    if bad_rows is None:
        collected.report()


def _within_limits(
    counts: dict[str, Counter[str]],
    rows: Iterable[Sequence[str]],
    split_of_table: str,
    users: Sequence[str] | int | None,
    max_documents: int | None,
) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of one table that are within the limits on users and documents.

    Ends once all selected users have ``max_documents``, so that a stream is not read to its end. If rows name their
    splits, all rows are read, since later rows may be of other splits.

    Args:
        counts: Numbers of documents kept so far, by user and split; updated. Shared by the tables of a source.
        rows: Document, user and, if rows name their splits, split of each row.
        split_of_table: Split of rows that do not name one.
        users: Names of the selected users, for the early end; the caller drops the rows of others. Or the number of
            first users to keep; None for all.
        max_documents: Number of first documents of each user and split to keep; None for all.

    Yields:
        User, split and document of each kept row.
    """
    selected = set(users) if isinstance(users, Sequence) else None
    max_users = users if isinstance(users, int) else None
    num_selected = len(selected) if selected is not None else max_users  # None: all users
    is_unlimited = max_documents is None and max_users is None
    complete_users: set[str] = set()  # selected users with the maximum number of documents of the table's split
    for document, user, *rest in rows:
        names_split = len(rest) > 0
        split = rest[0] if names_split else split_of_table
        if is_unlimited:
            yield user, split, document
            continue
        is_new_user = user not in counts
        if is_new_user and len(counts) == max_users:  # a user beyond the first ones
            continue
        counts_of_user = counts.setdefault(user, Counter())
        if max_documents is None or counts_of_user[split] < max_documents:
            counts_of_user[split] += 1
            yield user, split, document
        is_complete = not names_split and counts_of_user[split] == max_documents
        is_selected = selected is None or user in selected
        if is_complete and is_selected:
            complete_users.add(user)
            if len(complete_users) == num_selected:
                return


def _read_rows(source: str, column: str, max_rows: int | None, max_bytes: int | None, bad_rows: BadRows) -> list[str]:
    """Read one column of the rows of a source as documents.

    Args:
        source: File or folder of rows, or hub name.
        column: Column with the documents.
        max_rows: Number of first rows to read, as a stream if the source is on the hub; None for all.
        max_bytes: Stop with a warning after about this many bytes of text; None for all.
        bad_rows: Collects rows that cannot be used, to report them.
    """
    documents: list[str] = []
    num_bytes = 0
    tables = read_tables(source, stream=max_rows is not None)
    rows = chain.from_iterable(iterate_texts(table, [column], bad_rows) for table in tables)
    for (document,) in islice(rows, max_rows):
        if max_bytes is not None and num_bytes >= max_bytes:
            warn_longer(source, max_bytes)
            break
        documents.append(document)
        num_bytes += len(document.encode(errors="replace"))
    return documents


def _read_path(path: Path, column: str, max_bytes: int | None, bad_rows: BadRows) -> Iterator[str]:
    """Yield the documents of a folder of texts, a file or saved data set of rows, or a text file.

    Args:
        path: The file or folder.
        column: Column with the documents of rows.
        max_bytes: Stop after about this many bytes; None for all.
        bad_rows: Collects rows that cannot be used, to report them.
    """
    has_rows = is_saved_dataset(path) if path.is_dir() else has_row_suffix(path)
    if has_rows:
        yield from _read_rows(str(path), column, max_rows=None, max_bytes=max_bytes, bad_rows=bad_rows)
    elif path.is_dir():
        yield from read_text_folder(path, max_bytes=max_bytes)
    else:
        yield from read_text_file(path, max_bytes=max_bytes)
