"""Populations in one file: users' tokens and samples, written user by user, and the cache of them.

A folder has ``users.bin`` (of each user its arrays, streams of tokens for example, behind a line with their shapes),
``users.ends`` (where each user ends, with a checksum), ``users.sizes`` (how much each has to train, to validate and to
test on), the names (:mod:`comingle.data.populations`) and ``about.json``, with checksums of all files but the first.
Those are compared when the folder is opened, a user's whenever the user is read. Files are mapped into memory.

Users that a recipe says are kept in the user's cache (:func:`comingle.utils.files.cache_folder`), readable by nobody
else, under a name that follows from what was read, by path, size and time of its files, and from all that determines
how it was encoded. A population that was not used for 30 days is deleted. Sources that are no files (names of the hub,
of plug-ins) are read anew each time.

A package with users of another type registers a pair of functions for it in :data:`FORMS`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from comingle.data.conversations.encoding import Answers, UserAnswers
from comingle.data.populations import LazyPopulation, Named, Names, NamesWriter, User
from comingle.data.samples.samples import SPLITS, Samples, UserSamples
from comingle.data.streaming import FirstUsers, Read, StoredRows, StreamingReader
from comingle.data.text.streams import UserData
from comingle.models.scoring import PAD
from comingle.utils.errors import DataError
from comingle.utils.files import cache_folder, make_once
from comingle.utils.records import expand_home

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


USERS, ENDS, SIZES, ABOUT = "users.bin", "users.ends", "users.sizes", "about.json"
_LINE = 16
"""To so many bytes arrays are aligned."""
_PLACE = np.dtype([("end", "<i8"), ("sum", "<u4")])
_AT_ONCE = 1 << 20
"""So many bytes of a file are read at once."""


def write_population(folder: Path, users: Iterable[Named]) -> int:
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

    def add(self, user: Named) -> None:
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

    def finish(self, more: Mapping[str, object] | None = None) -> int:
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


def _packed(form: UserForm, user: object) -> bytes:
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


def read_population(folder: Path) -> LazyPopulation[Any]:
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
    return LazyPopulation(names, make, digest=about["digest"], sizes=sizes, about=known)


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


# -------------------------------------------------------------------- from a reader

SKIPPED = "skipped.jsonl"
"""In the folder of a population: a line for each user who was left out, and what the user had too little of."""

HEARD = 100
"""Number of warnings that are repeated."""

logger = logging.getLogger("comingle")


class _Heard(logging.Handler):
    """Records the first warnings while users are read, so that they are repeated when the users come from the cache."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines, self.count = list[str](), 0

    def emit(self, record: logging.LogRecord) -> None:
        """Record a warning."""
        self.count += 1
        if self.count <= HEARD:
            self.lines.append(record.getMessage())

    def __enter__(self) -> _Heard:
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)

    @property
    def repeated(self) -> list[str]:
        """The recorded lines, and the number of the others."""
        more = self.count - HEARD
        return [*self.lines, *([f"{more} more such lines were said when the users were read"] if more > 0 else [])]


def write_users(reader: StreamingReader[Read, User], folder: Path) -> None:
    """Read all users and write those who have enough data.

    Raises:
        DataError: a source cannot be read, or a user has too little data and is not to be left out.
    """
    small = FirstUsers()
    with PopulationWriter(folder) as writer, _Heard() as heard:
        with open(folder / SKIPPED, "w", encoding="utf-8") as skipped:
            reader.on_skip = lambda name, what: skipped.write(json.dumps([name, what]) + "\n")
            rows = StoredRows(folder)
            with closing(reader.read(rows)) as read:
                for found, user in reader.stream(read):
                    if not reader.skips and (shortage := reader.shortage(user)) is not None:
                        small.add(user.name, shortage)
                    elif not small.count:  # else there is no run, but all such users are named
                        reader.inspect(found, user)
                        writer.add(user)
                    del found, user  # before the next user is read
            rows.remove()
        if small.count:
            raise reader.refuse(small)
        about, lines = reader.summary()
        writer.finish({"told": lines, "heard": heard.repeated, "skipped": reader.left_out.count, **about})


