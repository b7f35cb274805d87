"""What happens beside a run's rounds: checkpoints, and whom its events are told besides its own log."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from comingle.config import Recipe
from comingle.data.populations import digest_names
from comingle.training.backends.local import InProcess
from comingle.training.checkpoints import progress_of, prune_checkpoints
from comingle.training.evaluation import Clock
from comingle.training.events import MOST_SERIES, TRACKERS, EventLog, Summarised, Tracked, Tracker, tensorboard
from comingle.training.rounds import Checkpoint
from comingle.training.state import Stored


def boards(folder: Path, recipe: Recipe, users: int) -> Iterator[Tracker]:
    """TensorBoard, where it is installed, and what the recipe asks for, of a run of so many users."""
    for tracker in _trackers(folder, recipe):
        yield tracker if users <= MOST_SERIES else Summarised(tracker)


def _trackers(folder: Path, recipe: Recipe) -> Iterator[Tracker]:
    if (board := tensorboard(folder / "tensorboard")) is not None:
        yield board
    place = folder.resolve()
    content = recipe.model_dump(mode="json")
    told = Tracked(name=place.name, group=place.parent.name, recipe=content, text=recipe.as_yaml())
    for name in recipe.runtime.track:
        yield TRACKERS[name](told)


def saving(federation: InProcess, recipe: Recipe, folder: Path | None, log: EventLog | None) -> Checkpoint:
    """Writes checkpoints to the run's folder, where it has one."""
    clients = federation.clients

    def checkpoint(done: int, clock: Clock) -> None:
        if folder is None:
            return
        if log is not None:
            log.to_disk()
        stored = isinstance(clients.state, Stored)
        progress = progress_of(
            done,
            recipe.fingerprint,
            [] if stored else clients.everybody,
            clock=clock,
            events_bytes=log.size_bytes if log else 0,
            population=digest_names(clients.everybody) if stored else "",
            stopped=clients.stopped_after is not None,
        )
        federation.save(folder, progress)
        federation.share(partial(prune_checkpoints, folder, recipe.checkpoints.keep))

    return checkpoint
