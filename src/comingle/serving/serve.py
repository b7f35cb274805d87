"""The server's process: one engine, one application, one address."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import uvicorn

from comingle.models.personal import PersonalModel
from comingle.serving.api import make_app
from comingle.serving.engine import Engine
from comingle.serving.keys import Keys
from comingle.serving.limits import Limits
from comingle.utils.errors import RunError


def listen(host: str, port: int) -> socket.socket:
    """A socket on an address; taken before a model is loaded, so that a port in use is said at once.

    Raises:
        RunError: somebody else has it, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=2048)
    except OSError as error:
        raise RunError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None


def url_of(place: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = place.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    people: Mapping[str, PersonalModel],
    place: socket.socket,
    *,
    keys: Mapping[str, str] | None,
    limits: Limits,
    answers: bool,
    ready: Callable[[str], None],
) -> None:
    """Answer until the process is told to end; ``ready`` is called with the address."""
    app = make_app(Engine(people, rows=limits.rows), Keys(people, keys), limits, answers=answers)
    config = uvicorn.Config(app, log_level="warning", ws="none", access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    ready(url_of(place))
    server.run(sockets=[place])
