"""Polls that the server holds until there is a message."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.node_pb2 import Node
from tests.federation.test_federation_ports import signed
from tests.federation.test_uploads import Client

from comingle.federation.flower.fleet_server import POLL_SECONDS


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.server.should_exit = True


def poll(client: Client) -> tuple[float, list[str]]:
    """Return the seconds that a poll took, and the IDs of its messages."""
    began = time.monotonic()
    status, body = client.send("pull-messages", PullMessagesRequest(node=Node(node_id=client.node_id)))
    assert status == 200
    messages = PullMessagesResponse.FromString(body).messages_list
    return time.monotonic() - began, [message.metadata.message_id for message in messages]


def push(client: Client) -> list[str]:
    """Send the client a message whose content is pushed after it, and return its ID."""
    content = RecordDict({"a": ArrayRecord({"a": Array("uint8", (4,), "test", b"abcd")})})
    message = Message(content, dst_node_id=client.node_id, message_type="train", ttl=60)
    return list(client.grid.push_messages([message]))


def test_a_poll_is_answered_when_a_message_arrives_and_not_before(client: Client) -> None:
    pushed: list[str] = []
    timer = threading.Timer(0.5, lambda: pushed.extend(push(client)))
    timer.start()
    seconds, messages = poll(client)
    timer.join()
    assert messages == pushed
    assert 0.4 < seconds < POLL_SECONDS
    assert not client.state._incomplete
    assert not any(client.state._wakers.values())


def test_a_message_that_waits_is_answered_at_once(client: Client) -> None:
    pushed = push(client)
    seconds, messages = poll(client)
    assert messages == pushed
    assert seconds < POLL_SECONDS


def test_without_a_message_a_poll_ends_before_clients_give_it_up(client: Client) -> None:
    seconds, messages = poll(client)
    assert messages == []
    assert POLL_SECONDS - 0.1 < seconds < 5


def test_a_client_that_dies_while_it_polls_does_not_lose_the_next_message(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    body = PullMessagesRequest(node=Node(node_id=client.node_id)).SerializeToString()
    headers = {"content-type": "application/protobuf", **signed(client.key)}
    connection.request("POST", "/v1/fleet/pull-messages", body, headers)
    until = time.monotonic() + POLL_SECONDS
    while not client.state._wakers.get(client.node_id):
        assert time.monotonic() < until
        time.sleep(0.02)
    connection.close()
    while client.state._wakers[client.node_id]:
        assert time.monotonic() < until
        time.sleep(0.02)
    pushed = push(client)
    assert poll(client)[1] == pushed
