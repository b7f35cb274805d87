"""Which local files and folders hold rows, and what ``datasets`` calls their formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMPRESSIONS = (".xz", ".gz")
# Suffix -> builder of ``datasets`` and its options.
BUILDERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}


def builder_of(path: Path) -> tuple[str, dict[str, Any]] | None:
    """The builder for a file's suffix and its options; None where it is no file of rows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return BUILDERS.get(suffixes[-1]) if suffixes else None


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote the folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def looks_like_path(source: str) -> bool:
    """Hub names are ``NAME`` or ``OWNER/NAME``; anything else that does not exist is a mistyped path."""
    return source.startswith((".", "~", "/")) or source.count("/") > 1 or builder_of(Path(source)) is not None
