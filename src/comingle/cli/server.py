"""``comingle server``: the coordinator of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comingle.cli.options import Everybody, Out, Quiet, console, require_flower, speaker, table_of_participants
from comingle.utils.errors import RecipeError


def server(
    federation: Annotated[Path | None, typer.Argument(metavar="FEDERATION", help="The coordinator's file.")] = None,
    out: Out = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; any but this machine needs --certificates.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 9092,
    certificates: Annotated[
        Path | None, typer.Option("--certificates", metavar="FOLDER", help="Certificates, and participants' keys.")
    ] = None,
    make_certificates: Annotated[
        Path | None,
        typer.Option("--make-certificates", metavar="FOLDER", help="Write certificates and keys for --host, and end."),
    ] = None,
    everybody: Everybody = False,
    quiet: Quiet = False,
) -> None:
    """Run the rounds of a federation: users on other machines take part with `comingle client`."""

    require_flower()
    if federation is None:
        raise RecipeError("server: no file; give the coordinator's, as `comingle server federation.yaml`")
    from comingle.federation.files import load_plan

    plan = load_plan(federation)
    if make_certificates is not None:
        _make(make_certificates, host, plan.users)
        return
    from comingle.federation.launch import serve
    from comingle.reports.tables import render_run
    from comingle.utils.terminal import words

    folder = out or Path("runs") / federation.stem
    say = speaker(quiet=quiet)
    with table_of_participants(folder, everybody=everybody, quiet=quiet):
        metrics = serve(federation, plan, folder, host=host, port=port, certificates=certificates, say=say)
    console.print(render_run(metrics, everybody=everybody))
    console.print(words(f"{folder}/  metrics.json · events.jsonl", "dim"))


def _make(folder: Path, host: str, users: tuple[str, ...]) -> None:
    from comingle.federation.flower.certificates import make_certificates, spelt
    from comingle.utils.terminal import words

    fresh = not (folder / "server.pem").exists()
    make_certificates(folder, [host] if fresh else [], users)
    console.print(words(f"{folder}/  server.pem, server.key (the server's alone) · ca.pem (for everybody)"))
    for user in users:
        console.print(words(f"{folder}/users/{spelt(user)}.key  for {user}, and for nobody else"))
