"""The server's side: who is asked, what is made of uploads, and what it has cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from comingle.config.settings import Privacy
from comingle.privacy.accounting import Participation, Release, accountant_of, epsilon, expected, release_of
from comingle.privacy.accounting import sample_size as size_of
from comingle.privacy.clipping import clipped
from comingle.privacy.noise import add_noise, gaussian, uniform
from comingle.utils.errors import list_names
from comingle.utils.trees import Tree

logger = logging.getLogger(__name__)

_SPENT = "%s: one more round would exceed the privacy budget, so they train no more; others go on"

COUNTS, BOUND = "privacy/releases", "privacy/clip_norm"
"""By which names the server's state holds what has been revealed of each user, and the bound."""

_COUNT_NOISE = 20
"""The count of who was within the bound has noise of a twentieth of the users (Andrew et al. 2021)."""


@dataclass(kw_only=True)
class Guard:
    """``counts`` are the releases of which each of ``users`` has been part; ``bound`` is the clip norm now.

    ``told`` are those of whom the log has said that their budget is spent while others go on.
    """

    privacy: Privacy
    participation: Participation
    users: tuple[str, ...]
    key: str
    bound: float = 0.0
    counts: Int[Tensor, " users"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    told: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.bound = self.bound or self.privacy.first_bound
        self.counts = self.counts if len(self.counts) else torch.zeros(len(self.users), dtype=torch.int64)

    # ---------------------------------------------------------------- state

    @property
    def state(self) -> Tree:
        """What it goes on from."""
        return {COUNTS: self.counts.clone(), BOUND: torch.tensor(self.bound, dtype=torch.float64)}

    def restore(self, state: Tree) -> None:
        """Go on from there."""
        self.counts, self.bound = state[COUNTS].cpu().clone(), float(state[BOUND])

    # ---------------------------------------------------------------- who is asked

    @property
    def release(self) -> Release:
        """What a round reveals."""
        return release_of(self.privacy, self.participation, len(self.users))

    def draw(self, number: int) -> list[int]:
        """Who is drawn in round ``number`` (from 0); nobody who has not the key can know."""
        assert isinstance(self.participation, float | int)
        lots = [float(uniform(1, self.key, name, number, "participation")[0]) for name in self.users]
        everyone = range(len(lots))
        if self.privacy.sampling == "poisson":
            return [user for user in everyone if lots[user] < self.participation]
        return sorted(sorted(everyone, key=lots.__getitem__)[: size_of(self.participation, len(lots))])

    @property
    def draws(self) -> bool:
        """Whether it draws who takes part, in secret."""
        return self.release.sampled

    def affordable(self, members: Sequence[int]) -> list[int]:
        """Those of some users of whom one more release stays within the budget; others are told of once."""
        budget = math.inf if self.privacy.epsilon is None else self.privacy.epsilon
        counts = self.counts.tolist()
        found = [user for user in members if self._epsilon(user, counts[user] + 1) <= budget]
        if found and (spent := sorted(set(members) - set(found) - self.told)):
            self.told.update(spent)
            logger.warning(_SPENT, list_names(self.users[user] for user in spent))
        return found

    def admit(self, members: Sequence[int], *, releases: bool) -> list[int] | None:
        """Those of a round's users who may take part in it, if it ``releases`` anything; None where none may."""
        return (self.affordable(members) or None) if releases else list(members)

    # ---------------------------------------------------------------- what is made of uploads

    at_uploads: ClassVar[bool] = True
    """Whether it is uploads that reveal something; else the steps behind them do."""

    def charge(self, users: Sequence[int]) -> None:
        """Count a release; where users are drawn in secret it is one of all, whoever was."""
        self.counts[list(range(len(self.users)) if self.release.sampled else users)] += 1

    def mean(self, changes: Tree, like: Tree, number: int, within: Tensor | None) -> Tree:
        """The mean change with noise, float64: ``(sum_u clip(change_u) + noise) / expected``.

        ``changes`` are ``(users, *shape)``, empty where nobody was drawn; ``like`` is the model, for its shapes.
        """
        users = self.expected(number)
        sums = self.sums(changes, like)
        multiplier = self._multiplier(users) if self.privacy.adaptive else self.privacy.multiplier
        noised = add_noise(sums, multiplier * self.bound, self.key, number, "central noise")
        if self.privacy.adaptive:
            self._adapt(within, users, number)
        return {name: t / users for name, t in noised.items()}

    def sums(self, changes: Tree, like: Tree) -> Tree:
        """``sum_u clip(change_u)``: no user moves it by more than the bound, whatever it sends."""
        if not changes:
            return {name: torch.zeros_like(t, dtype=torch.float64) for name, t in like.items()}
        return {name: t.sum(0) for name, t in clipped(changes, self.bound).items()}

    def expected(self, number: int) -> float:
        """By what the sum of round ``number`` (from 0) is divided."""
        return expected(self.privacy, self.participation, len(self.users), number)

    def _count_noise(self, users: float) -> float:
        """Deviation of the noise on the count of those within the bound."""
        return max(users / _COUNT_NOISE, self.privacy.multiplier)

    def _multiplier(self, users: float) -> float:
        """The model's part of the noise, so that with the count's it is as much as it says (Andrew et al., Thm. 1)."""
        return (self.privacy.multiplier**-2 - (2 * self._count_noise(users)) ** -2) ** -0.5

    def _adapt(self, within: Tensor | None, users: float, number: int) -> None:
        """``bound *= exp(-rate (share - quantile))``; each user counts as +-1/2, which half a clip's noise hides.

        What noise has made of a share that none can be is cut off, so no step is longer than ``exp(rate)``.
        """
        centred = float((within.double() - 0.5).sum()) if within is not None else 0.0
        noise = self._count_noise(users) * float(gaussian((1,), self.key, number, "count noise", repr(centred))[0])
        share = min(1.0, max(0.0, (centred + noise) / users + 0.5))
        self.bound *= math.exp(-self.privacy.clip_rate * (share - self.privacy.clip_quantile))

    # ---------------------------------------------------------------- what it can be worth

    def noise_warning(self, numbers: int, rounds: int) -> str | None:
        """Return a warning where the noise drowns what users can change, else None.

        In a round the mean change is at most the clip norm C, and the noise on it has norm ``z C sqrt(d) / n``, or
        ``z C sqrt(d / n)`` with noise at each user. Over R rounds changes add up to ``R C``, noise to ``sqrt(R)`` times
        its norm.

        Args:
            numbers: d, how many numbers a user shares.
            rounds: R, of the whole run, each of which releases something.
        """
        users, z = self.expected(0), self.privacy.multiplier
        local = self.privacy.mechanism == "local"
        ratio = z * math.sqrt(numbers / users) / (1.0 if local else math.sqrt(users))
        whole = ratio / math.sqrt(max(1, rounds))
        if whole <= 1:
            return None
        needed = users * whole**2 if local else users * whole
        return (
            f"privacy: this plan cannot work: with noise_multiplier {z:.3g}, clip_norm {self.bound:g}, "
            f"{users:,.4g} users a round and {numbers:,} shared parameters the noise of a round is {ratio:,.3g} times, "
            f"and that of all {rounds} rounds {whole:,.3g} times as long as all that users can change. Allowed: about "
            f"{needed:,.0f} users or more, fewer shared parameters (adapters.rank), a larger epsilon; or mechanism: "
            "example, which protects each example of a user instead of the user"
        )

    # ---------------------------------------------------------------- what it has cost

    def _epsilon(self, user: int, count: int) -> float:
        return epsilon(self.release, count, self.privacy.delta, accountant_of(self.privacy, self.release))

    @property
    def spent(self) -> dict[str, Any]:
        """Epsilon so far, of the user of whom most was revealed; and everybody's, where they differ."""
        each = [self._epsilon(user, count) for user, count in enumerate(self.counts.tolist())]
        differ = {"users": dict(zip(self.users, each, strict=True))} if len(set(each)) > 1 else {}
        return {"epsilon": max(each, default=0.0), "delta": self.privacy.delta, **differ}

    @property
    def account(self) -> dict[str, Any]:
        """The same with its settings, for a run's metrics."""
        return {
            **self.spent,
            "mechanism": self.privacy.mechanism,
            "noise_multiplier": self.privacy.multiplier,
            "clip_norm": self.bound,
            "accountant": accountant_of(self.privacy, self.release),
            "releases": int(self.counts.max()) if len(self.counts) else 0,
        }
