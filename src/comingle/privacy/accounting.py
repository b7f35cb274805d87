"""Privacy accounting: epsilon at a delta, computed by Google's ``dp-accounting``.

Neighbouring populations differ in the presence of one user's data, an absent user having a change of zero (Kairouz et
al. 2021); the names and the number of the users are public. For sampling without replacement, and for "local", one
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

_SPENT = "%s: one more round would exceed the privacy budget, so they stop training; other users continue"

Participation = float | tuple[tuple[int, ...], ...]
"""A fraction of the users, or lists of users by round, as in ``Training``."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """Gaussian mechanism of a round, for one user; its standard deviation is ``noise`` times the sensitivity.

    Args:
        noise: Noise multiplier.
        rate: Probability of each user to be drawn, for Poisson sampling.
        sample: Number of users drawn without replacement; 0 for other sampling.
        users: Number of users that they are drawn from.
    """

    noise: float
    rate: float = 1.0
    sample: int = 0
    users: int = 0

    @property
    def sampled(self) -> bool:
        """Whether participants are drawn in secret."""
        return self.rate < 1 or self.sample > 0


def sample_size(participation: float, users: int) -> int:
    """Return the number of users that a fraction stands for."""
    return max(1, math.ceil(participation * users - 1e-9))


def expected_participants(privacy: PrivacySection, participation: Participation, users: int, round_index: int) -> float:
    """Return the expected number of participants in a round, the divisor of the sum of their changes.

    Unlike the actual number it is public, so it reveals nothing about who takes part.

    Args:
        privacy: Section ``privacy`` of the recipe.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Number of users of the run.
        round_index: Number of the round, from 0.
    """
    if isinstance(participation, tuple):  # the lists repeat if there are more rounds
        return float(len(set(participation[round_index % len(participation)])))
    if privacy.sampling == "poisson" and privacy.secure_aggregation is None:  # each user is drawn independently
        return participation * users
    return float(sample_size(participation, users))


_MAX_PLD_EPSILON = 200.0
"""An epsilon without practical protection. Above it the bound of ``rdp`` is used.

That bound is a few per cent above that of ``pld``, whose grid of privacy losses would take minutes and gigabytes.
"""


@lru_cache(maxsize=1 << 12)
def epsilon(release: Release, count: int, delta: float, accountant: str) -> float:
    """Return an upper bound of the epsilon of ``count`` equal Gaussian mechanisms ("releases") in sequence.

    Args:
        release: Noise multiplier and sampling of one release.
        count: Number of releases; 0 gives an epsilon of 0.
        delta: Probability that epsilon does not hold.
        accountant: "rdp" (Renyi differential privacy) or "pld" (privacy loss distributions), which is tighter. "rdp" is
            always used for sampling without replacement, and for a very large epsilon.

    Raises:
        RecipeError: The package dp-accounting is not installed.
    """
    if count == 0:
        return 0.0
    dp = _import_dp_accounting()
    event, relation = dp.GaussianDpEvent(release.noise), dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if release.sample:  # its privacy loss distribution is not known
        relation, accountant = dp.NeighboringRelation.REPLACE_ONE, "rdp"
        event = dp.SampledWithoutReplacementDpEvent(release.users, release.sample, event)
    elif release.rate < 1:
        event = dp.PoissonSampledDpEvent(release.rate, event)
    accountants = {"rdp": dp.rdp.RdpAccountant, "pld": dp.pld.PLDAccountant}

    def epsilon_by(name: str) -> float:
        with _without_order_warnings():  # The package warns of Renyi orders that it skips, which is harmless.
            return float(accountants[name](neighboring_relation=relation).compose(event, count).get_epsilon(delta))

    rdp_epsilon = epsilon_by("rdp")
    # "pld" would take minutes and gigabytes for an epsilon so large that it means no practical protection.
    return rdp_epsilon if accountant == "rdp" or rdp_epsilon > _MAX_PLD_EPSILON else epsilon_by("pld")


@contextmanager
def _without_order_warnings() -> Iterator[None]:
    """Suppress warnings of dp-accounting about Renyi orders that it skips; the bound holds without them."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def accountant_of(privacy: PrivacySection, release: Release) -> str:
    """Return the name of the accountant for a release."""
    return "rdp" if release.sample else privacy.accountant


