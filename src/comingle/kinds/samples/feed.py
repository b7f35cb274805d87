"""Batches of samples with targets: shuffled passes over each user's own, and scores of held-out ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from comingle.config.settings import Training
from comingle.data.populations import Crowd
from comingle.data.samples.reading import Augment
from comingle.data.samples.samples import SampleBank, Samples, UserSamples, bank_of
from comingle.data.samples.scoring import score_samples
from comingle.engines.feeds import Predict
from comingle.engines.passes import PassFeed
from comingle.engines.training import Portions
from comingle.methods.base import Phase, Stream
from comingle.models.scoring import Gates, Loss, SampleScore
from comingle.models.windows import PAD
from comingle.utils.errors import DataError
from comingle.utils.seeds import generator

COLUMNS_PER_PASS = 2**26
"""How many parameters, over all users, are stepped at once by default: their gradients and copies need memory."""

SCORED_PER_SLOT = 512


class SampleFeed(PassFeed):
    """Passes over inputs with targets.

    Batch norm cannot take a batch of a single sample, and would see what fills up smaller batches.
    """

    def __init__(
        self,
        trainers: Sequence[UserSamples],
        training: Training,
        batch_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        loss: Loss,
        augment: Augment | None = None,
        least: int = 1,
    ):
        super().__init__(trainers, training, batch_size, least=least)
        self.loss, self.augment = loss, augment
        self.like = {"device": device, "dtype": dtype}
        self._scored: dict[tuple[int, ...], tuple[Sequence[Samples], SampleBank]] = {}
        if isinstance(self.trainers, Crowd):
            return
        for trainer in self.trainers:
            if len(trainer.train) < least:
                got = f"{len(trainer.train)} train samples"
                raise DataError(f"user {trainer.name!r}: {got}; batch norm needs at least {least} in a batch")
        self.banks = {
            split: bank_of([trainer.split(split) for trainer in self.trainers], **self.like)
            for split in ("train", "valid")
        }

    def count(self, trainer: int, stream: Stream) -> int:
        """How many samples a trainer has."""
        owner = self.trainers[trainer]
        return len(owner.valid if stream == "valid" else owner.train)

    def portions(self, device: torch.device, columns: int) -> Portions:
        """By parameters: copies of the net are large beside the activations of a small batch."""
        sequences = min(self.training.micro_batch or self.batch_size, self.batch_size)
        privacy = self.training.privacy
        copies = sequences if privacy is not None and privacy.of_examples else 1  # one of a net for each sample
        users = self.training.users_per_step or max(1, COLUMNS_PER_PASS // max(1, columns * copies))
        return Portions(users=users, sequences=sequences)

    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int64[Tensor, "users batch"]:
        """Samples are drawn as their numbers."""
        return self.numbers(trainers, phase, round_number, step, repeat)

    def numbered(
        self, trainers: Sequence[int], numbers: Int[Tensor, "users batch"], round_number: int
    ) -> Int64[Tensor, "users batch"]:
        """Samples are drawn as their numbers."""
        self.enter(round_number)
        return numbers.long()

    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int64[Tensor, "users batch"]]:
        """All train samples of each trainer, in order."""
        self.enter(round_number)  # augmentation follows from it too
        return self.every(trainers)

    def held_out(self, trainers: Sequence[int]) -> Iterator[Int64[Tensor, "users batch"]]:
        """All validation samples of each trainer, in order."""
        return self.every(trainers, "valid")

    def read(
        self, stream: Stream, trainers: Sequence[int], drawn: Int[Tensor, "users batch"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and presence; train inputs are augmented, at random but the same for the same draw."""
        if isinstance(self.trainers, Crowd):
            bank = self._bank([self.trainers[trainer].split(stream) for trainer in trainers])
            inputs, targets, present = bank.take(range(len(trainers)), drawn)
        else:
            inputs, targets, present = self.banks[stream].take(trainers, drawn)
        if self.augment is not None and stream == "train":
            inputs = torch.stack(
                [self._augmented(*of_trainer) for of_trainer in zip(trainers, inputs, drawn, strict=True)]
            )
        return inputs, targets, present

    def _augmented(self, trainer: int, inputs: Tensor, drawn: Int[Tensor, " batch"]) -> Float[Tensor, "batch ..."]:
        assert self.augment is not None
        random = generator(self.training.seed, self.trainers[trainer].name, self._round, "augment", *drawn.tolist())
        return self.augment([trainer], inputs.unsqueeze(0), random)[0]

    def counted(self, drawn: Int[Tensor, "users batch"]) -> Int64[Tensor, " users"]:
        """Samples that are present."""
        return (drawn != PAD).sum(1)

    def score(
        self, predict: Predict, sets: Sequence[Any], rows: Sequence[int], portions: Portions, gates: Gates | None
    ) -> list[SampleScore]:
        """Loss, and accuracy of a classification, of every set under its row's model."""
        bank = self._bank(sets)
        slots = max(1, min(portions.users, len(rows)))

        def forward(owners: Sequence[int], inputs: Tensor) -> Tensor:
            return predict([rows[owner] for owner in owners], inputs)

        return score_samples(forward, bank, range(len(sets)), loss=self.loss, batch=SCORED_PER_SLOT, slots=slots)

    # ---------------------------------------------------------------- counted without data

    scores_more = True

    def of(self, trainers: Sequence[UserSamples]) -> SampleFeed:
        """The feed of other trainers, without augmentation."""
        like, size = self.banks["train"].inputs, self.batch_size
        same = {"device": like.device, "dtype": like.dtype, "loss": self.loss, "least": self.least}
        return SampleFeed(trainers, self.training, size, **same)

    def without_data(self, fake: Callable[[Tensor], Tensor]) -> SampleFeed:
        """Augmentation is left out too: it is done before a pass, and small beside it."""
        feed = copy.copy(self)
        feed.banks = {
            name: replace(bank, inputs=fake(bank.inputs), targets=fake(bank.targets))
            for name, bank in self.banks.items()
        }
        feed.augment = None
        return feed

    def blank(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Int64[Tensor, "users count"]:
        """The first sample again and again."""
        return torch.zeros(users, count, dtype=torch.int64)

    def blank_inputs(
        self, users: int, count: int, fake: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "users count ..."]:
        """Inputs of samples."""
        inputs = self.banks["train"].inputs
        return fake(torch.empty(users, count, *inputs.shape[1:], dtype=inputs.dtype, device="meta"))

    def scored_at_once(self, users: Sequence[Any], portions: Portions) -> int:
        """As many as the largest test set has, up to a limit."""
        return min(SCORED_PER_SLOT, max(len(user.test) for user in users))

    def _bank(self, sets: Sequence[Samples]) -> SampleBank:
        """The sets in one tensor; the test and validation sets are asked for again and again, in turns."""
        key = tuple(id(part) for part in sets)
        if key not in self._scored:
            newest = dict(list(self._scored.items())[-1:])
            self._scored = newest | {key: (sets, bank_of(sets, **self.like))}  # kept, or others might get their ids
        return self._scored[key][1]
