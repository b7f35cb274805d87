"""Local files of rows: JSON, CSV and Parquet, and rows that cannot be used.

A reader of rows reports what is wrong with a row by raising a ``ValueError`` (any ``DataError`` is one) within
:meth:`BadRows.row`; reading continues with the next row::

    for place, row in rows:
        with bad.row(f"chats.jsonl: {place}"):
            conversations.append(messages_of(row))
    bad.settle()

None of them guesses types, which would make one user of 007 and 7. JSON is read by :mod:`json` itself: lines, a list,
or objects one after another, whatever the suffix says; Parquet by pyarrow, without a copy on disk.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, groupby, takewhile
from pathlib import Path
from typing import Any, Literal

from comingle.data.files import UNREADABLE, open_bytes, suffix_of
from comingle.utils.errors import DataError

OnBadRow = Literal["refuse", "skip"]

MOST_REFUSED = 1000
"""Reading ends after this many bad rows when they are refused."""

_LISTED, _REMARKS = 20, 8
ADVICE = "repair them, or leave them out with data.on_bad_row: skip"

logger = logging.getLogger("comingle")


class BadRowsError(DataError):
    """Rows that cannot be used; ``problems`` has a line for each, as far as they were collected."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()):
        super().__init__(message)
        self.problems = problems


class BadRows:
    """Rows of one source that cannot be used, and what is wrong with each.

    Args:
        policy: ``refuse`` raises an error that lists them when reading ends; ``skip`` leaves them out with a warning.
    """

    def __init__(self, policy: OnBadRow = "refuse"):
        self.policy, self.count = policy, 0
        self.skipped = 0
        """Number of rows left out so far, over all calls of :meth:`settle`."""
        self.problems: list[tuple[str, str]] = []
        """Where each row is, and what is wrong with it."""
        self.remarks: dict[str, tuple[int, str]] = {}

    @contextmanager
    def row(self, where: str) -> Iterator[None]:
        """Collect a ``ValueError`` raised in the block as the problem of the row at ``where``."""
        try:
            yield
        except BadRowsError:
            raise
        except ValueError as error:
            self.add(where, str(error))

    def add(self, where: str, problem: str) -> None:
        """Collect the problem of one row.

        Raises:
            BadRowsError: rows are refused, and 1,000 have been collected.
        """
        self.count += 1
        if self.count <= MOST_REFUSED:
            self.problems.append((where, problem))
        if self.policy == "refuse" and self.count == MOST_REFUSED:
            self.settle()

    def remark(self, where: str, what: str) -> None:
        """Count a row that is used, but has something that its owner should know of."""
        count, first = self.remarks.get(what, (0, where))
        self.remarks[what] = count + 1, first

    def settle(self) -> None:
        """Refuse the rows collected so far, or warn that they are left out; warn of remarks; then forget them.

        Raises:
            BadRowsError: rows are refused, and there are some.
        """
        count, found = self.count, self.problems
        problems = tuple(f"{where}: {problem}" for where, problem in found)
        self.count, self.problems = 0, []
        remarks, self.remarks = self.remarks, {}
        for what, (times, first) in list(remarks.items())[:_REMARKS]:
            logger.warning("%d %s: %s (first: %s)", times, "rows" if times > 1 else "row", what, first)
        if not count:
            return
        listed = "; ".join(_merge_equal(found[:_LISTED])) + (f"; and {count - _LISTED} more" if count > _LISTED else "")
        if self.policy == "skip":
            self.skipped += count
            logger.warning("data.on_bad_row: %d rows that cannot be used are left out: %s", count, listed)
        elif count == 1:
            raise BadRowsError(f"{listed}; {ADVICE.replace('them', 'it')}", problems)
        else:
            raise BadRowsError(f"{count} rows cannot be used: {listed}; {ADVICE}", problems)


def _merge_equal(problems: list[tuple[str, str]]) -> list[str]:
    """Return a line for each problem; rows of one source with the same problem one after another share a line."""
    lines = list[str]()
    for (source, problem), group in groupby(problems, key=lambda one: (one[0].rpartition(": ")[0], one[1])):
        places = ", ".join(where.removeprefix(f"{source}: ") for where, _ in group)
        lines.append(f"{source}: {places}: {problem}" if source else f"{places}: {problem}")
    return lines


Row = Mapping[str, Any]

PlacedRows = Iterator[tuple[str, Row]]
"""Rows, each with its place in the file, as ``line 3``."""

MOST_CHARACTERS = 64 << 20
"""Of one row; a longer one is refused before it fills memory."""

