"""Privacy accounting: epsilon at a delta, computed by Google's ``dp-accounting``.

Neighbouring populations differ in the presence of one user's data, an absent user having a change of zero (Kairouz et
al. 2021); the names and the number of the users are public. For sampling without replacement, and for "local", one
user's data is replaced by any other, which moves the sum by twice the clip norm.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from comingle.config.settings import ACCOUNT, PrivacySection
from comingle.utils.errors import RecipeError, RunError, list_names
from comingle.utils.records import JsonMapping, JsonObject, write_json

_log = logging.getLogger("comingle")

_BUDGET_SPENT = "%s: one more round would exceed the privacy budget, so they stop training; other users continue"

Participation = float | tuple[tuple[int, ...], ...]
"""A fraction of the users, or lists of users by round, as in ``Training``."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """Noise multiplier and sampling of one release: one noisy upload, or one noisy local step.

    Args:
        noise: Noise multiplier: standard deviation of the noise over the sensitivity.
        rate: Probability of each user to be drawn, for Poisson sampling.
        sample: Number of users drawn without replacement; 0 for other sampling.
        users: Number of users from which ``sample`` are drawn.
    """

    noise: float
    rate: float = 1.0
    sample: int = 0
    users: int = 0

    @property
    def sampled(self) -> bool:
        """True if participants are drawn in secret."""
        return self.rate < 1 or self.sample > 0


Releases = tuple[tuple[Release, int], ...]
"""Releases of a user in sequence, each with its number."""


def sample_size(participation: float, users: int) -> int:
    """Return the number of participants for a fraction of the users, rounded up, such as 3 for 0.25 of 10 users."""
    rounding_error = 1e-9  # more than that of a product such as 0.07 * 100 = 7.000000000000001
    return max(1, math.ceil(participation * users - rounding_error))


def expected_participants(privacy: PrivacySection, participation: Participation, users: int, round_index: int) -> float:
    """Return the expected number of participants in a round.

    Args:
        privacy: Section ``privacy`` of the recipe.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Number of users of the run.
        round_index: Number of the round, from 0.
    """
    if isinstance(participation, tuple):
        users_of_round = participation[round_index % len(participation)]  # the lists repeat in longer runs
        return float(len(set(users_of_round)))
    # Secure sums always have a fixed number of users.
    is_drawn_independently = privacy.sampling == "poisson" and privacy.secure_aggregation is None
    if is_drawn_independently:
        return participation * users
    return float(sample_size(participation, users))


_MAX_PLD_EPSILON = 200.0
"""Largest epsilon for which ``pld`` is used; for larger ones it would take minutes and gigabytes."""


def epsilon(release: Release, count: int, delta: float, accountant: str) -> float:
    """Return an upper bound of the epsilon of ``count`` equal releases (noisy uploads or steps) in sequence.

    Args:
        release: Noise multiplier and sampling of one release.
        count: Number of releases; 0 gives an epsilon of 0.
        delta: Probability that epsilon does not hold.
        accountant: "rdp" (Renyi differential privacy) or "pld" (privacy loss distributions), which is tighter. "rdp" is
            always used for sampling without replacement, and for an epsilon above 200, where "pld" would be too slow.

    Raises:
        RecipeError: The package dp-accounting is not installed.
    """
    return composed_epsilon(((release, count),), delta, accountant)


@lru_cache(maxsize=1 << 12)
def composed_epsilon(releases: Releases, delta: float, accountant: str) -> float:
    """Return an upper bound of the epsilon of different releases in sequence, such as those of several runs.

    Args:
        releases: Noise and sampling of releases, each with its number. All must be for the same neighbouring data sets.
        delta: Probability that epsilon does not hold.
        accountant: As in :func:`epsilon`; "rdp" is used for all releases if it must be used for one of them.

    Raises:
        RecipeError: The package dp-accounting is not installed.
    """
    if not any(count for _release, count in releases):
        return 0.0
    dp = _import_dp_accounting()
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if any(release.sample for release, _count in releases):
        relation = dp.NeighboringRelation.REPLACE_ONE
        accountant = "rdp"  # "pld" does not support sampling without replacement.

    def event_of(release: Release) -> Any:
        """Return a release as an event of dp-accounting."""
        gaussian = dp.GaussianDpEvent(release.noise)
        if release.sample:
            return dp.SampledWithoutReplacementDpEvent(release.users, release.sample, gaussian)
        return dp.PoissonSampledDpEvent(release.rate, gaussian) if release.rate < 1 else gaussian

    def epsilon_with(accountant_type: Callable[..., Any]) -> float:
        """Return the epsilon that one of dp-accounting's accountants computes."""
        with _without_order_warnings():
            composed = accountant_type(neighboring_relation=relation)
            for release, count in combine(releases):
                composed.compose(event_of(release), count)
            return float(composed.get_epsilon(delta))

    rdp_epsilon = epsilon_with(dp.rdp.RdpAccountant)
    if accountant == "rdp" or rdp_epsilon > _MAX_PLD_EPSILON:
        return rdp_epsilon
    return epsilon_with(dp.pld.PLDAccountant)


