"""How much has been revealed: epsilon at a delta, by the accountants of Google's ``dp-accounting``.

Neighbours are populations of which one user's data is there or not, with a change of zero (Kairouz et al. 2021); the
names and the number of the users are public. Where so many users are drawn without replacement, and for "local", one
user's data is replaced by any other, which moves the sum by twice the clip norm.
"""

from __future__ import annotations

import importlib
import logging
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from comingle.config.settings import PrivacySection
from comingle.utils.errors import RecipeError, list_names

_log = logging.getLogger("comingle")

_SPENT = "%s: one more round would exceed the privacy budget, so they train no more; others go on"

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


def sample_size(participation: float, users: int) -> int:
    """How many users a fraction is."""
    return max(1, math.ceil(participation * users - 1e-9))


def expected(privacy: PrivacySection, participation: Participation, users: int, number: int) -> float:
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


def accountant_of(privacy: PrivacySection, release: Release) -> str:
    """By which account epsilon is computed."""
    return "rdp" if release.sample else privacy.accountant


_STEPS = 14
_MOST = 2.0**20


def least_noise(privacy: PrivacySection, count: int, release: Callable[[float], Release]) -> float:
    """Return the least noise multiplier, to a few parts in ten thousand, with which ``count`` releases spend epsilon.

    Args:
        privacy: Has epsilon, delta and the accountant.
        count: Releases of a whole run.
        release: From a noise multiplier to what one of them reveals.

    Raises:
        RecipeError: No noise is enough, or the package is not installed.
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


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a user does in a run: ``steps`` with noise in each of ``rounds``, of ``batch`` examples in the mean."""

    examples: int
    batch: int
    steps: int
    rounds: int

    @property
    def rate(self) -> float:
        """The chance of an example to be in a batch."""
        return min(1.0, self.batch / max(1, self.examples))

    @property
    def expected(self) -> float:
        """How many examples a batch has in the mean, by which sums are divided: public, whoever was drawn."""
        return max(1.0, self.rate * self.examples)

    @property
    def planned(self) -> int:
        """Steps with noise of the whole run."""
        return self.steps * self.rounds


@lru_cache(maxsize=1 << 12)
def multiplier_of(privacy: PrivacySection, work: Work) -> float:
    """A user's noise multiplier: as given, or the least with which all that is planned spends epsilon.

    Raises:
        RecipeError: no noise is enough, or the package that computes it is not installed.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    return least_noise(privacy, work.planned, lambda z: Release(noise=z, rate=work.rate))


def spent_by(privacy: PrivacySection, work: Work, steps: int) -> float:
    """Epsilon of a user's examples after so many steps with noise."""
    if steps == 0:
        return 0.0
    release = Release(noise=multiplier_of(privacy, work), rate=work.rate)
    return epsilon(release, steps, privacy.delta, privacy.accountant)


@dataclass(kw_only=True)
class Account:
    """The releases of each user so far, and the epsilon that they have spent.

    Args:
        privacy: Has the budget.
        users: All of a run.
        epsilon_of: From a user's number and a count of releases to epsilon.
        counts: Releases of each user.
        warned: Users of whom the log has said that their budget is spent.
    """

    privacy: PrivacySection
    users: tuple[str, ...]
    epsilon_of: Callable[[int, int], float]
    counts: Int[Tensor, " users"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    warned: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.counts = self.counts if len(self.counts) else torch.zeros(len(self.users), dtype=torch.int64)

    def charge(self, users: Sequence[int]) -> None:
        """Count a release of each of these users."""
        self.counts[list(users)] += 1

    def affordable(self, members: Sequence[int]) -> list[int]:
        """Return the users for whom one more release stays within the budget; warn once of each other."""
        budget = math.inf if self.privacy.epsilon is None else self.privacy.epsilon
        counts = self.counts.tolist()
        found = [user for user in members if self.epsilon_of(user, counts[user] + 1) <= budget]
        if found and (spent := sorted(set(members) - set(found) - self.warned)):
            self.warned.update(spent)
            _log.warning(_SPENT, list_names(self.users[user] for user in spent))
        return found

    @property
    def spent(self) -> dict[str, Any]:
        """Epsilon of the user of whom most was revealed, and of all users where they differ."""
        each = [self.epsilon_of(user, count) for user, count in enumerate(self.counts.tolist())]
        differ = {"users": dict(zip(self.users, each, strict=True))} if len(set(each)) > 1 else {}
        return {"epsilon": max(each, default=0.0), "delta": self.privacy.delta, **differ}


def affordable_releases(privacy: PrivacySection, planned: int, spends: Callable[[int], float]) -> int:
    """Return how many of the planned releases stay within the budget; ``spends`` is the epsilon of so many."""
    budget = math.inf if privacy.epsilon is None else privacy.epsilon
    return bisect_right(range(1, planned + 1), budget, key=spends)


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
