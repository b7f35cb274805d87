"""What privacy a whole run will have, told before it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from comingle.engines.private import planned_releases
from comingle.engines.settings import Training
from comingle.methods.base import Method
from comingle.privacy.accounting import accountant_of, epsilon, release_of


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

    budget = math.inf if privacy.epsilon is None else privacy.epsilon
    count = bisect_right(range(1, planned + 1), budget, key=spends)
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
