"""``comingle run`` and ``comingle join``: train the users of a recipe, or a new user of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    line_printer,
    read_recipe,
    status,
    with_continuation,
)
from comingle.training.backends.launched import find_place
from comingle.utils.errors import RecipeError

Processes = Annotated[
    int | None,
    typer.Option(
        "--processes", metavar="<n>", min=1, max=1024, help="Split the users among N processes on this machine."
    ),
]


def run(
    recipe: RecipePath,
    sets: Sets = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
    continue_from: ContinueFrom = None,
    processes: Processes = None,
    all_users: AllUsers = False,
    quiet: Quiet = False,
) -> None:
    """Train the users of a recipe together and write a run folder."""
    sets = with_continuation(sets, continue_from)
    place = find_place()  # rank and number of processes; None if this is the only process
    if place is None and processes is not None and processes > 1:
        from comingle.cli.training import launch

        loaded_recipe = read_recipe(recipe, sets, seed)  # reports mistakes once, before any process starts
        folder = out or default_folder(recipe, loaded_recipe.method.name, loaded_recipe.seed)
        launch(processes, folder)  # runs this same command in each process
        return
    if place is not None and processes not in (None, place.size):
        raise RecipeError(f"--processes: got {processes}, but a launcher has started {place.size}; omit the option")
    from comingle.cli.training import train_here
    from comingle.reports.tables import render_run
    from comingle.utils.terminal import literal_text

    folder_and_run = train_here(place, recipe, sets, seed, out, resume=resume, force=force, quiet=quiet)
    if folder_and_run is not None:  # None in all processes but the first
        folder, trained_run = folder_and_run
        console.print(render_run(trained_run.metrics, all_users=all_users))
        console.print(literal_text(f"{folder}/  metrics.json · events.jsonl · checkpoints/ · tensorboard/", "dim"))


def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; it is only read.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the new user.")],
    data: Annotated[
        str,
        typer.Option(
            "--data", metavar="<path>", help="Read the new user's data from here, of the same kind as in the run."
        ),
    ],
    out: Out = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Train alone for N rounds (default: the run's number).")
    ] = None,
    local_step: Annotated[
        bool, typer.Option("--local-step", help="Add a round that trains the copied tensors, too.")
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train a model for a new user of a finished federation, without training other users again.

    Shared tensors are copied from the run; the user's own tensors are trained on the new user's data alone. The table
    compares the result with the base model, with training alone, and with the copied tensors before training.
    """
    from comingle.reports.tables import render_joined
    from comingle.runs.api import load
    from comingle.runs.given import NOTHING
    from comingle.runs.join import join_run, prepare_newcomer
    from comingle.runs.progress import reporting
    from comingle.training.kinds.base import kind_of
    from comingle.utils.names import as_folder
    from comingle.utils.terminal import literal_text

    with status("opening the run"):
        opened = load(run)
    folder = out or Path("runs") / f"{run.resolve().name}-{as_folder(name)}"
    new_user = prepare_newcomer(opened, name, data, rounds=rounds, local_step=local_step)
    with reporting(quiet=quiet) as reporter:
        joined = join_run(opened, new_user, folder, reporter, given=NOTHING, force=force)
    console.print(render_joined(name, joined.measure, joined.rows))
    has_language_model = kind_of(new_user.recipe).needs_base
    use = "export, chat and serve" if has_language_model else "comingle.load in Python"
    console.print(literal_text(f"{folder}/  a run with {name} only, for {use}", "dim"))


def leave(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="Name of the user who leaves.")],
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="exact: train the others again, as if the user had never taken part; forward: delete what is the "
            "user's alone, and keep the shared tensors.",
        ),
    ] = "exact",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; without this option only show what would be done.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Remove a user from a run and from the runs that it continues; their folders are replaced.

    Without --yes nothing is changed: the command lists the files that would be deleted and the rounds to train again.
    """
    from comingle.runs.leaving import STATEMENTS, plan_removal, remove_user
    from comingle.utils.terminal import literal_text

    if mode not in STATEMENTS:
        raise RecipeError(f"--mode: got {mode}; allowed: {', '.join(STATEMENTS)}")
    removal = plan_removal(run, user, mode)
    say = line_printer(quiet=quiet)
    files = removal.files
    if not yes:
        for path in files:
            console.print(literal_text(f"delete {path}", "dim"))
        if removal.rounds:
            minutes = removal.seconds / 60
            console.print(f"train again: {removal.rounds} rounds; with {user} they took {minutes:.1f} min")
        console.print(f"{mode}: {STATEMENTS[mode]}")
        console.print(f"nothing is changed; to do it: comingle leave {run} --user {user} --mode {mode} --yes")
        return
    remove_user(removal, say, progress=not quiet)
    console.print(f"{user} has left {run}: {len(files)} files deleted; {STATEMENTS[mode]}")
    console.print(literal_text("left.json in the run folder is the certificate", "dim"))
