"""Readers of local files of rows (JSON, CSV and Parquet), and collection of bad rows.

Code that processes a row raises a ``ValueError`` (any ``DataError`` is one) within :meth:`BadRows.catch` to report a
bad row; reading continues with the next row::

    for place, row in rows:
        with bad_rows.catch(f"chats.jsonl: {place}"):
            conversations.append(messages_of(row))
    bad_rows.report()

The readers do not infer types, since 007 and 7 would become the same user. :mod:`json` reads JSON (lines, a list, or
concatenated objects, whatever the suffix is), pyarrow reads Parquet without a copy on disk.
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
from itertools import count, groupby
from pathlib import Path
from typing import Any, Literal

from comingle.data.files import UNREADABLE, open_bytes, suffix_of
from comingle.utils.errors import DataError

OnBadRow = Literal["refuse", "skip"]
"""Values of ``data.on_bad_row``."""

MAX_REFUSED_ROWS = 1000
"""Number of bad rows after which reading stops if bad rows are refused."""

_LISTED, _LISTED_REMARKS = 20, 8
"""Numbers of bad rows and of remarks that a message lists."""
BAD_ROWS_ADVICE = "correct them, or skip them with data.on_bad_row: skip"
"""Advice at the end of errors about bad rows."""

logger = logging.getLogger("comingle")


class BadRowsError(DataError):
    """Error for rows that cannot be used.

    Args:
        message: Text of the error.
        problems: One line per bad row, up to the number of rows that were collected.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()):
        """Store the problems of single rows beside the message."""
        super().__init__(message)
        self.problems = problems


class BadRows:
    """Collection of the bad rows of a source, with their problems.

    Args:
        policy: ``refuse`` to raise an error that lists them when reading ends; ``skip`` to skip them with a warning.
    """

    def __init__(self, policy: OnBadRow = "refuse"):
        """Start without bad rows.

        Args:
            policy: What :meth:`report` does with bad rows: ``refuse`` raises an error that lists them, ``skip`` warns.
        """
        self.policy = policy
        self.count = 0
        """Number of bad rows since the last call of :meth:`report`."""
        self.problems: list[tuple[str, str]] = []
        """Location, such as "chats.jsonl: line 3", and problem of each of these rows, up to 1,000."""
        self.skipped = 0
        """Number of rows skipped so far, over all calls of :meth:`report`."""
        self.remarks: dict[str, tuple[int, str]] = {}
        """Remarks on rows that are used but unusual: number of these rows and location of the first, by remark.

        For example, ``{"unused columns: id": (7, "chats.jsonl: line 1")}``.
        """

    @contextmanager
    def catch(self, where: str) -> Iterator[None]:
        """Record a ``ValueError`` that the block raises as the problem of a row, and continue after the block.

        Args:
            where: File and line of the row, such as ``chats.jsonl: line 3``.
        """
        try:
            yield
        except BadRowsError:  # also a ValueError, but not the problem of this row alone
            raise
        except ValueError as error:
            self.add(where, str(error))

    def add(self, where: str, problem: str) -> None:
        """Add a bad row.

        If bad rows are refused, the 1,000th stops reading with an error, so that a long unusable file is not read to
        its end.

        Args:
            where: File and line of the row, such as ``chats.jsonl: line 3``.
            problem: Why the row cannot be used.

        Raises:
            BadRowsError: The policy is ``refuse``, and 1,000 rows have been collected.
        """
        self.count += 1
        if self.count <= MAX_REFUSED_ROWS:
            self.problems.append((where, problem))
        if self.policy == "refuse" and self.count == MAX_REFUSED_ROWS:
            self.report()  # raises the error

    def remark(self, where: str, text: str) -> None:
        """Count a row that is used but unusual, for a warning.

        Args:
            where: File and line of the row, such as ``chats.jsonl: line 3``.
            text: Text of the remark. Each text is logged once, with the number of its rows and the first place.
        """
        num_rows, first_place = self.remarks.get(text, (0, where))
        self.remarks[text] = num_rows + 1, first_place

    def report(self) -> None:
        """Log the remarks on rows that are used, then raise an error for the bad rows, or warn that they are skipped.

        Afterwards, there are no remarks and no bad rows any more.

        Raises:
            BadRowsError: The policy is ``refuse``, and there are bad rows.
        """
        count, first_problems, remarks = self.count, self.problems, self.remarks
        self.count, self.problems, self.remarks = 0, [], {}
        for remark, (num_rows, first_place) in list(remarks.items())[:_LISTED_REMARKS]:
            rows = "rows" if num_rows > 1 else "row"
            logger.warning("%d %s: %s (first: %s)", num_rows, rows, remark, first_place)
        if count == 0:
            return
        listed = "; ".join(_merge_equal(first_problems[:_LISTED]))
        if count > _LISTED:
            listed += f"; and {count - _LISTED} more"
        if self.policy == "skip":
            self.skipped += count
            logger.warning("data.on_bad_row: skipped %d rows that cannot be used: %s", count, listed)
            return
        lines = tuple(f"{where}: {problem}" for where, problem in first_problems)
        if count == 1:
            advice = BAD_ROWS_ADVICE.replace("them", "it")
            raise BadRowsError(f"{listed}; {advice}", lines)
        raise BadRowsError(f"{count} rows cannot be used: {listed}; {BAD_ROWS_ADVICE}", lines)


