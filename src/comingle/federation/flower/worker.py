"""The long-lived worker process of a client, and how short-lived processes call it.

The worker's folder is in the user's state folder. ``address.json`` has the address at which it listens and the key that
it requires; only the user can read it. ``worker.log`` is its output.

It ends when the client that it works for has ended; every request carries that client's PID. It may be killed at any
moment: request handlers keep their state on disk, and give the same reply to the same request.
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
"""File in a state folder: a random text that differs for each state folder."""

REFUSAL = "refused"
"""File in a state folder: why the server refuses this user."""


UNFIT = "cannot-take-part"
"""File in a state folder: why the user's settings, data or base do not fit a federation; written by the worker."""


@dataclass(frozen=True, kw_only=True)
class User:
    """A user on this machine.

    Args:
        name: The user's name.
        state: Folder for private state.
        config: The user's file of settings.
    """

    name: str
    state: Path
    config: Path | None = None

    def options(self) -> list[str]:
        """Return the options of a worker's command line."""
        config = ["--config", str(self.config)] if self.config else []
        return ["--name", self.name, "--state", str(self.state), *config]


def read_user(node_config: Mapping[str, object]) -> User:
    """Return the user that ``--node-config`` describes: ``name="ada" state="FOLDER"`` or ``config="ada.yaml"``.

    Values of ``name`` and ``state`` take priority over those in the file.

    Raises:
        RecipeError: The name or the folder is missing, or the file cannot be read.
    """
    config = expand_home(str(node_config["config"])) if node_config.get("config") else None
    from_file = _read(config) if config else {}
    name = node_config.get("name") or node_config.get("client-key") or from_file.get("name")
    if not name:
        raise RecipeError('node-config: no name; give name="NAME", or config="FILE" that has \'name\'')
    state = node_config.get("state") or node_config.get("state-dir")
    if not state and config and from_file.get("state"):
        state = config.parent / str(from_file["state"])  # Paths in a file are relative to it.
    if not state:
        raise RecipeError(f"node-config: no state folder for {name}; give state=\"FOLDER\", or 'state' in its file")
    return User(name=str(name), state=expand_home(str(state)).absolute(), config=config and config.absolute())


def instance_of(state: Path) -> str:
    """Return the random text of a state folder, and create it at the first call."""
    state.mkdir(parents=True, exist_ok=True)
    path = state / INSTANCE
    if not path.exists():
        own = state / f".{INSTANCE}-{os.getpid()}"
        own.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            os.link(own, path)  # Unlike a rename, it does not replace a file that another process has just created.
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
        raise RecipeError(f"{config}: got {type(read).__name__}; allowed: a mapping with 'name' and 'state'")
    return read


FOLDER, ADDRESS, LOG = "worker", "address.json", "worker.log"
DONE, REFUSED, ALIVE = b"+", b"-", b"~"
"""Frames before a reply, before a line that says why there is none, and while the worker is busy."""

ALIVE_SECONDS = 5.0
"""Interval at which a busy worker reports that it is alive."""
_SILENT_SECONDS = 60.0
"""Silence after which a worker counts as hung and is killed."""
_KILL_SECONDS = 5.0
_CALL_SECONDS = 0.05

_started: list[
    subprocess.Popen[bytes]
] = []  # Python warns of a Popen object that is garbage-collected while its process runs.


class WorkerError(ComingleError):
    """The worker ended or did not answer, through no fault of the request; a retry may succeed."""


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """Identity of a process.

    Args:
        pid: Its PID.
        began: When it started, in seconds since 1970, since PIDs are reused.
    """

    pid: int
    began: float

    def is_alive(self) -> bool:
        """Return whether this process still runs."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.began) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process."""
        return cls(pid=pid, began=psutil.Process(pid).create_time())


def call(
    state: Path, command: Sequence[str], request: bytes, *, timeout: float, owner: ProcessId | None = None
) -> bytes:
    """Return the worker's reply to a request.

    The worker may use all of ``timeout`` to start, load and work, as long as it reports that it is alive. A worker that
    hangs is killed, so that the next call starts another.

    Args:
        state: The user's state folder.
        command: Starts a worker if none runs.
        request: The request.
        timeout: Timeout in seconds.
        owner: The process with which the worker is to end; by default the one that has started the user's processes.

    Raises:
        WorkerError: The worker cannot be started, ended during the request, hung, or was too slow.
        MessageError: The worker refuses the request.
    """
    deadline = time.monotonic() + timeout
    connection = connect(state) or _start(state, command, deadline)
    with connection:
        try:
            connection.send_bytes(json.dumps(asdict(owner or client_process())).encode())
            connection.send_bytes(request)
            kind = ALIVE
            while kind == ALIVE:
                _await(connection, state, deadline, timeout)
                kind = connection.recv_bytes()
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerError(f"{state}: the worker ended during a request ({_last_line(state) or error!r})") from None
    if kind != DONE:
        raise MessageError(answer.decode(errors="replace"))
    return answer


