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
from typing import Any, BinaryIO

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
        counts: Returns numbers of one user by name, from which the totals of a population are computed. A total is the
            sum over the users, or the maximum if its name begins with ``most_``.
    """

    parts: Callable[[Any], Arrays]
    user: Callable[[str, Arrays], Any]
    counts: Callable[[Any], Mapping[str, int]] = lambda user: {}


_METADATA = "told"
"""Name of the array with the fields of :class:`Answers` that are not tensors; old caches have it, so it stays."""


def _arrays_of_answers(user: UserAnswers) -> Arrays:
    """Return a user's conversations as arrays by ``SPLIT.NAME``, such as ``train.windows``.

    The array ``SPLIT.told`` (:data:`_METADATA`) has the fields that are not tensors, as the bytes of a JSON list.
    """
    arrays: dict[str, Tensor] = {}
    for split in SPLITS:
        answers = user.split(split)
        metadata = json.dumps([answers.references, answers.limit, answers.measures, answers.ends]).encode()
        arrays[f"{split}.windows"] = answers.windows
        arrays[f"{split}.owners"] = answers.owners
        arrays[f"{split}.prompts"] = answers.prompt_tokens
        arrays[f"{split}.{_METADATA}"] = torch.from_numpy(np.frombuffer(metadata, dtype=np.uint8).copy())
    return arrays


def _answers_from_arrays(name: str, arrays: Arrays) -> UserAnswers:
    """Return a user's conversations from their arrays: the inverse of :func:`_arrays_of_answers`."""

    def answers_of(split: str) -> Answers:
        """Return the conversations of one split; the fields that are not tensors are stored as a JSON list."""
        metadata = arrays[f"{split}.{_METADATA}"].numpy().tobytes()
        references, limit, measures, ends = json.loads(metadata)
        return Answers(
            windows=arrays[f"{split}.windows"],
            owners=arrays[f"{split}.owners"],
            prompt_tokens=arrays[f"{split}.prompts"],
            references=tuple(references),
            limit=limit,
            measures=tuple(measures),
            ends=tuple(ends),
        )

    return UserAnswers(name=name, train=answers_of("train"), valid=answers_of("valid"), test=answers_of("test"))


def _totals_of_answers(user: UserAnswers) -> Mapping[str, int]:
    """Return the width of a user's train windows in tokens, and the number of its train tokens without padding.

    The result, such as ``{"most_width": 128, "tokens": 5000}``, enters the totals of a population
    (``UserForm.counts``): the maximum of the widths, and the sum of the tokens.
    """
    is_token = user.train.windows != PAD
    return {"most_width": user.train.windows.shape[1], "tokens": int(is_token.sum())}


