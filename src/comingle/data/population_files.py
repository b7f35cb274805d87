"""Populations of encoded users on disk, and the cache of them.

The folder of a population has these files:

- ``users.bin``: the arrays of each user (token streams, for example), preceded by a line with their shapes.
- ``users.ends``: the end of each user in ``users.bin``, in bytes, and a CRC-32 checksum.
- ``users.sizes``: the amount of train, valid and test data of each user.
- ``names.*``: the names (:mod:`comingle.data.populations`).
- ``about.json``: type, digest and totals of the users, and checksums of all files but ``users.bin``.

Opening a folder verifies the checksums of the files; reading a user verifies that user's. Files are memory-mapped.

Populations read from a recipe are cached in a private folder (:func:`comingle.utils.files.cache_folder`). The cache key
is a digest of paths, sizes and times of the source files and of all settings that affect encoding. A population that
was not used for 30 days is deleted. Sources that are not files (hub names, plug-ins) are not cached.

A package with users of another type registers its :class:`UserForm` in :data:`FORMS`.
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
from comingle.data.populations import LazyPopulation, Named, StoredNames, StoredNamesWriter, User
from comingle.data.samples.samples import SPLITS, Samples, UserSamples
from comingle.data.streaming import FirstUsers, Read, StoredRows, StreamingReader
from comingle.data.text.streams import UserData
from comingle.models.scoring import PAD
from comingle.utils.errors import DataError
from comingle.utils.files import cache_folder, make_once
from comingle.utils.records import expand_home

Arrays = Mapping[str, Tensor]
"""A user's arrays by name."""


@dataclass(frozen=True, kw_only=True)
class UserForm:
    """Conversion of one type of user to and from arrays.

    Args:
        parts: Returns the arrays of a user.
        user: Returns the user with this name and these arrays.
        counts: Returns what a user adds to the totals of a population. A total is the sum over the users, or the
            maximum if its name begins with ``most_``.
    """

    parts: Callable[[Any], Arrays]
    user: Callable[[str, Arrays], Any]
    counts: Callable[[Any], Mapping[str, int]] = lambda user: {}


_METADATA = "told"
"""Name of the array with the fields of :class:`Answers` that are not tensors; old caches have it, so it stays."""


def _arrays_of_answers(user: UserAnswers) -> Arrays:
    """Return a user's conversations as arrays by ``SPLIT.NAME``.

    The array ``SPLIT.told`` (:data:`_METADATA`) has the fields that are not tensors, as the bytes of a JSON list.
    """
    arrays: dict[str, Tensor] = {}
    for split in SPLITS:
        answers = user.split(split)
        metadata = json.dumps([answers.references, answers.limit, answers.measures, answers.ends]).encode()
        arrays_of_split = {
            "windows": answers.windows,
            "owners": answers.owners,
            "prompts": answers.prompt_tokens,
            _METADATA: torch.from_numpy(np.frombuffer(metadata, dtype=np.uint8).copy()),
        }
        arrays |= {f"{split}.{key}": t for key, t in arrays_of_split.items()}
    return arrays


def _answers_from_arrays(name: str, arrays: Arrays) -> UserAnswers:
    """Return a user's conversations from their arrays: the inverse of :func:`_arrays_of_answers`."""

    def of_split(split: str) -> Answers:
        """Return the conversations of one split; see :class:`Answers` for its fields."""
        # The fields that are not tensors are stored together, as the bytes of a JSON list.
        references, limit, measures, ends = json.loads(arrays[f"{split}.{_METADATA}"].numpy().tobytes())
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


def _totals_of_answers(user: UserAnswers) -> Mapping[str, int]:
    """Return what a user with conversations adds to the totals of a population (``UserForm.counts``).

    Returns:
        ``most_width``, the width of the train windows; the population's total is the maximum over the users. And
        ``tokens``, the number of tokens in the train windows without padding; the population's total is the sum.
    """
    return {"most_width": user.train.windows.shape[1], "tokens": int((user.train.windows != PAD).sum())}


def _arrays_of_samples(user: UserSamples) -> Arrays:
    """Return a user's inputs and targets by ``SPLIT.inputs`` and ``SPLIT.targets``."""
    arrays: dict[str, Tensor] = {}
    for split in SPLITS:
        samples = user.split(split)
        arrays |= {f"{split}.inputs": samples.inputs, f"{split}.targets": samples.targets}
    return arrays


