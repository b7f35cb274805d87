"""How much of a source is read, where only so many tokens of it are kept.

A text is shuffled and cut into splits, so every split depends on all that is read. What is read therefore follows from
the recipe alone, never from what the tokens turn out to be: the beginning of the source, long enough for all splits.
"""

from __future__ import annotations

from math import ceil

READ_AT_LEAST = 32 << 20
"""Bytes of a source that are read whatever its limits are: a text that is no longer is always read as a whole."""

BYTES_A_TOKEN = 64
"""More than tokens of any usual text have on average (about 4 in English)."""

Part = tuple[int | None, float]
"""How many tokens of a split are kept (None: all), and which share of the source the split is."""


def most_bytes(*, train: Part, valid: Part = (None, 0.0), test: Part = (None, 0.0)) -> int | None:
    """The bytes to read of a source: enough for every limit, ``64 tokens / share``; None where train has no limit."""
    if train[0] is None:
        return None
    needed = [ceil(BYTES_A_TOKEN * tokens / share) for tokens, share in (train, valid, test) if tokens and share]
    return max(READ_AT_LEAST, *needed)
