"""How much has been revealed: epsilon at a delta, by the accountants of Google's ``dp-accounting``.

Neighbours are populations of which one user's data is there or not, with a change of zero (Kairouz et al. 2021); the
names and the number of the users are public. Where so many users are drawn without replacement, and for "local", one
user's data is replaced by any other, which moves the sum by twice the clip norm.
"""

from __future__ import annotations

import importlib
import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

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
class Account(ABC):
    """The releases of each user so far, and the epsilon that they have spent.

    Args:
        privacy: Has the budget.
        participation: As in ``Training``.
        users: All of a run; of no use on a client.
        counts: Releases of each user.
        warned: Users of whom the log has said that their budget is spent.
        works: From names to what each user does in a run, for accounts of single examples.
    """

    privacy: PrivacySection
    participation: Participation = 1.0
    users: tuple[str, ...] = ()
    counts: Int[Tensor, " users"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    warned: set[int] = field(default_factory=set)
    works: Callable[[], Mapping[str, Work]] = dict

    replaces: ClassVar[bool] = False
    """Whether neighbours replace a user's data, rather than add or remove it."""

    def __post_init__(self) -> None:
        self.counts = self.counts if len(self.counts) else torch.zeros(len(self.users), dtype=torch.int64)

    @classmethod
    @abstractmethod
    def release_of(cls, privacy: PrivacySection, participation: Participation, users: int) -> Release:
        """Return what a round reveals of a user; the noise multiplier must be known."""

    @property
    def sampled(self) -> bool:
        """Whether participants are drawn in secret, so that a round is a release of all users."""
        return False

    @abstractmethod
    def epsilon_of(self, user: int, count: int) -> float:
        """Return what ``count`` releases of a user, by number, reveal."""

    @abstractmethod
    def own_epsilon(self, count: int, work: Work | None = None) -> float:
        """Return what ``count`` uploads, or rounds of ``work``, of a client's user reveal with its own noise."""

    def charge(self, users: Sequence[int]) -> None:
        """Count a release of each of these users."""
        self.counts[list(users)] += 1

    def charge_uploads(self, users: Sequence[int]) -> None:
        """Count uploads of these users when they arrive."""
        self.charge(users)

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
    def spent(self) -> dict[str, object]:
        """Epsilon of the user of whom most was revealed, and of all users where they differ."""
        each = [self.epsilon_of(user, count) for user, count in enumerate(self.counts.tolist())]
        differ = {"users": dict(zip(self.users, each, strict=True))} if len(set(each)) > 1 else {}
        return {"epsilon": max(each, default=0.0), "delta": self.privacy.delta, **differ}

    @abstractmethod
    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far, with the settings behind it and the clip norm of the next round."""

    @abstractmethod
    def forecast(self, planned: int) -> dict[str, object]:
        """Return what a whole run will have revealed of the user of whom most is.

        Where the noise is given and a budget too, a run of fewer rounds than planned stays within it.

        Args:
            planned: Rounds of the run in which something of that user is released.
        """


class UploadAccount(Account):
    """Gaussian releases of whole users: each round in which something of a user is uploaded."""

    @classmethod
    def release_of(cls, privacy: PrivacySection, participation: Participation, users: int) -> Release:
        """Return what a round reveals of a user, who may be hidden by not having been drawn."""
        z = privacy.multiplier
        # The server of a secure sum knows who is in it, and so do they: nobody is hidden by not having been drawn.
        if isinstance(participation, tuple) or participation >= 1 or privacy.secure_aggregation is not None:
            return Release(noise=z)
        if privacy.sampling == "poisson":
            return Release(noise=z, rate=participation)
        return Release(noise=z / 2, sample=sample_size(participation, users), users=users)

    @property
    def release(self) -> Release:
        """What a round of this run reveals of a user."""
        return self.release_of(self.privacy, self.participation, len(self.users))

    @property
    def sampled(self) -> bool:
        """Whether participants are drawn in secret, so that a round is a release of all users."""
        return self.release.sampled

    def epsilon_of(self, user: int, count: int) -> float:
        """Return what ``count`` releases reveal, which is the same for all users."""
        release = self.release
        return epsilon(release, count, self.privacy.delta, accountant_of(self.privacy, release))

    def own_epsilon(self, count: int, work: Work | None = None) -> float:
        """Return what ``count`` uploads of a client's user reveal with its own noise."""
        release = self.release_of(self.privacy, 1.0, 1)
        return epsilon(release, count, self.privacy.delta, self.privacy.accountant)

    def charge(self, users: Sequence[int]) -> None:
        """Count a release; where users are drawn in secret it is one of all, whoever was drawn."""
        super().charge(range(len(self.users)) if self.sampled else users)

    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far, with the settings behind it and the clip norm of the next round."""
        return {
            **self.spent,
            "mechanism": self.privacy.mechanism,
            "noise_multiplier": self.privacy.multiplier,
            "clip_norm": clip_norm,
            "accountant": accountant_of(self.privacy, self.release),
            "releases": int(self.counts.max()) if len(self.counts) else 0,
        }

    def forecast(self, planned: int) -> dict[str, object]:
        """Return what a whole run of ``planned`` releases will have revealed of a user."""
        count = affordable_releases(self.privacy, planned, lambda count: self.epsilon_of(0, count))
        return {
            "mechanism": self.privacy.mechanism,
            "epsilon": self.epsilon_of(0, count),
            "delta": self.privacy.delta,
            "noise_multiplier": self.privacy.multiplier,
            "clip_norm": self.privacy.clip_norm,
            "accountant": accountant_of(self.privacy, self.release),
            "releases": count,
            "planned_releases": planned,
        }


class ReplacingAccount(UploadAccount):
    """Gaussian releases of uploads that have their own noise: neighbours replace a user's data."""

    replaces = True

    @classmethod
    def release_of(cls, privacy: PrivacySection, participation: Participation, users: int) -> Release:
        """Return what an upload reveals: replacing a user's data moves it by twice the clip norm."""
        return Release(noise=privacy.multiplier / 2)


class StepAccount(UploadAccount):
    """Rounds of local steps with noise, each user's with its own number of examples.

    A round counts when a user was asked to take its steps, whether or not their outcome was sent.
    """

    @property
    def sampled(self) -> bool:
        """Whether participants are drawn in secret: who takes part is no secret here."""
        return False

    def charge_uploads(self, users: Sequence[int]) -> None:
        """Count nothing: the steps behind uploads were charged when they were asked for."""

    def epsilon_of(self, user: int, count: int) -> float:
        """Return what ``count`` rounds reveal of an example of a user, by number."""
        work = self.works().get(self.users[user])
        return 0.0 if work is None else spent_by(self.privacy, work, count * work.steps)

    def own_epsilon(self, count: int, work: Work | None = None) -> float:
        """Return what ``count`` rounds reveal of an example of a client's user."""
        assert work is not None
        return spent_by(self.privacy, work, count * work.steps)

    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far, with noise multipliers of each user where they differ."""
        works, counts = self.works(), dict(zip(self.users, self.counts.tolist(), strict=True))
        multipliers = {name: multiplier_of(self.privacy, work) for name, work in works.items()}
        differ = {"noise_multipliers": multipliers} if len(set(multipliers.values())) > 1 else {}
        return {
            **self.spent,
            "mechanism": self.privacy.mechanism,
            "noise_multiplier": max(multipliers.values(), default=self.privacy.noise_multiplier or 0.0),
            **differ,
            "clip_norm": clip_norm,
            "accountant": self.privacy.accountant,
            "releases": max((work.steps * counts[name] for name, work in works.items()), default=0),
        }

    def forecast(self, planned: int) -> dict[str, object]:
        """Return what a whole run will have revealed of the user of whom most is; rounds follow from :attr:`works`."""

        def ends(work: Work) -> tuple[float, Work, int]:
            rounds = affordable_releases(self.privacy, work.rounds, lambda rounds: self.own_epsilon(rounds, work))
            return self.own_epsilon(rounds, work), work, rounds * work.steps

        most, work, steps = max((ends(work) for work in self.works().values()), key=lambda found: found[0])
        return {
            "mechanism": self.privacy.mechanism,
            "epsilon": most,
            "delta": self.privacy.delta,
            "noise_multiplier": multiplier_of(self.privacy, work),
            "clip_norm": self.privacy.clip_norm,
            "accountant": self.privacy.accountant,
            "releases": steps,
            "planned_releases": work.planned,
        }


def affordable_releases(privacy: PrivacySection, planned: int, spends: Callable[[int], float]) -> int:
    """Return how many of the planned releases stay within the budget; ``spends`` is the epsilon of so many."""
    budget = math.inf if privacy.epsilon is None else privacy.epsilon
    return bisect_right(range(1, planned + 1), budget, key=spends)


def most_releases(schedule: Sequence[Sequence[int]]) -> int:
    """In how many rounds the user takes part who takes part most often."""
    return max(Counter(user for members in schedule for user in members).values(), default=0)


def _package() -> Any:
    """Return ``dp_accounting``, which is optional and has no types.

    Raises:
        RecipeError: It is not installed.
    """
    try:
        package = importlib.import_module("dp_accounting")
        for name in ("rdp", "pld"):
            importlib.import_module(f"dp_accounting.{name}")
    except ImportError:
        raise RecipeError("privacy: needs the package dp-accounting: pip install 'comingle[privacy]'") from None
    return package


def check_delta(privacy: PrivacySection, name: str, examples: int) -> None:
    """Check that delta means something for so many examples of a user.

    Raises:
        RecipeError: It would allow one of them to be published.
    """
    if privacy.delta * examples >= 1:
        raise RecipeError(
            f"privacy.delta: got {privacy.delta:g} for {examples:,} examples of user {name!r}; allowed: below "
            f"1/{examples}, as with that chance an example may be revealed whole"
        )
