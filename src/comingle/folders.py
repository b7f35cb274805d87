"""Run folders: made, gone on with, or refused; nothing that a user made is overwritten without being asked to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from comingle.errors import RunError
from comingle.recipes import Recipe, load_recipe
from comingle.records import check_name, write_text

RUN_FILES = ("recipe.yaml", "events.jsonl", "metrics.json", "checkpoints", "tensorboard", "report.html", "figures")
"""What a run folder holds, with the report and the figures that may be made of it."""


def open_folder(folder: Path, recipe: Recipe, *, resume: bool, force: bool) -> None:
    """Make a run folder, or take one up again; after everything that could be wrong with the recipe has been checked.

    Raises:
        RunError: as :func:`check_folder`, or it cannot be written to.
    """
    check_folder(folder, recipe, resume=resume, force=force)
    if resume:
        return
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_text(folder / "recipe.yaml", recipe.as_yaml())
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None


def check_folder(folder: Path, recipe: Recipe, *, resume: bool, force: bool) -> None:
    """Whether a run may be written to a folder; touches nothing.

    Raises:
        RunError: it exists and neither ``resume`` nor ``force`` is given, it belongs to another recipe, or no folder
            can have its name.
    """
    check_name(folder)
    if resume:
        if not (folder / "recipe.yaml").exists():
            raise RunError(f"{folder}: nothing to resume, no recipe.yaml in it")
        if (was := load_recipe(folder)).fingerprint != recipe.fingerprint:
            raise RunError(f"{folder}: belongs to another recipe, {_difference(was, recipe)}; use another --out")
        return
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names and not force:
        raise RunError(f"{folder}: exists; --resume goes on with it, --force replaces it, --out names another")
    # Only what a run writes, drafts that a crash left included: a recipe alone, or one among other files, is a user's.
    strange = sorted(
        n for n in names if n not in RUN_FILES and not n.startswith(tuple(f".{own}." for own in RUN_FILES))
    )
    if names and (strange or not {"recipe.yaml", "events.jsonl"} <= names):
        hint = f" ({strange[0]!r} is in it)" if strange else ""
        raise RunError(f"{folder}: is not a run folder{hint}, so --force does not touch it; use another --out")


def _difference(was: Recipe, now: Recipe) -> str:
    before, after = _flat(was.computed), _flat(now.computed)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            return f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
    return "they differ"


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {prefix: content}
    inner = [_flat(v, f"{prefix}.{k}" if prefix else str(k)) for k, v in content.items()]
    return {k: v for part in inner for k, v in part.items()}
