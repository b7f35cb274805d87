"""Checkpoints: everything that a run needs to resume exactly.

``checkpoints/round-NNNN/`` has ``state.safetensors`` (named tensors of every user, moments, step counts and ranks, the
server's state, and all of it as of the best round if that is selected), ``checkpoint.json``, and the checksums of both
(:mod:`comingle.utils.files`). It is written under a temporary name and renamed, so it is either complete or absent.
Nothing in it is ever executed.

A run with several processes writes ``users-I-of-N.safetensors`` with the users of process I, and ``server.safetensors``
with the server's state; ``checkpoint.json`` has the number of users in each file. A run can resume with any number of
processes; each process reads and verifies only the files with its users.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from comingle.protocol.messages import LOWEST
from comingle.training.state import State
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import SUMS, advise, list_checkpoints, seal, verify
from comingle.utils.records import resume_command, to_disk, write_json
from comingle.utils.trees import Layout, Tree, flatten

STATE, SERVER = "state.safetensors", "server.safetensors"
OF_SERVER = "server/"
"""Prefix of the names of the server's tensors."""

_PARAMETER_PREFIX = "user/"
"""Prefix of the names of the users' parameters."""

_BEST_PREFIX = "best/"
"""Prefix of the names of tensors as of the best round."""


@dataclass(kw_only=True)
class Clock:
    """Time, tokens and bytes of a run, over all its processes; a resumed run continues from those of its checkpoint.

    Attributes:
        train_seconds: Time of local steps.
        tokens: Number of training tokens or samples.
        upload_bytes: Bytes of all uploads.
        download_bytes: Bytes of all downloads.
        told_upload_bytes: Those of ``upload_bytes`` that are already in the event log.
        told_download_bytes: Those of ``download_bytes`` that are already in the event log.
        user_rounds: Number of participants, summed over rounds.
        earlier_seconds: Time until the checkpoint that the run was resumed from; 0 for a new run.
        started: Value of ``time.perf_counter`` at the start of this process.
    """

    train_seconds: float = 0.0
    tokens: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    told_upload_bytes: int = 0
    told_download_bytes: int = 0
    user_rounds: int = 0
    earlier_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def wall_seconds(self) -> float:
        """Seconds of work on the run, without the time between an interruption and its resumption."""
        seconds_since_start = time.perf_counter() - self.started
        return self.earlier_seconds + seconds_since_start


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run, as a checkpoint records it.

    Attributes:
        round: Number of rounds that are done.
        fingerprint: Fingerprint of the recipe.
        trainers: Names of the trainers, in the order of their rows.
        events_bytes: Length of the event log.
        train_seconds: As in :class:`Clock`.
        wall_seconds: As in :class:`Clock`.
        tokens: As in :class:`Clock`.
        upload_bytes: As in :class:`Clock`.
        download_bytes: As in :class:`Clock`.
        told_upload_bytes: As in :class:`Clock`.
        told_download_bytes: As in :class:`Clock`.
        user_rounds: As in :class:`Clock`.
        shards: Number of trainers in each file, if several processes wrote the checkpoint.
        population: Digest of the names (:func:`comingle.data.populations.digest_names`), if a store has the tensors.
        stopped: Whether there are no more rounds.
    """

    round: int
    fingerprint: str
    trainers: list[str]
    events_bytes: int
    train_seconds: float
    wall_seconds: float
    tokens: int
    upload_bytes: int
    download_bytes: int
    told_upload_bytes: int
    told_download_bytes: int
    user_rounds: int
    shards: list[int] = field(default_factory=list)
    population: str = ""
    stopped: bool = False

    @property
    def clock(self) -> Clock:
        """Clock that continues from the recorded counts and times."""
        counts = {name: getattr(self, name) for name in _CLOCK_COUNTS}
        return Clock(earlier_seconds=self.wall_seconds, **counts)


_CLOCK_COUNTS = {attribute.name for attribute in fields(Clock)} & {attribute.name for attribute in fields(Progress)}
"""Attributes that :class:`Clock` and :class:`Progress` have in common: seconds of training, tokens, bytes, rounds."""


def progress_of(
    done: int,
    fingerprint: str,
    trainers: Sequence[str],
    *,
    clock: Clock | None = None,
    events_bytes: int = 0,
    shards: Sequence[int] = (),
    population: str = "",
    stopped: bool = False,
) -> Progress:
    """Return the progress of a run, to write into a checkpoint.

    Args:
        done: Number of rounds that are done.
        fingerprint: Fingerprint of the recipe.
        trainers: Names of the trainers, in the order of their rows.
        clock: Clock of the run, which counts seconds, tokens and bytes; these are 0 if None.
        events_bytes: Length of the event log.
        shards: Number of trainers in each file, if several processes write the checkpoint.
        population: Digest of the users' names, if the users' tensors are in a store on disk; otherwise empty.
        stopped: Whether the run has ended early, as its privacy budget is spent.
    """
    wall_seconds = 0.0 if clock is None else clock.wall_seconds
    clock_or_zeros = Clock() if clock is None else clock
    counts = {name: getattr(clock_or_zeros, name) for name in _CLOCK_COUNTS}  # such as "upload_bytes" and "tokens"
    return Progress(
        round=done,
        fingerprint=fingerprint,
        trainers=list(trainers),
        events_bytes=events_bytes,
        wall_seconds=wall_seconds,
        shards=list(shards),
        population=population,
        stopped=stopped,
        **counts,
    )


def newest_checkpoint(folder: Path, fingerprint: str) -> tuple[Path, Progress]:
    """Return the newest checkpoint of a run folder and its progress.

    Args:
        folder: The run folder.
        fingerprint: Fingerprint of the recipe that the run is resumed with.

    Raises:
        RunError: There is no checkpoint, or it has another fingerprint.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise RunError(f"{folder}: no checkpoint found")
    newest = checkpoints[-1]
    progress = read_progress(newest)
    if progress.fingerprint != fingerprint:
        raise RunError(f"{newest}: belongs to another recipe ({progress.fingerprint}, not {fingerprint})")
    return newest, progress


