"""What every way over the network looks like to the coordinator: names of users, and bytes there and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Channel(Protocol):
    """Moves bytes between the coordinator and users, by name."""

    def present(self) -> Sequence[str]:
        """Names of the users who can be reached now."""
        ...

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        """Sends each user its request; yields ``(name, reply)`` as they come in, or ``(name, why it failed)``.

        Ends when all have answered or failed, or when ``timeout`` seconds are over. Why something failed is one line.
        A reply to an older request is never yielded.
        """
        ...
