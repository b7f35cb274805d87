"""The processes of a client: the Flower client, which is restarted when it dies, and its worker."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from comingle.federation.flower.app_status import FOLDER
from comingle.federation.flower.processes import LOCAL_HOSTS, Service, environment, interrupt_on_sigterm, split_address
from comingle.federation.flower.worker import REFUSAL, User, read_worker
from comingle.utils.errors import RecipeError, RunError

LOG = "client.log"
CLIENT_APP = "comingle.federation.flower.client_app:app"


@dataclass(kw_only=True)
class SuperNode:
    """A user's client process (:mod:`comingle.federation.flower.fleet_client`).

    Args:
        user: The user.
        server: ``HOST:PORT``.
        say: Called with each line to show to the user.
        authority: Certificate of the authority that has signed the server's.
        key: The user's private key.
        poll_seconds: Interval at which to poll for messages.
        app: Import path of the ClientApp; tests use others.

    Raises:
        RecipeError: The server is on another machine and there is no authority.
    """

    user: User
    server: str
    say: Callable[[str], None]
    authority: Path | None = None
    key: Path | None = None
    poll_seconds: float = 0.2
    app: str = CLIENT_APP
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        if not self.authority and split_address(self.server)[0] not in LOCAL_HOSTS:
            raise RecipeError(
                f"{self.user.name}: no certificates for the server {self.server}; give its ca.pem with "
                "--certificates FILE"
            )
        self.user.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.service = Service(
            name=f"{self.user.name}'s client",
            arguments=self._command,
            log=self.user.state / FOLDER / LOG,
            environment=environment(self.user.state / FOLDER),
            say=self.say,
        )
        self._refused = self.user.state / REFUSAL
        self._refused.unlink(missing_ok=True)  # from an earlier start

    def tend(self) -> None:
        """Start the process, or restart it.

        Raises:
            RunError: It dies repeatedly, or the server refuses it.
        """
        if self._refused.exists():
            raise RunError(f"refused: {self._refused.read_text(encoding='utf-8').strip()}")
        self.service.tend()

    def stop(self) -> None:
        """End the process and the worker."""
        self.service.stop()
        try:
            worker = read_worker(self.user.state)
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM)
        except (OSError, ValueError, KeyError):
            return  # There is no worker.

    def _command(self) -> list[str]:
        settings = {"name": self.user.name, "state": str(self.user.state)}
        settings |= {"config": str(self.user.config)} if self.user.config else {}
        files = {"--authority": self.authority, "--key": self.key}
        return [
            *(sys.executable, "-m", "comingle.federation.flower.fleet_client"),
            *("--server", self.server, "--app", self.app, "--poll-seconds", f"{self.poll_seconds:g}"),
            *(word for name, path in files.items() if path for word in (name, str(path.absolute()))),
            *("--node-config", json.dumps(settings)),
        ]


def participate(node: SuperNode, until: Callable[[], bool] = lambda: False) -> None:
    """Run a client until ``until`` returns True.

    Raises:
        RunError: It dies repeatedly, or the server refuses it.
    """
    try:
        with interrupt_on_sigterm():
            while not until():
                node.tend()
                time.sleep(0.3)
    finally:
        node.stop()
