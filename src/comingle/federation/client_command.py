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
from comingle.federation.flower.app_status import FOLDER as FLOWER
from comingle.federation.flower.client import CallQueue, FleetClient, Handle, participate
from comingle.federation.flower.client_app import User
from comingle.federation.flower.fleet_client import Server
from comingle.federation.flower.probe import ProbeResult, certificate_problem, probe_server, tls_problem
from comingle.federation.flower.processes import (
    LOCAL_HOSTS,
    PARENT,
    end_with_parent,
    environment,
    free_port,
    interrupt_on_sigterm,
    split_address,
)
from comingle.federation.participant import FILE, Participant, save_participant
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
    with ExitStack() as locks:
        for participant in participants:
            state = Path(participant.state)
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            locks.enter_context(locked(state))  # Two processes must not share a user's state.
            save_participant(state / FILE, participant)
        participants = _limit_process(participants)
        if supernode:
            _run_supernode(participants[0])
        else:
            model_server = None if port is None else locks.enter_context(_serve_models(port, say))
            _run_clients(participants, say, stays=stays, model_server=model_server)


@contextmanager
def _serve_models(port: int, say: Callable[[str], None]) -> Iterator[ModelServer]:
    """Serve the models of this process's users while the context is active. Call it before torch is imported."""
    # oneDNN keeps the code of a matrix product for each number of tokens so far: 1 MB per token of an answer.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    from comingle.federation.model_server import ModelServer

    model_server = ModelServer(port, say)
    try:
        yield model_server
    finally:
        model_server.close()


def _limit_process(participants: Sequence[Participant]) -> list[Participant]:
    """Apply the users' limits on priority and threads to this process, and return the users with its limit on threads.

    The strictest limit of any user applies to all, as they share the process. Must be called before torch is imported.
    """
    if niceness := max(participant.nice for participant in participants):
        lower_priority(niceness)
    limits = [participant.max_threads for participant in participants if participant.max_threads is not None]
    if not limits:
        return list(participants)
    limit_threads(min(limits))
    return [participant.model_copy(update={"max_threads": min(limits)}) for participant in participants]


def _run_supernode(participant: Participant) -> None:
    """Run ``flower-supernode`` until the user interrupts it.

    Raises:
        RunError: It has ended.
    """
    state, address, programs = Path(participant.state), participant.server, Path(sys.executable).parent
    assert address is not None
    variables = environment(state / FLOWER)
    variables["PATH"] = os.pathsep.join([str(programs), variables.get("PATH", "")])  # It starts other programs.
    command = [str(programs / "flower-supernode"), "--superlink", address]
    command += ["--port", str(free_port()), "--node-config", f"config={json.dumps(str(state / FILE))}"]
    secure = ["--root-certificates", participant.certificates] if participant.certificates else ["--insecure"]
    command += [*secure, *(["--auth-supernode-private-key", participant.key] if participant.key else [])]
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
    calls = CallQueue()  # All clients' tasks are carried out in this thread.
    bases: dict[Any, Any] = {}  # loaded base models, which users with the same base share in memory
    endings = [EndCondition(stays=stays) for _ in participants]
    clients = []
    for participant, ending in zip(participants, endings, strict=True):
        say_for_user = say if len(participants) == 1 else _prefixed(say, participant)
        clients.append(_fleet_client(participant, calls, ending, bases, say_for_user, model_server))
    for participant in participants:
        say(f"{participant.name}: waiting for {participant.server}; everything private stays in {participant.state}")

    def have_ended() -> bool:
        return all(ending.has_ended(client.refusal) for client, ending in zip(clients, endings, strict=True))

    participate(clients, calls, have_ended)
    if reasons := [ending.reason for ending in endings if ending.reason]:
        raise RunError("; ".join(reasons))


def _prefixed(say: Callable[[str], None], participant: Participant) -> Callable[[str], None]:
    """Return a function that shows a line after the user's name."""
    return lambda line: say(f"{participant.name}: {line}")


