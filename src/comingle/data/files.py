"""Text files and folders of a data source: suffixes, decompression, type detection, and splits named by files.

Text is shuffled before it is cut into splits, so every split depends on everything that was read. How much is read of a
source therefore follows from the recipe alone, not from token counts: the first :func:`max_read_bytes` bytes, enough
for all splits.
"""

from __future__ import annotations

import codecs
import gzip
import io
import logging
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from comingle.utils.errors import DataError

COMPRESSIONS = (".xz", ".gz")
"""Suffixes of compressed files."""
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files of rows; each may be followed by one of :data:`COMPRESSIONS`."""


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's name in lower case, without compression: ``.jsonl`` for ``Chats.JSONL.gz``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def has_row_suffix(path: Path) -> bool:
    """Return whether a file holds rows, judged by its suffix."""
    return suffix_of(path) in ROW_SUFFIXES


def is_saved_dataset(folder: Path) -> bool:
    """Return whether ``datasets`` wrote the folder with ``save_to_disk``."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def looks_like_path(source: str) -> bool:
    """Return whether a source that does not exist is a mistyped path and not a hub name, ``NAME`` or ``OWNER/NAME``."""
    begins_like_path = source.startswith((".", "~", "/"))
    has_many_slashes = source.count("/") > 1
    return begins_like_path or has_many_slashes or has_row_suffix(Path(source))


OPENERS: Mapping[str, Callable[[Path], io.BufferedIOBase]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".xz": lzma.open,
}
"""Functions that open a file for reading bytes, by its suffix."""

UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Exceptions that reading such a file raises if it is damaged or cannot be opened."""

MAX_EXPANSION = 200
"""Largest ratio of decompressed to compressed size, against decompression bombs.

Text compresses to a fifth of its size, logs to a fiftieth.
"""

ALWAYS_EXPANDED = 64 << 20
"""Decompressed bytes that are allowed whatever the ratio is."""

MAX_EXPANDED = 8 << 30
"""Largest decompressed size in bytes, unless :data:`MAX_EXPANDED_VARIABLE` sets another limit."""

MAX_EXPANDED_VARIABLE = "COMINGLE_MAX_DECOMPRESSED_BYTES"
"""Environment variable that replaces :data:`MAX_EXPANDED`, in bytes."""


def max_decompressed_bytes() -> int:
    """Return the largest allowed size of a decompressed file: 8 GiB, unless an environment variable sets another.

    The limit protects memory from small files that expand to a huge size.

    Raises:
        DataError: The environment variable is not a positive whole number.
    """
    given = os.environ.get(MAX_EXPANDED_VARIABLE, "").strip()
    if not given:
        return MAX_EXPANDED
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise DataError(f"{MAX_EXPANDED_VARIABLE}: got {given!r:.60}; allowed: a positive whole number of bytes")
    return int(given)


def open_bytes(path: Path) -> Any:
    """Open a file for reading bytes; decompress files with the suffix ``.gz`` or ``.xz``.

    Reading raises an ``OSError`` if the file is a decompression bomb: if it expands to more than
    :func:`max_decompressed_bytes`, or to more than 200 times the compressed size and more than 64 MiB.

    Raises:
        OSError: The file cannot be opened.
        DataError: The environment variable of the limit is not a positive whole number.
    """
    open_compressed = OPENERS.get(path.suffix.lower())
    if open_compressed is None:  # the suffix is not that of a compression
        return path.open("rb")
    limit = max_decompressed_bytes()
    decompressed = _BoundedExpansion(open_compressed(path), path.stat().st_size, limit)
    return io.BufferedReader(decompressed, buffer_size=1 << 16)


class _BoundedExpansion(io.RawIOBase):
    """Decompressed bytes of a file, limited relative to its compressed size and absolutely.

    Args:
        inner: Decompressing file.
        compressed_bytes: Size of the compressed file.
        limit: Largest number of decompressed bytes.
    """

    def __init__(self, inner: io.BufferedIOBase, compressed_bytes: int, limit: int):
        """Bound the number of decompressed bytes by ``limit``, and by a limit relative to the compressed size.

        The relative limit is 200 times the compressed size, but at least 64 MiB. The lower of the two limits counts.

        Args:
            inner: File whose ``read`` returns decompressed bytes.
            compressed_bytes: Size of the compressed file.
            limit: Largest number of decompressed bytes.
        """
        self._inner = inner
        relative_limit = max(ALWAYS_EXPANDED, MAX_EXPANSION * compressed_bytes)
        if limit < relative_limit:
            self._num_left = limit
            self._problem = f"expands to more than {limit:,} bytes; set {MAX_EXPANDED_VARIABLE} to allow more"
        else:
            self._num_left = relative_limit
            self._problem = (
                f"expands to more than {MAX_EXPANSION} times its size; decompress it first if this is expected"
            )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next decompressed bytes into a buffer, and return how many; 0 at the end of the file.

        :class:`io.BufferedReader` calls this method of each raw file. Here it also stops a decompression bomb, a small
        file that would expand until memory or disk is full.

        Raises:
            OSError: The file has expanded to more bytes than are allowed.
        """
        content = self._inner.read(len(buffer))
        self._num_left -= len(content)
        if self._num_left < 0:
            raise OSError(self._problem)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._inner.close()
        super().close()


