"""One user's samples as a program hands them over: a data set of PyTorch, arrays, or splits of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from comingle.data.arrays import as_samples
from comingle.data.rows import describe
from comingle.data.samples import SPLITS, Samples, UserSamples
from comingle.errors import DataError
from comingle.kinds.samples.parting import part

TAKEN = "a torch Dataset of (input, target), a pair of arrays or tensors, or {train, valid, test} of these"


def takes(data: Any) -> bool:
    """Whether this may be a user's samples."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(SPLITS) and all(_is_one(one) for one in data.values())
    return isinstance(data, UserSamples) or _is_one(data)


def _is_one(data: Any) -> bool:
    return isinstance(data, Samples | Dataset) or _is_pair(data)


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(d, Tensor | np.ndarray) for d in data)


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
    read = {split: _read(one, where if alone else f"{where}: {split}") for split, one in splits.items()}
    return part(name, read, valid=valid, test=test, seed=seed)


def _read(data: Any, where: str) -> Samples:
    if isinstance(data, Samples):
        return data
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise DataError(f"{where}: a TensorDataset of {len(data.tensors)}; allowed: two, inputs and targets")
        return as_samples(*data.tensors, where)
    if isinstance(data, Dataset):
        return _items(data, where)
    inputs, targets = data
    return as_samples(inputs, targets, where)


def _items(data: Any, where: str) -> Samples:
    """Every item of a data set, in order."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise DataError(f"{where}: a data set without a length; allowed: map-style ones, with __len__ and __getitem__")
    inputs, targets = [], []
    for number in range(len(data)):
        item = data[number]
        if not isinstance(item, tuple | list) or len(item) != 2:
            got = f"{len(item)} parts" if isinstance(item, tuple | list) else type(item).__name__
            raise DataError(f"{where}: item {number} is {got}; allowed: (input, target)")
        inputs.append(_array(item[0], f"{where}: the input of item {number}"))
        targets.append(_array(item[1], f"{where}: the target of item {number}"))
    if not inputs:
        raise DataError(f"{where}: holds no samples, needs at least 1")
    return as_samples(_stack(inputs, f"{where}: inputs"), _stack(targets, f"{where}: targets"), where)


def _array(value: Any, where: str) -> Tensor:
    """A number, array, tensor or picture."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{where} is {type(value).__name__}; allowed: numbers, an array, a tensor or a picture")
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float16 else np.array(array))


def _stack(values: list[Tensor], where: str) -> Tensor:
    shapes = dict.fromkeys(tuple(value.shape) for value in values)
    if len(shapes) > 1:
        one, other, *_ = shapes
        raise DataError(f"{where} have shapes {one} and {other}; all need one shape")
    try:
        return torch.stack(values)
    except (RuntimeError, TypeError) as error:
        raise DataError(f"{where} cannot be put together: {describe(error)}") from error
