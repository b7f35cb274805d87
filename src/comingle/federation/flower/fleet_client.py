"""A client's side of Flower's Fleet API: takes messages from the server and sends replies.

It opens connections but does not listen. It reads a run's ID and the digest of its app, but never the app itself:
messages go to the :class:`~flwr.clientapp.ClientApp` that is installed here, and those of any other app are refused
(:mod:`comingle.federation.flower.client_app`).

It reconnects after network failures without a time limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from comingle.federation.flower.client_app import DIGEST, UNKNOWN_KEY
from comingle.federation.flower.probe import certificate_problem
from comingle.utils.errors import RunError
from comingle.utils.records import write_text
from comingle.utils.terminal import printable

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.2, 5.0
_HEARTBEAT_SECONDS, _CHECK_SECONDS = 7.0, 0.5
_KEY_IN_USE_SECONDS = 4.0 * HEARTBEAT_MIN_INTERVAL
"""Time after which another client with the same key counts as alive.

A killed client stays active on the server for 2 heartbeat intervals, which blocks other clients with its key.
"""

_NOT_AUTHENTICATED, _KEY_IN_USE, _RUN_HAS_ENDED = (401,), (412,), (403, 404)
"""HTTP statuses: client not authenticated; node cannot be activated (key in use); run of the message has ended."""

_FINAL_STATUSES = (*_NOT_AUTHENTICATED, *_KEY_IN_USE, *_RUN_HAS_ENDED)
"""Statuses that are not retried. Others come from a gateway, a server that is starting, or a corrupted request."""

_POLL_SECONDS = 0.2
"""Pause after a poll without a message. The server holds polls for seconds; one that does not is not flooded."""

_MAX_REJECTIONS = 100
"""Retries of a request that the server rejects, up to 5 s apart: outlasts a few minutes of gateway errors."""


class NotActiveError(Exception):
    """The server does not know this client any more: it was restarted, or the client missed too many heartbeats."""


class MissedMessageError(NotActiveError):
    """A response was lost that may have held a message, which the server considers delivered."""


class RunOverError(Exception):
    """The run of a message has ended, or does not exist on this server."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Address of the server and files that authenticate both sides.

    Args:
        address: ``HOST:PORT``.
        authority: Certificate of the authority that has signed the server's; None for a connection without TLS.
        key: The user's private key in OpenSSH format; None to generate one.
    """

    address: str
    authority: Path | None = None
    key: Path | None = None


class FleetConnection:
    """A client's connection to the Fleet API, which reconnects after failures."""

    def __init__(self, server: Server, node_id_file: Path, say: Callable[[str], None]) -> None:
        """Read or generate the key by which the server knows this client; :meth:`activate` connects.

        Args:
            server: Address, certificates and key for the connection.
            node_id_file: File that stores the ID of this client's node, which the next process deactivates if this one
                is killed.
            say: Called with each line to show the user.
        """
        self._server, self._node_id_file, self._say = server, node_id_file, say
        if server.key is not None:
            self._private_key, self._public_key = _read_key(server.key)
        else:
            self._private_key, self._public_key = generate_key_pairs()
        self._http = self._connect()
        self._node = Node()  # replaced by the node that the server activates
        self._app_digests: dict[int, str] = {}  # of the app bundles that the server announces, by run ID
        self._last_lost_at = time.monotonic()  # when a request or response was lost last, or activation began
        self.closed = threading.Event()
        """Set once this client has closed the connection."""
        self.deactivated = threading.Event()
        """Set once the server does not know this client any more."""
        self._heartbeats: threading.Thread | None = None  # sends those of the current node
        self._end_heartbeats = threading.Event()
        """Set to end the thread that sends heartbeats."""

    @property
    def node_id(self) -> int:
        """The ID that the server has given this client."""
        return self._node.node_id

    def activate(self) -> None:
        """Make this client an active node of the server, and start the thread that sends its heartbeats.

        Raises:
            RunError: The key is not registered, or another active client uses it.
        """
        # From here on, the server may hold an earlier activation of this key for a while; see `_try_to_activate`.
        self._last_lost_at = time.monotonic()
        self._stop_heartbeats()  # one would make the earlier node active again, which blocks this client's key
        self._deactivate_previous()
        node_id = None
        while node_id is None:
            node_id = self._try_to_activate()
            if node_id is None:
                time.sleep(1.0)
        self._node = Node(node_id=node_id)
        write_text(self._node_id_file, str(node_id))
        self.deactivated.clear()
        self._app_digests.clear()  # a restarted server has other runs
        self._end_heartbeats = threading.Event()
        keep_alive_arguments = (self._node, self._end_heartbeats)
        self._heartbeats = threading.Thread(target=self._keep_alive, args=keep_alive_arguments, daemon=True)
        self._heartbeats.start()

    def _try_to_activate(self) -> int | None:
        """Return the ID of a new node, or None if activation has to be tried again.

        Raises:
            RunError: The key is not registered, or another active client uses it.
        """
        public_key = public_key_to_bytes(self._public_key)
        try:
            if self._server.key is None:
                self._register(public_key)
            request = ActivateNodeRequest(public_key=public_key, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
            return self._call("ActivateNode", request).node_id
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status not in _FINAL_STATUSES:  # `_call` has retried it, and given up
                raise
            if status in _NOT_AUTHENTICATED:
                reason = self._why_not_authenticated(error)
                if reason:
                    raise RunError(f"{self._server.address}: {reason}") from None
            # After a lost connection, the server holds this client's earlier node, with the same key, for some seconds.
            may_hold_earlier_node = time.monotonic() <= self._last_lost_at + _KEY_IN_USE_SECONDS
            is_shared_key = self._server.key is not None  # a generated key is used by this client alone
            if status in _KEY_IN_USE and is_shared_key and not may_hold_earlier_node:
                raise RunError(f"{self._server.address}: another client uses the key {self._server.key}") from None
            return None

    def receive(self) -> tuple[Message, ObjectTree] | None:
        """Return the next message without its content, and the IDs of its objects; None if there is no message.

        Raises:
            NotActiveError: The server does not know this client any more, or a message may have been lost.
        """
        # Not repeated: if the response is lost, the server considers its message delivered.
        response = self._call_active("PullMessages", PullMessagesRequest(node=self._node), once=True)
        if not response.messages_list:
            return None
        message, tree = response.messages_list[0], response.message_object_trees[0]  # the server sends one at a time
        return message_from_proto(message), tree

    def digest_of(self, run_id: int) -> str:
        """Return the SHA-256 of the program that the server wants its clients to run, to compare it with the own one.

        Flower calls the program an app and distributes it as a file; here it is part of comingle.

        Args:
            run_id: Flower's id of the run.
        """
        request = GetRunRequest(node=self._node, run_id=run_id)
        for _attempt in range(2):  # twice, as a wrong digest may have been corrupted on the way
            is_installed_app = self._app_digests.get(run_id) == DIGEST
            if is_installed_app:  # asked before
                break
            self._app_digests[run_id] = self._call_active("GetRun", request).run.fab_hash
        return self._app_digests[run_id]

    def download(self, message: Message, tree: ObjectTree) -> Message:
        """Download a message's content, which Flower splits into objects, and confirm that it has arrived.

        Args:
            message: The message without its content.
            tree: IDs of the objects.

        Returns:
            The message with its content.

        Raises:
            ObjectPullError: An object cannot be downloaded, or the objects are not those of a message.
        """
        run_id, message_id = message.metadata.run_id, message.metadata.message_id
        object_ids = [node.object_id for node in iterate_object_tree(tree)]
        pull_object = make_pull_object_fn_protobuf(self._object_call("PullObject"), self._node, run_id)
        objects = pull_objects(object_ids, pull_object)
        try:
            full_message = inflate_object_from_contents(message_id, objects)
        except (KeyError, ValueError, TypeError) as error:
            raise ObjectPullError(message_id, f"malformed ({type(error).__name__})") from None
        if not isinstance(full_message, Message):
            raise ObjectPullError(message_id, "not a message")
        full_message.metadata.__dict__["_message_id"] = message_id  # not part of the content; a reply needs it
        self.confirm(message)
        return full_message

    def confirm(self, message: Message) -> None:
        """Confirm that a message has arrived, so that the server drops the content."""
        metadata = message.metadata
        request = ConfirmMessageReceivedRequest(
            node=self._node, run_id=metadata.run_id, message_object_id=metadata.message_id
        )
        self._call_active("ConfirmMessageReceived", request)

    def send(self, reply: Message, seconds: float) -> None:
        """Send a reply: first the message without its content, then the objects of the content that the server lacks.

        Args:
            reply: The reply.
            seconds: How long the app took to answer.
        """
        # Flower's own client also sets the ID of a message in this way: it is that of its root object.
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():  # An ID is a hash of all bytes, which do not change here.
            objects = get_all_nested_objects(reply)  # by ID
            without_content = remove_content_from_message(reply) if reply.has_content() else reply
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(without_content)],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            response = self._call_active("PushMessages", request)
            push_object = make_push_object_fn_protobuf(
                self._object_call("PushObject"), self._node, reply.metadata.run_id, response.session_id
            )
            push_objects(objects, push_object, object_ids_to_push=set(response.objects_to_push))

    def close(self) -> None:
        """Close the connection, and deactivate this node if the server can be reached now."""
        self.closed.set()
        self._end_heartbeats.set()
        with suppress(httpx.HTTPError, ValueError):
            self._http.DeactivateNode(DeactivateNodeRequest(node_id=self.node_id))
            is_generated_key = self._server.key is None  # it is not used again
            if is_generated_key:
                self._http.UnregisterNode(UnregisterNodeFleetRequest(node_id=self.node_id))
        self._http.close()

    def _connect(self) -> FleetHttpClient:
        """Return an HTTP client that signs requests with this client's key; it connects at the first request."""
        authority = self._server.authority
        client = FleetHttpClient.from_server_address(
            self._server.address,
            insecure=authority is None,
            root_certificates=None if authority is None else authority.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(self._private_key, self._public_key),
            ],
        )
        client._client.follow_redirects = False  # signed requests must go to the server's address only
        return client

    def _register(self, public_key: bytes) -> None:
        """Register this client's generated public key with the server, unless it is registered already."""
        try:
            self._call("RegisterNode", RegisterNodeFleetRequest(public_key=public_key))
        except httpx.HTTPStatusError as error:
            # This process may have registered the key before, and then lost the connection.
            is_registered = "already in use" in error.response.text
            if not is_registered:
                raise

    def _why_not_authenticated(self, error: httpx.HTTPStatusError) -> str:
        """Return why the server does not authenticate this client; an empty string if a retry may help.

        Args:
            error: The response, with status 401.
        """
        try:
            detail = str(error.response.json()["detail"])
        except (ValueError, KeyError, TypeError):  # not a response of a server of comingle
            return ""
        if "clock" in detail:  # the server's text says to set the clocks
            return printable(detail)[:400]
        if detail != UNKNOWN_KEY:  # The request was corrupted on the way.
            return ""
        if self._server.key is None:
            return "the server accepts only registered keys; give --key FILE"
        return f"the key {self._server.key} is not registered with the server"

    def _deactivate_previous(self) -> None:
        """Deactivate the node left active by a previous process of this user that was killed."""
        with suppress(OSError, ValueError, httpx.HTTPStatusError):
            node_id = int(self._node_id_file.read_text(encoding="utf-8"))
            self._call("DeactivateNode", DeactivateNodeRequest(node_id=node_id))

    def _call(self, method: str, request: Any, *, once: bool = False) -> Any:
        """Call the Fleet API; retry with growing pauses, up to 5 s, until the server responds.

        An error status that is not final is retried up to 100 times, since it may come from a gateway.

        Args:
            method: Name of the Fleet API's method.
            request: Its message.
            once: Whether a request that may have reached the server must not be repeated.

        Raises:
            MissedMessageError: The response to a request that must not be repeated was lost.
            RunError: The server's certificate is not trusted.
            httpx.HTTPStatusError: The server refuses the request.
            NotActiveError: This client has closed the connection.
        """
        pause, has_shown_line, num_rejections = _FIRST_RETRY_SECONDS, False, 0
        while not self.closed.is_set():
            try:
                return getattr(self._http, method)(request)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                num_rejections += 1
                if status in _FINAL_STATUSES or num_rejections >= _MAX_REJECTIONS:
                    raise
                may_have_arrived = status >= 500  # a gateway may have passed the request on
            except (httpx.TransportError, ValueError) as error:  # a ValueError means a corrupted response
                self._last_lost_at = time.monotonic()
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    problem = self._certificate_problem()
                    if problem:
                        raise RunError(problem) from None
                may_have_arrived = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            if once and may_have_arrived:
                raise MissedMessageError
            if not has_shown_line and pause >= _LAST_RETRY_SECONDS:
                self._say(f"{self._server.address} cannot be reached; retrying")
                has_shown_line = True
            self.closed.wait(pause)
            pause = min(2 * pause, _LAST_RETRY_SECONDS)
        raise NotActiveError

    def _certificate_problem(self) -> str:
        """Return what is wrong with the server's certificate; an empty string if nothing is found."""
        if self._server.authority is None:
            return ""
        return certificate_problem(self._server.address, self._server.authority)

    def _call_active(self, method: str, request: Any, *, once: bool = False) -> Any:
        """Call a method of the Fleet API that requires an active node.

        Args:
            method: Name of the method.
            request: Its message.
            once: Whether a request that may have reached the server must not be repeated.

        Raises:
            NotActiveError: The server does not know this client any more.
            RunOverError: The run has ended, or does not exist on this server.
        """
        try:
            return self._call(method, request, once=once)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in _NOT_AUTHENTICATED:  # 401
                raise NotActiveError from None
            if error.response.status_code in _RUN_HAS_ENDED:  # 403, 404
                raise RunOverError from None
            raise

    def _object_call(self, method: str) -> Callable[[Any], Any]:
        """Return a function that sends a request to a method of the Fleet API, as Flower's helpers for objects need."""
        return lambda request: self._call_active(method, request)

    def _stop_heartbeats(self) -> None:
        """End the heartbeats of the current node; wait a second for one that is under way."""
        self._end_heartbeats.set()
        if self._heartbeats is not None:
            self._heartbeats.join(timeout=1.0)

    def _keep_alive(self, node: Node, end: threading.Event) -> None:
        """Send heartbeats every 7 s until the client closes or activates again.

        Sets ``deactivated`` if the server does not know the node any more.

        Args:
            node: The node that the server has activated for this client.
            end: Set when the heartbeats are to end.
        """
        http = self._connect()
        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
        while not end.is_set() and not self.closed.is_set():
            try:
                http.SendNodeHeartbeat(request)
            except httpx.HTTPStatusError as error:
                is_unknown = error.response.status_code in _NOT_AUTHENTICATED
                if is_unknown and not end.is_set():
                    self.deactivated.set()
            except (httpx.TransportError, ValueError):
                pass  # the next one may arrive
            end.wait(_HEARTBEAT_SECONDS)
        http.close()


