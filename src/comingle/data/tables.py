"""Tables of rows, from local files and from the Hugging Face hub.

:mod:`comingle.data.row_files` reads local files. ``datasets``, which only this module imports, reads the rest: the hub,
folders written by ``save_to_disk``, and builders with options of their own. Local files that ``datasets`` reads go
through a temporary cache that is deleted at once, so that no private text stays in a shared cache.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml

from comingle.data.files import (
    COMPRESSIONS,
    OPENERS,
    ROW_SUFFIXES,
    check_regular,
    has_rows,
    is_saved,
    list_row_files,
    long_word_problem,
    looks_like_path,
)
from comingle.data.row_files import BadRows, Row, Table, describe_cause, open_table, read_name
from comingle.utils.errors import DataError, did_you_mean, list_names
from comingle.utils.names import HUB_PREFIX, parse_hub_name
from comingle.utils.records import expand_home

_BATCH_ROWS = 1000

T = TypeVar("T")

Rows = Any
"""A ``datasets.Dataset`` or ``IterableDataset``; untyped because their package is optional."""


def iterate_texts(table: Table, columns: Sequence[str], bad_rows: BadRows) -> Iterator[tuple[str, ...]]:
    """Yield the named columns of every row that has them all: the first as document, the others as names.

    Skips rows with no value in one of the columns, and rows with a blank document.

    Args:
        table: The rows.
        columns: The columns; ``meta.set`` is the field ``set`` of a column ``meta``.
        bad_rows: Collects rows whose document is not text, or whose name is not valid.

    Raises:
        DataError: No row has one of the columns.
    """
    # For "meta.set", read the columns "meta.set" and "meta": if both exist, the column takes precedence over the field.
    columns_to_read = [name for column in columns for name in (column, column.partition(".")[0])]
    # Known columns of the table, for the error; and requested columns that the table or all rows so far lack.
    names, missing = list(table.columns or ()), list(columns)
    if table.columns is not None:
        missing = [column for column in columns if column not in names and column.partition(".")[0] not in names]
        _require_columns(missing, names, table.where)
    is_empty = True
    for place, row in table.read(bad_rows, columns_to_read):
        is_empty = False
        names = names or list(row)
        missing = [column for column in missing if not has_column(row, column)]
        document, *others = (field_of(row, column) for column in columns)
        if document is None or any(other is None for other in others):
            continue
        with bad_rows.catch(f"{table.where}: {place}"):
            text = _check_document(document, columns[0])
            owners = [read_name(other, column) for other, column in zip(others, columns[1:], strict=True)]
            if text.strip():
                yield text, *owners
    if not is_empty:
        _require_columns(missing, names, table.where)


def _require_columns(missing: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise an error for the first missing column, with a hint; do nothing if none is missing.

    Args:
        missing: Missing columns.
        names: Columns that exist.
        where: Name of the table in messages.

    Raises:
        DataError: A column is missing.
    """
    if not missing:
        return
    # A column "messages" has conversations, for which the recipe may name the wrong kind of data.
    kind_hint = " Conversations need data.kind: conversations." if "messages" in names else ""
    first = missing[0]
    raise DataError(f"{where}: no column {first!r}; found: {list_names(names)}.{did_you_mean(first, names)}{kind_hint}")


def _check_document(value: object, column: str) -> str:
    """Return a document if it can be tokenised.

    Raises:
        ValueError: The value is not text, or cannot be encoded as UTF-8. Or it has a word of more than a million
            characters, so it is probably encoded binary data.
    """
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {type(value).__name__}; allowed: text")
    if not is_unicode(value):
        raise ValueError(f"column {column!r} holds an unpaired surrogate; allowed: valid Unicode text")
    if problem := long_word_problem(value):
        raise ValueError(f"column {column!r} holds {problem}")
    return value


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8; JSON may contain unpaired surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def field_of(row: Row, column: str) -> object:
    """Return the value of a column, or for ``meta.set`` of the field ``set`` in a column ``meta``; None if missing."""
    if column in row:
        return row[column]
    head, _dot, field = column.partition(".")
    inner = row.get(head)
    return inner.get(field) if field and isinstance(inner, dict) else None


