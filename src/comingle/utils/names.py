"""Names of users, and of data sets on the Hugging Face hub."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from comingle.utils.errors import DataError, did_you_mean

# Control characters, line and paragraph separators, halves of surrogate pairs. Joiners (Cf) are part of words.
_REFUSED_CATEGORIES = frozenset({"Cc", "Zl", "Zp", "Cs"})
# Characters that reorder a line, so that one name looks like another, and the invisible byte order mark.
_DISGUISING_CHARACTERS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


def as_folder(name: str) -> str:
    """Return a user's name as the name of a single folder, with characters escaped that have a meaning in paths.

    >>> as_folder("Ann Lee"), as_folder("../ann"), as_folder("..")
    ('Ann Lee', '..%2Fann', '%2E%2E')
    """
    if name.strip(".") == "":
        return name.replace(".", "%2E")
    return name.replace("%", "%25").replace("/", "%2F").replace("\\", "%5C")


def name_problem(names: Iterable[str]) -> str | None:
    """Return a message about the first user's name that is empty, unprintable or a duplicate; None if all are valid."""
    seen: set[str] = set()
    for name in names:
        if not name.strip():
            return "a user's name is empty; allowed: text on one line"
        for character in name:
            if character in _DISGUISING_CHARACTERS or unicodedata.category(character) in _REFUSED_CATEGORIES:
                return (
                    f"user {name!r}: the name contains {character!r}; allowed: text on one line without control "
                    "characters"
                )
        if name in seen:
            return f"two users are named {name!r}; names must be unique"
        seen.add(name)
    return None


HUB_PREFIX = "hub:"
"""Prefix of the names of data sets on the Hugging Face hub."""

DEMO_PREFIX = "demo:"
"""Prefix of a user of ``comingle demo``."""

FOLDER_VARIABLE = "COMINGLE_DATA"
"""Environment variable for a folder with local data, which is read before the hub."""

_KEYS = ("config", "split", "files", "documents")


def is_named(source: str) -> bool:
    """Return whether a source of data is ``hub:NAME`` or ``demo:NAME``, and not a path."""
    scheme, colon, name = source.partition(":")
    prefix = scheme + colon
    return prefix in (HUB_PREFIX, DEMO_PREFIX) and name != ""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A data set of the hub, or a folder with the same layout, and a selection of its rows.

    ``split`` and ``files`` (a pattern) select rows; ``documents`` is the number of selected rows to read.
    """

    name: str
    config: str | None = None
    split: str | None = None
    files: str | None = None
    documents: int | None = None


def parse_hub_name(text: str) -> HubName:
    """Parse a name such as ``hub:wikimedia/wikipedia?config=20231101.de&split=train&documents=4000``.

    Raises:
        DataError: The name or a value is empty, a key is unknown, or ``documents`` is not a whole number from 1.
    """
    name, _, query = text.removeprefix(HUB_PREFIX).partition("?")
    values = dict(parse_qsl(query, keep_blank_values=True))
    for key in values:
        if key not in _KEYS:
            raise DataError(f"{text}: no key {key!r}.{did_you_mean(key, _KEYS)} Allowed: {', '.join(_KEYS)}")
    documents = values.pop("documents", None)
    if documents is not None:
        is_whole_number = documents.isdecimal()
        if not is_whole_number or int(documents) == 0:
            raise DataError(f"{text}: documents is {documents!r}; allowed: whole numbers from 1")
    if not name or "" in values.values():
        raise DataError(f"{text}: a name or a value is empty; write {HUB_PREFIX}OWNER/NAME?config=CONFIG&split=SPLIT")
    num_documents = None if documents is None else int(documents)
    return HubName(name=name, documents=num_documents, **values)
