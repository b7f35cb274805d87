"""Starts one of Flower's programs in this process, and ends it when the process that has started it is gone.

``python -m comingle.transports.flower.launch PROGRAM ARGUMENTS``, PROGRAM being one of :data:`PROGRAMS`. Flower's
programs run without this as well; then they outlive whoever has started them, and a SuperNode looks for messages
every three seconds, which is most of what a short round costs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib import import_module

from comingle.transports.flower import quick, recovery
from comingle.transports.flower.calling import PARENT

PROGRAMS = {
    "flower-superlink": ("flwr.superlink.cli", "flower_superlink"),
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
    "flwr": ("flwr.cli.app", "app"),
}

POLL = "COMINGLE_POLL_SECONDS"
"""Environment variable: how often a SuperNode looks for messages, where that is to be more often than Flower has it."""

_WAITS_IN = "flwr.supernode.start_client_internal"
_LOOK_SECONDS, _GRACE_SECONDS = 0.3, 8.0


class _Hurried:
    """The module ``time`` for Flower's loop, with shorter sleeps."""

    def __init__(self, longest: float) -> None:
        self._longest = longest

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self._longest))

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def hurry(longest: float) -> bool:
    """Makes this process's SuperNode look for messages that often; False where Flower has nothing to be hurried."""
    module = import_module(_WAITS_IN)
    if getattr(module, "time", None) is not time:
        return False  # another version of Flower: it waits as it likes
    setattr(module, "time", _Hurried(longest))  # noqa: B010 -- the module has no such attribute for a type checker
    return True


def end_with_parent() -> None:
    """Ends this process, politely first, when its parent is gone, however that ended."""
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Runs the program that the command line names."""
    program = sys.argv[1]
    module, name = PROGRAMS[program]
    end_with_parent()
    if program == "flower-supernode":
        if os.environ.get(POLL):
            hurry(float(os.environ[POLL]))
            quick.offer()
        recovery.install(sys.argv[sys.argv.index("--superlink") + 1])
    sys.argv = [program, *sys.argv[2:]]
    try:
        getattr(import_module(module), name)()
    finally:
        if program == "flower-supernode":
            recovery.end_soon()


if __name__ == "__main__":
    main()
