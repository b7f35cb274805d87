"""What a user holds, in a form to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comingle.data.pack import UserData
from comingle.data.partition import UserText

_SPLITS = ("train", "valid", "test")
_SAMPLE_CHARACTERS = 160
_ENDS = 3

LISTED_USERS = 24
"""Up to so many users have a row each."""


def summarise(text: UserText, data: UserData) -> dict[str, Any]:
    """Documents, characters and tokens of every split, and the beginning of a train and of a test document.

    Keys: ``user``; ``documents``, ``characters`` and ``tokens``, each a count for ``train``, ``valid`` and ``test``;
    ``samples``, at most one text for ``train`` and ``test``, white space collapsed. Tokens are those kept after limits;
    documents and characters are all there are.
    """
    documents = {split: getattr(text, split) for split in _SPLITS}
    return {
        "user": text.name,
        "documents": {split: len(documents[split]) for split in _SPLITS},
        "characters": {split: sum(map(len, documents[split])) for split in _SPLITS},
        "tokens": {split: len(getattr(data, split)) for split in _SPLITS},
        "samples": {split: _shorten(documents[split][0]) for split in ("train", "test") if documents[split]},
    }


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


def _shorten(document: str) -> str:
    line = " ".join(document.split())
    return line if len(line) <= _SAMPLE_CHARACTERS else line[: _SAMPLE_CHARACTERS - 1] + "…"
