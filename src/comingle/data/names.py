"""Names of users: they become keys of YAML and JSON and cells of tables, so they are text in one line."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

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
