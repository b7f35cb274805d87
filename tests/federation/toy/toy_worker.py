"""A worker whose answers tell which process gives them; some requests make it slow, refuse, or die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from comingle.federation.flower.worker import User, main
from comingle.utils.errors import MessageError


def load(user: User) -> Callable[[bytes], bytes]:
    if (user.state / "broken").exists():
        raise MessageError(f"{user.name}: broken settings")

    def handle(request: bytes) -> bytes:
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

    return handle


if __name__ == "__main__":
    main(load)
