"""``store/`` in a run's folder: its files, and what is said where the disk does not take them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comingle.utils.errors import RunError
from comingle.utils.records import resume_command

FOLDER, ABOUT = "store", "store.json"


TABLE = "places"
"""So begin the names of a checkpoint's tables of where records are."""


@dataclass(frozen=True)
class Part:
    """The users of process ``number`` of ``count``: whose records are in files of their own."""

    number: int = 0
    count: int = 1

    @property
    def _suffix(self) -> str:
        return f"-{self.number}-of-{self.count}" if self.count > 1 else ""

    def records(self, run: Path, group: str) -> Path:
        """The file of a group's records."""
        return run / FOLDER / f"{group}{self._suffix}.bin"

    def table(self, checkpoint: Path) -> Path:
        """A checkpoint's table of their places."""
        return checkpoint / f"{TABLE}{self._suffix}.safetensors"


def parts_of(checkpoint: Path) -> list[Part]:
    """Whose tables a checkpoint has; those of none where it has no store."""
    found = sorted(path.stem.removeprefix(TABLE) for path in checkpoint.glob(f"{TABLE}*.safetensors"))
    counts = {int(name.rpartition("-")[2]) if name else 1 for name in found}
    return [Part(number, count) for count in counts for number in range(count)]


def read_json(path: Path) -> dict[str, Any]:
    """A mapping.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); restore it, or begin anew with another --out") from None


@contextmanager
def told(run: Path | None) -> Iterator[None]:
    """Within, the disk may take no more.

    Raises:
        RunError: it does not; says how the run goes on.
    """
    try:
        yield
    except OSError as error:
        path = Path(error.filename or (run or Path(tempfile.gettempdir())) / FOLDER)
        where = path.parent if run is None or run not in path.parents else run / FOLDER
        goes_on = "" if run is None else f"; once it can be, {resume_command(run)} goes on"
        raise RunError(f"{where}: cannot be written to: {error.strerror or error}{goes_on}") from None


def require_files(run: Path, checkpoint: Path, groups: Sequence[str]) -> None:
    """Whether everything is there that a checkpoint names.

    Raises:
        RunError: it is not.
    """
    parts = [part.records(run, group) for part in parts_of(checkpoint) for group in groups]
    for path in (run / FOLDER / ABOUT, *parts):
        if not path.is_file():
            raise RunError(f"{path}: no such file; restore it, or begin anew with another --out")


def check_store(run: Path, checkpoint: Path, about: Mapping[str, Any], groups: Sequence[str]) -> None:
    """Whether a checkpoint and the store beside it are of one run, and of a recipe whose store is ``about`` this.

    Raises:
        RunError: they are not, or something is missing.
    """
    kept = read_json(checkpoint / ABOUT)
    if {key: value for key, value in kept.items() if key != "id"} != about:
        raise RunError(
            f"{checkpoint}: its users' records are of another recipe, runtime.store or runtime.dtype; use another --out"
        )
    require_files(run, checkpoint, groups)
    if read_json(run / FOLDER / ABOUT) != kept:
        raise RunError(f"{run / FOLDER}: of another run than {checkpoint.name}; restore the one that belongs to it")


def remove_files(run: Path, checkpoints: Sequence[Path]) -> None:
    """Delete records that none of these checkpoints names, as of as many processes as there are no more."""
    counts = {part.count for checkpoint in checkpoints for part in parts_of(checkpoint)}
    for path in (run / FOLDER).glob("*.bin"):
        count = path.stem.rpartition("-of-")[2] if "-of-" in path.stem else "1"
        if int(count) not in counts:
            path.unlink()
