"""A user's samples in three splits: their own, or parted at random, about the same share of every class."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Int64
from torch import Tensor

from comingle.data.samples import Samples, UserSamples
from comingle.data.splits import hold_out, take
from comingle.utils.errors import DataError
from comingle.utils.seeds import generator


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
    parts = dict(splits)
    if "test" not in splits:
        valid /= 1 - test  # it is a share of all
        train, parts["test"] = _held_out(name, train, "test", test)
    if "valid" not in splits:
        train, parts["valid"] = _held_out(name, train, "valid", valid) if valid else (train, train.first(0))
    return UserSamples(name=name, train=train, valid=parts["valid"], test=parts["test"])


def _held_out(name: str, samples: Samples, split: str, share: float) -> tuple[Samples, Samples]:
    kept, held = hold_out(_labels(samples), share)
    if not len(held):
        got = f"{len(samples)} samples, one of each class" if len(samples) > 1 else "1 sample"
        raise DataError(f"user {name!r}: {got}, of which none can be spared for data.split.{split}; give more")
    return take(samples, kept), take(samples, held)


def _labels(samples: Samples) -> Int64[Tensor, " n"]:
    """Classes; a regression has none to keep."""
    targets = samples.targets
    if not targets.is_floating_point() and bool((targets >= 0).all()):
        return targets.long()
    return torch.zeros(len(targets), dtype=torch.int64)
