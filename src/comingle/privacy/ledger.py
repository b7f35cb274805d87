"""What steps on users' single examples have revealed, as the server counts it; noise and clipping are the users'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comingle.privacy.examples import Work, multiplier_of, spent_by
from comingle.privacy.guard import Guard


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