def _merge_equal(problems: list[tuple[str, str]]) -> list[str]:
    """Return one line per problem; merge consecutive rows of one source with the same problem.

    Args:
        problems: Pairs of a row's location, such as ``chats.jsonl: line 3``, and its problem.

    Returns:
        Lines such as ``chats.jsonl: line 3, line 4: not JSON``.
    """

    def source_and_problem(item: tuple[str, str]) -> tuple[str, str]:
        """Return source and problem, as ``("chats.jsonl", "not JSON")``; the source may be missing in the location."""
        where, problem = item
        source, _colon, _line = where.rpartition(": ")
        return source, problem

    lines: list[str] = []
    for (source, problem), group in groupby(problems, key=source_and_problem):
        places = ", ".join(where.removeprefix(f"{source}: ") for where, _problem in group)
        lines.append(f"{source}: {places}: {problem}" if source else f"{places}: {problem}")
    return lines


Row = Mapping[str, Any]
"""Values of a row by column."""

PlacedRows = Iterator[tuple[str, Row]]
"""Rows with their places in the file, such as ``line 3``."""

ReadRows = Callable[[BadRows, Sequence[str] | None], PlacedRows]
"""Function that yields rows, given a collection of bad rows and the columns to read (None for all).

Columnar formats read only these columns; others read all.
"""

MAX_ROW_CHARACTERS = 64 << 20
"""Largest number of characters of a row; a longer one is an error before it fills memory."""

_TOO_LONG = f"longer than {MAX_ROW_CHARACTERS >> 20} MiB; put each document or conversation in a row of its own"
_CHUNK_CHARACTERS = 1 << 20
_LISTED_CHARACTERS = 300
"""Largest number of characters of another library's error message that is quoted."""
_BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Table:
    """File of rows, or one split of a data set.

    Args:
        where: Name of the file or data set in messages.
        split: Split of its rows.
        read: Yields the rows with their places.
        columns: Names of the columns, if the format states them.
    """

    where: str
    split: str
    read: ReadRows
    columns: tuple[str, ...] | None = None


class TypedNumber(float):
    """JSON number that keeps its spelling, so that a name made from it is spelled as in the file."""

    def __init__(self, spelling: str):
        self.spelling = spelling


def open_table(path: Path, *, split: str = "train", sep: str | None = None, extra_columns: Row | None = None) -> Table:
    """Open a file of rows by its suffix; the rows are read when the table is iterated.

    The table names its columns, except for JSON, where each row may have other ones.

    Args:
        path: Path of the file.
        split: Split of its rows.
        sep: Separator of the fields of a CSV file; by default a comma, or a tab in a .tsv file.
        extra_columns: Columns to add to every row, such as those that the folders of a partitioned data set name.

    Raises:
        DataError: A Parquet file cannot be opened.
    """
    suffix = suffix_of(path)
    if suffix == ".parquet":
        columns, read = _open_parquet(path)
    elif suffix in (".csv", ".tsv"):
        columns, read = _open_csv_table(path, sep or ("\t" if suffix == ".tsv" else ","))
    else:
        columns, read = None, _json_reader(path)
    if not extra_columns:
        return Table(where=str(path), split=split, read=read, columns=columns)

    def read_extended(bad_rows: BadRows, columns_to_read: Sequence[str] | None) -> PlacedRows:
        """Yield the rows with the extra columns; a column of the file of the same name takes precedence."""
        for where_in_file, row in read(bad_rows, columns_to_read):  # such as "line 3"
            yield where_in_file, {**extra_columns, **row}

    all_columns = None if columns is None else (*extra_columns, *columns)
    return Table(where=str(path), split=split, read=read_extended, columns=all_columns)


