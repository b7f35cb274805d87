"""What carries tasks to users and answers back: bytes, by users' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why there is no answer, in a line."""

    why: str


class Channel(Protocol):
    """Moves bytes between the coordinator and users."""

    def present(self) -> Sequence[str]:
        """The names of those who can be reached now."""
        ...

    def exchange(self, tasks: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | Failure]]:
        """Send each user its task, and yield answers and failures as they come, for ``timeout`` seconds at most."""
        ...
