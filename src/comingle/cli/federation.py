"""``comingle federate``, ``server``, ``client``, ``status`` and ``bundle``: users in processes of many machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.cli.options import (
    AllUsers,
    ContinueFrom,
    Force,
    Out,
    Quiet,
    RecipePath,
    Resume,
    Seed,
    Sets,
    console,
    default_folder,
    hide_names,
    line_printer,
    logs_json,
    parse_path,
    read_recipe,
    require_flower,
    show_participants,
    with_continuation,
)
from comingle.cli.options import status as show_status
from comingle.utils.errors import RecipeError, RunError

if TYPE_CHECKING:
    from rich.console import RenderableType


def federate(
    recipe: RecipePath,
    sets: Sets = None,
    seed: Seed = None,
    out: Out = None,
    continue_from: ContinueFrom = None,
    resume: Resume = False,
    force: Force = False,
    all_users: AllUsers = False,
    quiet: Quiet = False,
) -> None:
    """Train the users of a recipe in a federation on this machine: a server, and processes and a folder per user."""
    loaded_recipe = read_recipe(recipe, with_continuation(sets, continue_from), seed)

    require_flower()
    from comingle.federation.launch import federate as run_federation
    from comingle.reports.tables import render_run
    from comingle.utils.terminal import literal_text

    folder = out or default_folder(recipe, loaded_recipe.method.name, loaded_recipe.seed)
    with show_participants(folder, all_users=all_users, quiet=quiet):
        metrics = run_federation(loaded_recipe, folder, resume=resume, force=force, say=line_printer(quiet=quiet))
    console.print(render_run(metrics, all_users=all_users))
    console.print(literal_text(f"{folder}/  metrics.json · events.jsonl · users/NAME/ (each user's own folder)", "dim"))


def server(
    federation: Annotated[Path | None, typer.Argument(metavar="FEDERATION", help="The federation file.")] = None,
    out: Out = None,
    host: Annotated[
        str, typer.Option("--host", help="Listen on this address; --certificates are required unless it is local.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Listen on this port; 0 selects a free one.")
    ] = 9092,
    certificates: Annotated[
        Path | None,
        typer.Option("--certificates", metavar="FOLDER", help="Use the certificates and users' keys in FOLDER."),
    ] = None,
    make_certificates: Annotated[
        Path | None,
        typer.Option("--make-certificates", metavar="FOLDER", help="Write certificates and keys for --host, and exit."),
    ] = None,
    continue_from: ContinueFrom = None,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Train again whenever enough users have new data, without an end.")
    ] = False,
    add_users: Annotated[
        list[str] | None,
        typer.Option(
            "--add-user",
            metavar="NAME",
            help="Add the user to the federation file, with a key in --certificates, and exit (repeatable).",
            show_default=False,
        ),
    ] = None,
    remove_users: Annotated[
        list[str] | None,
        typer.Option(
            "--remove-user",
            metavar="NAME",
            help="Remove the user from the federation file, and exit (repeatable).",
            show_default=False,
        ),
    ] = None,
    status_port: Annotated[
        int | None,
        typer.Option(
            "--status-port", min=0, max=65535, help="Serve a status page and /metrics on this port of this machine."
        ),
    ] = None,
    all_users: AllUsers = False,
    quiet: Quiet = False,
) -> None:
    """Run the server of a federation; users on other machines take part with `comingle client`."""
    require_flower()
    if federation is None:
        raise RecipeError("server: no federation file; give one, for example `comingle server federation.yaml`")
    from comingle.federation.files import change_participants, load_plan

    if add_users or remove_users:
        names = change_participants(federation, add=add_users or (), remove=remove_users or ())
        if certificates is not None and add_users:
            _write_certificates(certificates, host, tuple(add_users))
        console.print(f"{federation}  participants: {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)
        return
    allows_rounds = None if make_certificates is not None else continuous
    continued_run = str(continue_from.resolve()) if continue_from else ""
    plan = load_plan(federation, continue_from=continued_run, continuous=allows_rounds)
    if make_certificates is not None:
        _write_certificates(make_certificates, host, plan.users)
        return
    hide_names(plan.users)
    from comingle.federation.launch import serve
    from comingle.federation.status_page import serving_status
    from comingle.reports.tables import render_run
    from comingle.utils.terminal import literal_text

    folder = out or Path("runs") / federation.stem
    say = line_printer(quiet=quiet)
    if continuous:  # until the process is interrupted
        options: dict[str, Any] = {"host": host, "port": port, "certificates": certificates}
        with serving_status(folder, status_port, say):
            serve(federation, plan, folder, say=say, continuous=True, **options)
        return
    with serving_status(folder, status_port, say), show_participants(folder, all_users=all_users, quiet=quiet):
        metrics = serve(federation, plan, folder, host=host, port=port, certificates=certificates, say=say)
    if logs_json():
        say(f"the federation has ended; {folder}/metrics.json has its results")
        return
    console.print(render_run(metrics, all_users=all_users))
    console.print(literal_text(f"{folder}/  metrics.json · events.jsonl", "dim"))


def _write_certificates(folder: Path, host: str, users: tuple[str, ...]) -> None:
    """Write the server's certificate if there is none, and keys of users who have none; list the files.

    Args:
        folder: Folder of certificates and keys.
        host: Address of the server, for its certificate.
        users: Names of the users.
    """
    from comingle.federation.flower.certificates import make_certificates, quote_name
    from comingle.utils.terminal import literal_text

    has_certificate = (folder / "server.pem").exists()
    make_certificates(folder, [] if has_certificate else [host], users)
    console.print(literal_text(f"{folder}/  server.pem, server.key (for the server only) · ca.pem (for all users)"))
    for user in users:
        console.print(literal_text(f"{folder}/users/{quote_name(user)}.key  for {user} only"))


def client(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="The participant's file (repeatable)."),
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--name", help="Take part as this user (repeatable).", show_default=False)
    ] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="PATH", help="Read the user's data from PATH.")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="NAME|FOLDER",
            help="Load the base model from here (default: as in the federation file).",
        ),
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="Connect to this server.")] = None,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="FOLDER", help="Keep all private files in FOLDER (default: NAME).")
    ] = None,
    certificates: Annotated[
        Path | None, typer.Option("--certificates", metavar="FILE", help="Verify the server with this ca.pem.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Authenticate with this user's key.")
    ] = None,
    tells: Annotated[
        str | None,
        typer.Option(
            "--tells",
            metavar="LEVEL",
            help="Report only these numbers to the server: all, scores, losses or nothing "
            "(default: scores; with privacy: nothing).",
        ),
    ] = None,
    only_when: Annotated[
        list[str] | None,
        typer.Option(
            "--only-when",
            metavar="CONDITION",
            help='Train only while this holds: idle, plugged-in or "between 22:00-06:00" (repeatable: all must hold).',
            show_default=False,
        ),
    ] = None,
    max_threads: Annotated[
        int | None, typer.Option("--max-threads", metavar="N", help="Use at most N CPU threads.")
    ] = None,
    nice: Annotated[
        int | None, typer.Option("--nice", metavar="N", help="Lower the priority of the process by N, from 0 to 19.")
    ] = None,
    max_upload_per_day: Annotated[
        str | None,
        typer.Option("--max-upload-per-day", metavar="SIZE", help="Send at most this much per day, such as 50MB."),
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve",
            metavar="PORT",
            min=0,
            max=65535,
            help="Serve the user's current model on this machine: chat page and OpenAI API; 0 selects a free port.",
        ),
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for the next federation when one has ended.")] = False,
    supernode: Annotated[
        bool, typer.Option("--supernode", help="Run Flower's SuperNode, with a process for each message.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Take part in a federation: data, experts, routers and optimiser state stay on this machine.

    One process can take part for several users, who then share the base model in memory.
    """
    require_flower(complete=supernode)
    if serve is not None:
        from comingle.cli.serve import require_serving_packages

        require_serving_packages("client --serve")
    paths = {"state": state, "certificates": certificates, "key": key}
    options: dict[str, Any] = {
        "data": _make_absolute(data),
        "base": _make_absolute(base),
        "server": server,
        "tells": tells,
        "only_when": only_when or None,
        "max_threads": max_threads,
        "nice": nice,
        "max_upload_per_day": max_upload_per_day,
        **{name: str(path.absolute()) for name, path in paths.items() if path},
    }
    from comingle.federation.client_command import take_part
    from comingle.federation.participant import TELLS, load_participants

    if tells is not None and tells not in TELLS:
        raise RecipeError(f"--tells: got {tells!r}; allowed: {', '.join(TELLS)}")

    say = line_printer(quiet=quiet)
    participants = load_participants(files or (), names or (), options, say)
    hide_names(participant.name for participant in participants)
    take_part(participants, say=say, stays=stay, supernode=supernode, port=serve)


