"""Limits on what the holder of a registered key can make the server hold in memory."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from tests.federation.test_federation_ports import post, signed

from comingle.federation.flower.fleet_server import (
    MAX_OTHER_BODY_BYTES,
    InProcessGrid,
    LimitedLinkState,
    UploadLimits,
    create_active_run,
    make_fleet_api,
    make_states,
    serve_fleet_api,
)
from comingle.federation.flower.processes import free_port


@dataclass
class Client:
    """A registered client and its server, in this process; requests go through the server's port."""

    limits: UploadLimits = field(default_factory=UploadLimits)
    port: int = field(default_factory=free_port)
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: generate_key_pairs()[0])
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        states = make_states(self.limits)
        state = states.state()
        assert isinstance(state, LimitedLinkState)
        self.state = state
        self.run_id = create_active_run(state)
        public = public_key_to_bytes(self.key.public_key())
        self.node_id = state.create_node(NOOP_FLWR_AID, "account", public, 30, name="ada")
        self.server = serve_fleet_api(make_fleet_api(states, keys_only=True), "127.0.0.1", self.port, None, None)
        self.grid = InProcessGrid(state, self.run_id)
        assert self.send("activate-node", ActivateNodeRequest(public_key=public, heartbeat_interval=30))[0] == 200

    def send(self, path: str, request: object) -> tuple[int, bytes]:
        return post(self.port, f"/v1/fleet/{path}", request, signed(self.key), tls=False)  # type: ignore[arg-type]

    def reply(self, content: bytes = b"", ttl: float = 60) -> Message:
        """Send this client a message and return a reply that has not been uploaded."""
        message = Message(RecordDict(), dst_node_id=self.node_id, message_type="train", ttl=ttl)
        self.asked = list(self.grid.push_messages([message]))
        record = RecordDict({"a": ArrayRecord({"a": Array("uint8", (len(content),), "test", content)})})
        reply = Message(record if content else RecordDict(), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        return reply

    def begin(self, reply: Message, tree: ObjectTree | None = None) -> PushMessagesResponse:
        """Register a reply's objects."""
        request = PushMessagesRequest(
            node=Node(node_id=self.node_id),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree or get_object_tree(reply)],
        )
        status, body = self.send("push-messages", request)
        assert status == 200
        return PushMessagesResponse.FromString(body)

    def upload(self, reply: Message, begun: PushMessagesResponse, most: int = 1000) -> list[bool]:
        """Upload objects; return which were stored."""
        parts, stored = get_all_nested_objects(reply), list[bool]()
        for object_id in list(begun.objects_to_push)[:most]:
            request = PushObjectRequest(
                node=Node(node_id=self.node_id),
                run_id=self.run_id,
                session_id=begun.session_id,
                object_id=object_id,
                object_content=parts[object_id].deflate(),
            )
            stored.append(PushObjectResponse.FromString(self.send("push-object", request)[1]).stored)
        return stored

    @property
    def held(self) -> tuple[int, int]:
        """Number of sessions and of tracked replies."""
        return len(self.state._object_push_sessions), len(self.state._pending_replies)


