"""A run as it was at its newest checkpoint, of whatever users it is."""

from __future__ import annotations

from pathlib import Path

from comingle.config import Recipe
from comingle.config.settings import MEMORY
from comingle.data.populations import digest_names
from comingle.training.backends.local import InProcess
from comingle.training.checkpoints import Progress, read_progress
from comingle.training.client import Clients
from comingle.training.state import Stored, check_names, reorder_kept
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints


def restore(federation: InProcess, folder: Path, recipe: Recipe) -> Progress:
    """Both halves as they were at the newest checkpoint of a run.

    Raises:
        RunError: there is none, or it is damaged or belongs to another recipe.
    """
    newest, progress = federation.each(lambda: _newest(folder, recipe))
    clients, server = federation.clients, federation.server
    was, names = progress.trainers, clients.everybody
    if progress.population or isinstance(clients.state, Stored):
        federation.each(lambda: _check_population(newest, progress, clients))
        was = names
    else:
        federation.each(lambda: check_names(newest, was, names))
    clients.stopped_after = progress.round if progress.stopped else None
    kept = federation.load(newest, progress)
    clients.resized()
    if federation.leads:
        server.restore(reorder_kept(kept, was, names, server.by_user))
    server.version = federation.share(lambda: server.version)
    return progress


def _check_population(newest: Path, progress: Progress, clients: Clients) -> None:
    """Whether a checkpoint whose tensors are elsewhere, or should be, is of these users in this order."""
    if not (progress.population and isinstance(clients.state, Stored)):
        kept, now = ("disk", MEMORY) if progress.population else (MEMORY, "disk")
        raise RunError(
            f"{newest}: written with runtime.store: {kept}; got {now}; a run goes on with what it began with"
        )
    if progress.population != digest_names(clients.everybody):
        raise RunError(f"{newest}: of other users, or in another order; with runtime.store: disk both stay as they are")


def _newest(folder: Path, recipe: Recipe) -> tuple[Path, Progress]:
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise RunError(f"{folder}: no checkpoint in it")
    progress = read_progress(checkpoints[-1])
    if progress.fingerprint != recipe.fingerprint:
        raise RunError(
            f"{checkpoints[-1]}: belongs to another recipe ({progress.fingerprint}, not {recipe.fingerprint})"
        )
    return checkpoints[-1], progress