MIN_READ_BYTES = 32 << 20
"""Smallest read limit in bytes: a shorter source is always read completely."""

BYTES_PER_TOKEN = 64
"""Upper bound of the mean number of bytes per token; English text has about 4."""

SplitLimit = tuple[int | None, float]
"""Token limit of a split (None: no limit) and the fraction of the source that the split gets."""


def max_read_bytes(*, train: SplitLimit, valid: SplitLimit = (None, 0.0), test: SplitLimit = (None, 0.0)) -> int | None:
    """Return how many bytes of a source to read so that every split reaches its token limit; None to read all.

    A split that gets a fraction of the source reaches its limit with ``BYTES_PER_TOKEN * max_tokens / fraction`` bytes
    of the source. The result is the maximum over the splits, and at least :data:`MIN_READ_BYTES`.

    Args:
        train: Token limit and fraction of train. Without a limit, everything is read.
        valid: Token limit and fraction of valid.
        test: Token limit and fraction of test.
    """
    max_train_tokens, _train_fraction = train
    if max_train_tokens is None:
        return None
    needed_bytes = [MIN_READ_BYTES]
    for max_tokens, fraction in (train, valid, test):
        # Without a limit, valid and test get their fraction of the text that train needs.
        if max_tokens and fraction:
            needed_bytes.append(ceil(BYTES_PER_TOKEN * max_tokens / fraction))
    return max(needed_bytes)


UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""Byte order marks of UTF-16."""

_IMAGE = "an image"
_SIGNATURES = {
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive (for example .docx, .odt or .epub)",
    b"\xd0\xcf\x11\xe0": "a legacy Office document",
    b"{\\rtf": "rich text (RTF)",
    b"\x89PNG": _IMAGE,
    b"\xff\xd8\xff": _IMAGE,
    b"GIF8": _IMAGE,
    b"\x1f\x8b": "a gzip file without the suffix .gz",
    b"\xfd7zXZ": "an xz file without the suffix .xz",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"BZh91AY&SY": "a bzip2 file",
    b"PAR1": "a Parquet file without the suffix .parquet",
    b"SQLite format 3\0": "an SQLite database",
    b"GGUF": "a GGUF file of model weights",
}
"""Descriptions of binary formats by their first bytes."""


MAX_WORD_CHARACTERS = 1 << 20
"""Largest number of characters without white space; tokenizers need gigabytes of memory for a longer word."""


def long_word_problem(text: str) -> str | None:
    """Return an error text if a word has more than a million characters, as Base64 may have; None otherwise."""
    if len(text) <= MAX_WORD_CHARACTERS:
        return None
    longest_word = max(map(len, text.split()), default=0)
    if longest_word <= MAX_WORD_CHARACTERS:
        return None
    return f"more than {MAX_WORD_CHARACTERS:,} characters without white space, so it is not text"


def describe_binary(content: bytes) -> str | None:
    """Return a description of bytes that are not text in any encoding; None if they may be text."""
    for start, kind in _SIGNATURES.items():
        if content.startswith(start):
            return kind
    if b"\0" in content and not content.startswith(UTF_16):
        return f"binary (zero byte at offset {content.index(0)})"
    return None


_SPLITS = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""Splits by the words that denote them in names of files and folders."""
_SPLIT_ORDER = ("train", "validation", "test")
_SHARD_SUFFIX = re.compile(r"[-._ ]?\d.*")
"""Rest of a file's stem after the name of a split, such as ``-00000-of-00002``."""
_WORD_SEPARATORS = re.compile(r"[-._ /0-9]+")
"""Separators of words in a path."""
_DATA_CARD = "readme.md"
_METADATA_FILES = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files of ``datasets`` that are not data."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Folder value that Hive writes for a missing value."""


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """File of rows below a folder.

    Args:
        path: The file.
        split: Split of its rows.
        extra_columns: Columns that its folders name (Hive partitioning), such as ``user=ada``.
    """

    path: Path
    split: str
    extra_columns: dict[str, str | None]


