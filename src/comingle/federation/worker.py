"""The process that carries out a user's tasks: ``python -m comingle.federation.worker --name --state --config``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from comingle.federation.client import Client
from comingle.federation.files import load_participant
from comingle.federation.flower.worker import UNFIT, User, main
from comingle.methods.user_files import load_files_of_command
from comingle.utils.errors import PluginError, RecipeError
from comingle.utils.records import write_text


def load(user: User) -> Callable[[bytes], bytes]:
    """Return the function that answers a user's tasks.

    Raises:
        RecipeError: The user's file is missing or wrong.
        PluginError: A file of methods that was passed to the command cannot be used.
    """
    try:
        if user.config is None:
            raise RecipeError(f'user {user.name!r}: no data; give a file that has it as config="FILE" to the node')
        load_files_of_command()
        participant = load_participant(user.config, name=user.name, state=str(user.state))
    except (RecipeError, PluginError) as error:
        _refuse(user, str(error))
        raise
    return Client(user.state, participant.own, say=_say, refuse=lambda line: _refuse(user, line)).handle


def _refuse(user: User, line: str) -> None:
    """Write the reason for the client process, which then ends."""
    write_text(user.state / UNFIT, line + "\n", private=True)


def _say(line: str) -> None:
    print(f"comingle: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(load)
