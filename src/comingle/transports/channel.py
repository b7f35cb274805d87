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
        """Send each user its request; yield ``(name, reply)`` as replies arrive, or ``(name, why it failed)``.

        Ends when all have answered or failed, or when ``timeout`` seconds are over. The reason of a failure is one
        line. A reply to an older request is never yielded. ``requests`` may change meanwhile: a channel that waits
        sends requests that are new in it, and no longer waits for those that are gone.
        """
        ...
