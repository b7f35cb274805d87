"""Privacy on both sides: users' updates, and selection, noise and accounting on the server."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.settings import Privacy
from comingle.methods.base import Cohort
from comingle.privacy.accounting import Participation, Release, accountant_of, epsilon, expected, release_of
from comingle.privacy.accounting import sample_size as size_of
from comingle.privacy.noise import (
    Work,
    add_noise,
    clipped,
    gaussian,
    multiplier_of,
    norms,
    scaled,
    spent_by,
    uniform,
    without_padding,
)
from comingle.privacy.secure_sum import VECTOR, Sums
from comingle.utils.errors import list_names
from comingle.utils.trees import Tree

REFERENCE = "reference/"
"""Under which names a user keeps what it has downloaded, against which its change is measured."""
CLIP_NORM = "clip_norm"
"""What the server says of the bound, where it is adaptive; and under which name a user keeps it."""
WITHIN = "within"
"""What a user then reports: 1 where its change was no longer than the bound."""


@dataclass(kw_only=True)
class Shield:
    """What users do; ``key`` is theirs, and never the server's. ``sums`` is there where the server sees sums alone."""

    privacy: Privacy
    key: str
    sums: Sums | None = None

    def epsilon(self, count: int) -> float:
        """What so many uploads with local noise reveal."""
        return epsilon(release_of(self.privacy, 1.0, 1), count, self.privacy.delta, self.privacy.accountant)

    def start(self, shared: Tree) -> Tree:
        """What users keep for it between rounds: what they have in common with the server, and the bound."""
        first = next(iter(shared.values()))
        bounds = torch.full((len(first),), self.privacy.first_bound, dtype=torch.float64, device=first.device)
        return {REFERENCE + name: t.clone() for name, t in shared.items()} | {CLIP_NORM: bounds}

    def remember(self, kept: Tree, shared: Tree, bounds: Float[Tensor, " users"] | None) -> None:
        """Take note of what was downloaded."""
        for name, t in shared.items():
            kept[REFERENCE + name].copy_(t)
        if bounds is not None:
            kept[CLIP_NORM].copy_(bounds)

    def protect(self, tensors: Tree, cohort: Cohort, counts: Sequence[int], round_number: int) -> tuple[Tree, Tree]:
        """What was downloaded plus each user's clipped change, times its weight, with noise where that is local.

        With it come the reports that a server with an adaptive bound needs. ``counts`` are users' amounts of data. For
        a secure sum it is the change alone, in whole numbers, which are not to leave without masks.
        """
        references, bounds = {name: cohort.kept[REFERENCE + name] for name in tensors}, cohort.kept[CLIP_NORM]
        changes = {name: t.double() - references[name].double() for name, t in tensors.items()}
        if self.sums is not None:
            whole = self.sums.uploads(changes, self._weights(counts), cohort.names, self.key, round_number)
            return {VECTOR: whole}, {}
        leaving = scaled(clipped(changes, bounds), self._weights(counts))
        if self.privacy.mechanism == "local":
            leaving = without_padding(self._noised(leaving, cohort.names, bounds, round_number), cohort.ranks)
        sent = {name: (references[name].double() + t).to(tensors[name].dtype) for name, t in leaving.items()}
        within = (norms(changes) <= bounds).long().cpu()
        return sent, {WITHIN: within} if self.privacy.adaptive else {}

    def _weights(self, counts: Sequence[int]) -> Float[Tensor, " users"]:
        cap = self.privacy.weight_cap
        return torch.tensor([1.0 if cap is None else min(1.0, count / cap) for count in counts], dtype=torch.float64)

    def _noised(self, changes: Tree, names: Sequence[str], bounds: Float[Tensor, " users"], round_number: int) -> Tree:
        """Streams are each user's own."""
        rows = [
            add_noise(
                {key: t[i] for key, t in changes.items()},
                self.privacy.multiplier * float(bounds[i]),
                self.key, name, round_number, "local noise",
            )
            for i, name in enumerate(names)
        ]  # fmt: skip
        return {key: torch.stack([row[key] for row in rows]) for key in changes}


def without_bound(tensors: Tree) -> tuple[Tensor | None, Tree]:
    """What a download says of the bound ``(users,)``, and the rest of it."""
    if CLIP_NORM not in tensors:
        return None, tensors
    return tensors[CLIP_NORM][:, 0], {name: t for name, t in tensors.items() if name != CLIP_NORM}


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


@dataclass(kw_only=True)
class Ledger(Guard):
    """``counts`` are the rounds in which each of ``users`` was asked to take steps; ``works`` says who does what.

    All steps count that a user was asked to take, whether or not their outcome was sent.
    """

    works: Callable[[], Mapping[str, Work]]

    at_uploads = False

    @property
    def draws(self) -> bool:
        """Who takes part is no secret here."""
        return False

    def admit(self, members: Sequence[int], *, releases: bool) -> list[int] | None:
        """Those whose budget allows a round's steps, which are counted."""
        found = self.affordable(members)
        self.charge(found)
        return found or None

    def charge(self, users: Sequence[int]) -> None:
        """Count a round of these."""
        self.counts[list(users)] += 1

    def noise_warning(self, numbers: int, rounds: int) -> str | None:
        """Return None: the noise is that of users' steps, not of uploads."""
        return None

    def _epsilon(self, user: int, count: int) -> float:
        work = self.works().get(self.users[user])
        return 0.0 if work is None else spent_by(self.privacy, work, count * work.steps)

    @property
    def account(self) -> dict[str, Any]:
        """For a run's metrics; noise multipliers of each user where they differ."""
        works, counts = self.works(), dict(zip(self.users, self.counts.tolist(), strict=True))
        multipliers = {name: multiplier_of(self.privacy, work) for name, work in works.items()}
        differ = {"noise_multipliers": multipliers} if len(set(multipliers.values())) > 1 else {}
        return {
            **self.spent,
            "mechanism": self.privacy.mechanism,
            "noise_multiplier": max(multipliers.values(), default=self.privacy.noise_multiplier or 0.0),
            **differ,
            "clip_norm": self.bound,
            "accountant": self.privacy.accountant,
            "releases": max((work.steps * counts[name] for name, work in works.items()), default=0),
        }
