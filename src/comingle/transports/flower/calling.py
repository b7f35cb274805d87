"""How a short process asks the long-lived worker of a user, and starts it where there is none.

The worker's folder lies in the user's state folder: ``address.json`` says where it listens, and holds the key without
which it does not answer; only the user may read it. ``worker.log`` is what it prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

import psutil

from comingle.errors import ComingleError, MessageError

FOLDER, ADDRESS, LOG = "worker", "address.json", "worker.log"
DONE, REFUSED = b"+", b"-"
"""How the frame before a reply, or before a line that says why there is none, begins."""

_START_SECONDS = 60.0
_LOOK_SECONDS = 0.05

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
    """The worker's reply to a request.

    Raises:
        BrokenOff: the worker cannot be started, ended in the middle, or was too slow.
        MessageError: the worker refuses the request.
    """
    deadline = time.monotonic() + timeout
    connection = connect(state) or _start(state, command)
    with connection:
        try:
            connection.send_bytes(json.dumps(asdict(keeper or Keeper.of(os.getppid()))).encode())
            connection.send_bytes(request)
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise BrokenOff(f"{state}: the worker has not answered within {round(timeout, 1):g} s")
            kind, answer = connection.recv_bytes(), connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise BrokenOff(f"{state}: the worker ended in the middle ({_last_line(state) or error!r})") from None
    if kind != DONE:
        raise MessageError(answer.decode(errors="replace"))
    return answer


def connect(state: Path) -> Connection | None:
    """A connection to the worker of a state folder, if one runs."""
    try:
        said = json.loads((state / FOLDER / ADDRESS).read_text(encoding="utf-8"))
        address = tuple(said["address"]) if isinstance(said["address"], list) else said["address"]
        return Client(address, authkey=bytes.fromhex(said["key"]))
    except (OSError, ValueError, KeyError, EOFError, AuthenticationError):
        return None  # there is none, or its address is that of one which has been killed


def read_worker(state: Path) -> Keeper:
    """The process of a state folder's worker; an OSError, ValueError or KeyError where there is none."""
    return Keeper(**json.loads((state / FOLDER / ADDRESS).read_text(encoding="utf-8"))["process"])


def _start(state: Path, command: Sequence[str]) -> Connection:
    """Starts a worker, which outlives us, and waits until it listens; of two that are started at once one stays."""
    folder = state / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
    _started.append(process)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if connection := connect(state):
            return connection
        if ended and process.returncode:
            raise BrokenOff(f"{state}: the worker cannot start ({_last_line(state) or f'code {process.returncode}'})")
        time.sleep(_LOOK_SECONDS)
    raise BrokenOff(f"{state}: the worker does not listen after {_START_SECONDS:g} s; see {folder / LOG}")


def _last_line(state: Path) -> str:
    """The last thing that the worker has printed."""
    try:
        lines = (state / FOLDER / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