def _json_reader(path: Path) -> ReadRows:
    """Return the function with which a :class:`Table` reads the rows of a JSON file; it ignores the columns to read."""

    def read(bad_rows: BadRows, _columns_to_read: Sequence[str] | None) -> PlacedRows:
        return read_json(path, bad_rows)

    return read


def _open_csv_table(path: Path, sep: str) -> tuple[tuple[str, ...], ReadRows]:
    """Return the columns of a CSV file, and the function with which a :class:`Table` reads its rows.

    Args:
        path: Path of the file.
        sep: Separator of the fields.
    """

    def read(bad_rows: BadRows, _columns_to_read: Sequence[str] | None) -> PlacedRows:
        return read_csv(path, sep, bad_rows)

    return _csv_columns(path, sep), read


def read_name(value: object, column: str) -> str:
    """Return a cell of a user or split column as a name, with numbers spelled as in the file.

    Args:
        value: The cell: a string, an integer, or a JSON number that keeps its spelling.
        column: Name of the column, for the message.

    Raises:
        ValueError: The cell holds something else. This includes a plain ``float``, since 1.0 and 1.00 may be two users.
    """
    if isinstance(value, str):
        return value
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer:
        return str(value)
    if isinstance(value, TypedNumber) and math.isfinite(value):
        return value.spelling
    raise ValueError(f"column {column!r} holds {_describe_value(value)}; allowed: text or a whole number")


