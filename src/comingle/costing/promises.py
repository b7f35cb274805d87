"""What privacy a whole run will have, told before it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from comingle.config.settings import Privacy, Training
from comingle.methods.base import Method
from comingle.privacy.accounting import accountant_of, epsilon, release_of
from comingle.privacy.guard import Ledger
from comingle.privacy.noise import Work, multiplier_of, spent_by
from comingle.training.privacy import planned_releases


def promise(training: Training, method: Method, users: Sequence[str]) -> dict[str, Any]:
    """What a whole run will have revealed of the user of whom most is; nothing where the recipe has no privacy.

    Where the noise is given and a budget too, a run of fewer rounds than planned stays within it.
    """
    privacy = training.privacy
    if privacy is None or not privacy.noisy:
        return {}
    release = release_of(privacy, training.participation, len(users))
    planned, accountant = planned_releases(training, method, users), accountant_of(privacy, release)

    def spends(count: int) -> float:
        return epsilon(release, count, privacy.delta, accountant)

    count = _affordable(privacy, planned, spends)
    return {
        "mechanism": privacy.mechanism,
        "epsilon": spends(count),
        "delta": privacy.delta,
        "noise_multiplier": privacy.multiplier,
        "clip_norm": privacy.clip_norm,
        "accountant": accountant,
        "releases": count,
        "planned_releases": planned,
    }


def promise_of_examples(ledger: Ledger) -> dict[str, Any]:
    """The same where single examples are hidden: of the user of whom most will have been revealed."""
    privacy = ledger.privacy

    def ends(work: Work) -> tuple[float, Work, int]:
        def spends(rounds: int) -> float:
            return spent_by(privacy, work, rounds * work.steps)

        rounds = _affordable(privacy, work.rounds, spends)
        return spends(rounds), work, rounds * work.steps

    most, work, steps = max((ends(work) for work in ledger.works().values()), key=lambda found: found[0])
    return {
        "mechanism": privacy.mechanism,
        "epsilon": most,
        "delta": privacy.delta,
        "noise_multiplier": multiplier_of(privacy, work),
        "clip_norm": privacy.clip_norm,
        "accountant": privacy.accountant,
        "releases": steps,
        "planned_releases": work.planned,
    }


def _affordable(privacy: Privacy, planned: int, spends: Callable[[int], float]) -> int:
    """How many of the planned rounds stay within the budget."""
    budget = math.inf if privacy.epsilon is None else privacy.epsilon
    return bisect_right(range(1, planned + 1), budget, key=spends)
