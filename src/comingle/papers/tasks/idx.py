"""IDX files, in which MNIST is stored: arrays of bytes, plain or compressed."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from comingle.data.files import UNREADABLE, open_bytes
from comingle.utils.errors import DataError

_IDX_BYTES = 0x08


def read_idx(path: Path) -> UInt8[Tensor, "*shape"]:
    """An IDX file of unsigned bytes: two zero bytes, the type, the number of axes, their lengths, the values.

    Raises:
        DataError: no such file, not an IDX file of bytes, or fewer or more values than its lengths say.
    """
    content = _read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{path}: not an IDX file; it should begin with two zero bytes")
    kind, axes = content[2], content[3]
    if kind != _IDX_BYTES:
        raise DataError(f"{path}: IDX values of type 0x{kind:02x}; allowed: 0x{_IDX_BYTES:02x}, unsigned bytes")
    header = 4 + 4 * axes
    if len(content) < header:
        raise DataError(f"{path}: truncated within its header of {header} bytes, got {len(content)}")
    shape = struct.unpack(f">{axes}I", content[4:header])
    values = np.frombuffer(content, np.uint8, offset=header)
    if len(values) != np.prod(shape, dtype=np.int64):
        wanted = " x ".join(map(str, shape))
        raise DataError(f"{path}: {len(values)} values, but its header says {wanted}; truncated or damaged")
    return torch.from_numpy(values.reshape(shape).copy())


def _read_bytes(path: Path) -> bytes:
    try:
        with open_bytes(path) as file:
            return file.read()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
