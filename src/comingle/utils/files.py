"""Atomic files, locks, checksums and the user's cache folder.

A *private* file belongs to this user, is not a link, and is writable by neither group nor others. ``SHA256SUMS`` lists
a checksum of every other file in a checkpoint, in the format of ``sha256sum --check``.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from comingle.utils.errors import ComingleError, RunError
from comingle.utils.records import expand_home, resume_command, to_disk, write_text

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


SUMS = "SHA256SUMS"


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first."""
    # Longer names are later: round-10000 comes after round-9999.
    return sorted((run / "checkpoints").glob("round-*"), key=lambda folder: (len(folder.name), folder.name))


def seal(folder: Path, known: Sequence[bytes] | None = None) -> None:
    """Write down the sums of all files in a checkpoint; the last thing that is done to it.

    ``known`` are the lines of files that others have written and summed up themselves.
    """
    there = {line[66:].strip().decode(): line for line in known or ()}
    (folder / SUMS).write_bytes(b"".join(there.get(name) or line_of(folder / name) for name in _names(folder)))


def verify(folder: Path, name: str | None = None) -> None:
    """Nothing if a checkpoint is whole, or its file ``name`` is.

    Raises:
        RunError: it is not, with an older one that is.
    """
    if damage := _find_damage(folder, name):
        raise RunError(f"{folder}: damaged, {damage}; {advise(folder)}")


def advise(folder: Path) -> str:
    """What to do about a checkpoint that cannot be used: which older one is whole, and how to go on from it."""
    checkpoints = list_checkpoints(folder.parent.parent)
    spoilt = checkpoints[checkpoints.index(folder) :] if folder in checkpoints else [folder]
    while len(spoilt) < len(checkpoints) and _find_damage(older := checkpoints[-len(spoilt) - 1]):
        spoilt.insert(0, older)
    remove = (
        f"`rm -r {' '.join(shlex.quote(str(each)) for each in spoilt)}`, then {resume_command(folder.parent.parent)}"
    )
    if len(spoilt) == len(checkpoints):
        return f"no older one is whole: {remove} begins anew"
    return f"{checkpoints[-len(spoilt) - 1].name} is whole: {remove} goes on from there"


def _find_damage(folder: Path, name: str | None = None) -> str:
    """What is wrong with a checkpoint, or with one file of it; empty if nothing is."""
    try:
        told = (folder / SUMS).read_bytes()
        names = [name] if name else _names(folder)
        lines = [line_of(folder / each) for each in names]
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    for each, line in zip(names, lines, strict=True):
        if line not in told:
            return f"{each} and {SUMS} do not agree"
    if name or told == b"".join(lines):
        return ""
    strange = [line for line in told.splitlines(keepends=True) if line not in lines]
    return f"{strange[0][66:].decode('utf-8', 'replace').strip()!r} is missing" if strange else f"{SUMS} is torn"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != SUMS)


def line_of(path: Path) -> bytes:
    """What is written down of a file."""
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n".encode()


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