@pytest.fixture
def make_client() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(**limits: float) -> Client:
        made.append(Client(limits=UploadLimits(**limits)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.server.should_exit = True


def test_a_reply_that_is_taken_leaves_nothing(make_client: Callable[..., Client]) -> None:
    client = make_client()
    reply = client.reply(b"x" * 10_000)
    assert all(client.upload(reply, client.begin(reply)))
    (taken,) = client.grid.pull_messages(client.asked)
    assert taken.content.array_records["a"]["a"].data == b"x" * 10_000
    client.send("pull-messages", PullMessagesRequest(node=Node(node_id=client.node_id)))
    assert client.held == (0, 0)


def test_replies_that_are_never_finished_are_limited(
    make_client: Callable[..., Client], capsys: pytest.CaptureFixture[str]
) -> None:
    client = make_client(replies=3)
    asked = [client.reply(bytes([n]) * 100) for n in range(5)]
    assert [bool(client.begin(reply).objects_to_push) for reply in asked] == [True] * 3 + [False] * 2
    assert client.held == (3, 3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "refused" in line]
    assert len(lines) == 2
    assert all(re.search("client ada: 4 .*allowed: 3$", line) for line in lines)


def test_replies_that_are_never_finished_expire(make_client: Callable[..., Client]) -> None:
    client = make_client(replies=1, idle_seconds=0.2)
    reply, later = client.reply(b"a" * 100), client.reply(b"b" * 100)
    begun = client.begin(reply)
    assert client.upload(reply, begun, most=1) == [True]
    time.sleep(0.3)
    again = client.begin(later)
    assert client.held == (1, 1)
    assert all(client.upload(later, again))
    assert client.upload(reply, begun) == [False] * len(begun.objects_to_push)
    assert client.grid.pull_messages(client.asked)


def test_bytes_are_limited(make_client: Callable[..., Client], capsys: pytest.CaptureFixture[str]) -> None:
    client = make_client(total_bytes=50_000)
    first, second = client.reply(b"a" * 40_000), client.reply(b"b" * 40_000)
    assert all(client.upload(first, client.begin(first)))
    held = len(client.state.object_store)
    assert not all(client.upload(second, client.begin(second)))
    assert len(client.state.object_store) == held
    assert "client ada: more than 50000 bytes" in capsys.readouterr().err


def test_bytes_are_counted_while_another_reply_holds_them(make_client: Callable[..., Client]) -> None:
    """Two replies with the same array, of which the client itself deletes the first."""
    client = make_client(total_bytes=50_000)
    first, second, third = (client.reply(content * 40_000) for content in (b"a", b"a", b"b"))
    assert all(client.upload(first, client.begin(first)))
    assert all(client.upload(second, client.begin(second)))
    client.state.object_store.delete(first.object_id)
    assert not all(client.upload(third, client.begin(third)))


def sha(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_large_trees_are_refused(make_client: Callable[..., Client], capsys: pytest.CaptureFixture[str]) -> None:
    client = make_client(objects=10)
    reply = client.reply()
    tree = ObjectTree(object_id=reply.object_id, children=[ObjectTree(object_id=sha(n)) for n in range(10)])
    before = len(client.state.object_store)
    assert not client.begin(reply, tree).objects_to_push
    assert len(client.state.object_store) == before
    assert client.held == (0, 0)
    assert "client ada: more than 10 objects" in capsys.readouterr().err


def test_a_small_tree_that_unfolds_is_refused(make_client: Callable[..., Client]) -> None:
    """Each object names the next one twice, with the children of the second left out."""
    client = make_client()
    reply, tree = client.reply(), ObjectTree(object_id=sha(0))
    for n in range(1, 30):
        tree = ObjectTree(object_id=sha(n), children=[tree, ObjectTree(object_id=tree.object_id)])
    before = len(client.state.object_store)
    assert not client.begin(reply, ObjectTree(object_id=reply.object_id, children=[tree])).objects_to_push
    assert len(client.state.object_store) == before


def test_a_registered_object_cannot_be_given_other_children(make_client: Callable[..., Client]) -> None:
    client = make_client()
    reply = client.reply(b"a" * 100)
    assert client.begin(reply).objects_to_push
    before = len(client.state.object_store)
    assert not client.begin(reply, ObjectTree(object_id=reply.object_id)).objects_to_push
    assert len(client.state.object_store) == before


def test_only_a_replys_own_tree_is_accepted(make_client: Callable[..., Client]) -> None:
    client = make_client()
    reply = client.reply()
    assert not client.begin(reply, ObjectTree(object_id=sha(1))).objects_to_push
    message = message_to_proto(remove_content_from_message(reply))
    node = Node(node_id=client.node_id)
    for trees in ([], [get_object_tree(reply)] * 2):
        request = PushMessagesRequest(node=node, messages_list=[message], message_object_trees=trees)
        assert client.send("push-messages", request)[0] == 400
    assert client.held == (0, 0)


def test_replies_to_no_message_leave_no_session(make_client: Callable[..., Client]) -> None:
    client = make_client()
    reply = client.reply()
    reply.metadata.__dict__["_reply_to_message_id"] = sha(1)
    for _ in range(3):
        client.begin(reply, ObjectTree(object_id=reply.metadata.message_id))
    assert client.held == (0, 0)


def test_requests_without_an_object_are_small(make_client: Callable[..., Client]) -> None:
    client = make_client()
    assert client.send("push-messages", b"x" * (MAX_OTHER_BODY_BYTES + 1))[0] == 413
    assert client.send("push-object", b"x" * (MAX_OTHER_BODY_BYTES + 1))[0] != 413
