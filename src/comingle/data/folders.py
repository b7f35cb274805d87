"""Files below a folder: which hold rows, in which split each is, and what is left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from comingle.data.formats import ROWS, has_rows
from comingle.utils.errors import DataError

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
_ORDER = ("train", "validation", "test")
_SHARD = re.compile(r"[-._ ]?\d.*")
_WORDS = re.compile(r"[-._ /0-9]+")
_DATA_CARD = "readme.md"
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """A file of rows below a folder; ``more`` are columns that its folders name, as ``user=ada``."""

    path: Path
    split: str
    more: dict[str, str | None]


def list_files(folder: Path) -> list[str]:
    """List all files below a folder recursively, as sorted relative POSIX paths.

    Follows symbolic links to folders but visits each folder once. Skips names that begin with a dot, and ``__MACOSX``.
    A folder that cannot be read is listed as if it were a file.
    """
    found: list[str] = []
    seen = {os.path.realpath(folder)}

    def unreadable(error: OSError) -> None:
        found.append(Path(str(error.filename)).relative_to(folder).as_posix())

    for root, folders, files in os.walk(folder, followlinks=True, onerror=unreadable):
        kept: list[str] = []
        for name in sorted(folders, key=lambda name: (os.path.islink(os.path.join(root, name)), name)):
            real = os.path.realpath(os.path.join(root, name))
            if _is_visible(name) and real not in seen:
                seen.add(real)
                kept.append(name)
        folders[:] = kept
        below = Path(root).relative_to(folder)
        found += [(below / name).as_posix() for name in files if _is_visible(name)]
    return sorted(found)


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def list_row_files(folder: Path) -> tuple[list[RowFile], list[str]]:
    """List the files of rows below a folder by split and path, and the other files, which are left out.

    A file is in a split by its own name, or that of a folder, as ``train.jsonl``, ``test-00000-of-00002.parquet`` or
    ``validation/a.csv``; a file without such a name is in "train". Where all files have such a word somewhere in their
    names, as ``news_train.csv`` beside ``news_test.csv``, that decides.

    Raises:
        DataError: no file of rows in it.
    """
    names = list_files(folder)
    rows = [name for name in names if has_rows(Path(name)) and (folder / name).is_file()]
    rows = [name for name in rows if Path(name).name not in _METADATA]
    left_out = [name for name in names if name not in set(rows) and Path(name).name.lower() != _DATA_CARD]
    if not rows:
        there = f"{len(names)} other files, first: {names[0]}" if names else "nothing"
        raise DataError(f"{folder}: no file of rows in it ({', '.join(ROWS)}); found: {there}")
    worded = [_split_by_word(name) for name in rows]
    splits = worded if "train" in worded and None not in worded else [_split_by_name(name) for name in rows]
    files = [
        RowFile(path=folder / name, split=split or "train", more=dict(_partitions(name)))
        for name, split in zip(rows, splits, strict=True)
    ]
    return sorted(files, key=lambda file: _ORDER.index(file.split)), left_out


def _split_by_name(name: str) -> str | None:
    """The split that a file's name, or the nearest of its folders' names, is."""
    *folders, own = name.lower().split("/")
    stem = own.partition(".")[0]
    for word, split in _SPLITS.items():
        if stem.startswith(word) and (stem == word or _SHARD.fullmatch(stem[len(word) :])):
            return split
    return next((_SPLITS[one] for one in reversed(folders) if one in _SPLITS), None)


def _split_by_word(name: str) -> str | None:
    """The split that the last word of this kind in a file's path names."""
    return next((_SPLITS[word] for word in reversed(_WORDS.split(name.lower())) if word in _SPLITS), None)


def _partitions(name: str) -> Iterator[tuple[str, str | None]]:
    for part in name.split("/")[:-1]:
        key, sign, value = part.partition("=")
        if key and sign:
            yield unquote(key), None if value == _NO_VALUE else unquote(value)