def _samples_from_arrays(name: str, arrays: Arrays) -> UserSamples:
    """Return the user with samples from the arrays of :func:`_arrays_of_samples`."""
    train, valid, test = (Samples(inputs=arrays[f"{s}.inputs"], targets=arrays[f"{s}.targets"]) for s in SPLITS)
    return UserSamples(name=name, train=train, valid=valid, test=test)


FORMS: dict[type, UserForm] = {
    UserData: UserForm(
        parts=lambda user: {split: getattr(user, split) for split in SPLITS},
        user=lambda name, arrays: UserData(
            name=name, train=arrays["train"], valid=arrays["valid"], test=arrays["test"]
        ),
    ),
    UserAnswers: UserForm(parts=_arrays_of_answers, user=_answers_from_arrays, counts=_totals_of_answers),
    UserSamples: UserForm(parts=_arrays_of_samples, user=_samples_from_arrays),
}
"""Array formats by the type of a user."""


USERS, ENDS, SIZES, ABOUT = "users.bin", "users.ends", "users.sizes", "about.json"
"""Files of a population besides its names."""
SUMMARY_WARNINGS, READING_WARNINGS = "told", "heard"
"""Keys of ``about.json``: warnings for the start of every run, and those that were logged while users were read.

Runs from the cache repeat the latter. The keys are short words of an earlier version, so that its caches stay valid.
"""
_ALIGNMENT = 16
"""Alignment of the arrays in ``users.bin``, in bytes."""
_END_DTYPE = np.dtype([("end", "<i8"), ("sum", "<u4")])
"""Entry of ``users.ends``: end of a user in bytes, and CRC-32 of its data."""
_READ_BYTES = 1 << 20
"""Bytes per read when a file is checksummed."""


def write_population(folder: Path, users: Iterable[Named]) -> int:
    """Write users to a folder one at a time; return their number.

    Raises:
        DataError: Two users have the same name, a name is invalid, or the users are not all of one registered type.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with PopulationWriter(folder) as writer:
        for user in users:
            writer.add(user)
        return writer.finish()


class PopulationWriter:
    """Writer that appends users to a folder one at a time.

    Args:
        folder: Existing folder for the files.
    """

    def __init__(self, folder: Path):
        """Open the files of the population in an existing folder for writing."""
        self.folder, self._names = folder, StoredNamesWriter(folder)
        self._open = ExitStack()  # closes the three files
        self._files = [self._open.enter_context(open(folder / name, "wb")) for name in (USERS, ENDS, SIZES)]  # noqa: SIM115 (closed with it)
        self._end, self.count = 0, 0  # bytes and users written so far
        self._user_type: type = type(None)  # type of the users, known from the first user on
        self._digest, self._counts = hashlib.sha256(), dict[str, int]()  # digest and totals of all users

    def __enter__(self) -> PopulationWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._names.close()
        self._open.close()

    def add(self, user: Named) -> None:
        """Append a user: its record, the end of the record in bytes with a checksum, and the sizes of its splits.

        Also adds the user to the totals. The total of a key is a maximum if the key begins with ``most_``, else a sum.

        Raises:
            DataError: The name is invalid, or the user's type is not registered or differs from the other users' type.
        """
        form = FORMS.get(type(user))
        if form is None or (self.count and type(user) is not self._user_type):
            allowed = self._user_type.__name__ if self.count else ", ".join(known.__name__ for known in FORMS)
            raise DataError(f"user {user.name!r}: got {type(user).__name__}; allowed: {allowed}")
        self._user_type, self.count = type(user), self.count + 1
        self._names.add(user.name)
        content = _serialise(form, user)
        users, ends, sizes = self._files
        users.write(content)
        self._digest.update(content)
        self._end += len(content)
        ends.write(np.array((self._end, zlib.crc32(content)), dtype=_END_DTYPE).tobytes())
        sizes.write(np.array([len(getattr(user, split)) for split in SPLITS], dtype="<i8").tobytes())
        for key, value in form.counts(user).items():
            before = self._counts.get(key, 0)
            self._counts[key] = max(before, value) if key.startswith("most_") else before + value

    def finish(self, more: Mapping[str, object] | None = None) -> int:
        """Write the names and ``about.json``; return the number of users.

        Call it after all other files of the folder have been written, since it computes their checksums.

        Args:
            more: Further entries of ``about.json``.

        Raises:
            DataError: Two users have the same name.
        """
        self._open.close()
        self._names.finish()
        # The file of users has a checksum per user instead; the file that is written here has none.
        hashed_files = [path for path in sorted(self.folder.iterdir()) if path.name not in (USERS, ABOUT)]
        checksums = {path.name: _checksum(path) for path in hashed_files}
        about = {
            "type": self._user_type.__name__,
            "digest": self._digest.hexdigest(),
            "counts": self._counts,
            "sums": checksums,
        }
        (self.folder / ABOUT).write_text(json.dumps(about | dict(more or {}), indent=2) + "\n", encoding="utf-8")
        return self.count


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read in chunks."""
    found = 0
    with open(path, "rb") as file:
        while content := file.read(_READ_BYTES):
            found = zlib.crc32(content, found)
    return found


