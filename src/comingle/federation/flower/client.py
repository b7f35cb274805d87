"""The clients of one process, and client processes that another one supervises.

Each client has a thread that exchanges messages with the server. Tasks of all clients are carried out in the main
thread, one at a time: PyTorch's number of threads applies to the thread that sets it, and Ctrl-C interrupts the main
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from comingle.federation.flower.client_app import User, make_client_app
from comingle.federation.flower.fleet_client import FleetConnection, MessageLoop, Server
from comingle.federation.flower.processes import FOLDER, Service, environment
from comingle.training.backends.launched import interrupt_on_sigterm
from comingle.utils.errors import ComingleError, RunError

LOG = "client.log"

_CHECK_SECONDS = 0.3
_MAX_FAILURES = 10
"""Limit on unexpected failures of a message loop."""
_FIRST_RESTART_SECONDS, _LAST_RESTART_SECONDS = 1.0, 20.0

Handle = Callable[[bytes, float], bytes]
"""Answers a request; gets the time until which the server waits for the answer, in seconds since 1970."""

Result = TypeVar("Result")


class CallQueue:
    """Function calls that other threads request, and that one thread makes in :meth:`serve`.

    A function that has to wait may call :meth:`serve` itself, so that calls of other users are made meanwhile.
    """

    def __init__(self) -> None:
        """Create an empty queue: threads add calls with :meth:`call`, and one thread makes them in :meth:`serve`."""
        self._requested: list[_Call] = []
        """Calls that are not made yet, in the order of the requests."""
        self._changed = threading.Condition()
        """Lock of the queue, notified of each new request."""
        self._busy_users: set[str] = set()  # users whose calls are being made

    def call(self, function: Callable[[], Result], *, user: str = "") -> Result:
        """Let the thread of :meth:`serve` call a function; wait, and return its result or raise its error.

        Args:
            function: The function.
            user: The user that it belongs to. Calls for the same user are made one after another.
        """
        future: Future[Result] = Future()
        with self._changed:
            self._requested.append(_Call(user=user, function=function, future=future))  # type: ignore[arg-type]  (each function has a future of its type)
            self._changed.notify()
        return future.result()

    def serve(self, seconds: float) -> None:
        """Make the next function call that another thread has requested by :meth:`call`, and pass it the result.

        Args:
            seconds: Largest time to wait for such a request; after it nothing is called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next_call() is not None, timeout=seconds)
            call = self._next_call()
            if call is None:
                return
            self._requested.remove(call)
        self._busy_users.add(call.user)
        try:
            call.future.set_result(call.function())
        except Exception as error:
            call.future.set_exception(error)
        finally:
            self._busy_users.discard(call.user)

    def _next_call(self) -> _Call | None:
        """Return the first requested call of a user without a call in progress; None if there is none."""
        for call in self._requested:
            if call.user not in self._busy_users:
                return call
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """A requested function call.

    Args:
        user: The user that it belongs to.
        function: The function.
        future: Gets the function's result, or the error that it raises.
    """

    user: str
    function: Callable[[], object]
    future: Future[object]


