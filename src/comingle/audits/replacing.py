"""What an account says of a user whose data is replaced, which is what an audit's attack tells apart."""

from __future__ import annotations

import math
from dataclasses import replace

from comingle.privacy.accounting import Release, epsilon

_HALVINGS = 60


def epsilon_of_replacing(release: Release, count: int, delta: float, accountant: str, *, counted: bool) -> float:
    """Epsilon of a user whose data is replaced by other data rather than taken away; an upper bound.

    ``counted`` says that the release counts a replacement already, as does one of so many users. Without sampling the
    Gaussian's sensitivity is twice as large. With it the user is taken away and another one comes: twice an epsilon,
    and ``(1 + exp(epsilon)) delta`` (group privacy, Dwork and Roth 2014, Theorem 2.2, of two).
    """
    if counted or release.sample:
        return epsilon(release, count, delta, accountant)
    if not release.sampled:
        return epsilon(replace(release, noise=release.noise / 2), count, delta, accountant)
    for halvings in range(1, _HALVINGS):
        part = delta / 2**halvings
        once = epsilon(release, count, part, "rdp")
        if (1 + math.exp(min(once, 700.0))) * part <= delta:
            return 2 * once
    return math.inf
