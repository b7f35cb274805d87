"""What the messages of an exchange are as large as, for users who need not all be built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from comingle.protocol.messages import LOSS, Download, Upload
from comingle.protocol.wire import packed_bytes
from comingle.training.backends.local import InProcess
from comingle.training.settings import exchanged_after


def message_bytes(federation: InProcess, names: Sequence[str]) -> list[tuple[int, int]]:
    """Bytes that each of the users called ``names`` sends in an exchange, and receives in one.

    ``federation`` may hold fewer where all are alike: then its last user stands for the rest. Users' names are part of
    messages, and so is the number of the round, which has one digit here.
    """
    clients = federation.clients
    if not clients.shares:
        return [(0, 0)] * len(names)
    known: dict[int, tuple[Upload, Download]] = {}
    sizes = []
    for i, name in enumerate(names):
        at = min(i, len(clients.trainers) - 1)
        if at not in known:
            known[at] = upload_of(federation, at), download_of(federation, at, names)
        sent, received = (packed_bytes(replace(message, users=(name,)))[0] for message in known[at])
        if (sums := federation.server.sums) is not None:
            size = federation.server.size
            sent, received = sums.sent_bytes(name, size), received + sums.received_bytes(name, size)
        sizes.append((sent, received))
    return sizes


def mean_bytes(messages: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of users who are alike but for the lengths of their names, to the nearest byte."""
    sent, received = zip(*messages, strict=True)
    return round(fmean(sent)), round(fmean(received))


def upload_of(federation: InProcess, user: int) -> Upload:
    """What a user sends in an exchange."""
    return federation.clients.upload([user], 1, {LOSS: torch.zeros(1)}, counts=True)


def download_of(federation: InProcess, user: int, names: Sequence[str]) -> Download:
    """What a user receives once all of ``names`` have taken part; between peers in shapes alone."""
    clients, server = federation.clients, federation.server
    if not clients.method.server.peer_to_peer:
        return server.download([clients.trainers[user].name])
    sent = {name: t.to("meta") for name, t in upload_of(federation, user).tensors.items()}
    tensors = {name: t.unsqueeze(1).expand(1, len(names), *t.shape[1:]) for name, t in sent.items()}
    return Download(version=1, users=(names[user],), tensors=tensors, ranks=server.ranks[[user]], senders=tuple(names))


def count_exchanges(federation: InProcess) -> int:
    """How many there are in a whole run."""
    clients, method, training = federation.clients, federation.clients.method, federation.clients.training
    rounds = training.rounds if method.trains else 0
    return sum(exchanged_after(method, training, clients.shares, done) for done in range(1, rounds + 1))
