"""Folders that are written whole or not at all, and replaced only where an export has written them."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from comingle.errors import RunError
from comingle.export.card import TAG
from comingle.records import DRAFT, check_name, told_in_one_line

CARD = "README.md"
_OURS = (CARD, "*.json", "*.safetensors", "*.gguf", "*.model", "*.txt", "*.jinja")
"""What an export writes: configuration, weights and a tokenizer's files."""


def check_target(folder: Path, *, force: bool) -> None:
    """Whether an export may be written to a folder; touches nothing.

    Raises:
        RunError: it cannot be a folder, exists without ``force``, or holds what no export has written.
    """
    check_name(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --to names a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if names and not force:
        raise RunError(f"{folder}: exists; --force replaces an export, --to names another folder")
    strange = [name for name in names if not any(fnmatch(name, one) for one in _OURS)]
    if names and (strange or not _is_export(folder)):
        hint = f" ({strange[0]!r} is in it)" if strange else ""
        raise RunError(f"{folder}: is not an exported model{hint}, so --force does not touch it; use another --to")


@contextmanager
def written_whole(folder: Path, *, force: bool) -> Iterator[Path]:
    """A draft beside ``folder`` that takes its place at the end; for its owner alone, as it has learned private text.

    Raises:
        RunError: as :func:`check_target`, or the disk does not take it.
    """
    from safetensors import SafetensorError

    check_target(folder, force=force)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        with told_in_one_line(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            draft.mkdir(mode=0o700)
            yield draft
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise RunError(f"{folder}: cannot be written to: {error}") from None  # a library's words for the system's
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_export(folder: Path) -> bool:
    card = folder / CARD
    return card.is_file() and f"- {TAG}" in card.read_text(encoding="utf-8", errors="replace").splitlines()
