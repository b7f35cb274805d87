"""One writer for each run folder: a lock of the operating system, which ends with the process that holds it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from comingle.errors import RunError
from comingle.records import write_text

LOCK, HOLDER = ".lock", ".holder"
"""The file that is locked, which stays, and the one that says by whom, which goes."""

_PATIENCE_SECONDS = 0.5  # somebody else may just be looking whether it is free


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else writes to a run folder for as long as this is entered.

    Raises:
        RunError: somebody does already; says who.
    """
    with _hold(folder):
        holder = folder / HOLDER
        write_text(holder, f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}\n")
        try:
            yield
        finally:
            holder.unlink(missing_ok=True)


def check_free(folder: Path) -> None:
    """Whether nobody writes to a run folder now.

    Raises:
        RunError: somebody does; says who.
    """
    if (folder / LOCK).exists():
        with _hold(folder):
            pass


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=_PATIENCE_SECONDS)
    except Timeout:
        raise RunError(
            f"{folder}: {_read_holder(folder)} writes to it; wait until that has ended, or use another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _read_holder(folder: Path) -> str:
    try:
        return (folder / HOLDER).read_text(encoding="utf-8").strip() or "another process"
    except (OSError, ValueError):
        return "another process"
