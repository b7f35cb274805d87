"""Checkpoints that several processes write, each its users' part (:mod:`comingle.engines.shards` reads them)."""

from __future__ import annotations

import shutil
from pathlib import Path

from comingle.engines.checkpoints import (
    OF_SERVER,
    SERVER,
    Progress,
    finish_checkpoint,
    named,
    places,
    write_tensors,
    written,
)
from comingle.engines.clock import Federation
from comingle.engines.shards import shard_file
from comingle.engines.state import Stored
from comingle.utils.files import line_of, list_checkpoints


def save_shards(federation: Federation, run: Path, number: int, progress: Progress) -> None:
    """Write the checkpoint of a round: each process the part of its users, process ``number`` of as many as there are.

    Raises:
        RunError: the disk of one of them does not take it; the older checkpoints stay.
    """
    clients, layout = federation.clients, federation.clients.model.layout

    def begin() -> tuple[str, str]:
        folder, draft = places(run, progress.round)
        with written(folder, draft):
            draft.mkdir(parents=True)
        return str(folder), str(draft)

    folder, draft = (Path(place) for place in federation.share(begin))

    def write() -> str:
        if isinstance(store := clients.state, Stored):
            with written(folder, None):
                files = store.save(draft, list_checkpoints(run))
                return "".join(line_of(draft / name).decode() for name in files)
        file = draft / shard_file(number, len(progress.shards))
        with written(folder, None):
            write_tensors(file, named(layout, clients.state, {}))
            return line_of(file).decode()

    try:
        lines = [line for text in federation.gather(write) for line in text.encode().splitlines(keepends=True)]
    except BaseException:
        if federation.leads:  # when all know of it: who still writes would else say that the folder is gone
            shutil.rmtree(draft, ignore_errors=True)
        raise

    def finish() -> None:
        with written(folder, draft):
            kept = {OF_SERVER + name: t for name, t in federation.server.state.items()}
            write_tensors(draft / SERVER, kept)
            finish_checkpoint(draft, folder, progress, lines)

    federation.share(finish)
