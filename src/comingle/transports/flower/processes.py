"""Flower's programs as children of ours: each with its own folder and log, started again when it dies.

None of them phones home, none looks for another version of itself, and all end with us, also when we are killed.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from comingle.errors import RunError
from comingle.transports.flower.calling import PARENT
from comingle.transports.flower.launch import POLL

LOOPBACK = "127.0.0.1"

_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 1.0, 20.0
_HEALTHY_SECONDS = 120.0
"""A child that has lived so long has recovered: its next death is the first again."""
_STARTS = 10
_END_SECONDS = 10.0


def environment(folder: Path, *, poll_seconds: float) -> dict[str, str]:
    """For every program of Flower's: a home of its own, nothing sent to anybody, short waits."""
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),  # they start each other by name
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": f"{min(poll_seconds, 1.0):g}",
        POLL: f"{poll_seconds:g}",
        PARENT: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }


def command(program: str, *arguments: str) -> list[str]:
    """One of Flower's programs, which ends with us."""
    return [sys.executable, "-m", "comingle.transports.flower.launch", program, *arguments]


@contextmanager
def ended_politely() -> Iterator[None]:
    """A SIGTERM, as of a container that is stopped, is an interruption: children are ended, and nothing is left."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as looking:
        looking.bind((LOOPBACK, 0))
        return looking.getsockname()[1]


def listens(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a child ended, in one line, and for how many seconds it is worth while to start it again."""

    line: str
    patience: float


@dataclass
class Service:
    """A child that is to run until it is stopped; :meth:`tend` starts it again, later and later, but not for ever.

    ``diagnose`` may know from what the child has printed why it ended.
    """

    name: str
    arguments: Callable[[], Sequence[str]]
    log: Path
    environment: Mapping[str, str]
    say: Callable[[str], None]
    diagnose: Callable[[str], Diagnosis | None] = lambda printed: None
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _started: float = 0.0
    _died: float = 0.0
    _begins: int = 0  # where in its log the child's own lines begin
    _ill: tuple[float, str] | None = None  # since when it ends for the reason of that line

    @property
    def running(self) -> bool:
        """Whether the child lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The child's number."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the child, in a session of its own: an interruption at the keyboard is ours to pass on."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._begins = log.tell()
            self._process = subprocess.Popen(
                self.arguments(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self.starts += 1

    def tend(self) -> bool:
        """Starts the child again when it has died and the time has come; whether it was started now.

        Raises:
            RunError: it has died too often.
        """
        if self.running:
            if time.monotonic() - self._started > _HEALTHY_SECONDS:
                self.starts, self._ill = 1, None
            return False
        now = time.monotonic()
        if self._process is not None:
            self._bury(now)
        if self.starts and now - self._died < min(_FIRST_WAIT_SECONDS * 2 ** (self.starts - 1), _LAST_WAIT_SECONDS):
            return False
        self.start()
        return True

    def stop(self) -> None:
        """Ends the child, politely at first."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _bury(self, now: float) -> None:
        assert self._process is not None
        code, self._process, self._died = self._process.returncode, None, now
        if found := self.diagnose(self._printed()):
            self._despair(found, now)
            return
        why = f"was killed by signal {-code}" if code < 0 else last_line(self.log) or f"ended with code {code}"
        if self.starts >= _STARTS:
            raise RunError(f"{self.name}: ended {self.starts} times, and is not started again ({why}); see {self.log}")
        self.say(f"{self.name}: {why}; starting it again")

    def _despair(self, found: Diagnosis, now: float) -> None:
        """Says once why the child ends, and gives up when that has lasted too long."""
        if self._ill is None or self._ill[1] != found.line:
            self._ill = self._started, found.line
            if found.patience:
                limit = f" for {found.patience:g} s" if found.patience < inf else ""
                self.say(f"{self.name}: {found.line}; trying again{limit}")
        if now - self._ill[0] >= found.patience:
            raise RunError(f"{self.name}: {found.line}")

    def _printed(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._begins)
            return log.read().decode(errors="replace")


def last_line(log: Path) -> str:
    """Return the last line of a log that is neither information nor a warning, without Flower's colours and frames."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    plain = [" ".join(_plain(line).split()).strip("│╭╮╰╯─ ") for line in lines]
    return next((line for line in reversed(plain) if line and not line.startswith(_SAYS_NOTHING)), "")


_SAYS_NOTHING = "INFO", "WARNING", "For more information"


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)
