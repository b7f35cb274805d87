"""Limits on what one client can make the server hold in memory."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS
from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash, iterate_object_tree
from flwr.supercore.object_store import ObjectStore
from flwr.superlink.federation import FederationManager

from comingle.utils.terminal import printable

_SPARE_SECONDS = 60.0
"""How long a complete reply outlives its message: the coordinator may be reading it."""


@dataclass(frozen=True, kw_only=True)
class UploadLimits:
    """Limits on the replies of one client that the coordinator has not taken yet.

    Args:
        replies: Number of replies, complete or not.
        objects: Number of objects in one reply; Flower splits arrays into objects of 5 MiB.
        total_bytes: Bytes of all replies together.
        idle_seconds: Seconds without a new object after which an incomplete reply is dropped.
    """

    replies: int = 64
    objects: int = 4096
    total_bytes: int = 4 << 30
    idle_seconds: float = OBJECT_PUSH_SESSION_TTL_SECONDS


@dataclass(kw_only=True)
class _Upload:
    """A reply that the coordinator has not taken yet."""

    node_id: int
    session_id: str
    objects: frozenset[str]
    pending: set[str]
    drop_at: float
    """Unix time after which a complete reply is dropped."""
    idle_at: float
    """Time on the monotonic clock after which an incomplete reply is dropped."""


class LimitedLinkState(InMemoryLinkState):
    """Flower's state in memory, with :class:`UploadLimits` on the replies of each client.

    A refused reply counts as not stored, as Flower's own invalid replies do, and is one line on stderr.

    Args:
        federation_manager: Flower's manager of federations.
        object_store: Where the parts of messages are stored.
        limits: Limits on each client.
    """

    def __init__(
        self, federation_manager: FederationManager, object_store: ObjectStore, limits: UploadLimits | None = None
    ) -> None:
        super().__init__(federation_manager, object_store)
        self._limits = limits or UploadLimits()
        self._uploads: dict[str, _Upload] = {}

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """Store a message and register its objects; refuse a reply that exceeds the limits."""
        if (node_id := message.metadata.src_node_id) == SUPERLINK_NODE_ID:
            return super().store_message_and_object_tree(message, object_tree, session_id)
        with self.lock:
            self._expire()
            if problem := self._problem(message, object_tree):
                self._refuse(node_id, problem)
                stored, pending = False, list[str]()
            else:
                stored, pending = super().store_message_and_object_tree(message, object_tree, session_id)
            if stored:
                asked = self.message_ins_store[message.metadata.reply_to_message_id].metadata
                self._uploads[object_tree.object_id] = _Upload(
                    node_id=node_id,
                    session_id=session_id,
                    objects=frozenset(part.object_id for part in iterate_object_tree(object_tree)),
                    pending=set(pending),
                    drop_at=asked.created_at + asked.ttl + _SPARE_SECONDS,
                    idle_at=time.monotonic() + self._limits.idle_seconds,
                )
            if not pending:
                self._cleanup_push_session(session_id, cleanup_messages=False)
            return stored, pending

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        """Store an object of a registered reply; drop the reply if its client exceeds the limit of bytes."""
        with self.lock:  # Flower's own order of its two locks differs between methods
            found = next((name for name, one in self._uploads.items() if one.session_id == session_id), None)
            if found is None:
                return super().store_object(run_id, session_id, object_id, object_content) if session_id else False
            upload = self._uploads[found]
            limit = self._limits.total_bytes
            if self._bytes_of(upload.node_id) + len(object_content) > limit:
                self._drop(found)
                self._refuse(upload.node_id, f"more than {limit} bytes; allowed: {limit} that are not taken yet")
                return False
            if not super().store_object(run_id, session_id, object_id, object_content):
                return False
            upload.pending.discard(object_id)
            upload.idle_at = time.monotonic() + self._limits.idle_seconds
            return True

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        """Return an object's content."""
        with self.lock:
            return super().get_object(run_id, object_id)

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """Return messages for a client; drop replies that nobody waits for."""
        with self.lock:
            self._expire()
            return super().get_message_ins(node_id, limit, run_id=run_id)

    def _problem(self, message: Message, tree: ObjectTree) -> str:
        """Return why a reply is refused; empty where it is not."""
        node_id, limits = message.metadata.src_node_id, self._limits
        if tree.object_id != message.metadata.message_id:
            return "objects of another message"
        others = [one for name, one in self._uploads.items() if name != tree.object_id and one.node_id == node_id]
        if len(others) >= limits.replies:
            return f"{limits.replies + 1} replies that are not taken yet; allowed: {limits.replies}"
        children: dict[str, list[str]] = {}
        for count, part in enumerate(iterate_object_tree(tree), start=1):
            if count > limits.objects:
                return f"more than {limits.objects} objects; allowed: {limits.objects}"
            if not is_valid_sha256_hash(part.object_id):
                return "the ID of an object is no SHA-256"
            # An object that is registered with other children could unfold to a tree of any size when it is read.
            named = [child.object_id for child in part.children]
            if children.setdefault(part.object_id, self._registered(part.object_id, named)) != named:
                return f"object {part.object_id[:12]} with two different lists of children"
        return ""

    def _registered(self, object_id: str, named: list[str]) -> list[str]:
        """Return the children with which an object is registered; ``named`` for an object that is not."""
        if object_id not in self.object_store:
            return named
        return [child.object_id for child in self.object_store.get_object_tree(object_id).children]

    def _bytes_of(self, node_id: int) -> int:
        """Return the bytes of all objects of a client's replies, whichever reply they came with."""
        objects = {part for one in self._uploads.values() if one.node_id == node_id for part in one.objects}
        return sum(len(self.object_store.get(part) or b"") for part in objects)

    def _expire(self) -> None:
        """Forget replies that were taken; drop those that nobody waits for and those that are not completed."""
        for name, upload in list(self._uploads.items()):
            if name not in self.object_store:
                self._drop(name)
            elif upload.pending and time.monotonic() > upload.idle_at:
                self._drop(name)
                self._refuse(upload.node_id, f"not completed within {self._limits.idle_seconds:g} s")
            elif time.time() > upload.drop_at:
                self._drop(name)

    def _drop(self, name: str) -> None:
        """Delete a reply and its objects."""
        upload = self._uploads.pop(name)
        self._cleanup_push_session(upload.session_id, cleanup_messages=False)
        if name in self.object_store:
            self.object_store.delete(name)
            self._on_push_session_expired({name})

    def _refuse(self, node_id: int, problem: str) -> None:
        node = self.nodes.get(node_id)
        who = printable(node.name) if node and node.name else str(node_id)
        print(f"comingle: refused a reply of client {who}: {problem}", file=sys.stderr, flush=True)
