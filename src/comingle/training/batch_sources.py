"""Batch sources: they yield the batches of users and score held-out data.

A batch is drawn as integers ``(users, batch, ...)`` before any data is read: windows of tokens, or numbers of samples.
``PAD`` marks places that have no loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from comingle.data.conversations.scoring import AnswerScore
from comingle.data.populations import UserCollection, as_users
from comingle.data.samples.samples import epoch
from comingle.methods.base import Phase, Stream
from comingle.models.scoring import PAD, Gates, SampleScore, Score
from comingle.training.settings import PassSize, RunPlan
from comingle.utils.seeds import generator

AnyScore = Score | SampleScore | AnswerScore
"""Score of text, samples or answers; all have ``mean_loss`` and ``measures``."""

AnyUser = Any
"""A user: ``name``, and splits ``train``, ``valid`` and ``test`` of a type that depends on the kind of data.

Not a protocol: checking one at run time would read the data of users that is loaded lazily."""

AnySplit = Any
"""A split of the data of a user: a token stream, conversations or samples, depending on the kind."""

Predict = Callable[[Sequence[int], Any], Tensor]
"""Maps rows and a batch to the predictions of their models, row by row: losses of text, outputs for samples."""

Generate = Callable[[Sequence[int], Tensor, int], Tensor]
"""Maps rows, prompts and a limit to at most that many tokens that continue them; see ``models.greedy``."""

SCORED_PER_SLOT = 16
"""Largest number of windows or conversations of a user in one scoring pass."""


class BatchShapes:
    """Shapes of the batches of a source, to count costs without data."""

    plan: RunPlan
    batch_size: int

    scores_more = False
    """Whether scoring passes are larger than training passes, so that they may set the peak memory."""

    def batch_sizes(self, user: AnyUser) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the batches of a user, from which the time of local steps and of sweeps is estimated.

        Args:
            user: The user with its data.

        Returns:
            Sizes of all batches in one epoch of training, and of those in one :meth:`sweep` over the training data,
            such as ``((4, 4), (4, 4, 1))``. Sources without epochs, such as text, have one size in each.
        """
        return (self.batch_size,), (self.batch_size,)

    def blank(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Int[Tensor, "users count ..."]:
        """Return a fake batch, with a shape but no data, as :meth:`Batches.draw` would return it.

        With it the memory and operations of a training pass are counted before any data is read.

        Args:
            users: Number of users.
            count: Number of windows or samples of each user.
            fake: Converts a tensor on the meta device to a ``FakeTensor``, which only has a shape, dtype and device.
        """
        window = self.plan.training.context + 1  # tokens: the targets are the inputs shifted by one
        return fake(torch.empty(users, count, window, dtype=torch.int64, device="meta"))

    def blank_inputs(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Tensor:
        """Return fake inputs for scoring a model, with a shape but no data, to count costs.

        By default they are the same as for training.

        Args:
            users: Number of users.
            count: Number of windows or samples of each user.
            fake: Converts a tensor on the meta device to a ``FakeTensor``, which only has a shape, dtype and device.
        """
        return self.blank(users, count, fake)

    def scored_at_once(self, users: Sequence[AnyUser], pass_size: PassSize) -> int:
        """Return the number of windows or samples of a user in one scoring pass, by default as in a training pass.

        The peak memory of scoring is estimated from it.

        Args:
            users: The users who are scored.
            pass_size: Number of users and sequences in one training pass.
        """
        return pass_size.sequences


class Batches(ABC):
    """Draws the batches of users and moves them to the device that computes."""

    @abstractmethod
    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int[Tensor, "users batch ..."]:
        """Return a batch for each trainer: windows of tokens, or the indices of samples, which :meth:`read` reads.

        It depends only on (seed, user, round, purpose of the phase, step, repeat), so a repeated round of a resumed run
        draws the same batches.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            phase: Phase that the batches are for.
            round_number: The round, counted from 0.
            step: Local step within the round; -1 for batches that are used before the first step.
            repeat: Repeat of the phase within the step.
        """

    def move(self, drawn: Int[Tensor, "users batch ..."], device: torch.device) -> Int[Tensor, "users batch ..."]:
        """Copy a batch, as :meth:`draw` returned it, to the device that computes."""
        return drawn.to(device)

    def prefetch(self) -> None:  # noqa: B027 (optional)
        """Start to copy the next batch while the device computes."""


class BatchSource(Batches, BatchShapes):
    """Source of training batches that also scores held-out data; ``trainers`` own the data."""

    unit: str
    """Unit in which data is counted, "tokens" or "samples"."""
    trainers: UserCollection[AnyUser]

    @abstractmethod
    def pass_size(self, device: torch.device, columns: int) -> PassSize:
        """Return how many users are trained at once in a forward and backward pass, and how many sequences of each.

        Args:
            device: Device of the model.
            columns: Number of trained parameters per user.
        """

    @abstractmethod
    def steps(self, trainer: int) -> int:
        """Return the number of local steps of a trainer in one round."""

    @property
    def most_steps(self) -> int:
        """Largest number of local steps of a trainer in one round."""
        # Trainers with the most data take the most steps.
        return max(self.steps(trainer) for trainer in self.trainers.largest_users)

    @property
    def _has_own_sizes(self) -> bool:
        """True if ``training.batch_size`` is given by user; it is ignored if one model has the data of all users."""
        return isinstance(self.plan.training.batch_size, Mapping) and not self.plan.method.placement.pooled

    def size_of(self, trainer: int) -> int:
        """Return the number of windows or samples of a trainer in one local step; a last batch may be smaller."""
        if self._has_own_sizes:
            return self.plan.batch_size_of(self.trainers[trainer].name)
        return self.batch_size

    @abstractmethod
    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int[Tensor, "users batch ..."]]:
        """Yield batches that represent the whole training data of each trainer, to compare models on them.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            round_number: The round, counted from 0; sources with random batches draw others in each round.
        """

    def examples(self, trainer: int) -> int:
        """Return the number of a trainer's training examples, the units that example-level privacy protects."""
        raise NotImplementedError(f"{type(self).__name__}: cannot return examples by index")

    def examples_at(
        self, trainers: Sequence[int], indices: Int[Tensor, "users batch"], round_number: int
    ) -> Int[Tensor, "users batch ..."]:
        """Return training examples by index, in the form of :meth:`draw`, for example-level privacy.

        An example must not depend on which other examples are drawn, so that its clipped gradient does not either.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            indices: Indices of the examples of each trainer; ``PAD`` for none.
            round_number: The round, counted from 0; sources that augment samples draw other augmentations in each.
        """
        raise NotImplementedError(f"{type(self).__name__}: cannot return examples by index")

    @abstractmethod
    def held_out(self, trainers: Sequence[int]) -> Iterator[Int[Tensor, "users batch ..."]]:
        """Yield batches of the whole validation data of each trainer, each token or sample once, padded with ``PAD``.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
        """

    def read(self, stream: Stream, trainers: Sequence[int], drawn: Int[Tensor, "users batch ..."]) -> Any:
        """Return a drawn batch in the form that the model takes; windows of tokens are returned unchanged.

        Args:
            stream: Split that the batch was drawn from, "train" or "valid".
            trainers: Numbers of the trainers whose data the batch has.
            drawn: The batch, as :meth:`draw` or :meth:`held_out` returns it.
        """
        return drawn

    @abstractmethod
    def loss_counts(self, drawn: Int[Tensor, "users batch ..."]) -> Int[Tensor, " users"]:
        """Return how many predicted tokens or samples each user's batch has, without padding.

        The mean loss of a batch is the sum of its losses divided by this number.

        Args:
            drawn: Batches, as :meth:`draw` returns them: windows of tokens, or numbers of samples.
        """

    @abstractmethod
    def trained_amount(self, trainer: int) -> int:
        """Return the number of predicted tokens or samples that a trainer trains on in one round."""

    def scoring_cost(self, split: AnySplit) -> int:
        """Return the cost of scoring a split, from which the interval between evaluations is chosen.

        The unit is that of :meth:`trained_amount`: by default the cost is the number of tokens or samples.
        """
        return len(split)

    @abstractmethod
    def score(
        self,
        predict: Predict,
        splits: Sequence[AnySplit],
        model_numbers: Sequence[int],
        pass_size: PassSize,
        gates: Gates | None,
    ) -> Sequence[AnyScore]:
        """Return the scores of several held-out splits, each under a model of its own.

        Args:
            predict: Returns the predictions of models, given by number, for a batch of each.
            splits: Splits to score.
            model_numbers: For each split, the number of the model that scores it.
            pass_size: Number of users and sequences in one training pass, which bounds a scoring pass.
            gates: Collects the gates of routers; None if there are none.
        """

    def examine(
        self,
        predict: Predict,
        generate: Generate,
        splits: Sequence[AnySplit],
        model_numbers: Sequence[int],
        pass_size: PassSize,
        gates: Gates | None,
    ) -> Sequence[AnyScore]:
        """Return the final scores of test splits, which may require generated text; by default those of :meth:`score`.

        Args:
            predict: Returns the predictions of models, given by number, for a batch of each.
            generate: Returns tokens that models, given by number, generate after prompts.
            splits: Splits to score.
            model_numbers: For each split, the number of the model that scores it.
            pass_size: Number of users and sequences in one training pass, which bounds a scoring pass.
            gates: Collects the gates of routers; None if there are none.
        """
        return self.score(predict, splits, model_numbers, pass_size, gates)

    def without_data(self, fake: Callable[[Tensor], Tensor]) -> BatchSource:
        """Return the source with fake tensors in place of the data of users, to estimate memory without a real pass.

        Args:
            fake: Converts a tensor to a ``FakeTensor``, which only has a shape, dtype and device.
        """
        return self


@dataclass(frozen=True, kw_only=True)
class _ShuffledEpochs:
    """Batches of sample numbers that one trainer draws in a round, by number of the epoch."""

    batches_per_epoch: int
    epochs: dict[int, Int64[Tensor, "steps batch"]] = field(default_factory=dict)


class PassBatchSource(BatchSource):
    """Source in which each user makes ``local_epochs`` shuffled passes over its training samples per round.

    The last batch of a pass may be smaller; it is dropped if it has fewer than ``smallest_batch`` samples.
    """

    unit = "samples"
    fixed_shape = False
    """Whether all batches have one shape, so that a batch does not depend on the other users of its step."""

    def __init__(self, trainers: Sequence[AnyUser], plan: RunPlan, batch_size: int, *, smallest_batch: int = 1):
        """Store the trainers and how to batch their samples.

        Args:
            trainers: Owners of the samples: the users, or one trainer with the samples of all users (pooled data).
            plan: Settings of the run, in the form that training uses.
            batch_size: Largest number of samples of a trainer in one batch.
            smallest_batch: Smallest batch that is trained on; the last batch of an epoch is dropped if it is smaller.
        """
        self.trainers, self.plan = as_users(trainers), plan
        self.batch_size, self.smallest_batch = batch_size, smallest_batch
        # Cache of shuffled batches of one round, by number of the trainer, split and purpose of the phase.
        self._shuffled: dict[tuple[int, Stream, str], _ShuffledEpochs] = {}
        self._round = -1  # the round of the cache; none yet

    @abstractmethod
    def count(self, trainer: int, stream: Stream) -> int:
        """Return the number of samples of a trainer in a split."""

    def examples(self, trainer: int) -> int:
        """Return the number of training samples or conversations of a trainer."""
        return self.count(trainer, "train")

    def _num_batches(self, count: int, size: int) -> int:
        """Return the number of batches of ``size`` samples in one pass over ``count`` samples."""
        num_full, rest = divmod(count, size)
        has_last_batch = rest >= self.smallest_batch  # a smaller one is dropped
        return num_full + has_last_batch

    @property
    def most_steps(self) -> int:
        """Largest number of local steps of a trainer in one round."""
        if not self._has_own_sizes:  # then those with the most data take the most steps, and others need no counting
            return super().most_steps
        return max(self.steps(trainer) for trainer in range(len(self.trainers)))

    def batch_sizes(self, user: AnyUser) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the batches in one pass over the samples of a user: for training, and for sweeps.

        A sweep reads all samples, to compare models on them, in batches of the largest batch size of the run. For
        example ``(4, 4)`` and ``(4, 4, 1)`` for 9 samples in batches of 4: a last batch of fewer than
        ``self.smallest_batch`` samples is not trained on, as batch norm needs at least two samples.
        """
        num_samples = len(user.train)
        own_size = self.plan.batch_size_of(user.name) if self._has_own_sizes else self.batch_size

        def split(size: int) -> list[int]:
            """Return the sizes of batches of at most ``size`` samples: ``[4, 4, 1]`` for 9 samples and size 4."""
            return [min(size, num_samples - first) for first in range(0, num_samples, size)]

        trained_sizes = [size for size in split(own_size) if size == own_size or size >= self.smallest_batch]
        swept_sizes = split(self.batch_size)
        return tuple(trained_sizes), tuple(swept_sizes)

    def steps(self, trainer: int) -> int:
        """Return the number of local steps of a trainer in one round: the batches of all its local epochs."""
        steps_per_epoch = self._num_batches(self.count(trainer, "train"), self.size_of(trainer))
        return self.plan.training.local_epochs * steps_per_epoch

    def trained_amount(self, trainer: int) -> int:
        """Return the number of samples that a trainer trains on in one round, over all its local epochs."""
        count, size = self.count(trainer, "train"), self.size_of(trainer)
        # All samples, unless the last batch is too small and dropped.
        samples_per_epoch = min(count, self._num_batches(count, size) * size)
        return self.plan.training.local_epochs * samples_per_epoch

    def numbers(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int64[Tensor, "users batch"]:
        """Return the numbers of the samples in a batch of each trainer, ``(users, batch)`` padded with ``PAD``.

        ``batch`` is the size of the largest of these batches; with ``self.fixed_shape`` it is always
        ``self.batch_size``.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            phase: Phase that the batches are for.
            round_number: The round, counted from 0.
            step: Local step within the round; -1 for batches that are used before the first step.
            repeat: Repeat of the phase within the step.
        """
        self.enter(round_number)
        # Each phase has an order of its own of the samples of each split (train or valid), and so have the batches that
        # are used before the first step.
        if step < 0:
            purpose, batch_number = "before", repeat
        else:
            purpose, batch_number = f"{phase.purpose}/{phase.stream}", step * phase.steps + repeat
        batches = [self._batch(trainer, phase.stream, purpose, round_number, batch_number) for trainer in trainers]
        drawn = torch.stack(batches)
        if self.fixed_shape:
            return drawn
        largest_batch = int((drawn != PAD).sum(1).max())
        return drawn[:, : max(1, largest_batch)]

    def enter(self, round_number: int) -> None:
        """Set the current round, before its first batch; delete the cached batches of the previous round."""
        if round_number != self._round:
            self._shuffled, self._round = {}, round_number

    def _batch(
        self, trainer: int, stream: Stream, purpose: str, round_number: int, number: int
    ) -> Int64[Tensor, " batch"]:
        """Return the sample numbers of one batch of a trainer, padded with ``PAD`` to the largest batch size.

        The samples of an epoch are shuffled when its first batch is needed.

        Args:
            trainer: Number of the user who trains (0 if one model is trained on all users' data).
            stream: Split to draw from, "train" or "valid".
            purpose: Name of the random stream for shuffling, such as "experts" or "router"; see ``Phase.purpose``.
            round_number: The round, counted from 0.
            number: Number of the batch within the round, counted from 0 over all epochs.
        """
        key = (trainer, stream, purpose)  # of this round; :meth:`enter` drops those of other rounds
        if key not in self._shuffled:
            batches_per_epoch = self._num_batches(self.count(trainer, stream), self.size_of(trainer))
            self._shuffled[key] = _ShuffledEpochs(batches_per_epoch=max(1, batches_per_epoch))
        shuffled = self._shuffled[key]
        epoch_number, number_in_epoch = divmod(number, shuffled.batches_per_epoch)
        if epoch_number not in shuffled.epochs:
            batch_size = self.size_of(trainer)
            random = generator(self.plan.seed, self.trainers[trainer].name, round_number, purpose, epoch_number)
            batches = epoch(self.count(trainer, stream), batch_size, random)
            num_missing = self.batch_size - batch_size
            shuffled.epochs[epoch_number] = torch.nn.functional.pad(batches, (0, num_missing), value=PAD)
        return shuffled.epochs[epoch_number][number_in_epoch]

    def all_numbers(self, trainers: Sequence[int], stream: Stream = "train") -> Iterator[Int64[Tensor, "users batch"]]:
        """Yield the numbers of all samples of each trainer, in order and in batches, padded with ``PAD``.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            stream: Split of the samples, "train" or "valid".
        """
        counts = torch.tensor([self.count(trainer, stream) for trainer in trainers]).unsqueeze(1)  # (users, 1)
        for first in range(0, int(counts.max()), self.batch_size):
            numbers = torch.arange(first, first + self.batch_size).expand(len(trainers), -1)
            yield torch.where(numbers < counts, numbers, PAD)


Drawn = Int[Tensor, "users batch ..."]
DrawArguments = tuple[tuple[int, ...], Phase, int, int, int]
"""Arguments of :meth:`Batches.draw`, which identify a batch: trainers, phase, round, step and repeat."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A drawn batch, and its copy on the device if it was prefetched."""

    arguments: DrawArguments
    drawn: Drawn
    on_device: Drawn | None = None


class Prefetcher(Batches):
    """Batches that are drawn and copied to the GPU during the previous step.

    A batch depends only on (user, round, phase, step, repeat), so a prefetched batch equals one drawn later. It is
    copied from pinned memory on a separate CUDA stream, which the computation waits for before it reads the batch. The
    next batch is a guess: if the cohort changes, the batch is drawn again.
    """

    def __init__(self, batch_source: BatchSource, device: torch.device):
        """Make a prefetcher of the batches of ``batch_source``, which copies them to a CUDA device."""
        self.batch_source, self.device = batch_source, device
        self.stream = torch.cuda.Stream(device)  # for copies, beside the stream that computes
        self.current: Batch | None = None
        """Batch that :meth:`draw` returned last."""
        self.ready: dict[Phase, Batch] = {}
        """Prefetched batches that are not used yet: the next one of each phase."""

    def draw(self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int) -> Drawn:
        """Return a batch for each trainer: the prefetched one if it is for these arguments, otherwise draw it now.

        The batch is on the CPU; :meth:`move`, which must be called next, returns its prefetched copy on the GPU.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            phase: Phase that the batches are for.
            round_number: The round, counted from 0.
            step: Local step within the round; -1 for batches that are used before the first step.
            repeat: Repeat of the phase within the step.
        """
        arguments = (tuple(trainers), phase, round_number, step, repeat)
        batch = self.ready.pop(phase, None)
        is_prefetched = batch is not None and batch.arguments == arguments  # False if the trainers have changed
        if batch is None or not is_prefetched:
            drawn = self.batch_source.draw(trainers, phase, round_number, step, repeat)
            batch = Batch(arguments=arguments, drawn=drawn)
        self.current = batch
        return batch.drawn

    def move(self, drawn: Drawn, device: torch.device) -> Drawn:
        """Return a batch on the device: its prefetched copy if there is one, otherwise a copy made now.

        Args:
            drawn: The batch on the CPU, as :meth:`draw` has just returned it.
            device: The device.
        """
        batch = self.current  # of the latest call of :meth:`draw`
        if batch is None or drawn is not batch.drawn or batch.on_device is None:  # not prefetched
            return drawn.to(device)
        compute_stream = torch.cuda.current_stream(device)
        compute_stream.wait_stream(self.stream)  # for the end of the copy
        batch.on_device.record_stream(compute_stream)  # so that its memory is not reused while it is read
        return batch.on_device

    def prefetch(self) -> None:
        """Draw the batch that the current phase probably needs next, and start to copy it to the device."""
        if self.current is None:  # nothing was drawn yet
            return
        next_arguments = self._next_arguments(self.current.arguments)
        if next_arguments is None:  # this was the last batch of the round
            return
        _trainers, phase, _round_number, _step, _repeat = next_arguments
        if phase in self.ready and self.ready[phase].arguments == next_arguments:  # prefetched before
            return
        drawn = self.batch_source.draw(*next_arguments)
        with torch.cuda.stream(self.stream):
            on_device = drawn.pin_memory().to(self.device, non_blocking=True)
        self.ready[phase] = Batch(arguments=next_arguments, drawn=drawn, on_device=on_device)

    def _next_arguments(self, arguments: DrawArguments) -> DrawArguments | None:
        """Return the arguments of :meth:`draw` for the batch to prefetch: the one that the phase needs next.

        A phase is run ``phase.steps`` times (repeats) in each local step. So the next batch is for the next repeat, or
        after the last one for the first repeat in the next step.

        Args:
            arguments: Trainers, phase, round, step and repeat of the current batch.

        Returns:
            The arguments; None if no trainer takes another step in this round, or before the first local step.
        """
        trainers, phase, round_number, step, repeat = arguments
        if step < 0:  # batches before the first step are each for another phase, so the next one is unknown
            return None
        if repeat + 1 < phase.steps:
            return trainers, phase, round_number, step, repeat + 1
        next_step = step + 1
        # Trainers with less data take fewer steps.
        active_trainers = tuple(trainer for trainer in trainers if self.batch_source.steps(trainer) > next_step)
        if not active_trainers:
            return None
        first_repeat = 0
        return active_trainers, phase, round_number, next_step, first_repeat
