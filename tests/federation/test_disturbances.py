"""Clients behind a device that spoils connections for 20 seconds: they find back by themselves once it stops."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import GetRunRequest, GetRunResponse, Run
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.supercore.constant import NodeStatus
from tests.federation.proxy import DISTURBANCES, Proxy
from tests.federation.test_federate import nothing_is_left, recipe_of
from tests.federation.test_out_there import Place, command, rounds_of, wait_for

from comingle.federation.flower import fleet_client
from comingle.federation.flower.certificates import make_certificates
from comingle.federation.flower.client_app import DIGEST
from comingle.federation.flower.fleet_client import FleetConnection, NotActiveError, Server
from comingle.federation.flower.fleet_server import create_active_run, make_fleet_api, make_states, serve_fleet_api
from comingle.federation.flower.processes import free_port
from comingle.federation.server_session import NetworkSection

__all__ = ["nothing_is_left"]  # around each of these tests too

DISTURBED_SECONDS = 20
RETURN_SECONDS = 200
"""A connection that is taken to be lost is given up after 75 seconds; then a SuperNode starts on a busy machine."""


@pytest.fixture
def fleet() -> Iterator[tuple[LinkStateFactory, int]]:
    """A Fleet API without keys: its states and its port."""
    states, port = make_states(), free_port()
    create_active_run(states.state())
    server = serve_fleet_api(make_fleet_api(states, keys_only=False), "127.0.0.1", port, None, None)
    yield states, port
    server.should_exit = True


@pytest.mark.slow
@pytest.mark.parametrize("secure", [True, False], ids=["TLS and keys", "plain"])
@pytest.mark.parametrize("how", DISTURBANCES)
def test_a_client_finds_back_after_a_disturbance(how: str, secure: bool, tmp_path: Path) -> None:
    """Bob's connections are disturbed and Ann's are not; all rounds wait for both."""
    changes = {
        "training.rounds": 1000,
        "training.local_steps": 1,
        "evaluation.every": 1000,
        "evaluation.model": "local",
    }
    recipe = recipe_of(tmp_path, "fedavg").with_changes(changes)
    here = Place.of(tmp_path, recipe, NetworkSection(min_participants=2, round_timeout=900))
    options: dict[str, tuple[object, ...]] = {"server": (), "ann": (), "bob": ()}
    if secure:
        files = make_certificates(tmp_path / "keys", ["127.0.0.1"], ["ann", "bob"])
        for name, public in files.users.items():
            options[name] = "--certificates", files.authority, "--key", public.with_suffix(".key")
        options["server"] = "--certificates", tmp_path / "keys"
    with (
        Proxy(here.port) as proxy,
        command(tmp_path, "server", *here.server(), *options["server"]) as server,
        command(tmp_path, "ann", *here.client("ann", here.port), *options["ann"]) as ann,
        command(tmp_path, "bob", *here.client("bob", proxy.own), *options["bob"]) as bob,
    ):
        everybody: tuple[subprocess.Popen[bytes], ...] = server, ann, bob
        wait_for(lambda: len(rounds_of(tmp_path / "apart")) > 1, *everybody)
        with proxy.disturbed(how):
            time.sleep(DISTURBED_SECONDS)
        before, until = len(rounds_of(tmp_path / "apart")), time.monotonic() + RETURN_SECONDS
        while len(rounds_of(tmp_path / "apart")) < before + 2:
            assert time.monotonic() < until, [(tmp_path / f"{name}.txt").read_text() for name in options]
            assert [process.poll() for process in everybody] == [None] * 3
            time.sleep(0.5)
    said = (tmp_path / "bob.txt").read_text()
    assert "WARNING" not in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("how", DISTURBANCES)
def test_a_connection_logs_in_whatever_became_of_its_first_requests(
    how: str, fleet: tuple[LinkStateFactory, int], tmp_path: Path
) -> None:
    """An answer to a garbled request is no refusal."""
    states, port = fleet
    said: list[str] = []
    with Proxy(port) as proxy:
        connection = FleetConnection(Server(address=f"127.0.0.1:{proxy.own}"), tmp_path / "place", said.append)
        failed: list[BaseException] = []

        def activate() -> None:
            try:
                connection.activate()
                while connection.receive() is None and not done.is_set():
                    time.sleep(0.05)
            except NotActiveError:
                activate()
            except Exception as error:
                failed.append(error)

        done = threading.Event()
        with proxy.disturbed(how):
            thread = threading.Thread(target=activate, daemon=True)
            thread.start()
            time.sleep(2)
        until = time.monotonic() + 60
        while not any(True for _ in online(states.state())) and not failed:
            assert time.monotonic() < until, said
            time.sleep(0.1)
        done.set()
        thread.join(60)
        connection.close()
        assert failed == []


def test_a_corrupted_digest_of_the_app_is_requested_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = FleetConnection(Server(address="127.0.0.1:1"), tmp_path / "node", lambda line: None)
    digests = [DIGEST[:32] + DIGEST[16:48], DIGEST, "of another app", "of another app"]

    def get_run(request: GetRunRequest) -> GetRunResponse:
        return GetRunResponse(run=Run(run_id=request.run_id, fab_hash=digests.pop(0)))

    monkeypatch.setattr(connection._http, "GetRun", get_run)
    assert [connection.digest_of(5), connection.digest_of(5)] == [DIGEST, DIGEST]  # the second is not requested
    assert connection.digest_of(6) == "of another app"
    assert digests == []
    connection.close()


def online(state: LinkState) -> Sequence[NodeInfo]:
    return state.get_node_info(statuses=[NodeStatus.ONLINE])


def test_heartbeats_of_an_earlier_node_end_before_the_next_activation(
    fleet: tuple[LinkStateFactory, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would make the node active again, so that the client's own key is in use for as long as they go on."""
    monkeypatch.setattr(fleet_client, "_HEARTBEAT_SECONDS", 0.05)
    states, port = fleet
    connection = FleetConnection(Server(address=f"127.0.0.1:{port}"), tmp_path / "place", lambda line: None)
    requests, activate = 0, connection._http.ActivateNode

    def delayed(request: ActivateNodeRequest) -> ActivateNodeResponse:
        nonlocal requests
        requests += 1
        time.sleep(0.5)
        assert not list(online(states.state()))
        return activate(request)

    connection.activate()
    monkeypatch.setattr(connection._http, "ActivateNode", delayed)
    connection.activate()
    assert requests == 1
    assert len(online(states.state())) == 1
    connection.close()


@pytest.mark.slow
def test_a_client_waits_for_the_node_of_its_own_lost_activation(
    fleet: tuple[LinkStateFactory, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server activates the node at the end of a disturbance; until its heartbeats time out the key is in use."""
    monkeypatch.setattr(fleet_client, "_KEY_IN_USE_SECONDS", 22.0)
    _states, port = fleet
    connection = FleetConnection(Server(address=f"127.0.0.1:{port}"), tmp_path / "place", lambda line: None)
    began, activate = time.monotonic(), connection._http.ActivateNode

    def lossy(request: ActivateNodeRequest) -> ActivateNodeResponse:
        seconds = time.monotonic() - began
        if seconds < 8:
            raise httpx.ConnectError("the request is lost")
        response = activate(request)
        if seconds < 12:
            raise httpx.ReadError("the reply is lost")
        return response

    monkeypatch.setattr(connection._http, "ActivateNode", lossy)
    connection.activate()
    assert connection.node_id
    connection.close()
