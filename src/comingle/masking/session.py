"""A user's side of one sum: what it may be asked, in which order, and each once.

A session goes forward only. Whatever it has been asked it answers again with the same bytes and never for others: two
answers under the same masks would let the server take the masks off. So what it has been asked is written down, by
``save``, before the answer leaves, and stays written when everything else of a user is undone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from comingle.config.settings import Terms
from comingle.masking import keys, shares
from comingle.privacy.secure.sizes import KEY
from comingle.utils.errors import MessageError

Record = dict[str, Any]
"""What is written down of a session, as JSON has it."""


@dataclass(kw_only=True)
class Session:
    """One user in one sum. ``seed`` is 32 random bytes, of which all its secrets are made; ``done`` is what it did.

    ``roster`` are all who advertised, with their keys, in the server's order; ``sealed`` what those sent who shared.
    """

    terms: Terms
    name: str
    seed: bytes
    save: Callable[[Record], None]
    roster: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, bytes] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)

    # ---------------------------------------------------------------- what is written down

    @property
    def record(self) -> Record:
        """All of it."""
        return {
            "terms": asdict(self.terms),
            "name": self.name,
            "seed": self.seed.hex(),
            "roster": {name: key.hex() for name, key in self.roster.items()},
            "sealed": {name: one.hex() for name, one in self.sealed.items()},
            "done": dict(self.done),
        }

    @classmethod
    def of(cls, record: Record, save: Callable[[Record], None]) -> Session:
        """The session of which this was written down."""
        terms = Terms(**{**record["terms"], "users": tuple(record["terms"]["users"])})
        return cls(
            terms=terms,
            name=record["name"],
            seed=bytes.fromhex(record["seed"]),
            save=save,
            roster={name: bytes.fromhex(key) for name, key in record["roster"].items()},
            sealed={name: bytes.fromhex(one) for name, one in record["sealed"].items()},
            done=dict(record["done"]),
        )

    # ---------------------------------------------------------------- what it is asked

    def advertise(self) -> bytes:
        """The public keys."""
        self._once("advertise", "")
        return keys.public_of(self._secret("sealing")) + keys.public_of(self._secret("masking"))

    def share(self, roster: Mapping[str, bytes]) -> dict[str, bytes]:
        """For each other user its shares of this one's secrets, sealed.

        Raises:
            MessageError: these are not the round's users, are too few, or another roster was answered.
        """
        self._check_roster(roster)
        asked = {name: key.hex() for name, key in roster.items()}
        self._once("share", asked, after="advertise", roster=dict(roster))
        return {
            name: keys.seal(self._sealing(name, sends=True), text, self.terms.digest)
            for name, text in self._shares().items()
            if name != self.name
        }

    def mask(self, sealed: Mapping[str, bytes], upload: np.ndarray) -> np.ndarray:
        """The upload, whole numbers modulo ``2^word``, under this user's masks with all who have shared.

        Raises:
            MessageError: they are too few, or something else was masked already.
        """
        if not set(sealed) <= set(self.roster) - {self.name}:
            raise MessageError("secure aggregation: shares of somebody who has not advertised")
        self._require(len(sealed) + 1, "have shared")
        for name, one in sealed.items():
            self._opened(name, one)  # before anything leaves
        asked = {name: one.hex() for name, one in sealed.items()}
        self._once("mask", asked, after="share", sealed=dict(sealed))
        masked = upload + keys.mask(self._secret("own mask"), self.terms.entries, self.terms.word)
        for name in sealed:
            pair = pair_mask(self._secret("masking"), self.roster[name][KEY:], (self.name, name), self.terms)
            masked = masked + pair if self.name < name else masked - pair
        self._once("masked", hashlib.sha256(masked.tobytes()).hexdigest(), after="mask")
        return masked

    def unmask(self, survivors: Sequence[str]) -> dict[str, bytes]:
        """For each who has shared: its own mask's share if it is in the sum, its masking key's if it is not.

        Raises:
            MessageError: they are too few, this user is not among them, or other survivors were answered.
        """
        everyone = self.sharers
        if len(set(survivors)) != len(survivors) or not {self.name} <= set(survivors) <= set(everyone):
            raise MessageError("secure aggregation: a sum of somebody who has not shared, or without this user")
        self._require(len(survivors), "are in the sum")
        self._once("unmask", sorted(survivors), after="masked")
        return {name: self._share_of(name, 0 if name in survivors else 1) for name in everyone}

    @property
    def sharers(self) -> list[str]:
        """Who has shared, in the roster's order."""
        return [name for name in self.roster if name == self.name or name in self.sealed]

    # ---------------------------------------------------------------- secrets

    def _secret(self, purpose: str, *about: str) -> bytes:
        return keys.derive(self.seed, "secret", purpose, self.terms.digest, self.name, *about)

    def _shares(self) -> dict[str, bytes]:
        """Everybody's: of the own mask's seed, and of the masking key."""
        points = {name: at for at, name in enumerate(self.roster, start=1)}
        every = json.dumps({name: key.hex() for name, key in self.roster.items()})
        parts = [
            shares.split(
                self._secret(what), list(points.values()), self.terms.threshold, self._secret("shares of", what, every)
            )
            for what in ("own mask", "masking")
        ]
        return {name: parts[0][at] + parts[1][at] for name, at in points.items()}

    def _share_of(self, name: str, which: int) -> bytes:
        both = self._shares()[name] if name == self.name else self._opened(name, self.sealed[name])
        return both[which * shares.SHARE :][: shares.SHARE]

    def _opened(self, name: str, sealed: bytes) -> bytes:
        text = keys.unseal(self._sealing(name, sends=False), sealed, self.terms.digest)
        if len(text) != 2 * shares.SHARE:
            raise MessageError("secure aggregation: shares of another length")
        return text

    def _sealing(self, name: str, *, sends: bool) -> bytes:
        """The key of what is sent to somebody, or by it."""
        common = keys.agree(self._secret("sealing"), self.roster[name][:KEY])
        sender, receiver = (self.name, name) if sends else (name, self.name)
        return keys.derive(common, "seal", self.terms.digest, sender, receiver)

    # ---------------------------------------------------------------- each once

    def _once(self, what: str, asked: Any, *, after: str = "", **learnt: Any) -> None:
        """Write down what was asked, and what it says; the same again is no other, and anything else is refused."""
        if after and after not in self.done:
            raise MessageError(f"secure aggregation: {what} before {after}")
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if self.done.get(what, digest) != digest:
            raise MessageError(
                f"secure aggregation: {what} of round {self.terms.round} for something else than the first time; a "
                "sum is made once"
            )
        if what not in self.done:
            for name, value in learnt.items():
                setattr(self, name, value)
            self.done[what] = digest
            self.save(self.record)

    def _require(self, there: int, what: str) -> None:
        if there < self.terms.threshold:
            raise MessageError(f"secure aggregation: {there} users {what}; allowed: from {self.terms.threshold}")

    def _check_roster(self, roster: Mapping[str, bytes]) -> None:
        if not set(roster) <= set(self.terms.users) or len(set(roster.values())) != len(roster):
            raise MessageError("secure aggregation: a roster of others than the federation's users, each with a key")
        if roster.get(self.name) != self.advertise():
            raise MessageError(f"secure aggregation: a roster with another key of user {self.name!r}")
        if len(roster) > self.terms.expected:
            raise MessageError(f"secure aggregation: {len(roster)} users; the round asks {self.terms.expected}")
        self._require(len(roster), "have advertised")


def pair_mask(private: bytes, public: bytes, pair: tuple[str, str], terms: Terms) -> np.ndarray:
    """The mask that two users have in common; who comes first by name adds it, the other takes it away."""
    key = keys.derive(keys.agree(private, public), "mask", terms.digest, *sorted(pair))
    return keys.mask(key, terms.entries, terms.word)
