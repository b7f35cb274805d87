"""The user's cache: folders that are expensive to make, made once, whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from comingle.errors import RunError
from comingle.records import expand_home, to_disk

# A partial folder this old belongs to a process that was killed.
_ABANDONED_SECONDS = 3600.0


def cache_folder() -> Path:
    """Return the folder of what comingle can make again: $COMINGLE_CACHE, or the platform's cache folder.

    Raises:
        RunError: there is no home directory, or $COMINGLE_CACHE is in that of an unknown user.
    """
    if chosen := os.environ.get("COMINGLE_CACHE"):
        return expand_home(chosen)
    try:
        return _platform_cache() / "comingle"
    except RuntimeError:
        raise RunError("no home directory (HOME is not set); COMINGLE_CACHE names a folder for the cache") from None


def _platform_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def make_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """The folder `target`; where it is missing, `fill` writes into another name that becomes `target` when whole.

    Whatever stops `fill`, kill -9 and a power cut included, no folder called `target` appears. Two processes may both
    fill; the first to finish is kept.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        fill(partial)
        _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _publish(partial: Path, target: Path) -> None:
    for path in partial.rglob("*"):
        if path.is_file():
            to_disk(path)  # else a power cut may leave the name, and zeros behind it
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, and its folder is as good
            raise


def _sweep(target: Path) -> None:
    for left in target.parent.glob(f"{target.name}.partial-*"):
        with suppress(FileNotFoundError):  # another process has been quicker
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
