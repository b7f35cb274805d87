"""Whom a run's events are told besides its own log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from comingle.engines.events import tensorboard
from comingle.engines.trackers import TRACKERS, Tracked, Tracker
from comingle.recipes import Recipe


def boards(folder: Path, recipe: Recipe) -> Iterator[Tracker]:
    """TensorBoard, where it is installed, and what the recipe asks for."""
    if (board := tensorboard(folder / "tensorboard")) is not None:
        yield board
    place = folder.resolve()
    content = recipe.model_dump(mode="json")
    told = Tracked(name=place.name, group=place.parent.name, recipe=content, text=recipe.as_yaml())
    for name in recipe.runtime.track:
        yield TRACKERS[name](told)