def read_cached(reader: StreamingReader[Read, User]) -> tuple[LazyPopulation[User], dict[str, Any], Mapping[str, str]]:
    """Return the users of a reader, what is known of all of them, and who was left out.

    They are read unless the cache has them. Warnings of reading them are logged, also where that was before.

    Raises:
        DataError: a user's data cannot be used, or the cache cannot be written to.
    """
    folder, was_there = cached_population(reader)
    try:
        users, about = read_population(folder), read_about(folder)
    except DataError:  # torn, in a cache that anything may happen to
        shutil.rmtree(folder, ignore_errors=True)
        folder, was_there = cached_population(reader)
        users, about = read_population(folder), read_about(folder)
    for line in (*(about["heard"] if was_there else []), *about["told"]):
        logger.warning("%s", line)
    return users, about, Skipped(folder / SKIPPED, about["skipped"])


class Skipped(Mapping[str, str]):
    """Users who were left out, and what they have too little of, in a file that is read on demand."""

    def __init__(self, path: Path, count: int):
        self.path, self.count = path, count

    def __len__(self) -> int:
        return self.count

    def items(self) -> Any:
        """Yield the lines of the file."""
        with open(self.path, encoding="utf-8") as lines:
            yield from (tuple(json.loads(line)) for line in lines)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items())

    def __getitem__(self, name: str) -> str:
        for one, what in self.items():
            if one == name:
                return what
        raise KeyError(name)


_FORM = 3
"""Version of the files; those of older versions are written anew."""

_DAYS_UNUSED = 30


def cached_population(reader: StreamingReader[Read, User]) -> tuple[Path, bool]:
    """Return the folder of a reader's population, and whether it was there; write it unless it was.

    Of several processes on one machine one writes.

    Raises:
        DataError: a user's data cannot be used, or the cache cannot be written to.
    """
    states = _digest(_states(reader.sources()))
    if states is None:
        folder = Path(tempfile.mkdtemp(prefix="comingle-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        write_users(reader, folder)
        return folder, False
    decides = [_FORM, version("comingle"), reader.data.model_dump(mode="json"), reader.seed, reader.key(), states]
    home = cache_folder() / "populations"
    target = home / hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(home / f"{target.name}.lock"):
            there = (target / ABOUT).is_file()
            if not there:  # what tidies up may take single files
                shutil.rmtree(target, ignore_errors=True)
            make_once(target, partial(write_users, reader))
            os.utime(target / ABOUT)
        _sweep(home)
    except OSError as error:
        told = f"{home}: cannot be written to: {error.strerror}; COMINGLE_CACHE names another place for it"
        raise DataError(told) from None
    return target, there


def _digest(states: Iterator[Sequence[object] | None]) -> str | None:
    """Return a digest of the states of all sources; None where one is no file."""
    digest = hashlib.sha256()
    for state in states:
        if state is None:
            return None
        digest.update(json.dumps(state).encode())
    return digest.hexdigest()


def _states(sources: list[str]) -> Iterator[list[object] | None]:
    """Yield what identifies the content of each source; None for what is no file or folder."""
    for source in sources:
        path = expand_home(source)
        if not os.path.exists(path):  # which a name that is too long is not either
            yield None
        elif path.is_dir():
            yield from _states_below(path)
        else:
            yield _state(path)


def _states_below(top: Path) -> Iterator[list[object]]:
    """Follow links to folders, as a class may be one; each folder once, as links may form a cycle."""
    seen = set[str]()
    for place, folders, files in os.walk(top, followlinks=True):
        real = os.path.realpath(place)
        yield [place, real]  # an empty folder may be a class
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (_state(Path(place) / name) for name in sorted(files))


def _state(path: Path) -> list[object]:
    """Size and times of a file; an archive may reset the modification time, but not the time of the last change."""
    try:
        found = path.stat()
    except OSError:  # a link to nowhere, of which reading says what there is to say
        return [str(path.absolute())]
    return [str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _sweep(home: Path) -> None:
    """Delete populations that were not used for long."""
    for about in home.glob(f"*/{ABOUT}"):
        # Another process may have been quicker, or be about to use it.
        with suppress(FileNotFoundError, Timeout), FileLock(home / f"{about.parent.name}.lock", blocking=False):
            if time.time() - about.stat().st_mtime > _DAYS_UNUSED * 86400:
                shutil.rmtree(about.parent, ignore_errors=True)
