"""Commands that start servers and clients, on several machines or all on one."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import getproxies, proxy_bypass

from comingle.config import Recipe
from comingle.federation.files import Participant, load_participant, save_participant, save_plan, split_recipe
from comingle.federation.flower.app_status import FOLDER
from comingle.federation.flower.app_status import FOLDER as FLOWER
from comingle.federation.flower.certificates import make_key, read_certificates
from comingle.federation.flower.client import SuperNode, participate
from comingle.federation.flower.probe import ProbeResult, certificate_problem, probe_server, tls_problem
from comingle.federation.flower.processes import LOCAL_HOSTS, join_address, split_address
from comingle.federation.flower.server import Certificates, SuperLink, supervise
from comingle.federation.flower.server_app import encode_names
from comingle.federation.flower.worker import FOLDER as WORKER
from comingle.federation.flower.worker import LOG, UNFIT, User
from comingle.federation.public import ENDED, public_part
from comingle.federation.run_folder import Plan, has_ended
from comingle.federation.server_session import NetworkSection
from comingle.runs.folders import as_begun, check_folder
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import list_checkpoints, locked
from comingle.utils.names import as_folder
from comingle.utils.records import read_metrics

_PORT_SECONDS = 5.0


def serve(
    file: Path,
    plan: Plan,
    folder: Path,
    *,
    host: str,
    port: int,
    certificates: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run or resume the server of a federation's file in a run folder, and return its metrics.

    Args:
        file: The server's file.
        plan: Its content.
        folder: The run folder.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        certificates: Folder of certificates and keys; None for loopback without TLS.
        say: Called with each line to show to the operator.

    Raises:
        ComingleError: The file, the folder or the certificates cannot be used, or too few clients take part.
    """
    if has_ended(folder):
        raise RunError(f"{folder}: this federation has ended; use another --out")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secure, keys = None, {}
    if certificates is not None:
        files = read_certificates(certificates)
        secure = Certificates(authority=files.authority, certificate=files.certificate, key=files.key)
        if strange := [name for name in plan.users if name not in files.users]:
            raise RecipeError(
                f"{certificates}: no key for {', '.join(strange)}; create the missing ones with "
                f"`comingle server {file} --make-certificates {certificates}`"
            )
        keys = {name: files.users[name] for name in plan.users}
    (folder / FOLDER).mkdir(exist_ok=True)
    with locked(folder / FOLDER):  # Two servers must not share a run folder.
        link = SuperLink(
            folder=folder,
            say=say,
            host=host,
            port=port,
            certificates=secure,
            keys=keys,
            run_config={"federation": str(file.absolute()), "users": encode_names(plan.users)},
        )
        if port:
            _require_free_port(link.host, link.port)
        listening = join_address(link.host, link.port)
        say(f"listening on {listening} for {len(plan.users)} users: {', '.join(plan.users)}")
        if not keys:
            say("no keys: any program on this machine can join under an unused name; see --certificates")
        supervise(link)
    return read_metrics(folder)


def _require_free_port(host: str, port: int) -> None:
    """Check that the port is free: clients would otherwise reach the process that already listens on it.

    Raises:
        RunError: The port is in use, or binding to it is not permitted.
    """
    until = time.monotonic() + _PORT_SECONDS  # Processes of a killed server may not have ended yet.
    while error := _bind_error(host, port):
        if time.monotonic() > until:
            raise RunError(
                f"server: cannot listen on {join_address(host, port)} ({error.strerror}); give another --port"
            )
        time.sleep(0.2)


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Ignore connections that have just ended.
        try:
            one.bind((host, port))
        except OSError as error:
            return error
    return None


LINGER_SECONDS = 5.0

SAYS = "comingle: "
"""Prefix of a worker's lines that are shown to the user."""