_BISECTION_STEPS = 14
_MAX_MULTIPLIER = 2.0**20
"""Largest noise multiplier that is tried."""


def least_noise(privacy: PrivacySection, count: int, release_with: Callable[[float], Release]) -> float:
    """Return the smallest noise multiplier with which a whole run stays within the settings' epsilon.

    The multiplier is found by bisection on a logarithmic scale, to a few parts in ten thousand, and rounded up.

    Args:
        privacy: Section ``privacy`` of the recipe, with epsilon, delta and the accountant.
        count: How often a user reveals something with noise in the run (releases): its uploads, or its noisy local
            steps. If it never does, the multiplier is 1.
        release_with: Returns one release with a given noise multiplier.

    Raises:
        RecipeError: No amount of noise is enough, or the package dp-accounting is not installed.
    """
    target = privacy.epsilon
    assert target is not None
    if count == 0:
        return 1.0

    def epsilon_with(multiplier: float, accountant: str) -> float:
        return epsilon(release_with(multiplier), count, privacy.delta, accountant)

    high = 1.0
    # RDP is the faster accountant, and its epsilon is never below that of the others: noise that is enough for it is
    # enough for all.
    while epsilon_with(high, "rdp") > target:
        high *= 2
        if high > _MAX_MULTIPLIER:
            raise RecipeError(
                f"privacy.epsilon: got {target:g}; no noise_multiplier up to {_MAX_MULTIPLIER:g} is enough; use more"
            )
    low = high / 2
    while epsilon_with(low, privacy.accountant) <= target and low > 1 / _MAX_MULTIPLIER:
        high, low = low, low / 2
    for _ in range(_BISECTION_STEPS):
        middle = math.sqrt(low * high)
        if epsilon_with(middle, privacy.accountant) <= target:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, kw_only=True)
class Work:
    """Amount of a user's work in a run of DP-SGD, from which its noise and epsilon follow.

    Args:
        examples: Examples of the user.
        batch: Expected number of examples in a step.
        steps: Noisy steps in a round.
        rounds: Rounds of the run.
    """

    examples: int
    batch: int
    steps: int
    rounds: int

    @property
    def rate(self) -> float:
        """Probability of an example to be in a batch."""
        return min(1.0, self.batch / max(1, self.examples))

    @property
    def expected(self) -> float:
        """Expected number of examples in a batch: the divisor of sums, public whatever is drawn."""
        return max(1.0, self.rate * self.examples)

    @property
    def planned(self) -> int:
        """Noisy steps in the whole run."""
        return self.steps * self.rounds


