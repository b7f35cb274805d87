"""Checkpoints: everything that a run needs to go on as if nothing had happened.

``checkpoints/round-NNNN/`` holds ``state.safetensors`` (every user's named tensors, both moments, step counts and
ranks, what the server keeps, and all of it in the best round where that is selected) and ``checkpoint.json``. It is
written under a temporary name and renamed, so that it exists whole or not at all. Nothing in it is ever executed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from comingle.engines.state import State
from comingle.errors import RunError
from comingle.records import write_json
from comingle.trees import Layout, Tree, flatten

_ROWS, _SERVER, _BEST = "user/", "server/", "best/"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come. ``fingerprint`` names the recipe; ``events_bytes`` is the length of the event log."""

    round: int
    fingerprint: str
    events_bytes: int
    train_seconds: float
    wall_seconds: float
    tokens: int
    upload_bytes: int
    download_bytes: int
    told_upload_bytes: int
    told_download_bytes: int
    user_rounds: int


def save_checkpoint(run: Path, layout: Layout, state: State, kept: Tree, progress: Progress) -> Path:
    """Write the checkpoint of a round; returns its folder."""
    folder = run / "checkpoints" / f"round-{progress.round:04d}"
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed and had our number, as in a container
    draft.mkdir(parents=True)
    tensors = {name: t.cpu().contiguous() for name, t in _named(layout, state, kept).items()}
    save_file(tensors, draft / "state.safetensors")
    write_json(draft / "checkpoint.json", asdict(progress))
    for path in draft.iterdir():  # on disk before it gets its name
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    return folder


def prune_checkpoints(run: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and drafts that a crash left."""
    for draft in (run / "checkpoints").glob(".round-*"):
        shutil.rmtree(draft, ignore_errors=True)
    for folder in list_checkpoints(run)[:-keep]:
        shutil.rmtree(folder)


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first."""
    # Longer names are later: round-10000 comes after round-9999.
    return sorted((run / "checkpoints").glob("round-*"), key=lambda folder: (len(folder.name), folder.name))


def read_progress(folder: Path) -> Progress:
    """What a checkpoint says of itself.

    Raises:
        RunError: unreadable or not a checkpoint of comingle.
    """
    try:
        content = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        for name, kind in get_type_hints(Progress).items():
            if name in content and not isinstance(content[name], (int, float) if kind is float else kind):
                raise TypeError(f"{name} is {content[name]!r}")
        return Progress(**content)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{folder}: not a checkpoint of comingle ({error}); delete it to resume from an older one"
        ) from None


def load_checkpoint(folder: Path, layout: Layout, like: State, kept: Tree) -> tuple[State, Tree]:
    """The users' state and what the server keeps, on the device of ``like``, a state of the same recipe.

    Raises:
        RunError: truncated, or tensors that are not those of this recipe (names the first one that differs).
    """
    path = folder / "state.safetensors"
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: truncated or not safetensors ({error}); delete {folder} to use an older one") from None
    expected = {name: (tuple(t.shape), t.dtype) for name, t in _named(layout, like, kept).items()}
    for name in sorted(expected.keys() | found.keys()):
        got = (tuple(found[name].shape), found[name].dtype) if name in found else "nothing"
        wanted = expected.get(name, "nothing")
        if got != wanted:
            raise RunError(f"{path}: foreign checkpoint, tensor {name!r}: got {got}, this recipe has {wanted}")
    found = {name: t.to(like.rows.device) for name, t in found.items()}
    rows = flatten([found.pop(_ROWS + slot.name) for slot in layout.slots])
    server = {name: found.pop(_SERVER + name) for name in kept}
    best = {name: found.pop(_BEST + name) for name in like.best}
    return like.filled({"rows": rows, **found}, best), server


def _named(layout: Layout, state: State, server: Tree) -> dict[str, Tensor]:
    """All tensors of a state by the names that they have in a file."""
    tensors = state.tensors()
    rows = {_ROWS + name: t for name, t in layout.views(tensors.pop("rows")).items()}
    kept = {_SERVER + name: t for name, t in server.items()}
    return rows | tensors | kept | {_BEST + name: t for name, t in state.best.items()}


def personal_tensors(layout: Layout, state: State, row: int) -> dict[str, Tensor]:
    """One user's named tensors, ``(1, ...)`` each."""
    return layout.views(state.rows[row : row + 1])
