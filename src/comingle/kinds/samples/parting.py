"""A user's samples in three splits: their own, or parted at random, about the same share of every class."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Int64
from torch import Tensor

from comingle.data.samples import Samples, UserSamples
from comingle.data.seeds import generator
from comingle.data.splits import hold_out, hold_out_valid, take
from comingle.errors import DataError


def part(name: str, splits: Mapping[str, Samples], *, valid: float, test: float, seed: int) -> UserSamples:
    """A user of these splits; ``test`` and ``valid`` are shares that are held out of "train" for those that lack.

    Which samples are held out follows from the seed and the user's name.

    Raises:
        DataError: so few samples that none can be spared.
    """
    train = splits["train"]
    if not len(train):
        raise DataError(f"user {name!r}: train holds no samples, needs at least 1")
    if "test" in splits and "valid" in splits:
        return UserSamples(name=name, train=train, valid=splits["valid"], test=splits["test"])
    train = take(train, torch.randperm(len(train), generator=generator("samples", name, seed)))
    total, tested = len(train), splits.get("test")
    if tested is None:
        kept, held = hold_out(_labels(train), test)
        if not len(held):
            raise DataError(f"user {name!r}: {total} samples, of which none can be spared for testing; give more")
        train, tested = take(train, kept), take(train, held)
        valid = valid / (1 - test)  # a share of all
    user = UserSamples(name=name, train=train, valid=splits.get("valid", train.first(0)), test=tested)
    return user if "valid" in splits or not valid else hold_out_valid(user, valid)


def _labels(samples: Samples) -> Int64[Tensor, " n"]:
    """Classes; a regression has none to keep."""
    targets = samples.targets
    if not targets.is_floating_point() and bool((targets >= 0).all()):
        return targets.long()
    return torch.zeros(len(targets), dtype=torch.int64)
