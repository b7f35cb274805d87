"""What the training verbs share beyond options; imports torch, so only from inside a verb."""

from __future__ import annotations

from rich.progress import Progress

from comingle.cli.progress import ProgressBar, errors
from comingle.engines.client import Clients
from comingle.engines.training import cohorts, participants
from comingle.materials import Materials


def bar(progress: Progress, clients: Clients) -> ProgressBar:
    """A progress bar for a run: its total is the number of local iterations of cohorts."""
    training, count = clients.training, len(clients.trainers)
    rounds = range(training.rounds if clients.method.trains else 0)
    copies = clients.method.placement.copies
    groups = [len(cohorts(participants(training, r, count) * copies, clients.portions.users)) for r in rounds]
    return ProgressBar(progress, f"{clients.method.name:<14} seed {training.seed}", sum(groups) * clients.local_steps)


def warn_overlaps(materials: Materials) -> None:
    """Say which users' held-out text also occurs in their training text."""
    for found in materials.overlaps():
        errors.print(
            f"[yellow]warning:[/yellow] user {found.user}: {found.valid} of {found.valid_documents} validation and "
            f"{found.test} of {found.test_documents} test documents also occur in the training text",
            highlight=False,
        )
