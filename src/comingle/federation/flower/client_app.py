"""The Flower app of a client and its bundle (FAB).

A SuperLink hands the bundle of a run to every node, and Flower's own SuperNode installs and imports what is in it.
Clients of comingle never do: they compare the digest of the run's bundle with :data:`DIGEST`, which is computed from
what is installed here, and refuse every other run.

An ordinary Flower ``ClientApp``, and a quick one: it imports neither torch nor anything that does.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from collections.abc import Callable

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from comingle.federation.flower.envelope import Failure, Hello, request_of, wrap, wrap_failure, wrap_hello
from comingle.federation.flower.worker import REFUSAL, BrokenOff, User, call, instance_of, read_user
from comingle.utils.errors import ComingleError
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


WORKER = (sys.executable, "-m", "comingle.federation.worker")
"""Command that starts a user's worker; the user's options come after it."""

_LONGEST = 1000
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
        line = printable(" ".join(request_of(message)[:_LONGEST].decode(errors="replace").split()))
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