def save_checkpoint(run: Path, layout: Layout, state: State, server_state: Tree, progress: Progress) -> Path:
    """Write what a run needs to resume after a round to a checkpoint, and return the folder of the checkpoint.

    Args:
        run: Run folder.
        layout: Names and shapes of the tensors in a row of the users' state.
        state: Trained tensors and optimiser moments of the users, a row for each.
        server_state: Tensors of the server by name.
        progress: Number of the round, and other numbers to continue from.

    Raises:
        RunError: The disk cannot be written to; older checkpoints stay.
    """
    folder, draft = folder_and_draft(run, progress.round)
    with convert_write_errors(folder, draft):
        draft.mkdir(parents=True)

        def write_users_and_server() -> list[str]:
            """Write users and server into one file, and return its name."""
            write_tensors(draft / STATE, named_tensors(layout, state, server_state))
            return [STATE]

        # If users are in memory, `state` calls the function. If they are on disk, it writes files of users only.
        written_files = state.save(draft, list_checkpoints(run), write_users_and_server)
        if STATE not in written_files:
            write_tensors(draft / SERVER, {OF_SERVER + name: t for name, t in server_state.items()})
        finish_checkpoint(draft, folder, progress)
    return folder


def folder_and_draft(run: Path, done: int) -> tuple[Path, Path]:
    """Return the folder of a checkpoint and that of its draft, such as ``round-0003`` and ``.round-0003.4711``.

    A checkpoint is written to the draft, which is renamed once complete. An old draft of the same name is deleted.

    Args:
        run: Run folder.
        done: Number of rounds that are done.
    """
    folder = run / "checkpoints" / f"round-{done:04d}"
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)  # of a killed process with the same process id, as in containers
    return folder, draft