@lru_cache(maxsize=1 << 12)
def multiplier_of(privacy: PrivacySection, work: Work) -> float:
    """Return the noise multiplier of a user's DP-SGD steps.

    This is the setting ``noise_multiplier``. If the settings only give epsilon, it is the smallest multiplier with
    which all noisy steps of the run together stay within that epsilon.

    Args:
        privacy: Section ``privacy`` of the recipe.
        work: Work of the user: ``planned`` is the number of noisy steps in the whole run, ``rate`` the probability of
            an example to be in a batch.

    Raises:
        RecipeError: No amount of noise is enough, or the package that computes it is not installed.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    return least_noise(privacy, work.planned, lambda z: Release(noise=z, rate=work.rate))


def spent_by(privacy: PrivacySection, work: Work, steps: int) -> float:
    """Return the epsilon of each of a user's examples after some steps of DP-SGD.

    Args:
        privacy: Section ``privacy`` of the recipe.
        work: Amount of the user's work: examples, batch size, noisy steps of a round, and rounds.
        steps: Noisy steps so far.
    """
    if steps == 0:
        return 0.0
    release = Release(noise=multiplier_of(privacy, work), rate=work.rate)
    return epsilon(release, steps, privacy.delta, privacy.accountant)


@dataclass(kw_only=True)
class Account(ABC):
    """Account of what users reveal with noise ("releases", such as uploads), and of the epsilon that they have spent.

    Args:
        privacy: Settings with the budget.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: All users of a run; not used on a client.
        counts: Releases of each user.
        warned: Users whose spent budget the log has warned about.
        works: Returns the work of each user by name, for accounts of single examples.
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
        """Return the noise multiplier and sampling of a round, from which the epsilon of a user follows.

        Args:
            privacy: Settings, with a known noise multiplier.
            participation: Fraction of the users drawn for each round, or lists of the users of each round.
            users: Number of users of the run.
        """

    @property
    def sampled(self) -> bool:
        """Whether participants are drawn in secret, so that a round is a release of all users."""
        return False

    @abstractmethod
    def epsilon_of(self, user: int, count: int) -> float:
        """Return the epsilon of ``count`` releases of a user, given by index."""

    @abstractmethod
    def own_epsilon(self, count: int, work: Work | None = None) -> float:
        """Return the epsilon that a client computes for its own user, from the noise that the user itself added.

        The client does not trust the server to draw participants in secret. So, unlike :meth:`epsilon_of`, this epsilon
        is not lowered by sampling.

        Args:
            count: Number of noisy uploads; or number of rounds, if each local step adds noise.
            work: Number of examples and steps of the user in a round, if each local step adds noise.
        """

    def charge(self, users: Sequence[int]) -> None:
        """Count one release of each of these users."""
        self.counts[list(users)] += 1

    def charge_uploads(self, users: Sequence[int]) -> None:
        """Count uploads of these users when they arrive."""
        self.charge(users)

    def affordable(self, users: Sequence[int]) -> list[int]:
        """Return those of the users whose budget of epsilon allows one more round with noisy uploads or steps.

        The log warns once about each user whose budget is spent, unless all budgets are spent and the run ends.
        """
        budget = math.inf if self.privacy.epsilon is None else self.privacy.epsilon
        counts = self.counts.tolist()
        within_budget = [user for user in users if self.epsilon_of(user, counts[user] + 1) <= budget]
        newly_spent = sorted(set(users) - set(within_budget) - self.warned)
        if within_budget and newly_spent:
            self.warned.update(newly_spent)
            _log.warning(_SPENT, list_names(self.users[user] for user in newly_spent))
        return within_budget

    @property
    def spent(self) -> dict[str, object]:
        """Largest epsilon of a user so far, delta, and the epsilon of each user if they differ."""
        epsilons = [self.epsilon_of(user, count) for user, count in enumerate(self.counts.tolist())]
        of_users = {"users": dict(zip(self.users, epsilons, strict=True))} if len(set(epsilons)) > 1 else {}
        return {"epsilon": max(epsilons, default=0.0), "delta": self.privacy.delta, **of_users}

    @abstractmethod
    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far, with the settings behind it and the clip norm of the next round."""

    @abstractmethod
    def forecast(self, planned: int) -> dict[str, object]:
        """Return the largest epsilon of a user after a whole run, with the settings behind it, to show before the run.

        A release is something that a user reveals with noise: an upload, or a noisy local step. If the settings give
        both noise and a budget (an epsilon), a user stops before the release that would exceed the budget. Only the
        releases before it then count for the epsilon.

        Args:
            planned: Largest number of rounds of one user with a release, without regard to the budget.

        Returns:
            ``mechanism``, ``epsilon``, ``delta``, ``noise_multiplier``, ``clip_norm``, ``accountant``, ``releases``
            (number within the budget) and ``planned_releases`` (number without regard to the budget).
        """


class UploadAccount(Account):
    """Epsilon that users spend by uploads with Gaussian noise: one release for each round in which a user uploads."""

    @classmethod
    def release_of(cls, privacy: PrivacySection, participation: Participation, users: int) -> Release:
        """Return the noise multiplier and sampling of a round, from which the epsilon of a user follows.

        If participants are drawn in secret, the release has the sampling rate, which lowers epsilon.

        Args:
            privacy: Section ``privacy`` of the recipe.
            participation: Fraction of the users drawn for each round, or lists of the users of each round.
            users: Number of users of the run.
        """
        multiplier = privacy.multiplier
        # The server and the users of a secure sum know who is in it, so sampling hides no user.
        if isinstance(participation, tuple) or participation >= 1 or privacy.secure_aggregation is not None:
            return Release(noise=multiplier)
        if privacy.sampling == "poisson":
            return Release(noise=multiplier, rate=participation)
        # Without replacement a neighbour replaces a user, which moves the sum by twice the clip norm.
        return Release(noise=multiplier / 2, sample=sample_size(participation, users), users=users)

    @property
    def release(self) -> Release:
        """Release of a round of this run."""
        return self.release_of(self.privacy, self.participation, len(self.users))

    @property
    def sampled(self) -> bool:
        """Whether participants are drawn in secret, so that a round is a release of all users."""
        return self.release.sampled

    def epsilon_of(self, user: int, count: int) -> float:
        """Return the epsilon of ``count`` releases, the same for all users."""
        release = self.release
        return epsilon(release, count, self.privacy.delta, accountant_of(self.privacy, release))

    def own_epsilon(self, count: int, work: Work | None = None) -> float:
        """Return the epsilon of ``count`` uploads of a client's user with its own noise."""
        release = self.release_of(self.privacy, 1.0, 1)
        return epsilon(release, count, self.privacy.delta, self.privacy.accountant)

    def charge(self, users: Sequence[int]) -> None:
        """Count one release of each of these users, or of all users if participants are drawn in secret."""
        super().charge(range(len(self.users)) if self.sampled else users)

    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far, with the settings behind it and the clip norm of the next round.

        ``spent`` has the keys ``epsilon`` (the largest of all users), ``delta``, and ``users`` if epsilons differ.
        ``releases`` is the number of rounds that were charged to a user, the largest of all users.
        """
        return {
            **self.spent,
            "mechanism": self.privacy.mechanism,
            "noise_multiplier": self.privacy.multiplier,
            "clip_norm": clip_norm,
            "accountant": accountant_of(self.privacy, self.release),
            "releases": int(self.counts.max()) if len(self.counts) else 0,
        }

    def forecast(self, planned: int) -> dict[str, object]:
        """Return the epsilon after a whole run, equal for all users, with the settings behind it.

        If ``planned`` releases would exceed the budget, the run ends before the first release beyond the budget. Only
        the releases before it count for the epsilon.

        Args:
            planned: Number of releases of a run without a budget.

        Returns:
            Keys as in :meth:`Account.forecast`; ``releases`` is the number of releases within the budget.
        """
        # The epsilon of user 0 stands for that of all users.
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
    """Epsilon that users spend by uploads with their own noise, if neighbouring data sets replace a user's data."""

    replaces = True

    @classmethod
    def release_of(cls, privacy: PrivacySection, participation: Participation, users: int) -> Release:
        """Return the noise multiplier of one upload, as a :class:`Release` without sampling.

        It is half the multiplier of the settings: if a user's data is replaced, its clipped change may move by twice
        the clip norm.

        Args:
            privacy: Section ``privacy`` of the recipe.
            participation: Not used.
            users: Not used.
        """
        return Release(noise=privacy.multiplier / 2)


