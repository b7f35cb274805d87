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
    has_row_suffix,
    is_saved_dataset,
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
    """Yield each row's document and the names in its other columns, such as those of a user and a split.

    For example, ``("Once upon a time", "ada", "train")``. Rows without a value in one of the columns are skipped, as
    are rows with a blank document.

    Args:
        table: File or split of a data set with the rows.
        columns: The column of documents, followed by columns of names (users, splits); ``meta.set`` is the field
            ``set`` of a column ``meta``.
        bad_rows: Collects rows whose document is not text, or that have an invalid name of a user or split.

    Raises:
        DataError: One of the columns is in none of the rows.
    """
    if table.columns is None:  # JSON, in which rows may have different columns
        missing = list(columns)  # those that no row has so far
    else:
        _check_header(table.columns, columns, table.where)
        missing: list[str] = []
    columns_of_first_row: list[str] = []  # for the error message
    is_empty = True
    document_column, *name_columns = columns
    columns_to_read = [*columns, *map(_outer_column, columns)]  # "meta.set" is a column or a field of "meta"
    for place, row in table.read(bad_rows, columns_to_read):
        is_empty = False
        columns_of_first_row = columns_of_first_row or list(row)
        missing = [column for column in missing if not has_column(row, column)]
        values = [field_of(row, column) for column in columns]
        if any(value is None for value in values):
            continue
        with bad_rows.catch(f"{table.where}: {place}"):
            text = _check_document(values[0], document_column)
            names = [read_name(value, column) for value, column in zip(values[1:], name_columns, strict=True)]
            if text.strip():
                yield text, *names
    if not is_empty:
        _require_columns(missing, columns_of_first_row, table.where)


def _outer_column(column: str) -> str:
    """Return the column that holds the field of a column with a dot: "meta" for "meta.set", "text" for "text"."""
    return column.partition(".")[0]