def _read_key(path: Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    """Read a user's private key, and return it with its public key.

    Raises:
        RunError: The file cannot be read, or holds another kind of key.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read as a private key ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RunError(
            f"{path}: got another kind of key; allowed: an elliptic-curve key, as --make-certificates writes"
        )
    return key, key.public_key()


class MessageLoop:
    """Polls for messages, runs the app on each in turn and sends its replies; rejects messages of other apps."""

    def __init__(
        self,
        connection: FleetConnection,
        app: ClientApp,
        node_config: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """Create the loop, which :meth:`run` starts.

        Args:
            connection: Connection to poll and to reply on.
            app: The ``ClientApp`` that handles messages.
            node_config: The user's name and state folder, passed to the app in its ``Context``.
            say: Called with each line to show the user.
        """
        self._connection, self._app, self._say = connection, app, say
        self._node_config = dict(node_config)
        self._refused_runs: set[int] = set()  # IDs of runs whose refusal was shown

    def run(self) -> None:
        """Answer messages until the connection is closed.

        Raises:
            RunError: The server refuses this client.
        """
        while not self._connection.closed.is_set():
            try:
                self._connection.activate()
                while not self._connection.closed.is_set():
                    has_answered = self._answer_next()
                    if not has_answered:
                        self._connection.closed.wait(_POLL_SECONDS)
            except NotActiveError:
                continue  # activates again; the server resends a message that was lost

    def _answer_next(self) -> bool:
        """Poll for a message and answer it; return whether there was one.

        Raises:
            NotActiveError: The server does not know the client or the message any more, so it has to activate again.
        """
        received = self._connection.receive()
        if received is None:
            return False
        message, tree = received
        began = time.monotonic()
        try:
            reply = self._refusal(message)
            if reply is None:
                full_message = self._connection.download(message, tree)
                reply = self._answer_in_thread(full_message)
            self._connection.send(reply, time.monotonic() - began)
        except (ObjectPullError, ObjectPushError) as error:  # the server has dropped the message, and will resend it
            self._say(f"run {message.metadata.run_id}: {error}")
        except RunOverError:  # the run has ended, or a corrupted request has named an unknown run
            raise NotActiveError from None  # after the next activation the server resends what it still needs
        return True

    def _answer_in_thread(self, message: Message) -> Message:
        """Run the app in a thread and return its reply; if the server deactivates this node, do not wait for it.

        Raises:
            NotActiveError: The node was deactivated, or the connection closed, while the app was running.
        """
        replies: queue.SimpleQueue[Message] = queue.SimpleQueue()

        def answer() -> None:
            replies.put(self._run_app(message))

        threading.Thread(target=answer, daemon=True).start()
        while not self._connection.deactivated.is_set() and not self._connection.closed.is_set():
            with suppress(queue.Empty):
                return replies.get(timeout=_CHECK_SECONDS)
        raise NotActiveError

    def _refusal(self, message: Message) -> Message | None:
        """Return an error reply to a message whose run has another app than the one that is installed here; else None.

        Such an app is not downloaded. The user is shown each refused run once.
        """
        run_id = message.metadata.run_id
        digest = self._connection.digest_of(run_id)
        if digest == DIGEST:
            return None
        announced = digest[:12] or "(none)"
        reason = f"run {run_id}: got app {announced}; allowed: {DIGEST[:12]}, the one installed here"
        if run_id not in self._refused_runs:
            self._refused_runs.add(run_id)
            self._say(f"refused: {reason}; the app was not run")
        self._connection.confirm(message)  # the server then drops the content
        return Message(Error(ErrorCode.INVALID_FAB, reason), reply_to=message)

    def _run_app(self, message: Message) -> Message:
        """Return the app's reply to a message, or an error reply if the app raises."""
        run_id = message.metadata.run_id
        context = Context(
            run_id=run_id,
            node_id=self._connection.node_id,
            node_config=self._node_config,
            state=RecordDict(),
            run_config={},
        )
        try:
            return self._app(message, context)
        except Exception as error:  # Errors of the app are sent back as one line.
            reason = f"{type(error).__name__}: {error}"
            self._say(f"run {run_id}: {reason}")
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
