"""A client whose answers tell which process gives them; some requests make it slow, refuse, or die."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from comingle.federation.flower.client import CallQueue, FleetClient, participate
from comingle.federation.flower.client_app import User
from comingle.federation.flower.fleet_client import Server
from comingle.federation.flower.processes import end_with_parent
from comingle.utils.errors import ComingleError, MessageError, RunError


def answer(user: User, request: bytes) -> bytes:
    command, _, rest = request.partition(b" ")
    if command == b"sleep":
        time.sleep(float(rest))
    elif command == b"refuse":
        raise MessageError("refused, as was wished")
    elif command == b"die-once" and not (user.state / "died").exists():
        (user.state / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    elif command == b"echo":
        return rest
    return f"{user.name} {os.getpid()}".encode()


def say(line: str) -> None:
    print(f"comingle: {line}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--authority", type=Path)
    parser.add_argument("--key", type=Path)
    options = parser.parse_args()
    end_with_parent()
    user, calls = User(name=options.name, state=options.state), CallQueue()
    server = Server(address=options.server, authority=options.authority, key=options.key)

    def until() -> bool:
        if client.refusal:
            raise RunError(client.refusal)
        return False

    try:
        client = FleetClient(user, server, lambda: lambda request, deadline: answer(user, request), calls, say)
        participate([client], calls, until)
    except ComingleError as error:
        say(str(error))
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
