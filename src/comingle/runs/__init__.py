"""Runs: from a recipe to users' models, compared, advised on and joined."""

from __future__ import annotations

METHODS = ("fedavg", "comigs-1g1s")
"""Methods that ``advise`` compares with ``local``; the first of them also trains smaller groups."""

METHODS_FOR_NETS = ("fedavg", "floral")
"""The same for data of samples, whose users train nets."""

SEEDS = (0, 1, 2)
"""Seeds of a comparison by default."""

ROUNDS = 5
"""Rounds of the runs of a comparison by default."""


def shortened(rounds: int) -> dict[str, object]:
    """Return changes of a recipe for a run of ``rounds`` rounds that is evaluated once, at its end."""
    return {"training.rounds": rounds, "evaluation.every": rounds, "evaluation.first": False}
