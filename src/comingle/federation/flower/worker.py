"""The long-lived worker process of a client, and how short processes call it.

The worker's folder lies in the user's state folder: ``address.json`` says where it listens, and holds the key without
which it does not answer; only the user may read it. ``worker.log`` is what it prints.

It ends when the client that it works for is gone, whose process number comes with every request. It may be
killed at any moment: the answering part keeps its state on disk, and gives the same reply to the same request.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import psutil
import yaml

from comingle.federation.flower.processes import PARENT
from comingle.utils.errors import ComingleError, MessageError, RecipeError, RunError
from comingle.utils.files import locked
from comingle.utils.records import expand_home, write_text

INSTANCE = "instance"
"""File in a state folder: a random text that no other state folder has."""

REFUSAL = "refused"
"""File in a state folder: why the coordinator does not want this user."""


UNFIT = "cannot-take-part"
"""File in a state folder: why the user's own settings, data or base do not fit a federation, said by its worker."""


@dataclass(frozen=True, kw_only=True)
class User:
    """A participant on its own machine: its name, the folder for all that is private, and its file of settings."""

    name: str
    state: Path
    config: Path | None = None

    def options(self) -> list[str]:
        """As a worker's command line."""
        config = ["--config", str(self.config)] if self.config else []
        return ["--name", self.name, "--state", str(self.state), *config]


def read_user(node_config: Mapping[str, object]) -> User:
    """The user of ``--node-config 'name="ada" state="FOLDER"'`` or ``'config="ada.yaml"'``; the former go before.

    Raises:
        RecipeError: no name or no folder, or the file cannot be read.
    """
    config = expand_home(str(node_config["config"])) if node_config.get("config") else None
    from_file = _read(config) if config else {}
    name = node_config.get("name") or node_config.get("client-key") or from_file.get("name")
    if not name:
        raise RecipeError('node-config: no name; give name="NAME", or config="FILE" that has \'name\'')
    state = node_config.get("state") or node_config.get("state-dir")
    if not state and config and from_file.get("state"):
        state = config.parent / str(from_file["state"])  # as all paths in a file: beside it
    if not state:
        raise RecipeError(
            f"node-config: {name} has no folder for its state; give state=\"FOLDER\", or 'state' in its file"
        )
    return User(name=str(name), state=expand_home(str(state)).absolute(), config=config and config.absolute())


def instance_of(state: Path) -> str:
    """The random text of a state folder, made when it is first asked for."""
    state.mkdir(parents=True, exist_ok=True)
    path = state / INSTANCE
    if not path.exists():
        own = state / f".{INSTANCE}-{os.getpid()}"
        own.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            os.link(own, path)  # unlike a renaming it does not replace what another process has just made
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return path.read_text(encoding="utf-8").strip()


def _read(config: Path) -> dict[str, object]:
    try:
        read = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{config}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(read, dict):
        raise RecipeError(f"{config}: is {type(read).__name__}; allowed: a mapping with 'name' and 'state'")
    return read


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
