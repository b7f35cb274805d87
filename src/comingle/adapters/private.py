"""Files that nobody else can have written: what is loaded as code is opened once, looked at, and used as it was opened.

Private is what belongs to this user, is no link, and can be written to by neither group nor others.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_private(path: Path | str, *, folder: int | None = None) -> int | None:
    """A private file or folder, opened; None if it is missing or not private.

    ``folder`` is an opened one that ``path`` is relative to, so that nobody can put another in its place.
    """
    try:  # not waiting for the writer of a FIFO
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    if _is_private(os.fstat(handle)):
        return handle
    os.close(handle)
    return None


def _is_private(status: os.stat_result) -> bool:
    kind = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return kind and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
