"""The server process of a federation: Flower's Fleet API for clients, and the app that runs the rounds.

The process is assembled from Flower's parts and leaves out two of its APIs. Neither the *Control API* (list and stop
runs, register nodes, submit apps) nor the *Runtime API* (hand tasks to executors) is served: keys are registered, the
run is created and messages are exchanged by function calls. :class:`Gate` filters requests to the Fleet API.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from fastapi import FastAPI
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_IN_MEMORY_DB_NAME,
    NOOP_FEDERATION_ID,
    OBJECT_PUSH_SESSION_TTL_SECONDS,
    TaskType,
)
from flwr.supercore.error import http_error_translator
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash, iterate_object_tree
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes, verify_signature
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import FederationManager, NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet_router
from flwr.superlink.servicer.runtime import runtime_handlers
from starlette import types
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from comingle.federation.flower.client_app import APP_ID, APP_VERSION, DIGEST, UNKNOWN_KEY, build_bundle
from comingle.federation.flower.processes import end_with_parent, load_app
from comingle.utils.errors import ComingleError, RecipeError
from comingle.utils.terminal import printable

_SPARE_SECONDS = 60.0
"""How long a complete reply outlives its message, since the app may still be reading it."""


@dataclass(frozen=True, kw_only=True)
class UploadLimits:
    """Limits on the replies of one client that the app has not read yet.

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
class _PendingReply:
    """A client's reply that the app has not read yet; its objects may still be missing."""

    node_id: int
    session_id: str
    """Flower's push session through which the client uploads the objects."""
    objects: frozenset[str]
    """IDs of all objects of the reply."""
    missing: set[str]
    """IDs of the objects that have not arrived yet."""
    expires_at_unix: float
    """Unix time after which a complete reply is dropped."""
    deadline_monotonic: float
    """Time on the monotonic clock after which an incomplete reply is dropped."""


@dataclass(kw_only=True)
class _IncompleteMessage:
    """A message of the server whose objects have not all been stored yet."""

    receiver: int
    missing: set[str]
    """IDs of the missing objects."""


