"""Flower's grid inside one process: the real apps talk through it, with nodes that come and go as a test wants."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """Nodes by number, each with its app and its config; an app's exception is an error reply, as it is in Flower."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[ClientApp, Mapping[str, Any]]] = {}
        self.registered: dict[int, str] = {}
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}
        self._numbers, self._names = itertools.count(100), itertools.count(1)
        self._lock = threading.Lock()
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # which Flower's own processes set

    def join(self, app: ClientApp, registered: str = "", **config: Any) -> int:
        number = next(self._numbers)
        self.nodes[number], self.registered[number] = (app, config), registered
        return number

    def leave(self, number: int) -> None:
        del self.nodes[number]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=number, name=self.registered[number]) for number in list(self.nodes)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        with self._lock:
            name = f"message-{next(self._names)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
        number = message.metadata.dst_node_id
        if number in self.nodes:
            threading.Thread(target=self._deliver, args=(name, number, message), daemon=True).start()
        return name

    def _deliver(self, name: str, number: int, message: Message) -> None:
        app, config = self.nodes[number]
        context = Context(run_id=1, node_id=number, node_config=dict(config), state=RecordDict(), run_config={})
        try:
            reply = app(message, context)
        except Exception as error:
            reply = Message(Error(code=2, reason=str(error)), reply_to=message)
        if number in self.nodes:  # what a node that has died would have said is never heard
            self._replies[name] = reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def create_message(self, *args: Any, **settings: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


def run_app(app: Any, grid: Grid, **run_config: Any) -> None:
    """A ServerApp with a grid, as Flower calls it."""
    app(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config))
