"""Messages to clients through Flower's grid, addressed by user name.

Each message is sent and awaited in its own thread, so that a slow or dead client does not delay the others.

A client with a registered key keeps its Flower node ID across restarts, and can only use the name under which the key
is registered. Without keys a client gets a new node ID at each start.
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
    """Transport of bytes between the server and clients, addressed by user name."""

    def present(self) -> Sequence[str]:
        """Return the names of connected users."""
        ...

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        """Send each client its request, and yield its reply or the reason why there is none.

        The iteration ends when all clients have replied or failed, at the latest after ``timeout`` seconds.

        Args:
            requests: Requests by user. The caller may change them during the iteration; replies to removed requests
                are dropped.
            timeout: Seconds to wait for replies.

        Yields:
            A user's name with the bytes of the reply, or with one line such as ``"no reply within 60 s"``.
        """
        ...


Tag = TypeVar("Tag")

_FIRST_SECONDS, _LAST_SECONDS = 0.1, 2.0
_POLL_FRACTION = 0.03
"""Interval between polls for a reply, as a fraction of the time waited so far."""

_UNSLOWED_POLLERS = 16
"""Number of messages in flight above which each is polled for less often."""


@dataclass(frozen=True, kw_only=True)
class NoReply:
    """Result of a message without a reply; ``line`` is the reason."""

    line: str


class MessageSender:
    """Sends messages to nodes through the grid and awaits their replies, each in its own thread."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._pushing = threading.Lock()  # Sending one at a time uploads objects that messages share only once.
        self._in_flight = 0  # number of messages that are being sent or whose replies are awaited
        self._counting = threading.Lock()  # `+=` is a read and a write, between which another thread may run.

    def send(
        self,
        content: RecordDict,
        *,
        node: int,
        kind: str,
        seconds: float,
        tag: Tag,
        put: Callable[[tuple[Tag, Message | NoReply]], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start a thread that sends a message and passes its reply to ``put``; return at once.

        Args:
            content: Content of the message.
            node: ID of the node.
            kind: Flower's type of the message.
            seconds: Timeout for the reply.
            tag: Passed to ``put`` with the reply.
            put: Called with the tag, and with the reply or the reason why there is none.
            wanted: Called before each poll for the reply; False ends the polling, as no reply is needed any more.
        """

        def exchange() -> None:
            with self._counting:
                self._in_flight += 1
            try:
                put((tag, self._await_reply(content, node, kind, seconds, wanted)))
            except Exception as error:  # The grid raises many kinds; all must reach the receiver.
                put((tag, NoReply(line=f"{type(error).__name__}: {' '.join(str(error).split())}")))
            finally:
                with self._counting:
                    self._in_flight -= 1

        threading.Thread(target=exchange, daemon=True).start()

    def _await_reply(
        self, content: RecordDict, node: int, kind: str, seconds: float, wanted: Callable[[], bool]
    ) -> Message | NoReply:
        """Send a message and poll for its reply, less often the longer it takes and the more messages are in flight.

        Args:
            content: Content of the message.
            node: ID of the node.
            kind: Flower's type of the message.
            seconds: Timeout for the reply.
            wanted: Called before each poll for the reply; False ends the polling, as no reply is needed any more.
        """
        # Flower rejects a message whose `ttl` (in seconds) is over before it is stored, so it is not close to 0.
        message = Message(content, dst_node_id=node, message_type=kind, ttl=max(seconds, 1.0))
        with self._pushing:
            message_ids = list(self._grid.push_messages([message]))
        if not message_ids or not message_ids[0]:
            return NoReply(line="the server did not accept the message")
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds and wanted():
            for reply in self._grid.pull_messages(message_ids):  # at most one
                return reply
            # Each message in flight has a thread that polls. If they are many, each polls less often.
            crowding = max(1.0, self._in_flight / _UNSLOWED_POLLERS)
            interval = max(_FIRST_SECONDS, waited * _POLL_FRACTION) * crowding
            time.sleep(min(interval, _LAST_SECONDS))
        return NoReply(line=f"no reply within {round(seconds, 1):g} s")


_HELLO_SECONDS = 60.0
_REFRESH_SECONDS = 0.5
"""Shortest time between two requests for the connected nodes."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A client's node in Flower's server, since the node's last start.

    Args:
        number: The node's ID.
        since: When it was last activated.
        registered: Name of its key, if the key is registered.
    """

    number: int
    since: str = ""
    registered: str = ""


class ConnectedNodes:
    """Connected nodes by user name; ``allowed`` are the names that may join, all if empty."""

    def __init__(
        self, grid: Grid, sender: MessageSender, say: Callable[[str], None], *, allowed: Collection[str] = ()
    ) -> None:
        """Start without nodes; :meth:`refresh` looks for them.

        Args:
            grid: Flower's grid, which lists the connected nodes.
            sender: Sends the questions for names, and refusals.
            say: Called with each line to show to the operator.
            allowed: Names of the users that may join; all if empty.
        """
        self._grid, self._sender, self._say = grid, sender, say
        self._allowed = frozenset(allowed)
        self._replies: queue.SimpleQueue[tuple[Node, Message | NoReply]] = queue.SimpleQueue()  # to questions for names
        self._asked: dict[Node, float] = {}  # when a node was asked for its name, on the monotonic clock
        self._hellos: dict[Node, Hello] = {}  # what a node has answered: name, state folder and message format
        self._refused: dict[Node, str] = {}  # why a node is refused
        self._holders: dict[str, str] = {}  # by name, the random text in the state folder of the client that has it
        self._refreshed_at = -_REFRESH_SECONDS  # on the monotonic clock; the first `refresh` may look at once
        self.nodes: dict[str, Node] = {}

    def waiting(self, seconds: float) -> bool:
        """Return whether a node was asked for its name in the last ``seconds`` and has not answered yet."""
        since = time.monotonic() - seconds
        answered = self._hellos.keys() | self._refused.keys()
        return any(asked_at > since for node, asked_at in self._asked.items() if node not in answered)

    def refresh(self) -> None:
        """Update ``nodes`` from the nodes that Flower's server knows; at most twice per second.

        Nodes that have disconnected are forgotten. New ones are asked which user they belong to, and are added to
        ``nodes`` by a later call, after they have answered.
        """
        if time.monotonic() - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = time.monotonic()
        connected = [
            Node(number=info.node_id, since=info.last_activated_at, registered=info.name)
            for info in self._grid.get_nodes()
        ]
        for nodes in (self._asked, self._hellos, self._refused):
            for disconnected in set(nodes) - set(connected):
                del nodes[disconnected]
        for node in connected:
            if node not in self._asked:
                self._ask_name(node)
        self._process_hellos()
        self._assign_names()

    def _ask_name(self, node: Node) -> None:
        """Ask a node which user it belongs to; the reply is put into the queue ``_replies``."""
        self._asked[node] = time.monotonic()
        no_content = RecordDict()  # The message's type, HELLO, is the question.
        self._sender.send(
            no_content, node=node.number, kind=HELLO, seconds=_HELLO_SECONDS, tag=node, put=self._replies.put
        )

    def _process_hellos(self) -> None:
        """Store the answers of nodes that were asked for their users' names.

        A node that does not answer is asked again if the failure is transient, and refused otherwise.
        """
        while not self._replies.empty():
            node, reply = self._replies.get()
            hello = Failure(line=reply.line, is_transient=True) if isinstance(reply, NoReply) else unwrap_hello(reply)
            if node not in self._asked:  # It has disconnected since.
                continue
            if isinstance(hello, Hello):
                self._hellos[node] = hello
            elif hello.is_transient:
                del self._asked[node]  # The next `refresh` asks it again.
            else:
                self._refuse(node, hello.line)

    def _assign_names(self) -> None:
        """Assign names to nodes, and refuse nodes that may not use the name that they claim.

        If several clients claim a name, the first keeps it as long as it is connected. It is recognised by the random
        text of its state folder (``instance``), which stays the same when it restarts.
        """
        nodes: dict[str, Node] = {}
        claimed = {(hello.name, hello.instance) for hello in self._hellos.values()}
        # A name is free again once the client that has it does not claim it any more.
        self._holders = {name: instance for name, instance in self._holders.items() if (name, instance) in claimed}
        for node, hello in self._hellos.items():  # in the order of their answers
            if line := self._objection(node, hello):
                self._refuse(node, line)
            else:
                self._holders[hello.name] = hello.instance
                nodes[hello.name] = node
                self._refused.pop(node, None)
        for name in nodes.keys() - self.nodes.keys():
            self._say(f"{name} connected")
        for name in self.nodes.keys() - nodes.keys():
            self._say(f"{name} disconnected")
        self.nodes = nodes

    def _objection(self, node: Node, hello: Hello) -> str:
        """Return why a node may not use the name that it claims; an empty string if it may.

        A name belongs to the first client that claims it, as long as this client is connected. It is recognised by
        ``instance``, a random text in its state folder.

        Args:
            node: The node.
            hello: Its answer, with name, instance and version of the message format.
        """
        if hello.format != FORMAT:
            return f"{hello.name}: got message format {hello.format}; allowed: {FORMAT}"
        if node.registered and node.registered != hello.name:
            return f"{hello.name}: the key of this client is registered for {node.registered!r}; use that name"
        if self._allowed and hello.name not in self._allowed:
            return f"{hello.name}: not a user of this federation; allowed: {', '.join(sorted(self._allowed))}"
        if self._holders.get(hello.name, hello.instance) != hello.instance:
            return f"{hello.name}: another connected client has this name; use a different name"
        return ""

    def _refuse(self, node: Node, line: str) -> None:
        """Refuse a node, and show the reason to the operator and, in a message, to the client.

        Args:
            node: The node, which is refused again at each :meth:`refresh`; the same reason is shown only once.
            line: The reason.
        """
        if self._refused.get(node) == line:
            return
        self._refused[node] = line
        self._say(f"refused: {line}")
        self._sender.send(
            wrap(line.encode()),
            node=node.number,
            kind=REFUSED,
            seconds=_HELLO_SECONDS,
            tag=node,
            put=lambda _: None,  # The client's reply to a refusal does not matter.
        )


_LOOK_SECONDS = 0.25
_MAX_TRIES = 3
"""Limit on attempts for a request whose client's worker, process or connection fails while it answers."""


@dataclass(eq=False)
class _Request:
    """A request in flight.

    Args:
        request: The bytes.
        node: The node to which it was sent; None if it has to be sent.
        disconnected_since: When the client disconnected, in seconds of the monotonic clock; None if it has not.
        num_failures: How often it failed for a reason that a retry may remove.
        line: Why it failed last.
        done: Whether its reply is not awaited any more.
    """

    request: bytes
    node: Node | None = None
    disconnected_since: float | None = None
    num_failures: int = 0
    line: str = "not connected"
    done: bool = False


class GridChannel:
    """Transport of bytes between the server and clients, addressed by user name.

    A client that disconnects during an exchange and returns within ``grace`` seconds gets its request again.
    """

    def __init__(
        self,
        grid: Grid,
        say: Callable[[str], None],
        *,
        allowed: Collection[str] = (),
        name_seconds: float = 10.0,
        grace: float = 120.0,
    ) -> None:
        """Create a channel over a grid; clients may connect later.

        Args:
            grid: Flower's grid, through which messages are sent.
            say: Called with each line to show to the operator.
            allowed: Names of the users that may join; all if empty.
            name_seconds: How long to wait for the names of nodes that have just connected, in seconds.
            grace: How long to wait for a client that has disconnected, in seconds.
        """
        self._sender = MessageSender(grid)
        self._nodes = ConnectedNodes(grid, self._sender, say, allowed=allowed)
        self._name_seconds, self._grace = name_seconds, grace
        self._may_wait_for_names = True  # whether `present` waits for the names of new nodes

    def present(self) -> Sequence[str]:
        """Return the names of connected users.

        A node that has just connected is asked for its user's name. This method waits for the answer, up to
        ``_name_seconds``. It does not wait while :meth:`_update` reads the requests, as that would delay all replies.
        """
        until = time.monotonic() + self._name_seconds
        self._nodes.refresh()
        while self._may_wait_for_names and self._nodes.waiting(self._name_seconds) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            self._nodes.refresh()
        return sorted(self._nodes.nodes)

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        """Send each client its request; yield replies, or reasons of failures, for ``timeout`` seconds.

        A request waits until its client is connected. It is sent again if the client has reconnected or failed for a
        transient reason.

        Args:
            requests: The requests by user; read again at each iteration, as they may change.
            timeout: Seconds after which clients without a reply have failed.

        Yields:
            Pairs of a user and its reply, or a user and one line that says why there is none.
        """
        until = time.monotonic() + timeout
        replies: queue.SimpleQueue[tuple[tuple[str, _Request, Node], Message | NoReply]] = queue.SimpleQueue()
        in_flight: dict[str, _Request] = {}
        try:
            # `_update` returns whether a reply is still awaited.
            while self._update(in_flight, requests) and (left := until - time.monotonic()) > 0:
                self._nodes.refresh()
                for name, request in in_flight.items():
                    if request.done:
                        continue
                    if (reason := self._failure(request)) is not None:
                        request.done = True
                        yield name, reason
                    else:
                        self._send_if_needed(name, request, left, replies)
                try:
                    # Short waits, so that new requests are sent and connections are checked in between.
                    (name, request, node), reply = replies.get(timeout=min(_LOOK_SECONDS, left))
                except queue.Empty:
                    continue
                if request.done or request.node != node or in_flight.get(name) is not request:
                    continue  # The node was restarted since, or the request is not awaited any more.
                answer = _read_reply(request, reply)
                if answer is not None:  # None: the request is sent again in the next iteration.
                    request.done = True
                    yield name, answer
            late = [name for name, request in in_flight.items() if not request.done]
        finally:
            for request in in_flight.values():
                request.done = True  # Stops polling for its reply.
        for name in late:
            yield name, f"no reply within {round(timeout, 1):g} s"

    def _update(self, in_flight: dict[str, _Request], requests: Mapping[str, bytes]) -> bool:
        """Update the requests in flight to those that the caller wants now; return whether a reply is still awaited.

        Replies to requests that the caller has removed or replaced are not awaited any longer. New requests are added,
        and sent later by :meth:`_send_if_needed`.

        Args:
            in_flight: Requests by user, which is changed.
            requests: The bytes of the requests by user. The mapping may compute them when it is read, and call
                :meth:`present`.
        """
        # A wait in `present` would delay the replies of all clients.
        self._may_wait_for_names = False
        due = dict(requests)
        self._may_wait_for_names = True
        for name in [name for name, request in in_flight.items() if due.get(name) is not request.request]:
            in_flight.pop(name).done = True
        for name in due.keys() - in_flight.keys():
            in_flight[name] = _Request(due[name])
        return any(not request.done for request in in_flight.values())

    def _send_if_needed(self, name: str, request: _Request, seconds: float, replies: queue.SimpleQueue) -> None:
        """Send a request that has not been sent yet, or that was sent to a node that has disconnected or restarted.

        If the client is not connected, record since when. A later call sends the request once the client has connected.

        Args:
            name: Name of the user.
            request: The request, whose ``node`` is the one to which it was sent last.
            seconds: Timeout for its reply.
            replies: Queue into which the reply is put.
        """
        node = self._nodes.nodes.get(name)
        if node is None:
            request.node = None
            request.disconnected_since = request.disconnected_since or time.monotonic()
        elif node != request.node:
            request.node, request.disconnected_since = node, None
            self._sender.send(
                wrap(request.request),
                node=node.number,
                kind=TRAIN,
                seconds=seconds,
                tag=(name, request, node),  # put into the queue with the reply
                put=replies.put,
                wanted=lambda: not request.done and request.node == node,  # False ends the wait for a reply
            )

    def _failure(self, request: _Request) -> str | None:
        """Return why a request counts as failed; None if it may still succeed.

        A request has failed after too many transient failures, or if the client has been disconnected for more than
        ``_grace`` seconds. ``request.line`` is the reason of the last transient failure.
        """
        if request.num_failures >= _MAX_TRIES:
            return request.line
        if request.disconnected_since is not None and time.monotonic() - request.disconnected_since > self._grace:
            return f"unreachable for {self._grace:g} s"
        return None


def _read_reply(request: _Request, reply: Message | NoReply) -> bytes | str | None:
    """Return the bytes of a client's reply, or one line that says why the request has failed for good.

    After a transient failure, count and record it in ``request``, mark the request as not sent, and return None. The
    caller sends the request again.

    Args:
        request: The request.
        reply: The reply, or why there is none.
    """
    outcome = Failure(line=reply.line, is_transient=True) if isinstance(reply, NoReply) else unwrap(reply)
    if isinstance(outcome, bytes):
        return outcome
    if not outcome.is_transient:
        return outcome.line
    request.num_failures, request.line = request.num_failures + 1, outcome.line
    request.node = None  # not sent
    return None
