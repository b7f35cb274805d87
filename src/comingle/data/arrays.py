"""Arrays of a file, and inputs and targets as nets take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

from comingle.data.rows import describe
from comingle.data.samples import Samples
from comingle.errors import DataError


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
