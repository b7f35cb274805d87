"""A population's data in one file: written user by user, read where somebody takes part.

A folder has ``users.bin`` (of each user its arrays, streams of tokens for example, behind a line that says of what
shape they are), ``users.ends`` (where each user ends, with a checksum of the user), ``users.sizes`` (how much each has
to train, to validate and to test on), the names (:mod:`comingle.store.names`) and ``about.json``, with checksums of all
files but the first. Those are compared when the folder is opened, a user's whenever the user is read. Files are mapped
into memory: what nobody works on takes none.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comingle.data.populations import Crowd
from comingle.data.samples.samples import SPLITS
from comingle.store.forms import FORMS, UserForm
from comingle.store.names import Names, NamesWriter
from comingle.utils.errors import DataError

USERS, ENDS, SIZES, ABOUT = "users.bin", "users.ends", "users.sizes", "about.json"
_LINE = 16
"""To so many bytes arrays are aligned."""
_PLACE = np.dtype([("end", "<i8"), ("sum", "<u4")])
_AT_ONCE = 1 << 20
"""So many bytes of a file are read at once."""


def write_population(folder: Path, users: Iterable[Any]) -> int:
    """Write users as they come, one at a time; returns how many there were.

    Raises:
        DataError: two have one name, a name is none, or the users are not all of one type that is known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with PopulationWriter(folder) as writer:
        for user in users:
            writer.add(user)
        return writer.finish()


class PopulationWriter:
    """Writes users as they come."""

    def __init__(self, folder: Path):
        self.folder, self._names = folder, NamesWriter(folder)
        self._open = ExitStack()
        self._files = [self._open.enter_context(open(folder / name, "wb")) for name in (USERS, ENDS, SIZES)]  # noqa: SIM115 (closed with it)
        self._end, self.count, self._form = 0, 0, type(None)
        self._digest, self._counts = hashlib.sha256(), dict[str, int]()

    def __enter__(self) -> PopulationWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._names.close()
        self._open.close()

    def add(self, user: Any) -> None:
        """Write one down.

        Raises:
            DataError: nobody of a type that is known, or of that of the others.
        """
        form = FORMS.get(type(user))
        if form is None or (self.count and type(user) is not self._form):
            allowed = self._form.__name__ if self.count else ", ".join(kind.__name__ for kind in FORMS)
            raise DataError(f"user {user.name!r}: is {type(user).__name__}; allowed: {allowed}")
        self._form, self.count = type(user), self.count + 1
        self._names.add(user.name)
        content = _packed(form, user)
        users, ends, sizes = self._files
        users.write(content)
        self._digest.update(content)
        self._end += len(content)
        ends.write(np.array((self._end, zlib.crc32(content)), dtype=_PLACE).tobytes())
        sizes.write(np.array([len(getattr(user, split)) for split in SPLITS], dtype="<i8").tobytes())
        for key, value in form.counts(user).items():
            before = self._counts.get(key, 0)
            self._counts[key] = max(before, value) if key.startswith("most_") else before + value

    def finish(self, more: Mapping[str, Any] | None = None) -> int:
        """The rest, with what ``about.json`` says besides; returns how many users there are.

        Whatever else is to be in the folder is in it by now.

        Raises:
            DataError: two have one name.
        """
        self._open.close()
        self._names.finish()
        sums = {path.name: _sum(path) for path in sorted(self.folder.iterdir()) if path.name not in (USERS, ABOUT)}
        about = {"type": self._form.__name__, "digest": self._digest.hexdigest(), "counts": self._counts, "sums": sums}
        (self.folder / ABOUT).write_text(json.dumps(about | dict(more or {}), indent=2) + "\n", encoding="utf-8")
        return self.count


def _sum(path: Path) -> int:
    """A checksum of a file, of which little is in memory at a time."""
    found = 0
    with open(path, "rb") as file:
        while content := file.read(_AT_ONCE):
            found = zlib.crc32(content, found)
    return found


def _packed(form: UserForm, user: Any) -> bytes:
    """A line of JSON with the name, dtype and shape of each array, then the arrays."""
    parts = {key: t.detach().cpu().contiguous() for key, t in form.parts(user).items()}
    told = [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in parts.items()]
    pieces = [_padded(json.dumps(told).encode() + b"\n", b" ")]
    pieces += [_padded(t.flatten().view(torch.uint8).numpy().tobytes(), b"\0") for t in parts.values() if t.numel()]
    return b"".join(pieces)


def _padded(content: bytes, by: bytes) -> bytes:
    return by * (-len(content) % _LINE) + content if by == b" " else content + by * (-len(content) % _LINE)


def read_about(folder: Path) -> dict[str, Any]:
    """What is written down of a population as a whole.

    Raises:
        DataError: there is none.
    """
    try:
        return json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no population of users ({error}); write it again") from None


def read_population(folder: Path) -> Crowd:
    """The users of such a folder, each read when it is asked for.

    Raises:
        DataError: it is not one, or its files are not as they were written; of a user's data it is raised when the user
            is asked for.
    """
    about = read_about(folder)
    form = next((form for kind, form in FORMS.items() if kind.__name__ == about.get("type")), None)
    try:
        sums = about["sums"] if form else {}
        if changed := [name for name, known in sums.items() if _sum(folder / name) != known]:
            raise ValueError(f"{', '.join(changed)}: not as it was written")
        names = Names(folder)
        ends = np.memmap(folder / ENDS, dtype=_PLACE, mode="r")
        sizes = np.memmap(folder / SIZES, dtype="<i8", mode="r").reshape(-1, len(SPLITS))
        with open(folder / USERS, "rb") as file:  # views of it may be written to, which changes no file
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no population of users ({error}); write it again") from None
    if form is None or not len(names) == len(ends) == len(sizes) or ends["end"][-1] != len(content):
        told = f"{len(names)} names, {len(ends)} users, {len(content)} bytes"
        raise DataError(f"{folder}: files that do not fit each other ({told}); write it again")

    def make(number: int) -> Any:
        start, end = int(ends["end"][number - 1]) if number else 0, int(ends["end"][number])
        if zlib.crc32(memoryview(content)[start:end]) != ends["sum"][number]:
            raise DataError(f"{folder}: data of user {names[number]!r} is not as it was written; delete this folder")
        return form.user(names[number], _arrays(content, start))

    valid = int((sizes[:, 1] > 0).sum())
    known = {**about["counts"], "valid": valid}
    return Crowd(names, make, digest=about["digest"], sizes=sizes, about=known)


def _arrays(content: mmap.mmap, start: int) -> dict[str, Tensor]:
    at = content.find(b"\n", start) + 1
    arrays: dict[str, Tensor] = {}
    for key, name, shape in json.loads(content[start:at]):
        dtype, count = getattr(torch, name), int(np.prod(shape, dtype=np.int64))
        whole = torch.frombuffer(content, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
        arrays[key] = whole.view(shape)
        size = count * dtype.itemsize
        at += size + -size % _LINE
    return arrays
