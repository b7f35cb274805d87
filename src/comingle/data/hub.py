"""Names of data sets on the Hugging Face hub with what is wanted of them: ``hub:NAME?config=C&split=S``."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from comingle.errors import DataError, did_you_mean

HUB_PREFIX = "hub:"

DEMO_PREFIX = "demo:"
"""Names one of the users of ``comingle demo``."""

FOLDER_VARIABLE = "COMINGLE_DATA"
"""Names a folder with local data, which is asked before the hub."""

_KEYS = ("config", "split", "files", "documents")


def is_named(source: str) -> bool:
    """Return whether a source is not a path, but the name of a data set on the hub or of a demo user."""
    prefix, colon, named = source.partition(":")
    return bool(named) and prefix + colon in (HUB_PREFIX, DEMO_PREFIX)


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A data set of the hub (or a folder laid out like one), and which of its rows are wanted.

    ``split`` and ``files`` (a pattern) choose among the rows, ``documents`` takes the first so many of them.
    """

    name: str
    config: str | None = None
    split: str | None = None
    files: str | None = None
    documents: int | None = None


def parse_hub_name(text: str) -> HubName:
    """``hub:wikimedia/wikipedia?config=20231101.de&split=train&documents=4000`` in its parts.

    Raises:
        DataError: no name, an unknown key, or ``documents`` is not a whole number from 1.
    """
    name, _, query = text.removeprefix(HUB_PREFIX).partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    for key in given:
        if key not in _KEYS:
            raise DataError(f"{text}: no key {key!r}.{did_you_mean(key, _KEYS)} Allowed: {', '.join(_KEYS)}")
    documents = given.pop("documents", None)
    if documents is not None and not (documents.isdecimal() and int(documents) > 0):
        raise DataError(f"{text}: documents is {documents!r}; allowed: whole numbers from 1")
    if not name or "" in given.values():
        raise DataError(f"{text}: a name or a value is empty; write {HUB_PREFIX}OWNER/NAME?config=CONFIG&split=SPLIT")
    return HubName(name=name, documents=int(documents) if documents else None, **given)
