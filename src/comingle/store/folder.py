"""``store/`` in a run's folder: its files, and what is said where the disk does not take them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comingle.engines.checksums import resume_command
from comingle.errors import RunError

FOLDER, ABOUT = "store", "store.json"


def path_of(run: Path, group: str) -> Path:
    """The file of a group's records."""
    return run / FOLDER / f"{group}.bin"


def read_json(path: Path) -> dict[str, Any]:
    """A mapping.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); restore it, or begin anew with another --out") from None


def round_of(draft: Path) -> str:
    """The name that a checkpoint's draft will have."""
    return draft.name.removeprefix(".").rpartition(".")[0]


@contextmanager
def told(run: Path | None) -> Iterator[None]:
    """Within, the disk may take no more.

    Raises:
        RunError: it does not; says how the run goes on.
    """
    try:
        yield
    except OSError as error:
        where = tempfile.gettempdir() if run is None else run / FOLDER
        goes_on = "" if run is None else f"; once it can be, {resume_command(run / 'checkpoints' / 'newest')} goes on"
        raise RunError(f"{where}: cannot be written to: {error.strerror}{goes_on}") from None
