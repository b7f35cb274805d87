"""Batch sources: what yields a user's batches and scores held-out data.

A batch is drawn as integers ``(users, batch, ...)`` before anything is read: windows of tokens, or numbers of samples.
``PAD`` marks what carries no loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from comingle.data.conversations.scoring import AnswerScore
from comingle.data.populations import as_sequence
from comingle.data.samples.samples import epoch
from comingle.methods.base import Phase, Stream
from comingle.models.scoring import PAD, Gates, SampleScore, Score
from comingle.training.settings import Portions, RunPlan
from comingle.utils.seeds import generator

AnyScore = Score | SampleScore | AnswerScore
"""Text, samples and answers are scored alike: ``mean_loss`` and ``measures``."""

AnyUser = Any
"""A user: ``name``, and splits ``train``, ``valid`` and ``test`` of a type that depends on the kind of data. A protocol
would not do: to check it at run time reads the data of users who are read when something asks for it."""

AnySplit = Any
"""A split of a user's data, of a type that depends on the kind: a stream of tokens, conversations or samples."""

Predict = Callable[[Sequence[int], Any], Tensor]
"""What the models of the given rows make of a batch, one row's after the other: losses of text, outputs for samples."""

Generate = Callable[[Sequence[int], Tensor, int], Tensor]
"""The tokens with which the models of the given rows go on after prompts, at most so many: see ``models.greedy``."""

SCORED_PER_SLOT = 16


class BatchShapes:
    """Shapes of the batches of a source, by which costs are counted without data."""

    plan: RunPlan
    batch_size: int

    scores_more = False
    """Whether more is scored at once than trained on, so that scoring may need most memory."""

    def batch_sizes(self, user: AnyUser) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many samples the batches of one pass have on which a user trains, and those over which it sweeps."""
        one_step = (self.batch_size,)
        return one_step, one_step

    def blank(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Int[Tensor, "users count ..."]:
        """A batch as :meth:`draw` has it, without data: windows of ``context + 1`` tokens."""
        return fake(torch.empty(users, count, self.plan.training.context + 1, dtype=torch.int64, device="meta"))

    def blank_inputs(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Tensor:
        """What a model predicts from when it is scored, without data."""
        return self.blank(users, count, fake)

    def scored_at_once(self, users: Sequence[AnyUser], portions: Portions) -> int:
        """How many windows or samples of a user go through the model at once when it is scored."""
        return portions.sequences


class Batches(ABC):
    """What draws users' batches and puts them on the device that computes."""

    @abstractmethod
    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int[Tensor, "users batch ..."]:
        """Return a batch for each trainer, which follows from (seed, user, round, purpose, step, repeat) alone."""

    def move(self, drawn: Int[Tensor, "users batch ..."], device: torch.device) -> Int[Tensor, "users batch ..."]:
        """Return a drawn batch on the device that computes."""
        return drawn.to(device)

    def prefetch(self) -> None:  # noqa: B027 (optional)
        """Begin to copy the next batch while the device computes."""


class BatchSource(Batches, BatchShapes):
    """What yields users' batches and scores held-out data; ``trainers`` own the data and are named by number."""

    unit: str
    """What data is counted in."""
    trainers: Sequence[AnyUser]

    @abstractmethod
    def portions(self, device: torch.device, columns: int) -> Portions:
        """What goes through the model at once, on a device, where a user has so many columns."""

    @abstractmethod
    def steps(self, trainer: int) -> int:
        """Local iterations of a trainer in one round."""

    @abstractmethod
    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int[Tensor, "users batch ..."]]:
        """Batches that stand for each trainer's training data as a whole."""

    def examples(self, trainer: int) -> int:
        """How many training examples a trainer has, of which privacy hides each by itself."""
        raise NotImplementedError(f"{type(self).__name__}: has no examples that could be numbered")

    def numbered(
        self, trainers: Sequence[int], numbers: Int[Tensor, "users batch"], round_number: int
    ) -> Int[Tensor, "users batch ..."]:
        """RunPlan examples of these numbers as :meth:`draw` has them, ``PAD`` for none; each as if it were alone."""
        raise NotImplementedError(f"{type(self).__name__}: has no examples that could be numbered")

    @abstractmethod
    def held_out(self, trainers: Sequence[int]) -> Iterator[Int[Tensor, "users batch ..."]]:
        """Batches that have each loss of the trainers' validation data once, filled with ``PAD``."""

    def read(self, stream: Stream, trainers: Sequence[int], drawn: Int[Tensor, "users batch ..."]) -> Any:
        """What was drawn, as the model takes it: windows are drawn as what they are."""
        return drawn

    @abstractmethod
    def counted(self, drawn: Int[Tensor, "users batch ..."]) -> Int[Tensor, " users"]:
        """How many losses each user's part of a batch has."""

    @abstractmethod
    def seen(self, trainer: int) -> int:
        """How many losses (tokens or samples) a trainer's local iterations of one round have."""

    def scoring(self, part: AnySplit) -> int:
        """How much is scored in an evaluation on a set of a user, in what :meth:`seen` counts."""
        return len(part)

    @abstractmethod
    def score(
        self, predict: Predict, sets: Sequence[AnySplit], rows: Sequence[int], portions: Portions, gates: Gates | None
    ) -> Sequence[AnyScore]:
        """Score set i with the model of row ``rows[i]``."""

    def examine(
        self,
        predict: Predict,
        generate: Generate,
        sets: Sequence[AnySplit],
        rows: Sequence[int],
        portions: Portions,
        gates: Gates | None,
    ) -> Sequence[AnyScore]:
        """The final score of test sets, for which a model may be asked to generate; else the same as any score."""
        return self.score(predict, sets, rows, portions, gates)

    def without_data(self, fake: Callable[[Tensor], Tensor]) -> BatchSource:
        """Return the source with ``fake`` tensors in the place of what it holds of users' data."""
        return self


