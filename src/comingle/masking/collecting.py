"""The server's side of one sum: it passes on what users send each other, adds what they mask, takes the masks off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from comingle.config.settings import Terms, no_sum
from comingle.masking import keys, shares
from comingle.masking.session import pair_mask
from comingle.privacy.secure.sizes import KEY, PUBLIC
from comingle.utils.errors import MessageError, NoSumError


@dataclass(kw_only=True)
class SumCollector:
    """What the server has of one sum.

    ``roster`` are the keys of who advertised, ``sealed[user][other]`` what a user sealed for another, ``masked`` the
    sum of what ``survivors`` have masked, and ``opened[user][other]`` a user's share of another's secret.
    """

    terms: Terms
    roster: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    masked: np.ndarray | None = None
    survivors: list[str] = field(default_factory=list)
    opened: dict[str, dict[str, bytes]] = field(default_factory=dict)

    # ---------------------------------------------------------------- what arrives

    def advertised(self, name: str, public: bytes) -> None:
        """A user's keys.

        Raises:
            MessageError: they are none.
        """
        if len(public) != PUBLIC or public in self.roster.values():
            raise MessageError("secure aggregation: keys of another length, or another user's")
        self.roster[name] = public

    def shared(self, name: str, sealed: Mapping[str, bytes]) -> None:
        """What a user has for every other."""
        assert set(sealed) == set(self.roster) - {name}
        self.sealed[name] = dict(sealed)

    def added(self, name: str, masked: np.ndarray) -> None:
        """A user's masked upload; only the sum of them is kept."""
        assert name in self.sealed
        assert name not in self.survivors
        self.masked = masked.copy() if self.masked is None else self.masked + masked
        self.survivors.append(name)

    def unmasked(self, name: str, opened: Mapping[str, bytes]) -> None:
        """A user's shares of everybody's secrets."""
        assert set(opened) == set(self.sharers)
        self.opened[name] = dict(opened)

    # ---------------------------------------------------------------- what is sent

    @property
    def sharers(self) -> list[str]:
        """Who has shared, in the roster's order."""
        return [name for name in self.roster if name in self.sealed]

    def sealed_for(self, name: str) -> dict[str, bytes]:
        """What the others have sealed for a user."""
        return {other: self.sealed[other][name] for other in self.sharers if other != name}

    def require(self, there: Sequence[str] | Mapping[str, object], what: str) -> None:
        """Whether enough users have come so far.

        Raises:
            NoSumError: they have not, so nothing is revealed of anybody.
        """
        if len(there) < self.terms.threshold:
            terms = self.terms
            raise NoSumError(no_sum(terms.round, len(there), terms.expected, what, terms.threshold))

    # ---------------------------------------------------------------- the sum

    def total(self, largest: int) -> np.ndarray:
        """The sum of the survivors' uploads, int64; no entry of any is above ``largest`` in magnitude.

        Raises:
            NoSumError: too few have opened their shares, or what comes out is no such sum.
        """
        self.require(self.opened, "have unmasked")
        assert self.masked is not None
        total = self.masked.copy()
        for name in self.survivors:
            total -= keys.mask(self._secret_of(name), self.terms.entries, self.terms.word)
        for name in (one for one in self.sharers if one not in self.survivors):
            self._take_off_pairs(total, name)
        signed = total.view(f"<i{total.itemsize}").astype(np.int64)
        if max(int(signed.max()), -int(signed.min())) > largest * len(self.survivors):
            raise NoSumError(f"round {self.terms.round}: what comes out is no sum; somebody sent something else")
        return signed

    def _take_off_pairs(self, total: np.ndarray, gone: str) -> None:
        """The masks that survivors have in common with who was lost after sharing."""
        private = self._secret_of(gone)
        if keys.public_of(private) != self.roster[gone][KEY:]:
            raise NoSumError(f"round {self.terms.round}: shares of {gone!r} give another key")
        for name in self.survivors:
            pair = pair_mask(private, self.roster[name][KEY:], (gone, name), self.terms)
            if name < gone:
                total -= pair
            else:
                total += pair

    def _secret_of(self, name: str) -> bytes:
        points = {user: at for at, user in enumerate(self.roster, start=1)}
        held = {points[user]: opened[name] for user, opened in self.opened.items()}
        try:
            return shares.join(held, self.terms.threshold)
        except MessageError as error:
            raise NoSumError(f"round {self.terms.round}: {error}") from None