def _serialise(form: UserForm, user: object) -> bytes:
    """Return the record of a user: a JSON line with the name, dtype and shape of each array, then the arrays.

    The line and each array are padded to multiples of 16 bytes, since memory-mapped tensors need aligned starts.
    """
    arrays = {key: t.detach().cpu().contiguous() for key, t in form.parts(user).items()}
    header = [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in arrays.items()]
    line = json.dumps(header).encode() + b"\n"
    record = [b" " * _padding_bytes(len(line)), line]  # padded in front, since the arrays begin after the line end
    for t in arrays.values():
        if t.numel():
            content = t.flatten().view(torch.uint8).numpy().tobytes()
            record += [content, b"\0" * _padding_bytes(len(content))]
    return b"".join(record)


def _padding_bytes(size: int) -> int:
    """Return the number of bytes to add to ``size`` bytes for a multiple of the alignment."""
    return -size % _ALIGNMENT


def read_about(folder: Path) -> dict[str, Any]:
    """Return the content of a population's ``about.json``.

    Its keys are ``type``, the class of the users; ``digest`` of their data; ``counts``, totals over them; ``sums``,
    checksums of the other files; and those that :func:`write_users` adds.

    Raises:
        DataError: The file is missing or is not JSON.
    """
    try:
        return json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: not a readable population ({error}); write it again") from None


def read_population(folder: Path) -> LazyPopulation[Any]:
    """Return the users of a population on disk as a sequence that reads each user on access.

    The folder has the encoded data of all users in one file. The table ``ends`` has the end of each user's data in this
    file, and its checksum.

    Raises:
        DataError: The folder is not a population or was changed. A user's data is verified when the user is accessed,
            which raises the same error.
    """
    about = read_about(folder)
    # The conversion of arrays to users of the stored type; None for an unknown type.
    form = next((form for user_type, form in FORMS.items() if user_type.__name__ == about.get("type")), None)
    try:
        checksums = about["sums"] if form else {}  # without a form, the check of the lengths below raises the error
        if changed := [name for name, checksum in checksums.items() if _checksum(folder / name) != checksum]:
            raise ValueError(f"{', '.join(changed)}: changed since it was written")
        names = StoredNames(folder)
        ends = np.memmap(folder / ENDS, dtype=_END_DTYPE, mode="r")
        sizes = np.memmap(folder / SIZES, dtype="<i8", mode="r").reshape(-1, len(SPLITS))
        with open(folder / USERS, "rb") as file:  # copy-on-write: tensors on it are writable, the file is not changed
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: not a readable population ({error}); write it again") from None
    if form is None or not len(names) == len(ends) == len(sizes) or ends["end"][-1] != len(content):
        lengths = f"{len(names)} names, {len(ends)} users, {len(content)} bytes"
        raise DataError(f"{folder}: inconsistent files ({lengths}); write it again")

    def make(number: int) -> Any:
        """Read the user with this number, after verifying its checksum."""
        start, end = int(ends["end"][number - 1]) if number else 0, int(ends["end"][number])
        if zlib.crc32(memoryview(content)[start:end]) != ends["sum"][number]:
            raise DataError(
                f"{folder}: the data of user {names[number]!r} is damaged (wrong checksum); delete this folder"
            )
        return form.user(names[number], _read_arrays(content, start))

    num_users_with_valid = int((sizes[:, SPLITS.index("valid")] > 0).sum())
    totals = {**about["counts"], "valid": num_users_with_valid}
    return LazyPopulation(names, make, digest=about["digest"], sizes=sizes, about=totals)


