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
from comingle.federation.flower.certificates import make_key, read_certificates
from comingle.federation.flower.client import ClientProcess
from comingle.federation.flower.processes import FOLDER as FLOWER
from comingle.federation.flower.processes import join_address
from comingle.federation.flower.server import Certificates, SuperLink, supervise
from comingle.federation.flower.server_app import encode_names
from comingle.federation.participant import FILE, Own, Participant, save_participant
from comingle.federation.public import public_part, run_name
from comingle.federation.run_folder import Plan, has_ended, with_recorded_name
from comingle.federation.server_session import NetworkSection
from comingle.runs.folders import check_folder, with_bos_of_run
from comingle.runs.session import chooses_specialists
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
    continuous: bool = False,
) -> dict[str, Any]:
    """Run a federation's server, or resume it if the run folder has a run, and return the metrics.

    A continuous federation has no end; its folder has a run folder for each of its runs.

    Args:
        file: The server's file.
        plan: Its content.
        folder: The run folder.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        certificates: Folder of certificates and keys; None for loopback without TLS.
        say: Called with each line to show to the operator.
        continuous: Whether to start a run whenever enough users have new data, until the process is interrupted.

    Raises:
        ComingleError: The file, the folder or the certificates cannot be used, or too few clients take part.
    """
    from comingle.federation.server_app import complete_certificates, finish_removals, without_users_who_left

    finish_removals(folder)
    complete_certificates(folder)  # if a process was killed between the end of a run and this
    plan = without_users_who_left(plan, folder)
    if has_ended(folder):
        raise RunError(f"{folder}: this federation has ended; use another --out")
    if (folder / "recipe.yaml" if continuous else folder / "0001.yaml").exists():
        kind = "one run" if continuous else "the runs of --continuous"
        raise RunError(f"{folder}: has {kind}; use another --out")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    tls_files, public_keys = None, dict[str, Path]()
    if certificates is not None:
        tls_files, public_keys = _read_tls_files(certificates, plan.users, file)
    flower_folder = folder / FLOWER  # status and logs of the server process
    flower_folder.mkdir(exist_ok=True)
    run_config: dict[str, str | int | float | bool] = {
        "federation": str(file.absolute()),
        "users": encode_names(plan.users),
    }
    if plan.recipe.continue_from is not None:
        run_config["continue_from"] = plan.recipe.continue_from.run
    key_folder = None
    if continuous:
        run_config["continuous"] = True
        key_folder = None if certificates is None else certificates / "users"
    with locked(flower_folder):  # Two servers must not share a run folder.
        link = SuperLink(
            folder=folder,
            say=say,
            host=host,
            port=port,
            certificates=tls_files,
            keys=public_keys,
            key_folder=key_folder,
            run_config=run_config,
        )
        is_port_given = port != 0  # otherwise `link` has bound a free one already
        if is_port_given:
            _wait_for_free_port(link.host, link.port)
        address = join_address(link.host, link.port)
        say(f"listening on {address} for {len(plan.users)} users: {', '.join(plan.users)}")
        if not public_keys:
            say("no keys: any program on this machine can join under an unused name; see --certificates")
        supervise(link)  # runs the server process until the federation has ended
    return read_metrics(folder)


def _read_tls_files(folder: Path, users: Sequence[str], plan_file: Path) -> tuple[Certificates, dict[str, Path]]:
    """Return the files for TLS in a folder of certificates, and the file with each user's public key.

    Args:
        folder: Folder of certificates and keys.
        users: Names of the users, who all need a key.
        plan_file: The server's file, which the error's message names.

    Raises:
        RecipeError: A user has no key, or a certificate is missing or not valid.
    """
    stored = read_certificates(folder)
    without_key = [name for name in users if name not in stored.users]
    if without_key:
        raise RecipeError(
            f"{folder}: no key for {', '.join(without_key)}; create the missing ones with "
            f"`comingle server {plan_file} --make-certificates {folder}`"
        )
    tls_files = Certificates(authority=stored.authority, certificate=stored.certificate, key=stored.key)
    return tls_files, {name: stored.users[name] for name in users}


def _wait_for_free_port(host: str, port: int) -> None:
    """Wait some seconds until no other process listens on a port, for processes of a killed server to end.

    Raises:
        RunError: The port is still in use, or binding to it is not permitted.
    """
    give_up_at = time.monotonic() + _PORT_SECONDS
    while True:
        error = _bind_error(host, port)
        if error is None:
            return
        if time.monotonic() > give_up_at:
            raise RunError(
                f"server: cannot listen on {join_address(host, port)} ({error.strerror}); give another --port"
            )
        time.sleep(0.2)