def has_column(row: Row, column: str) -> bool:
    """Return whether a row has a column, or for ``meta.set`` the field ``set`` in a column ``meta``.

    The value may be missing. If ``meta`` itself has no value, the row counts as having every field of it.
    """
    head, _dot, field = column.partition(".")
    inner = row.get(head)
    has_field = head in row and (inner is None or (isinstance(inner, dict) and field in inner))
    return column in row or has_field


def table_of(rows: Rows, where: str, split: str) -> Table:
    """Return a split of a data set of ``datasets`` as a table, with class labels replaced by their names.

    Args:
        rows: The split.
        where: Name of the data set in messages.
        split: Name of the split.
    """
    known_columns = rows.column_names  # None for a stream whose columns are unknown before the first row

    def read(_bad: BadRows, wanted: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
        """Yield the rows in the order of the split; ``wanted`` has the columns to read, None for all.

        No row can be bad, since ``datasets`` has parsed the rows already.
        """
        names = list(known_columns or next(iter(rows), {}))
        chosen = names if wanted is None else [name for name in names if name in wanted]
        labels = {name: getattr((rows.features or {}).get(name), "names", None) for name in chosen}
        row_number = 0
        for batch in iterate_batches(rows.select_columns(chosen), where):
            columns = [_name_labels(batch[name], labels[name]) for name in chosen]
            for values in zip(*columns, strict=True):
                row_number += 1
                yield f"row {row_number}", dict(zip(chosen, values, strict=True))

    return Table(where=where, split=split, read=read, columns=tuple(known_columns) if known_columns else None)


def _name_labels(values: Sequence[object], names: Sequence[str] | None) -> Sequence[object]:
    """Replace class labels, which are stored as numbers, by their names; other values of such a column become None.

    Args:
        values: Values of a column.
        names: Names of the column's classes, in the order of their numbers; None for a column without class labels,
            whose values are returned unchanged.
    """
    return values if names is None else [names[value] if isinstance(value, int) else None for value in values]


def iterate_batches(rows: Rows, where: str) -> Iterator[dict[str, Any]]:
    """Yield rows in batches of 1,000.

    Raises:
        DataError: Reading fails, as a stream may at any time.
    """
    try:
        yield from rows.iter(batch_size=_BATCH_ROWS)
    except DataError:
        raise
    except Exception as error:  # datasets, pyarrow and the hub have separate exception hierarchies
        raise DataError(f"{where}: reading failed: {describe_cause(error)}") from error


def choose_users(groups: Mapping[str, T], users: Sequence[str] | int | None, where: str) -> Mapping[str, T]:
    """Select users by name, or the first ``users`` of them; all if ``users`` is None.

    Args:
        groups: Values of all users, by name.
        users: Names in the wanted order, or their number.
        where: Name of the source in messages.

    Raises:
        DataError: A user does not exist, or there are fewer than ``users``.
    """
    if isinstance(users, int):
        if len(groups) < users:
            raise DataError(f"{where}: {users} users requested, but only {len(groups)} found: {list_names(groups)}")
        return dict(islice(groups.items(), users))
    for wanted in users or ():
        if wanted not in groups:
            raise DataError(f"{where}: no user {wanted!r}; found: {list_names(groups)}.{did_you_mean(wanted, groups)}")
    return groups if users is None else {wanted: groups[wanted] for wanted in users}


_LOCAL_BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""Builders of ``datasets`` for local files."""
_CARD_CHARACTERS = 1 << 20
"""Largest number of characters of a README.md that is searched for its header."""

logger = logging.getLogger("comingle")


def read_tables(
    source: str | Path | Sequence[str | Path],
    *,
    name: str | None = None,
    data_files: object = None,
    stream: bool = False,
) -> Iterator[Table]:
    """Open the tables of a source, one after another; each can be read until the next is requested.

    Args:
        source: A file of rows, a folder of them, a folder written by ``save_to_disk``, a hub name, or a list of these.
        name: Configuration of a data set of the hub, or of a folder with the same layout.
        data_files: Passed on to ``datasets``.
        stream: Stream sources named as ``hub:NAME``.

    Raises:
        DataError: A source is unknown or cannot be opened.
    """
    for item in [source] if isinstance(source, str | Path) else source:
        yield from _tables_of(str(item), name, data_files, stream)


def _tables_of(source: str, name: str | None, data_files: object, stream: bool) -> Iterator[Table]:
    """Open the tables of one source; for the arguments see :func:`read_tables`.

    Reads local files and plain folders of rows without the package ``datasets``. All other sources need it: data sets
    of the hub, folders that ``datasets`` saved, folders whose README.md lists data files, and folders from which
    ``name`` or ``data_files`` select files.
    """
    path = expand_home(source)
    if not source.startswith(HUB_PREFIX) and os.path.exists(path):
        check_regular(path)
        if path.is_file():
            if not has_rows(path):
                allowed = f"{', '.join(ROW_SUFFIXES)}, each optionally followed by {' or '.join(COMPRESSIONS)}"
                raise DataError(f"{path}: not a file of rows; allowed: {allowed}")
            yield open_table(path)
            return
        selects_files = name is not None or data_files is not None
        if not is_saved(path) and not selects_files and not _has_configurations(path):
            yield from _tables_of_folder(path)
            return
    with open_splits(source, name=name, data_files=data_files, stream=stream) as splits:
        for split, rows in splits:
            yield rows if isinstance(rows, Table) else table_of(rows, source, split)


def _tables_of_folder(folder: Path) -> Iterator[Table]:
    """Open all files of rows in a folder, one after another; warn of files without rows."""
    files, left_out = list_row_files(folder)
    if left_out:
        logger.warning("%s: skipped %d files without rows, first: %s", folder, len(left_out), left_out[0])
    for file in files:
        yield open_table(file.path, split=file.split, extra_columns=file.extra_columns)


def _has_configurations(folder: Path) -> bool:
    """Return whether the README.md of a folder lists its data files, as on the hub."""
    try:
        with (folder / "README.md").open(encoding="utf-8") as file:
            card = file.read(_CARD_CHARACTERS)
        # The header of a data card is YAML between two lines "---"; its key "configs" lists the data files.
        header = yaml.safe_load(card.split("---", 2)[1]) if card.startswith("---") else None
    except (OSError, ValueError, IndexError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(header, dict) and "configs" in header


@contextmanager
def open_splits(
    source: str, *, name: str | None = None, data_files: object = None, stream: bool = False, decoded: bool = False
) -> Iterator[list[tuple[str, Rows | Table]]]:
    """Load the splits of a source with ``datasets`` for the duration of the context; local files of rows become tables.

    Args:
        source: Name of a data set, or a file or folder of rows.
        name: Configuration of the data set.
        data_files: Files of the data set to read.
        stream: Stream rows; only of sources named as ``hub:NAME``.
        decoded: Decode values such as images; ``datasets`` then reads local files as well.
    """
    datasets = _import_datasets(source)
    with _without_output(datasets), tempfile.TemporaryDirectory(prefix="comingle-") as cache:
        yield _load_splits(datasets, source, name, data_files, cache, stream, decoded)


def _load_splits(
    datasets: ModuleType, source: str, name: str | None, data_files: object, cache: str, stream: bool, decoded: bool
) -> list[tuple[str, Rows | Table]]:
    """Load the splits of a source with ``datasets``; for the arguments see :func:`open_splits`.

    Args:
        datasets: The package.
        source: Name of a data set, or a file or folder of rows.
        name: Configuration of the data set.
        data_files: Files of the data set to read.
        cache: Temporary folder for converted local files.
        stream: Stream rows of a source named as ``hub:NAME``.
        decoded: Decode values such as images.

    Returns:
        Names and rows of the splits; empty for a file without rows.

    Raises:
        DataError: The source cannot be loaded.
    """
    hub = parse_hub_name(source) if source.startswith(HUB_PREFIX) else None
    try:
        if hub is not None:
            options = {"split": hub.split, "data_files": hub.files, "streaming": stream}
            loaded = datasets.load_dataset(hub.name, name=hub.config or name, **options)
        else:
            loaded = _load_any(datasets, source, name, data_files, cache, decoded)
    except StopIteration:  # raised by ``datasets`` for a file without rows
        return []
    except DataError:
        raise
    except Exception as error:  # datasets, pyarrow, pandas and the hub have separate exception hierarchies
        raise DataError(f"{source}: cannot be loaded as a data set: {describe_cause(error)}") from error
    if isinstance(loaded, list):  # pairs of split and table, from our own readers
        return loaded
    # A ``DatasetDict`` has several splits. A ``Dataset`` is the requested split or the only one.
    only_split = hub.split if hub and hub.split else "train"
    splits = loaded if isinstance(loaded, dict) else {only_split: loaded}
    return [(str(split), rows) for split, rows in splits.items()]


def _load_any(
    datasets: ModuleType, source: str, name: str | None, data_files: object, cache: str, decoded: bool
) -> object:
    """Load a file, a folder, a data set of the hub, or files for a loader of ``datasets`` such as ``json``.

    For the arguments see :func:`_load_splits`. ``datasets`` converts a local file to a copy before reading. Our own
    readers need no copy, so they are used where possible. They do not decode values such as images.

    Returns:
        Pairs of split and table from our own readers; else a ``Dataset`` or ``DatasetDict`` of ``datasets``.

    Raises:
        DataError: The source is a path that does not exist.
    """
    path = expand_home(source)
    exists = os.path.exists(path)
    # Also local: the name of a builder for local files, with the files in `data_files`.
    is_local = exists or (source in _LOCAL_BUILDERS and data_files is not None)
    options: dict[str, Any] = {"name": name, "data_files": data_files}
    if exists:
        source = str(path)
    elif not is_local and looks_like_path(source):
        raise DataError(f"{source}: no such file or folder")
    if path.is_dir() and is_saved(path):
        return datasets.load_from_disk(str(path))
    if not is_local:
        return datasets.load_dataset(source, **options)
    builder = datasets.load_dataset_builder(source, cache_dir=cache, **options)
    if not decoded and (tables := _tables_of_builder(builder)) is not None:
        return tables
    builder.download_and_prepare()
    return builder.as_dataset()


def _tables_of_builder(builder: Any) -> list[tuple[str, Table]] | None:
    """Return the local files of a ``datasets`` builder as tables, to be read without converting them first.

    Returns:
        Pairs of split and table; None if the builder has options or files that our readers do not support.
    """
    config, defaults = vars(builder.config), vars(type(builder.config)())
    irrelevant = ("name", "version", "data_dir", "data_files", "description")
    # Options with another value than the default, which our readers would not respect.
    options = {key: value for key, value in config.items() if key not in irrelevant and defaults[key] != value}
    # Two names of the same option, of which `sep` takes precedence. Both are removed, as our readers know the option.
    sep, delimiter = options.pop("sep", None), options.pop("delimiter", None)
    files_by_split = builder.config.data_files
    if builder.name not in ("json", "csv", "parquet") or options or not files_by_split:
        return None
    files = [(str(split), Path(str(file))) for split, of_split in files_by_split.items() for file in of_split]
    if not all(file.exists() and (has_rows(file) or file.suffix in OPENERS) for _split, file in files):
        return None
    return [(split, open_table(file, split=split, sep=sep or delimiter)) for split, file in files]


def _import_datasets(source: str) -> ModuleType:
    """Return the optional package ``datasets``.

    Raises:
        DataError: The package is not installed; the message names the source that needs the package.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{source}: reading data sets of the hub needs the package datasets: pip install 'comingle[data]'"
        ) from error
    return datasets


@contextmanager
def _without_output(datasets: ModuleType) -> Iterator[None]:
    """Disable the progress bars and log lines of ``datasets`` for the duration of the context.

    Its errors need no log lines, since they are raised as :class:`DataError`.
    """
    bars, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