def _read_arrays(content: mmap.mmap, start: int) -> dict[str, Tensor]:
    """Return the arrays of the record at byte ``start`` of ``users.bin``, as views of the memory-mapped file.

    A record is a padded line of JSON with key, dtype and shape of each array, and then the arrays, each padded to the
    alignment (:func:`_serialise`).
    """
    offset = content.find(b"\n", start) + 1
    arrays: dict[str, Tensor] = {}
    for key, dtype_name, shape in json.loads(content[start:offset]):
        dtype, count = getattr(torch, dtype_name), int(np.prod(shape, dtype=np.int64))
        if count:
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=offset)
        else:  # frombuffer refuses a count of 0
            flat = torch.empty(0, dtype=dtype)
        arrays[key] = flat.view(shape)
        size = count * dtype.itemsize
        offset += size + _padding_bytes(size)
    return arrays


# -------------------------------------------------------------------- cache

SKIPPED = "skipped.jsonl"
"""File with one line for each skipped user: the name, and what the user has too little of."""

MAX_RECORDED_WARNINGS = 100
"""Number of warnings that are stored and repeated."""

logger = logging.getLogger("comingle")


class _WarningRecorder(logging.Handler):
    """Handler that records the first warnings of reading, to repeat them when the users come from the cache."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines, self.count = list[str](), 0

    def emit(self, record: logging.LogRecord) -> None:
        """Record a warning."""
        self.count += 1
        if self.count <= MAX_RECORDED_WARNINGS:
            self.lines.append(record.getMessage())

    def __enter__(self) -> _WarningRecorder:
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)

    @property
    def repeated(self) -> list[str]:
        """Recorded lines, followed by a line with the number of further warnings."""
        more = self.count - MAX_RECORDED_WARNINGS
        return [*self.lines, *([f"{more} more such warnings"] if more > 0 else [])]


def write_users(reader: StreamingReader[Read, User], folder: Path) -> None:
    """Read all users of a recipe, and write each user with enough data to a folder, one at a time.

    Besides the population, writes the skipped users to ``skipped.jsonl``. Adds to ``about.json`` the warnings to log at
    the start of every run (:data:`SUMMARY_WARNINGS`), those that reading logged (:data:`READING_WARNINGS`), the number
    of skipped users (``skipped``) and the totals of :meth:`StreamingReader.summary`.

    Raises:
        DataError: A source cannot be read, or a user has too little data and the reader does not skip users.
    """
    small = FirstUsers()
    with PopulationWriter(folder) as writer, _WarningRecorder() as recorder:
        with open(folder / SKIPPED, "w", encoding="utf-8") as skipped:
            reader.on_skip = lambda name, what: skipped.write(json.dumps([name, what]) + "\n")
            rows = StoredRows(folder)
            with closing(reader.read(rows)) as read:
                for unencoded, user in reader.stream(read):
                    if not reader.skips and (shortage := reader.shortage(user)) is not None:
                        small.add(user.name, shortage)
                    elif not small.count:  # after a refusal only shortages are collected, for the error message
                        reader.inspect(unencoded, user)
                        writer.add(user)
                    del unencoded, user  # free memory before the next user is read
            rows.remove()
        if small.count:
            raise reader.refuse(small)
        totals, warnings = reader.summary()
        warnings_by_key = {SUMMARY_WARNINGS: warnings, READING_WARNINGS: recorder.repeated}
        writer.finish({**warnings_by_key, "skipped": reader.left_out.count, **totals})


def read_cached(reader: StreamingReader[Read, User]) -> tuple[LazyPopulation[User], dict[str, Any], Mapping[str, str]]:
    """Return the users of a reader from the cache, reading and caching them first if necessary.

    Logs the warnings of reading them, also when they come from the cache. Reads the users again if the cached files are
    damaged.

    Returns:
        The users, the content of ``about.json``, and the skipped users with what each has too little of.

    Raises:
        DataError: A user's data cannot be used, or the cache is not writable.
    """
    folder, was_cached = cached_population(reader)
    try:
        users, about = read_population(folder), read_about(folder)
    except DataError:  # the cached files are damaged
        shutil.rmtree(folder, ignore_errors=True)
        folder, was_cached = cached_population(reader)
        users, about = read_population(folder), read_about(folder)
    warnings_of_reading = about[READING_WARNINGS] if was_cached else []  # otherwise reading has just logged them
    for line in (*warnings_of_reading, *about[SUMMARY_WARNINGS]):
        logger.warning("%s", line)
    return users, about, SkippedUsers(folder / SKIPPED, about["skipped"])


class SkippedUsers(Mapping[str, str]):
    """Mapping from skipped users to what they have too little of, read from a file on access.

    Args:
        path: File with one JSON line per user.
        count: Number of lines.
    """

    def __init__(self, path: Path, count: int):
        self.path, self.count = path, count

    def __len__(self) -> int:
        return self.count

    def items(self) -> Any:
        """Yield the name and the shortage of each user."""
        with open(self.path, encoding="utf-8") as lines:
            yield from (tuple(json.loads(line)) for line in lines)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _shortage in self.items())

    def __getitem__(self, name: str) -> str:
        for skipped, what in self.items():
            if skipped == name:
                return what
        raise KeyError(name)


_FORMAT_VERSION = 3
"""Version of the file format, part of the cache key."""

_DAYS_UNUSED = 30
"""Days after which an unused population is deleted."""


def cached_population(reader: StreamingReader[Read, User]) -> tuple[Path, bool]:
    """Return the folder of a reader's population, and whether it was cached already; write it if it was not.

    A file lock ensures that only one process per machine writes it. Without cacheable sources the folder is temporary.

    Raises:
        DataError: A user's data cannot be used, or the cache is not writable.
    """
    states = _digest_states(_source_states(reader.sources()))
    if states is None:
        temporary = Path(tempfile.mkdtemp(prefix="comingle-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        write_users(reader, temporary)
        return temporary, False
    cache_key = [
        _FORMAT_VERSION,
        version("comingle"),
        reader.data.model_dump(mode="json"),
        reader.seed,
        reader.key(),
        states,
    ]
    cache = cache_folder() / "populations"
    folder = cache / hashlib.sha256(json.dumps(cache_key).encode()).hexdigest()[:32]
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(cache / f"{folder.name}.lock"):
            was_cached = (folder / ABOUT).is_file()
            if not was_cached:  # a system's cleaner may have deleted single files
                shutil.rmtree(folder, ignore_errors=True)
            make_once(folder, partial(write_users, reader))
            os.utime(folder / ABOUT)  # records the last use, for _delete_unused
        _delete_unused(cache)
    except OSError as error:
        message = f"{cache}: cannot be written to: {error.strerror}; set COMINGLE_CACHE to another folder"
        raise DataError(message) from None
    return folder, was_cached


def _digest_states(states: Iterator[Sequence[object] | None]) -> str | None:
    """Return a digest of the states of all sources, as yielded by :func:`_source_states`.

    Returns:
        The digest, in hex; None if a source is not a file or folder, so that its changes cannot be noticed.
    """
    digest = hashlib.sha256()
    for state in states:
        if state is None:
            return None
        digest.update(json.dumps(state).encode())
    return digest.hexdigest()


def _source_states(sources: list[str]) -> Iterator[list[object] | None]:
    """Yield a list for each file of the sources that changes when the file does, as part of the key of cached users.

    Yields None for a source that is not a file or folder, whose changes cannot be noticed.
    """
    for source in sources:
        path = expand_home(source)
        if not os.path.exists(path):  # unlike Path.exists, also False for a name that is too long
            yield None
        elif path.is_dir():
            yield from _folder_states(path)
        else:
            yield _file_state(path)


def _folder_states(top: Path) -> Iterator[list[object]]:
    """Yield the state of each file and folder below ``top``: a list that changes when the file does.

    The cache of encoded users is keyed by these states, so that changed files are read again. Follows links to
    folders, since the folder of a class of images may be a link. Visits each folder once, since links may form a cycle.
    """
    seen = set[str]()
    for place, folders, files in os.walk(top, followlinks=True):
        real = os.path.realpath(place)
        yield [place, real]  # also of an empty folder, which may be a class without images
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (_file_state(Path(place) / name) for name in sorted(files))


def _file_state(path: Path) -> list[object]:
    """Return path, size, times and inode of a file, which change when its content does.

    The change time counts too, because extracting an archive may reset the modification time.
    """
    try:
        status = path.stat()
    except OSError:  # a dangling link: the reader reports it
        return [str(path.absolute())]
    return [str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _delete_unused(cache: Path) -> None:
    """Delete populations that were not used for 30 days; each use sets the time of their ``about.json``."""
    for about_file in cache.glob(f"*/{ABOUT}"):
        population = about_file.parent
        # Another process may have deleted it already, or may hold the lock to use it.
        with suppress(FileNotFoundError, Timeout), FileLock(cache / f"{population.name}.lock", blocking=False):
            if time.time() - about_file.stat().st_mtime > _DAYS_UNUSED * 86400:
                shutil.rmtree(population, ignore_errors=True)