class LimitedLinkState(InMemoryLinkState):
    """Flower's in-memory state of nodes, runs and messages, with limits on each client's replies (UploadLimits).

    A refused reply counts as not stored, like Flower's own invalid replies, and is logged as one line on stderr.
    """

    def __init__(
        self, federation_manager: FederationManager, object_store: ObjectStore, limits: UploadLimits | None = None
    ) -> None:
        """Create an empty state.

        Args:
            federation_manager: Flower's manager of federations.
            object_store: Where the parts of messages ("objects") are stored.
            limits: Limits on the pending replies of each client; None for the defaults.
        """
        super().__init__(federation_manager, object_store)
        self._limits = limits or UploadLimits()
        self._pending_replies: dict[str, _PendingReply] = {}  # by the ID of the reply, which is that of its root object
        self._incomplete: dict[str, _IncompleteMessage] = {}  # messages of the server, by push session
        self._wakers: dict[int, set[Callable[[], object]]] = {}  # by node: wake the requests that wait for a message

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """Store a message without its content, whose parts (objects of Flower) are uploaded afterwards.

        A client's reply is refused if it exceeds the limits. Until all of its parts have arrived it is pending.

        Args:
            message: The message, of the server or of a client.
            object_tree: Ids of the parts of its content.
            session_id: Id of the upload in which the parts follow.

        Returns:
            Whether it is stored, and the ids of the parts that the server does not have yet.
        """
        sender = message.metadata.src_node_id
        if sender == SUPERLINK_NODE_ID:
            return self._store_message_of_server(message, object_tree, session_id)
        with self.lock:
            self._delete_expired_replies()
            problem = self._reply_problem(message, object_tree)
            if problem:
                self._log_refusal(sender, problem)
                is_stored, ids_to_upload = False, list[str]()
            else:
                is_stored, ids_to_upload = super().store_message_and_object_tree(message, object_tree, session_id)
            if is_stored:
                request = self.message_ins_store[message.metadata.reply_to_message_id].metadata
                reply_id = object_tree.object_id
                self._pending_replies[reply_id] = _PendingReply(
                    node_id=sender,
                    session_id=session_id,
                    objects=frozenset(part.object_id for part in iterate_object_tree(object_tree)),
                    missing=set(ids_to_upload),
                    expires_at_unix=request.created_at + request.ttl + _SPARE_SECONDS,
                    deadline_monotonic=time.monotonic() + self._limits.idle_seconds,
                )
            if not ids_to_upload:  # the reply was refused, or all its objects are stored already
                self._cleanup_push_session(session_id, cleanup_messages=False)
            return is_stored, ids_to_upload

    def _store_message_of_server(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """Store a message from the server to a client, and wake the client's waiting request if it is complete.

        A message whose content has parts (objects of Flower) is complete when these have been uploaded too.

        Args:
            message: The message.
            object_tree: Ids of the parts of its content.
            session_id: Id of the upload in which the parts follow.

        Returns:
            Whether the message is stored, and the ids of the parts that the server does not have yet.
        """
        receiver = message.metadata.dst_node_id
        with self.lock:
            is_stored, ids_to_upload = super().store_message_and_object_tree(message, object_tree, session_id)
            if is_stored and ids_to_upload:
                self._incomplete[session_id] = _IncompleteMessage(receiver=receiver, missing=set(ids_to_upload))
        is_complete = is_stored and not ids_to_upload
        if is_complete:
            self._wake(receiver)
        return is_stored, ids_to_upload

    def _store_object_of_server(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        """Store an object of a message of the server, and wake the message's receiver if it was the last one.

        Arguments and result are those of :meth:`store_object`.
        """
        completed = None
        with self.lock:
            is_stored = super().store_object(run_id, session_id, object_id, object_content)
            message = self._incomplete.get(session_id)
            if message is not None:
                message.missing.discard(object_id)
                if not message.missing:
                    completed = self._incomplete.pop(session_id)
        if completed is not None:
            self._wake(completed.receiver)
        return is_stored

    async def wait_for_message(self, node_id: int, seconds: float) -> None:
        """Wait until there is a message for a client, or until ``seconds`` have passed.

        Args:
            node_id: Id of the client's connection (Flower's node id).
            seconds: Timeout.
        """
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:  # called in the thread that stores the message
            loop.call_soon_threadsafe(arrived.set)

        with self.lock:
            for message in self.message_ins_store.values():
                is_delivered = bool(message.metadata.delivered_at)
                if message.metadata.dst_node_id == node_id and not is_delivered:
                    return
            self._wakers.setdefault(node_id, set()).add(wake)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), seconds)
        finally:
            with self.lock:
                self._wakers[node_id].discard(wake)

    def _wake(self, node_id: int) -> None:
        """Wake the requests that wait for a message for a client."""
        with self.lock:
            wakers = list(self._wakers.get(node_id, ()))
        for wake in wakers:
            wake()

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        """Store a part of a message's content, unless the client has sent more than its limit of bytes.

        Messages are sent in parts, which Flower calls objects. A client's reply is pending until all of its parts have
        arrived. If its client exceeds the limit, the whole reply is deleted.

        Args:
            run_id: Flower's id of the run.
            session_id: Id of the upload in which the message was announced (:meth:`store_message_and_object_tree`).
            object_id: SHA-256 of the part.
            object_content: Bytes of the part.

        Returns:
            Whether it is stored.
        """
        with self.lock:  # prevents a deadlock: Flower's methods acquire its two locks in different orders
            reply_id = self._reply_of_session(session_id)
            if reply_id is None:  # not a reply of a client
                if not session_id:  # Flower would look for the session, and a client could evade its limit
                    return False
                return self._store_object_of_server(run_id, session_id, object_id, object_content)
            reply = self._pending_replies[reply_id]
            limit = self._limits.total_bytes
            exceeds_limit = self._pending_bytes(reply.node_id) + len(object_content) > limit
            if exceeds_limit:
                self._delete_reply(reply_id)
                self._log_refusal(reply.node_id, f"more than {limit} bytes pending; allowed: {limit}")
                return False
            if not super().store_object(run_id, session_id, object_id, object_content):
                return False
            reply.missing.discard(object_id)  # ids of the parts that have not arrived yet
            reply.deadline_monotonic = time.monotonic() + self._limits.idle_seconds
            return True

    def _reply_of_session(self, session_id: str) -> str | None:
        """Return the ID of the reply whose objects a client uploads in a push session.

        Returns:
            None if no reply is pending in the session, for example because the server uploads a request in it.
        """
        for reply_id, reply in self._pending_replies.items():
            if reply.session_id == session_id:
                return reply_id
        return None

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        """Return an object's content, or None if it is not stored."""
        with self.lock:  # prevents a deadlock: Flower's methods acquire its two locks in different orders
            return super().get_object(run_id, object_id)

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """Return messages for a client, after deleting replies that have expired, to free memory.

        Each client asks for messages regularly, so expired replies are deleted even if no new ones arrive.

        Args:
            node_id: Id of the client's connection (Flower's node id).
            limit: Maximum number of messages; None for all.
            run_id: The run; None for any.
        """
        with self.lock:
            self._delete_expired_replies()
            return super().get_message_ins(node_id, limit, run_id=run_id)

    def _reply_problem(self, message: Message, tree: ObjectTree) -> str:
        """Return why a reply is refused, before its content is uploaded; an empty string if it is accepted.

        Args:
            message: The reply, without its content.
            tree: IDs of its objects, as the client states them.
        """
        node_id, limits = message.metadata.src_node_id, self._limits
        if tree.object_id != message.metadata.message_id:
            return "got objects of another message"
        num_others = 0  # other pending replies of this client
        for reply_id, reply in self._pending_replies.items():
            if reply.node_id == node_id and reply_id != tree.object_id:
                num_others += 1
        if num_others >= limits.replies:
            return f"{limits.replies + 1} pending replies; allowed: {limits.replies}"
        # An object must have the same children wherever it occurs, also in earlier messages. Otherwise a small message
        # could expand to a tree of any size when it is read.
        known_children: dict[str, list[str]] = {}
        for count, part in enumerate(iterate_object_tree(tree), start=1):
            if count > limits.objects:
                return f"more than {limits.objects} objects; allowed: {limits.objects}"
            if not is_valid_sha256_hash(part.object_id):
                return "an object ID is not a SHA-256 hash"
            children = [child.object_id for child in part.children]
            if part.object_id not in known_children:
                known_children[part.object_id] = self._registered_children(part.object_id, children)
            if known_children[part.object_id] != children:
                return f"object {part.object_id[:12]} has two different lists of children"
        return ""

    def _registered_children(self, object_id: str, default: list[str]) -> list[str]:
        """Return the announced ids of an object's parts, or ``default`` if the object was not announced.

        Flower sends a message as a tree of objects.

        Args:
            object_id: Id of the object, a SHA-256.
            default: Result for an object that is not stored.
        """
        if object_id not in self.object_store:
            return default
        return [child.object_id for child in self.object_store.get_object_tree(object_id).children]

    def _pending_bytes(self, node_id: int) -> int:
        """Return how many bytes of a client's pending replies have arrived; objects in several replies count once."""
        object_ids: set[str] = set()
        for reply in self._pending_replies.values():
            if reply.node_id == node_id:
                object_ids |= reply.objects
        contents = [self.object_store.get(object_id) for object_id in object_ids]
        return sum(len(content) for content in contents if content is not None)

    def _delete_expired_replies(self) -> None:
        """Delete replies that the app has read, that have expired, or that were not completed in time."""
        for reply_id, reply in list(self._pending_replies.items()):
            was_read = reply_id not in self.object_store  # Flower deletes the objects of a reply that was read
            has_stalled = bool(reply.missing) and time.monotonic() > reply.deadline_monotonic
            if was_read:
                self._delete_reply(reply_id)
            elif has_stalled:
                self._delete_reply(reply_id)
                self._log_refusal(reply.node_id, f"not completed within {self._limits.idle_seconds:g} s")
            elif time.time() > reply.expires_at_unix:
                self._delete_reply(reply_id)

    def _delete_reply(self, reply_id: str) -> None:
        """Delete a client's reply that has been read, has expired or exceeds a limit, even if it is incomplete.

        Flower sends a reply as a tree of objects, in several requests that form a push session; the session is ended.

        Args:
            reply_id: ID of the reply, which is that of the root of its tree.
        """
        reply = self._pending_replies.pop(reply_id)
        self._cleanup_push_session(reply.session_id, cleanup_messages=False)
        if reply_id in self.object_store:
            self.object_store.delete(reply_id)
            self._on_push_session_expired({reply_id})  # Flower's method that deletes the message itself

    def _log_refusal(self, node_id: int, problem: str) -> None:
        """Write to the server's log, which the operator sees, why a client's reply was refused."""
        node = self.nodes.get(node_id)
        client = printable(node.name) if node and node.name else str(node_id)
        print(f"comingle: refused a reply of client {client}: {problem}", file=sys.stderr, flush=True)


