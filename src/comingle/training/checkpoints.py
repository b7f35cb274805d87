"""Checkpoints: everything that a run needs to resume exactly.

``checkpoints/round-NNNN/`` holds ``state.safetensors`` (every user's named tensors, both moments, step counts and
ranks, what the server keeps, and all of it in the best round where that is selected), ``checkpoint.json``, and the
checksums of both (:mod:`comingle.utils.files`). It is written under a temporary name and renamed, so that it
exists whole or not at all. Nothing in it is ever executed.

In the folder of a checkpoint ``users-I-of-N.safetensors`` has the users of process I, ``server.safetensors`` what the
server keeps; ``checkpoint.json`` says how many users each file has. Any number of processes goes on from what any other
number has written, one process's ``state.safetensors`` included; each reads and checks the files that have its users.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
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
from comingle.utils.errors import RunError
from comingle.utils.files import SUMS, advise, list_checkpoints, seal, verify
from comingle.utils.records import resume_command, to_disk, write_json
from comingle.utils.trees import Layout, Tree, flatten

STATE, SERVER = "state.safetensors", "server.safetensors"
OF_SERVER = "server/"
"""So begin the names of what the server keeps."""

_ROWS = "user/"
_SERVER = OF_SERVER
_BEST = "best/"


@dataclass(kw_only=True)
class Clock:
    """Time, tokens and bytes of a run, over all its processes: a resumed run starts from what the checkpoint says.

    ``user_rounds`` counts each round once for each user who took part; ``told_upload_bytes`` and
    ``told_download_bytes`` are what events have told of so far.
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
        """Seconds since the run began, without the time in which no process worked on it."""
        return self.earlier_seconds + time.perf_counter() - self.started


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come. ``fingerprint`` names the recipe; ``events_bytes`` is the length of the event log.

    ``trainers`` are the names of those to whom the rows belong, in the rows' order. ``shards`` says how many of them
    are in each file, where several processes have written it (:mod:`comingle.training.checkpoints`). Where users'
    tensors are elsewhere, ``population`` stands for the names (:func:`comingle.data.populations.digest_names`).
    ``stopped``: no more rounds.
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
        """Goes on from there."""
        return Clock(earlier_seconds=self.wall_seconds, **{key: getattr(self, key) for key in _COUNTED})


_COUNTED = {one.name for one in fields(Clock)} & {one.name for one in fields(Progress)}


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
    """How far a run has come after so many rounds; without a clock nothing has been counted."""
    counted = {key: getattr(clock or Clock(), key) for key in _COUNTED}
    return Progress(
        round=done,
        fingerprint=fingerprint,
        trainers=list(trainers),
        events_bytes=events_bytes,
        wall_seconds=clock.wall_seconds if clock is not None else 0.0,
        shards=list(shards),
        population=population,
        stopped=stopped,
        **counted,
    )


def newest_checkpoint(folder: Path, fingerprint: str) -> tuple[Path, Progress]:
    """Return the newest checkpoint of a run folder, and how far the run had come.

    Raises:
        RunError: there is none, or it is of a recipe with another fingerprint.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise RunError(f"{folder}: no checkpoint in it")
    progress = read_progress(checkpoints[-1])
    if progress.fingerprint != fingerprint:
        raise RunError(f"{checkpoints[-1]}: belongs to another recipe ({progress.fingerprint}, not {fingerprint})")
    return checkpoints[-1], progress


def save_checkpoint(run: Path, layout: Layout, state: State, kept: Tree, progress: Progress) -> Path:
    """Write the checkpoint of a round; returns its folder.

    Raises:
        RunError: the disk does not take it; the older checkpoints stay.
    """
    folder, draft = places(run, progress.round)
    with written(folder, draft):
        draft.mkdir(parents=True)

        def write_all() -> list[str]:
            write_tensors(draft / STATE, named(layout, state, kept))
            return [STATE]

        if STATE not in state.save(draft, list_checkpoints(run), write_all):
            write_tensors(draft / SERVER, {OF_SERVER + name: t for name, t in kept.items()})
        finish_checkpoint(draft, folder, progress)
    return folder


def places(run: Path, done: int) -> tuple[Path, Path]:
    """The folder of a checkpoint, and the one that becomes it, which is not there."""
    folder = run / "checkpoints" / f"round-{done:04d}"
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed and had our number, as in a container
    return folder, draft


@contextmanager
def written(folder: Path, draft: Path | None) -> Iterator[None]:
    """Within, a checkpoint is written.

    Raises:
        RunError: the disk does not take it; nothing of it stays, unless others still write to its draft (None).
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) else error
        goes_on = f"once it can be, {resume_command(folder.parent.parent)} goes on"
        raise RunError(f"{folder}: cannot be written to: {why}; {goes_on}") from None


