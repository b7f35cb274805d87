"""The clients of ``comingle client``: one process for one or more users.

A client is connected before torch is imported, which its first task needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies, proxy_bypass

from comingle.federation.conditions import limit_threads, lower_priority
from comingle.federation.flower.client import CallQueue, FleetClient, Handle, participate
from comingle.federation.flower.client_app import User
from comingle.federation.flower.fleet_client import Server
from comingle.federation.flower.probe import ProbeResult, certificate_problem, probe_server, tls_problem
from comingle.federation.flower.processes import FOLDER as FLOWER
from comingle.federation.flower.processes import (
    LOCAL_HOSTS,
    PARENT,
    end_with_parent,
    environment,
    free_port,
    split_address,
)
from comingle.federation.participant import FILE, Participant, save_participant
from comingle.training.backends.launched import interrupt_on_sigterm
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import locked

if TYPE_CHECKING:
    from comingle.federation.model_server import ModelServer

LINGER_SECONDS = 5.0
"""Time between the end of a client's federation and its exit, in which the server receives the last reply."""


def take_part(
    participants: Sequence[Participant],
    *,
    say: Callable[[str], None],
    stays: bool = False,
    supernode: bool = False,
    port: int | None = None,
) -> None:
    """Run the clients of one or more users until their federations end or the process is interrupted.

    The users share the base model in memory. Their tasks are carried out one after another.

    Args:
        participants: The users.
        say: Called with each line to show.
        stays: Whether to wait for the next federation when one has ended.
        supernode: Whether to run Flower's SuperNode, which starts a process for each message, instead of a client in
            this process; for one user.
        port: Port on this machine at which the users' models are served while they take part; None to serve none.

    Raises:
        ComingleError: A setting is missing or wrong, or a user cannot take part.
    """
    if supernode and len(participants) > 1:
        raise RecipeError(f"client: got --supernode for {len(participants)} users; allowed: for one")
    if supernode and port is not None:
        raise RecipeError("client: got --serve with --supernode, which ends its processes; allowed: one of the two")
    for participant in participants:
        _check_server(participant, say)
    if PARENT in os.environ:  # started by `comingle federate`
        end_with_parent()
    with ExitStack() as exit_stack:
        for participant in participants:
            state = Path(participant.state)
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            exit_stack.enter_context(locked(state))  # two processes must not share a user's state
            save_participant(state / FILE, participant)
        participants = _limit_process(participants)
        if supernode:
            (only_participant,) = participants
            _run_supernode(only_participant)
            return
        model_server = None
        if port is not None:
            model_server = exit_stack.enter_context(_serve_models(port, say))
        _run_clients(participants, say, stays=stays, model_server=model_server)


@contextmanager
def _serve_models(port: int, say: Callable[[str], None]) -> Iterator[ModelServer]:
    """Serve the models of this process's users in the context, and train with lower priority from now on.

    Call it before torch is imported.

    Args:
        port: Port on this machine.
        say: Called with each line to show.
    """
    # Without a limit, oneDNN caches the code of matrix products for each length of a text: 1 MB per generated token.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    from comingle.federation.model_server import ModelServer
    from comingle.serving.access import prefer_answers

    model_server = ModelServer(port, say)
    prefer_answers()
    try:
        yield model_server
    finally:
        model_server.close()


def _limit_process(participants: Sequence[Participant]) -> list[Participant]:
    """Limit priority and threads of this process to the lowest that any user allows. Call it before torch is imported.

    Returns:
        The users, with the process's limit on threads.
    """
    niceness = max(participant.nice for participant in participants)
    if niceness > 0:
        lower_priority(niceness)
    limits = [participant.max_threads for participant in participants if participant.max_threads is not None]
    if not limits:
        return list(participants)
    max_threads = min(limits)
    limit_threads(max_threads)
    return [participant.model_copy(update={"max_threads": max_threads}) for participant in participants]