def _fleet_client(
    participant: Participant,
    calls: CallQueue,
    ending: EndCondition,
    bases: dict[Any, Any],
    say: Callable[[str], None],
    model_server: ModelServer | None = None,
) -> FleetClient:
    """Return a user's client, which loads torch and transformers only at its first task.

    Args:
        participant: The user.
        calls: Queue of calls of this process.
        ending: Records when the federation has ended for this user.
        bases: Base models that the clients of this process share, by name, quantisation, dtype, device and kind of
            attention; the client adds those that it loads.
        say: Called with each line to show to the user.
        model_server: Serves the user's model after each task; None to serve none.
    """

    def load() -> Handle:
        from comingle.models.pretrained import import_lean

        import_lean()  # imports transformers without parts that training does not need, about 100 MB
        from comingle.federation.client import Client
        from comingle.methods.user_files import load_files_of_command

        load_files_of_command()
        state = Path(participant.state)
        own = participant.own
        conditions = own.conditions(state, say=say, wait=calls.serve)  # Tasks of other users go on during a pause.
        publish = None if model_server is None else partial(model_server.publish, name=participant.name)
        client = Client(
            state,
            own,
            bases=bases,
            conditions=conditions,
            say=say,
            refuse=ending.refuse,
            end=ending.end,
            publish=publish,
        )
        client.publish_newest_run()
        return client.handle

    address = participant.server
    assert address is not None
    authority, key = (Path(path) if path else None for path in (participant.certificates, participant.key))
    server = Server(address=address, authority=authority, key=key)
    user = User(name=participant.name, state=Path(participant.state))
    # A client that is restarted serves the model of its last task at once.
    return FleetClient(user, server, load, calls, say, loads_at_start=model_server is not None)


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
        """Record why the user's settings do not fit the federation."""
        self.reason = f"cannot take part: {reason}"
        self.end()

    def has_ended(self, refusal: str) -> bool:
        """Return whether the client may end, and record why if it is refused.

        A client may end if it is refused. It may also end if its federation has ended and the server has had
        :data:`LINGER_SECONDS` to receive its last reply, unless the client waits for the next federation.

        Args:
            refusal: Why the server or the connection refuses the client; empty if they do not.
        """
        if refusal:
            self.reason = refusal
            return True
        if self._stays or self._ended_at is None:  # It waits for the next federation, or for the end of this one.
            return False
        return time.monotonic() - self._ended_at > LINGER_SECONDS


def _check_server(participant: Participant, say: Callable[[str], None]) -> None:
    """Check the server's address, certificates and the user's files, before anything is written.

    Args:
        participant: The user, with its settings for the connection.
        say: Called with a line if the server looks wrong, or if a proxy is used.

    Raises:
        RecipeError: The address is missing or wrong, a file does not exist, or only one side uses TLS.
    """
    name, server, authority = participant.name, participant.server, participant.certificates
    if not server:
        raise RecipeError(f"user {name!r}: no server; give --server HOST:PORT")
    if not _is_address(server):
        raise RecipeError(f"--server: got {server!r}; allowed: HOST:PORT, such as 192.0.2.1:9092")
    _require_files(participant)
    if not authority and split_address(server)[0] not in LOCAL_HOSTS:
        raise RecipeError(
            f"user {name!r}: no certificates for the server {server}; give its ca.pem with --certificates FILE"
        )
    found = probe_server(server)
    if problem := tls_problem(server, found, secure=bool(authority)):
        raise RecipeError(f"user {name!r}: {problem}")
    if authority and (problem := certificate_problem(server, Path(authority))):
        raise RecipeError(f"user {name!r}: {problem}")
    if found is ProbeResult.OTHER:
        say(f"{name}: {server} is {found.value}; check --server")
    if proxy := _proxy_of(server, secure=bool(authority)):
        host = split_address(server)[0]
        say(f"{name}: uses the proxy {proxy} for {server}; bypass it with no_proxy={host}")


def _require_files(participant: Participant) -> None:
    """Check that the files exist that the processes will need.

    Raises:
        RecipeError: A file does not exist.
    """
    data = participant.data
    paths = {"key": participant.key, "certificates": participant.certificates}
    if isinstance(data, str) and not set(data) & set(":*?["):  # a file or folder, not a URL or glob pattern
        paths["data"] = data
    for what, path in paths.items():
        if path and not Path(path).exists():
            raise RecipeError(f"user {participant.name!r}: {what}: {path} does not exist")


def _proxy_of(server: str, *, secure: bool) -> str:
    """Return the proxy that the environment sets for a server; an empty string if there is none."""
    host = split_address(server)[0]
    if host in LOCAL_HOSTS or proxy_bypass(host):
        return ""
    proxies = getproxies()
    return proxies.get("https" if secure else "http") or proxies.get("all") or ""


def _is_address(server: str) -> bool:
    host, colon, port = server.rpartition(":")
    return bool(host and colon and port.isdecimal() and int(port) < 1 << 16)