def _arrays_of_samples(user: UserSamples) -> Arrays:
    """Return a user's inputs and targets by ``SPLIT.inputs`` and ``SPLIT.targets``."""
    arrays: dict[str, Tensor] = {}
    for split in SPLITS:
        samples = user.split(split)
        arrays[f"{split}.inputs"] = samples.inputs
        arrays[f"{split}.targets"] = samples.targets
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
        self.folder = folder
        self.count = 0
        """Number of users written so far."""
        self._names = StoredNamesWriter(folder)
        self._open_files = ExitStack()
        self._users_file = self._open_file(USERS)
        self._ends_file = self._open_file(ENDS)
        self._sizes_file = self._open_file(SIZES)
        self._end = 0
        """End of the last user in the file of users, in bytes."""
        self._user_type: type = type(None)
        """Type of all users, known from the first user on."""
        self._digest = hashlib.sha256()
        """Digest of all users' data."""
        self._totals: dict[str, int] = {}
        """Totals over all users."""

    def _open_file(self, name: str) -> BinaryIO:
        """Open a file of the folder for writing; it is closed at the end of the writer's context."""
        return self._open_files.enter_context(open(self.folder / name, "wb"))

    def __enter__(self) -> PopulationWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._names.close()
        self._open_files.close()

    def add(self, user: Named) -> None:
        """Append a user's data, the end of the data in bytes with a checksum, and the sizes of the user's splits.

        Also updates the totals: the maximum over the users for a key such as ``most_width``, else the sum.

        Raises:
            DataError: The name is invalid, or the user's type is not registered or differs from the other users' type.
        """
        form = FORMS.get(type(user))
        is_first = self.count == 0
        has_other_type = not is_first and type(user) is not self._user_type
        if form is None or has_other_type:
            allowed = ", ".join(known.__name__ for known in FORMS) if is_first else self._user_type.__name__
            raise DataError(f"user {user.name!r}: got {type(user).__name__}; allowed: {allowed}")
        self._user_type = type(user)
        self.count += 1
        self._names.add(user.name)
        data = _serialise(form, user)
        self._users_file.write(data)
        self._digest.update(data)
        self._end += len(data)
        self._ends_file.write(np.array((self._end, zlib.crc32(data)), dtype=_END_DTYPE).tobytes())
        sizes = [len(getattr(user, split)) for split in SPLITS]
        self._sizes_file.write(np.array(sizes, dtype="<i8").tobytes())
        for key, value in form.counts(user).items():
            total = self._totals.get(key, 0)
            is_maximum = key.startswith("most_")
            self._totals[key] = max(total, value) if is_maximum else total + value

    def finish(self, more: Mapping[str, object] | None = None) -> int:
        """Write the names and ``about.json``; return the number of users.

        Call it after all other files of the folder have been written, since it computes their checksums.

        Args:
            more: Further entries of ``about.json``.

        Raises:
            DataError: Two users have the same name.
        """
        self._open_files.close()
        self._names.finish()
        # The file of users has a checksum per user instead; `about.json` is written below.
        hashed_files = [path for path in sorted(self.folder.iterdir()) if path.name not in (USERS, ABOUT)]
        about = {
            "type": self._user_type.__name__,
            "digest": self._digest.hexdigest(),
            "counts": self._totals,
            "sums": {path.name: _checksum(path) for path in hashed_files},
            **(more or {}),
        }
        (self.folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        return self.count


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read in chunks."""
    checksum = 0
    with open(path, "rb") as file:
        while content := file.read(_READ_BYTES):
            checksum = zlib.crc32(content, checksum)
    return checksum


def _serialise(form: UserForm, user: object) -> bytes:
    """Return a user as bytes: a JSON line with the name, dtype and shape of each array, then the arrays.

    The line and each array are padded to multiples of 16 bytes, since memory-mapped tensors need aligned starts.

    Args:
        form: Conversion of the user to arrays.
        user: The user.
    """
    arrays = {name: array.detach().cpu().contiguous() for name, array in form.parts(user).items()}
    header: list[list[object]] = []
    for name, array in arrays.items():
        dtype_name = str(array.dtype).removeprefix("torch.")  # such as "int64"
        header.append([name, dtype_name, list(array.shape)])
    line = json.dumps(header).encode() + b"\n"
    pieces = [b" " * _padding_bytes(len(line)), line]  # padding in front, so that the arrays follow the line end
    for array in arrays.values():
        if array.numel() > 0:
            content = array.flatten().view(torch.uint8).numpy().tobytes()
            pieces += [content, b"\0" * _padding_bytes(len(content))]
    return b"".join(pieces)


def _padding_bytes(size: int) -> int:
    """Return the number of bytes to add to ``size`` bytes for a multiple of the alignment."""
    return -size % _ALIGNMENT


def read_about(folder: Path) -> dict[str, Any]:
    """Return the content of a population's ``about.json``.

    Its keys are ``type`` (class of the users), ``digest`` (of all users' data), ``counts`` (totals over the users),
    ``sums`` (checksum of each other file but ``users.bin``), and the keys that :func:`write_users` adds.

    Raises:
        DataError: The file is missing or is not JSON.
    """
    try:
        return json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: not a readable population ({error}); write it again") from None


def read_population(folder: Path) -> LazyPopulation[Any]:
    """Return the users of a population on disk as a sequence that reads each user on access.

    Raises:
        DataError: The folder is not a population or was changed. A user's data is verified when the user is accessed,
            which raises the same error.
    """
    about = read_about(folder)  # a description of the population: type of users, checksums, totals
    user_form = _form_named(about.get("type"))  # converts arrays to users of this type; None for an unknown type
    try:
        if user_form is not None:  # an unknown type is refused below, and its file may have no checksums
            _check_unchanged(folder, about["sums"])
        names = StoredNames(folder)
        ends = np.memmap(folder / ENDS, dtype=_END_DTYPE, mode="r")  # per user: end in the file USERS, and checksum
        # Amount of data of each user and split.
        sizes = np.memmap(folder / SIZES, dtype="<i8", mode="r").reshape(-1, len(SPLITS))
        with open(folder / USERS, "rb") as file:  # copy-on-write: tensors on it are writable, the file is not changed
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: not a readable population ({error}); write it again") from None
    have_equal_lengths = len(names) == len(ends) == len(sizes)
    if user_form is None or not have_equal_lengths or ends["end"][-1] != len(content):
        lengths = f"{len(names)} names, {len(ends)} users, {len(content)} bytes"
        raise DataError(f"{folder}: inconsistent files ({lengths}); write it again")

    def read_user(number: int) -> Any:
        """Read the user with this number, after verifying its checksum."""
        start = int(ends["end"][number - 1]) if number > 0 else 0
        end = int(ends["end"][number])
        if zlib.crc32(memoryview(content)[start:end]) != ends["sum"][number]:
            raise DataError(
                f"{folder}: the data of user {names[number]!r} is damaged (wrong checksum); delete this folder"
            )
        return user_form.user(names[number], _read_arrays(content, start))

    valid_sizes = sizes[:, SPLITS.index("valid")]
    totals = {**about["counts"], "valid": int((valid_sizes > 0).sum())}  # "valid": users with validation data
    return LazyPopulation(names, read_user, digest=about["digest"], sizes=sizes, about=totals)


def _check_unchanged(folder: Path, checksums: Mapping[str, int]) -> None:
    """Check that the files of a population have the checksums with which they were written, by file name.

    Raises:
        ValueError: A file has another checksum.
        OSError: A file cannot be read.
    """
    changed = [name for name, checksum in checksums.items() if _checksum(folder / name) != checksum]
    if changed:
        raise ValueError(f"{', '.join(changed)}: changed since it was written")


def _form_named(type_name: object) -> UserForm | None:
    """Return how users of a type are converted to and from arrays; None for an unknown type.

    Args:
        type_name: Name of the type, such as "UserData", as a population on disk records it.
    """
    for user_type, form in FORMS.items():
        if user_type.__name__ == type_name:
            return form
    return None


def _read_arrays(content: mmap.mmap, start: int) -> dict[str, Tensor]:
    """Return the arrays of the record at byte ``start`` of ``users.bin``, as views of the memory-mapped file.

    A record is a line of JSON with name, dtype and shape of each array, and then the arrays, each padded to the
    alignment (:func:`_serialise`).
    """
    line_end = content.find(b"\n", start) + 1
    header = json.loads(content[start:line_end])
    offset = line_end
    arrays: dict[str, Tensor] = {}
    for name, dtype_name, shape in header:
        dtype = getattr(torch, dtype_name)
        count = int(np.prod(shape, dtype=np.int64))
        if count > 0:
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=offset)
        else:  # frombuffer refuses a count of 0
            flat = torch.empty(0, dtype=dtype)
        arrays[name] = flat.view(shape)
        size_bytes = count * dtype.itemsize
        offset += size_bytes + _padding_bytes(size_bytes)
    return arrays


# -------------------------------------------------------------------- cache

SKIPPED = "skipped.jsonl"
"""File with one line for each skipped user: the name, and what the user has too little of."""

MAX_RECORDED_WARNINGS = 100
"""Number of warnings that are stored and repeated."""

logger = logging.getLogger("comingle")


class _WarningRecorder(logging.Handler):
    """Handler that records the first warnings of reading users; a run with users from the cache repeats them."""

    def __init__(self) -> None:
        """Start without recorded warnings; less severe messages are ignored."""
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        """The first warnings, up to :data:`MAX_RECORDED_WARNINGS`."""
        self.count = 0
        """Number of all warnings."""

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
    def lines_to_repeat(self) -> list[str]:
        """Recorded lines and, if there were further warnings, a line with their number."""
        num_unrecorded = self.count - MAX_RECORDED_WARNINGS
        if num_unrecorded > 0:
            return [*self.lines, f"{num_unrecorded} more such warnings"]
        return list(self.lines)


def write_users(reader: StreamingReader[Read, User], folder: Path) -> None:
    """Read all users of a recipe, and write each user with enough data to a folder, one at a time.

    Writes the skipped users to ``skipped.jsonl``, and adds to ``about.json``:

    - the warnings to log at the start of every run (:data:`SUMMARY_WARNINGS`),
    - the warnings that reading logged (:data:`READING_WARNINGS`),
    - the number of skipped users (``skipped``),
    - the facts of :meth:`StreamingReader.summary`.

    Raises:
        DataError: A source cannot be read, or a user has too little data and the reader does not skip users.
    """
    small_users = FirstUsers()
    with PopulationWriter(folder) as writer, _WarningRecorder() as recorder:
        with open(folder / SKIPPED, "w", encoding="utf-8") as skipped_file:

            def write_skipped(name: str, shortage: str) -> None:
                skipped_file.write(json.dumps([name, shortage]) + "\n")

            reader.on_skip = write_skipped
            rows = StoredRows(folder)
            with closing(reader.read(rows)) as unencoded_users:
                for unencoded, user in reader.stream(unencoded_users):
                    shortage = None
                    if not reader.skips:  # otherwise `stream` has left out the small users
                        shortage = reader.shortage(user)
                    if shortage is not None:
                        small_users.add(user.name, shortage)
                    elif small_users.count == 0:  # otherwise an error is certain, so no user is written any more
                        reader.inspect(unencoded, user)
                        writer.add(user)
                    del unencoded, user  # free memory before the next user is read
            rows.remove()
        if small_users.count > 0:
            raise reader.refuse(small_users)
        facts, warnings = reader.summary()
        about = {
            SUMMARY_WARNINGS: warnings,
            READING_WARNINGS: recorder.lines_to_repeat,
            "skipped": reader.skipped_users.count,
            **facts,
        }
        writer.finish(about)


def read_cached(reader: StreamingReader[Read, User]) -> tuple[LazyPopulation[User], dict[str, Any], Mapping[str, str]]:
    """Return a reader's users from the cache, after writing them to it if they are missing or damaged.

    Logs the warnings of reading the users, also if they were cached.

    Returns:
        The users; the content of ``about.json``; and the names of the skipped users, each with the shortage.

    Raises:
        DataError: A user's data cannot be used, or the cache is not writable.
    """
    folder, was_cached = cached_population(reader)
    try:
        users, about = read_population(folder), read_about(folder)
    except DataError:  # the cached files are damaged: write them again
        shutil.rmtree(folder, ignore_errors=True)
        folder, was_cached = cached_population(reader)
        users, about = read_population(folder), read_about(folder)
    if was_cached:  # otherwise reading has just logged its warnings
        for warning in about[READING_WARNINGS]:
            logger.warning("%s", warning)
    for warning in about[SUMMARY_WARNINGS]:
        logger.warning("%s", warning)
    return users, about, SkippedUsers(folder / SKIPPED, about["skipped"])


class SkippedUsers(Mapping[str, str]):
    """Mapping from the name of each skipped user to what the user has too little of, read from a file on access.

    Args:
        path: File with one JSON line per user.
        count: Number of lines.
    """

    def __init__(self, path: Path, count: int):
        """Create the mapping without reading the file, which has ``count`` lines, one for each user."""
        self.path, self.count = path, count

    def __len__(self) -> int:
        return self.count

    def items(self) -> Any:
        """Yield pairs of a user's name and what the user has too little of, in the order in which users were read."""
        with open(self.path, encoding="utf-8") as lines:
            yield from (tuple(json.loads(line)) for line in lines)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _shortage in self.items())

    def __getitem__(self, name: str) -> str:
        """Return what a skipped user has too little of; reads the file up to the user's line."""
        for skipped_name, shortage in self.items():
            if skipped_name == name:
                return shortage
        raise KeyError(name)


_FORMAT_VERSION = 3
"""Version of the file format, part of the cache key."""

_DAYS_UNUSED = 30
"""Days after which an unused population is deleted."""


def cached_population(reader: StreamingReader[Read, User]) -> tuple[Path, bool]:
    """Return the folder of a reader's population, after writing it if necessary, and whether it was cached already.

    A file lock ensures that only one process per machine writes it. With a source that is not a file or folder, the
    population is written to a temporary folder instead of the cache.

    Raises:
        DataError: A user's data cannot be used, or the cache is not writable.
    """
    digest_of_sources = _digest_states(_source_states(reader.sources()))
    if digest_of_sources is None:  # a source may change without notice, such as a data set of the hub
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
        digest_of_sources,
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
    """Yield for each file of the sources a list that changes when the file does, such as its path, size and times.

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
    """Yield the state of each file and folder below ``top``: a list that changes when the file or folder does.

    Follows links to folders, and visits each folder once, since links may form a cycle.
    """
    visited: set[str] = set()
    for folder, subfolders, files in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        yield [folder, real]  # also of an empty folder, which may be a class without images
        if real in visited:
            subfolders.clear()  # tells os.walk not to enter them
            continue
        visited.add(real)
        subfolders.sort()
        for name in sorted(files):
            yield _file_state(Path(folder) / name)


def _file_state(path: Path) -> list[object]:
    """Return path, size, times and inode of a file, at least one of which changes when its content does.

    They are part of the key of the cache of encoded users, so that a changed file is read again. The list has the
    inode's change time (ctime) too, because extracting an archive may reset the modification time.
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
        lock = FileLock(cache / f"{population.name}.lock", blocking=False)
        # Another process may have deleted the population already, or may hold the lock to use it.
        with suppress(FileNotFoundError, Timeout), lock:
            seconds_unused = time.time() - about_file.stat().st_mtime
            if seconds_unused > _DAYS_UNUSED * 86400:
                shutil.rmtree(population, ignore_errors=True)
