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
        """Create a sender without messages in flight.

        Args:
            grid: Flower's grid, through which messages are sent and replies are polled for.
        """
        self._grid = grid
        self._pushing = threading.Lock()  # Sending one at a time uploads objects that messages share only once.
        self._num_in_flight = 0  # number of messages that are being sent or whose replies are awaited
        self._counting = threading.Lock()  # `+=` is a read and a write, between which another thread may run.

    def send(
        self,
        content: RecordDict,
        *,
        node: int,
        kind: str,
        seconds: float,
        tag: Tag,
        on_reply: Callable[[tuple[Tag, Message | NoReply]], None],
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start a thread that sends a message and passes its reply to ``on_reply``; return at once.

        Args:
            content: Content of the message.
            node: ID of the node.
            kind: Flower's type of the message.
            seconds: Timeout for the reply.
            tag: Passed to ``on_reply`` with the reply.
            on_reply: Called with the tag, and with the reply or the reason why there is none.
            is_awaited: Called before each poll for the reply; False ends the polling.
        """

        def exchange() -> None:
            with self._counting:
                self._num_in_flight += 1
            try:
                reply = self._await_reply(content, node, kind, seconds, is_awaited)
                on_reply((tag, reply))
            except Exception as error:  # The grid raises many kinds; all must reach the receiver.
                on_reply((tag, NoReply(line=f"{type(error).__name__}: {' '.join(str(error).split())}")))
            finally:
                with self._counting:
                    self._num_in_flight -= 1

        threading.Thread(target=exchange, daemon=True).start()

    def _await_reply(
        self, content: RecordDict, node: int, kind: str, seconds: float, is_awaited: Callable[[], bool]
    ) -> Message | NoReply:
        """Send a message and poll for its reply, less often the longer it takes and the more messages are in flight.

        Args:
            content: Content of the message.
            node: ID of the node.
            kind: Flower's type of the message.
            seconds: Timeout for the reply.
            is_awaited: Called before each poll for the reply; False ends the polling.
        """
        # Flower rejects a message whose `ttl` (in seconds) is over before it is stored, so it is not close to 0.
        message = Message(content, dst_node_id=node, message_type=kind, ttl=max(seconds, 1.0))
        with self._pushing:
            message_ids = list(self._grid.push_messages([message]))
        is_accepted = bool(message_ids) and bool(message_ids[0])
        if not is_accepted:
            return NoReply(line="the server did not accept the message")
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds and is_awaited():
            replies = list(self._grid.pull_messages(message_ids))
            if replies:
                return replies[0]
            # Each message in flight has a thread that polls. If they are many, each polls less often.
            slowdown = max(1.0, self._num_in_flight / _UNSLOWED_POLLERS)
            interval = max(_FIRST_SECONDS, waited * _POLL_FRACTION) * slowdown
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
    """Connected nodes by user name."""

    def __init__(
        self,
        grid: Grid,
        sender: MessageSender,
        say: Callable[[str], None],
        *,
        allowed: Collection[str] = (),
        read_allowed: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Start without nodes; :meth:`refresh` looks for them.

        Args:
            grid: Flower's grid, which lists the connected nodes.
            sender: Sends the questions for names, and refusals.
            say: Called with each line to show to the operator.
            allowed: Names of the users that may join; all if empty.
            read_allowed: Called when a client has another name; returns the names of users that may join too.
        """
        self._grid, self._sender, self._say = grid, sender, say
        self.allowed_names = frozenset(allowed)
        self._read_allowed = read_allowed
        self._replies: queue.SimpleQueue[tuple[Node, Message | NoReply]] = queue.SimpleQueue()  # to questions for names
        self._asked_at: dict[Node, float] = {}  # when a node was asked for its name, on the monotonic clock
        self._hellos: dict[Node, Hello] = {}  # what a node has answered: name, state folder and message format
        self._refused: dict[Node, str] = {}  # why a node is refused
        # By name, the random text ("instance") in the state folder of the client that has the name.
        self._instance_by_name: dict[str, str] = {}
        self._refreshed_at = -_REFRESH_SECONDS  # on the monotonic clock; the first `refresh` may look at once
        self.nodes: dict[str, Node] = {}
        """Connected nodes that have told their names and are not refused, by name of the user."""

    def awaits_name(self, seconds: float) -> bool:
        """Return whether some client has connected, but has not said yet whose client it is.

        The server asks each new connection (a node of Flower) for the name of its user.

        Args:
            seconds: Age from which a question counts as lost.
        """
        now = time.monotonic()
        for node, asked_at in self._asked_at.items():
            was_asked_recently = asked_at > now - seconds
            has_answered = node in self._hellos or node in self._refused
            if was_asked_recently and not has_answered:
                return True
        return False

    def refresh(self) -> None:
        """Update ``nodes`` from the nodes that Flower's server knows; at most twice per second.

        New nodes are asked which user they belong to, and are added to ``nodes`` by a later call, after they have
        answered. Nodes that have disconnected are removed.
        """
        if time.monotonic() - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = time.monotonic()
        connected = []
        for info in self._grid.get_nodes():
            connected.append(Node(number=info.node_id, since=info.last_activated_at, registered=info.name))
        for table in (self._asked_at, self._hellos, self._refused):
            for disconnected in set(table) - set(connected):
                del table[disconnected]
        for node in connected:
            if node not in self._asked_at:
                self._ask_name(node)
        self._process_hellos()
        self._assign_names()

    def _ask_name(self, node: Node) -> None:
        """Ask a node which user it belongs to; the reply is put into the queue ``_replies``."""
        self._asked_at[node] = time.monotonic()
        no_content = RecordDict()  # The message's type, HELLO, is the question.
        self._sender.send(
            no_content, node=node.number, kind=HELLO, seconds=_HELLO_SECONDS, tag=node, on_reply=self._replies.put
        )

    def _process_hellos(self) -> None:
        """Store the answers of nodes that were asked for their users' names; refuse nodes with a wrong answer."""
        while not self._replies.empty():
            node, reply = self._replies.get()
            has_disconnected = node not in self._asked_at
            if has_disconnected:
                continue
            if isinstance(reply, NoReply):
                del self._asked_at[node]  # so that the next `refresh` asks it again
                continue
            hello = unwrap_hello(reply)
            if isinstance(hello, Hello):
                self._hellos[node] = hello
            elif hello.is_transient:
                del self._asked_at[node]  # so that the next `refresh` asks it again
            else:
                self._refuse(node, hello.line)

    def _assign_names(self) -> None:
        """Assign names to nodes, and refuse nodes that may not use the name that they claim.

        If several clients claim a name, the first one keeps it as long as it is connected.
        """
        connected = {(hello.name, hello.instance) for hello in self._hellos.values()}
        for name, instance in list(self._instance_by_name.items()):
            is_connected = (name, instance) in connected
            if not is_connected:  # other clients may use the name
                del self._instance_by_name[name]
        nodes: dict[str, Node] = {}
        for node, hello in self._hellos.items():  # in the order of their answers
            problem = self._name_problem(node, hello)
            if problem:
                self._refuse(node, problem)
            else:
                self._instance_by_name[hello.name] = hello.instance
                nodes[hello.name] = node
                self._refused.pop(node, None)
        for name in nodes.keys() - self.nodes.keys():
            self._say(f"{name} connected")
        for name in self.nodes.keys() - nodes.keys():
            self._say(f"{name} disconnected")
        self.nodes = nodes

    def _name_problem(self, node: Node, hello: Hello) -> str:
        """Return why a node may not use the name that it claims; an empty string if it may.

        Args:
            node: The node.
            hello: Its answer: name, version of the message format, and instance, a random text in the client's state
                folder that stays the same when the client restarts.
        """
        if hello.format != FORMAT:
            return f"{hello.name}: got message format {hello.format}; allowed: {FORMAT}"
        if node.registered and node.registered != hello.name:
            return f"{hello.name}: the key of this client is registered for {node.registered!r}; use that name"
        if self.allowed_names and hello.name not in self.allowed_names and hello.name not in self._read_allowed():
            allowed = ", ".join(sorted(self.allowed_names))
            return f"{hello.name}: not a user of this federation; allowed: {allowed}"
        instance_with_name = self._instance_by_name.get(hello.name)
        if instance_with_name is not None and instance_with_name != hello.instance:
            return f"{hello.name}: another connected client has this name; use a different name"
        return ""

    def _refuse(self, node: Node, reason: str) -> None:
        """Refuse a node, and show the reason once to the operator and, in a message, to the client.

        Args:
            node: The node.
            reason: The reason, one line.
        """
        if self._refused.get(node) == reason:
            return
        self._refused[node] = reason
        self._say(f"refused: {reason}")
        self._sender.send(
            wrap(reason.encode()),
            node=node.number,
            kind=REFUSED,
            seconds=_HELLO_SECONDS,
            tag=node,
            on_reply=lambda _: None,  # the client's reply to a refusal does not matter
        )


_CHECK_SECONDS = 0.25
_MAX_TRIES = 3
"""Limit on attempts for a request whose client's worker, process or connection fails while it answers."""


@dataclass(eq=False)
class _Request:
    """A request to a client, which is in flight.

    Args:
        content: The bytes.
        node: The node to which it was sent; None if it has to be sent.
        disconnected_since: When the client disconnected, in seconds of the monotonic clock; None if it has not.
        num_failures: How often it failed for a reason that a retry may remove.
        last_failure: Why it failed last, one line.
        done: Whether its reply is not awaited any more.
    """

    content: bytes
    node: Node | None = None
    disconnected_since: float | None = None
    num_failures: int = 0
    last_failure: str = "not connected"
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
        read_allowed: Callable[[], Collection[str]] = tuple,
        name_seconds: float = 10.0,
        grace: float = 120.0,
    ) -> None:
        """Create a channel over a grid; clients may connect later.

        Args:
            grid: Flower's grid, through which messages are sent.
            say: Called with each line to show to the operator.
            allowed: Names of the users that may join; all if empty.
            read_allowed: Called when a client has another name; returns the names of users that may join too.
            name_seconds: How long to wait for the names of nodes that have just connected, in seconds.
            grace: How long to wait for a client that has disconnected, in seconds.
        """
        self._sender = MessageSender(grid)
        self._nodes = ConnectedNodes(grid, self._sender, say, allowed=allowed, read_allowed=read_allowed)
        self._name_seconds, self._grace = name_seconds, grace
        self._may_wait_for_names = True  # whether `present` waits for the names of new nodes

    def allow(self, names: Collection[str]) -> None:
        """Set the names of the users that may join; others are refused and disconnected."""
        self._nodes.allowed_names = frozenset(names)

    def present(self) -> Sequence[str]:
        """Return the names of connected users.

        Waits up to ``_name_seconds`` until nodes that have just connected have answered which user they belong to, but
        not while replies of other clients are in flight, which the wait would delay (``_may_wait_for_names``).
        """
        give_up_at = time.monotonic() + self._name_seconds
        self._nodes.refresh()
        while self._may_wait_for_names and self._nodes.awaits_name(self._name_seconds):
            if time.monotonic() >= give_up_at:
                break
            time.sleep(_CHECK_SECONDS)
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
        deadline = time.monotonic() + timeout
        # User, request and node, and the reply of this node:
        replies: queue.SimpleQueue[tuple[tuple[str, _Request, Node], Message | NoReply]] = queue.SimpleQueue()
        in_flight: dict[str, _Request] = {}
        try:
            while self._update(in_flight, requests):  # while replies are awaited
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    break
                self._nodes.refresh()
                yield from self._send_or_give_up(in_flight, seconds_left, replies)
                try:
                    # Short waits, so that new requests are sent and connections are checked in between.
                    (name, request, node), reply = replies.get(timeout=min(_CHECK_SECONDS, seconds_left))
                except queue.Empty:
                    continue
                was_replaced = in_flight.get(name) is not request
                was_sent_again = request.node != node  # to a node that was started since
                if request.done or was_replaced or was_sent_again:
                    continue
                result = _read_reply(request, reply)
                if result is not None:  # otherwise the next iteration sends the request again
                    request.done = True
                    yield name, result
            late = [name for name, request in in_flight.items() if not request.done]
        finally:
            for request in in_flight.values():
                request.done = True  # stops polling for its reply
        for name in late:
            yield name, f"no reply within {round(timeout, 1):g} s"

    def _update(self, in_flight: dict[str, _Request], requests: Mapping[str, bytes]) -> bool:
        """Update the requests in flight to those that the caller wants now; return whether a reply is still awaited.

        New requests are added, and sent later by :meth:`_send_if_needed`. Requests that the caller has removed or
        replaced are dropped.

        Args:
            in_flight: Requests by user, which is changed.
            requests: The bytes of the requests by user. The mapping may compute them when it is read, and call
                :meth:`present`.
        """
        self._may_wait_for_names = False  # a wait in `present` would delay the replies of all clients
        current_requests = dict(requests)  # may call `present`
        self._may_wait_for_names = True
        for name, request in list(in_flight.items()):
            is_current = current_requests.get(name) is request.content
            if not is_current:
                request.done = True
                del in_flight[name]
        for name in current_requests.keys() - in_flight.keys():
            in_flight[name] = _Request(current_requests[name])
        return any(not request.done for request in in_flight.values())

    def _send_or_give_up(
        self, in_flight: dict[str, _Request], seconds: float, replies: queue.SimpleQueue
    ) -> Iterator[tuple[str, str]]:
        """Send requests that their clients do not have yet; yield the user and the reason of those that have failed.

        Args:
            in_flight: Requests by user; those that have failed are marked as done.
            seconds: Timeout for the replies.
            replies: Queue into which the replies are put.
        """
        for name, request in in_flight.items():
            if request.done:
                continue
            reason = self._failure(request)
            if reason is not None:
                request.done = True
                yield name, reason
            else:
                self._send_if_needed(name, request, seconds, replies)

    def _send_if_needed(self, name: str, request: _Request, seconds: float, replies: queue.SimpleQueue) -> None:
        """Send a request to its client's node, unless the node has it already or the client is not connected.

        Args:
            name: Name of the user.
            request: The request; ``node`` is the node to which it was sent last.
            seconds: Timeout for its reply.
            replies: Queue into which the reply is put.
        """
        node = self._nodes.nodes.get(name)
        if node is None:  # not connected
            request.node = None
            request.disconnected_since = request.disconnected_since or time.monotonic()
            return
        was_sent_already = node == request.node  # a client that restarts has another node
        if was_sent_already:
            return
        request.node, request.disconnected_since = node, None

        def is_awaited() -> bool:
            return not request.done and request.node == node

        self._sender.send(
            wrap(request.content),
            node=node.number,
            kind=TRAIN,
            seconds=seconds,
            tag=(name, request, node),
            on_reply=replies.put,
            is_awaited=is_awaited,
        )

    def _failure(self, request: _Request) -> str | None:
        """Return why a request has failed for good; None if it may still succeed."""
        if request.num_failures >= _MAX_TRIES:
            return request.last_failure
        since = request.disconnected_since
        if since is not None and time.monotonic() - since > self._grace:
            return f"unreachable for {self._grace:g} s"
        return None


def _read_reply(request: _Request, reply: Message | NoReply) -> bytes | str | None:
    """Return the bytes of a client's reply, or one line that says why the request has failed for good.

    A transient failure is recorded in the request, which is sent again; the result is then None.

    Args:
        request: The request.
        reply: The reply, or why there is none.
    """
    if isinstance(reply, NoReply):
        result: bytes | Failure = Failure(line=reply.line, is_transient=True)
    else:
        result = unwrap(reply)
    if isinstance(result, bytes):
        return result
    if not result.is_transient:
        return result.line
    request.num_failures += 1
    request.last_failure = result.line
    request.node = None  # to be sent again
    return None