class FleetClient:
    """A user's connection to a server, with the thread that exchanges messages."""

    def __init__(
        self,
        user: User,
        server: Server,
        load: Callable[[], Handle],
        calls: CallQueue,
        say: Callable[[str], None],
        *,
        loads_at_start: bool = False,
    ) -> None:
        """Create the state folder and the connection; :meth:`start` connects.

        Args:
            user: The user, with its state folder.
            server: Address, certificates and key for the connection.
            load: Called once, at the first request: imports torch and returns the function that answers requests.
            calls: Queue of the thread that serves all users of this process. That thread calls ``load``, and the
                function that it returns.
            say: Called with each line to show to the user.
            loads_at_start: Whether to call ``load`` without waiting for the first request.
        """
        self.loads_at_start = loads_at_start
        self.refusal = ""
        """Why this client cannot take part, as the server or the connection says; empty while it can."""
        self._say, self._load, self._address = say, load, server.address
        self._handle: Handle | None = None  # the function that answers requests, once it is loaded
        folder = user.state / FOLDER
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        node_id_file = folder / "place"  # existing state folders have it, so the name stays
        self._connection = FleetConnection(server, node_id_file, say)

        def ask(user: User, request: bytes, deadline: float) -> bytes:
            return calls.call(lambda: self._answer(request, deadline), user=user.name)

        app = make_client_app(ask, self._refuse)
        node_config = {"name": user.name, "state": str(user.state)}
        self._loop = MessageLoop(self._connection, app, node_config, say)
        self._thread = threading.Thread(target=self._exchange, name=f"messages of {user.name}", daemon=True)

    def start(self) -> None:
        """Start to exchange messages."""
        self._thread.start()

    def close(self) -> None:
        """Unregister from the server and end the thread."""
        self._connection.close()

    def _answer(self, request: bytes, deadline: float) -> bytes:
        """Return the answer to a request of the server; at the first request, load the function that answers.

        Args:
            request: The request.
            deadline: Time until which the server waits for the answer, in seconds since 1970.
        """
        is_first_request = self._handle is None
        if is_first_request:
            self._say(f"connected to {self._address}; loading the base model and the data")
        handle = self.load()
        return handle(request, deadline)

    def load(self) -> Handle:
        """Return the function that answers requests; load it at the first call.

        Raises:
            ComingleError: Loading fails, so the client cannot take part; :attr:`refusal` says why.
        """
        if self._handle is None:
            try:
                self._handle = self._load()
            except ComingleError as error:
                self.refusal = str(error)
                raise
        return self._handle

    def _refuse(self, reason: str) -> None:
        """Record why this client cannot take part, so that it is not restarted."""
        self.refusal = f"refused: {reason}"

    def _exchange(self) -> None:
        """Run the message loop; restart it after an unexpected failure, with a longer pause each time, up to 20 s.

        After a ComingleError, or after too many failures, end the loop and set :attr:`refusal`.
        """
        reason = ""
        for num_failures in range(_MAX_FAILURES):
            try:
                self._loop.run()
                return
            except ComingleError as error:
                self.refusal = str(error)
                return
            except Exception as error:  # A response that this version of Flower does not expect, for example.
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._say(f"{reason}; reconnecting")
            pause = min(_FIRST_RESTART_SECONDS * 2**num_failures, _LAST_RESTART_SECONDS)
            self._connection.closed.wait(pause)
        self.refusal = f"failed {_MAX_FAILURES} times, giving up ({reason})"


def participate(clients: Sequence[FleetClient], calls: CallQueue, until: Callable[[], bool]) -> None:
    """Start all clients of this process, carry out their tasks one at a time until a condition holds, and close them.

    Args:
        clients: The clients. Each exchanges messages in a thread of its own.
        calls: Queue into which the clients put their tasks; this thread carries them out.
        until: The condition, which is checked between two tasks.

    Raises:
        KeyboardInterrupt: The process was interrupted, or got SIGTERM.
    """
    try:
        with interrupt_on_sigterm() as got_sigterm:
            for client in clients:
                client.start()
            for client in clients:
                if client.loads_at_start:
                    with suppress(ComingleError):  # `client.refusal` has the reason
                        client.load()
            while not until():
                if got_sigterm.is_set():  # the KeyboardInterrupt may have been lost in a callback
                    raise KeyboardInterrupt
                calls.serve(_CHECK_SECONDS)
    finally:
        for client in clients:
            client.close()


@dataclass(kw_only=True)
class ClientProcess:
    """A supervised child process with a user's client.

    Args:
        name: Name of the user.
        state: The user's state folder; its log is in it.
        command: The command.
        say: Called with each line to show to the user.
        refusal: Why the process is not restarted: it has failed too often, or a user has to fix something. Empty while
            it runs or may be restarted.
    """

    name: str
    state: Path
    command: Sequence[str]
    say: Callable[[str], None]
    refusal: str = ""
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        """Create the state folder and prepare the child process, which :meth:`keep_running` starts."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        flower_folder = self.state / FOLDER  # logs, and settings of Flower
        self.service = Service(
            name=f"{self.name}'s client",
            arguments=lambda: self.command,  # a service asks for its command at each start
            log=flower_folder / LOG,
            environment=environment(flower_folder),
            say=self.say,
        )

    def keep_running(self) -> None:
        """Start the process, or restart it if it has ended and there is no ``refusal``; call this repeatedly."""
        if self.refusal:
            return
        try:
            self.service.keep_running()
        except RunError as error:  # a restart would not help
            self.refusal = str(error)

    def stop(self) -> None:
        """End the process."""
        self.service.stop()
