"""One user's samples as a program hands them over: a data set of PyTorch, arrays, or splits of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from comingle.data import arrays
from comingle.data.arrays import is_pair, read_samples
from comingle.data.samples import SPLITS, Samples, UserSamples
from comingle.kinds.samples.parting import part
from comingle.utils.errors import DataError

TAKEN = f"{arrays.TAKEN}, or {{train, valid, test}} of these"


def takes(data: Any) -> bool:
    """Whether this may be a user's samples."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(SPLITS) and all(_is_one(one) for one in data.values())
    return isinstance(data, UserSamples) or _is_one(data)


def _is_one(data: Any) -> bool:
    return isinstance(data, Samples | Dataset) or is_pair(data)


def read_given(name: str, data: Any, *, valid: float, test: float, seed: int) -> UserSamples:
    """A user's samples, parted where they have no splits.

    Raises:
        DataError: they are none, or too few.
    """
    where = f"user {name!r}"
    if not takes(data):
        raise DataError(f"{where}: got {type(data).__name__}; allowed: {TAKEN}")
    if isinstance(data, UserSamples):
        return data
    splits = data if isinstance(data, Mapping) else {"train": data}
    if isinstance(data, Mapping) and not {"train", "test"} <= set(data):
        raise DataError(f"{where}: splits {', '.join(map(repr, data))}; allowed: 'train' and 'test', maybe 'valid'")
    alone = not isinstance(data, Mapping)
    read = {split: read_samples(one, where if alone else f"{where}: {split}") for split, one in splits.items()}
    return part(name, read, valid=valid, test=test, seed=seed)
