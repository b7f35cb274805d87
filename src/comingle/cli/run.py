"""``comingle run``: one recipe, one run folder."""

from __future__ import annotations

from typing import Annotated

import typer

from comingle.cli.options import Force, Out, RecipePath, Resume, Sets, default_folder, read_recipe


def run(
    recipe: RecipePath,
    sets: Sets = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: the recipe's).")] = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train the users of a recipe together and write a run folder."""
    read = read_recipe(recipe, sets, seed)
    from comingle import experiment
    from comingle.cli.progress import console, progress_bars, status
    from comingle.cli.training import bar, warn_overlaps
    from comingle.folders import check_folder, open_folder
    from comingle.materials import describe, prepare
    from comingle.nets import warn_unread
    from comingle.reports.tables import render_run

    folder = out or default_folder(recipe, read.method.name, read.seed)
    check_folder(folder, read, resume=resume, force=force)
    with status("loading the base model and the users' text"):
        materials = prepare(read)
    warn_overlaps(materials)
    sim = experiment.build(read, materials)
    warn_unread(read)
    inputs = describe(materials, read)
    with open_folder(folder, read, inputs, resume=resume, force=force), progress_bars() as progress:
        done = experiment.execute(sim, read, folder, resume=resume, observers=[bar(progress, sim)])
    console.print(render_run(done.metrics))
    console.print(f"[dim]{folder}/  metrics.json · events.jsonl · checkpoints/ · tensorboard/[/dim]")
