"""Attacks on a federation's ports: without a registered key there is nothing to be had from any of them.

Flower's SuperLink answers its Control and Runtime APIs on the port of the Fleet API, and a SuperNode listens on a port
of its own. Through these an outsider could list and stop runs, register nodes and submit an app, which then ran on the
server and on every client.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.fab_pb2 import Fab as FabMessage
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from google.protobuf.message import Message as ProtoMessage
from tests.federation.test_processes import Federation, wait_until
from tests.federation.toy import SERVER_APP, toy_client

from comingle.federation.flower.certificates import make_certificates
from comingle.federation.flower.client_app import DIGEST, build_bundle
from comingle.federation.flower.fleet_server import (
    InProcessGrid,
    create_active_run,
    make_fleet_api,
    make_states,
    serve_fleet_api,
)
from comingle.federation.flower.processes import bind_free_port, free_port
from comingle.federation.flower.server import Certificates, SuperLink

Headers = Mapping[str, str]
Place = tuple[int, LinkState, ec.EllipticCurvePrivateKey, ec.EllipticCurvePrivateKey]
"""A server's port and state, and the private keys of two users."""


def post(
    port: int, path: str, message: ProtoMessage | bytes = b"", headers: Headers | None = None, *, tls: bool = True
) -> tuple[int, bytes]:
    """Send a protobuf message, verifying no certificate; return status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    if tls:
        unverified = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=unverified)
    body = message if isinstance(message, bytes) else message.SerializeToString()
    try:
        connection.request("POST", path, body, {"content-type": "application/protobuf", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def signed(private: ec.EllipticCurvePrivateKey, at: str = "") -> dict[str, str]:
    """The headers by which a client shows that it holds a key."""
    at = at or now().isoformat()
    public = public_key_to_bytes(private.public_key())
    signature = sign_message(private, at.encode("ascii"))
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": at,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


CONTROL = {
    "list runs": ("/v1/control/list-runs", ListRunsRequest()),
    "list nodes": ("/v1/control/list-nodes", b""),
    "register a node": ("/v1/control/register-node", RegisterNodeRequest(public_key=b"mine", name="ada")),
    "run an app": (
        "/v1/control/start-run",
        StartRunRequest(fab=FabMessage(content=build_bundle(), hash_str=DIGEST), federation=NOOP_FEDERATION_ID),
    ),
    "stop a run": ("/v1/control/stop-run", StopRunRequest(run_id=1)),
    "take a task": ("/v1/runtime/acquire-task", AcquireTaskRequest(supported_task_types=["flwr-serverapp"])),
    "pull messages": ("/v1/runtime/pull-messages", b""),
    "ask a model": ("/v1/responses", b"{}"),
}


@pytest.fixture(params=["with keys", "without"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A federation's server in this process, on loopback without TLS."""
    states, found = make_states(), free_port()
    create_active_run(states.state())
    api = make_fleet_api(states, keys_only=request.param == "with keys")
    server = serve_fleet_api(api, "127.0.0.1", found, None, None)
    yield found
    server.should_exit = True


@pytest.mark.parametrize("what", CONTROL)
def test_neither_control_nor_runtime_api_is_there(port: int, what: str) -> None:
    path, message = CONTROL[what]
    assert post(port, path, message, tls=False)[0] == 404
    private, _ = generate_key_pairs()
    assert post(port, path, message, signed(private), tls=False)[0] == 404


