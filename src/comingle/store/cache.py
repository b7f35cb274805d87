"""Populations that a recipe's users were once read into: read anew where a source has changed.

They lie in the user's cache (:func:`comingle.utils.files.cache_folder`), readable by nobody else, under a name that
follows from what was read, by path, size and time of its files, and from all that decides on how it was encoded. What
nobody has used for 30 days goes. Sources that are no files (names of the hub, of plug-ins) are read anew each time.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from comingle.config import Recipe
from comingle.store.tokens import ABOUT
from comingle.store.turns import Turns, write_in_turn
from comingle.utils.errors import DataError
from comingle.utils.files import cache_folder, make_once
from comingle.utils.records import expand_home

_FORM = 3
"""Of the files; what an older version has written is written anew."""

_DAYS_UNUSED = 30


def populated(recipe: Recipe, turns: Turns[Any]) -> tuple[Path, bool]:
    """The folder of a recipe's population, which is written where it is not there; and whether it was there.

    Of several processes on one machine one writes.

    Raises:
        DataError: the cache cannot be written to.
    """
    states = _digest(_states(turns.sources()))
    if states is None:
        folder = Path(tempfile.mkdtemp(prefix="comingle-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        write_in_turn(turns, folder)
        return folder, False
    decides = [_FORM, version("comingle"), recipe.data.model_dump(mode="json"), recipe.data_seed, turns.key(), states]
    home = cache_folder() / "populations"
    target = home / hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(home / f"{target.name}.lock"):
            there = (target / ABOUT).is_file()
            if not there:  # what tidies up may take single files
                shutil.rmtree(target, ignore_errors=True)
            make_once(target, partial(write_in_turn, turns))
            os.utime(target / ABOUT)
        _sweep(home)
    except OSError as error:
        told = f"{home}: cannot be written to: {error.strerror}; COMINGLE_CACHE names another place for it"
        raise DataError(told) from None
    return target, there


def _digest(states: Iterator[list[Any] | None]) -> str | None:
    """Of as many as there may be; None where there is one of what is no file."""
    digest = hashlib.sha256()
    for state in states:
        if state is None:
            return None
        digest.update(json.dumps(state).encode())
    return digest.hexdigest()


def _states(sources: list[str]) -> Iterator[list[Any] | None]:
    """By which a source is known again; None for what is no file or folder."""
    for source in sources:
        path = expand_home(source)
        if not os.path.exists(path):  # which a name that is too long is not either
            yield None
        elif path.is_dir():
            yield from _states_below(path)
        else:
            yield _state(path)


def _states_below(top: Path) -> Iterator[list[Any]]:
    """Folders behind links too, as a class may be one; each once, as links may go round."""
    seen = set[str]()
    for place, folders, files in os.walk(top, followlinks=True):
        real = os.path.realpath(place)
        yield [place, real]  # an empty folder may be a class
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (_state(Path(place) / name) for name in sorted(files))


def _state(path: Path) -> list[Any]:
    """Besides size and time, which an archive may set to what they were, when the file was last changed in any way."""
    try:
        found = path.stat()
    except OSError:  # a link to nowhere, of which reading says what there is to say
        return [str(path.absolute())]
    return [str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _sweep(home: Path) -> None:
    """Delete what nobody has used for long."""
    for about in home.glob(f"*/{ABOUT}"):
        # Another process may have been quicker, or be about to use it.
        with suppress(FileNotFoundError, Timeout), FileLock(home / f"{about.parent.name}.lock", blocking=False):
            if time.time() - about.stat().st_mtime > _DAYS_UNUSED * 86400:
                shutil.rmtree(about.parent, ignore_errors=True)