def _bind_error(host: str, port: int) -> OSError | None:
    """Return the error of binding to a port; None if it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores connections that have just ended
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


_MAX_LISTED_REFUSALS = 3
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
        recipe: Settings of the run.
        folder: The server's run folder; ``FOLDER/users/NAME`` has the private state of a user.
        resume: Whether to continue a run that was stopped.
        force: Whether to replace an existing run.
        network: Timeouts, and how many clients the server needs.
        say: Called with each line to show.

    Raises:
        ComingleError: The recipe needs all users' data in one place, the folder cannot be used, or the server or a
            client fails.
    """
    _refuse_auto_memory(recipe)
    recipe = with_bos_of_run(folder, recipe, resume=resume)  # a resumed run keeps its begin-of-text tokens
    if resume:
        recipe = with_recorded_name(folder, recipe)
    plan, settings_of_users = split_recipe(recipe, network)
    recipe_without_data = public_part(recipe, plan.users, plan.settings, base=None).whole_recipe()
    check_folder(folder, recipe_without_data, resume=resume, force=force)
    if force:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    save_plan(folder / PLAN, plan)

    # With a key for each user, no other program on this machine can take part.
    state_folders, private_keys, public_keys = dict[str, Path](), dict[str, Path](), dict[str, Path]()
    for name in plan.users:
        state_folders[name] = (folder / USERS / as_folder(name)).absolute()
        private_keys[name], public_keys[name] = make_key(state_folders[name] / FLOWER, name)
        if recipe.continue_from is not None and not resume:
            _copy_state(Path(recipe.continue_from.run), name, state_folders[name])
    link = SuperLink(
        folder=folder,
        say=say,
        keys=public_keys,
        run_config={"federation": str((folder / PLAN).absolute()), "users": encode_names(plan.users)},
    )
    threads_per_client = None  # as the recipe says
    if not recipe.runtime.threads:  # clients share the cores equally
        threads_per_client = max(1, (os.cpu_count() or 1) // len(settings_of_users))
    for user_settings in settings_of_users:
        name = user_settings.name
        _save_client_file(state_folders[name], user_settings, link.address, private_keys[name], threads_per_client)
    clients = [_client_process(name, state_folder, say) for name, state_folder in state_folders.items()]

    def restart_ended_clients() -> None:
        _restart_ended(clients, num_needed=plan.network.min_participants)

    try:
        supervise(link, meanwhile=restart_ended_clients)
    except RunError as error:
        reasons = ""
        first_round_is_done = bool(list_checkpoints(folder))
        if not first_round_is_done:  # perhaps because users cannot take part
            reasons = _refusals(clients)
        raise RunError(f"{error}{reasons}") from None
    finally:
        for client in clients:
            client.stop()
    return read_metrics(folder)


def _copy_state(earlier: Path, name: str, state: Path) -> None:
    """Copy a user's state at the end of an earlier federation on this machine, from which a new one continues.

    Args:
        earlier: Folder of the earlier federation.
        name: Name of the user; nothing is copied if it has no state there.
        state: The user's state folder in the new federation.
    """
    run = f"run-{run_name(earlier)}"
    source = earlier / USERS / as_folder(name) / run
    if source.exists() and not (state / run).exists():
        # Answers are stored only to be sent again, and no task of the earlier federation is repeated.
        shutil.copytree(source, state / run, ignore=shutil.ignore_patterns("answers"))


def _refuse_auto_memory(recipe: Recipe) -> None:
    """Refuse settings with which each client would use all memory of this machine, which the clients share.

    Raises:
        RecipeError: The recipe leaves the memory of a client, or a number of specialists that depends on it, to "auto".
    """
    if recipe.runtime.memory == AUTO:
        raise RecipeError("runtime.memory: got 'auto' for clients that share this machine; allowed: a size for each")
    if chooses_specialists(recipe) and recipe.runtime.memory is None:
        raise RecipeError(
            "method.specialists: got 'auto' for clients that share this machine; allowed: with runtime.memory, a size "
            "for each"
        )


def _save_client_file(state: Path, own: Own, server: str, private_key: Path, threads: int | None) -> None:
    """Write the file from which a client on this machine reads its settings.

    Args:
        state: The user's state folder.
        own: The user's own settings.
        server: Address of the server, ``HOST:PORT``.
        private_key: File with the user's private key.
        threads: Number of CPU threads of the client; None for the number in the recipe.
    """
    content = own.model_dump(exclude_defaults=True)
    if threads is not None:
        content["runtime"] = {"threads": threads}
    content["server"] = server
    content["key"] = str(private_key.absolute())
    save_participant(state / FILE, Participant(**content, state="."))


def _client_process(name: str, state: Path, say: Callable[[str], None]) -> ClientProcess:
    """Return a process that runs ``comingle client`` with the user's file."""
    command = [sys.executable, "-m", "comingle", "client", str(state / FILE)]
    return ClientProcess(name=name, state=state, command=command, say=say)


def _refusals(clients: Sequence[ClientProcess]) -> str:
    """Return why the first few users cannot take part, as the end of an error message: ``"; REASON; REASON"``."""
    reasons = [f"; {client.refusal}" for client in clients if client.refusal]
    return "".join(reasons[:_MAX_LISTED_REFUSALS])


def _restart_ended(clients: Sequence[ClientProcess], num_needed: int) -> None:
    """Restart clients that have ended, except for those that cannot take part.

    Args:
        clients: Processes of all clients; ``refusal`` says why a client cannot take part.
        num_needed: Number of clients that the federation needs.

    Raises:
        RunError: Too few clients can still take part.
    """
    for client in clients:
        client.keep_running()
    num_left = sum(not client.refusal for client in clients)
    if num_left < num_needed:
        raise RunError(f"{num_left} of {len(clients)} users can take part; needed: {num_needed}")