def _await(connection: Connection, state: Path, deadline: float, timeout: float) -> None:
    """Wait until the worker sends a frame."""
    left = max(0.0, deadline - time.monotonic())
    if not connection.poll(min(left, _SILENT_SECONDS)):
        if left > _SILENT_SECONDS:
            raise _kill_hung(state)
        raise WorkerError(f"{state}: the worker did not answer within {round(timeout, 1):g} s")


def _kill_hung(state: Path) -> WorkerError:
    """Kill a worker that does not respond, and return the error to raise."""
    with suppress(OSError, ValueError, KeyError):
        worker = read_worker(state)
        until = time.monotonic() + _KILL_SECONDS
        while worker.is_alive() and time.monotonic() < until:  # It locks the folder until it has ended.
            os.kill(worker.pid, signal.SIGKILL)
            time.sleep(_CALL_SECONDS)
    return WorkerError(
        f"{state}: the worker did not respond for {_SILENT_SECONDS:g} s; it was killed and will be restarted"
    )


def client_process() -> ProcessId:
    """Return the process that has started this user's processes, which may have ended already."""
    pid = int(os.environ.get(PARENT) or os.getppid())
    try:
        return ProcessId.of(pid)
    except psutil.NoSuchProcess:
        return ProcessId(pid=pid, began=0.0)


def connect(state: Path) -> Connection | None:
    """Return a connection to the worker of a state folder; None if no worker runs.

    Raises:
        WorkerError: A worker runs but does not respond.
    """
    try:
        content = json.loads((state / FOLDER / ADDRESS).read_text(encoding="utf-8"))
        address, key = str(content["address"]), bytes.fromhex(content["key"])
    except (OSError, ValueError, KeyError):
        return None  # No worker has been started.
    found: list[Connection | None] = []

    def dial() -> None:
        try:
            found.append(Client(address, authkey=key))
        except (OSError, EOFError, AuthenticationError):
            found.append(None)  # The address is that of a killed worker.

    thread = threading.Thread(target=dial, daemon=True)  # A stopped process accepts connections but never responds.
    thread.start()
    thread.join(_SILENT_SECONDS)
    if not found:
        raise _kill_hung(state)
    return found[0]


def read_worker(state: Path) -> ProcessId:
    """Return the process of a state folder's worker.

    Raises:
        OSError: There is none.
        ValueError: The address file is damaged.
        KeyError: The address file is damaged.
    """
    return ProcessId(**json.loads((state / FOLDER / ADDRESS).read_text(encoding="utf-8"))["process"])


def _start(state: Path, command: Sequence[str], deadline: float) -> Connection:
    """Start a worker that outlives this process, and wait until it listens; if two are started at once, one remains."""
    folder = state / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
    _started.append(process)
    while time.monotonic() < deadline:  # On a busy machine, imports alone take minutes.
        ended = process.poll() is not None
        if connection := connect(state):
            return connection
        if ended and process.returncode:
            raise WorkerError(
                f"{state}: the worker failed to start ({_last_line(state) or f'code {process.returncode}'})"
            )
        time.sleep(_CALL_SECONDS)
    raise WorkerError(f"{state}: the worker is not listening yet; see {folder / LOG}")


