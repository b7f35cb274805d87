"""What a run has taken: time, tokens and bytes; and what it takes from a federation to count them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from comingle.engines.client import Clients
from comingle.engines.server import ServerHalf


class Federation(ABC):
    """Two halves, and what moves messages between them; users are numbers here."""

    clients: Clients
    server: ServerHalf
    upload_bytes: int
    """Length of all that users have sent."""
    download_bytes: int
    """Length of all that they have received."""

    @abstractmethod
    def download(self, members: Sequence[int]) -> None:
        """Those of these users who are behind receive what the server has."""

    @abstractmethod
    def upload(self, members: Sequence[int], done: int, losses: dict[int, float]) -> None:
        """These users send what they share after round ``done`` (from 1)."""

    @abstractmethod
    def aggregate(self) -> str:
        """The server takes in what has been sent; if it cannot, why the round has no sum."""

    @abstractmethod
    def select(self, done: int, losses: dict[str, float]) -> None:
        """Users report validation losses after round ``done``; if their mean is the lowest, all keep what they have."""


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

    def count(self, federation: Federation) -> None:
        """Take over what has been sent and received so far."""
        self.upload_bytes, self.download_bytes = federation.upload_bytes, federation.download_bytes
