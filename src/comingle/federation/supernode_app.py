"""The client app for Flower's own SuperNode, which starts a process for each message."""

from __future__ import annotations

import sys

from filelock import FileLock

from comingle.federation.client import Client
from comingle.federation.flower.client_app import User, make_client_app
from comingle.federation.participant import load_participant
from comingle.methods.user_files import load_files_of_command
from comingle.utils.errors import RecipeError


def answer(user: User, request: bytes, deadline: float) -> bytes:
    """Load a user's file and state, and answer one request of the server.

    Flower's SuperNode starts a new process for each request, so nothing stays in memory between two requests.

    Args:
        user: The user, with its state folder and file.
        request: The request.
        deadline: Time until which the server waits for the answer, in seconds since 1970.

    Raises:
        RecipeError: The user's file is missing or wrong.
        PluginError: A file of methods that was passed to the command cannot be used.
    """
    if user.config is None:
        raise RecipeError(f'user {user.name!r}: no data; give a file that has it as config="FILE" to the node')
    load_files_of_command()
    own = load_participant(user.config, name=user.name, state=str(user.state)).own
    with FileLock(user.state / "message.lock"):  # The server may repeat a request while this one is answered.
        return Client(user.state, own, say=_say).handle(request, deadline)


def _say(line: str) -> None:
    print(f"comingle: {line}", file=sys.stderr, flush=True)


app = make_client_app(answer, lambda line: _say(f"refused: {line}"))
