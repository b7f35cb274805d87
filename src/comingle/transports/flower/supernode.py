"""A participant's side as processes: a SuperNode, which is started again when it dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from comingle.errors import RecipeError, RunError
from comingle.transports.flower.answering import certificate_problem
from comingle.transports.flower.calling import read_worker
from comingle.transports.flower.processes import (
    LOOPBACK,
    Diagnosis,
    Service,
    command,
    ended_politely,
    environment,
    free_port,
)
from comingle.transports.flower.recovery import LOST, NO_ANSWER
from comingle.transports.flower.users import REFUSAL, User

FOLDER = "flower"

_DISTURBED = NO_ANSWER, LOST, "SSL/TLS handshake error", "Failed to initialize the connection"
"""What a SuperNode prints that ends because of its connection, and not of what it was given."""

_LAPSE_SECONDS = 100.0
"""A SuperLink misses a SuperNode that was killed for a minute, and lets nobody in with its key until then."""


@dataclass(kw_only=True)
class SuperNode:
    """A user's SuperNode. ``authority`` is the file of who has signed the server's certificate; ``key`` is the user's.

    Raises:
        RecipeError: the server is on another machine and there is no authority, or there is a key without one.
    """

    user: User
    server: str
    say: Callable[[str], None]
    authority: Path | None = None
    key: Path | None = None
    poll_seconds: float = 0.2
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        host = self.server.rpartition(":")[0].strip("[]")
        if not self.authority and (self.key or host not in (LOOPBACK, "localhost", "::1")):
            what = "a key" if self.key else f"the server {self.server}"
            raise RecipeError(
                f"{self.user.name}: {what} without certificates; give the server's with --certificates FILE"
            )
        self.user.state.mkdir(parents=True, exist_ok=True)
        self.service = Service(
            name=f"{self.user.name}'s SuperNode",
            arguments=lambda: command("flower-supernode", *self._options()),
            log=self.user.state / FOLDER / "supernode.log",
            environment=environment(self.user.state / FOLDER, poll_seconds=self.poll_seconds),
            say=self.say,
            diagnose=self._diagnose,
        )
        self._refused = self.user.state / REFUSAL
        self._refused.unlink(missing_ok=True)  # of an earlier time

    def tend(self) -> None:
        """Starts it, or starts it again.

        Raises:
            RunError: it dies again and again, or the coordinator refuses it.
        """
        if self._refused.exists():
            raise RunError(f"refused: {self._refused.read_text(encoding='utf-8').strip()}")
        self.service.tend()

    def stop(self) -> None:
        """Ends it, and the worker."""
        self.service.stop()
        try:
            worker = read_worker(self.user.state)
            if worker.lives():
                os.kill(worker.pid, signal.SIGTERM)
        except (OSError, ValueError, KeyError):
            return  # there is none

    def _diagnose(self, printed: str) -> Diagnosis | None:
        """Say what Flower's errors mean for the user of this machine."""
        if "Failed to activate SuperNode" in printed or "must be registered" in printed:
            key = f"the key {self.key} is not known" if self.key else "nobody is let in without a key; give --key FILE"
            line = f"{self.server}: {key}" + (", or another client uses it" if self.key else "")
            return Diagnosis(line=line, patience=_LAPSE_SECONDS if self.key else 0)
        if self.authority and (problem := certificate_problem(self.server, self.authority)):
            return Diagnosis(line=problem, patience=0)
        if any(sign in printed for sign in _DISTURBED):
            return Diagnosis(line=f"the connection to {self.server} was disturbed", patience=inf)
        return None

    def _options(self) -> list[str]:
        secure = ["--root-certificates", str(self.authority.absolute())] if self.authority else ["--insecure"]
        known = ["--auth-supernode-private-key", str(self.key.absolute())] if self.key else []
        settings = {"name": self.user.name, "state": str(self.user.state)}
        settings |= {"config": str(self.user.config)} if self.user.config else {}
        node_config = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())
        place = ["--host", LOOPBACK, "--port", str(free_port())]  # of its own executor; another one after each start
        return ["--superlink", self.server, *secure, *known, *place, "--node-config", node_config]


def participate(node: SuperNode, until: Callable[[], bool] = lambda: False) -> None:
    """Keeps a SuperNode at work until it is enough.

    Raises:
        RunError: it dies again and again.
    """
    try:
        with ended_politely():
            while not until():
                node.tend()
                time.sleep(0.3)
    finally:
        node.stop()
