"""The two verbs of Python: run a recipe, and open what has been run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comingle.engines.checkpoints import Progress, list_checkpoints
from comingle.engines.checksums import resume_command
from comingle.engines.events import Observer
from comingle.errors import RunError
from comingle.kinds.base import Materials
from comingle.progress import LOADING, reporting
from comingle.recipes import Recipe, load_recipe
from comingle.records import read_metrics
from comingle.runs.folders import check_folder, open_folder
from comingle.runs.opening import reopen
from comingle.runs.session import Run, build, describe, execute, prepare, restore, warn_unread


def run(
    recipe: Recipe | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
    materials: Materials | None = None,
    progress: bool = False,
    **changes: Any,
) -> Run:
    """Run a recipe: an object, or the path of a file; ``changes`` replace keys, as ``seed=1`` or ``method="local"``.

    With ``out`` everything is written to that folder, from which ``resume=True`` goes on after an interruption;
    without it nothing is written. ``progress`` tells on stderr how far it is, in a notebook below the cell.

    Raises:
        ComingleError: whatever the user can correct, in one line.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    recipe = recipe.with_changes(changes) if changes else recipe
    folder = Path(out) if out is not None else None
    if folder is not None:
        check_folder(folder, recipe, resume=resume, force=force)
    elif resume:
        raise RunError("resume: no run folder; give out=FOLDER of the run to go on with")
    with reporting(quiet=not progress) as reporter:
        with reporter.waiting(LOADING):
            materials = materials or prepare(recipe)
            federation = build(recipe, materials)
        warn_unread(recipe)
        watching = [*observers, reporter.watch(federation.clients)]
        if folder is None:
            return execute(federation, recipe, None, observers=watching)
        with open_folder(folder, recipe, describe(materials, recipe), resume=resume, force=force):
            return execute(federation, recipe, folder, resume=resume, observers=watching)


def load(folder: str | Path) -> Run:
    """Open a finished run, to talk to its users' models or predict with them, out of its folder and its base alone.

    The users' data is read when something asks for it: to score models on it, or for methods that tune on it.

    Raises:
        RunError: not a finished run of comingle, or the base changed.
    """
    folder = Path(folder)
    metrics = read_metrics(folder)
    recipe = load_recipe(folder)
    federation = build(recipe, reopen(folder, recipe))
    if federation.clients.method.trains:
        _check_round(folder, metrics, restore(federation, folder, recipe))
        federation.clients.choose()
    return Run(folder=folder, recipe=recipe, metrics=metrics, federation=federation)


def _check_round(folder: Path, metrics: dict[str, Any], progress: Progress) -> None:
    newest = list_checkpoints(folder)[-1]
    if progress.round != metrics["rounds"]:
        raise RunError(
            f"{newest}: the run has {metrics['rounds']} rounds, its last checkpoint {progress.round}; "
            f"{resume_command(newest)} goes on from there"
        )