def list_files(folder: Path) -> list[str]:
    """List all files below a folder recursively, as sorted relative POSIX paths such as ``a/b.txt``.

    Follows symbolic links to folders but visits each folder once. Skips names that begin with a dot, and ``__MACOSX``.
    A folder that cannot be read is listed like a file, so that the caller reports it as unreadable.
    """
    listed: list[str] = []
    visited = {os.path.realpath(folder)}

    def list_unreadable(error: OSError) -> None:
        listed.append(Path(str(error.filename)).relative_to(folder).as_posix())

    for current, subfolders, files in os.walk(folder, followlinks=True, onerror=list_unreadable):
        # Links come last, so that a folder is visited under its own path and not under that of a link to it.
        links = [name for name in subfolders if os.path.islink(os.path.join(current, name))]
        folders = [name for name in subfolders if name not in links]
        to_visit: list[str] = []
        for name in [*sorted(folders), *sorted(links)]:
            real_path = os.path.realpath(os.path.join(current, name))
            if _is_visible(name) and real_path not in visited:
                visited.add(real_path)
                to_visit.append(name)
        subfolders[:] = to_visit  # os.walk descends into these
        relative = Path(current).relative_to(folder)
        listed += [(relative / name).as_posix() for name in files if _is_visible(name)]
    return sorted(listed)


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def list_row_files(folder: Path) -> tuple[list[RowFile], list[str]]:
    """List the files of rows below a folder by split and path, and the other files, which are not read.

    There are two rules for the split of a file:

    1. The last word in a file's path that denotes a split decides, as in ``news_train.csv``. This rule applies only if
       every path has such a word and at least one file is of train: a single ``mental_test.csv`` need not be a test
       split.
    2. Otherwise, the beginning of a file's name or the name of one of its folders denotes the split, as in
       ``train.jsonl``, ``test-00000-of-00002.parquet`` or ``validation/a.csv``. Other files belong to "train".

    Returns:
        The files of rows; and the relative paths of the other files, except a README.md.

    Raises:
        DataError: The folder has no files of rows.
    """
    row_files: list[str] = []
    other_files: list[str] = []
    names = list_files(folder)
    for name in names:
        path = folder / name
        if has_row_suffix(path) and path.is_file() and path.name not in _METADATA_FILES:
            row_files.append(name)
        elif path.name.lower() != _DATA_CARD:
            other_files.append(name)
    if not row_files:
        found = f"{len(names)} other files, first: {names[0]}" if names else "nothing"
        raise DataError(f"{folder}: no files of rows; found: {found}; allowed: {', '.join(ROW_SUFFIXES)}")

    splits = [_split_by_last_word(name) for name in row_files]
    rule_1_applies = "train" in splits and None not in splits
    if not rule_1_applies:
        splits = [_split_by_beginning(name) or "train" for name in row_files]
    files: list[RowFile] = []
    for name, split in zip(row_files, splits, strict=True):
        assert split is not None
        files.append(RowFile(path=folder / name, split=split, extra_columns=dict(_partition_columns(name))))
    return sorted(files, key=lambda file: _SPLIT_ORDER.index(file.split)), other_files