def _check_header(header: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Check that a table has the columns from which documents and names will be read.

    For a name with a dot, such as ``meta.set``, a column ``meta`` is enough, as ``set`` may be a field of its values.

    Args:
        header: Names of the table's columns.
        columns: Names of the columns that it needs.
        where: Name of the table in messages.

    Raises:
        DataError: A column is missing.
    """
    missing = [column for column in columns if column not in header and _outer_column(column) not in header]
    _require_columns(missing, header, where)


def _require_columns(missing: Sequence[str], existing: Sequence[str], where: str) -> None:
    """Raise an error for the first missing column, with a hint; do nothing if none is missing.

    Args:
        missing: Missing columns.
        existing: Columns that exist.
        where: Name of the table in messages.

    Raises:
        DataError: A column is missing.
    """
    if not missing:
        return
    first = missing[0]
    hint = did_you_mean(first, existing)
    if "messages" in existing:  # the rows have conversations, so the recipe names the wrong kind of data
        hint += " Conversations need data.kind: conversations."
    raise DataError(f"{where}: no column {first!r}; found: {list_names(existing)}.{hint}")


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
    """Return the value of a column, or of a field inside a column; None if the row does not have it.

    Args:
        row: Values of the row by column.
        column: Name of a column, or ``COLUMN.FIELD``, such as ``meta.set`` for the key ``set`` of the mapping in the
            column ``meta``. A column whose name is all of ``meta.set`` takes precedence.
    """
    if column in row:
        return row[column]
    outer_column, _dot, field = column.partition(".")
    fields = row.get(outer_column)
    if field and isinstance(fields, dict):
        return fields.get(field)
    return None


def has_column(row: Row, column: str) -> bool:
    """Return whether a row has a column, or for ``meta.set`` the field ``set`` in a column ``meta``.

    The value of the column or field may be None. If ``meta`` itself is None, the row counts as having each of its
    fields, since other rows may have them.
    """
    if column in row:
        return True
    outer_column, _dot, field = column.partition(".")
    if outer_column not in row:
        return False
    fields = row[outer_column]
    return fields is None or (isinstance(fields, dict) and field in fields)


def table_of(rows: Rows, where: str, split: str) -> Table:
    """Return a split of a data set of ``datasets`` as a table, with class labels replaced by their names.

    Args:
        rows: Rows of the split.
        where: Name of the data set in messages.
        split: Name of the split.
    """
    known_columns = rows.column_names  # None for a stream whose columns are unknown before the first row

    def read(_bad_rows: BadRows, columns_to_read: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
        """Yield the rows in the order of the split; none can be bad, since ``datasets`` has parsed them already."""
        first_row = {} if known_columns else next(iter(rows), {})
        columns = list(known_columns or first_row)
        if columns_to_read is not None:
            columns = [column for column in columns if column in columns_to_read]
        features = rows.features or {}  # type of each column; that of class labels has `names`
        class_names = {column: getattr(features.get(column), "names", None) for column in columns}
        row_number = 0
        for batch in iterate_batches(rows.select_columns(columns), where):
            values_by_column = [_name_labels(batch[column], class_names[column]) for column in columns]
            for values_of_row in zip(*values_by_column, strict=True):
                row_number += 1
                yield f"row {row_number}", dict(zip(columns, values_of_row, strict=True))

    table_columns = tuple(known_columns) if known_columns else None
    return Table(where=where, split=split, read=read, columns=table_columns)


def _name_labels(values: Sequence[object], class_names: Sequence[str] | None) -> Sequence[object]:
    """Replace class labels, which are stored as numbers, by their names; other values of such a column become None.

    Args:
        values: Values of a column.
        class_names: Names of the column's classes, in the order of their numbers; None for a column without class
            labels, whose values are returned unchanged.
    """
    if class_names is None:
        return values
    return [class_names[value] if isinstance(value, int) else None for value in values]


def iterate_batches(rows: Rows, where: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``datasets`` data set in batches of up to 1,000: lists of values by column.

    Args:
        rows: The data set, in memory or a stream.
        where: Name of the data set in messages.

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
    if users is None:
        return groups
    if isinstance(users, int):
        if len(groups) < users:
            raise DataError(f"{where}: {users} users requested, but only {len(groups)} found: {list_names(groups)}")
        return dict(islice(groups.items(), users))
    for name in users:
        if name not in groups:
            raise DataError(f"{where}: no user {name!r}; found: {list_names(groups)}.{did_you_mean(name, groups)}")
    return {name: groups[name] for name in users}


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
    sources = [source] if isinstance(source, str | Path) else source
    for one_source in sources:
        yield from _open_tables(str(one_source), name, data_files, stream)


def _open_tables(source: str, name: str | None, data_files: object, stream: bool) -> Iterator[Table]:
    """Open the tables of one source, one after another.

    Local files, and folders without a configuration, are read without the package ``datasets``. It reads the rest: data
    sets of the hub, folders written by ``save_to_disk``, folders whose README.md lists configurations, and folders from
    which ``name`` or ``data_files`` select files.

    Args:
        source: A file of rows, a folder of them, a folder written by ``save_to_disk``, or a hub name.
        name: Configuration of the data set; None for the default.
        data_files: Files of the data set to read, as ``datasets`` takes them; None for all.
        stream: Stream the rows of a source named as ``hub:NAME``.
    """
    path = expand_home(source)
    if not source.startswith(HUB_PREFIX) and os.path.exists(path):
        check_regular(path)
        if path.is_file():
            if not has_row_suffix(path):
                allowed = f"{', '.join(ROW_SUFFIXES)}, each optionally followed by {' or '.join(COMPRESSIONS)}"
                raise DataError(f"{path}: not a file of rows; allowed: {allowed}")
            yield open_table(path)
            return
        selects_files = name is not None or data_files is not None
        if not is_saved_dataset(path) and not selects_files and not _has_configurations(path):
            yield from _tables_of_folder(path)
            return
    with open_splits(source, name=name, data_files=data_files, stream=stream) as splits:
        for split, rows in splits:
            if isinstance(rows, Table):
                yield rows
            else:
                yield table_of(rows, source, split)


def _tables_of_folder(folder: Path) -> Iterator[Table]:
    """Open all files of rows in a folder, one after another; warn of files without rows."""
    row_files, other_files = list_row_files(folder)
    if other_files:
        logger.warning("%s: skipped %d files without rows, first: %s", folder, len(other_files), other_files[0])
    for file in row_files:
        yield open_table(file.path, split=file.split, extra_columns=file.extra_columns)


def _has_configurations(folder: Path) -> bool:
    """Return whether the README.md of a folder lists its data files under the key ``configs``, as on the hub."""
    try:
        with (folder / "README.md").open(encoding="utf-8") as file:
            card = file.read(_CARD_CHARACTERS)
        if not card.startswith("---"):
            return False
        _empty, header, *_text = card.split("---", 2)  # the header is YAML between two lines "---"
        content = yaml.safe_load(header)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and "configs" in content


@contextmanager
def open_splits(
    source: str, *, name: str | None = None, data_files: object = None, stream: bool = False, decoded: bool = False
) -> Iterator[list[tuple[str, Rows | Table]]]:
    """Load the splits of a source with ``datasets`` for the duration of the context; local files of rows become tables.

    Yields pairs of a split's name and rows. They can be read within the context only, since they may be in a temporary
    folder.

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
    """Load the splits of a source with the package ``datasets``, or as tables that our own readers read.

    Args:
        datasets: The imported package ``datasets``.
        source: Name of a data set, such as ``hub:NAME``, or a file or folder of rows.
        name: Configuration of the data set; None for the default.
        data_files: Files of the data set to read, as ``datasets`` takes them; None for all.
        cache: Temporary folder for converted local files.
        stream: Stream the rows of a source named as ``hub:NAME``.
        decoded: Decode values such as images, for which ``datasets`` reads all files.

    Returns:
        Pairs of a split's name and rows; an empty list for a file without rows.

    Raises:
        DataError: The source cannot be loaded.
    """
    hub = parse_hub_name(source) if source.startswith(HUB_PREFIX) else None
    try:
        if hub is not None:
            options = {"split": hub.split, "data_files": hub.files, "streaming": stream}
            loaded = datasets.load_dataset(hub.name, name=hub.config or name, **options)
        else:
            loaded = _load_without_prefix(datasets, source, name, data_files, cache, decoded)
    except StopIteration:  # raised by ``datasets`` for a file without rows
        return []
    except DataError:
        raise
    except Exception as error:  # datasets, pyarrow, pandas and the hub have separate exception hierarchies
        raise DataError(f"{source}: cannot be loaded as a data set: {describe_cause(error)}") from error
    if isinstance(loaded, list):  # pairs of split and table, from our own readers
        return loaded
    if isinstance(loaded, dict):  # a `DatasetDict`
        return [(str(split), rows) for split, rows in loaded.items()]
    # `loaded` is a `Dataset`.
    split = hub.split if hub is not None and hub.split else "train"
    return [(split, loaded)]


def _load_without_prefix(
    datasets: ModuleType, source: str, name: str | None, data_files: object, cache: str, decoded: bool
) -> object:
    """Load a source that has no prefix ``hub:``: a local file or folder, a data set of the hub, or files of a format.

    Local files are read by our own readers where possible, since ``datasets`` converts them to a copy first. Our
    readers do not decode values such as images.

    Args:
        datasets: The imported package ``datasets``.
        source: Path, or name of a data set of the hub, or format of ``data_files``, such as "json".
        name: Configuration of the data set; None for the default.
        data_files: Files of the data set to read, as ``datasets`` takes them; None for all.
        cache: Temporary folder for converted local files.
        decoded: Decode values such as images, for which ``datasets`` reads all files.

    Returns:
        Pairs of split and table from our own readers; else a ``Dataset`` or ``DatasetDict`` of ``datasets``.

    Raises:
        DataError: The source is a path that does not exist.
    """
    path = expand_home(source)
    is_path = os.path.exists(path)
    is_builder = source in _LOCAL_BUILDERS and data_files is not None  # such as "json"
    is_local = is_path or is_builder
    if not is_local and looks_like_path(source):
        raise DataError(f"{source}: no such file or folder")
    if path.is_dir() and is_saved_dataset(path):
        return datasets.load_from_disk(str(path))
    if not is_local:
        return datasets.load_dataset(source, name=name, data_files=data_files)
    path_or_builder = str(path) if is_path else source
    builder = datasets.load_dataset_builder(path_or_builder, cache_dir=cache, name=name, data_files=data_files)
    if not decoded:
        tables = _tables_of_builder(builder)
        if tables is not None:
            return tables
    builder.download_and_prepare()
    return builder.as_dataset()


def _tables_of_builder(builder: Any) -> list[tuple[str, Table]] | None:
    """Return the local files of a ``datasets`` builder as tables for comingle's own readers of CSV, JSON and Parquet.

    They read the files in place, whereas ``datasets`` would first convert them to a copy on disk.

    Args:
        builder: A ``datasets.DatasetBuilder``.

    Returns:
        Pairs of split and table; None if ``datasets`` has to read the files: they are remote or of another format, or
        the builder has options that our readers do not support.
    """
    config = builder.config
    default_config = type(config)()
    # Fields of the configuration that say what to read. All others are options that say how.
    fields_without_options = ("name", "version", "data_dir", "data_files", "description")
    options: dict[str, Any] = {}  # those that are not the default
    for key, value in vars(config).items():
        if key not in fields_without_options and getattr(default_config, key) != value:
            options[key] = value
    # The only option that our readers support is the separator, which has two names.
    sep, delimiter = options.pop("sep", None), options.pop("delimiter", None)
    separator = sep or delimiter
    has_unknown_options = len(options) > 0
    files_by_split = config.data_files
    if builder.name not in ("json", "csv", "parquet") or has_unknown_options or not files_by_split:
        return None
    tables: list[tuple[str, Path]] = []
    for split, files in files_by_split.items():
        for file in files:
            path = Path(str(file))
            is_compressed = path.suffix in OPENERS
            if not path.exists() or not (has_row_suffix(path) or is_compressed):
                return None
            tables.append((str(split), path))
    return [(split, open_table(path, split=split, sep=separator)) for split, path in tables]


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
    had_progress_bars = not datasets.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_progress_bars:
            datasets.enable_progress_bars()