class StepAccount(UploadAccount):
    """Epsilon that users spend by rounds of noisy local steps (DP-SGD), with different numbers of examples.

    A round counts once a user is asked to take its steps, even if their result is never sent.
    """

    @property
    def sampled(self) -> bool:
        """False: participants are not secret here."""
        return False

    def charge_uploads(self, users: Sequence[int]) -> None:
        """Count nothing: steps are charged when they are requested."""

    def epsilon_of(self, user: int, count: int) -> float:
        """Return the epsilon of ``count`` rounds for an example of a user (by index); 0 for a user without work."""
        work = self.works().get(self.users[user])
        return 0.0 if work is None else spent_by(self.privacy, work, count * work.steps)

    def own_epsilon(self, count: int, work: Work | None = None) -> float:
        """Return the epsilon of ``count`` rounds for an example of a client's user."""
        assert work is not None
        return spent_by(self.privacy, work, count * work.steps)

    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far and the noise behind it, by key.

        ``spent`` has the keys ``epsilon`` (the largest of all users), ``delta``, and ``users`` if epsilons differ.
        ``noise_multiplier`` is the largest of all users; ``noise_multipliers`` has each user's, if they differ.
        ``releases`` is the largest number of noisy steps of a user.
        """
        # counts: rounds that each user was charged for, by name.
        works, counts = self.works(), dict(zip(self.users, self.counts.tolist(), strict=True))
        multipliers = {name: multiplier_of(self.privacy, work) for name, work in works.items()}
        differing_multipliers = {"noise_multipliers": multipliers} if len(set(multipliers.values())) > 1 else {}
        return {
            **self.spent,
            "mechanism": self.privacy.mechanism,
            "noise_multiplier": max(multipliers.values(), default=self.privacy.noise_multiplier or 0.0),
            **differing_multipliers,
            "clip_norm": clip_norm,
            "accountant": self.privacy.accountant,
            "releases": max((work.steps * counts[name] for name, work in works.items()), default=0),
        }

    def forecast(self, planned: int) -> dict[str, object]:
        """Return the largest epsilon of a user after a whole run, with the settings behind it.

        Args:
            planned: Not used; each user's number of rounds is in :attr:`works`.
        """

        def at_end(work: Work) -> tuple[float, Work, int]:
            """Return a user's epsilon after its last round within the budget, its work, and its steps until then."""
            rounds = affordable_releases(self.privacy, work.rounds, lambda rounds: self.own_epsilon(rounds, work))
            return self.own_epsilon(rounds, work), work, rounds * work.steps

        ends_of_users = [at_end(work) for work in self.works().values()]
        largest_epsilon, work, steps = max(ends_of_users, key=lambda end: end[0])
        # Each noisy local step is a release, so "releases" are steps within the budget.
        return {
            "mechanism": self.privacy.mechanism,
            "epsilon": largest_epsilon,
            "delta": self.privacy.delta,
            "noise_multiplier": multiplier_of(self.privacy, work),
            "clip_norm": self.privacy.clip_norm,
            "accountant": self.privacy.accountant,
            "releases": steps,
            "planned_releases": work.planned,
        }


