"""What the server asks of a user over a network, and what it answers: messages with a few words around them.

    magic "CMGT" · format version · length of the words · CRC-32 of the words · words · the messages, one after another

The words are JSON. Each message is the bytes that :mod:`comingle.protocol.wire` packs and checks. Nothing is executed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from comingle.protocol.wire import FORMAT, MAX_BYTES
from comingle.utils.errors import MessageError

_MAGIC = b"CMGT"
_PREFIX = struct.Struct("<4sHII")
MAX_WORDS = 16 << 20
"""Longer words are refused before they are read."""

_WRONG = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What words can be that are not those of a task or an answer."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a user is to do, in this order, as the ``serial``-th task of run ``run``.

    ``round`` is what its steps are about: the round to train (from 0), or how many are done. ``about`` holds what else
    the steps need.
    """

    run: str
    serial: int
    user: str
    todo: tuple[str, ...]
    round: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """As bytes; equal tasks are equal bytes."""
        words = {"todo": list(self.todo), "round": self.round, "about": dict(self.about)}
        return _pack("task", self.run, self.serial, self.user, words, self.messages)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a user answers to the task of the same run and number: ``told`` in words, and its upload."""

    run: str
    serial: int
    user: str
    told: Mapping[str, Any]
    messages: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """As bytes."""
        return _pack("answer", self.run, self.serial, self.user, {"told": dict(self.told)}, self.messages)

    @property
    def refused(self) -> str:
        """Why the user did not do what it was asked; empty if it did."""
        return str(self.told.get("refused", ""))


def unpack_task(data: bytes) -> Task:
    """The task that was packed.

    Raises:
        MessageError: not such bytes.
    """
    words, messages = _unpack("task", data)
    with _refused("task"):
        return Task(
            run=str(words["run"]),
            serial=int(words["serial"]),
            user=str(words["user"]),
            todo=tuple(str(step) for step in words["todo"]),
            round=int(words["round"]),
            about=dict(words["about"]),
            messages=messages,
        )


def unpack_answer(data: bytes) -> Answer:
    """The answer that was packed.

    Raises:
        MessageError: not such bytes.
    """
    words, messages = _unpack("answer", data)
    with _refused("answer"):
        return Answer(
            run=str(words["run"]),
            serial=int(words["serial"]),
            user=str(words["user"]),
            told=dict(words["told"]),
            messages=messages,
        )


def _pack(kind: str, run: str, serial: int, user: str, words: Mapping[str, Any], messages: tuple[bytes, ...]) -> bytes:
    every = {"kind": kind, "run": run, "serial": serial, "user": user, "lengths": [len(one) for one in messages]}
    header = json.dumps(every | dict(words), separators=(",", ":"), allow_nan=False).encode()
    return b"".join([_PREFIX.pack(_MAGIC, FORMAT, len(header), zlib.crc32(header)), header, *messages])


def _unpack(kind: str, data: bytes) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        raise MessageError(f"{kind}: {len(data)} bytes that do not begin as one of comingle does")
    _, version, length, check = _PREFIX.unpack_from(data)
    if version != FORMAT:
        raise MessageError(f"{kind}: of format {version}; allowed: {FORMAT}")
    if length > MAX_WORDS or len(data) > MAX_BYTES:
        raise MessageError(f"{kind}: {len(data)} bytes, of which {length} are words; at most {MAX_BYTES}, {MAX_WORDS}")
    start = _PREFIX.size + length
    if zlib.crc32(data[_PREFIX.size : start]) != check:
        raise MessageError(f"{kind}: its checksum is wrong, so something has changed on the way")
    with _refused(kind):
        words = json.loads(data[_PREFIX.size : start], parse_constant=_refuse)
        lengths = [int(one) for one in words["lengths"]]
        if words["kind"] != kind:
            raise MessageError(f"{kind}: got one of kind {words['kind']!r}")
    if min(lengths, default=0) < 0 or start + sum(lengths) != len(data):
        raise MessageError(f"{kind}: has {len(data)} bytes and says that it has {start + sum(lengths)}")
    ends = [start + sum(lengths[: i + 1]) for i in range(len(lengths))]
    return words, tuple(data[end - size : end] for end, size in zip(ends, lengths, strict=True))


@contextmanager
def _refused(kind: str) -> Iterator[None]:
    """Whatever is wrong with words is the message's fault."""
    try:
        yield
    except MessageError:
        raise
    except _WRONG as error:
        raise MessageError(f"{kind}: not one of comingle's ({type(error).__name__}: {error})") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
