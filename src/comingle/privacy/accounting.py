"""How much has been revealed: epsilon at a delta, by the accountants of Google's ``dp-accounting``.

Neighbours are populations of which one user's data is there or not, with a change of zero (Kairouz et al. 2021); the
names and the number of the users are public. Where so many users are drawn without replacement, and for "local", one
user's data is replaced by any other, which moves the sum by twice the clip norm.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from comingle.config.settings import Privacy
from comingle.utils.errors import RecipeError

Participation = float | tuple[tuple[int, ...], ...]
"""A fraction of the users, or lists of numbers, as in ``Training``."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """What one round reveals of a user: a Gaussian of deviation ``noise`` times its sensitivity.

    ``rate`` is the chance to be drawn, each user by itself; ``sample`` of ``users`` are drawn without replacement.
    """

    noise: float
    rate: float = 1.0
    sample: int = 0
    users: int = 0

    @property
    def sampled(self) -> bool:
        """Whether who takes part is drawn, and nobody knows who was."""
        return self.rate < 1 or self.sample > 0


def release_of(privacy: Privacy, participation: Participation, users: int) -> Release:
    """A round of a recipe; the noise multiplier must be known."""
    z = privacy.multiplier
    if privacy.mechanism == "local":
        return Release(noise=z / 2)
    # The server of a secure sum knows who is in it, and so do they: nobody is hidden by not having been drawn.
    if isinstance(participation, tuple) or participation >= 1 or privacy.secure_aggregation is not None:
        return Release(noise=z)
    if privacy.sampling == "poisson":
        return Release(noise=z, rate=participation)
    return Release(noise=z / 2, sample=sample_size(participation, users), users=users)


def sample_size(participation: float, users: int) -> int:
    """How many users a fraction is."""
    return max(1, math.ceil(participation * users - 1e-9))


def expected(privacy: Privacy, participation: Participation, users: int, number: int) -> float:
    """Over how many users a round's sum is divided, whoever takes part: public, so that it reveals nothing."""
    if isinstance(participation, tuple):
        return float(len(set(participation[number % len(participation)])))
    drawn_alone = privacy.sampling == "poisson" and privacy.secure_aggregation is None
    return participation * users if drawn_alone else float(sample_size(participation, users))


_NOBODY = 200.0
"""An epsilon that protects nobody. Beyond it the bound of ``rdp`` is taken, a few per cent above that of ``pld``, whose
grid of privacy losses grows to minutes and gigabytes."""


@lru_cache(maxsize=1 << 12)
def epsilon(release: Release, count: int, delta: float, accountant: str) -> float:
    """What ``count`` such releases have revealed; an upper bound.

    Raises:
        RecipeError: the package is not installed.
    """
    if count == 0:
        return 0.0
    dp = _package()
    event, relation = dp.GaussianDpEvent(release.noise), dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if release.sample:  # of which no privacy loss distribution is known
        relation, accountant = dp.NeighboringRelation.REPLACE_ONE, "rdp"
        event = dp.SampledWithoutReplacementDpEvent(release.users, release.sample, event)
    elif release.rate < 1:
        event = dp.PoissonSampledDpEvent(release.rate, event)
    accountants = {"rdp": dp.rdp.RdpAccountant, "pld": dp.pld.PLDAccountant}

    def spent(name: str) -> float:
        with _quiet():
            return float(accountants[name](neighboring_relation=relation).compose(event, count).get_epsilon(delta))

    bound = spent("rdp")
    return bound if accountant == "rdp" or bound > _NOBODY else spent("pld")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a warning for each order of Renyi's divergence that is left out, which makes the bound no less true."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def accountant_of(privacy: Privacy, release: Release) -> str:
    """By which account epsilon is computed."""
    return "rdp" if release.sample else privacy.accountant


_STEPS = 14
_MOST = 2.0**20


def calibrate(privacy: Privacy, participation: Participation, users: int, count: int) -> float:
    """The least noise multiplier, to a few parts in ten thousand, with which ``count`` releases spend its epsilon.

    Raises:
        RecipeError: no noise is enough, or the package is not installed.
    """

    def release(z: float) -> Release:
        return release_of(replace(privacy, noise_multiplier=z), participation, users)

    return least_noise(privacy, count, release)


def least_noise(privacy: Privacy, count: int, release: Callable[[float], Release]) -> float:
    """The same of releases that follow from a noise multiplier in any way.

    Raises:
        RecipeError: as :func:`calibrate`.
    """
    target = privacy.epsilon
    assert target is not None
    if count == 0:
        return 1.0

    def spends(z: float, accountant: str) -> float:
        return epsilon(release(z), count, privacy.delta, accountant)

    high = 1.0
    while spends(high, "rdp") > target:  # which is fast, and never below the other
        high *= 2
        if high > _MOST:
            raise RecipeError(f"privacy.epsilon: got {target:g}, for which no noise up to {_MOST:g} is enough")
    low = high / 2
    while spends(low, privacy.accountant) <= target and low > 1 / _MOST:
        high, low = low, low / 2
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spends(middle, privacy.accountant) <= target else (middle, high)
    return high


def most_releases(schedule: Sequence[Sequence[int]]) -> int:
    """In how many rounds the user takes part who takes part most often."""
    return max(Counter(user for members in schedule for user in members).values(), default=0)


def _package() -> Any:
    try:
        package = importlib.import_module("dp_accounting")
        for name in ("rdp", "pld"):
            importlib.import_module(f"dp_accounting.{name}")
    except ImportError:
        raise RecipeError("privacy: needs the package dp-accounting: pip install 'comingle[privacy]'") from None
    return package
