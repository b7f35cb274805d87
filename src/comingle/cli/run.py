"""``comingle run``: one recipe, one run folder; in one process or in several."""

from __future__ import annotations

from typing import Annotated

import typer

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
)
from comingle.training.backends.launched import find_place
from comingle.utils.errors import RecipeError

Processes = Annotated[
    int | None,
    typer.Option("--processes", metavar="<n>", min=1, max=1024, help="Share the users out over processes here."),
]


def run(
    recipe: RecipePath,
    sets: Sets = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
    processes: Processes = None,
    everybody: Everybody = False,
    quiet: Quiet = False,
) -> None:
    """Train the users of a recipe together and write a run folder."""
    place = find_place()
    if place is not None and processes not in (None, place.size):
        raise RecipeError(f"--processes: got {processes}, and a launcher has started {place.size}; leave it out")
    if place is None and processes is not None and processes > 1:
        from comingle.cli.training import launch

        read = read_recipe(recipe, sets, seed)
        launch(processes, out or default_folder(recipe, read.method.name, read.seed))
        return
    from comingle.cli.training import train_here
    from comingle.reports.tables import render_run
    from comingle.utils.terminal import words

    trained = train_here(place, recipe, sets, seed, out, resume=resume, force=force, quiet=quiet)
    if trained is not None:
        folder, done = trained
        console.print(render_run(done.metrics, everybody=everybody))
        console.print(words(f"{folder}/  metrics.json · events.jsonl · checkpoints/ · tensorboard/", "dim"))
