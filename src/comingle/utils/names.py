"""Names of users, and of data sets on the Hugging Face hub."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from comingle.utils.errors import DataError, did_you_mean

# Control characters, line and paragraph separators, halves of surrogate pairs. Joiners (Cf) are part of words.
_REFUSED = frozenset({"Cc", "Zl", "Zp", "Cs"})
# What reorders the rest of a line, so that one name looks like another; and the byte order mark, which is not seen.
_DISGUISES = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


def as_folder(name: str) -> str:
    """A user's name as that of one folder, whatever a path would make of it; ordinary names stay as they are.

    >>> as_folder("Ann Lee"), as_folder("../ann"), as_folder("..")
    ('Ann Lee', '..%2Fann', '%2E%2E')
    """
    if name.strip(".") == "":
        return name.replace(".", "%2E")
    return name.replace("%", "%25").replace("/", "%2F").replace("\\", "%5C")


def name_problem(names: Iterable[str]) -> str | None:
    """What is wrong with the first of these names that is empty, unprintable, or there twice; None where none is."""
    seen: set[str] = set()
    for name in names:
        if not name.strip():
            return "a user's name is empty; allowed: text in one line"
        if odd := [sign for sign in name if sign in _DISGUISES or unicodedata.category(sign) in _REFUSED]:
            return f"user {name!r}: {odd[0]!r} in a name; allowed: text in one line without control characters"
        if name in seen:
            return f"user {name!r} twice; names must differ"
        seen.add(name)
    return None


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