def _make_absolute(source: str | None) -> str | None:
    """Make the path of an existing file or folder absolute; return other texts, such as "gpt2", unchanged.

    A relative path in a participant's file is relative to that file, one on the command line to the current folder.

    Args:
        source: Value of ``--data`` or ``--base``; None if it is not given.
    """
    from comingle.utils.records import expand_home

    if source is None:
        return None
    path = expand_home(source)
    return str(path.absolute()) if path.exists() else source


_REFRESH_SECONDS = 2.0


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of a federation's server.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh the table every 2 seconds until nothing runs.")
    ] = False,
    all_users: AllUsers = False,
) -> None:
    """Show how far a run or a federation is, also while it runs in another terminal; nothing is changed."""
    import time

    from rich.live import Live

    from comingle.utils.files import is_locked
    from comingle.utils.records import PARTICIPANTS, client_runs, numbered_runs

    has_run = any((run / name).exists() for name in ("events.jsonl", "recipe.yaml", PARTICIPANTS))
    if not has_run and not numbered_runs(run) and not client_runs(run):
        raise RunError(
            f"status: got {run}; allowed: the folder of a run, of a federation's server (its --out) or of its user"
        )

    def is_running() -> bool:
        # A federation's server locks a folder inside the run folder before it has begun, and while it restarts.
        # A client locks its state folder, which is above that of a run.
        return any(is_locked(folder) for folder in (run, run / "flower", *(each.parent for each in client_runs(run))))

    runs = is_running()
    if not watch or not console.is_terminal:
        while watch and runs:  # nothing can be refreshed, so only the end is shown
            time.sleep(_REFRESH_SECONDS)
            runs = is_running()
        console.print(_render_status(run, is_running=runs, all_users=all_users))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_render_status(run, is_running=runs, all_users=all_users), refresh=True)
            if not runs:
                return
            time.sleep(_REFRESH_SECONDS)
            runs = is_running()


