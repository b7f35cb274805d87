"""Where a newcomer's run is written, until it is whole and gets its folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comingle.config import Recipe
from comingle.runs.folders import check_folder
from comingle.utils.errors import RunError
from comingle.utils.files import locked
from comingle.utils.records import told_in_one_line


@contextmanager
def drafted(folder: Path | None, recipe: Recipe, joined: Path | None, *, force: bool) -> Iterator[Path | None]:
    """Where a newcomer's run is written until it is whole: what stopped before cannot be gone on with.

    ``joined`` is the folder of the run that is joined.

    Raises:
        RunError: the folder cannot be used, is that of the run that is joined, or somebody else is about to fill it.
    """
    if folder is None:
        yield None
        return
    check_folder(folder, recipe, resume=None, force=force)
    there, to = None if joined is None else joined.resolve(), folder.resolve()
    if there is not None and (there.is_relative_to(to) or to.is_relative_to(there)):
        raise RunError(f"{folder}: in the place of the run that is joined, which is only read; use another --out")
    outer = folder.with_name(f".{folder.name}.joining")
    with told_in_one_line(outer):
        outer.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with locked(outer):
                shutil.rmtree(outer / folder.name, ignore_errors=True)
                try:
                    yield outer / folder.name
                finally:
                    shutil.rmtree(outer, ignore_errors=True)
        except OSError:  # a disk that is too full to say who writes
            shutil.rmtree(outer, ignore_errors=True)
            raise
