"""``comingle run``: one recipe, one run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comingle.cli.options import (
    Everybody,
    Force,
    Out,
    Quiet,
    RecipePath,
    Resume,
    Seed,
    Sets,
    default_folder,
    read_recipe,
)

if TYPE_CHECKING:
    from comingle.engines.client import Clients
    from comingle.engines.events import Observer


def run(
    recipe: RecipePath,
    sets: Sets = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
    everybody: Everybody = False,
    quiet: Quiet = False,
) -> None:
    """Train the users of a recipe together and write a run folder."""
    read = read_recipe(recipe, sets, seed)
    from comingle.cli.progress import console
    from comingle.cli.training import warn_overlaps
    from comingle.progress import LOADING, reporting
    from comingle.reports.tables import render_run
    from comingle.runs.folders import check_folder
    from comingle.runs.session import prepare, run_in, warn_unread
    from comingle.terminal import words

    folder = out or default_folder(recipe, read.method.name, read.seed)
    check_folder(folder, read, resume=resume, force=force)
    with reporting(quiet=quiet) as reporter:
        with reporter.waiting(LOADING):
            materials = prepare(read)
            warn_overlaps(materials)
        warn_unread(read)

        def watch(clients: Clients) -> list[Observer]:
            return [reporter.watch(clients)]

        done = run_in(folder, read, materials, resume=resume, force=force, observers=watch)
    console.print(render_run(done.metrics, everybody=everybody))
    console.print(words(f"{folder}/  metrics.json · events.jsonl · checkpoints/ · tensorboard/", "dim"))