def _render_status(folder: Path, *, is_running: bool, all_users: bool) -> RenderableType:
    """Return the state of a run; of runs that follow one another a table, and the state of the newest one.

    Args:
        folder: The run folder, or that of a continuous federation or of ``comingle live``.
        is_running: Whether a process writes to it.
        all_users: Whether to list all users.
    """
    from rich.console import Group

    from comingle.reports.tables import render_client, render_progress, render_runs
    from comingle.utils.records import client_runs, numbered_runs

    if client_runs(folder):
        return render_client(folder, is_running=is_running)
    runs = numbered_runs(folder)
    if not runs:
        return render_progress(folder, is_running=is_running, all_users=all_users)
    newest = runs[-1]
    title = f"{folder}: {'running' if is_running else 'stopped'} · newest run {newest.name}"
    is_run_running = is_running and not (newest / "metrics.json").exists()
    progress = render_progress(newest, is_running=is_run_running, all_users=all_users)
    return Group(render_runs(runs, title=title), "", progress)


def bundle(
    recipe: Annotated[Path, typer.Argument(metavar="FILE", help="A recipe, or the server's file of a federation.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.tar", help="Write this archive.", parser=parse_path)],
    extras: Annotated[
        list[str] | None,
        typer.Option(
            "--extra",
            metavar="NAME",
            help="Include the packages of this extra of comingle (repeatable; default: device, for `comingle client`).",
            show_default=False,
        ),
    ] = None,
    platforms: Annotated[
        list[str] | None,
        typer.Option(
            "--platform",
            metavar="TAG",
            help="Include wheels for this platform, such as manylinux_2_28_aarch64 (repeatable; default: this one).",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write an archive for a site without internet: comingle, its packages, the base model and the recipe.

    No data is put into the archive.
    """
    from comingle.federation.bundle import write_bundle
    from comingle.utils.files import check_target
    from comingle.utils.terminal import literal_text

    if out.suffix != ".tar":
        raise RecipeError(f"--out: got {str(out)!r}; allowed: a file name that ends in .tar")
    check_target(out, force=force)
    with show_status("collecting the wheels"):
        written = write_bundle(recipe, out, extras or [], platforms or [], line_printer(quiet=quiet))
    for line in written.left_out:
        console.print(literal_text(f"left out: {line}"))
    if written.gpu_megabytes:
        index = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
        console.print(
            literal_text(
                f"{written.gpu_megabytes:,.1f} MB are GPU libraries; with {index} pip takes PyTorch without them"
            )
        )
    parts = f"{written.num_wheels} wheels · {written.num_base_files} files of the base model"
    console.print(literal_text(f"{out}  {written.megabytes:,.1f} MB · {parts}"))
    console.print(literal_text(f"SHA-256 {written.digest}"))
