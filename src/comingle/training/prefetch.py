"""Batches that are on the GPU before they are needed: drawn and copied while the device works on the step before.

What a batch holds follows from (user, round, phase, step, repeat) alone, so one that is drawn early is the same. It is
copied out of pinned memory on a stream of its own, which the computation waits for before it reads. Who will draw what
is a guess, which is right unless the cohort changes: a wrong one costs a draw, and never another batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from comingle.methods.base import Phase
from comingle.training.batch_sources import Feed

Drawn = Int[Tensor, "users batch ..."]
Place = tuple[tuple[int, ...], Phase, int, int, int]
"""Whose batch, of which phase, round, step and repeat: what a feed's ``draw`` is asked with."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch as it was drawn, and, if it was drawn early, its copy on the device."""

    place: Place
    drawn: Drawn
    there: Drawn | None = None


class Ahead:
    """The part of a feed that a step draws from; of each phase it has the next batch."""

    def __init__(self, feed: Feed, device: torch.device):
        self.feed, self.device = feed, device
        self.stream: Any = torch.cuda.Stream(device)
        self.now: Batch | None = None
        self.ready: dict[Phase, Batch] = {}

    def draw(self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int) -> Drawn:
        """As the feed draws it."""
        place = (tuple(trainers), phase, round_number, step, repeat)
        early = self.ready.pop(phase, None)
        if early is None or early.place != place:
            early = Batch(place=place, drawn=self.feed.draw(trainers, phase, round_number, step, repeat))
        self.now = early
        return early.drawn

    def move(self, drawn: Drawn, device: torch.device) -> Drawn:
        """The batch on the device; what is another than the one drawn last, or part of it, is copied now."""
        if self.now is None or drawn is not self.now.drawn or self.now.there is None:
            return drawn.to(device)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(self.stream)
        self.now.there.record_stream(computing)  # so that its memory is not given away while it is read
        return self.now.there

    def ahead(self) -> None:
        """Draw the batch that the phase at hand takes next, and begin to copy it."""
        place = None if self.now is None else self._following(self.now.place)
        if place is None or (place[1] in self.ready and self.ready[place[1]].place == place):
            return
        drawn = self.feed.draw(*place)
        with torch.cuda.stream(self.stream):
            there = drawn.pin_memory().to(self.device, non_blocking=True)
        self.ready[place[1]] = Batch(place=place, drawn=drawn, there=there)

    def _following(self, place: Place) -> Place | None:
        trainers, phase, number, step, repeat = place
        if step < 0:  # before the first step, where every batch is another phase's
            return None
        if repeat + 1 < phase.steps:
            return trainers, phase, number, step, repeat + 1
        left = tuple(trainer for trainer in trainers if self.feed.steps(trainer) > step + 1)
        return (left, phase, number, step + 1, 0) if left else None


def ahead(feed: Feed, device: torch.device) -> Ahead:
    """What a step on a GPU draws from."""
    return Ahead(feed, device)
