"""A federation of real processes, a server and a client for each user, and what happens when one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("flwr")

from tests.federation.toy import SERVER_APP, toy_client

from comingle.federation.client_command import take_part
from comingle.federation.flower.certificates import make_certificates
from comingle.federation.flower.client import ClientProcess
from comingle.federation.flower.processes import Service, environment
from comingle.federation.flower.server import Certificates, SuperLink, supervise
from comingle.federation.participant import Participant
from comingle.utils.errors import RecipeError, RunError

LIMIT_SECONDS = 240


class Federation:
    """A coordinator and users on this machine; ``then`` is what to do once the first round is done."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.said = folder, []
        self.link = SuperLink(folder=folder / "run", say=self.said.append, app=SERVER_APP)
        server = f"127.0.0.1:{self.link.port}"
        self.clients = [toy_client(name, folder / name, server, self.said.append) for name in names]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "rounds.json"
        return json.loads(path.read_text()) if path.exists() else []

    def run(self, then: Callable[[], None] | None = None, **config: Any) -> None:
        began, waiting = time.monotonic(), [then] if then else []

        def beside() -> None:
            assert time.monotonic() - began < LIMIT_SECONDS, self.said
            for client in self.clients:
                client.keep_running()
            if waiting and self.rounds:
                waiting.pop()()

        users = " ".join(client.name for client in self.clients)
        self.link.run_config = {"users": users, "timeout": 60, **config}
        supervise(self.link, beside)
        assert not waiting, "nothing was killed: the run was too short"

    def replies(self) -> list[dict[str, str]]:
        return [{name: reply.split()[0] for name, reply in one["replies"].items()} for one in self.rounds]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path, "ada", "bob")
    yield federation
    federation.link.stop()
    for client in federation.clients:
        client.stop()
    assert wait_until(lambda: not left_of(tmp_path)), left_of(tmp_path)


def left_of(folder: Path) -> list[str]:
    """Processes that have to do with a folder and still live."""
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline", "status"])
        if any(str(folder) in part for part in process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def wait_until(true: Callable[[], bool], seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while not (is_true := true()) and time.monotonic() < until:
        time.sleep(0.2)
    return is_true


BOTH = {"ada": "ada", "bob": "bob"}


@pytest.mark.slow
def test_rounds_with_the_same_processes_throughout(federation: Federation) -> None:
    federation.run(rounds=3, request="who")
    assert federation.replies() == [BOTH] * 3
    assert len({one["replies"]["ada"] for one in federation.rounds}) == 1
    assert "round 3 is done" in federation.said
    assert not [line for line in federation.said if "restarting" in line]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["client", "server"])
def test_the_run_goes_on_when_something_is_killed(federation: Federation, what: str) -> None:
    def kill() -> None:
        time.sleep(1.0)  # in the middle of the second round
        process = {
            "client": lambda: federation.clients[0].service.pid,
            "server": lambda: federation.link.service.pid,
        }[what]()
        os.kill(process, signal.SIGKILL)

    federation.run(kill, rounds=3, request="sleep 2", timeout=120)
    assert federation.replies() == [BOTH] * 3


@pytest.mark.slow
def test_a_client_that_dies_while_it_answers_is_started_again_and_asked_again(federation: Federation) -> None:
    federation.run(rounds=1, request="die-once")
    assert federation.replies() == [BOTH]


@pytest.mark.slow
def test_a_mistake_of_the_persons_ends_the_run_with_its_line(federation: Federation) -> None:
    federation.clients.pop()
    federation.link.run_config = {"users": "ada eve", "timeout": 20, "rounds": 1}
    with pytest.raises(RunError, match=r"^users: ada came; wanted: ada, eve$"):
        supervise(federation.link, federation.clients[0].keep_running)


@pytest.mark.slow
def test_all_children_end_when_whoever_has_started_them_is_killed(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from tests.federation.toy import toy_client
from comingle.federation.client_command import take_part
from comingle.federation.participant import Participant
from comingle.federation.flower.server import SuperLink
link = SuperLink(folder=Path({str(tmp_path)!r}) / "run", say=print)
link.keep_running()
client = toy_client("ada", Path({str(tmp_path)!r}) / "ada", link.address, print)
client.keep_running()
print("started", flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    time.sleep(3)
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not [child for child in children if child.is_running()]), children


@pytest.mark.slow
class TestKeys:
    """Who may come in, with real processes and TLS on loopback."""

    @pytest.fixture
    def guarded(self, tmp_path: Path) -> Iterator[Federation]:
        files = make_certificates(tmp_path / "certificates", ["localhost"], ["ada", "bob"])
        federation = Federation(tmp_path)
        given = Certificates(authority=files.authority, certificate=files.certificate, key=files.key)
        federation.link = SuperLink(
            folder=tmp_path / "run", say=federation.said.append, app=SERVER_APP, certificates=given, keys=files.users
        )
        yield federation
        federation.link.service.stop()
        for client in federation.clients:
            client.stop()

    def client(
        self, federation: Federation, name: str, key: Path | None, authority: Path | None = None
    ) -> ClientProcess:
        state, link = federation.folder / f"state of {name}", federation.link
        assert link.certificates is not None
        authority = authority or link.certificates.authority
        client = toy_client(name, state, link.address, federation.said.append, key=key, authority=authority)
        federation.clients.append(client)
        return client

    def test_who_has_a_registered_key_takes_part_and_only_under_its_name(self, guarded: Federation) -> None:
        keys = guarded.folder / "certificates" / "users"
        self.client(guarded, "ada", keys / "ada.key")
        mallory = self.client(guarded, "mallory", keys / "bob.key")

        def beside() -> None:
            guarded.clients[0].keep_running()
            mallory.keep_running()

        guarded.link.run_config = {"users": "ada", "timeout": 60, "rounds": 3, "request": "sleep 2"}
        supervise(guarded.link, beside)
        assert guarded.replies() == [{"ada": "ada"}] * 3
        _, reason = mallory.refusal.split(": ", 1)
        assert re.match("refused: mallory: .*'bob'", reason)
        assert reason in guarded.said

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("stranger", ".*eve.key"),
            ("keyless", ".*--key FILE$"),
            ("deceived", "the certificate of 127.0.0.1:.*other.*ca.pem"),
        ],
    )
    def test_who_is_refused_hears_why_in_one_line(self, guarded: Federation, name: str, why: str) -> None:
        other = make_certificates(guarded.folder / "other", ["localhost"], ["eve"])
        eve = guarded.folder / "other" / "users" / "eve.key"
        client = self.client(
            guarded, name, None if name == "keyless" else eve, other.authority if name == "deceived" else None
        )
        guarded.link.run_config = {"users": "ada", "timeout": 600, "rounds": 1}  # waits for ada
        guarded.link.keep_running()
        assert wait_until(lambda: client.keep_running() or bool(client.refusal), 60)
        assert re.match(rf"{name}'s client: .*{why}", client.refusal)
        assert "\n" not in client.refusal