@contextmanager
def convert_write_errors(folder: Path, draft: Path | None) -> Iterator[None]:
    """Turn errors of the disk in the ``with`` block, which writes a checkpoint, into a run error.

    Args:
        folder: Final folder of the checkpoint, for the error.
        draft: Folder to delete after an error; None if other processes still write to it.

    Raises:
        RunError: The disk cannot be written to.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) else error
        run = folder.parent.parent  # of RUN/checkpoints/round-0003
        raise RunError(
            f"{folder}: cannot be written to: {why}; once this is fixed, {resume_command(run)} resumes the run"
        ) from None


def write_tensors(path: Path, tensors: Tree) -> None:
    """Write a file of tensors and flush it to disk."""
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path)
    to_disk(path)


def finish_checkpoint(draft: Path, folder: Path, progress: Progress, lines: Sequence[bytes] | None = None) -> None:
    """Complete a checkpoint whose tensors are on disk, and rename it to its final name.

    Everything is flushed to disk before the rename, so that a checkpoint under its final name is complete even after a
    power failure.

    Args:
        draft: Folder of the draft.
        folder: Final folder; replaced if it exists.
        progress: Progress of the run.
        lines: Lines of the file of checksums for the tensor files; computed here if None.
    """
    content = asdict(progress)
    for optional_key in ("shards", "population", "stopped"):  # left out if empty or False
        if not content[optional_key]:
            del content[optional_key]
    write_json(draft / "checkpoint.json", content)
    seal(draft, lines)  # writes the file of checksums
    for path in (draft / "checkpoint.json", draft / SUMS, draft):
        to_disk(path)
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    checkpoints, run = folder.parent, folder.parent.parent
    to_disk(checkpoints)
    to_disk(run)


def prune_checkpoints(run: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and drafts of crashed processes."""
    for draft in (run / "checkpoints").glob(".round-*"):
        shutil.rmtree(draft, ignore_errors=True)
    for folder in list_checkpoints(run)[:-keep]:
        shutil.rmtree(folder)


def read_progress(folder: Path) -> Progress:
    """Return the progress that a checkpoint records.

    Raises:
        RunError: The file is unreadable, damaged, or not from comingle.
    """
    verify(folder, "checkpoint.json")
    try:
        content = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        for name, attribute_type in get_type_hints(Progress).items():
            if name not in content:  # has a default; otherwise the constructor below raises
                continue
            value = content[name]
            if not _has_type(value, attribute_type):
                raise TypeError(f"{name} is {value!r}")
            if attribute_type in (int, float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}")
        return Progress(**content)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{folder}: not a comingle checkpoint ({error}); {advise(folder)}") from None


def _has_type(value: object, expected_type: Any) -> bool:
    """Return whether a JSON value has the type of an attribute of :class:`Progress`; integers count as floats."""
    if expected_type in (list[str], list[int]):
        (item_type,) = get_args(expected_type)
        return isinstance(value, list) and all(isinstance(item, item_type) for item in value)
    if expected_type is float:
        return isinstance(value, (int, float))
    return isinstance(value, expected_type)


def load_checkpoint(folder: Path, layout: Layout, like: State, like_server: Tree) -> tuple[State, Tree]:
    """Return the state of the users and of the server at a checkpoint, on the device of ``like``.

    Args:
        folder: Folder of the checkpoint.
        layout: Names and shapes of a user's tensors, in the order in which a row holds them.
        like: State of the users in a new run of the same recipe; the checkpoint must have the same tensors.
        like_server: State of the server in a new run of the same recipe.

    Raises:
        RunError: The files are damaged, or a tensor has another shape or dtype, is not finite or has negative counts;
            names the first such tensor.
    """
    verify(folder)
    tensors_of_new_run = named_tensors(layout, like, like_server)
    expected = {name: (tuple(t.shape), t.dtype) for name, t in tensors_of_new_run.items()}
    tensors = read_tensors(folder / STATE, expected, like.rows.device)
    stored = [name for name in like_server if OF_SERVER + name in tensors]
    server_state = {name: tensors.pop(OF_SERVER + name) for name in stored}  # names such as "server/version"
    user_state = _fill_state(layout, like, tensors)
    return user_state, server_state


Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Expected shape and dtype of each tensor in a file."""


def read_tensors(
    path: Path, expected: Expected, device: torch.device, *, besides: str | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a file of a checkpoint, in the expected order and dtypes.

    Args:
        path: Path of the file.
        expected: Shape and dtype of each tensor.
        device: Device to load to.
        besides: Prefix of the names of tensors to ignore if they are not expected, such as ``"server/"``. An empty
            string ignores all other tensors; with None, any other tensor is an error.

    Raises:
        RunError: See :func:`load_checkpoint`.
    """
    folder = path.parent
    tensors = _read_file(path)
    # Earlier versions have not stored the server as of the best round.
    of_best = OF_SERVER + _BEST_PREFIX
    if not any(name.startswith(of_best) for name in tensors):
        expected = {name: value for name, value in expected.items() if not name.startswith(of_best)}
    if besides is not None:
        tensors = {name: t for name, t in tensors.items() if name in expected or not name.startswith(besides)}
    for name in sorted(expected.keys() | tensors.keys()):
        stored = (tuple(tensors[name].shape), tensors[name].dtype) if name in tensors else None
        wanted = expected.get(name)
        if not _same_shape_and_dtype(stored, wanted):
            raise RunError(f"{path}: tensor {name!r}: got {stored or 'nothing'}; this recipe has {wanted or 'nothing'}")
        problem = _problem_of_values(name, tensors[name])
        if problem:
            raise RunError(f"{path}: tensor {name!r} {problem}; {advise(folder)}")
    return {name: tensors[name].to(device, dtype) for name, (_shape, dtype) in expected.items()}


