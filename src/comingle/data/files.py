"""Plain text on disk: one file, or a folder of files, as documents."""

from __future__ import annotations

import codecs
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from comingle.data.compressed import UNREADABLE, open_bytes
from comingle.data.folders import list_files
from comingle.data.formats import has_rows
from comingle.data.kinds import UTF_16, kind_of, word_problem
from comingle.utils.errors import DataError

_LOG = logging.getLogger(__name__)
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
# A single file becomes blocks of about this many characters, so that it can be shuffled and split like a corpus while
# most windows of the usual contexts still see running text.
_BLOCK_CHARACTERS = 2000
_PIECE = 16 << 20
_NOTEBOOKS = (".ipynb",)
_ACCEPTED = "accepted: UTF-8 text (also .gz or .xz), a folder of such files, rows (.jsonl, .json, .csv, .tsv, .parquet)"


class _NotText(Exception):
    """Why some bytes are no text."""


def check_regular(path: Path) -> None:
    """See that there is a file or a folder, and not a device or a pipe, which may never end.

    Raises:
        DataError: there is not.
    """
    if not os.path.exists(path):  # which a name that is too long is not either
        raise DataError(f"{path}: no such file or folder")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: not a regular file or folder")


def read_text_file(path: Path, *, most: int | None = None) -> list[str]:
    """The documents of one UTF-8 text file, plain or compressed by ``.xz`` or ``.gz``: blocks of whole paragraphs.

    Paragraphs end at blank lines; consecutive ones are joined until a block has 2,000 characters. A paragraph is never
    cut, so a file without blank lines is one document. Of a longer file the first ``most`` bytes are read, to the end
    of their last whole line.

    Raises:
        DataError: the file cannot be opened, or is no UTF-8 text.
    """
    try:
        with open_bytes(path) as file:
            text, longer = _read_head(file, most)
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except _NotText as reason:
        raise DataError(f"{path}: {reason}") from None
    if longer and most is not None:
        warn_longer(path, most)
    return join_paragraphs(split_paragraphs(text))


def read_text_folder(folder: Path, *, most: int | None = None) -> list[str]:
    """Read every text file below a folder, in the order of their relative paths, one document a file.

    Hidden files and folders are passed over. Files that are not UTF-8 text, files of rows and notebooks are left out,
    and counted in one warning: name such a file itself as the user. Reading ends when ``most`` bytes have been read.
    """
    documents: list[str] = []
    skipped: list[str] = []
    rows: list[str] = []
    left = most
    for name in list_files(folder):
        path = folder / name
        if has_rows(path) or path.suffix.lower() in _NOTEBOOKS:
            rows.append(name)
            continue
        if most is not None and left is not None and left <= 0:
            warn_longer(folder, most)
            break
        try:
            if not path.is_file():
                raise _NotText
            with path.open("rb") as file:
                text, _ = _read_head(file, left)
                left = left if left is None else left - file.tell()
            documents.append(text)
        except (OSError, _NotText):
            skipped.append(name)
    left_out = [f"{len(skipped)} files skipped that are not UTF-8 text, first: {skipped[0]}"] if skipped else []
    if rows:
        left_out.append(f"{len(rows)} files skipped that hold rows or notebooks, not prose, first: {rows[0]}")
    if left_out:
        _LOG.warning("%s: %s", folder, "; ".join(left_out))
    return documents


def warn_longer(source: str | Path, most: int) -> None:
    """Say that a source was not read to its end."""
    _LOG.warning("%s: longer than what is kept of it; its first %s bytes are read", source, f"{most:,}")


def split_paragraphs(text: str) -> Iterator[str]:
    """What stands between blank lines."""
    return (paragraph.strip("\n") for paragraph in _BLANK_LINES.split(text) if paragraph.strip())


def join_paragraphs(paragraphs: Iterable[str]) -> list[str]:
    """Blocks of whole paragraphs, each of 2,000 characters or more save the last."""
    blocks: list[list[str]] = [[]]
    for paragraph in paragraphs:
        if sum(map(len, blocks[-1])) >= _BLOCK_CHARACTERS:
            blocks.append([])
        blocks[-1].append(paragraph)
    return ["\n\n".join(block) for block in blocks if block]


def _read_head(file: Any, most: int | None) -> tuple[str, bool]:
    """The text of the first ``most`` bytes, to the end of their last whole line, and whether there are more."""
    content: bytes = file.read() if most is None else _read_up_to(file, most + 1)
    if most is None or len(content) <= most:
        return _decode(content), False
    text = _decode(content[:most], final=False)
    return text.rpartition("\n")[0] or text, True


def _read_up_to(file: Any, most: int) -> bytes:
    """So many bytes, piece by piece: asked for all at once, memory for all of them is taken whatever is there."""
    pieces, left = [file.read(min(most, _PIECE))], most
    while pieces[-1] and (left := left - len(pieces[-1])) > 0:
        pieces.append(file.read(min(left, _PIECE)))
    return b"".join(pieces)


def _decode(content: bytes, *, final: bool = True) -> str:
    """UTF-8 text with Unix line ends; a byte order mark is dropped. If not ``final``, half a character may be left."""
    if kind := kind_of(content):
        raise _NotText(f"is {kind}, not text; {_ACCEPTED}")
    try:
        text, _ = codecs.utf_8_decode(content.removeprefix(codecs.BOM_UTF8), "strict", final)
    except UnicodeDecodeError as error:
        # Of the text's own bytes: where a mark has been dropped, three earlier than in the file.
        at = error.start + len(content) - len(error.object)
        coding = "it is UTF-16" if content.startswith(UTF_16) else f"byte {content[at]:#04x} at offset {at}"
        raise _NotText(f"not UTF-8 text ({coding}); convert it to UTF-8 first") from None
    if problem := word_problem(text):
        raise _NotText(f"{problem}; break it into lines")
    return text.replace("\r\n", "\n")
