"""A population's token streams in one file: written user by user, read where somebody takes part.

A folder has ``tokens.bin`` (all streams one after another), ``spans.npy`` (where each user's train, valid and test text
begin, and where the last ends) and ``names.txt`` (a name a line). Nothing but names and spans is held in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from comingle.data.crowds import Crowd
from comingle.data.names import name_problem
from comingle.data.pack import UserData
from comingle.errors import DataError

TOKENS, SPANS, NAMES, SUM = "tokens.bin", "spans.npy", "names.txt", "tokens.sha256"
_SPLITS = ("train", "valid", "test")


def write_population(folder: Path, users: Iterable[UserData]) -> int:
    """Write users as they come, one at a time; returns how many there were.

    Raises:
        DataError: two have one name, or a name cannot be a line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ends, at, names, digest = [0], 0, list[str](), hashlib.sha256()
    with open(folder / TOKENS, "wb") as file:
        for user in users:
            names.append(user.name)
            for split in _SPLITS:
                content = getattr(user, split).to(torch.int32).numpy().tobytes()
                file.write(content)
                digest.update(content)
                at += len(content) // 4
                ends.append(at)
    if (problem := name_problem(names)) or any("\n" in name for name in names):
        raise DataError(f"{folder}: {problem or 'a name has two lines'}")
    np.save(folder / SPANS, np.array(ends, dtype=np.int64))
    (folder / NAMES).write_text("\n".join(names), encoding="utf-8")
    (folder / SUM).write_text(digest.hexdigest(), encoding="utf-8")
    return len(names)


def read_population(folder: Path) -> Crowd:
    """The users of such a folder, each read when it is asked for.

    Raises:
        DataError: it is not one, or its files do not fit each other.
    """
    try:
        names = (folder / NAMES).read_text(encoding="utf-8").split("\n")
        spans, tokens = np.load(folder / SPANS), np.memmap(folder / TOKENS, dtype=np.int32, mode="r")
        digest = (folder / SUM).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no population of token streams ({error}); write it again") from None
    if len(spans) != 3 * len(names) + 1 or spans[-1] != len(tokens):
        told = f"{len(names)} names, {len(spans)} spans, {len(tokens)} tokens"
        raise DataError(f"{folder}: files that do not fit each other ({told}); write it again")

    def make(number: int) -> UserData:
        first, *ends = spans[3 * number : 3 * number + 4].tolist()
        parts = [_read(tokens, *span) for span in zip([first, *ends[:-1]], ends, strict=True)]
        return UserData(name=names[number], **dict(zip(_SPLITS, parts, strict=True)))

    return Crowd(tuple(names), make, digest=digest)


def _read(tokens: np.ndarray, start: int, end: int) -> Tensor:
    return torch.from_numpy(np.array(tokens[start:end], dtype=np.int32))
