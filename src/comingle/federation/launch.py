"""The server of a federation, and a federation whose server and clients are processes on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import AUTO
from comingle.federation.files import save_plan, split_recipe
from comingle.federation.flower.app_status import FOLDER as FLOWER
from comingle.federation.flower.certificates import make_key, read_certificates
from comingle.federation.flower.client import ClientProcess
from comingle.federation.flower.processes import join_address
from comingle.federation.flower.server import Certificates, SuperLink, supervise
from comingle.federation.flower.server_app import encode_names
from comingle.federation.participant import FILE, Participant, save_participant
from comingle.federation.public import public_part
from comingle.federation.run_folder import Plan, has_ended
from comingle.federation.server_session import NetworkSection
from comingle.runs.folders import check_folder, with_bos_of_run
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
    tls_files, keys = None, {}
    if certificates is not None:
        files = read_certificates(certificates)
        tls_files = Certificates(authority=files.authority, certificate=files.certificate, key=files.key)
        if without_key := [name for name in plan.users if name not in files.users]:
            raise RecipeError(
                f"{certificates}: no key for {', '.join(without_key)}; create the missing ones with "
                f"`comingle server {file} --make-certificates {certificates}`"
            )
        keys = {name: files.users[name] for name in plan.users}
    flower_folder = folder / FLOWER  # status and logs of the server process
    flower_folder.mkdir(exist_ok=True)
    with locked(flower_folder):  # Two servers must not share a run folder.
        link = SuperLink(
            folder=folder,
            say=say,
            host=host,
            port=port,
            certificates=tls_files,
            keys=keys,
            run_config={"federation": str(file.absolute()), "users": encode_names(plan.users)},
        )
        if port:  # A free port that the system has chosen is bound already.
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
    """Return the error of binding to a port; None if it is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Ignore connections that have just ended.
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


_SHOWN = 3
"""Number of users whose reasons are shown if a federation has failed."""

USERS, PLAN = "users", "federation.yaml"


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
        folder: The server's run folder; ``FOLDER/users/NAME`` has the private state of a user.
        resume: Whether to continue a run that was stopped.
        force: Whether to replace an existing run.
        network: Timeouts, and how many clients the server needs.
        say: Called with each line to show.

    Raises:
        ComingleError: The recipe needs all users' data in one place, the folder cannot be used, or the server or a
            client fails.
    """
    if recipe.runtime.memory == AUTO:
        raise RecipeError("runtime.memory: got 'auto' for clients that share this machine; allowed: a size for each")
    recipe = with_bos_of_run(folder, recipe, resume=resume)  # begin-of-text tokens as in the run to resume
    plan, settings_of_users = split_recipe(recipe, network)
    # The recipe without data sources; it does not depend on the base, which is not loaded here.
    server_recipe = public_part(recipe, plan.users, plan.settings, base=None).whole_recipe()
    check_folder(folder, server_recipe, resume=resume, force=force)
    if force:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    save_plan(folder / PLAN, plan)
    # Clients share this machine's cores.
    threads = {"threads": max(1, (os.cpu_count() or 1) // len(settings_of_users))}
    state_folders = {user.name: (folder / USERS / as_folder(user.name)).absolute() for user in settings_of_users}
    # Files of a private and a public key for each user, so that no other program on this machine can take part.
    keys = {name: make_key(state_folder / FLOWER, name) for name, state_folder in state_folders.items()}
    link = SuperLink(
        folder=folder,
        say=say,
        keys={name: public for name, (_, public) in keys.items()},
        run_config={"federation": str((folder / PLAN).absolute()), "users": encode_names(plan.users)},
    )
    for user in settings_of_users:
        user_settings = user if recipe.runtime.threads else user.model_copy(update={"runtime": threads})
        private, _ = keys[user.name]
        content: dict[str, Any] = user_settings.model_dump(exclude_defaults=True) | {
            "server": link.address,
            "key": str(private.absolute()),
        }
        save_participant(state_folders[user.name] / FILE, Participant(**content, state="."))
    clients = [_client_process(name, state_folder, say) for name, state_folder in state_folders.items()]
    try:
        supervise(link, lambda: _restart_clients(clients, plan.network.min_participants))
    except RunError as error:
        # Without a checkpoint not even the first round is done, perhaps because users cannot take part.
        reasons = "" if list_checkpoints(folder) else _refusals(clients)
        raise RunError(f"{error}{reasons}") from None
    finally:
        for client in clients:
            client.stop()
    return read_metrics(folder)


def _client_process(name: str, state: Path, say: Callable[[str], None]) -> ClientProcess:
    """Return a process that runs ``comingle client`` with the user's file."""
    command = [sys.executable, "-m", "comingle", "client", str(state / FILE)]
    return ClientProcess(name=name, state=state, command=command, say=say)


def _refusals(clients: Sequence[ClientProcess]) -> str:
    """Return why the first few users cannot take part, as the end of an error message."""
    reasons = [client.refusal for client in clients if client.refusal]
    return "".join(f"; {reason}" for reason in reasons[:_SHOWN])


def _restart_clients(clients: Sequence[ClientProcess], needed: int) -> None:
    """Restart clients that have died, and check that enough are left.

    A client that has ended for good has a ``refusal``: for example, its user's settings do not fit the federation.

    Args:
        clients: Processes of all clients.
        needed: Number of clients that the federation needs.

    Raises:
        RunError: Fewer are left. A federation with other machines would wait for users to mend their settings; here
            all settings come from one recipe.
    """
    for client in clients:
        client.keep_running()
    num_left = sum(not client.refusal for client in clients)
    if num_left < needed:
        raise RunError(f"{num_left} of {len(clients)} users have joined; needed: {needed}")
