"""What is put into Flower's messages: bytes as they are, or one line that says why there are none.

Bytes travel as one array: Flower cuts arrays into pieces and sends those piece by piece, so that nothing has to be
in one request. Nothing is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode

from comingle.utils.errors import MessageError
from comingle.utils.names import name_problem
from comingle.utils.terminal import printable

FORMAT = 1
"""Raised when these records change their meaning."""

HELLO, REFUSED, TRAIN = "query.hello", "query.refused", "train"
"""Kinds of messages: who are you; you may not take part; here is a request."""

_LONGEST = 400
"""Characters of what is repeated of somebody's words."""

_BYTES, _KEY, _HELLO, _LINE = "message", "bytes", "hello", "line"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Who a node says it is; ``instance`` is another one for each state folder."""

    name: str
    instance: str
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why there is no reply, in one line; after an accident another try may go well, after a refusal it does not."""

    line: str
    accident: bool


def wrap(data: bytes) -> RecordDict:
    """Bytes as the content of a message."""
    return RecordDict({_BYTES: ArrayRecord({_KEY: Array("uint8", (len(data),), "comingle", data)})})


def wrap_failure(failure: Failure) -> RecordDict:
    """The same of what goes back where there is no reply."""
    return RecordDict({_LINE: ConfigRecord({"line": failure.line, "accident": failure.accident})})


def wrap_hello(hello: Hello) -> RecordDict:
    """The same of a node's answer to :data:`HELLO`."""
    return RecordDict({_HELLO: ConfigRecord({"name": hello.name, "instance": hello.instance, "format": hello.format})})


_LOST = {
    ErrorCode.NODE_UNAVAILABLE: "its connection was lost",
    ErrorCode.MESSAGE_UNAVAILABLE: "its reply was lost on the way",
}
"""Errors that Flower's server replies with instead of a user."""


def unwrap(message: Message) -> bytes | Failure:
    """What :func:`wrap` or :func:`wrap_failure` has put in; an error of Flower's own is an accident."""
    if message.has_error():
        line = _LOST.get(message.error.code) or _one_line(f"{message.error.reason or message.error.code}")
        return Failure(line=line, accident=True)
    content = message.content
    if (record := content.config_records.get(_LINE)) is not None:
        return Failure(line=_one_line(record.get("line")), accident=record.get("accident") is True)
    try:
        return content.array_records[_BYTES][_KEY].data
    except KeyError:
        return Failure(line=_one_line(f"a message without {_BYTES!r}; it has {sorted(content)}"), accident=False)


def unwrap_hello(message: Message) -> Hello | Failure:
    """Who has answered."""
    if message.has_error() or _LINE in message.content.config_records:
        failure = unwrap(message)
        assert isinstance(failure, Failure)
        return failure
    try:
        record = message.content.config_records[_HELLO]
        name, instance, version = record["name"], record["instance"], record["format"]
    except KeyError:
        return Failure(line="its app is not comingle's", accident=False)
    if not (isinstance(name, str) and isinstance(instance, str) and isinstance(version, int)):
        return Failure(line="its app is not comingle's", accident=False)
    hello = Hello(name=name, instance=instance, format=version)
    if name_problem([hello.name]) or max(len(hello.name), len(hello.instance)) > _LONGEST:
        line = (
            f"a node says that it is {hello.name[:70]!r}; allowed: a name in one line, of up to {_LONGEST} characters"
        )
        return Failure(line=_one_line(line), accident=False)
    return hello


def _one_line(text: object) -> str:
    """What somebody has sent, as a short line that no terminal obeys."""
    line = " ".join(text[: 2 * _LONGEST].split()) if isinstance(text, str) else ""
    return printable(line)[:_LONGEST] or "says nothing that can be read"


def request_of(message: Message) -> bytes:
    """The bytes of a request.

    Raises:
        MessageError: there are none.
    """
    data = unwrap(message)
    if isinstance(data, Failure):
        raise MessageError(f"request: {data.line}")
    return data
