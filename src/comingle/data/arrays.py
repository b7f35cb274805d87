"""Arrays of a file or of a program, and inputs and targets as nets take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from comingle.data.row_files import describe
from comingle.data.samples import Samples
from comingle.utils.errors import DataError


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file; nothing in it is executed.

    Raises:
        DataError: no such file, no npz file, or a damaged one.
    """
    if not is_zipfile(path):  # numpy would take it for a pickle, or for a single array
        problem = "not a readable npz file: no complete zip archive" if path.is_file() else "no such file"
        raise DataError(f"{path}: {problem}")
    try:
        with path.open("rb") as raw, np.load(raw) as file:  # numpy leaves open what turns out to be damaged
            return {key: file[key] for key in file.files}
    except Exception as error:  # numpy, zipfile, zlib and tokenize each have errors of their own
        raise DataError(f"{path}: not a readable npz file: {describe(error)}") from error


def as_samples(inputs: Any, targets: Any, where: str) -> Samples:
    """Make samples of arrays or tensors: images in [0, 1] with channels first, whole targets as class numbers.

    Inputs of truth values or of 8 or 16 bits without a sign are images where they have three or four axes.

    Raises:
        DataError: no numbers, other whole numbers of three or four axes, or not one target for each input.
    """
    x, y = _tensor(inputs, f"{where}: inputs"), _tensor(targets, f"{where}: targets")
    if not x.dim():
        raise DataError(f"{where}: inputs are one number; allowed: arrays whose first axis counts samples")
    if not x.is_floating_point() and x.dim() in (3, 4):
        if x.dtype not in _LARGEST:
            got = f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
            raise DataError(
                f"{where}: inputs are {got}, whole numbers without a range to scale by; allowed: uint8 or uint16 for "
                "images, or real numbers"
            )
        x = as_images(x)
    x = x if x.is_floating_point() else x.float()
    if len(x) != (len(y) if y.dim() else 0):
        raise DataError(f"{where}: inputs have shape {tuple(x.shape)} but targets {tuple(y.shape)}; needs one for each")
    y = y.flatten() if not y.is_floating_point() and y.dim() == 2 and y.shape[1] == 1 else y
    if y.is_floating_point():
        y = y.reshape(len(y), -1) if len(y) else y.reshape(0, 1)
    elif y.dim() == 1:
        y = y.long()
    else:
        raise DataError(f"{where}: targets have shape {tuple(y.shape)}; allowed: a class number or real numbers each")
    return Samples(inputs=x if x.dim() > 1 else x.unsqueeze(1), targets=y)


_LARGEST = {torch.bool: 1, torch.uint8: 255, torch.uint16: 65535}


def as_images(pixels: Tensor) -> Tensor:
    """Pixels ``(n, h, w)``, ``(n, h, w, c)`` or ``(n, c, h, w)`` as ``(n, c, h, w)`` with values from 0 to 1."""
    if pixels.dim() == 3:
        pixels = pixels.unsqueeze(1)
    elif (last := pixels.shape[-1]) in (1, 3, 4) and pixels.shape[1] not in {1, 3, last}:
        pixels = pixels.permute(0, 3, 1, 2)
    return pixels.contiguous().float() / _LARGEST[pixels.dtype]


def _tensor(values: Any, where: str) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    else:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise DataError(f"{where} are {array.dtype}; allowed: numbers")
        if array.dtype.kind == "u" and array.dtype.itemsize > 2:  # which torch has few operations for
            array = array.astype(np.int64)
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    if tensor.is_complex():
        raise DataError(f"{where} are complex; allowed: real numbers")
    return tensor


def read_samples(data: Any, where: str) -> Samples:
    """Read one set of samples that a program hands over: a data set of PyTorch, or a pair of arrays or tensors.

    Raises:
        DataError: it is none of these, or its inputs and targets do not fit each other.
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise DataError(f"{where}: a TensorDataset of {len(data.tensors)}; allowed: two, inputs and targets")
        return as_samples(*data.tensors, where)
    if isinstance(data, Dataset):
        return _items(data, where)
    if not is_pair(data):
        raise DataError(f"{where}: got {type(data).__name__}; allowed: {TAKEN}")
    inputs, targets = data
    return as_samples(inputs, targets, where)


def is_pair(data: Any) -> bool:
    """Return whether this may be inputs and targets."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(d, Tensor | np.ndarray) for d in data)


TAKEN = "a torch Dataset of (input, target), a pair of arrays or tensors"


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
