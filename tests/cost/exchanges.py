"""What a real exchange moves."""

from __future__ import annotations

from collections.abc import Sequence

from comingle.training.backends.local import InProcess


def exchanged(federation: InProcess, members: Sequence[int] | None = None) -> tuple[int, int]:
    """Bytes that members (everybody, or so many) send and receive in the next exchange."""
    clients = federation.clients
    if not clients.shares:
        return 0, 0
    members = range(len(clients.trainers)) if members is None else members
    federation.download(members)  # what users of some methods have before the first round
    federation.clock.upload_bytes = federation.clock.download_bytes = 0
    federation.upload(members, federation.server.version + 1, dict.fromkeys(members, 1.0))
    federation.aggregate()
    federation.download(members)
    return federation.clock.upload_bytes, federation.clock.download_bytes