def take_part(
    file: Path | None, given: Mapping[str, Any], *, default: Path, say: Callable[[str], None], stays: bool = False
) -> None:
    """Run a client until its federation ends or the user interrupts it.

    Args:
        file: The client's file; without one, the options are written to ``default`` for the next start.
        given: Options of the command, which replace those of the file.
        default: File that is read if there is no ``file``.
        say: Called with each line to show to the user.
        stays: Whether to wait for the next federation when one has ended.

    Raises:
        ComingleError: A setting is missing or wrong, or the server refuses the client.
    """
    participant = _participant(file, given, default)
    if not participant.server:
        raise RecipeError(f"user {participant.name!r}: no server; give --server HOST:PORT")
    if not _is_address(participant.server):
        raise RecipeError(f"--server: got {participant.server!r}; allowed: HOST:PORT, such as 192.0.2.1:9092")
    _require_files(participant)
    found = probe_server(participant.server)
    if problem := tls_problem(participant.server, found, secure=bool(participant.certificates)):
        raise RecipeError(f"user {participant.name!r}: {problem}")
    authority = participant.certificates
    if authority and (problem := certificate_problem(participant.server, Path(authority))):
        raise RecipeError(f"user {participant.name!r}: {problem}")
    if found is ProbeResult.OTHER:
        say(f"{participant.name}: {participant.server} is {found.value}; check --server")
    if proxy := _proxy_of(participant.server, secure=bool(participant.certificates)):
        host = split_address(participant.server)[0]
        say(f"{participant.name}: uses the proxy {proxy} for {participant.server}; bypass it with no_proxy={host}")
    state = Path(participant.state)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(state):
        _take_part(participant, participant.server, state, say, stays=stays)


def _take_part(participant: Participant, server: str, state: Path, say: Callable[[str], None], *, stays: bool) -> None:
    known = state / "participant.yaml"
    save_participant(known, participant)
    node = SuperNode(
        user=User(name=participant.name, state=state, config=known),
        server=server,
        say=say,
        authority=Path(participant.certificates) if participant.certificates else None,
        key=Path(participant.key) if participant.key else None,
    )
    say(f"{participant.name}: waiting for {server}; everything private stays in {state}")
    log_lines = WorkerLog(state / WORKER / LOG)
    (state / UNFIT).unlink(missing_ok=True)  # from an earlier start
    try:
        participate(node, EndCondition(log_lines, say, state, stays=stays))
    finally:
        _relay(log_lines, say)


class EndCondition:
    """Condition under which a client's processes end: some seconds after the reason.

    The delay lets the server receive the last reply. With ``stays`` they end neither with a federation nor if this user
    does not fit one.
    """

    def __init__(self, log_lines: WorkerLog, say: Callable[[str], None], state: Path, *, stays: bool):
        self._words, self._say, self._state, self._stays = log_lines, say, state, stays
        self._ended: float | None = None

    def __call__(self) -> bool:
        """Show the worker's new lines and return whether the processes may end.

        Raises:
            RunError: The user's settings do not fit the federation.
        """
        ended = _relay(self._words, self._say)
        reason = read_reason(self._state)
        if (ended or reason) and not self._stays and self._ended is None:
            self._ended = time.monotonic()
        if self._ended is None or time.monotonic() - self._ended <= LINGER_SECONDS:
            return False
        if reason:
            raise RunError(f"cannot take part: {reason}")
        return True


def read_reason(state: Path) -> str:
    """Return why a user cannot take part, from the file of its worker; an empty string if it can."""
    try:
        return (state / UNFIT).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _relay(log_lines: WorkerLog, say: Callable[[str], None]) -> bool:
    """Show the worker's new lines; return whether one of them is its last."""
    lines = log_lines.new()
    for line in lines:
        say(line)
    return any(line.startswith(ENDED) for line in lines)


