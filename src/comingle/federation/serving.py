"""The coordinator's processes, for users on other machines."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comingle.federation.running import Plan, has_ended
from comingle.transports.flower.certificates import read_certificates
from comingle.transports.flower.fate import FOLDER
from comingle.transports.flower.processes import join_address
from comingle.transports.flower.server_app import spell
from comingle.transports.flower.superlink import Certificates, SuperLink, coordinate
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import locked
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
    """Run a coordinator's file in a run folder, from where it was; the metrics of those who let them be known.

    Raises:
        ComingleError: the file, the folder or the certificates cannot be used, or too few users take part.
    """
    if has_ended(folder):
        raise RunError(f"{folder}: this federation has ended; --out names another folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secure, keys = None, {}
    if certificates is not None:
        files = read_certificates(certificates)
        secure = Certificates(authority=files.authority, certificate=files.certificate, key=files.key)
        if strange := [name for name in plan.users if name not in files.users]:
            raise RecipeError(
                f"{certificates}: no key of {', '.join(strange)}; `comingle server {file} --make-certificates "
                f"{certificates}` makes the missing ones"
            )
        keys = {name: files.users[name] for name in plan.users}
    (folder / FOLDER).mkdir(exist_ok=True)
    with locked(folder / FOLDER):  # another one would take the coordinator for its own
        link = SuperLink(
            folder=folder,
            say=say,
            host=host,
            port=port,
            certificates=secure,
            keys=keys,
            run_config={"federation": str(file.absolute()), "users": spell(plan.users)},
        )
        if port:
            _require_port(link.host, link.port)
        listening = join_address(link.host, link.port)
        say(f"listening on {listening} for {len(plan.users)} participants: {', '.join(plan.users)}")
        if not keys:
            say("without keys any program on this machine can take part under a free name; see --certificates")
        coordinate(link)
    return read_metrics(folder)


def _require_port(host: str, port: int) -> None:
    """Check that the port is free: clients would otherwise reach the process that already listens on it.

    Raises:
        RunError: the port is in use, or binding to it is not permitted.
    """
    until = time.monotonic() + _PORT_SECONDS  # processes of a server that was killed may still be ending
    while error := _bind_error(host, port):
        if time.monotonic() > until:
            raise RunError(
                f"server: cannot listen on {join_address(host, port)} ({error.strerror}); give another --port"
            )
        time.sleep(0.2)


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended do not count
        try:
            one.bind((host, port))
        except OSError as error:
            return error
    return None