def describe_cause(error: BaseException) -> str:
    """Return the message of an error's cause, or else of the error itself, in one line."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:_LISTED_CHARACTERS] or type(cause).__name__


def _describe_value(value: object) -> str:
    """Describe a value that is not a name, for messages: numbers and booleans literally, others by their type."""
    if isinstance(value, bool | float):
        return f"{value!r:.60}"  # at most 60 characters
    return f"a value of type {type(value).__name__}"


# -------------------------------------------------------------------- JSON


def read_json(path: Path, bad_rows: BadRows) -> PlacedRows:
    """Yield the rows of a file of JSON lines, of a JSON list of objects, or of concatenated objects.

    Skips a byte order mark and blank lines. Memory is bounded by the longest row.

    Args:
        path: The file; the suffix ``.json`` allows objects that span several lines.
        bad_rows: Collects rows that are not JSON objects.

    Raises:
        DataError: The file cannot be read, or a list has a syntax error, after which no row can be located.
    """
    try:
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as file:
            line_number, line = _read_chunk_of_first_line(file)
            is_list = line.lstrip().startswith("[")
            if is_list:
                yield from _stream_objects(file, line, line_number, path, bad_rows)
                return
            is_whole_line = line.endswith("\n")
            if not is_whole_line:
                line += _read_line(file, path, line_number)
            object_spans_lines = suffix_of(path) == ".json" and not _is_object(line)
            if object_spans_lines:
                yield from _stream_objects(file, line, line_number, path, bad_rows)
                return
            yield from _read_json_lines(file, line, line_number, path, bad_rows)
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text with JSON: {error}") from None


def _read_chunk_of_first_line(file: io.TextIOWrapper) -> tuple[int, str]:
    """Return the number and the beginning of the first line that is not blank; the beginning is empty if all are blank.

    Only a chunk of the line is read, since it may be a list of many gigabytes.
    """
    line_number, chunk = 1, file.readline(_CHUNK_CHARACTERS)
    while chunk and not chunk.strip():  # a blank line, which may be longer than a chunk
        if chunk.endswith("\n"):
            line_number += 1
        chunk = file.readline(_CHUNK_CHARACTERS)
    return line_number, chunk


def _read_json_lines(file: io.TextIOWrapper, line: str, line_number: int, path: Path, bad_rows: BadRows) -> PlacedRows:
    """Yield the objects of a file of JSON lines; skip blank lines.

    Args:
        file: The file, from which ``line`` has been read.
        line: The first line.
        line_number: Number of the first line.
        path: Path of the file, for error messages.
        bad_rows: Collects lines that are not JSON objects.

    Raises:
        DataError: A line is longer than a row may be.
    """
    while line:
        if line.strip():
            try:
                row = _parse_object(line)
            except ValueError as error:
                bad_rows.add(f"{path}: line {line_number}", str(error))
            else:
                yield f"line {line_number}", row
        line_number += 1
        line = _read_line(file, path, line_number)


def _read_line(file: io.TextIOWrapper, path: Path, line_number: int) -> str:
    """Return the next line of a file, empty at its end.

    Args:
        file: The file.
        path: Its path, for error messages.
        line_number: Number of the line, for error messages.

    Raises:
        DataError: The line is longer than a row may be.
    """
    line = file.readline(MAX_ROW_CHARACTERS + 1)  # one character more shows that the line is too long
    if len(line) > MAX_ROW_CHARACTERS:
        raise DataError(f"{path}: line {line_number} is {_TOO_LONG}")
    return line


def _is_object(line: str) -> bool:
    """Return whether a line is a JSON object by itself, as in a file of JSON lines."""
    try:
        _parse_object(line)
    except ValueError:
        return False
    return True


def _parse_object(line: str) -> Row:
    """Parse a line as a JSON object.

    Raises:
        ValueError: The line is not JSON or not an object; says why.
    """
    try:
        row = json.loads(line, parse_float=TypedNumber)  # keeps the spelling of numbers, which may name users
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    except ValueError as error:  # an integer beyond Python's limit on digits
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return _require_object(row)


def _require_object(row: object) -> Row:
    """Return a JSON value if it is an object.

    Raises:
        ValueError: The value has another type.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"got a JSON {_JSON_TYPES.get(type(row), 'number')}; allowed: an object with columns and values"
        )
    return row


_TOO_DEEP = "JSON nested too deeply"
_JSON_TYPES = {list: "list", str: "string", bool: "boolean", type(None): "null"}


def _stream_objects(file: io.TextIOWrapper, head: str, line_number: int, path: Path, bad_rows: BadRows) -> PlacedRows:
    """Yield the objects of a JSON list, or of concatenated JSON values; only one object is in memory at a time.

    Args:
        file: The file, from which ``head`` has been read.
        head: The beginning of the file.
        line_number: Number of the line in which ``head`` begins.
        path: Path of the file, for error messages.
        bad_rows: Collects values that are not objects.

    Raises:
        DataError: There is a syntax error, after which no row can be located.
    """
    values = _JsonValues(file, head, line_number, path)
    is_list = values.peek_character() == "["
    if is_list:
        values.position += 1  # after the bracket
    while character := values.peek_character():
        if is_list and character == "]":
            values.position += 1
            if values.peek_character():
                raise values.error("text after the end of the list", values.position)
            return
        if is_list and values.num_parsed > 0:
            if character != ",":
                raise values.error("not JSON: Expecting ',' delimiter", values.position)
            values.position += 1
            values.skip_space()  # after the comma
        row_name = f"row {values.num_parsed + 1}"
        try:
            row = _require_object(values.parse_next())
        except DataError:
            raise
        except ValueError as error:
            bad_rows.add(f"{path}: {row_name}", str(error))
        else:
            yield row_name, row
        values.num_parsed += 1
    if is_list:
        raise values.error("the list is not closed", values.position)


