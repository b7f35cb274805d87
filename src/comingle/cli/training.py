"""What the training verbs share beyond options; imports torch, so only from inside a verb."""

from __future__ import annotations

from rich.progress import Progress

from comingle.cli.progress import ProgressBar, errors
from comingle.engines.simulation import Simulation
from comingle.engines.training import cohorts, participants
from comingle.materials import Materials


def bar(progress: Progress, sim: Simulation) -> ProgressBar:
    """A progress bar for a run: its total is the number of local iterations of cohorts."""
    training, names = sim.training, [trainer.name for trainer in sim.trainers]
    rounds = range(training.rounds if sim.method.phases else 0)
    copies = sim.method.copies
    groups = [len(cohorts(participants(training, r, names) * copies, sim.portions.users)) for r in rounds]
    return ProgressBar(progress, f"{sim.method.name:<14} seed {training.seed}", sum(groups) * sim.local_steps)


def warn_overlaps(materials: Materials) -> None:
    """Say which users' held-out text also occurs in their training text."""
    for found in materials.overlaps():
        errors.print(
            f"[yellow]warning:[/yellow] user {found.user}: {found.valid} of {found.valid_documents} validation and "
            f"{found.test} of {found.test_documents} test documents also occur in the training text",
            highlight=False,
        )