_TOO_LONG = f"longer than {MOST_CHARACTERS >> 20} MiB; allowed: a row for each document or conversation"
_PIECE = 1 << 20
_LISTED_CHARACTERS = 300
_BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file of rows, or one split of a data set.

    Args:
        where: the file or data set, as messages name it.
        split: the split that its rows are in.
        read: yields the rows with their places; of formats that store columns apart, only the columns asked for.
        columns: the names of the columns, where the format states them.
    """

    where: str
    split: str
    read: Callable[[BadRows, Sequence[str] | None], PlacedRows]
    columns: tuple[str, ...] | None = None


class TypedNumber(float):
    """A JSON number that keeps its spelling, so that a name made of it is as it was typed."""

    def __init__(self, spelling: str):
        self.spelling = spelling


def open_table(path: Path, *, split: str = "train", sep: str | None = None, more: Row | None = None) -> Table:
    """Open a file of rows by its suffix.

    Args:
        path: the file.
        split: the split that its rows are in.
        sep: what separates the fields of a CSV file, if not a comma or, in a .tsv file, a tab.
        more: columns that every row has besides its own, as the folders of a partitioned data set name them.

    Raises:
        DataError: a Parquet file that cannot be opened.
    """
    suffix, columns = suffix_of(path), None
    if suffix == ".parquet":
        columns, read = _open_parquet(path)
    elif suffix in (".csv", ".tsv"):
        sep = sep or ("\t" if suffix == ".tsv" else ",")
        columns, read = _csv_columns(path, sep), lambda bad, _: read_csv(path, sep, bad)
    else:
        read = lambda bad, _: read_json(path, bad)  # noqa: E731
    if more:
        inner, columns = read, None if columns is None else (*more, *columns)
        read = lambda bad, wanted: ((place, {**more, **row}) for place, row in inner(bad, wanted))  # noqa: E731
    return Table(where=str(path), split=split, read=read, columns=columns)


def name_in(value: object, column: str) -> str:
    """Return a cell of a user or split column as a name, with numbers spelled as in the file.

    Raises:
        ValueError: the value is not a string or number, or its original spelling is lost, so that two users could be
            merged into one.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, TypedNumber) and math.isfinite(value):
        return value.spelling
    raise ValueError(f"column {column!r} holds {_described(value)}; a name is text or a whole number")


