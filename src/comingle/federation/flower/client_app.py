"""The Flower app of a client: its bundle (FAB), the content of its messages, and the functions that answer them.

A SuperLink sends a run's bundle to every node, and Flower's own SuperNode installs and imports it. Clients of comingle
never do: they compare the digest of the run's bundle with :data:`DIGEST`, which is computed from the installed package,
and refuse every other run.

A message carries bytes, or one line that says why there are none. Bytes travel as one array: Flower splits arrays into
chunks and sends these separately, so that no request has to hold all of them. Nothing is pickled.

The module does not import torch, directly or indirectly.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from comingle.utils.errors import ComingleError, MessageError, RecipeError
from comingle.utils.names import name_problem
from comingle.utils.records import expand_home
from comingle.utils.terminal import printable

INSTANCE = "instance"
"""File in a state folder: a random text that differs for each state folder."""

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
clientapp = "comingle.federation.supernode_app:app"

[tool.flwr.app.config]
federation = ""
out = ""
users = ""
"""

_DATE = (1980, 1, 1, 0, 0, 0)


def build_bundle() -> bytes:
    """Return Flower's bundle (FAB) of this app: a ZIP file of :data:`PROJECT` and its manifest.

    The bytes are the same on every machine, so that server and clients compute the same digest.
    """
    unix = 3  # the default of zipfile differs on Windows
    project = PROJECT.encode()
    size_bits = 8 * len(project)
    # Flower's manifest has a line "path,SHA-256,size in bits" for each file.
    manifest = f"pyproject.toml,{hashlib.sha256(project).hexdigest()},{size_bits}".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as bundle:
        for name, content in (("pyproject.toml", project), (".info/CONTENT", manifest)):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system = unix
            bundle.writestr(entry, content)
    return packed.getvalue()


DIGEST = hashlib.sha256(build_bundle()).hexdigest()
"""SHA-256 of the bundle in hex. The server announces it as the app of its run; clients accept no other."""

UNKNOWN_KEY = "the key is not registered"
"""Response of a server to a client whose key is not registered."""


FORMAT = 1
"""Version of the records; incremented when their meaning changes."""

HELLO, REFUSED, TRAIN = "query.hello", "query.refused", "train"
"""Message types: ask a node for its name, refuse a node, send a request."""

_LONGEST = 400
"""Limit on characters of a client's text that the server repeats."""

_BYTES, _KEY, _HELLO, _LINE = "message", "bytes", "hello", "line"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A node's answer to :data:`HELLO`.

    Args:
        name: Name of the user.
        instance: Random text that differs for each state folder.
        format: Version of its records.
    """

    name: str
    instance: str
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why there is no reply.

    Args:
        line: The reason, in one line.
        is_transient: Whether a retry may succeed; False for a refusal.
    """

    line: str
    is_transient: bool


def wrap(data: bytes) -> RecordDict:
    """Put bytes into the content of a Flower message; :func:`unwrap` takes them out.

    Flower's content consists of named arrays, so the bytes become one array of type uint8.
    """
    array = Array("uint8", (len(data),), "comingle", data)
    return RecordDict({_BYTES: ArrayRecord({_KEY: array})})


def wrap_failure(line: str) -> RecordDict:
    """Return message content that holds the reason why there is no reply, which is final."""
    return RecordDict({_LINE: ConfigRecord({"line": line})})


def wrap_hello(hello: Hello) -> RecordDict:
    """Return message content that answers :data:`HELLO`."""
    return RecordDict({_HELLO: ConfigRecord({"name": hello.name, "instance": hello.instance, "format": hello.format})})


_FLOWER_ERRORS = {
    ErrorCode.NODE_UNAVAILABLE: "connection lost",
    ErrorCode.MESSAGE_UNAVAILABLE: "reply lost in transit",
}
"""Errors that Flower's server sends in place of a client's reply."""


def unwrap(message: Message) -> bytes | Failure:
    """Return the bytes in a message, or the reason why it has none.

    An error of Flower, such as a lost connection, is transient; a reason that the client has sent is final.
    """
    if message.has_error():
        error = message.error
        line = _FLOWER_ERRORS.get(error.code)
        if line is None:
            line = _one_line(str(error.reason or error.code))
        return Failure(line=line, is_transient=True)
    content = message.content
    failure_record = content.config_records.get(_LINE)  # as `wrap_failure` has written it
    if failure_record is not None:
        return Failure(line=_one_line(failure_record.get("line")), is_transient=False)
    try:
        return content.array_records[_BYTES][_KEY].data
    except KeyError:
        return Failure(line=_one_line(f"message: got {sorted(content)}; needed: {_BYTES!r}"), is_transient=False)