class PassBatchSource(BatchSource):
    """Each round every user goes ``local_epochs`` times over its train samples, in an order of its own.

    The last batch of a pass may be smaller; where it has fewer than ``least`` samples it is left out. ``trainers`` have
    a name, and ``train`` and ``valid`` sets with a length.
    """

    unit = "samples"
    even = False
    """Whether all batches have one shape, whoever shares a step."""

    def __init__(self, trainers: Sequence[AnyUser], plan: RunPlan, batch_size: int, *, least: int = 1):
        self.trainers, self.plan, self.batch_size, self.least = as_sequence(trainers), plan, batch_size, least
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

    def batch_sizes(self, user: AnyUser) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A last batch with fewer than ``least`` is not trained on."""
        count, size = len(user.train), self.batch_size
        every = tuple(min(size, count - first) for first in range(0, count, size))
        return tuple(one for one in every if one == size or one >= self.least), every

    def steps(self, trainer: int) -> int:
        """Batches of all local epochs."""
        return self.plan.training.local_epochs * self._batches(self.count(trainer, "train"))

    def seen(self, trainer: int) -> int:
        """RunPlan samples of a round."""
        count = self.count(trainer, "train")
        return self.plan.training.local_epochs * min(count, self._batches(count) * self.batch_size)

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
            random = generator(self.plan.seed, self.trainers[trainer].name, round_number, purpose, number)
            self._order[key] = epoch(count, self.batch_size, random)
        return self._order[key][at]

    def every(self, trainers: Sequence[int], stream: Stream = "train") -> Iterator[Int64[Tensor, "users batch"]]:
        """All samples of each trainer, in order."""
        counts = torch.tensor([self.count(trainer, stream) for trainer in trainers]).unsqueeze(1)
        for first in range(0, int(counts.max()), self.batch_size):
            at = torch.arange(first, first + self.batch_size).expand(len(counts), -1)
            yield torch.where(at < counts, at, PAD)


Drawn = Int[Tensor, "users batch ..."]
Place = tuple[tuple[int, ...], Phase, int, int, int]
"""Users, phase, round, step and repeat of a batch: the arguments of a source's ``draw``."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch as it was drawn, and its copy on the device if it was prefetched."""

    place: Place
    drawn: Drawn
    there: Drawn | None = None


class Prefetcher(Batches):
    """Batches that are on the GPU before they are needed: drawn and copied during the step before.

    What a batch holds follows from (user, round, phase, step, repeat) alone, so a prefetched one is the same. It is
    copied out of pinned memory on a stream of its own, which the computation waits for before it reads. Which batch
    comes next is a guess, wrong if the cohort changes: then it is drawn again.
    """

    def __init__(self, batch_source: BatchSource, device: torch.device):
        self.batch_source, self.device = batch_source, device
        self.stream = torch.cuda.Stream(device)
        self.now: Batch | None = None
        self.ready: dict[Phase, Batch] = {}

    def draw(self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int) -> Drawn:
        """Return the batch that the source draws."""
        place = (tuple(trainers), phase, round_number, step, repeat)
        early = self.ready.pop(phase, None)
        if early is None or early.place != place:
            early = Batch(place=place, drawn=self.batch_source.draw(trainers, phase, round_number, step, repeat))
        self.now = early
        return early.drawn

    def move(self, drawn: Drawn, device: torch.device) -> Drawn:
        """Return the batch on the device; copy it now unless it is the one drawn last."""
        if self.now is None or drawn is not self.now.drawn or self.now.there is None:
            return drawn.to(device)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(self.stream)
        self.now.there.record_stream(computing)  # so that its memory is not given away while it is read
        return self.now.there

    def prefetch(self) -> None:
        """Draw the batch that the current phase takes next, and begin to copy it."""
        place = None if self.now is None else self._following(self.now.place)
        if place is None or (place[1] in self.ready and self.ready[place[1]].place == place):
            return
        drawn = self.batch_source.draw(*place)
        with torch.cuda.stream(self.stream):
            there = drawn.pin_memory().to(self.device, non_blocking=True)
        self.ready[place[1]] = Batch(place=place, drawn=drawn, there=there)

    def _following(self, place: Place) -> Place | None:
        trainers, phase, number, step, repeat = place
        if step < 0:  # before the first step, where every batch is another phase's
            return None
        if repeat + 1 < phase.steps:
            return trainers, phase, number, step, repeat + 1
        left = tuple(trainer for trainer in trainers if self.batch_source.steps(trainer) > step + 1)
        return (left, phase, number, step + 1, 0) if left else None
