"""Atomic files, locks, checksums and the user's cache folder.

A *private* file belongs to the current user, is not a link, and is writable by neither group nor others. ``SHA256SUMS``
contains the checksums of all other files in a checkpoint, in the format of ``sha256sum --check``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from comingle.utils.errors import ComingleError, RunError
from comingle.utils.records import expand_home, resume_command, to_disk, write_text

LOCK, HOLDER = ".lock", ".holder"
"""Names of the lock file, which is kept, and of the file that describes the holder, which is removed."""

_LOCK_SECONDS = 0.5  # another process may hold the lock briefly, in check_free


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder against other writers within a ``with`` block.

    Raises:
        RunError: Another process writes to it. The message names the process.
    """
    with _hold_lock(folder):
        holder = folder / HOLDER
        write_text(holder, f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}\n")
        try:
            yield
        finally:
            holder.unlink(missing_ok=True)


def check_free(folder: Path) -> None:
    """Check that no process writes to a run folder, before its run is replaced or resumed.

    Raises:
        RunError: A process writes to it. The message names the process.
    """
    if (folder / LOCK).exists():
        with _hold_lock(folder):  # raises the error if another process holds it
            pass


def is_locked(folder: Path) -> bool:
    """Return whether a process writes to a run folder; False if this cannot be seen, as in another user's folder."""
    try:
        check_free(folder)
    except RunError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder within a ``with`` block.

    Raises:
        RunError: Another process holds it. The message names the process.
    """
    from filelock import FileLock, Timeout  # slow to import, and most commands lock nothing

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=_LOCK_SECONDS)
    except Timeout:
        raise RunError(
            f"{folder}: in use by {_read_holder(folder)}; wait until it has ended, or use another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _read_holder(folder: Path) -> str:
    """Return the description of the process that holds a folder's lock, for messages; "another process" if unknown."""
    try:
        description = (folder / HOLDER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return "another process"
    return description or "another process"


# A partial folder this old belongs to a process that was killed.
_ABANDONED_SECONDS = 3600.0


def cache_folder() -> Path:
    """Return the cache folder: $COMINGLE_CACHE, or a folder in the platform's cache folder.

    Raises:
        RunError: There is no home directory, or $COMINGLE_CACHE names the home directory of an unknown user.
    """
    chosen = os.environ.get("COMINGLE_CACHE")
    if chosen:
        return expand_home(chosen)
    try:
        return _platform_cache() / "comingle"
    except RuntimeError:
        raise RunError("no home directory (HOME is not set); set COMINGLE_CACHE to a folder for the cache") from None


def _platform_cache() -> Path:
    """Return the platform's folder for caches of all programs.

    Raises:
        RuntimeError: There is no home directory.
    """
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def make_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """Return the folder ``target``, after creating it with ``fill`` if it is missing.

    The content is written to a temporary folder, which is renamed when it is complete, so an interruption leaves no
    folder ``target``. If two processes create it, the first one to finish wins.

    Args:
        target: The folder.
        fill: Writes the content to the folder that it is called with.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _delete_abandoned(target)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        fill(partial)
        _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # does nothing if it was renamed
    return target


def _publish(partial: Path, target: Path) -> None:
    """Rename a complete temporary folder to ``target``, after writing its files to disk.

    If another process has created ``target`` meanwhile, its folder is kept.
    """
    for path in partial.rglob("*"):
        if path.is_file():
            to_disk(path)  # otherwise a power cut may leave a file of zeros
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # another process was faster, and its folder is equivalent
            raise


def _delete_abandoned(target: Path) -> None:
    """Delete temporary folders of ``target`` that processes left behind when they were killed.

    Folders that changed within the last hour are kept, as another process may still be writing to them.
    """
    for partial in target.parent.glob(f"{target.name}.partial-*"):
        with suppress(FileNotFoundError):  # another process has deleted it meanwhile
            seconds_since_change = time.time() - partial.stat().st_mtime
            if seconds_since_change > _ABANDONED_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def open_private(path: Path | str, *, folder: int | None = None) -> int | None:
    """Open a file or folder that no other user can have written, and return its descriptor.

    It belongs to the current user, is not a link, and is writable by neither group nor others. Return None if it is
    missing or not private in this sense.

    Args:
        path: The file or folder.
        folder: Descriptor of an open folder that ``path`` is relative to, so that it cannot be replaced meanwhile.
    """
    # O_NOFOLLOW fails on links; O_NONBLOCK does not wait for the writer of a FIFO.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
    except OSError:
        return None
    if _is_private(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    return None


def _is_private(status: os.stat_result) -> bool:
    """Return whether only the current user can have written a file or folder, so that its content can be trusted.

    Args:
        status: The status of the open file or folder.
    """
    is_file_or_folder = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    is_writable_by_others = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return is_file_or_folder and status.st_uid == os.geteuid() and not is_writable_by_others


SUMS = "SHA256SUMS"
_DIGEST_COLUMNS = 66
"""Width of a digest and two spaces, after which a line of ``SHA256SUMS`` has the file's name."""


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    # Longer names are later: round-10000 comes after round-9999.
    return sorted((run / "checkpoints").glob("round-*"), key=lambda folder: (len(folder.name), folder.name))


def seal(folder: Path, known: Sequence[bytes] | None = None) -> None:
    """Write ``SHA256SUMS``, the checksums of all files in a checkpoint, as the last step of writing it.

    Args:
        folder: Folder of the checkpoint.
        known: Lines ``DIGEST  NAME`` of ``SHA256SUMS`` that other processes have computed for the files that they
            wrote; other files are read.
    """
    known_line_by_name: dict[str, bytes] = {}
    for line in known or ():
        name = line[_DIGEST_COLUMNS:].strip().decode()
        known_line_by_name[name] = line
    lines = []
    for name in _checkpoint_files(folder):
        if name in known_line_by_name:
            lines.append(known_line_by_name[name])
        else:
            lines.append(checksum_line(folder / name))
    (folder / SUMS).write_bytes(b"".join(lines))


def verify(folder: Path, name: str | None = None) -> None:
    """Check the checksums of a checkpoint, or of its file ``name``.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the only file to check; None for all.

    Raises:
        RunError: It is damaged. The message names the newest intact checkpoint.
    """
    damage = _find_damage(folder, name)
    if damage:
        raise RunError(f"{folder}: damaged: {damage}; {advise(folder)}")


def advise(folder: Path) -> str:
    """Return advice on a damaged checkpoint: which older one is intact, and how to resume the run from it.

    A run resumes from its newest checkpoint, so the damaged one, all later ones and damaged older ones must be removed.
    """
    run = folder.parent.parent  # a checkpoint is the folder RUN/checkpoints/round-N
    checkpoints = list_checkpoints(run)
    if folder in checkpoints:
        index = checkpoints.index(folder)
        older, to_remove = checkpoints[:index], checkpoints[index:]
    else:  # it has another name or is gone; the newest checkpoint is not trusted either
        older, to_remove = checkpoints[:-1], [folder]
    while older and _find_damage(older[-1]):
        to_remove.insert(0, older.pop())
    quoted_paths = " ".join(shlex.quote(str(path)) for path in to_remove)
    resume = f"`rm -r {quoted_paths}`, then {resume_command(run)}"
    if not older:
        return f"no older checkpoint is intact: {resume} starts again"
    return f"{older[-1].name} is intact: {resume} continues from there"


def _find_damage(folder: Path, name: str | None = None) -> str:
    """Return how a checkpoint differs from the checksums in ``SHA256SUMS``, such as "state.safetensors is missing".

    Args:
        folder: Folder of the checkpoint.
        name: Name of the only file to compare; None for all.

    Returns:
        A description of the damage; empty if there is none.
    """
    try:
        recorded = (folder / SUMS).read_bytes()  # a line "DIGEST  NAME" for each file
        names = _checkpoint_files(folder) if name is None else [name]
        lines = [checksum_line(folder / file) for file in names]
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    for file, line in zip(names, lines, strict=True):
        if line not in recorded:  # the file has changed, or is not listed
            return f"{file} does not match {SUMS}"
    has_compared_all = name is None
    if not has_compared_all or recorded == b"".join(lines):
        return ""
    # All files match, but SHA256SUMS differs: it lists more files, or is incomplete.
    lines_without_file = [line for line in recorded.splitlines(keepends=True) if line not in lines]
    if not lines_without_file:
        return f"{SUMS} is truncated"
    first_line = lines_without_file[0]
    missing_name = first_line[_DIGEST_COLUMNS:].decode("utf-8", "replace").strip()
    return f"{missing_name!r} is missing"


def _checkpoint_files(folder: Path) -> list[str]:
    """Return the sorted names of a checkpoint's files, without ``SHA256SUMS``."""
    return sorted(path.name for path in folder.iterdir() if path.name != SUMS)


def checksum_line(path: Path) -> bytes:
    """Return the line of a file in ``SHA256SUMS``: digest, two spaces, name."""
    return f"{file_digest(path)}  {path.name}\n".encode()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    import hashlib  # slow to import, and most commands check no checkpoint

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def delete_unchanged(digests: Mapping[Path, str]) -> list[Path]:
    """Delete files with a recorded digest, and return those that are not deleted as other files have replaced them.

    Args:
        digests: SHA-256 by file, as of :func:`file_digest`. A file that does not exist is skipped.
    """
    existing = {path: digest for path, digest in digests.items() if path.is_file()}
    replaced = [path for path, digest in existing.items() if file_digest(path) != digest]
    for path in existing:
        if path not in replaced:
            path.unlink()
    return replaced


def require_packages(verb: str) -> None:
    """Check that the packages that draw figures and pages are installed.

    Args:
        verb: The command that needs them, for the message.

    Raises:
        ComingleError: A package is not installed.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ComingleError(f"{verb} needs {error.name}: pip install 'comingle[reports]'") from None


def check_target(path: Path, *, force: bool, option: str = "--out", replace: str = "--force") -> None:
    """Check that an output file can be written, before the work that produces its content.

    Args:
        path: Path of the file.
        force: Replace an existing file.
        option: Name of the option or argument with the path, for error messages.
        replace: Name of the option or argument that replaces an existing file, for error messages.

    Raises:
        RunError: It exists without ``force``, it is a folder, or its folder is missing or read-only.
    """
    if path.is_dir():
        raise RunError(f"{path}: is a folder; {option} must be a file")
    if path.exists() and not force:
        raise RunError(f"{path}: exists; {replace} replaces it, {option} names another")
    if not path.parent.is_dir():
        raise RunError(f"{path.parent}: no such folder; create it to write {path.name}")
    try:  # fail before minutes of drawing; permissions alone do not show what a file system allows
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
