"""Starts the process of a message quickly: forked from one that has imported Flower already.

Flower starts ``flwr-clientapp`` for each message, and that takes more than a second to import what it needs. Here a
program of that name comes first in the SuperNode's PATH, asks the process below to fork, and waits for the child. If
nobody answers, it becomes Flower's own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

PROGRAM, SOCKET = "flwr-clientapp", "socket"

_FUNCTION, *_NEEDED = "flwr_clientapp", "flwr.supernode.cli", "comingle.transports.flower.client_app"
_LOOK_SECONDS = 0.5
_ARGUMENT_BYTES = 1 << 16

_ASKING = """\
#!/bin/sh
exec "{python}" -I -S "{script}" "$@"
"""
_SCRIPT = """\
import json, os, socket, sys
try:
    asking = socket.socket(socket.AF_UNIX)
    asking.connect({address!r})
    socket.send_fds(asking, [json.dumps([os.getpid(), *sys.argv[1:]]).encode()], [1, 2])
    asking.recv(1)  # nothing is said: it ends with the child
except OSError:
    os.execv({program!r}, [{name!r}, *sys.argv[1:]])
"""


def offer() -> None:
    """Starts the process that forks, and lets what this process starts from now on find it, where forking is safe."""
    if sys.platform != "linux":
        return
    folder = Path(tempfile.mkdtemp(prefix="comingle-"))
    address = str(folder / SOCKET)
    script, program = folder / "ask.py", folder / PROGRAM
    own = str(Path(sys.executable).with_name(PROGRAM))
    script.write_text(_SCRIPT.format(address=address, program=own, name=PROGRAM), encoding="utf-8")
    program.write_text(_ASKING.format(python=sys.executable, script=script), encoding="utf-8")
    program.chmod(0o700)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    subprocess.Popen([sys.executable, "-m", __name__, str(folder), str(os.getpid())], stdin=subprocess.DEVNULL)


def serve(folder: Path, parent: int) -> None:
    """Forks a child for each program that asks, for as long as whoever has started this lives."""
    for module in _NEEDED:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / SOCKET))
        listening.listen(8)
        listening.settimeout(_LOOK_SECONDS)
        while os.getppid() == parent:
            try:
                asking, _ = listening.accept()
            except TimeoutError:
                continue
            with asking:
                if os.fork() == 0:
                    listening.close()
                    _become(asking)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _become(asking: socket.socket) -> None:
    """In the child: prints where the program that has asked does, and runs Flower's with its arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asking.settimeout(None)
    said, printing, _, _ = socket.recv_fds(asking, _ARGUMENT_BYTES, 2)
    for number, where in zip(printing, (1, 2), strict=True):
        os.dup2(number, where)
        os.close(number)
    _, *arguments = json.loads(said)
    sys.argv = [PROGRAM, *arguments]
    code = 1
    try:
        getattr(import_module(_NEEDED[0]), _FUNCTION)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
