"""The app that answers a user's messages: it passes each on to the long-lived worker, and its reply back.

An ordinary Flower ``ClientApp``, and a quick one: it imports neither torch nor anything that does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from comingle.transports.flower.calling import BrokenOff, call
from comingle.transports.flower.envelope import Failure, Hello, request_of, wrap, wrap_failure, wrap_hello
from comingle.transports.flower.users import REFUSAL, User, instance_of, read_user
from comingle.utils.errors import ComingleError
from comingle.utils.records import write_text
from comingle.utils.terminal import printable

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