@pytest.mark.parametrize(
    "path", ["/docs", "/openapi.json", "/redoc", "/health", "/", "/v1/fleet", "/v1/fleet/../control/list-runs"]
)
def test_no_page_is_there(port: int, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT"):
        connection.request(method, path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status in (401, 404)
    connection.close()


def test_the_free_port_of_a_server_is_taken_before_it_starts(tmp_path: Path) -> None:
    link = SuperLink(folder=tmp_path / "run", say=print)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", link.port))
    link.stop()
    with socket.socket() as other:
        other.bind(("127.0.0.1", link.port))


def test_a_server_listens_on_a_socket_that_is_bound_already() -> None:
    bound, port = bind_free_port("127.0.0.1")
    states, inherited = make_states(), socket.socket(fileno=bound)
    api = make_fleet_api(states, keys_only=True)
    server = serve_fleet_api(api, "127.0.0.1", port, None, None, bound=inherited)
    assert post(port, "/v1/fleet/activate-node", tls=False)[0] == 401
    server.should_exit = True


class TestKeys:
    """What the holder of a registered key may do, and whoever has recorded its requests."""

    @pytest.fixture
    def place(self) -> Iterator[Place]:
        states, port = make_states(), free_port()
        state = states.state()
        create_active_run(state)
        ada, bob = generate_key_pairs()[0], generate_key_pairs()[0]
        for name, private in (("ada", ada), ("bob", bob)):
            state.create_node(NOOP_FLWR_AID, "account", public_key_to_bytes(private.public_key()), 30, name=name)
        server = serve_fleet_api(make_fleet_api(states, keys_only=True), "127.0.0.1", port, None, None)
        yield port, state, ada, bob
        server.should_exit = True

    def activate(
        self, port: int, private: ec.EllipticCurvePrivateKey, headers: Headers | None = None
    ) -> tuple[int, bytes]:
        request = ActivateNodeRequest(
            public_key=public_key_to_bytes(private.public_key()),
            heartbeat_interval=30,
        )
        return post(port, "/v1/fleet/activate-node", request, headers or signed(private), tls=False)

    def test_a_registered_key_comes_in(self, place: Place) -> None:
        port, _, ada, _ = place
        assert self.activate(port, ada)[0] == 200

    def test_a_stranger_does_not_and_cannot_register(self, place: Place) -> None:
        port, *_ = place
        eve, _ = generate_key_pairs()
        assert self.activate(port, eve)[0] == 401
        request = RegisterNodeFleetRequest(public_key=public_key_to_bytes(eve.public_key()))
        assert post(port, "/v1/fleet/register-node", request, signed(eve), tls=False)[0] == 401

    def test_a_strangers_body_is_not_read(self, place: Place) -> None:
        port, *_ = place
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.putrequest("POST", "/v1/fleet/push-object")
        connection.putheader("content-length", str(10**12))
        connection.endheaders()
        assert connection.getresponse().status == 401
        connection.close()

    def test_headers_are_bounded_before_anybody_signs(self, place: Place) -> None:
        port, *_ = place
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            with suppress(OSError):  # the server hangs up in the middle
                connection.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (1 << 20))
            said = b""
            with suppress(OSError):
                said = connection.recv(100)
            assert said[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431")

    def test_a_header_that_is_there_twice_is_refused(self, place: Place) -> None:
        port, _, ada, bob = place
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.putrequest("POST", "/v1/fleet/pull-messages")
        for headers in (signed(ada), signed(bob)):
            for name, value in headers.items():
                connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == 400
        connection.close()

    def test_a_body_that_is_too_large_is_not_read(self, place: Place) -> None:
        port, _, ada, _ = place
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.putrequest("POST", "/v1/fleet/push-object")
        for name, value in (signed(ada) | {"content-length": str(1 << 30)}).items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()

    def test_a_recorded_request_is_worth_nothing(self, place: Place) -> None:
        port, _, ada, _ = place
        headers = signed(ada)
        assert self.activate(port, ada, headers)[0] == 200
        assert self.activate(port, ada, headers)[0] == 401
        r, s = decode_dss_signature(base64.b64decode(headers["flwr-signature"]))
        order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973
        twin = base64.b64encode(encode_dss_signature(r, order - s)).decode()
        assert self.activate(port, ada, headers | {"flwr-signature": twin})[0] == 401

    def test_nor_is_one_that_was_recorded_before_the_server_restarted(self, place: Place) -> None:
        port, state, ada, _ = place
        recorded = signed(ada)
        states, again = LinkStateFactory("", NoOpFederationManager(), ObjectStoreFactory()), free_port()
        states.state_instance = state
        server = serve_fleet_api(make_fleet_api(states, keys_only=True), "127.0.0.1", again, None, None)
        status, body = self.activate(again, ada, recorded)
        assert status == 401
        assert b"before this server started" in body
        assert self.activate(again, ada)[0] == 200
        assert self.activate(port, ada, recorded)[0] == 412  # the signature holds; the key is in use
        server.should_exit = True

    @pytest.mark.parametrize("seconds", [-3600, 3600])
    def test_nor_is_one_of_another_time(self, place: Place, seconds: float) -> None:
        port, _, ada, _ = place
        status, body = self.activate(port, ada, signed(ada, (now() + timedelta(seconds=seconds)).isoformat()))
        assert status == 401
        assert b"clocks" in body

    def test_nobody_takes_or_answers_anothers_messages(self, place: Place) -> None:
        port, state, ada, bob = place
        numbers = []
        for private in (ada, bob):
            answer = ActivateNodeResponse()
            answer.ParseFromString(self.activate(port, private)[1])
            numbers.append(answer.node_id)
        grid = InProcessGrid(state, state.get_run_info()[0].run_id)
        message = Message(RecordDict(), dst_node_id=numbers[0], message_type="query.hello", ttl=60)
        grid.push_messages([message])
        request = PullMessagesRequest(node=Node(node_id=numbers[0]))
        assert post(port, "/v1/fleet/pull-messages", request, signed(bob), tls=False)[0] == 401
        assert post(port, "/v1/fleet/pull-messages", request, signed(ada), tls=False)[0] == 200
        reply = Message(RecordDict(), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        forged = PushMessagesRequest(node=Node(node_id=numbers[1]), message_object_trees=[get_object_tree(reply)])
        forged.messages_list.append(message_to_proto(remove_content_from_message(reply)))
        assert forged.messages_list[0].metadata.src_node_id == numbers[0]
        assert post(port, "/v1/fleet/push-messages", forged, signed(bob), tls=False)[0] == 401


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Federation]:
    """A server with certificates and keys, and a client at work, as processes."""
    files = make_certificates(tmp_path / "certificates", ["localhost"], ["ada", "bob"])
    federation = Federation(tmp_path)
    given = Certificates(authority=files.authority, certificate=files.certificate, key=files.key)
    federation.link = SuperLink(
        folder=tmp_path / "run",
        say=federation.said.append,
        app=SERVER_APP,
        certificates=given,
        keys=files.users,
        run_config={"users": "ada", "timeout": 600, "rounds": 1, "request": "sleep 300"},
    )
    key = tmp_path / "certificates" / "users" / "ada.key"
    client = toy_client(
        "ada", tmp_path / "ada", federation.link.address, federation.said.append, key=key, authority=files.authority
    )
    federation.clients = [client]
    federation.link.keep_running()
    client.keep_running()
    assert wait_until((tmp_path / "ada" / "flower" / "place").exists, 120)
    yield federation
    federation.link.stop()
    client.stop()


def listening(pid: int) -> dict[int, set[str]]:
    """Port and addresses on which a process and its children listen."""
    found: dict[int, set[str]] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or (connection.type == 2 and not connection.raddr):
                found.setdefault(connection.laddr.port, set()).add(connection.laddr.ip)
    return found


@pytest.mark.slow
def test_a_server_listens_on_one_port_and_a_client_on_none(guarded: Federation) -> None:
    assert listening(guarded.link.service.pid) == {guarded.link.port: {"127.0.0.1"}}
    assert listening(guarded.clients[0].service.pid) == {}
    for what, (path, message) in CONTROL.items():
        assert post(guarded.link.port, path, message)[0] == 404, what
    eve, _ = generate_key_pairs()
    public = public_key_to_bytes(eve.public_key())
    assert post(guarded.link.port, "/v1/fleet/register-node", RegisterNodeFleetRequest(public_key=public))[0] == 401
    assert guarded.link.service.starts == guarded.clients[0].service.starts == 1


ANOTHER_USER = """
import os, socket, sys
processes, folder, sockets = (argument.split(",") for argument in sys.argv[1:4])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
reached = []
assert os.access(os.path.dirname(folder[0]), os.X_OK)
paths = [f"/proc/{pid}/{name}" for pid in processes for name in ("environ", "mem", "fd/1")]
paths += [os.path.join(place, name) for place, _, names in os.walk(folder[0]) for name in names]
paths += [f"{folder[0]}/{name}" for name in ("flower/place", "flower/client.log")]
for path in paths:
    try:
        open(path, "rb").read(1)
        reached.append(path)
    except OSError:
        pass
for path in filter(None, sockets):
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(path)
            reached.append(path)
    except OSError:
        pass
print(reached)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_reaches_neither_tasks_nor_state(guarded: Federation) -> None:
    """As nobody, who may see which processes there are and what their command lines say."""
    roots = [psutil.Process(service.pid) for service in (guarded.link.service, guarded.clients[0].service)]
    processes = [process for root in roots for process in (root, *root.children(recursive=True))]
    sockets = {str(found.laddr) for process in processes for found in process.net_connections("unix") if found.laddr}
    arguments = [",".join(str(process.pid) for process in processes), str(guarded.folder / "ada")]
    command = [sys.executable, "-c", ANOTHER_USER, *arguments, ",".join(sorted(sockets))]
    root = Path(tempfile.gettempdir())
    above = [guarded.folder, *(folder for folder in guarded.folder.parents if root in folder.parents)]
    modes = [folder.stat().st_mode for folder in above]
    for folder in above:
        folder.chmod(0o755)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for folder, mode in zip(above, modes, strict=True):
        folder.chmod(mode)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
    words = {word for process in processes for word in process.cmdline()}
    lines = [line for path in guarded.folder.rglob("*.key") for line in path.read_text().splitlines()]
    assert lines
    assert not [line for line in lines if any(line in word for word in words)]


FOREIGN = """\
from flwr.clientapp import ClientApp
open({path!r}, "w").write("ran")
app = ClientApp()
"""


def foreign_bundle(trace: Path) -> bytes:
    """An app whose client part leaves a trace when it is imported."""
    project = """[project]
name = "evil"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "eve"
[tool.flwr.app.components]
serverapp = "evil:app"
clientapp = "evil:app"
"""
    files = {"pyproject.toml": project.encode(), "evil.py": FOREIGN.format(path=str(trace)).encode()}
    lines = [f"{name},{hashlib.sha256(content).hexdigest()},{8 * len(content)}" for name, content in files.items()]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as bundle:
        for name, content in {**files, ".info/CONTENT": "\n".join(lines).encode()}.items():
            bundle.writestr(name, content)
    return packed.getvalue()


@pytest.mark.slow
def test_a_client_runs_no_app_but_its_own(tmp_path: Path) -> None:
    """Even where the server itself asks for it: the client answers with an error and names the run."""
    states, port = make_states(), free_port()
    state = states.state()
    content = foreign_bundle(tmp_path / "trace")
    digest = hashlib.sha256(content).hexdigest()
    state.store_fab(Fab(digest, content, {}))
    number = state.create_run(
        "eve/evil", "1.0.0", digest, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )
    (run,) = state.get_run_info(run_ids=[number])
    assert run.primary_task_id
    assert state.claim_task(run.primary_task_id)
    assert state.activate_task(run.primary_task_id)
    server = serve_fleet_api(make_fleet_api(states, keys_only=False), "127.0.0.1", port, None, None)
    client = toy_client("ada", tmp_path / "ada", f"127.0.0.1:{port}", print)
    try:
        client.keep_running()
        assert wait_until(lambda: bool(state.get_nodes(number)), 120)
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = number, run.primary_task_id, 1
        grid = InProcessGrid(state, number)
        names = list(
            grid.push_messages(
                [Message(RecordDict(), dst_node_id=next(iter(state.get_nodes(number))), message_type="train", ttl=120)]
            )
        )
        replies: list[Message] = []
        assert wait_until(lambda: bool(replies.extend(grid.pull_messages(names)) or replies), 60)
        assert replies[0].has_error()
        line = rf"run {number}: .*{digest[:12]}.*{DIGEST[:12]}"
        assert re.match(line, replies[0].error.reason)
        assert re.search(f"comingle: refused: {line}", client.service.log.read_text())
        assert not (tmp_path / "trace").exists()
    finally:
        client.stop()
        server.should_exit = True
