"""Folders that are written whole or not at all, and replaced only where an export has written them."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comingle.export.card import TAG
from comingle.utils.errors import RunError
from comingle.utils.records import DRAFT, check_name, told_in_one_line, write_json

CARD = "README.md"
LIST = "comingle_export.json"
"""Names what an export has written, so that the next one replaces that and nothing else."""

_KNOWN = {
    *(CARD, LIST, "config.json", "generation_config.json", "adapter_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "model.gguf"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""What exports write, for those of older versions, which have no list."""


def check_target(folder: Path, *, force: bool) -> None:
    """Whether an export may be written to a folder; touches nothing.

    Raises:
        RunError: it cannot be a folder, exists without ``force``, or holds what no export has written.
    """
    check_name(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --to names a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise RunError(f"{folder}: exists; --force replaces an export, --to names another folder")
    if not _is_export(folder):
        raise RunError(f"{folder}: is not an exported model, so --force does not touch it; use another --to")
    if (strange := _strange(folder)) is not None:
        told = f"is not an exported model alone ({strange!r} is in it), so --force does not touch it"
        raise RunError(f"{folder}: {told}; move that away, or use another --to")


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
            write_json(draft / LIST, {"written": sorted(_names(draft))})
            check_target(folder, force=force)  # once more: it took a while, and somebody may have put something there
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


def _names(folder: Path) -> set[str]:
    """Of everything below it, folders and links too; no link is followed."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def _strange(folder: Path) -> str | None:
    """The first thing in an exported folder that no export has written."""
    try:
        own = {LIST, *json.loads((folder / LIST).read_text(encoding="utf-8"))["written"]}
    except (OSError, ValueError, KeyError, TypeError):  # of an older version, or damaged
        own = {path.name for path in folder.iterdir() if path.name in _KNOWN or _SHARD.fullmatch(path.name)}
    return min(_names(folder) - own, default=None)