class WorkerLog:
    """New lines of a worker's log that are for the user."""

    def __init__(self, log: Path):
        self._log = log
        self._read = log.stat().st_size if log.exists() else 0

    def new(self) -> list[str]:
        """Return complete lines that have not been read."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        return [line.removeprefix(SAYS) for line in lines if line.startswith(SAYS)]


def _participant(file: Path | None, given: Mapping[str, Any], default: Path) -> Participant:
    if file is None and default.exists():
        file = default
    if file is not None:
        return load_participant(file, **given)
    content: dict[str, Any] = {"state": str(default.parent.absolute())}
    content |= {key: value for key, value in given.items() if value is not None}
    if "data" not in content:
        raise RecipeError(f"user {content['name']!r}: no data; give --data PATH, or a client's file")
    return Participant(**content)


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


_SHOWN = 3
"""Number of users whose reasons are shown if a federation has failed."""

USERS, PLAN, FILE = "users", "federation.yaml", "participant.yaml"


def federate(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    force: bool = False,
    network: NetworkSection | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run a recipe with server and clients in separate processes on this machine, and return its metrics.

    Args:
        recipe: The recipe.
        folder: The server's run folder; ``FOLDER/users/NAME`` are the users' own.
        resume: Whether to continue a run that was stopped.
        force: Whether to replace an existing run.
        network: Timeouts, and how many clients the server needs.
        say: Called with each line to show.

    Raises:
        ComingleError: The recipe needs all users' data in one place, the folder cannot be used, or the server or a
            client fails.
    """
    recipe = as_begun(folder, recipe, resume=resume)
    plan, owns = split_recipe(recipe, network)
    without_data = public_part(recipe, plan.users, plan.settings, None).whole_recipe()
    check_folder(folder, without_data, resume=resume, force=force)
    if force:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    save_plan(folder / PLAN, plan)
    threads = {"threads": max(1, (os.cpu_count() or 1) // len(owns))}  # Clients share this machine's cores.
    for own in owns:
        own = own if recipe.runtime.threads else own.model_copy(update={"runtime": threads})
        state = folder / USERS / as_folder(own.name)
        save_participant(state / FILE, Participant(**own.model_dump(exclude_defaults=True), state="."))
    # A key for each user, so that no other program on this machine can take part.
    keys = {own.name: make_key(folder / USERS / as_folder(own.name) / FLOWER, own.name) for own in owns}
    link = SuperLink(
        folder=folder,
        say=say,
        keys={name: public for name, (_, public) in keys.items()},
        run_config={"federation": str((folder / PLAN).absolute()), "users": encode_names(plan.users)},
    )
    for own in owns:
        (folder / USERS / as_folder(own.name) / UNFIT).unlink(missing_ok=True)  # from an earlier start
    nodes = [
        _node(folder / USERS / as_folder(name), name, link.address, private, say) for name, (private, _) in keys.items()
    ]
    log_lines = {node.user.name: WorkerLog(node.user.state / WORKER / LOG) for node in nodes}
    try:
        supervise(link, lambda: _tend(nodes, plan.network.min_participants))
    except RunError as error:
        raise RunError(str(error) + ("" if list_checkpoints(folder) else _last_lines(log_lines))) from None
    finally:
        for node in nodes:
            node.stop()
    return read_metrics(folder)


def _node(state: Path, name: str, server: str, key: Path, say: Callable[[str], None]) -> SuperNode:
    state = state.absolute()
    user = User(name=name, state=state, config=state / FILE)
    return SuperNode(user=user, server=server, key=key, say=lambda line: say(f"{name}: {line}"))


def _last_lines(log_lines: Mapping[str, WorkerLog]) -> str:
    """Return the last line of each of the first few workers."""
    lines_of = {
        name: [line for line in of_user.new() if "leave this machine" not in line]
        for name, of_user in log_lines.items()
    }
    lines = [f"{name}: {lines[-1]}" for name, lines in lines_of.items() if lines]
    return "".join(f"; {line}" for line in lines[:_SHOWN])


def _tend(nodes: Sequence[SuperNode], needed: int) -> None:
    """Restart clients that have died.

    Raises:
        RunError: Too few users fit the federation. In a local run, their settings cannot be fixed in the meantime.
    """
    unfit = [node for node in nodes if read_reason(node.user.state)]
    if len(nodes) - len(unfit) < needed:
        raise RunError(f"{len(nodes) - len(unfit)} of {len(nodes)} users have joined; needed: {needed}")
    for node in nodes:
        node.tend()
