"""Makes a SuperNode find back to its server after a disturbance, which Flower's own does not always do.

Flower's SuperNode has a thread that asks for messages and one that sends heartbeats. A damaged answer ends the thread
that gets it, and the process lives on without it. A message whose answer is lost on the way is not sent again, and a
reply that cannot be sent is dropped: the server would wait for it until the end of the round. With a registered key the
server refuses a SuperNode that returns until it misses its predecessor, for a minute. So here

- a request that Flower gives up ends the process, which is started again;
- a SuperNode that may have missed a message logs in anew, upon which the server sends again what is not answered;
- a SuperNode that is refused logs out its predecessor of the same state folder;
- a process that has had no answer for long, though its server can be reached, ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx

from comingle.transports.flower.answering import Answer, who_answers

SILENT_SECONDS = 75.0
"""A SuperNode that has had no answer for so long, though its server can be reached, is started again.

Flower sends a heartbeat every 25 seconds, and waits up to 30 seconds for an answer.
"""

NO_ANSWER, LOST = "no answer from the server", "a request to the server failed"
"""How the line begins that a SuperNode prints before it ends."""

_CONNECTION = "flwr.supernode.fleet_http_connection"
_LOOK_SECONDS, _END_SECONDS = 3.0, 5.0
_RETRIED = {502, 503, 504}
_REFUSALS = {401, 403, 412}
"""Not signed by this key, the run is over, and the node is active already."""
_UNANSWERED = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.WriteError)
"""The request may have reached the server, which does not give the same message again."""


def install(server: str) -> bool:
    """Watch this process's connection to a server; False where this version of Flower has none that can be watched.

    Args:
        server: ``HOST:PORT`` of the SuperLink.
    """
    try:
        module = import_module(_CONNECTION)
    except ModuleNotFoundError:
        return False
    flowers: Any = getattr(module, "FleetHttpClient", None)
    if not hasattr(flowers, "_unary_unary") or not hasattr(flowers, "ActivateNode"):
        return False
    watch, node = _Watch(server), _node_file()

    class Watched(flowers):
        """Flower's client, as described above."""

        may_have_missed = False
        login: Any = None

        def _unary_unary(self, **request: Any) -> Any:
            watch.begin()
            try:
                response = super()._unary_unary(**request)
            except Exception as error:
                if _gives_up(error):
                    end_soon(f"{LOST} ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
                raise
            watch.answered()
            return response

        def ActivateNode(self, request: Any) -> Any:
            self.login = request
            try:
                response = super().ActivateNode(request)
            except httpx.HTTPStatusError:
                if node is None or not _log_out(super(), node):
                    raise
                response = super().ActivateNode(request)
            if node is not None:
                node.write_text(str(response.node_id), encoding="utf-8")
            return response

        def PullMessages(self, request: Any) -> Any:
            if self.may_have_missed:
                self.ActivateNode(self.login) if node is not None and _log_out(super(), node) else None
                self.may_have_missed = False
            try:
                return super().PullMessages(request)
            except _UNANSWERED:
                self.may_have_missed = True
                raise

    setattr(module, "FleetHttpClient", Watched)  # noqa: B010 -- the module has no such attribute for a type checker
    threading.excepthook = _end_with_thread
    return True


def end_soon(why: str = "") -> None:
    """End this process within seconds, even where Flower's threads do not let it end."""

    def end() -> None:
        time.sleep(_END_SECONDS)
        os._exit(1)

    if why:
        print(why, file=sys.stderr, flush=True)
    threading.Thread(target=end, daemon=True).start()


def _gives_up(error: Exception) -> bool:
    """Whether Flower does not try a request again that failed with this error; refusals are left to it."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code not in _RETRIED | _REFUSALS
    if not isinstance(error, httpx.TransportError):
        return True
    return any(word in str(error).lower() for word in ("certificate", "ssl", "tls"))


def _node_file() -> Path | None:
    """Return where the number of this user's node is kept, from one SuperNode to the next."""
    home = os.environ.get("FLWR_HOME")
    return Path(home) / "node" if home else None


def _log_out(client: Any, node: Path) -> bool:
    """Deactivate the node that this user had last; whether the server agrees."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    try:
        number = int(node.read_text(encoding="utf-8"))
        client.DeactivateNode(DeactivateNodeRequest(node_id=number))
    except (OSError, ValueError, httpx.HTTPStatusError):  # there was none, or a new server does not know it
        return False
    return True


def _end_with_thread(failed: threading.ExceptHookArgs) -> None:
    """End the process with a thread that Flower does not miss."""
    if failed.exc_type is not SystemExit:
        end_soon(f"{LOST} ({failed.exc_type.__name__}: {' '.join(str(failed.exc_value).split())[:200]})")


class _Watch:
    """Ends the process when the server has not answered for long, though it can be reached."""

    def __init__(self, server: str) -> None:
        self._server, self._last = server, 0.0

    def begin(self) -> None:
        """Note a request; the first one starts the watch."""
        if not self._last:
            self._last = time.monotonic()
            threading.Thread(target=self._watch, daemon=True).start()

    def answered(self) -> None:
        """Note an answer."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            silent = time.monotonic() - self._last
            if silent > SILENT_SECONDS and who_answers(self._server) is not Answer.NOBODY:
                with suppress(OSError):
                    print(f"{NO_ANSWER} for {silent:.0f} s", file=sys.stderr, flush=True)
                os._exit(1)
