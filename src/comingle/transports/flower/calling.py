"""How a short process asks the long-lived worker of a user, and starts it where there is none.

The worker's folder lies in the user's state folder: ``address.json`` says where it listens, and holds the key without
which it does not answer; only the user may read it. ``worker.log`` is what it prints.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

import psutil

from comingle.transports.flower.launch import PARENT
from comingle.utils.errors import ComingleError, MessageError

FOLDER, ADDRESS, LOG = "worker", "address.json", "worker.log"
DONE, REFUSED, ALIVE = b"+", b"-", b"~"
"""Frames before a reply, before a line that says why there is none, and while the worker is at work."""

ALIVE_SECONDS = 5.0
"""How often a worker that is at work says so."""
_SILENT_SECONDS = 60.0
"""A worker that has said nothing for so long hangs, and is killed."""
_KILL_SECONDS = 5.0
_CALL_SECONDS = 0.05

_started: list[
    subprocess.Popen[bytes]
] = []  # kept, since they outlive us: one that is forgotten while it runs is warned of


class BrokenOff(ComingleError):
    """The worker ended, or did not answer, through no fault of the request: the same again may go well."""


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """A process for whose sake a worker lives: a number, and when it began, since numbers are used again."""

    pid: int
    began: float

    def lives(self) -> bool:
        """Whether the very process still runs."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.began) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @classmethod
    def of(cls, pid: int) -> Keeper:
        """That of a process which runs."""
        return cls(pid=pid, began=psutil.Process(pid).create_time())


def call(state: Path, command: Sequence[str], request: bytes, *, timeout: float, keeper: Keeper | None = None) -> bytes:
    """Return the worker's reply to a request.

    The worker is given as much time to start, load and work as ``timeout`` allows, for as long as it shows that it
    is alive. One that hangs is killed, so that the next call starts another.

    Args:
        state: The user's state folder.
        command: Starts a worker where none runs.
        request: What to ask.
        timeout: Seconds until the reply is needed.
        keeper: The process with which the worker is to end; by default the one that has started the user's processes.

    Raises:
        BrokenOff: the worker cannot be started, ended in the middle, hung, or was too slow.
        MessageError: the worker refuses the request.
    """
    deadline = time.monotonic() + timeout
    connection = connect(state) or _start(state, command, deadline)
    with connection:
        try:
            connection.send_bytes(json.dumps(asdict(keeper or own_keeper())).encode())
            connection.send_bytes(request)
            kind = ALIVE
            while kind == ALIVE:
                _await(connection, state, deadline, timeout)
                kind = connection.recv_bytes()
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise BrokenOff(f"{state}: the worker ended in the middle ({_last_line(state) or error!r})") from None
    if kind != DONE:
        raise MessageError(answer.decode(errors="replace"))
    return answer


def _await(connection: Connection, state: Path, deadline: float, timeout: float) -> None:
    """Wait until the worker says something."""
    left = max(0.0, deadline - time.monotonic())
    if not connection.poll(min(left, _SILENT_SECONDS)):
        if left > _SILENT_SECONDS:
            raise _hung(state)
        raise BrokenOff(f"{state}: the worker has not answered within {round(timeout, 1):g} s")


def _hung(state: Path) -> BrokenOff:
    """Kill a worker that does not respond."""
    with suppress(OSError, ValueError, KeyError):
        worker = read_worker(state)
        until = time.monotonic() + _KILL_SECONDS
        while worker.lives() and time.monotonic() < until:  # it holds the folder until it is gone
            os.kill(worker.pid, signal.SIGKILL)
            time.sleep(_CALL_SECONDS)
    return BrokenOff(
        f"{state}: the worker did not respond for {_SILENT_SECONDS:g} s; it was killed, to be started again"
    )


def own_keeper() -> Keeper:
    """Return the process that has started this user's processes, which may be gone already."""
    pid = int(os.environ.get(PARENT) or os.getppid())
    try:
        return Keeper.of(pid)
    except psutil.NoSuchProcess:
        return Keeper(pid=pid, began=0.0)


def connect(state: Path) -> Connection | None:
    """Return a connection to the worker of a state folder, if one runs.

    Raises:
        BrokenOff: there is one, and it does not respond.
    """
    try:
        said = json.loads((state / FOLDER / ADDRESS).read_text(encoding="utf-8"))
        address, key = str(said["address"]), bytes.fromhex(said["key"])
    except (OSError, ValueError, KeyError):
        return None  # there is none
    found: list[Connection | None] = []

    def dial() -> None:
        try:
            found.append(Client(address, authkey=key))
        except (OSError, EOFError, AuthenticationError):
            found.append(None)  # its address is that of one which has been killed

    thread = threading.Thread(target=dial, daemon=True)  # a process that is stopped accepts, and then says nothing
    thread.start()
    thread.join(_SILENT_SECONDS)
    if not found:
        raise _hung(state)
    return found[0]


def read_worker(state: Path) -> Keeper:
    """The process of a state folder's worker; an OSError, ValueError or KeyError where there is none."""
    return Keeper(**json.loads((state / FOLDER / ADDRESS).read_text(encoding="utf-8"))["process"])


def _start(state: Path, command: Sequence[str], deadline: float) -> Connection:
    """Start a worker, which outlives us, and wait until it listens; of two that are started at once one stays."""
    folder = state / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
    _started.append(process)
    while time.monotonic() < deadline:  # on a busy machine imports alone take minutes
        ended = process.poll() is not None
        if connection := connect(state):
            return connection
        if ended and process.returncode:
            raise BrokenOff(f"{state}: the worker cannot start ({_last_line(state) or f'code {process.returncode}'})")
        time.sleep(_CALL_SECONDS)
    raise BrokenOff(f"{state}: the worker does not listen yet; see {folder / LOG}")


def _last_line(state: Path) -> str:
    """The last thing that the worker has printed."""
    try:
        lines = (state / FOLDER / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