def _last_line(state: Path) -> str:
    """Return the last line that the worker has printed."""
    try:
        lines = (state / FOLDER / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


Handle = Callable[[bytes], bytes]

_OUTLIVE_SECONDS = 10.0
"""How long a worker outlives its client, so that a restarted client finds everything loaded."""
_LOOK_SECONDS = 0.5
_BACKLOG = 8
_SHORT = "/tmp"
"""Folder of the socket if the path of the temporary folder is too long for one."""

FAMILY = "AF_PIPE" if sys.platform == "win32" else "AF_UNIX" if hasattr(socket, "AF_UNIX") else None
"""Kind of the private channel between a client and its worker; None if the system has none."""


@dataclass
class _Job:
    """A request and the queue for its answer."""

    request: bytes
    answer: queue.SimpleQueue[tuple[bytes, bytes]] = field(default_factory=queue.SimpleQueue)


@dataclass
class _OwnerWatch:
    """Ends this process when its client has ended."""

    owner: ProcessId

    def forever(self) -> None:
        """Watch the client; runs in its own thread, since a request may take long."""
        since = time.monotonic()
        while time.monotonic() - since < _OUTLIVE_SECONDS:
            if self.owner.is_alive():
                since = time.monotonic()
            time.sleep(_LOOK_SECONDS)
        print("worker: the client has ended; exiting", file=sys.stderr, flush=True)
        os._exit(0)  # Even during a request: its state is on disk.


def serve(state: Path, load: Callable[[], Handle]) -> None:
    """Answer requests until the client has ended.

    Args:
        state: The user's state folder.
        load: Returns the function that answers requests; called in this thread.

    Raises:
        RunError: This state folder has a worker already, or no socket can be opened.
    """
    folder = state / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        watch = _OwnerWatch(client_process())
        jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        listener, key = _listen()
        threading.Thread(target=_accept, args=(listener, jobs, watch), daemon=True).start()
        _publish(folder / ADDRESS, listener, key)
        threading.Thread(target=watch.forever, daemon=True).start()
        _work(jobs, load)


def _work(jobs: queue.SimpleQueue[_Job], load: Callable[[], Handle]) -> None:
    """Answer requests one by one in the main thread, to which torch's number of threads applies."""
    try:
        handle = load()
    except ComingleError as error:  # Settings are wrong. Refuse one request; the next starts another worker.
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
    """Open a Unix socket (a named pipe on Windows) and generate its key; never open a port.

    Raises:
        RunError: No such socket can be opened.
    """
    key = secrets.token_bytes(32)
    if FAMILY is None:
        raise RunError("worker: this system has neither Unix sockets nor named pipes")
    try:
        return Listener(family=FAMILY, backlog=_BACKLOG, authkey=key), key
    except OSError:  # Usually the path of the temporary folder is too long for a socket.
        try:
            folder = tempfile.mkdtemp(prefix="comingle-", dir=_SHORT)
            return Listener(f"{folder}/worker", family=FAMILY, backlog=_BACKLOG, authkey=key), key
        except OSError as error:
            where = f"{tempfile.gettempdir()} or {_SHORT}"
            raise RunError(f"worker: cannot open a socket in {where} ({error}); set TMPDIR to a short path") from None


def _publish(path: Path, listener: Listener, key: bytes) -> None:
    """Write the worker's address to a file that only the user can read."""
    found = {"address": listener.address, "key": key.hex(), "process": asdict(ProcessId.of(os.getpid()))}
    write_text(path, json.dumps(found), private=True)


def _accept(listener: Listener, jobs: queue.SimpleQueue[_Job], watch: _OwnerWatch) -> None:
    while True:
        try:
            connection = listener.accept()
        except (AuthenticationError, EOFError, OSError):
            continue  # a wrong key, or a closed connection
        threading.Thread(target=_converse, args=(connection, jobs, watch), daemon=True).start()


def _converse(connection: Connection, jobs: queue.SimpleQueue[_Job], watch: _OwnerWatch) -> None:
    """Answer one request, unless the caller has disconnected."""
    with connection:
        try:
            watch.owner = ProcessId(**json.loads(connection.recv_bytes()))
            job = _Job(connection.recv_bytes())
            jobs.put(job)
            for part in _answer(connection, job):
                connection.send_bytes(part)
        except (EOFError, OSError):
            return


def _answer(connection: Connection, job: _Job) -> tuple[bytes, bytes]:
    """Return a job's answer; meanwhile report to the caller that this process is alive."""
    while True:
        try:
            return job.answer.get(timeout=ALIVE_SECONDS)
        except queue.Empty:
            connection.send_bytes(ALIVE)


def main(load: Callable[[User], Handle], arguments: Sequence[str] | None = None) -> None:
    """Run the command line of a worker; ``load`` returns the function that answers a user's requests.

    Raises:
        SystemExit: With code 2 after an error that a user has to fix, which is printed in one line.
    """
    parser = argparse.ArgumentParser(description="Answer a federation's requests for one user.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--config", type=Path)
    user = User(**vars(parser.parse_args(arguments)))
    try:
        serve(user.state, lambda: load(user))
    except ComingleError as error:
        print(f"comingle: {error}", file=sys.stderr)
        raise SystemExit(2) from None