def _run_supernode(participant: Participant) -> None:
    """Run ``flower-supernode`` until the user interrupts it.

    Raises:
        RunError: It has ended.
    """
    state, address, programs = Path(participant.state), participant.server, Path(sys.executable).parent
    assert address is not None
    variables = environment(state / FLOWER)
    variables["PATH"] = os.pathsep.join([str(programs), variables.get("PATH", "")])  # for the programs that it starts
    command = [str(programs / "flower-supernode"), "--superlink", address]
    command += ["--port", str(free_port()), "--node-config", f"config={json.dumps(str(state / FILE))}"]
    if participant.certificates:
        command += ["--root-certificates", participant.certificates]
    else:
        command += ["--insecure"]
    if participant.key:
        command += ["--auth-supernode-private-key", participant.key]
    with interrupt_on_sigterm(), subprocess.Popen(command, env=variables) as process:
        try:
            status = process.wait()
        finally:
            process.terminate()
    raise RunError(f"flower-supernode: exited with code {status}")


def _run_clients(
    participants: Sequence[Participant],
    say: Callable[[str], None],
    *,
    stays: bool,
    model_server: ModelServer | None = None,
) -> None:
    """Run the clients of some users in this process until all have ended.

    Args:
        participants: The users.
        say: Called with each line to show; lines of several users begin with the user's name.
        stays: Whether clients wait for the next federation when one has ended.
        model_server: Serves the users' models; None to serve none.

    Raises:
        RunError: A user cannot take part; the others have ended.
    """
    calls = CallQueue()  # all clients' tasks are carried out in this thread
    bases: dict[Any, Any] = {}  # loaded base models, which users with the same base share in memory
    end_conditions = [EndCondition(stays=stays) for _ in participants]
    clients = []
    for participant, end_condition in zip(participants, end_conditions, strict=True):
        say_for_user = say if len(participants) == 1 else _prefixed(say, participant)
        clients.append(_fleet_client(participant, calls, end_condition, bases, say_for_user, model_server))
    for participant in participants:
        say(f"{participant.name}: waiting for {participant.server}; everything private stays in {participant.state}")

    def have_ended() -> bool:
        pairs = zip(clients, end_conditions, strict=True)
        return all(end_condition.has_ended(client.refusal) for client, end_condition in pairs)

    participate(clients, calls, have_ended)
    reasons = [end_condition.reason for end_condition in end_conditions if end_condition.reason]
    if reasons:
        raise RunError("; ".join(reasons))


def _prefixed(say: Callable[[str], None], participant: Participant) -> Callable[[str], None]:
    """Return a function that shows a line after the user's name."""
    return lambda line: say(f"{participant.name}: {line}")


def _fleet_client(
    participant: Participant,
    calls: CallQueue,
    end_condition: EndCondition,
    bases: dict[Any, Any],
    say: Callable[[str], None],
    model_server: ModelServer | None = None,
) -> FleetClient:
    """Return a user's client, which imports torch and transformers only at its first task.

    Args:
        participant: The user.
        calls: Queue of calls of this process.
        end_condition: Records when the federation has ended for this user.
        bases: Base models that the clients of this process share; the client adds those that it loads.
        say: Called with each line to show to the user.
        model_server: Serves the user's model after each task; None to serve none.
    """

    def load() -> Handle:
        """Create the client that carries out tasks, and return its function that answers a request."""
        from comingle.models.pretrained import import_lean

        import_lean()  # imports transformers without the parts that training does not need, about 100 MB
        from comingle.federation.client import Client
        from comingle.methods.user_files import load_files_of_command

        load_files_of_command()
        state = Path(participant.state)
        own_settings = participant.own
        # During a pause, `calls.serve` carries out tasks of other users.
        conditions = own_settings.conditions(state, say=say, wait=calls.serve)
        publish = None if model_server is None else partial(model_server.publish, name=participant.name)
        client = Client(
            state,
            own_settings,
            bases=bases,
            conditions=conditions,
            say=say,
            refuse=end_condition.refuse,
            end=end_condition.end,
            publish=publish,
        )
        client.publish_newest_run()
        return client.handle

    address = participant.server
    assert address is not None
    authority = Path(participant.certificates) if participant.certificates else None
    key = Path(participant.key) if participant.key else None
    server = Server(address=address, authority=authority, key=key)
    user = User(name=participant.name, state=Path(participant.state))
    serves_model = model_server is not None  # then a restarted client serves the model of its last task at once
    return FleetClient(user, server, load, calls, say, loads_at_start=serves_model)


