"""``comingle run``: one recipe, one run folder."""

from __future__ import annotations

from typing import Annotated

import typer

from comingle.cli.options import Everybody, Force, Out, Quiet, RecipePath, Resume, Sets, default_folder, read_recipe


def run(
    recipe: RecipePath,
    sets: Sets = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: the recipe's).")] = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
    everybody: Everybody = False,
    quiet: Quiet = False,
) -> None:
    """Train the users of a recipe together and write a run folder."""
    read = read_recipe(recipe, sets, seed)
    from comingle import experiment
    from comingle.cli.progress import console
    from comingle.cli.training import warn_overlaps
    from comingle.folders import check_folder, open_folder
    from comingle.materials import describe, prepare
    from comingle.nets import warn_unread
    from comingle.progress import LOADING, reporting
    from comingle.reports.tables import render_run
    from comingle.terminal import words

    folder = out or default_folder(recipe, read.method.name, read.seed)
    check_folder(folder, read, resume=resume, force=force)
    with reporting(quiet=quiet) as reporter:
        with reporter.waiting(LOADING):
            materials = prepare(read)
            warn_overlaps(materials)
            federation = experiment.build(read, materials)
            inputs = describe(materials, read)
        warn_unread(read)
        with open_folder(folder, read, inputs, resume=resume, force=force):
            done = experiment.execute(
                federation, read, folder, resume=resume, observers=[reporter.watch(federation.clients)]
            )
    console.print(render_run(done.metrics, everybody=everybody))
    console.print(words(f"{folder}/  metrics.json · events.jsonl · checkpoints/ · tensorboard/", "dim"))