def _same_shape_and_dtype(got: tuple[Any, torch.dtype] | None, wanted: tuple[Any, torch.dtype] | None) -> bool:
    """Return whether a tensor in a checkpoint has the shape and dtype that the resumed run needs.

    All floating dtypes match each other, as ``runtime.dtype`` may change when a run is resumed.

    Args:
        got: Shape and dtype in the checkpoint; None if the tensor is missing there.
        wanted: Shape and dtype in the run; None if the run has no such tensor.
    """
    if got is None or wanted is None:
        return got is wanted
    got_shape, got_dtype = got
    wanted_shape, wanted_dtype = wanted
    both_floating = got_dtype.is_floating_point and wanted_dtype.is_floating_point
    return got_shape == wanted_shape and (got_dtype == wanted_dtype or both_floating)


def _problem_of_values(name: str, tensor: Tensor) -> str:
    """Return why the values of a tensor in a checkpoint cannot be right, such as "is not finite"; empty if they can."""
    if tensor.is_floating_point():
        may_be_infinite = name == OF_SERVER + LOWEST  # the lowest validation loss, before the first validation
        is_wrong = tensor.isnan() if may_be_infinite else ~tensor.isfinite()
        return "is not finite" if bool(is_wrong.any()) else ""
    # Integers are counts, except that version -1 stands for a user who has not downloaded the initial model.
    is_version = name.removeprefix(_BEST_PREFIX) == "versions"
    smallest = -1 if is_version else 0
    return "has a negative count" if bool((tensor < smallest).any()) else ""


def named_tensors(layout: Layout, state: State, server: Tree) -> dict[str, Tensor]:
    """Return all tensors of users and server by their names in a file of a checkpoint.

    For example "user/mlp.a" (a parameter, of all users), "iterations", "server/version" and "best/rows".

    Args:
        layout: Names and shapes of a user's tensors, in the order in which a row holds them.
        state: State of the users.
        server: State of the server.
    """
    tensors_of_users = state.tensors()
    rows = tensors_of_users.pop("rows")  # the matrix of all parameters
    named: dict[str, Tensor] = {}
    for name, t in layout.views(rows).items():
        named[_PARAMETER_PREFIX + name] = t
    named.update(tensors_of_users)
    for name, t in server.items():
        named[OF_SERVER + name] = t
    for name, t in state.best.items():
        named[_BEST_PREFIX + name] = t
    return named


def personal_tensors(layout: Layout, state: State, row: int) -> dict[str, Tensor]:
    """Return the trained parameters of one user by name, ``(1, *shape)`` each.

    Args:
        layout: Names and shapes of a user's tensors, in the order in which a row holds them.
        state: State of all users.
        row: Row of the user.
    """
    return layout.views(state.rows_of([row]))