def combine(releases: Releases) -> Releases:
    """Return releases with the numbers of equal ones added up, without those whose number is 0."""
    counts: dict[Release, int] = {}
    for release, count in releases:
        if count:
            counts[release] = counts.get(release, 0) + count
    return tuple(counts.items())


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
    """Return the name of the accountant for a release: "rdp" for sampling without replacement, else the recipe's."""
    return "rdp" if release.sample else privacy.accountant


_BISECTION_STEPS = 14
"""Bisections of a factor of 2 between two noise multipliers, which leave a factor of 1.00004."""
_MAX_MULTIPLIER = 2.0**20
"""Largest noise multiplier that is tried."""


def least_noise(privacy: PrivacySection, count: int, release_with: Callable[[float], Release]) -> float:
    """Return the smallest noise multiplier with which a whole run stays within the recipe's epsilon.

    It is found by bisection on a logarithmic scale, with a relative error below 1/10,000, and never too small.

    Args:
        privacy: Section ``privacy`` of the recipe, with epsilon, delta and the accountant.
        count: Number of a user's releases (noisy uploads, or noisy local steps) in the run. For 0 return 1.
        release_with: Returns one release with a given noise multiplier.

    Raises:
        RecipeError: No amount of noise is enough, or the package dp-accounting is not installed.
    """
    target = privacy.epsilon
    assert target is not None
    if count == 0:
        return 1.0

    def is_enough(multiplier: float, accountant: str) -> bool:
        """Return whether the run stays within epsilon with this noise multiplier."""
        return epsilon(release_with(multiplier), count, privacy.delta, accountant) <= target

    # Find `high`, which is enough. RDP is fast, and its epsilon is an upper bound for the other accountant's.
    high = 1.0
    while not is_enough(high, "rdp"):
        high *= 2
        if high > _MAX_MULTIPLIER:
            raise RecipeError(
                f"privacy.epsilon: got {target:g}; no noise_multiplier up to {_MAX_MULTIPLIER:g} is enough; use more"
            )
    # Find `low`, which is not enough.
    low = high / 2
    while is_enough(low, privacy.accountant) and low > 1 / _MAX_MULTIPLIER:
        high, low = low, low / 2
    for _ in range(_BISECTION_STEPS):
        middle = math.sqrt(low * high)
        if is_enough(middle, privacy.accountant):
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
        """Expected number of examples in a batch. Sums are divided by it, as it is public, unlike the number drawn."""
        return max(1.0, self.rate * self.examples)

    @property
    def planned(self) -> int:
        """Noisy steps in the whole run."""
        return self.steps * self.rounds


