"""Whether a checkpoint is what was written: ``SHA256SUMS`` lists a sum of every other file in its folder.

``sha256sum --check SHA256SUMS`` reads it too. A folder is whole if that file is, to the byte, what the others give.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from comingle.errors import RunError
from comingle.records import resume_command

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
