"""``comingle client``: a participant of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from comingle.cli.options import Quiet, require_flower, speaker
from comingle.utils.errors import RecipeError
from comingle.utils.records import expand_home

_FILE = "participant.yaml"


def client(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The participant's own file.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Who takes part.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="PATH", help="Where the participant's data is.")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="NAME|FOLDER",
            help="Where the base is on this machine, if it is not where the federation says.",
        ),
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="The coordinator.")] = None,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="FOLDER", help="Folder for all that is private (default: NAME).")
    ] = None,
    certificates: Annotated[
        Path | None, typer.Option("--certificates", metavar="FILE", help="The coordinator's ca.pem.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="The participant's own key.")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="When a federation has ended, wait for the next.")] = False,
    quiet: Quiet = False,
) -> None:
    """Take part in a federation: data, experts, routers and optimiser state stay on this machine."""

    require_flower()
    given: dict[str, Any] = {
        "name": name,
        "data": _as_path(data),
        "base": _as_path(base),
        "server": server,
        **{k: str(v.absolute()) for k, v in (("state", state), ("certificates", certificates), ("key", key)) if v},
    }
    from comingle.federation.launch import take_part
    from comingle.utils.names import as_folder

    if file is None and name is None:
        raise RecipeError("client: nobody; give a participant's file, or --name and --data")
    take_part(file, given, default=Path(as_folder(name or "participant")) / _FILE, say=speaker(quiet=quiet), stays=stay)


def _as_path(source: str | None) -> str | None:
    """Make the path of an existing file or folder absolute; anything else, as a public name, stays."""
    if source is None:
        return None
    path = expand_home(source)
    return str(path.absolute()) if path.exists() else source