class _JsonValues:
    """Parser of one JSON value after another from a file that is read in chunks.

    Args:
        file: The file, from which ``text`` has been read.
        text: The chunk in memory.
        line_number: Number of the line in which ``text`` begins.
        path: Path of the file, for error messages.
    """

    def __init__(self, file: io.TextIOWrapper, text: str, line_number: int, path: Path):
        """Start parsing at the beginning of the chunk in memory.

        Args:
            file: The file, from which ``text`` has been read.
            text: The chunk in memory, to which more of the file is appended when needed.
            line_number: Number of the line in which ``text`` begins.
            path: Path of the file, for messages.
        """
        self.file, self.text, self.line_number, self.path = file, text, line_number, path
        self.position = 0  # in `text`, of the next character to parse
        self.at_end_of_file = False
        self.num_parsed = 0  # rows so far, counted by the caller
        self._decoder = json.JSONDecoder(parse_float=TypedNumber)

    def peek_character(self) -> str:
        """Skip white space and return the next character without moving past it; an empty string at the end."""
        self.skip_space()
        return self.text[self.position : self.position + 1]

    def skip_space(self) -> None:
        """Move ``position`` past white space, reading more of the file where the text in memory ends."""
        while True:
            space = _SPACE.match(self.text, self.position)
            if space is not None:
                self.position = space.end()
            if self.position < len(self.text) or self.at_end_of_file:
                return
            self._read_more()

    def parse_next(self) -> object:
        """Return the value at ``position`` and move behind it; read more of the file if the value is cut off.

        Raises:
            DataError: There is a syntax error, or the value is too long or nested too deeply.
        """
        while True:  # each time with more of the file
            try:
                value, self.position = self._decoder.raw_decode(self.text, self.position)
                return value
            except json.JSONDecodeError as error:
                # Near the end of the text, a literal such as `false` may be cut in two.
                is_near_end = error.pos > len(self.text) - _LONGEST_LITERAL
                may_be_cut_off = error.msg.startswith("Unterminated") or is_near_end
                if self.at_end_of_file or not may_be_cut_off:
                    raise self.error(f"not JSON: {error.msg}", error.pos) from None
            except RecursionError:
                raise self.error(_TOO_DEEP, self.position) from None
            except ValueError as error:
                raise self.error(f"not JSON: {error}", self.position) from None
            if len(self.text) - self.position > MAX_ROW_CHARACTERS:
                raise self.error(_TOO_LONG, self.position)
            self._read_more()

    def _read_more(self) -> None:
        """Drop the text before ``position``, and append the next chunk of the file to the rest.

        The chunk is at least as long as the rest, so that a long value needs few reads.
        """
        self.line_number += self.text.count("\n", 0, self.position)
        rest = self.text[self.position :]
        chunk = self.file.read(max(_CHUNK_CHARACTERS, len(rest)))
        self.text, self.position = rest + chunk, 0
        self.at_end_of_file = not chunk

    def error(self, problem: str, position: int) -> DataError:
        """Return the error for a problem at a position of ``text``, with the numbers of the line and the row."""
        line_number = self.line_number + self.text.count("\n", 0, position)
        return DataError(f"{self.path}: line {line_number}: row {self.num_parsed + 1}: {problem}")


_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST_LITERAL = len("-Infinity") + 1
"""Within this many characters of the end of a chunk, a syntax error may be a literal that is cut off."""


# -------------------------------------------------------------------- CSV


def read_csv(path: Path, sep: str, bad_rows: BadRows) -> PlacedRows:
    """Yield the rows of a file whose first line names the columns.

    If several columns have the same name, the first of them counts. Missing fields at the end of a row are empty. A row
    with more fields than columns is a bad row.

    Args:
        path: Path of the file.
        sep: Separator of fields.
        bad_rows: Collects rows with too many fields.

    Raises:
        DataError: The file cannot be read, or its quotes are malformed.
    """
    with _open_csv(path, sep) as (columns, rows):
        for line_number, fields in rows:
            if len(fields) > len(columns):
                problem = f"got {len(fields)} fields for {len(columns)} columns; quote texts that contain {sep!r}"
                bad_rows.add(f"{path}: line {line_number}", problem)
                continue
            num_missing = len(columns) - len(fields)
            fields += [""] * num_missing
            # Reversed, since of equal keys a dict keeps the value that comes last.
            yield f"line {line_number}", dict(zip(reversed(columns), reversed(fields), strict=True))


def _csv_columns(path: Path, sep: str) -> tuple[str, ...]:
    """Return the names of the columns in a CSV file's first line, each once."""
    with _open_csv(path, sep) as (columns, _rows):
        return tuple(dict.fromkeys(columns))


