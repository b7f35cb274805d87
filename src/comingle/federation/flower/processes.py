"""Child processes of a federation.

Flower's code in them sends no telemetry and does not check for updates. They end when their parent does, even if it is
killed.

A ServerApp writes its status into the run folder, since Flower discards the app's output and reports late that it has
died: ``app.json`` has the app's process and its state; ``app.log`` has the lines for the operator.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from comingle.utils.errors import RunError
from comingle.utils.records import write_text
from comingle.utils.terminal import printable

PARENT = "COMINGLE_PARENT"
"""Environment variable with the PID of the process with which this one ends; that process may have ended already."""

_CHECK_SECONDS, _GRACE_SECONDS = 0.3, 8.0


def end_with_parent() -> None:
    """End this process when its parent ends, even if that is killed: with SIGTERM, and 8 s later with SIGKILL."""
    # The parent passes its PID in the environment, as it may have ended before this process asks for it.
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:  # A process whose parent has ended gets another parent.
            time.sleep(_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """Identity of a process: its PID and when it started.

    Args:
        pid: Its PID.
        began: When it started, in seconds since 1970, since PIDs are reused.
    """

    pid: int
    began: float

    def is_alive(self) -> bool:
        """Return whether this process still runs, and no other one has got its PID since."""
        try:
            process = psutil.Process(self.pid)
            # Start times are rounded, and no PID is used again within a second.
            has_same_start = abs(process.create_time() - self.began) < 1
            return has_same_start and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process."""
        return cls(pid=pid, began=psutil.Process(pid).create_time())


def load_app(path: str) -> Any:
    """Return the object of an import path, ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


LOOPBACK = "127.0.0.1"
"""Address that only programs on this machine can reach."""

LOCAL_HOSTS = (LOOPBACK, "localhost", "::1")

_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 1.0, 20.0
_HEALTHY_SECONDS = 120.0
"""Lifetime after which a child counts as recovered, so that its number of restarts is reset."""
_MAX_STARTS = 10

REFUSED = 2
"""Exit status of a child after an error that a user or operator has to fix."""

_LINE_PREFIX = "comingle: "
"""Prefix of a child's lines that are shown to the user."""

_END_SECONDS = 10.0


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a child process that runs Flower's code.

    It has its own home for Flower below ``folder``, neither telemetry nor update checks, and no proxy for this machine.
    """
    hosts_without_proxy: list[str] = list(LOCAL_HOSTS)
    inherited = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if inherited:
        hosts_without_proxy.insert(0, inherited)
    no_proxy = ",".join(hosts_without_proxy)
    return {
        **os.environ,
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        PARENT: str(os.getpid()),  # The child ends if this process ends.
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # Otherwise -m imports from the current folder first, which others may write to.
    }


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; brackets of an IPv6 host are removed."""
    host, _, port = address.rpartition(":")
    return bare_host(host), int(port)


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 host."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bare_host(host: str) -> str:
    """Return a host without the brackets of an IPv6 address."""
    return host.strip("[]")


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))  # 0: any free port
        return probe.getsockname()[1]


