"""A user's samples (inputs with targets), and everybody's in one tensor that batches are gathered from.

The counterpart of :mod:`comingle.data.pack` for tasks that are not language: FLoRAL's regressions and images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from comingle.models.windows import PAD
from comingle.utils.errors import DataError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Inputs with their targets: class numbers, or vectors to regress on.

    Raises:
        DataError: the numbers of inputs and targets differ.
    """

    inputs: Float[Tensor, " n *shape"]
    targets: Int[Tensor, " m"] | Float[Tensor, "m d"]  # m is n, but saying so is for people: see below

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            got = f"{len(self.inputs)} inputs but {len(self.targets)} targets"
            raise DataError(f"samples: {got}; every input needs one target")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def contents(self) -> tuple[Tensor, Tensor]:
        """What a digest is taken of."""
        return self.inputs, self.targets

    def first(self, count: int) -> Samples:
        """The first ``count`` samples, or all where there are fewer."""
        return Samples(inputs=self.inputs[:count], targets=self.targets[:count])


@dataclass(frozen=True, kw_only=True)
class UserSamples:
    """The samples of one user; valid may be empty. ``cluster`` is the true one, where it is known."""

    name: str
    train: Samples
    valid: Samples
    test: Samples
    cluster: int | None = None

    def split(self, split: Split) -> Samples:
        """One of the three."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


@dataclass(frozen=True, kw_only=True)
class SampleBank:
    """One split of all users, one user after another: user i has ``counts[i]`` samples from ``starts[i]`` on.

    ``inputs`` and ``targets`` live on the device that trains, ``starts`` and ``counts`` on the CPU.
    """

    inputs: Float[Tensor, " total *shape"]
    targets: Int[Tensor, " total"] | Float[Tensor, "total d"]
    starts: Int64[Tensor, " everybody"]
    counts: Int64[Tensor, " everybody"]

    def take(
        self, users: Sequence[int], indices: Int[Tensor, "users batch"]
    ) -> tuple[Float[Tensor, "users batch *shape"], Tensor, Bool[Tensor, "users batch"]]:
        """Samples ``indices[s]`` of user ``users[s]`` in one gather: inputs, targets ``(users, batch, ...)``, presence.

        Where the index is ``PAD``, the sample is not present: it repeats some sample and must carry no loss.
        """
        indices = indices.cpu().long()
        chosen = torch.tensor(users, dtype=torch.int64)
        starts, counts = self.starts[chosen, None], self.counts[chosen, None]
        # A larger index would read the samples of somebody else.
        assert bool(((indices >= PAD) & (indices < counts)).all()), "an index beyond the user's samples"
        # The start of a last user without samples lies behind the end.
        at = (starts + indices.clamp(min=0)).clamp(max=len(self.inputs) - 1).to(self.inputs.device)
        return _gather(self.inputs, at), _gather(self.targets, at), (indices != PAD).to(self.inputs.device)


def _gather(values: Tensor, at: Int64[Tensor, "users batch"]) -> Tensor:
    return values.index_select(0, at.flatten()).view(*at.shape, *values.shape[1:])


def epoch(count: int, batch_size: int, generator: torch.Generator) -> Int64[Tensor, "steps batch"]:
    """One shuffled pass over ``count`` samples in batches; the end of the last is filled with ``PAD``.

    The batches of a ``DataLoader`` with ``shuffle`` and without ``drop_last``, as indices.
    """
    steps = -(-count // batch_size)
    rows = torch.full((steps * batch_size,), PAD, dtype=torch.int64)
    rows[:count] = torch.randperm(count, generator=generator, device=generator.device).cpu()
    return rows.view(steps, batch_size)


def join(parts: Sequence[Samples]) -> Samples:
    """The samples of all parts, one part after another."""
    return Samples(
        inputs=torch.cat([part.inputs for part in parts]), targets=torch.cat([part.targets for part in parts])
    )


def bank_of(
    parts: Sequence[Samples], *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> SampleBank:
    """Everybody's samples as a bank; ``dtype`` is that of inputs and real targets. See :func:`check` for shapes."""
    joined, counts = join(parts), torch.tensor([len(part) for part in parts])
    return SampleBank(
        inputs=joined.inputs.to(device, dtype),
        targets=joined.targets.to(device, dtype if joined.targets.is_floating_point() else None),
        starts=counts.cumsum(0) - counts,
        counts=counts,
    )


def check(users: Sequence[UserSamples], *, classes: int | None = None) -> None:
    """Whether the users can share a task; ``classes`` is how many there are, None for a regression.

    Raises:
        DataError: no users, two of one name, a user without train or test samples, of another shape or kind of target
            than the first user, with inputs that are not finite, or with a target out of range.
    """
    if not users:
        raise DataError("no users; a task needs at least one")
    names: set[str] = set()
    for user in users:
        if user.name in names:
            raise DataError(f"user {user.name!r}: two users of this name; names must differ")
        names.add(user.name)
        for split in SPLITS:
            _check_split(user, split, users[0], classes)


def _check_split(user: UserSamples, split: Split, first: UserSamples, classes: int | None) -> None:
    samples, where = user.split(split), f"user {user.name!r}: {split}"
    if not len(samples):
        if split != "valid":
            raise DataError(f"{where} holds no samples, needs at least 1")
        return
    for part, like in ((samples.inputs, first.train.inputs), (samples.targets, first.train.targets)):
        part_name = "inputs" if part is samples.inputs else "targets"
        got, needed = tuple(part.shape[1:]), tuple(like.shape[1:])
        if got != needed:
            whose = f"those of user {first.name!r} {needed}"
            raise DataError(f"{where} {part_name} have shape {got} but {whose}; all users and splits need one shape")
        if part.is_floating_point() and not bool(part.isfinite().all()):
            raise DataError(f"{where} {part_name} hold NaN or infinite values; allowed: finite numbers")
    _check_targets(samples.targets, classes, where)


def _check_targets(targets: Tensor, classes: int | None, where: str) -> None:
    if targets.is_floating_point() != (classes is None):
        got, needed = str(targets.dtype).removeprefix("torch."), "real numbers" if classes is None else "whole numbers"
        raise DataError(f"{where} targets are {got}; this task needs {needed}")
    if classes is not None:
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise DataError(f"{where} targets go from {low} to {high}; allowed: 0 to {classes - 1}")


def pool_samples(users: Sequence[UserSamples]) -> UserSamples:
    """One user named "everyone" that holds the samples of all: the centralized baseline."""

    train, valid, test = (join([user.split(split) for user in users]) for split in SPLITS)
    return UserSamples(name="everyone", train=train, valid=valid, test=test)
