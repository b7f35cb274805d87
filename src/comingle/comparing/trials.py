"""Short runs, and which of them advice is made of unless somebody says otherwise; imports nothing heavy."""

from __future__ import annotations

from typing import Any

METHODS = ("fedavg", "comigs-1g1s")
"""Held against ``local``; the first of them trains smaller groups too."""
SEEDS = (0, 1, 2)
ROUNDS = 5


def shortened(rounds: int) -> dict[str, Any]:
    """Changes of a recipe for a run of so many rounds that is evaluated once, at its end."""
    return {"training.rounds": rounds, "evaluation.every": rounds, "evaluation.first": False}
