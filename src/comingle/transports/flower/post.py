"""Sends single messages through Flower's grid and waits for their replies, each in a thread of its own.

So nobody waits for a user whose reply is slow, or whose machine has died while it was sending one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

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
