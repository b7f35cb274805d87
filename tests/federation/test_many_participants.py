"""Participants who come, stop, are killed and return, each by its command: the federation ends with a result."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr")

from tests.federation.test_federate import nothing_is_left
from tests.federation.test_out_there import SECONDS, Place, command, rounds_of
from tests.golden.cases import method, text_recipe

from comingle.config import Recipe, parse_recipe
from comingle.federation.flower.certificates import make_certificates
from comingle.federation.server_session import NetworkSection
from comingle.utils.records import read_metrics

pytestmark = pytest.mark.slow
__all__ = ["nothing_is_left"]  # around each of these tests too

UNREST_SECONDS = 120.0
PAUSES = 2.0, 20.0
"""Seconds between two things that happen."""


def recipe_of(folder: Path, names: list[str]) -> Recipe:
    """A recipe of many small rounds; the users share four texts."""
    content = text_recipe(folder, method("fedavg"))
    texts = list(content["data"]["users"].values())
    for number, name in enumerate(names):  # a text of its own each: the same file twice is a mistake
        text = Path(texts[number % len(texts)]).read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text[number:], encoding="utf-8")
    content["data"]["users"] = {name: str(folder / f"{name}.txt") for name in names}
    content["training"] |= {"rounds": 12, "local_steps": 1}
    content["evaluation"] = {"every": 12, "first": False}
    content["runtime"] = {"threads": 1, "users_per_step": 1}
    return parse_recipe(content)


class Crowd:
    """The clients of many participants; each thing that happens to one is drawn at random."""

    def __init__(self, here: Place, names: list[str], keys: Path):
        self.here, self.names, self.keys, self.draw = here, names, keys, random.Random(7)
        self.clients: dict[str, subprocess.Popen[bytes]] = {}
        self.suspended: list[int] = []

    def start(self, name: str) -> None:
        secure = "--certificates", self.keys / "ca.pem", "--key", self.keys / "users" / f"{name}.key"
        line = [sys.executable, "-c", "from comingle.cli import main; main()"]
        line += map(str, (*self.here.client(name, self.here.port), *secure))
        with (self.here.folder / f"{name}.txt.log").open("ab") as out:
            self.clients[name] = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def happen(self) -> None:
        """Start a client, end one, kill one, or suspend one."""
        name = self.draw.choice(self.names)
        client = self.clients.get(name)
        if client is None or client.poll() is not None:
            return self.start(name)
        what = self.draw.choice(["terminate", "kill", "suspend", "stay"])
        if what == "terminate":
            client.terminate()
        elif what == "kill":
            client.kill()
        elif what == "suspend":
            os.kill(client.pid, signal.SIGSTOP)
            self.suspended.append(client.pid)
        return None

    def wake(self) -> None:
        for pid in self.suspended:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)

    def all_return(self) -> None:
        self.wake()
        for name in self.names:
            client = self.clients.get(name)
            if client is None or client.poll() is not None:
                self.start(name)


@contextmanager
def crowd_of(here: Place, names: list[str], keys: Path) -> Iterator[Crowd]:
    crowd = Crowd(here, names, keys)
    try:
        yield crowd
    finally:
        crowd.wake()
        for client in crowd.clients.values():
            client.terminate()
        for client in crowd.clients.values():
            client.wait(60)


@pytest.mark.parametrize("count", [5, 20])
def test_participants_who_come_and_go_leave_a_defined_result(count: int, tmp_path: Path) -> None:
    names = [f"user{number:02}" for number in range(count)]
    patience = NetworkSection(min_participants=2, round_timeout=60.0, join_timeout=600.0)
    here = Place.of(tmp_path, recipe_of(tmp_path, names), patience)
    files = make_certificates(tmp_path / "keys", ["127.0.0.1"], names)
    keys = files.authority.parent
    with (
        command(tmp_path, "server", *here.server(), "--certificates", keys) as server,
        crowd_of(here, names, keys) as crowd,
    ):
        crowd.all_return()
        until = time.monotonic() + UNREST_SECONDS * max(1.0, count / 10)
        while time.monotonic() < until and server.poll() is None:
            crowd.happen()
            time.sleep(crowd.draw.uniform(*PAUSES))
        if server.poll() is None:
            crowd.all_return()
        code = server.wait(SECONDS * 4)
    said = (tmp_path / "server.txt").read_text()
    assert "Traceback" not in said
    assert all("Traceback" not in path.read_text() for path in tmp_path.glob("*.txt.log"))
    if code == 0:
        assert len(rounds_of(tmp_path / "apart")) == 12
        assert len(read_metrics(tmp_path / "apart")["users"]) >= 2
    else:
        assert code == 2
        assert "needed: 2" in said.rstrip().splitlines()[-1]
