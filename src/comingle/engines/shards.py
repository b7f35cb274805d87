"""Checkpoints that several processes have written, each its users' part: read by any number of processes, also one.

In the folder of a checkpoint ``users-I-of-N.safetensors`` has the users of process I, ``server.safetensors`` what the
server keeps; ``checkpoint.json`` says how many users each file has. Any number of processes goes on from what any other
number has written, one process's ``state.safetensors`` included; each reads and checks the files that have its users.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from comingle.engines.checkpoints import OF_SERVER, SERVER, STATE, Progress, named, read_tensors
from comingle.engines.clock import Federation
from comingle.engines.state import State, Stored
from comingle.utils.files import verify
from comingle.utils.trees import Layout, Tree, flatten

_ROWS = "user/"
_BEST = "best/"
_BEST_ROUND = "best/round"


def shard_file(number: int, count: int) -> str:
    """Name of the file with the users of process ``number`` (from 0)."""
    return f"users-{number}-of-{count}.safetensors"


def load_parts(federation: Federation, checkpoint: Path, progress: Progress) -> Tree:
    """Have those who are here be as they were at a checkpoint; what the server kept, where the server is.

    Raises:
        RunError: as :func:`comingle.engines.checkpoints.load_checkpoint`.
    """
    clients, like = federation.clients, federation.server.state
    if isinstance(store := clients.state, Stored):
        federation.each(lambda: store.load(checkpoint))
    else:
        layout, names = clients.model.layout, clients.names
        clients.state = federation.each(lambda: load_users(checkpoint, progress, layout, clients.state, names))
    device = clients.state.rows.device
    return federation.each(lambda: load_server(checkpoint, progress, like, device) if federation.leads else {})


def load_users(folder: Path, progress: Progress, layout: Layout, like: State, names: Sequence[str]) -> State:
    """The state of some users out of whatever files have them, as ``like``, a state of theirs.

    Raises:
        RunError: as :func:`comingle.engines.checkpoints.load_checkpoint`.
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
