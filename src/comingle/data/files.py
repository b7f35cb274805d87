"""Plain text on disk: one file, or a folder of files, as documents."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from comingle.data.compressed import UNREADABLE, open_bytes
from comingle.errors import DataError

_LOG = logging.getLogger(__name__)
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
# A single file becomes blocks of about this many characters, so that it can be shuffled and split like a corpus while
# most windows of the usual contexts still see running text.
_BLOCK_CHARACTERS = 2000


def read_text_file(path: Path) -> list[str]:
    """The documents of one UTF-8 text file, plain or compressed by ``.xz`` or ``.gz``: blocks of whole paragraphs.

    Paragraphs end at blank lines; consecutive ones are joined until a block has 2,000 characters. A paragraph is never
    cut, so a file without blank lines is one document.

    Raises:
        DataError: the file cannot be opened, or is no UTF-8 text.
    """
    try:
        return cut_paragraphs(_decode(_read_bytes(path)))
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({_describe(error)}); convert it to UTF-8 first") from error


def read_text_folder(folder: Path) -> list[str]:
    """Every text file below a folder, in the order of their relative paths, one document a file.

    Hidden files and folders are passed over. Files that are not UTF-8 text are skipped, and their number logged as a
    warning. Compressed files and tables inside a folder are not opened: name such a file itself as the user.
    """
    documents: list[str] = []
    skipped: list[str] = []
    for path in _visible_files(folder):
        try:
            documents.append(_decode(path.read_bytes()))
        except (OSError, UnicodeDecodeError):
            skipped.append(path.relative_to(folder).as_posix())
    if skipped:
        _LOG.warning("%s: %d files skipped that are not UTF-8 text, first: %s", folder, len(skipped), skipped[0])
    return documents


def cut_paragraphs(text: str) -> list[str]:
    """Blocks of whole paragraphs, each of 2,000 characters or more save the last."""
    blocks: list[list[str]] = [[]]
    for paragraph in _BLANK_LINES.split(text):
        if sum(map(len, blocks[-1])) >= _BLOCK_CHARACTERS:
            blocks.append([])
        if paragraph.strip():
            blocks[-1].append(paragraph.strip("\n"))
    return ["\n\n".join(block) for block in blocks if block]


def _visible_files(folder: Path) -> Iterator[Path]:
    """Files below a folder without a dot-name on their way, sorted by relative path on every system alike."""
    relative = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return (folder / name for name in relative if not any(part.startswith(".") for part in name.split("/")))


def _read_bytes(path: Path) -> bytes:
    with open_bytes(path) as file:
        return file.read()


def _decode(content: bytes) -> str:
    """UTF-8 text with Unix line ends; a byte order mark is dropped, a zero byte means a binary file."""
    if b"\0" in content:
        at = content.index(b"\0")
        raise UnicodeDecodeError("utf-8", content, at, at + 1, "zero byte")
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def _describe(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} at offset {error.start}"
