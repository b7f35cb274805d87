"""Suffixes of files of rows, and which names are paths."""

from __future__ import annotations

from pathlib import Path

COMPRESSIONS = (".xz", ".gz")
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files of rows, each also with one of a compression behind it."""


def suffix_of(path: Path) -> str:
    """Return the last suffix of a file's name in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def has_rows(path: Path) -> bool:
    """Return whether a file holds rows, by its name."""
    return suffix_of(path) in ROWS


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote the folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def looks_like_path(source: str) -> bool:
    """Hub names are ``NAME`` or ``OWNER/NAME``; anything else that does not exist is a mistyped path."""
    return source.startswith((".", "~", "/")) or source.count("/") > 1 or has_rows(Path(source))
