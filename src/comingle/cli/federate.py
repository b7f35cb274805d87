"""``comingle federate``: a recipe with every user in processes of its own, on this machine."""

from __future__ import annotations

from comingle.cli.options import (
    Everybody,
    Force,
    Out,
    Quiet,
    RecipePath,
    Resume,
    Seed,
    Sets,
    console,
    default_folder,
    read_recipe,
    require_flower,
    speaker,
    table_of_participants,
)


def federate(
    recipe: RecipePath,
    sets: Sets = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
    everybody: Everybody = False,
    quiet: Quiet = False,
) -> None:
    """Train the users of a recipe as a network would: a server, and for each user processes and a folder of its own."""
    read = read_recipe(recipe, sets, seed)

    require_flower()
    from comingle.federation.launch import federate as run
    from comingle.reports.tables import render_run
    from comingle.utils.terminal import words

    folder = out or default_folder(recipe, read.method.name, read.seed)
    with table_of_participants(folder, everybody=everybody, quiet=quiet):
        metrics = run(read, folder, resume=resume, force=force, say=speaker(quiet=quiet))
    console.print(render_run(metrics, everybody=everybody))
    console.print(words(f"{folder}/  metrics.json · events.jsonl · users/NAME/ (each user's own folder)", "dim"))