def affordable_releases(privacy: PrivacySection, planned: int, epsilon_after: Callable[[int], float]) -> int:
    """Return how many of a user's planned releases stay within its budget; all of them without a budget.

    A release is something that a user reveals with noise in a round, such as an upload.

    Args:
        privacy: Settings with the budget, an epsilon or None.
        planned: Number of planned releases.
        epsilon_after: Returns the epsilon that a number of releases spends. More releases never have a smaller epsilon.
    """
    budget = math.inf if privacy.epsilon is None else privacy.epsilon
    # Bisection for the largest number of releases whose epsilon is within the budget.
    return bisect_right(range(1, planned + 1), budget, key=epsilon_after)


def most_releases(schedule: Sequence[Sequence[int]]) -> int:
    """Return the number of rounds of the user that takes part most often, from the participants of each round."""
    num_rounds = Counter(user for participants in schedule for user in participants)
    return max(num_rounds.values(), default=0)


def _import_dp_accounting() -> Any:
    """Return the optional package ``dp_accounting``, which has no types.

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
    """Check that delta is small enough for a user's number of examples.

    Args:
        privacy: Settings with delta.
        name: Name of the user, for the message.
        examples: Examples of the user.

    Raises:
        RecipeError: Delta would allow one of the examples to be published.
    """
    if privacy.delta * examples >= 1:
        raise RecipeError(
            f"privacy.delta: got {privacy.delta:g} for {examples:,} examples of user {name!r}; allowed: below "
            f"1/{examples}, because an example may be revealed entirely with probability delta"
        )
