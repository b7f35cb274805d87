"""Names of users: they become keys of YAML and JSON and cells of tables, so they are text in one line."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

# Control characters, line and paragraph separators, halves of surrogate pairs. Joiners (Cf) are part of words.
_REFUSED = frozenset({"Cc", "Zl", "Zp", "Cs"})
# What reorders the rest of a line, so that one name looks like another; and the byte order mark, which is not seen.
_DISGUISES = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


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
