"""What is kept of each user as one record of bytes: its tensors side by side, in two groups.

``params`` has all that a user's model and its method's parts are made of, ``moments`` what optimisers remember, which
only those have who took steps. A record begins with its CRC-32 and the number of its row. Checkpoints keep that sum
too: a record that is whole may be of another round, or of another run.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comingle.engines.state import MOMENTS, State
from comingle.utils.errors import RunError

HEAD = 16
"""Bytes of a record's head: the CRC-32 of what follows it, and the number of the row, 8 bytes each."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of a user: its shape without the users, its dtype, and how it is written down."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes in a record."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.kept.itemsize

    @property
    def told(self) -> list[object]:
        """As JSON has it."""
        return [self.name, list(self.shape), str(self.kept).removeprefix("torch.")]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a record of a group has."""

    fields: tuple[Field, ...]

    @property
    def bytes(self) -> int:
        """Bytes of a record; 0 where there is nothing to keep."""
        size = sum(one.bytes for one in self.fields)
        return HEAD + size if size else 0

    def pack(self, rows: Sequence[int], tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Records ``(rows, bytes)``."""
        records = np.zeros((len(rows), self.bytes), dtype=np.uint8)
        at = HEAD
        for one in self.fields:
            whole = tensors[one.name].detach().to("cpu", one.kept).contiguous().view(len(rows), -1)
            records[:, at : at + one.bytes] = whole.view(torch.uint8).numpy()
            at += one.bytes
        records[:, 8:HEAD] = np.array(rows, dtype=np.int64).view(np.uint8).reshape(-1, 8)
        return records

    def unpack(self, records: np.ndarray) -> dict[str, Tensor]:
        """Tensors by name, ``(rows, *shape)``."""
        found, at = {}, HEAD
        for one in self.fields:
            # Made by torch, so that it is aligned alike wherever it comes from: roundings may depend on that.
            whole = torch.empty(len(records), *one.shape, dtype=one.kept)
            if len(records):
                part = torch.from_numpy(records[:, at : at + one.bytes])
                whole.view(len(records), -1).view(torch.uint8).copy_(part)
            found[one.name] = whole.to(one.dtype)
            at += one.bytes
        return found


UNKNOWN = 0
"""The sum of a record of which none was kept, as versions of before did not."""


def seal(record: np.ndarray) -> int:
    """Write the sum of a record into its head; returns it."""
    found = zlib.crc32(record[8:].data)
    record[:8] = np.array([found], dtype=np.int64).view(np.uint8)
    return found


def check(record: np.ndarray, row: int, known: int, path: object) -> None:
    """Whether a record is what was written, of this row, and that of which this sum is known.

    Raises:
        RunError: it is not.
    """
    told, owner = record[:HEAD].view(np.int64).tolist()
    if told != zlib.crc32(record[8:].data):
        raise RunError(
            f"{path}: damaged, the record of row {row} is not what was written; restore the file from a copy, or begin "
            "anew with another --out"
        )
    if owner != row or known not in (told, UNKNOWN):
        raise RunError(
            f"{path}: the record of row {row} is of another round or run than the checkpoint; restore the store that "
            "belongs to it, or begin anew with another --out"
        )


def forms_of(sample: State, moments: torch.dtype | None) -> dict[str, Form]:
    """What the groups have, out of the state of some users; ``moments`` in another dtype if one is given."""
    groups: dict[str, list[Field]] = {"params": [], "moments": []}
    for name, t in sample.tensors().items():
        group = "moments" if name in MOMENTS else "params"
        kept = moments if group == "moments" and moments is not None else t.dtype
        groups[group].append(Field(name=name, shape=tuple(t.shape[1:]), dtype=t.dtype, kept=kept))
    return {name: Form(fields=tuple(fields)) for name, fields in groups.items()}