class CheckpointState(State):
    """State of a finished run whose parameters stay in the checkpoint file, from which :meth:`rows_of` reads them.

    They can be neither trained nor written. If the run selects the best round, they are those of that round.
    """

    in_memory = False

    def __init__(self, folder: Path, progress: Progress, layout: Layout, like: State, names: Sequence[str]) -> None:
        """Check the file, and find each parameter's offset in it.

        Args:
            folder: Folder of the checkpoint, written by one process.
            progress: Progress of the training at that checkpoint.
            layout: Names and shapes of a user's tensors, in the order in which a row holds them.
            like: State of any users in a new run of the same recipe.
            names: Names of the users of the run, in its order.

        Raises:
            RunError: The file is damaged, or its tensors are not those of the layout.
        """
        super().__init__(**{field.name: getattr(like, field.name) for field in fields(State)})
        verify(folder, STATE)
        self._path = folder / STATE
        self._dtype = like.rows.dtype
        with self._path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
            # Stays open, so that a run that goes on may delete the checkpoint.
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        of_best = f"{_BEST_PREFIX}rows"
        stored_names = [of_best] if of_best in header else [_PARAMETER_PREFIX + slot.name for slot in layout.slots]
        num_copies = 1  # of each user's parameters
        self._tensors: list[tuple[int, int]] = []  # of each tensor: start in the file, and bytes of a row
        dtypes: set[torch.dtype] = set()
        for stored_name in stored_names:
            entry = header.get(stored_name)
            if entry is None or entry["dtype"] not in _FLOATING:
                raise RunError(f"{self._path}: tensor {stored_name!r}: got {entry}; allowed: a tensor of this recipe")
            num_rows, columns, dtype = entry["shape"][0], math.prod(entry["shape"][1:]), _FLOATING[entry["dtype"]]
            self._tensors.append((8 + header_size + entry["data_offsets"][0], columns * dtype.itemsize))
            dtypes.add(dtype)
            num_copies = num_rows // len(progress.trainers)
        if len(dtypes) > 1:
            raise RunError(f"{self._path}: got parameters of several dtypes: {dtypes}; allowed: one")
        self._stored_dtype = dtypes.pop()
        self._bytes_per_user = layout.columns * self._stored_dtype.itemsize
        if sum(row_bytes for _start, row_bytes in self._tensors) != self._bytes_per_user:
            raise RunError(f"{self._path}: has parameters of other shapes than this recipe")
        self._row_in_file = rows_of_names(progress.trainers, names, num_copies)

    def rows_of(self, users: Sequence[int]) -> Tensor:
        """Return the parameters of some users, ``(users, columns)``, read from the file; any thread may call it."""
        values = torch.empty(len(users), self._bytes_per_user, dtype=torch.uint8)
        for user, to in zip(users, values.numpy(), strict=True):
            self._read(self._row_in_file[user], memoryview(to))
        return values.view(self._stored_dtype).to(self._dtype)

    def _read(self, row: int, to: memoryview) -> None:
        """Read a row of all tensors in the file, one after the other."""
        position = 0
        for start, row_bytes in self._tensors:
            part = to[position : position + row_bytes]
            if os.preadv(self._descriptor, [part], start + row * row_bytes) != row_bytes:
                raise RunError(f"{self._path}: truncated; {advise(self._path.parent)}")
            position += row_bytes


