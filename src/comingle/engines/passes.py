"""Batches that are passes over a user's samples: which samples each user takes in which step, as numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from comingle.config.settings import Training
from comingle.data.populations import listed
from comingle.data.samples.samples import epoch
from comingle.engines.feeds import Feed
from comingle.methods.base import Phase, Stream
from comingle.models.windows import PAD
from comingle.utils.seeds import generator


class PassFeed(Feed):
    """Each round every user goes ``local_epochs`` times over its train samples, in an order of its own.

    The last batch of a pass may be smaller; where it has fewer than ``least`` samples it is left out. ``trainers`` have
    a name, and ``train`` and ``valid`` sets with a length.
    """

    unit = "samples"
    even = False
    """Whether all batches have one shape, whoever shares a step."""

    def __init__(self, trainers: Sequence[Any], training: Training, batch_size: int, *, least: int = 1):
        self.trainers, self.training, self.batch_size, self.least = listed(trainers), training, batch_size, least
        self._order: dict[tuple[object, ...], Int64[Tensor, "steps batch"]] = {}
        self._round = -1

    @abstractmethod
    def count(self, trainer: int, stream: Stream) -> int:
        """How many samples a trainer has."""

    def examples(self, trainer: int) -> int:
        """Samples or conversations."""
        return self.count(trainer, "train")

    def _batches(self, count: int) -> int:
        """Batches of one pass over so many samples."""
        full, rest = divmod(count, self.batch_size)
        return full + (rest >= self.least)

    def batch_sizes(self, user: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A last batch with fewer than ``least`` is not trained on."""
        count, size = len(user.train), self.batch_size
        every = tuple(min(size, count - first) for first in range(0, count, size))
        return tuple(one for one in every if one == size or one >= self.least), every

    def steps(self, trainer: int) -> int:
        """Batches of all local epochs."""
        return self.training.local_epochs * self._batches(self.count(trainer, "train"))

    def seen(self, trainer: int) -> int:
        """Training samples of a round."""
        count = self.count(trainer, "train")
        return self.training.local_epochs * min(count, self._batches(count) * self.batch_size)

    def numbers(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int64[Tensor, "users batch"]:
        """The next batch of each trainer's shuffled pass, as large as the largest of them, or if ``even`` as any.

        ``PAD`` fills the others.
        """
        self.enter(round_number)
        purpose = f"{phase.purpose}/{phase.stream}" if step >= 0 else "before"
        place = repeat if step < 0 else step * phase.steps + repeat
        drawn = torch.stack([self._batch(trainer, phase.stream, purpose, round_number, place) for trainer in trainers])
        return drawn if self.even else drawn[:, : max(1, int((drawn != PAD).sum(1).max()))]

    def enter(self, round_number: int) -> None:
        """Take note of the round: orders follow from it, so they are kept for its steps alone."""
        if round_number != self._round:
            self._order, self._round = {}, round_number

    def _batch(
        self, trainer: int, stream: Stream, purpose: str, round_number: int, place: int
    ) -> Int64[Tensor, " batch"]:
        count = self.count(trainer, stream)
        number, at = divmod(place, max(1, self._batches(count)))
        key = (trainer, purpose, number)
        if key not in self._order:
            random = generator(self.training.seed, self.trainers[trainer].name, round_number, purpose, number)
            self._order[key] = epoch(count, self.batch_size, random)
        return self._order[key][at]

    def every(self, trainers: Sequence[int], stream: Stream = "train") -> Iterator[Int64[Tensor, "users batch"]]:
        """All samples of each trainer, in order."""
        counts = torch.tensor([self.count(trainer, stream) for trainer in trainers]).unsqueeze(1)
        for first in range(0, int(counts.max()), self.batch_size):
            at = torch.arange(first, first + self.batch_size).expand(len(counts), -1)
            yield torch.where(at < counts, at, PAD)
