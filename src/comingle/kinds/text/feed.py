"""Random windows of token streams, and exact scores of whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from comingle.config.settings import Training
from comingle.data.populations import listed
from comingle.data.text.streams import UserData
from comingle.engines.feeds import SCORED_PER_SLOT, Feed, Predict
from comingle.engines.training import Portions, portions
from comingle.methods.base import Phase
from comingle.models.hardware import require_bytes
from comingle.models.scoring import Gates, Score, score_streams
from comingle.models.windows import PAD, evaluation_windows, fixed_windows, random_windows
from comingle.utils.seeds import generator


class TextFeed(Feed):
    """Random windows of each trainer's token streams."""

    unit = "tokens"

    def __init__(
        self, trainers: Sequence[UserData], training: Training, batch_size: int, *, begin: int | None = None
    ) -> None:
        self.trainers, self.training, self.batch_size = listed(trainers), training, batch_size
        self.begin = begin
        window = training.context + 1
        require_bytes(f"training.batch_size: {batch_size:,} windows of {window:,} tokens", 8 * batch_size * window)
        self._cut: dict[int, Int[Tensor, "windows window"]] = {}

    def portions(self, device: torch.device, columns: int) -> Portions:
        """By tokens alone: adapters are small beside activations."""
        return portions(self.training, device, self.batch_size)

    def steps(self, trainer: int) -> int:
        """The same for all."""
        return self.training.local_steps

    def seen(self, trainer: int) -> int:
        """Training tokens of a round."""
        return self.training.local_steps * self.batch_size * self.training.context

    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int[Tensor, "users batch window"]:
        """Fresh random windows ``context + 1`` tokens wide."""
        drawn = [
            random_windows(
                trainer.valid if phase.stream == "valid" else trainer.train,
                count=self.batch_size,
                context=self.training.context,
                generator=generator(self.training.seed, trainer.name, round_number, phase.purpose, step, repeat),
                begin=self.begin,
            )
            for trainer in (self.trainers[i] for i in trainers)
        ]
        return torch.stack(drawn)

    def examples(self, trainer: int) -> int:
        """Windows at fixed places of the stream."""
        return len(self._windows(trainer))

    def _windows(self, trainer: int) -> Int[Tensor, "windows window"]:
        if trainer not in self._cut:
            stream, context = self.trainers[trainer].train, self.training.context
            self._cut[trainer] = fixed_windows(stream, context=context, begin=self.begin)
        return self._cut[trainer]

    def numbered(
        self, trainers: Sequence[int], numbers: Int[Tensor, "users batch"], round_number: int
    ) -> Int[Tensor, "users batch window"]:
        """Windows that have no token in common."""
        chosen = [self._windows(trainer)[at.clamp(min=0)] for trainer, at in zip(trainers, numbers, strict=True)]
        return torch.stack(chosen).masked_fill((numbers == PAD).unsqueeze(2), PAD)

    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int[Tensor, "users batch window"]]:
        """As many fresh windows as the trainers train on in a round: a stream is too long to be read whole."""
        for step in range(self.training.local_steps):
            yield self.draw(trainers, Phase(roles=frozenset()), round_number, step, -1)

    def held_out(self, trainers: Sequence[int]) -> Iterator[Int[Tensor, "users batch window"]]:
        """The validation streams, cut as where they are scored."""
        context, size = self.training.context, self.batch_size
        parts = [evaluation_windows(self.trainers[i].valid, context=context, begin=self.begin) for i in trainers]
        for start in range(0, max(map(len, parts)), size):
            windows = torch.full((len(parts), size, context + 1), PAD, dtype=torch.int64)
            for row, part in zip(windows, parts, strict=True):
                row[: len(part[start : start + size])] = part[start : start + size]
            yield windows

    def counted(self, drawn: Int[Tensor, "users batch window"]) -> Int[Tensor, " users"]:
        """Targets: tokens that are neither padding nor hidden."""
        return (drawn[..., 1:] >= 0).flatten(1).sum(1)

    def score(
        self, predict: Predict, sets: Sequence[Any], rows: Sequence[int], portions: Portions, gates: Gates | None
    ) -> list[Score]:
        """Losses of whole streams, in one exact pass over each."""
        batch, slots = portions.slots(SCORED_PER_SLOT)
        cut = {"context": self.training.context, "begin": self.begin}
        return score_streams(predict, sets, rows, batch=batch, slots=slots, gates=gates, **cut)