def write_tensors(path: Path, tensors: Tree) -> None:
    """A file of tensors, on disk when this returns."""
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path)
    to_disk(path)


def finish_checkpoint(draft: Path, folder: Path, progress: Progress, lines: Sequence[bytes] | None = None) -> None:
    """The rest of a checkpoint whose tensors are on disk, before it gets its name; ``lines`` are their checksums."""
    content = asdict(progress)
    for key in ("shards", "population", "stopped"):
        if not content[key]:
            del content[key]
    write_json(draft / "checkpoint.json", content)
    seal(draft, lines)
    for path in (draft / "checkpoint.json", draft / SUMS, draft):
        to_disk(path)
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    for parent in (folder.parent, folder.parent.parent):
        to_disk(parent)


def prune_checkpoints(run: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and drafts that a crash left."""
    for draft in (run / "checkpoints").glob(".round-*"):
        shutil.rmtree(draft, ignore_errors=True)
    for folder in list_checkpoints(run)[:-keep]:
        shutil.rmtree(folder)


def read_progress(folder: Path) -> Progress:
    """What a checkpoint says of itself.

    Raises:
        RunError: unreadable, changed since it was written, or not a checkpoint of comingle.
    """
    verify(folder, "checkpoint.json")
    try:
        content = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        for name, kind in get_type_hints(Progress).items():
            if name not in content:
                continue  # said below
            if not _is_of(got := content[name], kind):
                raise TypeError(f"{name} is {got!r}")
            if kind in (int, float) and not 0 <= got < math.inf:
                raise ValueError(f"{name} is {got!r}")
        return Progress(**content)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{folder}: not a checkpoint of comingle ({error}); {advise(folder)}") from None


def _is_of(value: Any, kind: Any) -> bool:
    if kind in (list[str], list[int]):
        return isinstance(value, list) and all(isinstance(one, get_args(kind)) for one in value)
    return isinstance(value, (int, float) if kind is float else kind)


def load_checkpoint(folder: Path, layout: Layout, like: State, kept: Tree) -> tuple[State, Tree]:
    """The users' state and what the server keeps, on the device of ``like``, a state of the same recipe.

    Raises:
        RunError: changed since it was written, or tensors that are not those of this recipe, not finite, or negative
            counts (names the first one).
    """
    verify(folder)
    expected = {name: (tuple(t.shape), t.dtype) for name, t in named(layout, like, kept).items()}
    tensors = read_tensors(folder / STATE, expected, like.rows.device)
    rows = flatten([tensors.pop(_ROWS + slot.name) for slot in layout.slots])
    server = {name: tensors.pop(_SERVER + name) for name in kept}
    best = {name: tensors.pop(_BEST + name) for name in like.best}
    return like.filled({"rows": rows, **tensors}, best), server


Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor in a file."""


def read_tensors(
    path: Path, expected: Expected, device: torch.device, *, besides: str | None = None
) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file, in the order and the dtypes that are expected; the file's order is its own.

    Of those whose names begin with ``besides`` none is read that is not expected.

    Raises:
        RunError: as :func:`load_checkpoint`.
    """
    folder = path.parent
    try:
        tensors = load_file(path)
        if besides is not None:
            tensors = {name: t for name, t in tensors.items() if name in expected or not name.startswith(besides)}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: truncated or not safetensors ({error}); {advise(folder)}") from None
    for name in sorted(expected.keys() | tensors.keys()):
        got = (tuple(tensors[name].shape), tensors[name].dtype) if name in tensors else None
        wanted = expected.get(name)
        if not _fits(got, wanted):
            said = [part or "nothing" for part in (got, wanted)]
            raise RunError(f"{path}: foreign checkpoint, tensor {name!r}: got {said[0]}, this recipe has {said[1]}")
        if wrong := _find_impossible(name, tensors[name]):
            raise RunError(f"{path}: tensor {name!r} {wrong}; {advise(folder)}")
    return {name: tensors[name].to(device, dtype) for name, (_, dtype) in expected.items()}


def _fits(got: tuple[Any, torch.dtype] | None, wanted: tuple[Any, torch.dtype] | None) -> bool:
    """Equal; but ``runtime.dtype`` may have changed, so that any floating format takes on any other."""
    if got is None or wanted is None or got == wanted:
        return got == wanted
    return got[0] == wanted[0] and got[1].is_floating_point and wanted[1].is_floating_point


def _find_impossible(name: str, tensor: Tensor) -> str:
    """Why no run can have had such a tensor; empty if one can. The lowest loss is infinite until there is one."""
    if tensor.is_floating_point():
        broken = tensor.isnan() if name == _SERVER + LOWEST else ~tensor.isfinite()
        return "is not finite" if bool(broken.any()) else ""
    least = -1 if name.removeprefix(_BEST) == "versions" else 0  # of who has not even what everybody starts with
    return "has a negative count" if bool((tensor < least).any()) else ""


def named(layout: Layout, state: State, server: Tree) -> dict[str, Tensor]:
    """All tensors of a state by the names that they have in a file."""
    tensors = state.tensors()
    rows = {_ROWS + name: t for name, t in layout.views(tensors.pop("rows")).items()}
    kept = {_SERVER + name: t for name, t in server.items()}
    return rows | tensors | kept | {_BEST + name: t for name, t in state.best.items()}


def personal_tensors(layout: Layout, state: State, row: int) -> dict[str, Tensor]:
    """One user's named tensors, ``(1, ...)`` each."""
    return layout.views(state.rows_of([row]))


_BEST_ROUND = "best/round"


def shard_file(number: int, count: int) -> str:
    """Name of the file with the users of process ``number`` (from 0)."""
    return f"users-{number}-of-{count}.safetensors"


def load_users(folder: Path, progress: Progress, layout: Layout, like: State, names: Sequence[str]) -> State:
    """The state of some users out of whatever files have them, as ``like``, a state of theirs.

    Raises:
        RunError: as :func:`comingle.training.checkpoints.load_checkpoint`.
    """
    copies = len(like.rows) // len(names)
    whole = {name: t.clone() for name, t in named(layout, like, {}).items()}
    for file, there in _files(progress):
        if not (wanted := [name for name in there if name in set(names)]):
            continue
        verify(folder, file)
        expected = {name: (_shape(name, t, copies * len(there)), t.dtype) for name, t in whole.items()}
        found = read_tensors(folder / file, expected, like.rows.device, besides=OF_SERVER)
        taken = _rows(there, wanted, copies)
        into = _rows(names, wanted, copies)
        for name, t in whole.items():
            if name == _BEST_ROUND:
                t.copy_(found[name])
            else:
                t[into] = found[name][taken]
    return _filled(layout, like, whole)


def load_server(folder: Path, progress: Progress, like: Tree, device: torch.device) -> Tree:
    """What the server keeps.

    Raises:
        RunError: the same.
    """
    apart = bool(progress.shards or progress.population)
    file = SERVER if apart else STATE
    verify(folder, file)
    expected = {OF_SERVER + name: (tuple(t.shape), t.dtype) for name, t in like.items()}
    found = read_tensors(folder / file, expected, device, besides=None if apart else "")
    return {name.removeprefix(OF_SERVER): t for name, t in found.items()}


def _files(progress: Progress) -> list[tuple[str, list[str]]]:
    """Each file, and whose rows are in it."""
    if not progress.shards:
        return [(STATE, progress.trainers)]
    files, start = [], 0
    for number, count in enumerate(progress.shards):
        files.append((shard_file(number, len(progress.shards)), progress.trainers[start : start + count]))
        start += count
    return files


def _rows(names: Sequence[str], wanted: Sequence[str], copies: int) -> list[int]:
    at = {name: i for i, name in enumerate(names)}
    return [copy * len(names) + at[name] for copy in range(copies) for name in wanted]


def _shape(name: str, t: Tensor, rows: int) -> tuple[int, ...]:
    return tuple(t.shape) if name == _BEST_ROUND else (rows, *t.shape[1:])


def _filled(layout: Layout, like: State, tensors: dict[str, Tensor]) -> State:
    rows = flatten([tensors.pop(_ROWS + slot.name) for slot in layout.slots])
    best = {name: tensors.pop(_BEST + name) for name in like.best}
    return like.filled({"rows": rows, **tensors}, best)
