"""The server process, supervised until the run is done.

A process that dies is restarted: the federation resumes from its run folder, and clients reconnect.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from comingle.federation.flower.processes import (
    FAILED,
    FINISHED,
    FOLDER,
    LOCAL_HOSTS,
    LOG,
    LOOPBACK,
    STATE,
    Service,
    bare_host,
    bind_free_port,
    environment,
    join_address,
    last_line,
    listens,
    read_status,
)
from comingle.training.backends.launched import interrupt_on_sigterm
from comingle.utils.errors import RecipeError, RunError

_CHECK_SECONDS = 0.2
_LISTEN_SECONDS = 300.0
"""Time limit for the start; imports alone take a minute on a busy machine."""

SERVER_APP = "comingle.federation.flower.server_app:app"


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Files for TLS: the authority's certificate, the server's certificate, and the server's key."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(kw_only=True)
class SuperLink:
    """A federation's server process (:mod:`comingle.federation.flower.fleet_server`).

    Args:
        folder: The run folder.
        say: Called with each line to show to the operator.
        host: Address to listen on.
        port: Port to listen on; 0 binds a free one now, whose socket the process inherits each time it starts.
        certificates: Files for TLS.
        keys: Files of public keys by user; if there are any, no other client is admitted.
        key_folder: Folder to whose public keys the operator may add others while the process runs; None for no such.
        run_config: Settings of the ServerApp.
        app: Import path of the ServerApp; tests use others.

    Raises:
        RecipeError: It would listen to other machines without certificates and keys.
    """

    folder: Path
    say: Callable[[str], None]
    host: str = LOOPBACK
    port: int = 0
    certificates: Certificates | None = None
    keys: Mapping[str, Path] = field(default_factory=dict)
    key_folder: Path | None = None
    run_config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    app: str = SERVER_APP
    service: Service = field(init=False)
    _socket: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Check that other machines can only connect with TLS and keys, bind a free port, and prepare the process."""
        self.host = bare_host(self.host)
        is_local = self.host in LOCAL_HOSTS
        if not is_local and not (self.certificates and self.keys):
            missing = "user keys" if self.certificates else "certificates"
            raise RecipeError(
                f"server: no {missing} for listening on {self.host}; create them with --make-certificates, or use "
                f"{LOOPBACK}"
            )
        self.folder = self.folder.absolute()
        if self.port == 0:
            self._socket, self.port = bind_free_port(self.host)
        self.service = Service(
            name="server",
            arguments=self._command,
            log=self.folder / FOLDER / "server.log",
            environment=environment(self.folder / FOLDER),
            say=self.say,
            descriptors=() if self._socket is None else (self._socket,),
        )

    def stop(self) -> None:
        """End the process and release the port."""
        self.service.stop()
        if self._socket is not None:
            os.close(self._socket)
            self._socket = None
            self.service.descriptors = ()  # a child started later must not inherit the closed socket

    @property
    def address(self) -> str:
        """The address for programs on this machine, as ``HOST:PORT``."""
        all_interfaces = {"0.0.0.0": LOOPBACK, "::": "::1"}
        host = all_interfaces.get(self.host, self.host)
        return join_address(host, self.port)

    def keep_running(self) -> None:
        """Start the server process, or restart it if it has ended, and wait until it listens; call this repeatedly.

        Raises:
            RunError: It does not start, or ends repeatedly.
        """
        was_started = self.service.keep_running()
        if not was_started:
            return
        give_up_at = time.monotonic() + _LISTEN_SECONDS
        while not listens(self.address):
            if not self.service.running:
                return  # The next call reports why.
            if time.monotonic() > give_up_at:
                reason = last_line(self.service.log)
                raise RunError(f"server: does not listen on {self.address} ({reason}); see {self.service.log}")
            time.sleep(_CHECK_SECONDS)

    def _command(self) -> list[str]:
        """Return the command that starts the process, with its options."""
        keys = {name: str(path.absolute()) for name, path in self.keys.items()}
        run_config = {"out": str(self.folder), **self.run_config}
        command = [sys.executable, "-m", "comingle.federation.flower.fleet_server"]
        command += ["--host", self.host, "--port", str(self.port), "--app", self.app]
        if self._socket is not None:
            command += ["--socket", str(self._socket)]
        if self.certificates is not None:
            command += ["--certificate", str(self.certificates.certificate.absolute())]
            command += ["--private-key", str(self.certificates.key.absolute())]
        command += ["--keys", json.dumps(keys)]
        if self.key_folder is not None:
            command += ["--key-folder", str(self.key_folder.absolute())]
        command += ["--run-config", json.dumps(run_config)]
        return command


@dataclass
class ServerWatch:
    """Supervises the server process of a run folder until the run is finished.

    Args:
        link: The server process.
        _shown_bytes: Number of bytes of the app's log that have been shown.
    """

    link: SuperLink
    _shown_bytes: int = 0

    def is_finished(self) -> bool:
        """Return whether the app has finished the run.

        Raises:
            RunError: The app has failed with an error that the operator has to fix.
        """
        status = read_status(self.link.folder)
        if status is not None and status.state == FAILED:
            raise RunError(status.line)
        return status is not None and status.state == FINISHED

    def restart_if_ended(self) -> None:
        """Start the process if it does not run.

        Raises:
            RunError: The app has failed, or the process ends repeatedly.
        """
        try:
            self.link.keep_running()
        except RunError:
            status = read_status(self.link.folder)
            if status is not None and status.state == FAILED:  # The app's own error says more.
                raise RunError(status.line) from None
            raise

    def show_new_lines(self) -> None:
        """Show the lines that the app has added to its log since the last call, without their times."""
        log = self.link.folder / FOLDER / LOG
        if not log.exists():
            return
        with log.open("rb") as file:
            file.seek(self._shown_bytes)
            new_bytes = file.read()
        end_of_last_line = new_bytes.rfind(b"\n") + 1
        complete_lines = new_bytes[:end_of_last_line]
        self._shown_bytes += len(complete_lines)
        length_of_time = len("2000-01-01 00:00:00 ")
        for line in complete_lines.decode(errors="replace").splitlines():
            self.link.say(line[length_of_time:])


def supervise(link: SuperLink, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Run the server process until the run is finished; restart it if it ends early, and show new lines of its log.

    Args:
        link: The server process.
        meanwhile: Called several times per second while the server runs, for example to restart clients; may raise.

    Raises:
        RunError: The server reports an error that the operator has to fix, or ends repeatedly.
    """
    status_of_earlier_process = link.folder / FOLDER / STATE
    status_of_earlier_process.unlink(missing_ok=True)
    log = link.folder / FOLDER / LOG
    bytes_of_earlier_processes = log.stat().st_size if log.exists() else 0  # whose lines are not shown again
    watch = ServerWatch(link, _shown_bytes=bytes_of_earlier_processes)
    try:
        with interrupt_on_sigterm():
            while True:
                watch.show_new_lines()
                if watch.is_finished():
                    break
                watch.restart_if_ended()
                meanwhile()
                time.sleep(_CHECK_SECONDS)
    finally:
        link.stop()
