"""The folder that ``comingle theory`` writes; what a user put into one is never touched."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from comingle.papers.theory.claims import Curve
from comingle.papers.theory.plots import draw_residuals
from comingle.utils.errors import RunError
from comingle.utils.records import write_json, write_text

FILES = ("recipe.yaml", "theory.json", "residuals.png", "residuals.svg")


def check_folder(folder: Path, *, force: bool) -> None:
    """Whether results may be written to a folder; touches nothing.

    Raises:
        RunError: it is a file, holds results and ``force`` is not given, holds anything else, or cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    strange = [name for name in names if name not in FILES]
    if strange:
        raise RunError(f"{folder}: holds {strange[0]!r}, which is none of {', '.join(FILES)}; use another --out")
    if names and not force:
        raise RunError(f"{folder}: exists; --force replaces it, --out names another")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:  # now, not after the computation
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None


def write_folder(folder: Path, recipe: str, results: dict[str, Any], curves: list[Curve]) -> None:
    """Write recipe, results and figures, each in place of an earlier one.

    Raises:
        RunError: it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "recipe.yaml", recipe)
        write_json(folder / "theory.json", results)
        draw_residuals(curves, folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None
