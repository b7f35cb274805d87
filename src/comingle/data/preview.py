"""What a user holds, in a form to print."""

from __future__ import annotations

from typing import Any

from comingle.data.pack import UserData
from comingle.data.partition import UserText

_SPLITS = ("train", "valid", "test")
_SAMPLE_CHARACTERS = 160


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


def _shorten(document: str) -> str:
    line = " ".join(document.split())
    return line if len(line) <= _SAMPLE_CHARACTERS else line[: _SAMPLE_CHARACTERS - 1] + "…"