FLEET = "/v1/fleet/"
MAX_OBJECT_BODY_BYTES = 32 << 20
"""Size limit of a request body with an object. Flower sends arrays in objects of 5 MiB each."""

MAX_OTHER_BODY_BYTES = 1 << 20
"""Size limit of all other request bodies: the IDs of 4,096 objects take a third of it."""

MAX_HEADER_BYTES = 64 << 10
"""Size limit of request line and headers together, which are read before the gate sees the request."""

POLL_SECONDS = 3.0
"""Longest wait for a message before a poll is answered; Flower's clients give up a request after 5 s."""

_TASK_HEARTBEAT_SECONDS = 15.0
_START_SECONDS = 300.0


class Gate:
    """ASGI middleware for the Fleet API that refuses bad requests before their bodies are read, and holds polls.

    A poll, which asks for a message, is passed on once there is a message, or after :data:`POLL_SECONDS`.

    Args:
        app: The Fleet API.
        state: Where keys are registered, and messages are stored.
        keys_only: Whether only clients with registered keys are admitted. Otherwise clients register keys themselves,
            and signatures are not checked.
        register_new_keys: Called when a client has another key; registers keys that the operator has added meanwhile.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: LimitedLinkState,
        *,
        keys_only: bool,
        register_new_keys: Callable[[], None] = lambda: None,
    ) -> None:
        """Wrap an app.

        Args:
            app: The Fleet API.
            state: Where keys are registered, and messages are stored.
            keys_only: Whether only clients with registered keys are admitted, and signatures are checked.
            register_new_keys: Called when a client has another key; registers keys that the operator has added.
        """
        self._app, self._state, self._keys_only = app, state, keys_only
        self._register_new_keys = register_new_keys
        self._used_signatures: dict[tuple[bytes, int], float] = {}
        """Time of use on the monotonic clock by (public key, first number of the signature), to refuse a second use."""
        self._lock = threading.Lock()
        self._started_at = time.time()
        """Signatures from before this time are refused, as an earlier process of the server may have accepted them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request of a client: refuse it, hold it back if it is a poll, or pass it on to the Fleet API.

        Clients poll for messages. A poll is held until there is a message, so that clients need not poll often.
        """
        if scope["type"] == "lifespan":  # start or end of the server, no request
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # "policy violation": no WebSockets
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        is_poll = scope["path"] == f"{FLEET}pull-messages"
        node_id = self._node_of_sender(scope) if is_poll else None
        if node_id is not None:
            await self._hold_poll(node_id, scope, receive, send)
        else:
            await self._forward_with_limit(scope, receive, send)

    async def _hold_poll(self, node_id: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a client's poll, a request for its messages, once there is one for it, or after some seconds.

        If the client disconnects meanwhile, drop the poll, since the message in the response would be lost.

        Args:
            node_id: Id of the client's connection (Flower's node id).
            scope: The request without its body.
            receive: Returns the next part of the body, and then waits until the client disconnects.
            send: Sends the response.
        """
        body, has_more = b"", True
        while has_more:
            part = await receive()
            body += part.get("body", b"")
            if part["type"] == "http.disconnect" or len(body) > MAX_OTHER_BODY_BYTES:
                return
            has_more = part.get("more_body", False)
        disconnected = asyncio.ensure_future(receive())
        waiting = asyncio.ensure_future(self._state.wait_for_message(node_id, POLL_SECONDS))
        try:
            await asyncio.wait((waiting, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if disconnected.done():
                return
        finally:
            waiting.cancel()
            disconnected.cancel()
        whole_body: types.Message = {"type": "http.request", "body": body, "more_body": False}
        unread_parts = [whole_body]  # which the API has not read yet

        async def receive_from_memory() -> types.Message:
            if unread_parts:
                return unread_parts.pop()
            return await receive()

        await self._app(scope, receive_from_memory, send)

    def _node_of_sender(self, scope: Scope) -> int | None:
        """Return the node of the client that sends a request, by its public key; None without a registered key."""
        header = FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode("latin-1")
        encoded_key = b""
        for name, value in scope["headers"]:
            if name.lower() == header:
                encoded_key = value
                break
        try:
            return self._state.get_node_id_by_public_key(base64.b64decode(encoded_key, validate=True))
        except ValueError:  # not base64
            return None

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the response that refuses a request; None if the request may pass."""
        if scope["method"] != "POST" or not str(scope["path"]).startswith(FLEET):
            return PlainTextResponse("not found\n", status_code=404)
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        has_repeated_header = len(headers) != len(scope["headers"])
        if has_repeated_header:  # The gate and Flower might read different values.
            return PlainTextResponse("repeated header\n", status_code=400)
        if self._keys_only:  # only clients with registered keys are admitted
            problem = self._signature_problem(self._state, headers)
            if problem:
                return JSONResponse({"detail": problem}, status_code=401)
        if int(headers.get("content-length") or 0) > _max_body_bytes(scope):
            return PlainTextResponse("too large\n", status_code=413)
        return None

    def _signature_problem(self, state: LinkState, headers: Mapping[str, bytes]) -> str:
        """Return why the request's signature is refused; an empty string if it is valid.

        A client signs the time of its request. Each signature is accepted once, so that a recorded request cannot be
        replayed.

        Args:
            state: Where keys are registered.
            headers: Headers of the request, with public key, signature and signed time.
        """
        try:
            key = base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            signed_text = headers[TIMESTAMP_HEADER]
            signed_at = datetime.datetime.fromisoformat(signed_text.decode("ascii")).timestamp()
            if state.get_node_id_by_public_key(key) is None:
                self._register_new_keys()
            if state.get_node_id_by_public_key(key) is None:
                return UNKNOWN_KEY
            if not verify_signature(bytes_to_public_key(key), signed_text, signature):
                return "the signature is not valid"
            (r, _s) = decode_dss_signature(signature)
        except (KeyError, ValueError, TypeError, UnicodeError):
            return "not signed"
        age_seconds = time.time() - signed_at
        # The clocks of client and server may differ by SYSTEM_TIME_TOLERANCE.
        is_recent = -SYSTEM_TIME_TOLERANCE < age_seconds < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        if not is_recent:
            return f"signed {age_seconds:.0f} s ago by this server's clock; set the clocks of client and server"
        if signed_at < self._started_at:  # an earlier process of this server may have accepted the signature
            return "signed before this server started; sign again"
        if self._record_signature(key, r):
            return "the signature was used before"
        return ""

    def _record_signature(self, key: bytes, r: int) -> bool:
        """Record that a signature was used, and return whether it had been used before.

        Args:
            key: The public key.
            r: First part of the ECDSA signature ``(r, s)``. The second part does not distinguish signatures, since
                ``(r, -s)`` is valid too.
        """
        signature = (key, r)
        longest_valid_seconds = TIMESTAMP_TOLERANCE + 2 * SYSTEM_TIME_TOLERANCE  # see `_signature_problem`
        now = time.monotonic()
        with self._lock:
            # A call adds one signature and checks the two oldest, so expired ones do not pile up.
            two_oldest = list(self._used_signatures.items())[:2]
            for old_signature, used_at in two_oldest:
                has_expired = now - used_at > longest_valid_seconds  # `_signature_problem` refuses its time
                if has_expired:
                    del self._used_signatures[old_signature]
            was_used_before = signature in self._used_signatures
            if not was_used_before:
                self._used_signatures[signature] = now
            return was_used_before

    async def _forward_with_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the Fleet API, which reads its body in parts, up to the limit on its size.

        Args:
            scope: The request without its body, whose header may declare a wrong length.
            receive: Returns the next part of the body.
            send: Sends the response.
        """
        bytes_left = _max_body_bytes(scope)

        async def receive_with_limit() -> types.Message:
            """Return the next part of the body, or that the client has disconnected if the body is too large."""
            nonlocal bytes_left
            part = await receive()
            bytes_left -= len(part.get("body", b""))
            if bytes_left < 0:
                return {"type": "http.disconnect"}
            return part

        await self._app(scope, receive_with_limit, send)


def _max_body_bytes(scope: Scope) -> int:
    """Return the limit on a request's body: large for uploads of an object's content, small for all other requests."""
    carries_object = scope["path"] == f"{FLEET}push-object"
    return MAX_OBJECT_BODY_BYTES if carries_object else MAX_OTHER_BODY_BYTES


class _OwnMessagesOnly(BaseHTTPMiddleware):
    """Refuses replies whose sender is not the node that has signed the request."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Pass a request on, or refuse it: 400 for a wrong number of replies, 401 for another node's reply."""
        push_request = getattr(request.state, "protobuf_request", None)
        if not isinstance(push_request, PushMessagesRequest):  # another request, which has no replies
            return await call_next(request)
        if len(push_request.messages_list) != 1 or len(push_request.message_object_trees) != 1:
            return JSONResponse({"detail": "expected one reply with one tree of objects"}, status_code=400)
        (reply,) = push_request.messages_list
        if reply.metadata.src_node_id != push_request.node.node_id:
            return JSONResponse({"detail": "got a reply of another node"}, status_code=401)
        return await call_next(request)


def make_fleet_api(
    states: LinkStateFactory, *, keys_only: bool, register_new_keys: Callable[[], None] = lambda: None
) -> Gate:
    """Return the ASGI app of a federation: the Fleet API behind a :class:`Gate`.

    Args:
        states: Holds nodes, runs and messages.
        keys_only: Admit only clients with registered keys, and check signatures. Otherwise clients register generated
            keys.
        register_new_keys: Called when a client has another key; see :class:`Gate`.
    """
    api = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        middleware=[  # in the order in which requests pass it; the last one is comingle's, the others are Flower's
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
            Middleware(_OwnMessagesOnly),
        ],
    )
    # Settings that Flower's API reads.
    api.state.linkstate_factory = states
    api.state.enable_supernode_auth = keys_only
    api.state.fleet_event_log_plugin = None
    api.include_router(fleet_router)
    state = cast(LimitedLinkState, states.state())
    return Gate(api, state, keys_only=keys_only, register_new_keys=register_new_keys)


class _InProcessRuntime:
    """The part of Flower's Runtime API that a grid needs, as function calls, under Flower's names."""

    def __init__(self, state: LinkState, task: Task) -> None:
        """Connect the app with the server's state in this process."""
        self._state, self._task = state, task

    def GetNodes(self, request: Any) -> Any:
        """Return the connected clients; called by Flower's grid."""
        return runtime_handlers.get_nodes(request, self._state, self._task)

    def PushMessages(self, request: Any) -> Any:
        """Store messages for clients; called by Flower's grid."""
        return runtime_handlers.push_messages(request, self._state, self._task)

    def PullMessages(self, request: Any) -> Any:
        """Return replies of clients; called by Flower's grid."""
        return runtime_handlers.pull_messages(request, self._state, self._task)

    def PushObject(self, request: Any) -> Any:
        """Store a part of a message's content; called by Flower's grid."""
        return runtime_handlers.push_object(request, self._state, self._task)

    def PullObject(self, request: Any) -> Any:
        """Return a part of a reply's content; called by Flower's grid."""
        return runtime_handlers.pull_object(request, self._state, self._task)

    def ConfirmMessageReceived(self, request: Any) -> Any:
        """Delete a reply that was read; called by Flower's grid."""
        return runtime_handlers.confirm_message_received(request, self._state, self._task)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class InProcessGrid(HttpGrid):
    """Flower's grid, through which a ServerApp sends messages to clients, on the state in this process.

    Calls functions where :class:`HttpGrid` sends requests, so that no Runtime API has to be served; everything else,
    such as splitting messages into objects, is Flower's.
    """

    def __init__(self, state: LinkState, run_id: int) -> None:
        """Create the grid of a run.

        Args:
            state: Flower's state of nodes, runs and messages.
            run_id: ID of the run, which exists in the state.
        """
        # The address and the token are not used, as nothing is sent over a network.
        super().__init__("in this process", insecure=True, token="none")
        (run,) = state.get_run_info(run_ids=[run_id])
        task = Task(task_id=run.primary_task_id or 0, run_id=run_id)
        runtime = _InProcessRuntime(state, task)
        self._client = cast(RuntimeHttpClient, runtime)  # `HttpGrid` calls its methods
        self.set_run(run)


def create_active_run(state: LinkState) -> int:
    """Create the federation's only run in Flower's state, and keep it alive by heartbeats from a thread.

    Without a run that is alive, Flower sends no messages to clients.

    Args:
        state: Flower's state of nodes, runs and messages.

    Returns:
        The ID of the run.
    """
    # Clients accept messages only of a run that announces this bundle's digest.
    state.store_fab(Fab(DIGEST, build_bundle(), {}))
    run_id = state.create_run(
        fab_id=APP_ID,
        fab_version=APP_VERSION,
        fab_hash=DIGEST,
        override_config={},
        federation_id=NOOP_FEDERATION_ID,
        federation_config=None,
        flwr_aid=NOOP_FLWR_AID,
        primary_task_type=TaskType.SERVER_APP,
    )
    (run,) = state.get_run_info(run_ids=[run_id])
    task_id = run.primary_task_id
    assert task_id is not None
    started = state.claim_task(task_id) and state.activate_task(task_id)
    assert started, "a run that was just created can be started"
    # Flower's grid reads the identity of this process here.
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, task_id, SUPERLINK_NODE_ID

    def keep_alive() -> None:
        while state.acknowledge_task_heartbeat(task_id):
            time.sleep(_TASK_HEARTBEAT_SECONDS)

    threading.Thread(target=keep_alive, daemon=True).start()
    return run_id


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key in OpenSSH format.

    Raises:
        RecipeError: It is damaged, or of another kind.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        raise RecipeError(f"{path}: got no key; allowed: an elliptic-curve key in OpenSSH format") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise RecipeError(f"{path}: got another kind of key; allowed: an elliptic-curve key")
    return key


def register_keys(state: LinkState, keys: Mapping[str, Path]) -> None:
    """Register each user's public key under the user's name.

    Args:
        state: Flower's state of nodes, runs and messages.
        keys: Files with a public key in OpenSSH format, by user.

    Raises:
        RecipeError: A file holds a key of another kind.
    """
    for name, path in keys.items():
        key_bytes = public_key_to_bytes(load_public_key(path))
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key_bytes, HEARTBEAT_DEFAULT_INTERVAL, name=name)


