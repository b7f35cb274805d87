"""Checks before a page or a figure is written: the packages that draw it, and its place."""

from __future__ import annotations

import tempfile
from pathlib import Path

from comingle.utils.errors import ComingleError, RunError


def require_packages(verb: str) -> None:
    """Require the packages that draw figures and pages.

    Raises:
        ComingleError: one is not installed.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ComingleError(f"{verb} needs {error.name}: pip install 'comingle[reports]'") from None


def check_target(path: Path, *, force: bool, option: str = "--out", replace: str = "--force") -> None:
    """Require that a file can be written.

    Args:
        path: the file.
        force: replace an existing file.
        option: the name of the option or argument that chose the path, for messages.
        replace: the option or argument that replaces an existing file, for messages.

    Raises:
        RunError: it exists without ``force``, it is a folder, or its folder is missing or read-only.
    """
    if path.is_dir():
        raise RunError(f"{path}: is a folder; {option} names a file")
    if path.exists() and not force:
        raise RunError(f"{path}: exists; {replace} replaces it, {option} names another")
    if not path.parent.is_dir():
        raise RunError(f"{path.parent}: no such folder to write {path.name} to")
    try:  # now, not after minutes of drawing; rights alone say little of what a file system allows
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
