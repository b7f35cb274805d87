"""The Flower app of a client: its bundle (FAB), the content of its messages, and the app itself.

A SuperLink hands the bundle of a run to every node, and Flower's own SuperNode installs and imports what is in it.
Clients of comingle never do: they compare the digest of the run's bundle with :data:`DIGEST`, which is computed from
what is installed here, and refuse every other run.

A message carries bytes as they are, or one line that says why there are none. Bytes travel as one array: Flower cuts
arrays into pieces and sends those piece by piece, so that nothing has to be in one request. Nothing is pickled.

The module imports neither torch nor anything that does.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from comingle.federation.flower.worker import REFUSAL, BrokenOff, User, call, instance_of, read_user
from comingle.utils.errors import ComingleError, MessageError
from comingle.utils.names import name_problem
from comingle.utils.records import write_text
from comingle.utils.terminal import printable

APP_ID, APP_VERSION = "comingle/comingle-federation", "1.0.0"

PROJECT = """\
[project]
name = "comingle-federation"
version = "1.0.0"
description = "A federation of comingle."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "comingle"

[tool.flwr.app.components]
serverapp = "comingle.federation.flower.server_app:app"
clientapp = "comingle.federation.flower.client_app:app"

[tool.flwr.app.config]
federation = ""
out = ""
users = ""
"""

_DATE = (1980, 1, 1, 0, 0, 0)


def build_bundle() -> bytes:
    """Return the bundle: a ZIP file of :data:`PROJECT` and its manifest, the same bytes on every machine."""
    project = PROJECT.encode()
    manifest = f"pyproject.toml,{hashlib.sha256(project).hexdigest()},{8 * len(project)}"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as bundle:
        for name, content in (("pyproject.toml", project), (".info/CONTENT", manifest.encode())):
            bundle.writestr(zipfile.ZipInfo(name, _DATE), content)
    return packed.getvalue()


DIGEST = hashlib.sha256(build_bundle()).hexdigest()
"""SHA-256 of the bundle, in hex: what the server names as the app of its run, and the only one that clients accept."""

UNKNOWN_KEY = "the key is not registered"
"""What a server says to a client whose key it does not know."""


FORMAT = 1
"""Raised when these records change their meaning."""

HELLO, REFUSED, TRAIN = "query.hello", "query.refused", "train"
"""Kinds of messages: who are you; you may not take part; here is a request."""

_LONGEST = 400
"""Characters of a client's text that are repeated."""

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


WORKER = (sys.executable, "-m", "comingle.federation.worker")
"""Command that starts a user's worker; the user's options come after it."""

_SHOWN_BYTES = 1000
"""Bytes of a refusal that are shown."""

Ask = Callable[[User, bytes, float], bytes]
"""Asks a user's worker; gets the request and for how many seconds at most it may take."""


def make_client_app(ask: Ask) -> ClientApp:
    """The app around whatever answers requests; a refusal of it (ComingleError) goes back as one line."""
    made = ClientApp()

    @made.query("hello")
    def hello(message: Message, context: Context) -> Message:
        """Who is at this node."""
        try:
            user = read_user(context.node_config)
            content = wrap_hello(Hello(name=user.name, instance=instance_of(user.state)))
        except (ComingleError, OSError) as error:
            content = wrap_failure(Failure(line=str(error), accident=False))
        return Message(content, reply_to=message)

    @made.query("refused")
    def refused(message: Message, context: Context) -> Message:
        """The coordinator does not want this node, and says why: that is for the person at the node."""
        line = printable(" ".join(request_of(message)[:_SHOWN_BYTES].decode(errors="replace").split()))
        print(f"comingle: refused: {line}", file=sys.stderr, flush=True)
        write_text(read_user(context.node_config).state / REFUSAL, line + "\n")
        return Message(wrap(b""), reply_to=message)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        """A request of the coordinator's."""
        return Message(_answered(ask, message, context), reply_to=message)

    return made


def _answered(ask: Ask, message: Message, context: Context) -> RecordDict:
    # Clocks of two machines differ: the time that a message may take is counted from when it has come.
    seconds = message.metadata.ttl
    try:
        return wrap(ask(read_user(context.node_config), request_of(message), seconds))
    except BrokenOff as error:
        return wrap_failure(Failure(line=str(error), accident=True))
    except (ComingleError, OSError) as error:
        return wrap_failure(Failure(line=str(error), accident=False))


def ask_worker(user: User, request: bytes, timeout: float) -> bytes:
    """Asks this user's worker, which is started if there is none."""
    return call(user.state, [*WORKER, *user.options()], request, timeout=timeout)


app = make_client_app(ask_worker)
