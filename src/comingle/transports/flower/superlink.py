"""The coordinator's side as processes: a SuperLink, and in it the app, until the app says that the run is done.

Whatever dies is started again: the app goes on from its run folder, the SuperLink begins anew and nodes come back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from comingle.errors import RecipeError, RunError
from comingle.transports.flower.fate import BROKEN, FAILED, FINISHED, FOLDER, LOG, STATE, State, read_state
from comingle.transports.flower.processes import (
    LOOPBACK,
    Service,
    command,
    ended_politely,
    environment,
    free_port,
    last_line,
    listens,
)

_LOOK_SECONDS = 0.2
_LISTEN_SECONDS = _BEGIN_SECONDS = _CALL_SECONDS = 300.0  # imports alone take a minute on a busy machine
_END_SECONDS = 5.0
_BREAKS = 5
"""So often in a row the app may break off without being given up."""
_HEALTHY_SECONDS = 120.0

PROJECT = """\
[project]
name = "comingle-federation"
version = "1.0.0"
description = "A federation of comingle."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "comingle"

[tool.flwr.app.components]
serverapp = "comingle.transports.flower.server_app:app"
clientapp = "comingle.transports.flower.client_app:app"

[tool.flwr.app.config]
federation = ""
out = ""
users = ""
"""


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """What makes connections private: files of the authority, of the server's certificate, and of its key."""

    authority: Path
    certificate: Path
    key: Path

    def options(self) -> list[str]:
        """As a SuperLink's command line has them."""
        files = ("--ssl-ca-certfile", self.authority), ("--ssl-certfile", self.certificate), ("--ssl-keyfile", self.key)
        return [word for name, path in files for word in (name, str(path.absolute()))]


