"""What a recipe says of secure aggregation, and what follows from it for a sum, which everybody knows."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

WORDS = (32, 64)
"""Bits of the numbers on which masks are uniform."""

LEAST = 2
"""A sum of one user's upload is that upload."""


@dataclass(frozen=True, kw_only=True)
class Secure:
    """Uploads are summed so that the server sees their sum alone.

    ``threshold`` is the part of a round's users without whom there is no sum; it is above one half, so that no two sums
    are made of one round. ``bits`` is the size of an entry of an upload, sign included. ``range`` is the largest
    magnitude of an entry of a user's change, 8 where nothing is said; with noise it follows from the clip norm.
    ``colluders`` is how many users may tell the server all they know before noise becomes less than it is counted as.
    """

    threshold: float = 0.66
    bits: int = 24
    range: float | None = None
    colluders: int = 0

    def least(self, users: int) -> int:
        """How many of a round's users it takes."""
        return max(LEAST, math.ceil(self.threshold * users - 1e-9))

    def word(self, users: int) -> int:
        """The size of the numbers that are sent, so that a sum of ``users`` entries fills no more than half of them."""
        needed = self.bits + math.ceil(math.log2(max(users, 1))) + 1
        return WORDS[0] if needed <= WORDS[0] else WORDS[1]


def no_sum(done: int, there: int, expected: int, what: str, least: int) -> str:
    """Why a round has none, in one line."""
    return f"round {done}: {there} of {expected} users {what}; needed: {least}; the round ends without a sum"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What users and server know of a sum before it begins: of which round, of how many entries, of whom.

    ``expected`` is how many users the round asks, ``threshold`` without how many of them there is no sum.
    """

    run: str
    round: int
    users: tuple[str, ...]
    expected: int
    threshold: int
    word: int
    entries: int

    @property
    def digest(self) -> str:
        """A name of all of it, to which keys are bound."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