_FLOATING = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating dtypes by their names in safetensors."""


_BEST_ROUND = "best/round"
"""Name of the number of the best round, the only tensor of users without a leading dimension of users."""


def shard_file(number: int, count: int) -> str:
    """Return the name of the file with the users of process ``number``, counted from 0."""
    return f"users-{number}-of-{count}.safetensors"


def load_users(folder: Path, progress: Progress, layout: Layout, like: State, names: Sequence[str]) -> State:
    """Return the state of some users, from those files of a checkpoint that have at least one of them.

    If a run is resumed with another number of processes, the users of a process may be spread over several files,
    together with users of other processes.

    Args:
        folder: Folder of the checkpoint.
        progress: Its progress, with the trainers of each file.
        layout: Names and shapes of a user's tensors, in the order in which a row holds them.
        like: State of these users in a new run of the same recipe; the checkpoint must have the same tensors.
        names: Names of these users.

    Raises:
        RunError: See :func:`load_checkpoint`.
    """
    copies = len(like.rows) // len(names)  # of the model of each user
    no_server: Tree = {}  # the server's state is read by :func:`load_server`
    tensors = {name: t.clone() for name, t in named_tensors(layout, like, no_server).items()}  # overwritten below
    requested_names = set(names)
    for file, names_in_file in _trainers_by_file(progress):
        found_names = [name for name in names_in_file if name in requested_names]
        if not found_names:
            continue
        verify(folder, file)
        num_rows_in_file = copies * len(names_in_file)
        expected = {key: (_shape_in_file(key, t, num_rows_in_file), t.dtype) for key, t in tensors.items()}
        tensors_in_file = read_tensors(folder / file, expected, like.rows.device, besides=OF_SERVER)
        rows_in_file = rows_of_names(names_in_file, found_names, copies)
        rows_in_state = rows_of_names(names, found_names, copies)
        for key, t in tensors.items():
            if key == _BEST_ROUND:  # one number for all users
                t.copy_(tensors_in_file[key])
            else:
                t[rows_in_state] = tensors_in_file[key][rows_in_file]
    return _fill_state(layout, like, tensors)


def load_server(folder: Path, progress: Progress, like: Tree, device: torch.device) -> Tree:
    """Return the state of the server at a checkpoint, from a file of its own or from the one with all users.

    Args:
        folder: Folder of the checkpoint.
        progress: Progress of the training at that checkpoint.
        like: State of the server in a new run of the same recipe; the checkpoint must have the same tensors.
        device: Device to load to.

    Raises:
        RunError: See :func:`load_checkpoint`.
    """
    has_own_file = progress.shards or progress.population  # of several processes, or with a store on disk
    if has_own_file:
        file, ignored_prefix = SERVER, None  # any other tensor is an error
    else:
        file, ignored_prefix = STATE, ""  # ignore all other tensors: those of users
    verify(folder, file)
    expected = {OF_SERVER + name: (tuple(t.shape), t.dtype) for name, t in like.items()}
    tensors = read_tensors(folder / file, expected, device, besides=ignored_prefix)
    return {name.removeprefix(OF_SERVER): t for name, t in tensors.items()}


def read_state(folder: Path, progress: Progress, layout: Layout) -> tuple[dict[str, Tensor], Tree]:
    """Return the state of all users and of the server with which a run of any users ends, at a checkpoint.

    It is that of the best round so far if the run selects it and has stored it, else the last one. Unlike
    :func:`load_checkpoint` this needs no federation with the same users.

    Args:
        folder: Folder of the checkpoint.
        progress: Its progress; its users are in files, not in a store on disk.
        layout: Names and shapes of a user's tensors, in the order in which a row holds them.

    Returns:
        Tensors of the users under the names of :meth:`State.tensors`, with rows in the order of ``progress.trainers``,
        and the server's tensors by name.

    Raises:
        RunError: The files are damaged.
        RecipeError: A parameter is missing or has another shape than in the layout.
    """
    verify(folder)
    num_trainers = len(progress.trainers)
    pieces: dict[str, list[Tensor]] = {}  # of each tensor, from the files of all processes
    server_state: Tree = {}
    for file, names_in_file in _trainers_by_file(progress):
        for name, t in _read_file(folder / file).items():
            if name.startswith(OF_SERVER):
                server_state[name.removeprefix(OF_SERVER)] = t
            elif name != _BEST_ROUND:
                num_copies = len(t) // len(names_in_file)
                pieces.setdefault(name, []).append(t.view(num_copies, len(names_in_file), *t.shape[1:]))
    if progress.shards:  # the server has a file of its own
        server_state = {name.removeprefix(OF_SERVER): t for name, t in _read_file(folder / SERVER).items()}
    users_state: dict[str, Tensor] = {}
    for name, parts in pieces.items():
        joined = torch.cat(parts, dim=1)  # (copies, users, ...)
        users_state[name] = joined.reshape(joined.shape[0] * num_trainers, *joined.shape[2:])
    parameters: list[Tensor] = []
    for slot in layout.slots:
        stored = users_state.pop(_PARAMETER_PREFIX + slot.name, None)
        if stored is None or stored.shape[1:] != slot.shape:
            got = "nothing" if stored is None else f"shape {tuple(stored.shape[1:])}"
            raise RecipeError(f"{folder}: parameter {slot.name!r}: got {got}; this recipe has {tuple(slot.shape)}")
        parameters.append(stored)
    users_state["rows"] = flatten(parameters)
    users_of_best, users_of_last = _split_best(users_state)
    server_of_best, server_of_last = _split_best(server_state)
    if server_of_best or not server_state:  # a checkpoint of a client has no server
        return {**users_of_last, **users_of_best}, {**server_of_last, **server_of_best}
    return users_of_last, server_of_last


def _split_best(tensors: Tree) -> tuple[Tree, Tree]:
    """Return the tensors as of the best round, without the prefix of their names, and all others."""
    of_best = {name.removeprefix(_BEST_PREFIX): t for name, t in tensors.items() if name.startswith(_BEST_PREFIX)}
    others = {name: t for name, t in tensors.items() if not name.startswith(_BEST_PREFIX)}
    return of_best, others


def _read_file(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file of a checkpoint.

    Raises:
        RunError: The file is not safetensors.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: truncated or not safetensors ({error}); {advise(path.parent)}") from None


def digest_of_checkpoint(folder: Path) -> str:
    """Return a short hash of the checksums of a checkpoint's files, equal for equal checkpoints."""
    return hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()[:16]


