"""What a run has taken: time, tokens and bytes; and what it takes from a federation to count them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from comingle.engines.client import Clients
from comingle.engines.server import ServerHalf

T = TypeVar("T")


class Federation(ABC):
    """Two halves, and what moves messages between them; users are numbers here.

    Where users are shared out over processes, each runs the same rounds with the users that are here. The one that
    :attr:`leads` has the server and tells of the run. What is gathered and shared is what JSON can say.
    """

    clients: Clients
    server: ServerHalf
    leads: bool = True
    """Whether this process has the server."""
    upload_bytes: int
    """Length of all that users have sent."""
    download_bytes: int
    """Length of all that they have received."""

    def each(self, work: Callable[[], T]) -> T:
        """Do something in every process; its result here. What fails anywhere ends it everywhere."""
        return work()

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """The same; every process's result at the one that leads, in the order of the users, elsewhere one's own."""
        return [self.each(work)]

    def share(self, work: Callable[[], T]) -> T:
        """Do something in the process that leads; its result everywhere."""
        return work()

    def invite(self, number: int, *, releases: bool) -> list[int] | None:
        """Who of those here takes part in round ``number`` (from 0); None where privacy allows no more rounds."""
        return self.server.invite(self.clients.training, number, releases=releases)

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
    def select(self, done: int, losses: dict[str, float]) -> float:
        """Users report validation losses after round ``done``; if their mean is the lowest, all keep what they have.

        Returns the mean.
        """


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