def test_flowers_programs_send_nothing_to_anybody_and_look_for_no_updates(tmp_path: Path) -> None:
    code = "import os; from flwr.supercore import telemetry, update_check as updates; "
    code += "print(telemetry.FLWR_TELEMETRY_ENABLED, os.environ[updates.FLWR_DISABLE_UPDATE_CHECK])"
    known = environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]


class TestServices:
    def service(self, folder: Path, code: str, said: list[str]) -> Service:
        return Service(
            name="it",
            arguments=lambda: [sys.executable, "-c", code],
            log=folder / "it.log",
            environment=dict(os.environ),
            say=said.append,
        )

    @pytest.mark.slow
    def test_it_is_started_again_later_and_later(self, tmp_path: Path) -> None:
        said: list[str] = []
        service = self.service(tmp_path, "print('no such thing'); raise SystemExit(3)", said)
        began = time.monotonic()
        while service.starts < 3:
            service.keep_running()
            time.sleep(0.05)
        assert 3.0 < time.monotonic() - began < 6.0  # after 1 s, then after 2
        assert len(said) == 2
        assert all(line.startswith("it: no such thing") for line in said)
        service.stop()

    def test_but_not_for_ever(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("comingle.federation.flower.processes._FIRST_WAIT_SECONDS", 0.0)
        service = self.service(tmp_path, "raise SystemExit('nothing to be done')", [])

        def keep_running() -> None:
            while True:
                service.keep_running()
                time.sleep(0.01)

        with pytest.raises(RunError, match=r"^it: ended 10 times.*\(nothing to be done\); see .*it.log"):
            keep_running()


class TestOtherMachines:
    def test_a_superlink_listens_to_them_with_certificates_only(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"^server: .*certificates .*0.0.0.0"):
            SuperLink(folder=tmp_path, say=print, host="0.0.0.0")

    def test_a_client_connects_to_them_with_certificates_only(self, tmp_path: Path) -> None:
        participant = Participant(
            name="ada", data="https://example.org/text.txt", state=str(tmp_path), server="example.org:9000"
        )
        with pytest.raises(RecipeError, match=r"'ada': .*example.org:9000.*--certificates"):
            take_part([participant], say=print)
