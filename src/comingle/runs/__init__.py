"""Runs: from a recipe to users' models, compared, advised on and joined."""

from __future__ import annotations

METHODS = ("fedavg", "comigs-1g1s")
"""Held against ``local``; the first of them trains smaller groups too."""


SEEDS = (0, 1, 2)


ROUNDS = 5


def shortened(rounds: int) -> dict[str, object]:
    """Changes of a recipe for a run of so many rounds that is evaluated once, at its end."""
    return {"training.rounds": rounds, "evaluation.every": rounds, "evaluation.first": False}