def describe(error: BaseException) -> str:
    """Return the root of an error in one line."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:_LISTED_CHARACTERS] or type(cause).__name__


def _described(value: object) -> str:
    return f"{value!r:.60}" if isinstance(value, bool | float) else f"a value of type {type(value).__name__}"


# -------------------------------------------------------------------- JSON


def read_json(path: Path, bad: BadRows) -> PlacedRows:
    """The rows of a file of JSON lines, of a list of objects, or of objects one after another.

    A byte order mark and blank lines are passed over. Memory is bounded by the longest row.

    Raises:
        DataError: the file cannot be read, or nothing can be read behind a mistake in a list.
    """
    try:
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as file:
            number, line = 1, file.readline(_PIECE)
            while line and not line.strip():
                number, line = number + line.endswith("\n"), file.readline(_PIECE)
            if line.lstrip().startswith("["):
                yield from _stream_objects(file, line, number, path, bad)
                return
            if not line.endswith("\n"):
                line += _line(file, path, number)
            if suffix_of(path) == ".json" and not _is_object(line):
                yield from _stream_objects(file, line, number, path, bad)
                return
            while line:
                if line.strip():
                    try:
                        row = _object(line)
                    except ValueError as error:
                        bad.add(f"{path}: line {number}", str(error))
                    else:
                        yield f"line {number}", row
                number, line = number + 1, _line(file, path, number + 1)
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text with JSON: {error}") from None


def _line(file: io.TextIOWrapper, path: Path, number: int) -> str:
    line = file.readline(MOST_CHARACTERS + 1)
    if len(line) > MOST_CHARACTERS:
        raise DataError(f"{path}: line {number} is {_TOO_LONG}")
    return line


def _is_object(line: str) -> bool:
    try:
        _object(line)
    except ValueError:
        return False
    return True


def _object(line: str) -> Row:
    try:
        row = json.loads(line, parse_float=TypedNumber)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return _checked(row)


def _checked(row: object) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {_JSON_TYPES.get(type(row), 'number')}; allowed: an object with columns and values")
    return row


_TOO_DEEP = "JSON nested too deeply"
_JSON_TYPES = {list: "list", str: "string", bool: "truth value", type(None): "null"}


def _stream_objects(file: io.TextIOWrapper, head: str, line_number: int, path: Path, bad: BadRows) -> PlacedRows:
    """Yield the objects of a JSON array, or of JSON values one after another.

    Reads pieces of the file and keeps one object at a time. A value that is not an object goes to ``bad``; a syntax
    error is raised, since no later row can be located.
    """
    text, at, ended, number = head, 0, False, 0
    decoder = json.JSONDecoder(parse_float=TypedNumber)

    def grow() -> None:
        nonlocal text, at, ended, line_number
        line_number += text.count("\n", 0, at)
        piece = file.read(max(_PIECE, len(text) - at))
        text, at, ended = text[at:] + piece, 0, not piece

    def next_character() -> str:
        """Skip white space and return the next character; an empty string at the end."""
        nonlocal at
        while True:
            rest = _SPACE.match(text, at)
            at = rest.end() if rest else at
            if at < len(text) or ended:
                return text[at : at + 1]
            grow()

    def refused(what: str, position: int) -> DataError:
        return DataError(f"{path}: line {line_number + text.count(chr(10), 0, position)}: row {number + 1}: {what}")

    def value() -> object:
        nonlocal at
        while True:
            try:
                found, at = decoder.raw_decode(text, at)
                return found
            except json.JSONDecodeError as error:
                whole = ended or not (error.msg.startswith("Unterminated") or error.pos > len(text) - _LONGEST_LITERAL)
                if whole:
                    raise refused(f"not JSON: {error.msg}", error.pos) from None
            except RecursionError:
                raise refused(_TOO_DEEP, at) from None
            except ValueError as error:
                raise refused(f"not JSON: {error}", at) from None
            if len(text) - at > MOST_CHARACTERS:
                raise refused(_TOO_LONG, at)
            grow()

    listed = next_character() == "["
    at += listed
    while sign := next_character():
        if listed and sign == "]":
            at += 1
            if next_character():
                raise refused("more text behind the end of the list", at)
            return
        if listed and number:
            if sign != ",":
                raise refused("not JSON: Expecting ',' delimiter", at)
            at += 1
            next_character()
        try:
            row = _checked(value())
        except DataError:
            raise
        except ValueError as error:
            bad.add(f"{path}: row {number + 1}", str(error))
        else:
            yield f"row {number + 1}", row
        number += 1
    if listed:
        raise refused("the list does not end", at)


_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST_LITERAL = len("-Infinity") + 1


# -------------------------------------------------------------------- CSV


def read_csv(path: Path, sep: str, bad: BadRows) -> PlacedRows:
    """The rows of a file whose first line names the columns; of two columns of one name the first counts.

    ``datasets`` would take a field too many in the first row for an index, so that texts become users.

    Raises:
        DataError: the file cannot be read, or quotes are not as they must be.
    """
    with _open_csv(path, sep) as (columns, rows):
        for line, row in rows:
            if len(row) > len(columns):
                what = f"{len(row)} fields, {len(columns)} columns; quote a text with {sep!r} in it"
                bad.add(f"{path}: line {line}", what)
                continue
            fields = [""] * (len(columns) - len(row)) + row[::-1]
            yield f"line {line}", dict(zip(reversed(columns), fields, strict=True))


def _csv_columns(path: Path, sep: str) -> tuple[str, ...]:
    with _open_csv(path, sep) as (columns, _):
        return tuple(dict.fromkeys(columns))


@contextmanager
def _open_csv(path: Path, sep: str) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """The columns, and the rows that are not blank with the line in which each ends."""
    csv.field_size_limit(MOST_CHARACTERS)
    reader: Any = None
    try:
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
            lines = takewhile(bool, (_line(file, path, number) for number in count(1)))
            reader = csv.reader(lines, delimiter=sep, strict=True)
            rows = ((reader.line_num, row) for row in reader if row)
            yield next(rows, (0, []))[1], rows
    except (*UNREADABLE, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: line {reader.line_num if reader else 0}: {error}") from None


# -------------------------------------------------------------------- Parquet


def _open_parquet(path: Path) -> tuple[tuple[str, ...], Callable[[BadRows, Sequence[str] | None], PlacedRows]]:
    """The columns of a Parquet file, and a reader of its rows."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("reading .parquet needs the package datasets: pip install 'comingle[data]'") from error

    def opened() -> Any:
        compressed = path.suffix.lower() != ".parquet"
        return parquet.ParquetFile(pyarrow.BufferReader(open_bytes(path).read()) if compressed else str(path))

    def read(_: BadRows, wanted: Sequence[str] | None) -> PlacedRows:
        for number, row in enumerate(_parquet_rows(path, opened, wanted), start=1):
            yield f"row {number}", row

    try:
        with opened() as file:
            return tuple(file.schema_arrow.names), read
    except Exception as error:  # pyarrow has a tree of errors of its own
        raise DataError(f"{path}: cannot be read as Parquet: {describe(error)}") from None


def _parquet_rows(path: Path, opened: Callable[[], Any], wanted: Sequence[str] | None) -> Iterator[Row]:
    with opened() as file:
        schema = file.schema_arrow
        names = schema.names if wanted is None else [name for name in schema.names if name in wanted]
        labels = _class_labels(schema)
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=names)
        while True:
            try:
                rows = next(batches).to_pylist(maps_as_pydicts="lossy")
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"{path}: reading stopped: {describe(error)}") from None
            for row in rows:
                yield {name: _labelled(value, labels.get(name)) for name, value in row.items()}


def _class_labels(schema: Any) -> dict[str, list[str]]:
    """By column the names of class labels, as ``datasets`` writes them into a file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return {name: one["names"] for name, one in features.items() if isinstance(one, dict) and "names" in one}


def _labelled(value: object, labels: Sequence[str] | None) -> object:
    return labels[value] if labels and isinstance(value, int) and 0 <= value < len(labels) else value
