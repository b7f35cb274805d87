"""How much may be asked, and how often."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MINUTE = 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``max_tokens`` new tokens for each answer, ``rate`` requests of each user's in a minute, ``rows`` that are
    answered at once, ``queue`` that wait, ``body_bytes`` of a request, ``choices`` of one request."""

    max_tokens: int = 1024
    rate: int = 600
    rows: int = 16
    queue: int = 64
    body_bytes: int = 1 << 20
    choices: int = 16


class Rates:
    """As many requests of each user's as fit into a minute: a bucket that fills as time goes by."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.clock = rate, clock
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, name: str) -> float:
        """Take one request out of a user's bucket: 0, or, where it is empty, the seconds until there is one again."""
        now = self.clock()
        left, last = self._left.get(name, (float(self.rate), now))
        left = min(float(self.rate), left + (now - last) * self.rate / MINUTE)
        taken = left >= 1
        self._left[name] = (left - taken, now)
        return 0.0 if taken else (1 - left) * MINUTE / self.rate
