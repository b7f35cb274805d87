"""Users whose data is read when something asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from comingle.data.answers import UserAnswers
from comingle.data.pack import UserData
from comingle.data.samples import UserSamples

User = TypeVar("User", UserData, UserAnswers, UserSamples)


class _Later:
    """Fields that nobody has filled in are read, all at once."""

    _read: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:  # asked only for what is not there
        if name not in ("train", "valid", "test"):
            raise AttributeError(name)
        read = self._read()
        vars(self).update({split: getattr(read, split) for split in ("train", "valid", "test")})
        return vars(self)[name]


class LaterText(_Later, UserData):
    """A user with text."""


class LaterAnswers(_Later, UserAnswers):
    """A user with questions."""


class LaterSamples(_Later, UserSamples):
    """A user with samples."""


_LATER: dict[type, type] = {UserData: LaterText, UserAnswers: LaterAnswers, UserSamples: LaterSamples}


def later(kind: type[User], name: str, read: Callable[[], User], *, cluster: int | None = None) -> User:
    """A user of some kind of whom the name, and the true cluster if any, is known without reading."""
    user = object.__new__(_LATER[kind])
    vars(user).update(name=name, _read=read, cluster=cluster)
    return user
