"""A :class:`comingle.transports.channel.Channel` over Flower's grid."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from comingle.transports.flower.envelope import TRAIN, Failure, unwrap, wrap
from comingle.transports.flower.post import Late, Post
from comingle.transports.flower.roster import Node, Roster

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