class KeyFolder:
    """A folder with a public key of each user, to which the operator may add keys while the server runs.

    Args:
        state: Flower's state, in which keys are registered.
        folder: The folder; its files are ``NAME.pub``.
    """

    def __init__(self, state: LinkState, folder: Path) -> None:
        """Watch a folder with public keys of clients, and register none of them yet."""
        self._state, self._folder = state, folder
        self._read_at = -math.inf  # on the monotonic clock

    def register_new_keys(self) -> None:
        """Register the keys that are not registered yet; at most once per second, as any program may ask for it."""
        if time.monotonic() - self._read_at < 1.0:
            return
        self._read_at = time.monotonic()
        for path in sorted(self._folder.glob("*.pub")):
            with suppress(OSError, RecipeError):  # the operator is writing the file, or it is damaged
                key = public_key_to_bytes(load_public_key(path))
                if self._state.get_node_id_by_public_key(key) is None:
                    register_keys(self._state, {unquote(path.stem): path})


def serve_fleet_api(
    app: ASGIApp,
    host: str,
    port: int,
    certificate: Path | None,
    key: Path | None,
    *,
    bound: socket.socket | None = None,
) -> uvicorn.Server:
    """Serve the Fleet API over HTTP, with TLS if there is a certificate, in a thread; return once it listens.

    Args:
        app: The Fleet API.
        host: Address to listen on.
        port: Port to listen on.
        certificate: The server's certificate; None serves without TLS.
        key: The private key of the certificate.
        bound: Socket that is already bound to the address; None binds one.

    Raises:
        RuntimeError: The address cannot be used.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        http="h11",  # the other parser, httptools, bounds neither headers nor the request target
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        access_log=False,
        server_header=False,
        log_level="warning",
    )
    server = uvicorn.Server(config)
    sockets = None if bound is None else [bound]
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True)
    thread.start()
    give_up_at = time.monotonic() + _START_SECONDS
    while not server.started:
        has_failed = not thread.is_alive()
        if has_failed or time.monotonic() > give_up_at:
            raise RuntimeError(f"cannot listen on {host}:{port}")
        time.sleep(0.02)
    return server


def make_states(limits: UploadLimits | None = None) -> LinkStateFactory:
    """Return a factory, as Flower's Fleet API needs one, that always returns the same :class:`LimitedLinkState`.

    Args:
        limits: Limits on each client's replies; None for the defaults.
    """
    objects, manager = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME), NoOpFederationManager()
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, manager, objects)
    factory.state_instance = LimitedLinkState(manager, objects.store(), limits)  # instead of Flower's own state
    return factory


def main() -> None:
    """Run the server process: serve clients in a thread, and run the app with the rounds in the main thread.

    The exit status is 0 after the last round, 2 after a mistake of the operator, and 1 after any other failure. The app
    writes its status into the run folder (:mod:`comingle.federation.flower.processes`).
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--socket", type=int, help="Inherited file descriptor of a socket that is bound to the port.")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--private-key", type=Path)
    parser.add_argument("--keys", type=json.loads, default={}, help="Names of users and files of their public keys.")
    parser.add_argument("--key-folder", type=Path, help="Register keys that are added here while the server runs.")
    parser.add_argument("--run-config", type=json.loads, default={})
    parser.add_argument("--app", required=True, help="Import path of the ServerApp.")
    options = parser.parse_args()
    end_with_parent()  # also if the parent is killed
    state_factory = make_states()
    state = state_factory.state()  # nodes, runs and messages, in memory
    try:
        register_keys(state, {name: Path(path) for name, path in options.keys.items()})
        run_id = create_active_run(state)
        new_keys: dict[str, Callable[[], None]] = {}
        if options.key_folder is not None:
            new_keys["register_new_keys"] = KeyFolder(state, options.key_folder).register_new_keys
        api = make_fleet_api(state_factory, keys_only=bool(options.keys), **new_keys)
        inherited_socket = None if options.socket is None else socket.socket(fileno=options.socket)
        serve_fleet_api(
            api, options.host, options.port, options.certificate, options.private_key, bound=inherited_socket
        )
        context = Context(
            run_id=run_id,
            node_id=SUPERLINK_NODE_ID,
            node_config={},
            state=RecordDict(),
            run_config=options.run_config,
        )
        server_app = load_app(options.app)
        server_app(InProcessGrid(state, run_id), context)  # returns after the last round
    except ComingleError as error:
        print(f"comingle: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
