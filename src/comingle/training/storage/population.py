"""A population's users in one file: names, tokens and samples.

A folder has ``names.text`` (all names one after another), ``names.ends`` (where each ends), and ``names.index``: the
numbers of the users in the order of their names' hashes, behind which ``names.hashes`` has these. ``names.sha256`` is
the digest of them all (:func:`comingle.data.populations.digest_names`).

A package with users of another type has a pair of functions for it registered: :data:`FORMS`.

A folder has ``users.bin`` (of each user its arrays, streams of tokens for example, behind a line that says of what
shape they are), ``users.ends`` (where each user ends, with a checksum of the user), ``users.sizes`` (how much each has
to train, to validate and to test on), the names (:mod:`comingle.training.storage.population`) and ``about.json``, with
checksums of all files but the first. Those are compared when the folder is opened, a user's whenever the user is read.
Files are mapped into memory: what nobody works on takes none.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from comingle.data.conversations.encoding import Answers, UserAnswers
from comingle.data.populations import Crowd, Known, digest_names
from comingle.data.samples.samples import SPLITS, Samples, UserSamples
from comingle.data.text.streams import UserData
from comingle.models.windows import PAD
from comingle.utils.errors import DataError
from comingle.utils.names import name_problem


class Numbered(Known):
    """Names that are numbers behind a prefix: ``user-0``, ``user-1`` and so on."""

    def __init__(self, prefix: str, count: int):
        self.prefix, self.size = prefix, count

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return [f"{self.prefix}{i}" for i in range(self.size)[at]]
        return f"{self.prefix}{range(self.size)[at]}"

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """The number in a name, which nobody looks for among the others.

        Raises:
            ValueError: nobody has it.
        """
        number = value.removeprefix(self.prefix)
        if number.isdecimal() and value == f"{self.prefix}{int(number)}" and int(number) < self.size:
            return int(number)
        raise ValueError(f"no user {value!r}")

    @property
    def digest(self) -> str:
        """Of the prefix and how many there are."""
        return digest_names([self.prefix, str(len(self))])


FILES = ("names.text", "names.ends", "names.index", "names.hashes", "names.sha256")
NAMES, _ENDS, _INDEX, _HASHES, _SUM = FILES


class NamesWriter:
    """Names as they come."""

    def __init__(self, folder: Path):
        self.folder, self._end = folder, 0
        self._open = ExitStack()
        self._text, self._ends = (self._open.enter_context(open(folder / name, "wb")) for name in (NAMES, _ENDS))  # noqa: SIM115 (closed with it)
        self._digest, self._hashes = hashlib.sha256(), array("Q")

    def add(self, name: str) -> None:
        """Write one down.

        Raises:
            DataError: no name.
        """
        if problem := name_problem([name]):
            raise DataError(problem)
        content = name.encode()
        self._digest.update((b"\0" if len(self._hashes) else b"") + content)
        self._hashes.append(_hash(content))
        self._text.write(content)
        self._end += len(content)
        self._ends.write(self._end.to_bytes(8, "little"))

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def finish(self) -> Names:
        """All of them.

        Raises:
            DataError: one is there twice.
        """
        self.close()
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        order = hashes.argsort(kind="stable")
        order.astype("<i8").tofile(self.folder / _INDEX)
        hashes[order].astype("<u8").tofile(self.folder / _HASHES)
        (self.folder / _SUM).write_text(self._digest.hexdigest(), encoding="utf-8")
        names = Names(self.folder)
        ranked = hashes[order]
        for at in np.flatnonzero(ranked[1:] == ranked[:-1]).tolist():
            if (name := names[int(order[at])]) == names[int(order[at + 1])]:
                raise DataError(f"user {name!r} twice; names must differ")
        return names


class Names(Known):
    """The names of a folder, or of some who follow one another.

    Raises:
        DataError: its files are torn.
    """

    def __init__(self, folder: Path, span: range | None = None):
        self.folder = folder
        self._text, self._ends = _map(folder / NAMES, "u1"), _map(folder / _ENDS, "<i8")
        self._index, self._hashes = _map(folder / _INDEX, "<i8"), _map(folder / _HASHES, "<u8")
        self.span = range(len(self._ends)) if span is None else span
        self._sum = (folder / _SUM).read_text(encoding="utf-8")
        end = int(self._ends[-1]) if len(self._ends) else 0
        if end != len(self._text) or not len(self._ends) == len(self._index) == len(self._hashes):
            raise DataError(f"{folder}: names of users, in files that do not fit each other")

    def __len__(self) -> int:
        return len(self.span)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return Names(self.folder, self.span[at])
        return self._name(self.span[at])

    def __iter__(self) -> Iterator[str]:
        return map(self._name, self.span)

    def _name(self, number: int) -> str:
        start = int(self._ends[number - 1]) if number else 0
        return self._text[start : int(self._ends[number])].tobytes().decode()

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """The number of a name.

        Raises:
            ValueError: nobody has it.
        """
        key = np.uint64(_hash(value.encode()))
        for at in range(int(np.searchsorted(self._hashes, key)), len(self._hashes)):
            if self._hashes[at] != key:
                break
            if (number := int(self._index[at])) in self.span and self._name(number) == value:
                return self.span.index(number)
        raise ValueError(f"no user {value!r}")

    @property
    def digest(self) -> str:
        """By which the same names in the same order are known again."""
        whole = len(self) == len(self._ends)
        return self._sum if whole else hashlib.sha256("\0".join(self).encode()).hexdigest()

    def copy_to(self, folder: Path) -> None:
        """Have all of them, not only some, in another folder too."""
        for name in FILES:
            shutil.copyfile(self.folder / name, folder / name)


def _map(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


Arrays = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class UserForm:
    """``parts`` of a user, and the user of a name and parts; ``counts`` is what there is to be known of all users
    together: sums, and what begins with ``most_`` is the largest."""

    parts: Callable[[Any], Arrays]
    user: Callable[[str, Arrays], Any]
    counts: Callable[[Any], Mapping[str, int]] = lambda user: {}


def _answers_parts(user: UserAnswers) -> Arrays:
    found: dict[str, Tensor] = {}
    for split in SPLITS:
        part = user.split(split)
        told = json.dumps([part.references, part.limit, part.measures, part.ends]).encode()
        words = torch.from_numpy(np.frombuffer(told, dtype=np.uint8).copy())
        of_split = {"windows": part.windows, "owners": part.owners, "prompts": part.prompt_tokens, "told": words}
        found |= {f"{split}.{key}": t for key, t in of_split.items()}
    return found


def _answers_user(name: str, arrays: Arrays) -> UserAnswers:
    def of_split(split: str) -> Answers:
        references, limit, measures, ends = json.loads(arrays[f"{split}.told"].numpy().tobytes())
        return Answers(
            windows=arrays[f"{split}.windows"],
            owners=arrays[f"{split}.owners"],
            prompt_tokens=arrays[f"{split}.prompts"],
            references=tuple(references),
            limit=limit,
            measures=tuple(measures),
            ends=tuple(ends),
        )

    train, valid, test = (of_split(split) for split in SPLITS)
    return UserAnswers(name=name, train=train, valid=valid, test=test)


def _answers_counts(user: UserAnswers) -> Mapping[str, int]:
    return {"most_width": user.train.windows.shape[1], "tokens": int((user.train.windows != PAD).sum())}


def _samples_parts(user: UserSamples) -> Arrays:
    parts = {split: user.split(split) for split in SPLITS}
    return {f"{s}.{key}": getattr(part, key) for s, part in parts.items() for key in ("inputs", "targets")}


def _samples_user(name: str, arrays: Arrays) -> UserSamples:
    train, valid, test = (Samples(inputs=arrays[f"{s}.inputs"], targets=arrays[f"{s}.targets"]) for s in SPLITS)
    return UserSamples(name=name, train=train, valid=valid, test=test)


FORMS: dict[type, UserForm] = {
    UserData: UserForm(
        parts=lambda user: {split: getattr(user, split) for split in SPLITS},
        user=lambda name, arrays: UserData(
            name=name, train=arrays["train"], valid=arrays["valid"], test=arrays["test"]
        ),
    ),
    UserAnswers: UserForm(parts=_answers_parts, user=_answers_user, counts=_answers_counts),
    UserSamples: UserForm(parts=_samples_parts, user=_samples_user),
}
"""By the type of a user."""


_ROW = np.dtype([("owner", "<i4"), ("split", "<i4"), ("end", "<i8")])


class Spool:
    """Rows that are written down one after another, and read user by user."""

    def __init__(self, folder: Path):
        self._contents, self._rows = folder / "rows.bin", folder / "rows.index"
        self.owners: dict[str, int] = {}
        """The number of each user, by the first of its rows."""
        self._splits: dict[str, int] = {}

    def fill(self, rows: Iterable[tuple[str, str, bytes]]) -> None:
        """Write down whose rows, of which split, have what in them."""
        end = 0
        with open(self._contents, "wb") as contents, open(self._rows, "wb") as index:
            for owner, split, content in rows:
                number = self.owners.setdefault(owner, len(self.owners))
                part = self._splits.setdefault(split, len(self._splits))
                end += len(content)
                contents.write(content)
                index.write(np.array((number, part, end), dtype=_ROW).tobytes())

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, list[bytes]]]]:
        """The rows of each of these users by split, in their order; no more than one user's are held at a time."""
        if not self.owners:
            return
        rows = np.memmap(self._rows, dtype=_ROW, mode="r")
        order = rows["owner"].argsort(kind="stable").astype(np.int32 if len(rows) < 2**31 else np.int64)
        starts = np.concatenate([[0], np.bincount(rows["owner"], minlength=len(self.owners)).cumsum()])
        splits = list(self._splits)
        with open(self._contents, "rb") as contents:
            for name in names:
                number, found = self.owners[name], dict[str, list[bytes]]()
                for at in order[starts[number] : starts[number + 1]].tolist():
                    start = int(rows["end"][at - 1]) if at else 0
                    contents.seek(start)
                    content = contents.read(int(rows["end"][at]) - start)
                    found.setdefault(splits[int(rows["split"][at])], []).append(content)
                yield name, found

    def remove(self) -> None:
        """Delete what was written."""
        for path in (self._contents, self._rows):
            path.unlink(missing_ok=True)


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