@dataclass(kw_only=True)
class SuperLink:
    """A SuperLink of our own. ``keys`` are files of public keys by name: if there are any, nobody else may come in.

    Raises:
        RecipeError: it would listen to other machines without certificates, or know keys without them.
    """

    folder: Path
    say: Callable[[str], None]
    host: str = LOOPBACK
    port: int = 0
    certificates: Certificates | None = None
    keys: Mapping[str, Path] = field(default_factory=dict)
    project: Path | None = None
    poll_seconds: float = 0.2
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        if not self.certificates and (self.keys or self.host not in (LOOPBACK, "localhost", "::1")):
            what = "keys of users" if self.keys else f"listening on {self.host}"
            raise RecipeError(
                f"server: {what} without certificates; make some with --make-certificates, or use {LOOPBACK}"
            )
        self.folder = self.folder.absolute()  # programs look for relative paths elsewhere
        self.port = self.port or free_port()
        self.service = Service(
            name="SuperLink",
            arguments=lambda: command("flower-superlink", *self._options()),
            log=self.folder / FOLDER / "superlink.log",
            environment=environment(self.folder / FOLDER, poll_seconds=self.poll_seconds),
            say=self.say,
        )

    @property
    def address(self) -> str:
        """Where programs of this machine find it."""
        return f"{self.host if self.host not in ('0.0.0.0', '::') else LOOPBACK}:{self.port}"

    def tend(self) -> bool:
        """Starts it, or starts it again; whether it was started now, which ends all that it did before.

        Raises:
            RunError: it does not come up, or dies again and again.
        """
        if not self.service.tend():
            return False
        until = time.monotonic() + _LISTEN_SECONDS
        host, _, port = self.address.rpartition(":")
        while not listens(host, int(port)):
            if not self.service.running or time.monotonic() > until:
                why = last_line(self.service.log)
                raise RunError(f"SuperLink: does not listen on {self.address} ({why}); see {self.service.log}")
            time.sleep(_LOOK_SECONDS)
        self._write_home()
        for name, key in self.keys.items():
            self._flwr("supernode", "register", str(key.absolute()), "here", "--name", name)
        return True

    def run_app(self, run_config: Mapping[str, str | int | float | bool]) -> None:
        """Starts the app, with this run config.

        Raises:
            RunError: the SuperLink does not take it.
        """
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in run_config.items())
        self._flwr("run", str(self.project or self._write_project()), "here", "--run-config", settings)

    def _options(self) -> list[str]:
        secure = self.certificates.options() if self.certificates else ["--insecure"]
        known = ["--enable-supernode-auth"] if self.keys else []
        return ["--host", self.host, "--port", str(self.port), *secure, *known]

    def _write_home(self) -> None:
        """Where ``flwr`` looks for the SuperLink: in a home of this run alone."""
        home = self.folder / FOLDER / "home"
        home.mkdir(parents=True, exist_ok=True)
        secure = (
            f"root-certificates = {json.dumps(str(self.certificates.authority.absolute()))}"
            if self.certificates
            else "insecure = true"
        )
        lines = [
            "[superlink]",
            'default = "here"',
            "",
            "[superlink.here]",
            f"address = {json.dumps(self.address)}",
            secure,
        ]
        (home / "config.toml").write_text("\n".join([*lines, ""]), encoding="utf-8")

    def _write_project(self) -> Path:
        project = self.folder / FOLDER / "comingle-federation"
        project.mkdir(parents=True, exist_ok=True)
        (project / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
        return project

    def _flwr(self, *arguments: str) -> None:
        """Calls ``flwr``, whose exit code says nothing of a failure that it prints."""
        log = self.folder / FOLDER / "flwr.log"
        with log.open("ab") as file:
            done = subprocess.run(
                command("flwr", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.service.environment,
                timeout=_CALL_SECONDS,
                check=False,
            )
        if done.returncode:
            raise RunError(f"flwr {arguments[0]}: {last_line(log) or f'code {done.returncode}'}; see {log}")


@dataclass
class Watch:
    """Looks after the app of a run folder until it has finished."""

    link: SuperLink
    run_config: Mapping[str, str | int | float | bool]
    _began: float | None = None
    _breaks: int = 0
    _read: int = 0

    def look(self) -> bool:
        """Does what is to be done now; whether the run is finished.

        Raises:
            RunError: the app says that a person has to mend something, or breaks off again and again.
        """
        if self.link.tend():
            self._begin()
        self._repeat()
        state = read_state(self.link.folder)
        if state is not None and state.state == FINISHED:
            return True
        if state is not None and state.state == FAILED:
            raise RunError(state.line)
        if self._died(state):
            self._again(state)
        return False

    def _begin(self) -> None:
        (self.link.folder / FOLDER / STATE).unlink(missing_ok=True)  # it tells of another process
        self.link.run_app(self.run_config)
        self._began = time.monotonic()

    def _died(self, state: State | None) -> bool:
        assert self._began is not None
        if state is None:
            return time.monotonic() - self._began > _BEGIN_SECONDS
        return not state.alive

    def _again(self, state: State | None) -> None:
        assert self._began is not None
        self._breaks = 1 if time.monotonic() - self._began > _HEALTHY_SECONDS else self._breaks + 1
        why = state.line if state is not None and state.state == BROKEN else "was killed" if state else "does not begin"
        if self._breaks >= _BREAKS:
            raise RunError(f"{self.link.folder}: the coordinator broke off {self._breaks} times ({why})")
        self.link.say(f"coordinator: {why}; it goes on from its folder")
        self._begin()

    def _repeat(self) -> None:
        """Says what the app has said."""
        log = self.link.folder / FOLDER / LOG
        if not log.exists():
            return
        with log.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self.link.say(line[len("2000-01-01 00:00:00 ") :])


@contextmanager
def running(link: SuperLink) -> Iterator[SuperLink]:
    """A SuperLink that listens for as long as this is entered."""
    try:
        link.tend()
        yield link
    finally:
        link.service.stop()


def coordinate(
    link: SuperLink,
    run_config: Mapping[str, str | int | float | bool],
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Runs the app to its end; ``beside`` is called again and again meanwhile.

    Raises:
        RunError: as :meth:`Watch.look`.
    """
    log = link.folder / FOLDER / LOG
    # What an earlier process of this folder has said was said then.
    watch = Watch(link, {"out": str(link.folder), **run_config}, _read=log.stat().st_size if log.exists() else 0)
    try:
        with ended_politely():
            while not watch.look():
                beside()
                time.sleep(_LOOK_SECONDS)
    finally:
        link.service.stop()
        _see_it_end(link.folder)


def _see_it_end(folder: Path) -> None:
    """The app ends with its SuperLink, later than that; for as long as it runs nobody else may write to its folder."""
    state, began = read_state(folder), time.monotonic()
    while state is not None and state.process.lives():
        late = time.monotonic() - began > _END_SECONDS
        with suppress(ProcessLookupError):
            os.kill(state.process.pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(_LOOK_SECONDS)
