"""Both halves in one process: a cohort's messages stay stacked, and are counted as if each were sent by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from comingle.config.settings import Terms
from comingle.privacy.secure_sum import VECTOR, Sums, as_words, keys_bytes, received_bytes, sent_bytes
from comingle.protocol.messages import (
    LOSS,
    Download,
    Upload,
    join_downloads,
    join_uploads,
    no_uploads,
    validation_report,
)
from comingle.protocol.wire import pack, packed_bytes, unpack
from comingle.training.checkpoints import Progress, load_checkpoint, load_parts, save_checkpoint
from comingle.training.client import Clients
from comingle.training.evaluation import Federation
from comingle.training.privacy import terms_of
from comingle.training.server import ServerHalf, start_server
from comingle.training.settings import cohorts
from comingle.training.state import reorder
from comingle.utils.errors import NoSumError
from comingle.utils.trees import Tree

logger = logging.getLogger("comingle")

Masked = Callable[[Terms, Mapping[str, np.ndarray], int], np.ndarray]
"""The sum of uploads by name, of so large an entry at most, with masks put on and taken off on the way."""


@dataclass(kw_only=True)
class InProcess(Federation):
    """Moves messages and counts their bytes; with ``serialise`` every one of them is packed and unpacked.

    A secure sum adds the numbers, or is what ``masked`` makes of them
    (:func:`comingle.privacy.secure_server.rehearsed`).
    """

    clients: Clients
    server: ServerHalf
    serialise: bool = False
    masked: Masked | None = None
    upload_bytes: int = 0
    download_bytes: int = 0
    _sent: Upload | None = None

    def save(self, folder: Path, progress: Progress) -> None:
        """Write the checkpoint of a round to a run's folder.

        Raises:
            RunError: the disk does not take it; the older checkpoints stay.
        """
        save_checkpoint(folder, self.clients.model.layout, self.clients.state, self.server.state, progress)

    def load(self, checkpoint: Path, progress: Progress) -> Tree:
        """Have the users be as they were at a checkpoint, also one of several processes; what the server kept.

        Raises:
            RunError: it was changed, or is not this recipe's.
        """
        clients = self.clients
        if progress.shards or progress.population:
            return load_parts(self, checkpoint, progress)
        state, kept = load_checkpoint(checkpoint, clients.model.layout, clients.state, self.server.state)
        clients.state = reorder(state, progress.trainers, clients.everybody)
        return kept

    def download(self, members: Sequence[int]) -> None:
        """Those of these users who are behind receive what the server has."""
        behind = self.clients.behind(self.server.version, members) if self.clients.shares else []
        names = self.server.answers([self.clients.names[member] for member in behind])
        for some in cohorts(names, self.clients.at_once):
            self._answer(some)

    def _answer(self, names: Sequence[str]) -> None:
        message = self.server.download(names)
        self.download_bytes += sum(packed_bytes(message))
        self.clients.receive(_downloaded(message.split()) if self.serialise else message)

    def upload(self, members: Sequence[int], done: int, losses: dict[int, float]) -> None:
        """These users send what they share, and how well they did, after round ``done``."""
        if not members:
            self._sent = no_uploads(done)
            return
        said = {LOSS: torch.tensor([losses[member] for member in members])}
        message = self.clients.upload(members, done, said)
        if self.server.sums is not None:
            self._sent = message
            self._count_sum(message.users, done)
            return
        self.upload_bytes += sum(packed_bytes(message))
        self._sent = _uploaded(message.split()) if self.serialise else message

    def aggregate(self) -> str:
        """The server takes in what has been sent; between peers everybody who took part hears of it at once.

        Why there was no sum, where there can be none and was none.
        """
        assert self._sent is not None
        if self.server.sums is not None:
            sent, self._sent = self._sent, None
            return self._sum(self.server.sums, sent)
        users, self._sent = self._sent.users, self.server.aggregate(self._sent)
        if self.clients.method.server.peer_to_peer:
            self.download(self.clients.numbers(users))
            self.server.forget()
        return ""

    def _sum(self, sums: Sums, sent: Upload) -> str:
        """What the server has of uploads once all masks are off; with ``masked`` they are put on and taken off."""
        try:
            if self.masked is not None:
                whole = sent.tensors.get(VECTOR, torch.zeros(0, 0))
                uploads = {name: as_words(row) for name, row in zip(sent.users, whole, strict=True)}
                terms = terms_of(self.clients.training, "", sent.round, self.server.size)
                total = self.masked(terms, uploads, sums.largest(sent.round))
            else:
                sums.require(len(sent.users), sent.round)
                total = sums.add(sent.tensors[VECTOR])
        except NoSumError as error:
            logger.warning("%s", error)
            self.server.pass_over(sent.round)
            return str(error)
        self.server.aggregate_sum(total, sent.users, sent.round)
        return ""

    def _count_sum(self, users: Sequence[str], done: int) -> None:
        """The bytes of a sum's messages; where there are too few users, no more than their keys are sent."""
        terms, names = terms_of(self.clients.training, "", done, self.server.size), list(users)
        enough = len(names) >= terms.threshold
        for name in names:
            self.upload_bytes += sent_bytes(terms, name, len(names)) if enough else keys_bytes(terms, name)
            self.download_bytes += received_bytes(terms, name, names) if enough else 0

    def select(self, done: int, losses: dict[str, float]) -> float:
        """Users report validation losses after round ``done``; if their mean is the lowest, all keep what they have."""
        message = validation_report(losses, done)
        self.upload_bytes += sum(packed_bytes(message))
        verdict = self.server.judge(_uploaded(message.split()) if self.serialise else message)
        self.download_bytes += sum(packed_bytes(verdict))
        self.clients.hear(_downloaded(verdict.split()) if self.serialise else verdict)
        return fmean(losses.values())


def federate(clients: Clients) -> InProcess:
    """These users with a server of their own.

    Raises:
        RecipeError: the method's server cannot serve such users.
    """
    names = clients.names
    server = start_server(clients.model, clients.method, names, clients.training)
    if (private := clients.steps.private) is not None:
        server.set_works(lambda: private.works(clients.feed))
    return InProcess(clients=clients, server=server)


def _downloaded(parts: Sequence[Download]) -> Download:
    """What arrives where each user's message goes over a wire."""
    messages = [unpack(pack(part)) for part in parts]
    return join_downloads([part for part in messages if isinstance(part, Download)])


def _uploaded(parts: Sequence[Upload]) -> Upload:
    """The same."""
    messages = [unpack(pack(part)) for part in parts]
    return join_uploads([part for part in messages if isinstance(part, Upload)])
