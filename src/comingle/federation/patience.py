"""How long a server waits for its users."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the server waits, for how many, and what it believes of them.

    A round ends when everybody who was asked has answered, or after ``round_timeout`` seconds with those who have, if
    they are ``min_participants``; else the run ends, to be gone on with. ``join_timeout`` is how long the first round
    waits for everybody. ``max_samples`` is how many samples or conversations a user may have.
    """

    min_participants: int = 1
    round_timeout: float = 3600.0
    join_timeout: float = 300.0
    max_samples: int = 1_000_000