def digest_of_tensors(folder: Path) -> str:
    """Return a short hash of the checksums of a checkpoint's tensors, equal for equal models whenever they trained."""
    lines = (folder / SUMS).read_bytes().splitlines(keepends=True)
    of_tensors = b"".join(line for line in lines if line.rstrip().endswith(b".safetensors"))
    return hashlib.sha256(of_tensors).hexdigest()[:16]


def _trainers_by_file(progress: Progress) -> list[tuple[str, list[str]]]:
    """Return the name of each file with users, and the names of the trainers whose rows it has, in order.

    For example ``[("users-0-of-2.safetensors", ["ann", "bob"]), ("users-1-of-2.safetensors", ["cem"])]``.
    """
    if not progress.shards:
        return [(STATE, progress.trainers)]
    trainers_by_file, start = [], 0
    for process, num_trainers in enumerate(progress.shards):
        file = shard_file(process, count=len(progress.shards))
        end = start + num_trainers
        trainers_by_file.append((file, progress.trainers[start:end]))
        start = end
    return trainers_by_file


def rows_of_names(names: Sequence[str], wanted: Sequence[str], copies: int) -> list[int]:
    """Return the rows of some users, such as ``[0, 2, 3, 5]`` for users a and c of a, b, c with 2 copies each.

    Args:
        names: Names of all users; row ``copy * len(names) + i`` is a copy of user i.
        wanted: Names of the users to find.
        copies: Number of copies of each user.
    """
    numbers = {name: i for i, name in enumerate(names)}
    return [copy * len(names) + numbers[name] for copy in range(copies) for name in wanted]


def _shape_in_file(name: str, t: Tensor, rows: int) -> tuple[int, ...]:
    """Return the shape that a tensor must have in a file of a checkpoint, which may have only some of the users.

    Args:
        name: Name of the tensor.
        t: The tensor of this run, with a row for each copy of each user's model.
        rows: Number of such rows in the file.
    """
    if name == _BEST_ROUND:  # a single number
        return tuple(t.shape)
    return (rows, *t.shape[1:])


def _fill_state(layout: Layout, like: State, tensors: dict[str, Tensor]) -> State:
    """Return the users' state from the tensors of a checkpoint; the reverse of :func:`named_tensors`.

    The parameters of a user are one tensor each in a checkpoint, and one row in the state.

    Args:
        layout: Names and shapes of the parameters, in the order in which a row holds them.
        like: A state like the result, whose ``best`` has the names of the tensors of the best round.
        tensors: The users' tensors by name, such as "user/mlp.a" (a parameter), "best/rows" or "iterations".
    """
    parameters = [tensors[_PARAMETER_PREFIX + slot.name] for slot in layout.slots]
    best_tensors = {name: tensors[_BEST_PREFIX + name] for name in like.best}
    current_tensors = {"rows": flatten(parameters)}
    for name, t in tensors.items():
        if not name.startswith((_PARAMETER_PREFIX, _BEST_PREFIX)):
            current_tensors[name] = t
    return like.filled(current_tensors, best_tensors)
