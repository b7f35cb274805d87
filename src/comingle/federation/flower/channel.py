"""Messages through Flower's grid, by user name.

Each message is sent and awaited in a thread of its own, so that no client waits for another one that is slow or dead.

A client with a registered key keeps its Flower node ID across restarts, and the name under which the key is registered
is the only one that it may have. Without keys a client gets a new node ID at each start.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from comingle.federation.flower.client_app import (
    FORMAT,
    HELLO,
    REFUSED,
    TRAIN,
    Failure,
    Hello,
    unwrap,
    unwrap_hello,
    wrap,
)


@runtime_checkable
class Channel(Protocol):
    """Moves bytes between the coordinator and users, by name."""

    def present(self) -> Sequence[str]:
        """Names of the users who can be reached now."""
        ...

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        """Send each user its request; yield ``(name, reply)`` as replies arrive, or ``(name, why it failed)``.

        Ends when all have answered or failed, or when ``timeout`` seconds are over. The reason of a failure is one
        line. A reply to an older request is never yielded. ``requests`` may change meanwhile: a channel that waits
        sends requests that are new in it, and no longer waits for those that are gone.
        """
        ...


Tag = TypeVar("Tag")

_FIRST_SECONDS, _LAST_SECONDS = 0.1, 2.0
_PART = 0.03
"""What has been awaited for T seconds is asked for again after this part of T: that is little on top of it."""


@dataclass(frozen=True, kw_only=True)
class Late:
    """There is no reply, and there will be none."""

    line: str


class Post:
    """The way from the coordinator's process to the nodes and back."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._pushing = threading.Lock()  # what a message shares with others is sent once where they go in turn
        self._flying = 0

    def send(
        self,
        content: RecordDict,
        *,
        node: int,
        kind: str,
        seconds: float,
        tag: Tag,
        put: Callable[[tuple[Tag, Message | Late]], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Send a message; what comes back within so many seconds is ``put`` together with the tag.

        The reply is no longer looked for once it is not ``wanted``.
        """

        def fly() -> None:
            self._flying += 1
            try:
                put((tag, self._reply(content, node, kind, seconds, wanted)))
            except Exception as error:  # the grid's, which are many; whoever waits must hear of it
                put((tag, Late(line=f"{type(error).__name__}: {' '.join(str(error).split())}")))
            finally:
                self._flying -= 1

        threading.Thread(target=fly, daemon=True).start()

    def _reply(
        self, content: RecordDict, node: int, kind: str, seconds: float, wanted: Callable[[], bool]
    ) -> Message | Late:
        message = Message(content, dst_node_id=node, message_type=kind, ttl=max(seconds, 1.0))
        with self._pushing:
            names = list(self._grid.push_messages([message]))
        if not names or not names[0]:
            return Late(line="the server does not take the message")
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds and wanted():
            for reply in self._grid.pull_messages(names):
                return reply
            time.sleep(min(max(_FIRST_SECONDS, waited * _PART) * max(1.0, self._flying / 16), _LAST_SECONDS))
        return Late(line=f"no reply within {round(seconds, 1):g} s")


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


_LOOK_SECONDS = 0.25
_ACCIDENTS = 3
"""So often a request is sent to a user whose worker, client or connection breaks while it answers."""


@dataclass(eq=False)
class _Parcel:
    """A request on its way: its node, since when its user cannot be reached, how often it went wrong."""

    request: bytes
    node: Node | None = None
    alone_since: float | None = None
    accidents: int = 0
    line: str = "has not come"
    done: bool = False


class GridChannel:
    """Moves bytes between the coordinator and users, by name.

    A user who goes away in the middle of an exchange and comes back within ``grace`` seconds gets its request again.
    """

    def __init__(
        self,
        grid: Grid,
        say: Callable[[str], None],
        *,
        allowed: Collection[str] = (),
        patience: float = 10.0,
        grace: float = 120.0,
    ) -> None:
        self._post = Post(grid)
        self._roster = Roster(grid, self._post, say, allowed=allowed)
        self._patience, self._grace = patience, grace
        self._waits = True

    def present(self) -> Sequence[str]:
        """Names of the users who can be reached now; waits some seconds for those who have just come."""
        until = time.monotonic() + self._patience
        self._roster.look()
        while self._waits and self._roster.waiting(self._patience) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            self._roster.look()
        return sorted(self._roster.nodes)

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        """Send each user its request; yield replies, or why there is none, as they arrive, for ``timeout`` seconds."""
        until = time.monotonic() + timeout
        replies: queue.SimpleQueue[tuple[tuple[str, _Parcel, Node], Message | Late]] = queue.SimpleQueue()
        parcels: dict[str, _Parcel] = {}
        try:
            while self._update(parcels, requests) and (left := until - time.monotonic()) > 0:
                self._roster.look()
                for name, parcel in parcels.items():
                    if not parcel.done and (line := self._lost(parcel)) is not None:
                        parcel.done = True
                        yield name, line
                    elif not parcel.done:
                        self._forward(name, parcel, left, replies)
                try:
                    (name, parcel, node), reply = replies.get(timeout=min(_LOOK_SECONDS, left))
                except queue.Empty:
                    continue
                if parcel.done or parcel.node != node or parcels.get(name) is not parcel:
                    continue  # of a node that has been started again since, or of a request that is not due any more
                answer = _answer(parcel, reply)
                if answer is not None:
                    parcel.done = True
                    yield name, answer
            late = [name for name, parcel in parcels.items() if not parcel.done]
        finally:
            for parcel in parcels.values():
                parcel.done = True  # nobody waits for its reply
        for name in late:
            yield name, f"no reply within {round(timeout, 1):g} s"

    def _update(self, parcels: dict[str, _Parcel], requests: Mapping[str, bytes]) -> bool:
        """Follow what is requested now; whether a reply is still awaited."""
        self._waits, due = False, dict(requests)  # presence is looked up without waiting
        self._waits = True
        for name in [name for name, parcel in parcels.items() if due.get(name) is not parcel.request]:
            parcels.pop(name).done = True
        for name in due.keys() - parcels.keys():
            parcels[name] = _Parcel(due[name])
        return any(not parcel.done for parcel in parcels.values())

    def _forward(self, name: str, parcel: _Parcel, seconds: float, replies: queue.SimpleQueue) -> None:
        """Sends a request that has not been sent, or only to a node that is no more."""
        node = self._roster.nodes.get(name)
        if node is None:
            parcel.node = None
            parcel.alone_since = parcel.alone_since or time.monotonic()
        elif node != parcel.node:
            parcel.node, parcel.alone_since = node, None
            self._post.send(
                wrap(parcel.request),
                node=node.number,
                kind=TRAIN,
                seconds=seconds,
                tag=(name, parcel, node),
                put=replies.put,
                wanted=lambda: not parcel.done and parcel.node == node,
            )

    def _lost(self, parcel: _Parcel) -> str | None:
        """What is said of a user who is not expected any more."""
        if parcel.accidents >= _ACCIDENTS:
            return parcel.line
        if parcel.alone_since is not None and time.monotonic() - parcel.alone_since > self._grace:
            return f"cannot be reached for {self._grace:g} s"
        return None


def _answer(parcel: _Parcel, reply: Message | Late) -> bytes | str | None:
    """What a user's reply comes to; None where its request is to be sent again."""
    outcome = Failure(line=reply.line, accident=True) if isinstance(reply, Late) else unwrap(reply)
    if isinstance(outcome, bytes):
        return outcome
    if not outcome.accident:
        return outcome.line
    parcel.accidents, parcel.node, parcel.line = parcel.accidents + 1, None, outcome.line
    return None
