"""The runs of a comparison several at a time, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comingle.comparing.comparing import Key, as_compared, check_folders, compare_runs, folders_of
from comingle.comparing.parallel import in_processes
from comingle.config import Recipe
from comingle.progress import reporting
from comingle.training.kinds.base import Materials
from comingle.utils.errors import ComingleError
from comingle.utils.terminal import errors

Ended = tuple[Key, dict[str, Any] | ComingleError]
"""A run that has ended: its metrics, or what stopped it."""


def compare_beside(
    recipes: Mapping[Key, Recipe],
    folder: Path,
    *,
    jobs: int,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
    ready: Callable[[Materials], None] = lambda materials: None,
) -> Iterator[Ended]:
    """As :func:`comingle.comparing.comparing.compare_runs`, ``jobs`` runs at a time, in the order in which they end.

    Runs of a seed share a process, which reads the data once, unless there are more jobs than seeds. Unless ``quiet``,
    and where stderr is no terminal, each tells of its rounds.

    Raises:
        ComingleError: what concerns all runs, as data that cannot be read.
    """
    recipes = as_compared(recipes, folders_of(recipes, folder), resume=resume)
    check_folders(recipes, folders_of(recipes, folder), resume=resume, force=force)
    silent = quiet or errors.is_terminal  # several bars would write over each other
    work = partial(_run_cells, among=recipes, folder=folder, resume=resume, force=force, quiet=silent, ready=ready)
    yield from in_processes(portions(list(recipes), jobs), work, jobs=jobs, told=_told)


def portions(keys: Sequence[Key], jobs: int) -> list[list[Key]]:
    """Runs that share a process: those of a seed, or parts of them, so that there are as many groups as jobs."""
    seeds = list(dict.fromkeys(seed for _, seed in keys))
    parts = -(-jobs // len(seeds))
    by_seed = [[key for key in keys if key[1] == seed] for seed in seeds]
    return [some for of_seed in by_seed for i in range(parts) if (some := of_seed[i::parts])]


def _told(keys: Sequence[Key]) -> str:
    (_, seed), methods = keys[0], ", ".join(method for method, _ in keys)
    return f"{methods}, seed {seed}"


def _run_cells(
    keys: Sequence[Key], among: Mapping[Key, Recipe], ready: Callable[[Materials], None], quiet: bool, **options: Any
) -> Iterator[Ended]:
    first = {"ready": ready} if keys[0] == next(iter(among)) else {}
    some = {key: among[key] for key in keys}
    with reporting(quiet=quiet) as reporter:
        for key, found in compare_runs(some, reporter=reporter, among=among, **first, **options):
            yield key, found if isinstance(found, ComingleError) else found.metrics
