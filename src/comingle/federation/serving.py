"""The coordinator's processes, for users on other machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from comingle.errors import RecipeError, RunError
from comingle.federation.running import Plan
from comingle.records import read_metrics
from comingle.transports.flower.certificates import read_certificates
from comingle.transports.flower.server_app import spell
from comingle.transports.flower.superlink import Certificates, SuperLink, coordinate


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
    if (folder / "metrics.json").exists():
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
    link = SuperLink(folder=folder, say=say, host=host, port=port, certificates=secure, keys=keys)
    say(f"listening on {host}:{link.port} for {len(plan.users)} participants: {', '.join(plan.users)}")
    coordinate(link, {"federation": str(file.absolute()), "users": spell(plan.users)})
    return read_metrics(folder)