def _split_by_beginning(name: str) -> str | None:
    """Return the split of a file of rows: from the beginning of its name, or else from the names of its folders.

    If the names of several folders denote a split, the innermost counts.

    Args:
        name: Path of the file relative to the data set, such as ``test-00000-of-00002.parquet`` (test) or
            ``validation/a.csv`` (validation).

    Returns:
        "train", "validation" or "test"; None if neither the file nor a folder is named after a split.
    """
    *folders, file_name = name.lower().split("/")
    stem = file_name.partition(".")[0]
    for word, split in _SPLITS.items():
        if stem == word:
            return split
        if stem.startswith(word) and _SHARD_SUFFIX.fullmatch(stem.removeprefix(word)):  # such as -00000-of-00002
            return split
    for folder in reversed(folders):
        if folder in _SPLITS:
            return _SPLITS[folder]
    return None


def _split_by_last_word(name: str) -> str | None:
    """Return the split whose name is a word of a file's path, such as "train" for ``news_train.csv``.

    Args:
        name: Path of the file relative to the data set. Its words are separated by any other characters than letters
            and digits.

    Returns:
        "train", "validation" or "test"; the last in the path if there are several, None if there is none.
    """
    words = _WORD_SEPARATORS.split(name.lower())
    for word in reversed(words):
        if word in _SPLITS:
            return _SPLITS[word]
    return None


