"""Who is behind which of Flower's nodes: each node is asked for its name, and the names are looked after.

A node has another number after each start, where its key is not registered; with a registered key it keeps its number,
and the name under which the key is registered is the only one that it may have.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from comingle.transports.flower.envelope import FORMAT, HELLO, REFUSED, Failure, Hello, unwrap_hello, wrap
from comingle.transports.flower.post import Late, Post

_HELLO_SECONDS = 60.0
_ROSTER_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node since it was last started; ``registered`` is the name that belongs to its key, if it has such a key."""

    number: int
    since: str = ""
    registered: str = ""


class Roster:
    """Names of users and their nodes; ``allowed`` are the names that may take part, all where it is empty."""

    def __init__(self, grid: Grid, post: Post, say: Callable[[str], None], *, allowed: Collection[str] = ()) -> None:
        self._grid, self._post, self._say = grid, post, say
        self._allowed = frozenset(allowed)
        self._replies: queue.SimpleQueue[tuple[Node, Message | Late]] = queue.SimpleQueue()
        self._asked: dict[Node, float] = {}
        self._hellos: dict[Node, Hello] = {}
        self._refused: dict[Node, str] = {}
        self._holders: dict[str, str] = {}  # name -> instance
        self._looked = -_ROSTER_SECONDS
        self.nodes: dict[str, Node] = {}

    def waiting(self, seconds: float) -> bool:
        """Return whether a node was asked for its name within so many seconds and has not answered yet."""
        since = time.monotonic() - seconds
        known = self._hellos.keys() | self._refused.keys()
        return any(asked > since for node, asked in self._asked.items() if node not in known)

    def look(self) -> None:
        """Sees who has come and who has gone; asks at most twice a second."""
        if time.monotonic() - self._looked < _ROSTER_SECONDS:
            return
        self._looked = time.monotonic()
        there = [
            Node(number=info.node_id, since=info.last_activated_at, registered=info.name)
            for info in self._grid.get_nodes()
        ]
        for known in (self._asked, self._hellos, self._refused):
            for node in set(known) - set(there):
                del known[node]
        for node in there:
            if node not in self._asked:
                self._ask(node)
        self._listen()
        self._settle()

    def _ask(self, node: Node) -> None:
        self._asked[node] = time.monotonic()
        self._post.send(
            RecordDict(), node=node.number, kind=HELLO, seconds=_HELLO_SECONDS, tag=node, put=self._replies.put
        )

    def _listen(self) -> None:
        """Takes in the answers that have come; who does not answer is asked again."""
        while not self._replies.empty():
            node, reply = self._replies.get()
            hello = Failure(line=reply.line, accident=True) if isinstance(reply, Late) else unwrap_hello(reply)
            if node not in self._asked:
                continue
            if isinstance(hello, Hello):
                self._hellos[node] = hello
            elif hello.accident:
                del self._asked[node]
            else:
                self._refuse(node, hello.line)

    def _settle(self) -> None:
        """Which node has which name: of several that say the same one, the first, or where that was started again."""
        nodes: dict[str, Node] = {}
        present = {(hello.name, hello.instance) for hello in self._hellos.values()}
        self._holders = {name: instance for name, instance in self._holders.items() if (name, instance) in present}
        for node, hello in self._hellos.items():  # in the order in which they have answered
            if line := self._objection(node, hello):
                self._refuse(node, line)
            else:
                self._holders[hello.name] = hello.instance
                nodes[hello.name] = node
                self._refused.pop(node, None)
        for name in nodes.keys() - self.nodes.keys():
            self._say(f"{name} has come")
        for name in self.nodes.keys() - nodes.keys():
            self._say(f"{name} has gone")
        self.nodes = nodes

    def _objection(self, node: Node, hello: Hello) -> str:
        """Why a node may not have the name that it says, if so."""
        if hello.format != FORMAT:
            return f"{hello.name}: its messages are of format {hello.format}; allowed: {FORMAT}"
        if node.registered and node.registered != hello.name:
            return f"{hello.name}: the key of this node is registered for {node.registered!r}; allowed: that name alone"
        if self._allowed and hello.name not in self._allowed:
            return f"{hello.name}: is not of this federation; allowed: {', '.join(sorted(self._allowed))}"
        if self._holders.get(hello.name, hello.instance) != hello.instance:
            return (
                f"{hello.name}: two users have this name; the first keeps it, so give the other one a name of its own"
            )
        return ""

    def _refuse(self, node: Node, line: str) -> None:
        """Says once, here and there, that a node may not take part."""
        if self._refused.get(node) == line:
            return
        self._refused[node] = line
        self._say(f"refused: {line}")
        self._post.send(
            wrap(line.encode()), node=node.number, kind=REFUSED, seconds=_HELLO_SECONDS, tag=node, put=lambda _: None
        )
