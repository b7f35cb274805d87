"""Where batches come from and how held-out data is scored: token streams here, samples with targets beside it.

A batch is drawn as integers ``(users, batch, ...)`` before anything is read: windows of tokens, or numbers of samples.
``PAD`` marks what carries no loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from comingle.data.batches import PAD, random_windows
from comingle.data.pack import UserData
from comingle.data.seeds import generator
from comingle.engines.training import Portions, Training, portions
from comingle.evaluation.perplexity import Gates, Score, score_streams
from comingle.methods.client import Phase, Stream
from comingle.models.hardware import require_bytes

Predict = Callable[[Sequence[int], Any], Tensor]
"""What the models of the given rows make of a batch, one row's after the other: losses of text, outputs for samples."""

Generate = Callable[[Sequence[int], Tensor, int], Tensor]
"""The tokens with which the models of the given rows go on after prompts, at most so many: see ``models.greedy``."""

SCORED_PER_SLOT = 16


class Feed(ABC):
    """The users' data as the engine needs it; ``trainers`` are numbers of those who own it."""

    unit: str
    """What data is counted in."""
    training: Training
    trainers: list[Any]
    batch_size: int

    @abstractmethod
    def portions(self, device: torch.device, columns: int) -> Portions:
        """What goes through the model at once, on a device, where a user has so many columns."""

    @abstractmethod
    def steps(self, trainer: int) -> int:
        """Local iterations of a trainer in one round."""

    @abstractmethod
    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int[Tensor, "users batch ..."]:
        """A batch for each trainer, from (seed, user, round, purpose, step, repeat) and nothing else."""

    @abstractmethod
    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int[Tensor, "users batch ..."]]:
        """Batches that stand for each trainer's training data as a whole."""

    def read(self, stream: Stream, trainers: Sequence[int], drawn: Int[Tensor, "users batch ..."]) -> Any:
        """What was drawn, as the model takes it: windows are drawn as what they are."""
        return drawn

    @abstractmethod
    def counted(self, drawn: Int[Tensor, "users batch ..."]) -> Int[Tensor, " users"]:
        """How many losses each user's part of a batch has."""

    @abstractmethod
    def seen(self, trainer: int) -> int:
        """How many losses (tokens or samples) a trainer's local iterations of one round have."""

    @abstractmethod
    def score(
        self, predict: Predict, sets: Sequence[Any], rows: Sequence[int], portions: Portions, gates: Gates | None
    ) -> Sequence[Any]:
        """Score set i with the model of row ``rows[i]``."""

    def examine(
        self,
        predict: Predict,
        generate: Generate,
        sets: Sequence[Any],
        rows: Sequence[int],
        portions: Portions,
        gates: Gates | None,
    ) -> Sequence[Any]:
        """The final score of test sets, for which a model may be asked to generate; else the same as any score."""
        return self.score(predict, sets, rows, portions, gates)

    # ---------------------------------------------------------------- counted without data

    scores_more = False
    """Whether more is scored at once than trained on, so that scoring may need most memory."""

    def batch_sizes(self, user: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many samples the batches of one pass have on which a user trains, and those over which it sweeps."""
        one_step = (self.batch_size,)
        return one_step, one_step

    def without_data(self, fake: Callable[[Tensor], Tensor]) -> Feed:
        """The feed with ``fake`` tensors in the place of what it holds of users' data."""
        return self

    def blank(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Int[Tensor, "users count ..."]:
        """A batch as :meth:`draw` has it, without data: windows of ``context + 1`` tokens."""
        return fake(torch.empty(users, count, self.training.context + 1, dtype=torch.int64, device="meta"))

    def blank_inputs(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Tensor:
        """What a model predicts from when it is scored, without data."""
        return self.blank(users, count, fake)

    def scored_at_once(self, users: Sequence[Any], portions: Portions) -> int:
        """How many windows or samples of a user go through the model at once when it is scored."""
        return portions.sequences


class TextFeed(Feed):
    """Random windows of each trainer's token streams."""

    unit = "tokens"

    def __init__(self, trainers: Sequence[UserData], training: Training, batch_size: int):
        self.trainers, self.training, self.batch_size = list(trainers), training, batch_size
        window = training.context + 1
        require_bytes(f"training.batch_size: {batch_size:,} windows of {window:,} tokens", 8 * batch_size * window)

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
            )
            for trainer in (self.trainers[i] for i in trainers)
        ]
        return torch.stack(drawn)

    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int[Tensor, "users batch window"]]:
        """As many fresh windows as the trainers train on in a round: a stream is too long to be read whole."""
        for step in range(self.training.local_steps):
            yield self.draw(trainers, Phase(roles=frozenset()), round_number, step, -1)

    def counted(self, drawn: Int[Tensor, "users batch window"]) -> Int[Tensor, " users"]:
        """Targets that are not padding."""
        return (drawn[..., 1:] != PAD).flatten(1).sum(1)

    def score(
        self, predict: Predict, sets: Sequence[Any], rows: Sequence[int], portions: Portions, gates: Gates | None
    ) -> list[Score]:
        """Losses of whole streams, in one exact pass over each."""
        batch, slots = portions.slots(SCORED_PER_SLOT)
        return score_streams(
            predict,
            sets,
            rows,
            context=self.training.context,
            batch=batch,
            slots=slots,
            gates=gates,
        )