def bind_free_port(host: str) -> tuple[int, int]:
    """Bind a socket to a free port, for a child process that will listen on it.

    The socket does not listen yet, but no other program can take the port.

    Returns:
        The socket's file descriptor, which the caller closes, and the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:
        bound.bind((host, 0))  # 0: any free port
        port = bound.getsockname()[1]
        descriptor = bound.detach()  # so that the end of the block does not close it
        return descriptor, port


def listens(address: str) -> bool:
    """Return whether a connection to ``HOST:PORT`` is accepted."""
    try:
        with socket.create_connection(split_address(address), timeout=1.0):
            return True
    except OSError:
        return False


@dataclass
class Service:
    """A child process that runs until stopped; :meth:`keep_running` restarts it with increasing pauses, up to a limit.

    A child that ends with status :data:`REFUSED` has printed an error that a user has to fix, and is not restarted.

    Args:
        name: Name of the child in lines for the user, such as "server".
        arguments: Returns the command; called at each start.
        log: File to which the child's output is appended.
        environment: The child's environment variables.
        say: Called with each line to show to the user.
        descriptors: File descriptors that the child inherits.
        starts: Number of starts; set to 1 once the child has run for two minutes.
    """

    name: str
    arguments: Callable[[], Sequence[str]]
    log: Path
    environment: Mapping[str, str]
    say: Callable[[str], None]
    descriptors: Sequence[int] = ()
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _started: float = 0.0
    _ended: float = 0.0

    @property
    def running(self) -> bool:
        """True if the child runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The child's PID."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the child in a new session, so that an interrupt from the keyboard reaches only this process."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.arguments(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                pass_fds=self.descriptors,
            )
        self._started = time.monotonic()
        self.starts += 1

    def keep_running(self) -> bool:
        """Start the child, or restart it if it has ended and the pause is over; call this repeatedly.

        The pause doubles with each start, up to 20 s.

        Returns:
            Whether it was started.

        Raises:
            RunError: It has ended too often, or with an error that a user has to fix.
        """
        now = time.monotonic()
        if self.running:
            if now - self._started > _HEALTHY_SECONDS:
                self.starts = 1  # forgets earlier failures: the next pause is the shortest again
            return False
        if self._process is not None:
            self._record_exit(now)
        if self.starts > 0:
            pause = min(_FIRST_WAIT_SECONDS * 2 ** (self.starts - 1), _LAST_WAIT_SECONDS)
            if now - self._ended < pause:
                return False
        self.start()
        return True

    def stop(self) -> None:
        """End the child with SIGTERM, then with SIGKILL."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _record_exit(self, now: float) -> None:
        """Record when the child has ended, and show why, for example ``"server: killed by signal 9; restarting"``.

        Args:
            now: Time on the monotonic clock.

        Raises:
            RunError: The child must not be restarted: it has ended too often, or with an error that a user has to fix.
        """
        assert self._process is not None
        exit_code = self._process.returncode
        self._process = None
        self._ended = now
        if exit_code < 0:
            reason = f"killed by signal {-exit_code}"
        else:
            reason = last_line(self.log) or f"exited with code {exit_code}"
        if exit_code == REFUSED:
            # The last line is an error for the user: "comingle: ...".
            raise RunError(f"{self.name}: {reason.removeprefix(_LINE_PREFIX)}")
        if self.starts >= _MAX_STARTS:
            raise RunError(f"{self.name}: ended {self.starts} times, giving up ({reason}); see {self.log}")
        self.say(f"{self.name}: {reason}; restarting")


def last_line(log: Path) -> str:
    """Return the last line of a log that is neither information nor a warning, without Flower's colours and borders.

    It usually says why a process has ended. Empty if there is no such line or no log.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        text = " ".join(_without_colours(line).split()).strip("│╭╮╰╯─ ")
        if text and not text.startswith(_UNINFORMATIVE):
            return text
    return ""


_UNINFORMATIVE = "INFO", "WARNING", "For more information"


def _without_colours(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


# ---------------------------------------------------------------- status of a ServerApp

FOLDER, STATE, LOG = "flower", "app.json", "app.log"

RUNNING, FINISHED, FAILED, BROKEN = "running", "finished", "failed", "broken"
"""``failed`` is a mistake of the operator, which a restart does not fix; ``broken`` is any other failure."""


@dataclass(frozen=True, kw_only=True)
class AppStatus:
    """Content of ``app.json``.

    Args:
        process: The process in which the app runs or has run.
        state: "running", "finished", "failed" or "broken".
        line: Why the app has failed, for the operator; empty if it has not.
    """

    process: ProcessId
    state: str = RUNNING
    line: str = ""

    @property
    def alive(self) -> bool:
        """True if the app is running."""
        return self.state == RUNNING and self.process.is_alive()


def read_status(folder: Path) -> AppStatus | None:
    """Return the status of a run folder's app; None before its first start, or if the file is damaged."""
    try:
        content = json.loads((folder / FOLDER / STATE).read_text(encoding="utf-8"))
        content["process"] = ProcessId(**content["process"])
        return AppStatus(**content)
    except (OSError, ValueError, TypeError, KeyError):
        return None


class StatusWriter:
    """Writes the status of the app in this process, such as running or failed, into the run folder."""

    def __init__(self, folder: Path) -> None:
        """Create the writer of this process's status for a run folder, without writing yet."""
        self._folder = folder / FOLDER
        self._process = ProcessId.of(os.getpid())

    @classmethod
    def begin(cls, folder: Path) -> StatusWriter:
        """Record that the app has started; return the writer that records how it ends."""
        writer = cls(folder)
        writer._folder.mkdir(parents=True, exist_ok=True)
        writer._write(RUNNING)
        return writer

    def say(self, line: str) -> None:
        """Write one line for the operator, with the time before it."""
        words = line.split()
        with (self._folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%F %T')} {printable(' '.join(words))}\n")

    def finish(self) -> None:
        """Record that all rounds are done."""
        self._write(FINISHED)

    def fail(self, line: str) -> None:
        """Record that the app has failed because of a mistake of the operator, so that a restart would not help.

        Args:
            line: What is wrong, in one line.
        """
        self.say(line)
        self._write(FAILED, line)

    def fail_unexpectedly(self, line: str) -> None:
        """Record that the app has failed without a mistake of the operator, so that a restart may succeed.

        Args:
            line: What has happened, in one line.
        """
        self.say(line)
        self._write(BROKEN, line)

    def _write(self, state: str, line: str = "") -> None:
        """Write the state of the app, and a line for the operator, to the run folder."""
        status = AppStatus(process=self._process, state=state, line=line)
        write_text(self._folder / STATE, json.dumps(asdict(status)))
