"""Of which kind users are that a program hands over, by what the kinds themselves say that they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from comingle.config.data import kinds, load_section
from comingle.kinds.base import Kind
from comingle.utils.errors import DataError, PluginError
from comingle.utils.names import name_problem
from comingle.utils.registry import load_object

_LAST = "text"
"""Asked after all others: paths and tables may be of a more particular kind."""


def section_for(users: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The ``data.kind`` of users who are handed over by their names: that of the section's options, or one that takes
    them all.

    Raises:
        DataError: nobody, a name that cannot be one, data that no kind takes, or users of several kinds.
        PluginError: the kind that is wanted cannot be used.
    """
    if not isinstance(users, Mapping) or not users:
        raise DataError(f"users: got {_described(users)}; allowed: a mapping of names to data, as {{'ada': [...]}}")
    if problem := name_problem(name if isinstance(name, str) else "" for name in users):
        raise DataError(f"users: {problem}")
    offered = dict(_kinds(options.get("kind")))
    found = {
        name: next((key for key, kind in offered.items() if kind.takes(data, options)), None)
        for name, data in users.items()
    }
    for name, key in found.items():
        if key is None:
            allowed = "; ".join(f"{kind.name}: {kind.handed}" for kind in offered.values() if kind.handed)
            raise DataError(f"users: {name!r} is {_described(users[name])}; allowed: {allowed}")
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} has {key}" for name, key in _one_of_each(found))
        raise DataError(f"users: all must have one kind of data; {told}")
    return next(key for key in found.values() if key)


def _kinds(wanted: str | None) -> Iterator[tuple[str, Kind]]:
    """The kind that is wanted, or all that can be used, by the ``kind`` of their sections."""
    if wanted is not None:
        yield wanted, load_object(load_section(wanted).implementation)
        return
    for key in sorted(kinds(), key=lambda key: key == _LAST):
        with suppress(PluginError):
            yield key, load_object(load_section(key).implementation)


def _one_of_each(found: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
    firsts: dict[str | None, str] = {}
    for name, key in found.items():
        firsts.setdefault(key, name)
    return [(name, key) for key, name in firsts.items()]


def _described(data: Any) -> str:
    """What somebody has handed over, in a few words."""
    kind = type(data).__name__
    if columns := getattr(data, "column_names", None):
        return f"{kind} with {', '.join(map(str, columns)):.100}"
    if isinstance(data, Mapping):
        return f"{kind} with {', '.join(map(str, data)):.100}" if data else f"an empty {kind}"
    if isinstance(data, list | tuple):
        return f"{kind} of {_described(data[0])}" if data else f"an empty {kind}"
    return kind
