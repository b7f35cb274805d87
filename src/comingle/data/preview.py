"""Users in a table: a row each, or their distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ENDS = 3

LISTED_USERS = 24
"""Up to so many users have a row each."""


def choose_rows(
    counts: Mapping[str, Sequence[int]], by: int, *, everybody: bool = False
) -> list[tuple[str, list[str]]]:
    """A table's rows: a user each, or for more than 24 each column's distribution and the users at its ends.

    ``counts`` are a user's numbers, column by column; who has least and most is decided ``by`` one of them.
    """
    rows = {name: [f"{number:,}" for number in numbers] for name, numbers in counts.items()}
    if everybody or len(rows) <= LISTED_USERS:
        return list(rows.items())
    columns = [sorted(column) for column in zip(*counts.values(), strict=True)]
    told = {"least": 0, "median": (len(rows) - 1) // 2, "most": -1}
    told_rows = [(f"{word} of {len(rows):,}", [f"{column[at]:,}" for column in columns]) for word, at in told.items()]
    order = sorted(rows, key=lambda name: counts[name][by])
    return told_rows + [(name, rows[name]) for name in (*order[:_ENDS], *order[-_ENDS:])]