@lru_cache(maxsize=1 << 12)
def multiplier_of(privacy: PrivacySection, work: Work) -> float:
    """Return the noise multiplier of a user's DP-SGD steps.

    It is ``privacy.noise_multiplier``; if that is None, the smallest with which the whole run stays within epsilon.

    Args:
        privacy: Section ``privacy`` of the recipe.
        work: The user's work: ``planned`` noisy steps in the run, and the probability ``rate`` that an example is in a
            batch.

    Raises:
        RecipeError: No amount of noise is enough, or the package dp-accounting is not installed.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier

    def release_with(multiplier: float) -> Release:
        return Release(noise=multiplier, rate=work.rate)

    return least_noise(privacy, work.planned, release_with)


def spent_by(privacy: PrivacySection, work: Work, steps: int) -> float:
    """Return the epsilon that ``steps`` steps of DP-SGD spend for each of a user's examples.

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
    """Number of releases (noisy uploads, or rounds of noisy steps) of each user, and the epsilon that they have spent.

    Args:
        privacy: Section ``privacy`` of the recipe; its ``epsilon`` is the budget of each user, or None.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Names of all users of a run; not used on a client.
        counts: Number of releases of each user.
        warned: Indices of the users whose spent budget the log has warned about.
        works: Returns the amount of work of each user by name, for DP-SGD.
        earlier: Releases of users by name in the runs that this one continues, also of users who are not in this run.
        recorded: Releases of users by name in this run, as a process before an interruption has recorded them.
    """

    privacy: PrivacySection
    participation: Participation = 1.0
    users: tuple[str, ...] = ()
    counts: Int[Tensor, " users"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    warned: set[int] = field(default_factory=set)
    works: Callable[[], Mapping[str, Work]] = dict
    earlier: Mapping[str, Releases] = field(default_factory=dict)
    recorded: Mapping[str, Releases] = field(default_factory=dict)

    replaces: ClassVar[bool] = False
    """Whether neighbouring data sets differ in a user's data being replaced, rather than added or removed."""

    def __post_init__(self) -> None:
        """Start with no upload of any user, unless counts are given."""
        self.counts = self.counts if len(self.counts) else torch.zeros(len(self.users), dtype=torch.int64)

    @classmethod
    @abstractmethod
    def release_of(cls, privacy: PrivacySection, participation: Participation, users: int) -> Release:
        """Return the noise multiplier and the sampling of one noisy upload, from which a user's epsilon is computed.

        Args:
            privacy: Section ``privacy`` of the recipe, with a known noise multiplier.
            participation: Fraction of the users drawn for each round, or lists of the users of each round.
            users: Number of users of the run.
        """

    @property
    def sampled(self) -> bool:
        """True if participants are drawn in secret, so that each round is charged to all users; False by default."""
        return False

    @property
    def neighbours(self) -> str:
        """Change of the data against which epsilon protects, such as "user absent" (all data of a user).

        Epsilons against different changes cannot be added up.
        """
        return f"{self.privacy.protects} {'replaced' if self.replaces else 'absent'}"

    @property
    def accountant(self) -> str:
        """Name of the accountant for the releases of all runs."""
        return self.privacy.accountant

    @abstractmethod
    def releases_of(self, user: int, count: int) -> Releases:
        """Return the releases of ``count`` noisy uploads, or of ``count`` rounds of noisy steps, of a user.

        Args:
            user: Index of the user.
            count: Number of uploads or rounds.
        """

    @abstractmethod
    def own_releases(self, count: int, work: Work | None = None) -> Releases:
        """Return the releases of a client's own user, from which the client computes epsilon.

        Unlike :meth:`releases_of`, they are not sampled, as clients need not trust the server to draw participants in
        secret.

        Args:
            count: Number of noisy uploads, or of rounds with noisy local steps.
            work: Amount of the user's work, for noisy local steps.
        """

    def epsilon_of(self, user: int, count: int) -> float:
        """Return the epsilon that a user has spent in this run, and in the runs that this one continues.

        Args:
            user: Index of the user.
            count: Number of noisy uploads, or of rounds of noisy steps, in this run.
        """
        releases = (*self._earlier_of(user), *self.releases_of(user, count))
        return composed_epsilon(releases, self.privacy.delta, self.accountant)

    def own_epsilon(self, count: int, work: Work | None = None, earlier: Releases = ()) -> float:
        """Return the epsilon that a client's own user has spent, as the client computes it without the server.

        Args:
            count: Number of uploads with noise in this run, or of rounds with noisy local steps.
            work: The user's numbers of examples and steps, for noisy local steps.
            earlier: Noise and number of the user's uploads or steps in earlier runs, whose epsilon adds up.
        """
        return composed_epsilon((*earlier, *self.own_releases(count, work)), self.privacy.delta, self.accountant)

    def _earlier_of(self, user: int) -> Releases:
        """Return the releases of a user in earlier runs."""
        return self.earlier.get(self.users[user], ()) if self.earlier else ()

    def charge(self, users: Sequence[int]) -> None:
        """Count one more release (a noisy upload, or a round of noisy steps) of each user in ``users``.

        Args:
            users: Indices of the users.
        """
        self.counts[list(users)] += 1

    def charge_uploads(self, users: Sequence[int]) -> None:
        """Count one more noisy upload of each user in ``users``, whose uploads have arrived.

        Args:
            users: Indices of the users.
        """
        self.charge(users)

    def affordable(self, users: Sequence[int]) -> list[int]:
        """Return the users whose budget of epsilon allows one more round.

        The log warns once about each user whose budget is spent. It does not if none of ``users`` is left, as the run
        then ends.

        Args:
            users: Indices of the users.
        """
        budget = math.inf if self.privacy.epsilon is None else self.privacy.epsilon
        counts = self.counts.tolist()
        within_budget = [user for user in users if self.epsilon_of(user, counts[user] + 1) <= budget]
        users_to_warn_about = sorted(set(users) - set(within_budget) - self.warned)
        if within_budget and users_to_warn_about:
            self.warned.update(users_to_warn_about)
            _log.warning(_BUDGET_SPENT, list_names(self.users[user] for user in users_to_warn_about))
        return within_budget

    @property
    def without_budget(self) -> list[str]:
        """Names of the users whose budget of epsilon does not allow one more round."""
        budget = self.privacy.epsilon
        if budget is None:
            return []
        counts = enumerate(self.counts.tolist())
        return [self.users[user] for user, count in counts if self.epsilon_of(user, count + 1) > budget]

    @property
    def spent(self) -> dict[str, object]:
        """Epsilon so far (the largest of all users) and delta; if epsilons differ, also each user's, as "users"."""
        epsilons = [self.epsilon_of(user, count) for user, count in enumerate(self.counts.tolist())]
        spent: dict[str, object] = {"epsilon": max(epsilons, default=0.0), "delta": self.privacy.delta}
        if len(set(epsilons)) > 1:
            spent["users"] = dict(zip(self.users, epsilons, strict=True))
        return spent

    @property
    def _spent_before(self) -> dict[str, object]:
        """The largest epsilon of a user of this run in earlier runs, as "earlier_epsilon"; empty without such runs."""
        if not self.earlier:
            return {}
        epsilons = [self.epsilon_of(user, 0) for user in range(len(self.users))]
        return {"earlier_epsilon": max(epsilons, default=0.0)}

    @abstractmethod
    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far, with the settings behind it and the clip norm of the next round."""

    @abstractmethod
    def forecast(self, planned: int) -> dict[str, object]:
        """Return the largest epsilon of a user after a whole run, with the settings behind it, to show before the run.

        Args:
            planned: Largest number of rounds in which one user takes part, if no budget stops it.

        Returns:
            ``mechanism``, ``epsilon``, ``delta``, ``noise_multiplier``, ``clip_norm``, ``accountant``, ``releases``
            (until the budget stops the user) and ``planned_releases`` (if no budget stopped it).
        """


@dataclass(kw_only=True)
class UploadAccount(Account):
    """Epsilon that users spend by uploads with Gaussian noise: one release for each round in which a user uploads.

    Args:
        drawable: Indices of the users who may be drawn in this round; None for all.
    """

    drawable: Sequence[int] | None = None

    @classmethod
    def release_of(cls, privacy: PrivacySection, participation: Participation, users: int) -> Release:
        """Return the noise multiplier and the sampling of one noisy upload, from which a user's epsilon is computed.

        Args:
            privacy: Section ``privacy`` of the recipe, with a known noise multiplier.
            participation: Fraction of the users drawn for each round, or lists of the users of each round.
            users: Number of users of the run.
        """
        multiplier = privacy.multiplier
        if isinstance(participation, tuple) or participation >= 1:  # participants are public, or all users take part
            return Release(noise=multiplier)
        if privacy.secure_aggregation is not None:
            # Sampling lowers epsilon only if it is secret, but server and users know who is in a secure sum.
            return Release(noise=multiplier)
        if privacy.sampling == "poisson":
            return Release(noise=multiplier, rate=participation)
        # With a fixed number of participants a user can only be replaced, which moves the sum by twice the clip norm.
        return Release(noise=multiplier / 2, sample=sample_size(participation, users), users=users)

    @property
    def release(self) -> Release:
        """Noise multiplier of an upload, and how participants of a round are drawn, from which epsilon is computed."""
        return self.release_of(self.privacy, self.participation, len(self.users))

    @property
    def sampled(self) -> bool:
        """True if participants are drawn in secret, so that each round is charged to all users."""
        return self.release.sampled

    @property
    def neighbours(self) -> str:
        """Change of the data against which epsilon protects, such as "user absent" (all data of a user).

        If each round draws a fixed number of users, a user can only be replaced by another one.
        """
        if self.sampled and self.release.sample:
            return f"{self.privacy.protects} replaced"
        return super().neighbours

    @property
    def accountant(self) -> str:
        """Name of the accountant for the releases of all runs."""
        return accountant_of(self.privacy, self.release)

    def releases_of(self, user: int, count: int) -> Releases:
        """Return the noise of a user's uploads, with their number, from which its epsilon is computed.

        The noise is the same for all users.

        Args:
            user: Index of the user; without effect.
            count: Number of uploads with noise.
        """
        return ((self.release, count),)

    def own_releases(self, count: int, work: Work | None = None) -> Releases:
        """Return the noise of the uploads of a client's own user, with their number, to compute epsilon on the client.

        Sampling of participants, which would lower epsilon, is not counted: only the server knows that it was random.

        Args:
            count: Number of uploads with noise.
            work: Not used; noisy local steps depend on it, uploads do not.
        """
        return ((self.release_of(self.privacy, participation=1.0, users=1), count),)

    def charge(self, users: Sequence[int]) -> None:
        """Count one more noisy upload of each user in ``users``.

        If participants are drawn in secret, count it for all users that may have been drawn: the epsilon then already
        considers that a user may not have been drawn, so it is the same whether or not it was.

        Args:
            users: Indices of the users.
        """
        if self.sampled:
            users = range(len(self.users)) if self.drawable is None else self.drawable
        super().charge(users)

    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far, with the settings behind it and the clip norm of the next round.

        ``releases`` is the number of noisy uploads that the account has counted for a user, the largest of all users.
        """
        return {
            **self.spent,
            **self._spent_before,
            "mechanism": self.privacy.mechanism,
            "noise_multiplier": self.privacy.multiplier,
            "clip_norm": clip_norm,
            "accountant": self.accountant,
            "releases": int(self.counts.max()) if len(self.counts) else 0,
        }

    def forecast(self, planned: int) -> dict[str, object]:
        """Return the epsilon after a whole run, with the settings behind it, to show before the run.

        Args:
            planned: Number of noisy uploads of a user if no budget of epsilon stops it.

        Returns:
            Keys as in :meth:`Account.forecast`; ``releases`` is the number of noisy uploads until the budget stops the
            user.
        """

        def epsilon_after(count: int) -> float:
            """Return the epsilon of ``count`` noisy uploads; user 0 stands for all, who have the same."""
            return self.epsilon_of(0, count)

        count = affordable_releases(self.privacy, planned, epsilon_after)
        return {
            "mechanism": self.privacy.mechanism,
            "epsilon": epsilon_after(count),
            "delta": self.privacy.delta,
            "noise_multiplier": self.privacy.multiplier,
            "clip_norm": self.privacy.clip_norm,
            "accountant": accountant_of(self.privacy, self.release),
            "releases": count,
            "planned_releases": planned,
        }


class ReplacingAccount(UploadAccount):
    """Epsilon that users spend by uploads with their own noise; neighbouring data sets differ in one user's data."""

    replaces = True

    @classmethod
    def release_of(cls, privacy: PrivacySection, participation: Participation, users: int) -> Release:
        """Return half of ``privacy.noise_multiplier`` as the noise of one upload, without sampling.

        If a user's data is replaced, its clipped change may move by twice the clip norm. Sampling does not count, as
        the server sees who uploads.

        Args:
            privacy: Section ``privacy`` of the recipe, with a known noise multiplier.
            participation: Not used.
            users: Not used.
        """
        return Release(noise=privacy.multiplier / 2)


class StepAccount(UploadAccount):
    """Epsilon that users spend by rounds of noisy local steps (DP-SGD).

    A round is counted when a user is asked to take its steps, even if it never sends their result.
    """

    @property
    def sampled(self) -> bool:
        """False: users are charged for their own rounds, as a secret choice of participants does not lower epsilon."""
        return False

    def charge_uploads(self, users: Sequence[int]) -> None:
        """Count nothing: steps are charged when they are requested."""

    @property
    def neighbours(self) -> str:
        """Change of the data against which epsilon protects: an example of a user is absent."""
        return f"{self.privacy.protects} absent"

    @property
    def accountant(self) -> str:
        """Name of the accountant for the releases of all runs."""
        return self.privacy.accountant

    def releases_of(self, user: int, count: int) -> Releases:
        """Return the noisy steps of ``count`` rounds of a user.

        Args:
            user: Index of the user.
            count: Number of rounds.

        Returns:
            The steps; those recorded before an interruption for a user without a known amount of work (examples and
            steps).
        """
        if count == 0:
            return ()
        name = self.users[user]
        work = self.works().get(name)
        return self.recorded.get(name, ()) if work is None else self.own_releases(count, work)

    def own_releases(self, count: int, work: Work | None = None) -> Releases:
        """Return the noise of a client's own user's local steps, with their number, from which epsilon is computed.

        Args:
            count: Number of rounds.
            work: The user's number of examples, batch size and steps in a round.
        """
        assert work is not None
        if count == 0:
            return ()
        return ((Release(noise=multiplier_of(self.privacy, work), rate=work.rate), count * work.steps),)

    def metrics(self, clip_norm: float) -> dict[str, object]:
        """Return the epsilon so far, with the settings behind it and the clip norm of the next round.

        ``noise_multiplier`` is the largest of all users; if they differ, ``noise_multipliers`` has each user's.
        ``releases`` is the largest number of noisy steps of a user.
        """
        works = self.works()  # number of examples, batch size and steps of each user, which determine its noise
        rounds_by_user = dict(zip(self.users, self.counts.tolist(), strict=True))
        multipliers = {name: multiplier_of(self.privacy, work) for name, work in works.items()}
        noise: dict[str, object] = {
            "noise_multiplier": max(multipliers.values(), default=self.privacy.noise_multiplier or 0.0)
        }
        if len(set(multipliers.values())) > 1:
            noise["noise_multipliers"] = multipliers
        noisy_steps = [work.steps * rounds_by_user[name] for name, work in works.items()]
        return {
            **self.spent,
            **self._spent_before,
            "mechanism": self.privacy.mechanism,
            **noise,
            "clip_norm": clip_norm,
            "accountant": self.privacy.accountant,
            "releases": max(noisy_steps, default=0),
        }

    def forecast(self, planned: int) -> dict[str, object]:
        """Return the largest epsilon of a user after a whole run, with the settings behind it, to show before the run.

        ``releases`` and ``planned_releases`` count noisy steps of the user with this epsilon: until its budget is
        spent, and if no budget stopped it.

        Args:
            planned: Not used; :meth:`works` has each user's number of rounds.
        """
        works = list(self.works().values())  # one of each user
        rounds_of_users: list[int] = []  # rounds until the user's budget is spent
        epsilons: list[float] = []  # of each user, after that many rounds
        for work in works:
            epsilon_after = partial(self.own_epsilon, work=work)  # takes a number of rounds
            affordable_rounds = affordable_releases(self.privacy, work.rounds, epsilon_after)
            rounds_of_users.append(affordable_rounds)
            epsilons.append(epsilon_after(affordable_rounds))
        user = epsilons.index(max(epsilons))  # the user with the largest epsilon
        work = works[user]
        return {
            "mechanism": self.privacy.mechanism,
            "epsilon": epsilons[user],
            "delta": self.privacy.delta,
            "noise_multiplier": multiplier_of(self.privacy, work),
            "clip_norm": self.privacy.clip_norm,
            "accountant": self.privacy.accountant,
            "releases": rounds_of_users[user] * work.steps,
            "planned_releases": work.planned,
        }


def record_account(folder: Path, account: Account, *, ended: bool = False) -> None:
    """Write the releases of each user, in this run and in those that it continues, to the run folder.

    Args:
        folder: The run folder.
        account: The account.
        ended: Whether the run has ended; then also write the users whose budget does not allow one more round.
    """
    names_by_releases: dict[tuple[Releases, Releases], list[str]] = {}  # most users have the same
    counts = dict(zip(account.users, account.counts.tolist(), strict=True))
    indices = {name: index for index, name in enumerate(account.users)}
    for name in [*account.users, *(name for name in account.earlier if name not in indices)]:
        now = account.releases_of(indices[name], counts[name]) if name in indices else ()
        names_by_releases.setdefault((combine(account.earlier.get(name, ())), combine(now)), []).append(name)
    groups = [
        {"users": names, "earlier": releases_as_json(earlier), "releases": releases_as_json(now)}
        for (earlier, now), names in names_by_releases.items()
    ]
    content: JsonObject = {"neighbours": account.neighbours, "delta": account.privacy.delta, "groups": groups}
    if ended:
        content["without_budget"] = account.without_budget
    write_json(folder / ACCOUNT, content)


@dataclass(frozen=True, kw_only=True)
class AccountRecord:
    """Recorded account of a run.

    Args:
        neighbours: Difference of neighbouring data sets.
        earlier: Releases of users by name in the runs that the run continues.
        now: Releases of users by name in the run.
        without_budget: Users whose budget allowed no further round when the run ended.
    """

    neighbours: str
    earlier: Mapping[str, Releases]
    now: Mapping[str, Releases]
    without_budget: frozenset[str] = frozenset()

    @property
    def composed(self) -> dict[str, Releases]:
        """Releases of users by name in all runs; without users who have none."""
        composed = {name: combine((*self.earlier[name], *self.now[name])) for name in self.now}
        return {name: releases for name, releases in composed.items() if releases}


def read_account(folder: Path) -> AccountRecord | None:
    """Return the account in a run folder; None if it has none.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / ACCOUNT
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        earlier: dict[str, Releases] = {}
        now: dict[str, Releases] = {}
        for group in content["groups"]:
            earlier.update(dict.fromkeys(group["users"], releases_from_json(group["earlier"])))
            now.update(dict.fromkeys(group["users"], releases_from_json(group["releases"])))
        return AccountRecord(
            neighbours=content["neighbours"],
            earlier=earlier,
            now=now,
            without_budget=frozenset(content.get("without_budget", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: damaged ({error}); without it no run can continue this one; restore it") from None


def releases_as_json(releases: Releases) -> list[JsonObject]:
    """Return a user's uploads or steps with noise (releases) for JSON: kinds of noise, each with its number.

    Args:
        releases: Pairs of noise and sampling, and the number of uploads or steps with them.
    """
    return [{**asdict(release), "count": count} for release, count in releases]


def releases_from_json(content: Sequence[JsonMapping]) -> Releases:
    """Return the releases of a list from :func:`releases_as_json`."""
    fields = [dict(entry) for entry in content]
    return tuple((Release(**{key: entry[key] for key in entry if key != "count"}), entry["count"]) for entry in fields)


def account_writer(folder: Path, account: Account | None) -> Callable[[JsonMapping], None]:
    """Return an observer of a run's events that records the account in the run folder when it may have changed.

    Args:
        folder: The run folder.
        account: The account; None without noise, for an observer that does nothing.
    """

    def write(event: JsonMapping) -> None:
        """Record the account at the start, after every round and at the end."""
        if account is not None and event["event"] in ("start", "round", "privacy", "end"):
            record_account(folder, account, ended=event["event"] == "end")

    return write


def affordable_releases(privacy: PrivacySection, planned: int, epsilon_after: Callable[[int], float]) -> int:
    """Return how many of the planned releases a user's budget of epsilon allows.

    A release is a noisy upload, or a round of noisy local steps; ``epsilon_after`` decides which.

    Args:
        privacy: Section ``privacy`` of the recipe; its ``epsilon`` is the budget, or None if there is no limit.
        planned: Number of planned releases.
        epsilon_after: Returns the epsilon of a number of releases. It never decreases with the number.
    """
    if privacy.epsilon is None:
        return planned
    return bisect_right(range(1, planned + 1), privacy.epsilon, key=epsilon_after)


def most_releases(schedule: Sequence[Sequence[int]]) -> int:
    """Return the number of rounds of the user that takes part most often.

    For example, in the schedule ``[[0, 1], [1, 2]]`` user 1 takes part in 2 rounds.
    """
    num_rounds = Counter(user for participants in schedule for user in participants)
    return max(num_rounds.values(), default=0)


def _import_dp_accounting() -> Any:
    """Return the optional package ``dp_accounting``, which has no types.

    Raises:
        RecipeError: The package is not installed.
    """
    try:
        package = importlib.import_module("dp_accounting")
        for name in ("rdp", "pld"):
            importlib.import_module(f"dp_accounting.{name}")
    except ImportError:
        raise RecipeError("privacy: needs the package dp-accounting: pip install 'comingle[privacy]'") from None
    return package


def check_delta(privacy: PrivacySection, name: str, examples: int) -> None:
    """Check that delta is below 1 / examples for a user.

    Args:
        privacy: Section ``privacy`` of the recipe.
        name: Name of the user, for the message.
        examples: Number of examples of the user.

    Raises:
        RecipeError: Delta is too large: publishing one of the examples at random would be allowed.
    """
    if privacy.delta * examples >= 1:
        raise RecipeError(
            f"privacy.delta: got {privacy.delta:g} for {examples:,} examples of user {name!r}; allowed: below "
            f"1/{examples}, because an example may be revealed entirely with probability delta"
        )