def unwrap_hello(message: Message) -> Hello | Failure:
    """Return the name that a node has sent in answer to :data:`HELLO`, or why it has sent none.

    The node may be faulty or hostile, so types and lengths are checked.
    """
    if message.has_error() or _LINE in message.content.config_records:  # an error of Flower, or the client's reason
        failure = unwrap(message)
        assert isinstance(failure, Failure)
        return failure
    not_a_client = Failure(line="not a client of comingle", is_transient=False)
    try:
        record = message.content.config_records[_HELLO]
        name, instance, version = record["name"], record["instance"], record["format"]
    except KeyError:
        return not_a_client
    if not isinstance(name, str) or not isinstance(instance, str) or not isinstance(version, int):
        return not_a_client
    is_too_long = len(name) > _LONGEST or len(instance) > _LONGEST
    if is_too_long or name_problem([name]):
        line = f"node name: got {name[:70]!r}; allowed: one line of up to {_LONGEST} characters"
        return Failure(line=_one_line(line), is_transient=False)
    return Hello(name=name, instance=instance, format=version)


def _one_line(text: object) -> str:
    """Return text from another machine as a short line that is safe to print in a terminal."""
    if not isinstance(text, str):
        return "no readable text"
    words = text[: 2 * _LONGEST].split()
    return printable(" ".join(words))[:_LONGEST] or "no readable text"


def request_of(message: Message) -> bytes:
    """Return the bytes of a request.

    Raises:
        MessageError: The message has no bytes.
    """
    data = unwrap(message)
    if isinstance(data, Failure):
        raise MessageError(f"request: {data.line}")
    return data


@dataclass(frozen=True, kw_only=True)
class User:
    """A user on this machine.

    Args:
        name: The user's name.
        state: Folder for private state.
        config: The user's file of settings.
    """

    name: str
    state: Path
    config: Path | None = None


def read_user(node_config: Mapping[str, object]) -> User:
    """Return the user that Flower's option ``--node-config`` describes.

    Args:
        node_config: Its values: ``name`` and ``state`` (or "client-key" and "state-dir"), or ``config``, a file with
            the keys ``name`` and ``state``.

    Raises:
        RecipeError: The name or the folder is missing, or the file cannot be read.
    """
    file, from_file = None, dict[str, object]()
    if node_config.get("config"):
        file = expand_home(str(node_config["config"]))
        from_file = _read_mapping(file)
    name = node_config.get("name") or node_config.get("client-key") or from_file.get("name")
    if not name:
        raise RecipeError('node-config: no name; give name="NAME", or config="FILE" that has \'name\'')
    state = node_config.get("state") or node_config.get("state-dir")
    if not state and file is not None and from_file.get("state"):
        state = file.parent / str(from_file["state"])  # relative to the file
    if not state:
        raise RecipeError(f"node-config: no state folder for {name}; give state=\"FOLDER\", or 'state' in its file")
    state_folder = expand_home(str(state)).absolute()
    config = None if file is None else file.absolute()
    return User(name=str(name), state=state_folder, config=config)


def instance_of(state: Path) -> str:
    """Return the random text that identifies a client when it reconnects; it is stored in the folder."""
    state.mkdir(parents=True, exist_ok=True)
    path = state / INSTANCE
    if not path.exists():
        draft = state / f".{INSTANCE}-{os.getpid()}"  # a file of this process only
        draft.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            os.link(draft, path)  # unlike a rename, does not replace a file
        except FileExistsError:  # another process has created it in the meantime
            pass
        finally:
            draft.unlink()
    return path.read_text(encoding="utf-8").strip()


def _read_mapping(config: Path) -> dict[str, object]:
    """Return the content of a YAML file with a user's settings.

    Raises:
        RecipeError: The file cannot be read, or is no mapping.
    """
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{config}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{config}: got {type(content).__name__}; allowed: a mapping with 'name' and 'state'")
    return content


_SHOWN_BYTES = 1000
"""Limit on the bytes of a refusal that are shown."""

Ask = Callable[[User, bytes, float], bytes]
"""Answers a user's request; gets the time until which the server waits for the answer, in seconds since 1970."""


def make_client_app(ask: Ask, refuse: Callable[[str], None]) -> ClientApp:
    """Return the Flower app of a client, with a function for each type of message from the server.

    Args:
        ask: Answers a request of a user. Raises a ComingleError if it cannot; its text is sent to the server.
        refuse: Called with the reason if the server refuses this node.
    """
    client_app = ClientApp()

    @client_app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        """Return the name of this node's user, or why it cannot be read."""
        try:
            user = read_user(context.node_config)
            content = wrap_hello(Hello(name=user.name, instance=instance_of(user.state)))
        except (ComingleError, OSError) as error:
            content = wrap_failure(str(error))
        return Message(content, reply_to=message)

    @client_app.query("refused")
    def refused(message: Message, context: Context) -> Message:
        """Pass on the reason why the server refuses this node, as one short line."""
        reason = request_of(message)[:_SHOWN_BYTES].decode(errors="replace")
        refuse(printable(" ".join(reason.split())))
        return Message(wrap(b""), reply_to=message)

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        """Answer a request, or send the reason why it cannot be answered."""
        deadline = time.time() + message.metadata.ttl  # not from `created_at`: the server's clock may differ
        try:
            user = read_user(context.node_config)
            answer = ask(user, request_of(message), deadline)
            content = wrap(answer)
        except (ComingleError, OSError) as error:
            content = wrap_failure(str(error))
        return Message(content, reply_to=message)

    return client_app