@contextmanager
def _open_csv(path: Path, sep: str) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """Open a CSV file for the duration of the context.

    Yields the names of the columns, and an iterator over the rows that are not blank: the number of the row's last
    line, and its fields.

    Raises:
        DataError: The file cannot be read, or its quotes are malformed.
    """
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    reader: Any = None

    def read_lines(file: io.TextIOWrapper) -> Iterator[str]:
        """Yield the lines; raise an error for one that is too long for memory."""
        for line_number in count(1):
            line = _read_line(file, path, line_number)
            if not line:  # the end of the file
                return
            yield line

    try:
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(read_lines(file), delimiter=sep, strict=True)
            rows = ((reader.line_num, fields) for fields in reader if fields)
            no_row = (0, [])  # of an empty file
            _line_number, columns = next(rows, no_row)  # the first line names the columns
            yield columns, rows
    except (*UNREADABLE, UnicodeDecodeError, csv.Error) as error:
        line_number = reader.line_num if reader else 0
        raise DataError(f"{path}: line {line_number}: {error}") from None


# -------------------------------------------------------------------- Parquet


def _open_parquet(path: Path) -> tuple[tuple[str, ...], ReadRows]:
    """Return the columns of a Parquet file, and a reader of its rows.

    Returns:
        The names of the columns; and the function with which a :class:`Table` reads the rows. It opens the file again.

    Raises:
        DataError: The package ``datasets`` is missing, or the file is not Parquet.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: reading .parquet needs the package datasets: pip install 'comingle[data]'") from error

    def open_file() -> Any:
        """Open the file; a compressed one is decompressed in memory, since Parquet needs random access."""
        is_compressed = path.suffix.lower() != ".parquet"
        if is_compressed:
            return parquet.ParquetFile(pyarrow.BufferReader(open_bytes(path).read()))
        return parquet.ParquetFile(str(path))

    def read(_bad_rows: BadRows, columns_to_read: Sequence[str] | None) -> PlacedRows:
        """Yield the rows; no row of a Parquet file can be bad, since all have the same columns and types."""
        for number, row in enumerate(_parquet_rows(path, open_file, columns_to_read), start=1):
            yield f"row {number}", row

    try:
        with open_file() as file:
            columns = tuple(file.schema_arrow.names)
    except Exception as error:  # pyarrow's exceptions have no useful common base
        raise DataError(f"{path}: cannot be read as Parquet: {describe_cause(error)}") from None
    return columns, read


def _parquet_rows(path: Path, open_file: Callable[[], Any], columns_to_read: Sequence[str] | None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, with class labels replaced by their names.

    Args:
        path: Path of the file, for error messages.
        open_file: Opens the file as a ``ParquetFile``.
        columns_to_read: Columns to read; None for all.

    Raises:
        DataError: Reading fails.
    """
    with open_file() as file:
        schema = file.schema_arrow
        columns = schema.names
        if columns_to_read is not None:
            columns = [name for name in columns if name in columns_to_read]
        class_names = _class_labels(schema)  # by column
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns)
        while True:  # not a for loop, to catch errors of `next` alone
            try:
                # "lossy" converts a map to a dict, with the last of equal keys.
                rows = next(batches).to_pylist(maps_as_pydicts="lossy")
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"{path}: reading failed: {describe_cause(error)}") from None
            for row in rows:
                yield {column: _name_label(value, class_names.get(column)) for column, value in row.items()}


def _class_labels(schema: Any) -> dict[str, list[str]]:
    """Return the names of class labels by column, as ``datasets`` stores them in the metadata of a Parquet file.

    Args:
        schema: The file's ``pyarrow.Schema``.
    """
    metadata = schema.metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):  # not written by `datasets`
        return {}
    return {name: item["names"] for name, item in features.items() if isinstance(item, dict) and "names" in item}


def _name_label(value: object, class_names: Sequence[str] | None) -> object:
    """Return the name of a class label that a cell stores as its number; return other cells unchanged.

    Args:
        value: The cell.
        class_names: Names of the column's classes, in the order of their numbers; None for a column without class
            labels.
    """
    if class_names and isinstance(value, int) and 0 <= value < len(class_names):
        return class_names[value]
    return value