class EndCondition:
    """Condition under which a user's client ends: some seconds after its federation has ended or refused it."""

    def __init__(self, *, stays: bool) -> None:
        """Create the condition of a client whose federation has not ended.

        Args:
            stays: Whether the client waits for the next federation instead. It then ends only if the server or the
                connection refuses it.
        """
        self._stays = stays
        self._ended_at: float | None = None  # on the monotonic clock
        self.reason = ""
        """Why the user cannot take part; empty if it can."""

    def end(self) -> None:
        """Record that the federation has ended."""
        self._ended_at = self._ended_at or time.monotonic()

    def refuse(self, reason: str) -> None:
        """Record that the client ends because the user's settings do not fit the federation.

        Args:
            reason: What does not fit; the user sees it.
        """
        self.reason = f"cannot take part: {reason}"
        self.end()

    def has_ended(self, refusal: str) -> bool:
        """Return whether the client may end now: if it is refused, or some seconds after the end of its federation.

        A client that waits for the next federation (``stays``) ends only if it is refused.

        Args:
            refusal: Why the server or the connection refuses the client; empty if they do not. It becomes ``reason``.
        """
        if refusal:
            self.reason = refusal
            return True
        if self._stays or self._ended_at is None:
            return False
        # After the end, the server has some seconds to receive the client's last reply.
        return time.monotonic() - self._ended_at > LINGER_SECONDS


def _check_server(participant: Participant, say: Callable[[str], None]) -> None:
    """Check the user's settings for the connection, and ask the server whether it uses TLS as they say.

    Args:
        participant: The user, with its settings for the connection.
        say: Called with a line if another program listens at the address, or if a proxy is used.

    Raises:
        RecipeError: The address is missing or wrong, a file does not exist, or only one side uses TLS.
    """
    name, server, authority = participant.name, participant.server, participant.certificates
    if not server:
        raise RecipeError(f"user {name!r}: no server; give --server HOST:PORT")
    if not _is_address(server):
        raise RecipeError(f"--server: got {server!r}; allowed: HOST:PORT, such as 192.0.2.1:9092")
    _require_files(participant)
    host, uses_tls = split_address(server)[0], bool(authority)
    if not uses_tls and host not in LOCAL_HOSTS:
        raise RecipeError(
            f"user {name!r}: no certificates for the server {server}; give its ca.pem with --certificates FILE"
        )
    found = probe_server(server)
    problem = tls_problem(server, found, secure=uses_tls)
    if not problem and authority:
        problem = certificate_problem(server, Path(authority))
    if problem:
        raise RecipeError(f"user {name!r}: {problem}")
    if found is ProbeResult.OTHER:
        say(f"{name}: {server} is {found.value}; check --server")
    proxy = _proxy_of(server, secure=uses_tls)
    if proxy:
        say(f"{name}: uses the proxy {proxy} for {server}; bypass it with no_proxy={host}")


def _require_files(participant: Participant) -> None:
    """Raise an error if the key, the certificates or the data of a user is a file that does not exist.

    Raises:
        RecipeError: A file does not exist.
    """
    data = participant.data
    paths = {"key": participant.key, "certificates": participant.certificates}
    if isinstance(data, str):
        is_url_or_pattern = any(character in data for character in ":*?[")
        if not is_url_or_pattern:
            paths["data"] = data
    for key, path in paths.items():
        if path and not Path(path).exists():
            raise RecipeError(f"user {participant.name!r}: {key}: {path} does not exist")


def _proxy_of(server: str, *, secure: bool) -> str:
    """Return the proxy that the environment sets for a server; empty if there is none.

    Args:
        server: The address HOST:PORT.
        secure: Whether the connection uses TLS.
    """
    host = split_address(server)[0]
    if host in LOCAL_HOSTS or proxy_bypass(host):
        return ""
    proxy_by_scheme = getproxies()
    scheme = "https" if secure else "http"
    return proxy_by_scheme.get(scheme) or proxy_by_scheme.get("all") or ""


def _is_address(server: str) -> bool:
    """Return whether a text is an address HOST:PORT."""
    host, _colon, port = server.rpartition(":")
    return host != "" and port.isdecimal() and int(port) < 2**16
