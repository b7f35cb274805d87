"""The long-lived process of a user: what answers is loaded once, and asked as often as messages come.

It ends when the client that it works for is gone, whose process number comes with every request. It may be
killed at any moment: the answering part keeps its state on disk, and gives the same reply to the same request.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from comingle.transports.flower.calling import ADDRESS, ALIVE, ALIVE_SECONDS, DONE, FOLDER, REFUSED, Keeper, own_keeper
from comingle.transports.flower.users import User
from comingle.utils.errors import ComingleError, RunError
from comingle.utils.files import locked
from comingle.utils.records import write_text

Handle = Callable[[bytes], bytes]

_PATIENCE_SECONDS = 10.0
"""How long it stays without anybody to work for: a client that is started again finds what is loaded."""
_LOOK_SECONDS = 0.5
_BACKLOG = 8
_SHORT = "/tmp"
"""Where the socket lies when the path of the temporary folder is too long for one."""

FAMILY = "AF_PIPE" if sys.platform == "win32" else "AF_UNIX" if hasattr(socket, "AF_UNIX") else None
"""Kind of the private channel between a client and its worker; None where there is none but a port."""


@dataclass
class _Job:
    """A request, and where its answer goes."""

    request: bytes
    answer: queue.SimpleQueue[tuple[bytes, bytes]] = field(default_factory=queue.SimpleQueue)


@dataclass
class _Watch:
    """For whom the worker works; ends the process when nobody is left."""

    keeper: Keeper

    def forever(self) -> None:
        """Runs beside the work, which may take long."""
        since = time.monotonic()
        while time.monotonic() - since < _PATIENCE_SECONDS:
            if self.keeper.lives():
                since = time.monotonic()
            time.sleep(_LOOK_SECONDS)
        print("worker: the client that it worked for has ended", file=sys.stderr, flush=True)
        os._exit(0)  # in the middle of the work as well: nothing is lost by that


def serve(state: Path, load: Callable[[], Handle]) -> None:
    """Answers requests for as long as somebody is there who sends them; ``load`` makes what answers, in this thread.

    Raises:
        RunError: this state folder has a worker already, or no socket can be opened.
    """
    folder = state / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        watch = _Watch(own_keeper())
        jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        listener, key = _listen()
        threading.Thread(target=_accept, args=(listener, jobs, watch), daemon=True).start()
        _publish(folder / ADDRESS, listener, key)
        threading.Thread(target=watch.forever, daemon=True).start()
        _work(jobs, load)


def _work(jobs: queue.SimpleQueue[_Job], load: Callable[[], Handle]) -> None:
    """One request after the other, in the main thread, to which torch's number of threads belongs."""
    try:
        handle = load()
    except ComingleError as error:  # the settings are wrong: said to who asks; the next message starts another worker
        jobs.get().answer.put((REFUSED, str(error).encode()))
        time.sleep(_LOOK_SECONDS)
        raise
    while True:
        job = jobs.get()
        try:
            job.answer.put((DONE, handle(job.request)))
        except (ComingleError, OSError) as error:
            job.answer.put((REFUSED, str(error).encode()))


def _listen() -> tuple[Listener, bytes]:
    """Open a socket of the file system (a named pipe on Windows), and draw its key; never open a port.

    Raises:
        RunError: No such socket can be opened.
    """
    key = secrets.token_bytes(32)
    if FAMILY is None:
        raise RunError("worker: this system has neither sockets in the file system nor named pipes")
    try:
        return Listener(family=FAMILY, backlog=_BACKLOG, authkey=key), key
    except OSError:  # as a rule since the path of the temporary folder is too long for a socket
        try:
            folder = tempfile.mkdtemp(prefix="comingle-", dir=_SHORT)
            return Listener(f"{folder}/worker", family=FAMILY, backlog=_BACKLOG, authkey=key), key
        except OSError as error:
            where = f"{tempfile.gettempdir()} or {_SHORT}"
            raise RunError(f"worker: cannot open a socket in {where} ({error}); set TMPDIR to a short path") from None


def _publish(path: Path, listener: Listener, key: bytes) -> None:
    """Says where it listens, to the user alone."""
    found = {"address": listener.address, "key": key.hex(), "process": asdict(Keeper.of(os.getpid()))}
    write_text(path, json.dumps(found), private=True)


def _accept(listener: Listener, jobs: queue.SimpleQueue[_Job], watch: _Watch) -> None:
    while True:
        try:
            connection = listener.accept()
        except (AuthenticationError, EOFError, OSError):
            continue  # somebody without the key, or who went away
        threading.Thread(target=_converse, args=(connection, jobs, watch), daemon=True).start()


def _converse(connection: Connection, jobs: queue.SimpleQueue[_Job], watch: _Watch) -> None:
    """One request and its answer; who has gone away in the meantime gets none."""
    with connection:
        try:
            watch.keeper = Keeper(**json.loads(connection.recv_bytes()))
            job = _Job(connection.recv_bytes())
            jobs.put(job)
            for part in _answer(connection, job):
                connection.send_bytes(part)
        except (EOFError, OSError):
            return


def _answer(connection: Connection, job: _Job) -> tuple[bytes, bytes]:
    """Return a job's answer; meanwhile tell the caller that this process is alive."""
    while True:
        try:
            return job.answer.get(timeout=ALIVE_SECONDS)
        except queue.Empty:
            connection.send_bytes(ALIVE)


def main(load: Callable[[User], Handle], arguments: Sequence[str] | None = None) -> None:
    """The command line of a worker: a user's options; ``load`` makes what answers that user's requests.

    Raises:
        SystemExit: with code 2 after a mistake that a person can correct, said in one line.
    """
    parser = argparse.ArgumentParser(description="Answers the requests of a federation for one user.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--config", type=Path)
    user = User(**vars(parser.parse_args(arguments)))
    try:
        serve(user.state, lambda: load(user))
    except ComingleError as error:
        print(f"comingle: {error}", file=sys.stderr)
        raise SystemExit(2) from None