def _partition_columns(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield column and value of each folder ``COLUMN=VALUE`` in a path, as in partitioned data sets.

    Args:
        name: Relative path of a file, such as ``user=ada/part-0.parquet``.
    """
    *folders, _file_name = name.split("/")
    for folder in folders:
        column, sign, value = folder.partition("=")
        if column and sign:
            yield unquote(column), None if value == _NO_VALUE else unquote(value)


_LOG = logging.getLogger(__name__)
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
# A single file is cut into blocks of about this many characters, so that it can be shuffled and split like a corpus.
# Most windows of usual context lengths still lie within a block.
_BLOCK_CHARACTERS = 2000
_CHUNK_BYTES = 16 << 20
_NOTEBOOKS = (".ipynb",)
_ALLOWED = "allowed: UTF-8 text (also .gz or .xz), a folder of such files, rows (.jsonl, .json, .csv, .tsv, .parquet)"


class _NotText(Exception):
    """Reason why bytes are not text."""


def check_regular(path: Path) -> None:
    """Check that a path exists and is a file or folder, not a device or pipe, which may never end.

    Raises:
        DataError: The path does not exist, or is a device or pipe.
    """
    if not os.path.exists(path):  # unlike Path.exists, also False for a name that is too long
        raise DataError(f"{path}: no such file or folder")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: not a regular file or folder")


def read_text_file(path: Path, *, max_bytes: int | None = None) -> list[str]:
    """Read a UTF-8 text file, plain or compressed by ``.xz`` or ``.gz``, as documents that are blocks of paragraphs.

    Paragraphs end at blank lines; consecutive ones are joined until a block has 2,000 characters. Paragraphs are not
    cut, so a file without blank lines is one document.

    Args:
        path: Path of the file.
        max_bytes: Largest number of bytes to read. A longer file is read, with a warning, up to the last line end
            before that number. None to read all.

    Raises:
        DataError: The file cannot be opened, or is not UTF-8 text.
    """
    try:
        with open_bytes(path) as file:
            text, is_longer = _read_head(file, max_bytes)
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except _NotText as reason:
        raise DataError(f"{path}: {reason}") from None
    if is_longer and max_bytes is not None:
        warn_longer(path, max_bytes)
    return join_paragraphs(split_paragraphs(text))


def read_text_folder(folder: Path, *, max_bytes: int | None = None) -> list[str]:
    """Read every text file below a folder as one document, in the order of their relative paths.

    Skips hidden files and folders. Also skips files that are not UTF-8 text, files of rows, and notebooks, and counts
    them in one warning; to read such a file, give its path as the user's source.

    Args:
        folder: Path of the folder.
        max_bytes: Number of bytes after which reading ends; None for all.
    """
    documents: list[str] = []
    not_text: list[str] = []
    rows_or_notebooks: list[str] = []
    num_read = 0  # bytes
    for name in list_files(folder):
        path = folder / name
        if has_row_suffix(path) or path.suffix.lower() in _NOTEBOOKS:
            rows_or_notebooks.append(name)
            continue
        if max_bytes is not None and num_read >= max_bytes:
            warn_longer(folder, max_bytes)
            break
        max_bytes_of_file = None if max_bytes is None else max_bytes - num_read
        try:
            if not path.is_file():  # a device or pipe, or a folder that cannot be read
                raise _NotText
            with path.open("rb") as file:
                text, _is_longer = _read_head(file, max_bytes_of_file)
                num_read += file.tell()
        except (OSError, _NotText):
            not_text.append(name)
        else:
            documents.append(text)
    warnings: list[str] = []
    if not_text:
        warnings.append(f"skipped {len(not_text)} files that are not UTF-8 text, first: {not_text[0]}")
    if rows_or_notebooks:
        skipped = f"skipped {len(rows_or_notebooks)} files of rows or notebooks"
        warnings.append(f"{skipped}, first: {rows_or_notebooks[0]}")
    if warnings:
        _LOG.warning("%s: %s", folder, "; ".join(warnings))
    return documents


def warn_longer(source: str | Path, max_bytes: int) -> None:
    """Warn that a source was not read to its end."""
    _LOG.warning("%s: reading only the first %s bytes, which suffice for the token limits", source, f"{max_bytes:,}")


def split_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, which blank lines separate."""
    return (paragraph.strip("\n") for paragraph in _BLANK_LINES.split(text) if paragraph.strip())


def join_paragraphs(paragraphs: Iterable[str]) -> list[str]:
    """Return blocks of whole paragraphs, each of at least 2,000 characters except the last."""
    blocks: list[list[str]] = [[]]
    for paragraph in paragraphs:
        characters_of_block = sum(map(len, blocks[-1]))
        if characters_of_block >= _BLOCK_CHARACTERS:
            blocks.append([])
        blocks[-1].append(paragraph)
    return ["\n\n".join(block) for block in blocks if block]


def _read_head(file: io.BufferedIOBase, max_bytes: int | None) -> tuple[str, bool]:
    """Return the text of a file's first ``max_bytes`` bytes, and whether the file has more bytes.

    If it has more, the text ends at the last line end within these bytes.

    Args:
        file: The file, at its beginning.
        max_bytes: Largest number of bytes to decode; None for all.

    Raises:
        _NotText: The content is not UTF-8 text.
    """
    if max_bytes is None:
        return _decode(file.read()), False
    content = _read_up_to(file, max_bytes + 1)  # one byte more shows whether the file is longer
    if len(content) <= max_bytes:
        return _decode(content), False
    text = _decode(content[:max_bytes], final=False)  # not final: the last character may be cut in two
    whole_lines, _line_end, _cut_line = text.rpartition("\n")
    return whole_lines or text, True  # without a line end, all of the text that was read


def _read_up_to(file: io.BufferedIOBase, max_bytes: int) -> bytes:
    """Read up to ``max_bytes`` bytes in chunks; ``read(max_bytes)`` would allocate that much for a short file too."""
    chunks: list[bytes] = []
    num_left = max_bytes
    while num_left > 0:
        chunk = file.read(min(num_left, _CHUNK_BYTES))
        if not chunk:  # the end of the file
            break
        chunks.append(chunk)
        num_left -= len(chunk)
    return b"".join(chunks)


def _decode(content: bytes, *, final: bool = True) -> str:
    """Decode UTF-8, drop a byte order mark, and replace Windows line ends.

    Args:
        content: Bytes of a file from its beginning.
        final: The bytes reach to the end of the file. If not, a last character that is cut in two is dropped.

    Raises:
        _NotText: The bytes are not UTF-8 text, or have a word that is too long for tokenizers.
    """
    binary_kind = describe_binary(content)
    if binary_kind is not None:
        raise _NotText(f"is {binary_kind}, not text; {_ALLOWED}")
    without_mark = content.removeprefix(codecs.BOM_UTF8)
    try:
        text, _num_bytes = codecs.utf_8_decode(without_mark, "strict", final)
    except UnicodeDecodeError as error:
        offset = error.start + len(content) - len(without_mark)
        problem = f"byte {content[offset]:#04x} at offset {offset}"
        if content.startswith(UTF_16):
            problem = "it is UTF-16"
        raise _NotText(f"not UTF-8 text ({problem}); convert it to UTF-8 first") from None
    word_problem = long_word_problem(text)
    if word_problem is not None:
        raise _NotText(f"{word_problem}; break it into lines")
    return text.replace("\r\n", "\n")
