"""The client's side of secure aggregation.

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
import torch
from torch import Tensor

from comingle.config.settings import Terms
from comingle.privacy import secure_keys
from comingle.privacy.secure_sum import (
    DTYPES,
    KEY,
    KEYS,
    PUBLIC,
    SEALED,
    SHARE,
    SHARES,
    VECTOR,
    as_tensor,
    as_words,
    download,
    upload,
)
from comingle.protocol.messages import Download, Upload
from comingle.utils.errors import MessageError
from comingle.utils.trees import Tree

# ---------------------------------------------------------------- from a user


def keys_message(name: str, done: int, public: bytes) -> Upload:
    """A user's public keys."""
    return upload(name, done, {KEYS: _tensor([public])})


def shares_message(name: str, done: int, given: Mapping[str, bytes]) -> Upload:
    """What a user has for others, or its shares of others' secrets, in the order in which it knows them."""
    return upload(name, done, {SHARES: _tensor(list(given.values()))})


def masked_message(name: str, done: int, masked: np.ndarray) -> Upload:
    """A masked upload."""
    return upload(name, done, {VECTOR: as_tensor(masked).unsqueeze(0)})


def read_keys(message: Upload | Download | None, name: str, done: int) -> bytes:
    """A user's public keys.

    Raises:
        MessageError: it is something else.
    """
    return _bytes(_only(message, name, done, KEYS), 1, PUBLIC)[0]


def read_shares(
    message: Upload | Download | None, name: str, done: int, of: Sequence[str], *, sealed: bool
) -> dict[str, bytes]:
    """What a user has for these others, or its shares of their secrets."""
    parts = _bytes(_only(message, name, done, SHARES), len(of), SEALED if sealed else SHARE)
    return dict(zip(of, parts, strict=True))


def read_masked(message: Upload | Download | None, name: str, done: int, entries: int, word: int) -> np.ndarray:
    """A masked upload of so many entries."""
    t = _only(message, name, done, VECTOR)
    if t.dtype != DTYPES[word] or tuple(t.shape) != (1, entries):
        raise MessageError(
            f"secure aggregation: {t.dtype} of shape {tuple(t.shape)}; allowed: {DTYPES[word]}, {(1, entries)}"
        )
    return as_words(t[0])


# ---------------------------------------------------------------- from the server


def roster_message(name: str, done: int, roster: Mapping[str, bytes]) -> Download:
    """Who has advertised, with which keys; a user's own does not travel."""
    return download(name, done, roster, {KEYS: _tensor(list(roster.values()))})


def sealed_message(name: str, done: int, sealed: Mapping[str, bytes]) -> Download:
    """What others have for a user."""
    return download(name, done, sealed, {SHARES: _tensor(list(sealed.values()))})


def survivors_message(name: str, done: int, survivors: Sequence[str]) -> Download:
    """Who is in the sum."""
    return download(name, done, survivors, {})


def read_roster(message: Upload | Download | None, name: str, done: int, own: bytes) -> dict[str, bytes]:
    """Who has advertised, and with which keys; this user's are its ``own``.

    Raises:
        MessageError: it is something else.
    """
    senders, tensors = _said(message, name, done)
    others = [sender for sender in senders if sender != name]
    theirs = dict(zip(others, _bytes(tensors.get(KEYS), len(others), PUBLIC), strict=True))
    return {sender: own if sender == name else theirs[sender] for sender in senders}


def read_sealed(message: Upload | Download | None, name: str, done: int) -> dict[str, bytes]:
    """What others have for this user."""
    senders, tensors = _said(message, name, done)
    return dict(zip(senders, _bytes(tensors.get(SHARES), len(senders), SEALED), strict=True))


def read_survivors(message: Upload | Download | None, name: str, done: int) -> list[str]:
    """Who is in the sum."""
    return list(_said(message, name, done)[0])


# ---------------------------------------------------------------- as tensors


def _tensor(parts: Sequence[bytes]) -> Tensor:
    width = len(parts[0]) if parts else 0
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int8).view(1, len(parts), width)


def _bytes(t: Tensor | None, count: int, width: int) -> list[bytes]:
    if t is None or t.dtype != torch.int8 or t.numel() != count * width:
        raise MessageError(f"secure aggregation: not {count} times {width} bytes")
    return [row.tobytes() for row in t.reshape(count, width).numpy()]


def _only(message: Upload | Download | None, name: str, done: int, what: str) -> Tensor:
    if not isinstance(message, Upload) or message.users != (name,) or message.round != done or message.reports:
        raise MessageError(f"secure aggregation: not what user {name!r} has of round {done}")
    if message.tensors.keys() != {what}:
        raise MessageError(f"secure aggregation: has {sorted(message.tensors)[:3]}; allowed: {what}")
    return message.tensors[what]


def _said(message: Upload | Download | None, name: str, done: int) -> tuple[tuple[str, ...], Tree]:
    if not isinstance(message, Download) or message.users != (name,) or message.version != done:
        raise MessageError(f"secure aggregation: not for user {name!r} in round {done}")
    if len(set(message.senders)) != len(message.senders):
        raise MessageError("secure aggregation: somebody twice")
    return message.senders, message.tensors


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
        return secure_keys.public_of(self._secret("sealing")) + secure_keys.public_of(self._secret("masking"))

    def share(self, roster: Mapping[str, bytes]) -> dict[str, bytes]:
        """For each other user its shares of this one's secrets, sealed.

        Raises:
            MessageError: these are not the round's users, are too few, or another roster was answered.
        """
        self._check_roster(roster)
        asked = {name: key.hex() for name, key in roster.items()}
        self._once("share", asked, after="advertise", roster=dict(roster))
        return {
            name: secure_keys.seal(self._sealing(name, sends=True), text, self.terms.digest)
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
        masked = upload + secure_keys.mask(self._secret("own mask"), self.terms.entries, self.terms.word)
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
        return secure_keys.derive(self.seed, "secret", purpose, self.terms.digest, self.name, *about)

    def _shares(self) -> dict[str, bytes]:
        """Everybody's: of the own mask's seed, and of the masking key."""
        points = {name: at for at, name in enumerate(self.roster, start=1)}
        every = json.dumps({name: key.hex() for name, key in self.roster.items()})
        parts = [
            secure_keys.split(
                self._secret(what), list(points.values()), self.terms.threshold, self._secret("shares of", what, every)
            )
            for what in ("own mask", "masking")
        ]
        return {name: parts[0][at] + parts[1][at] for name, at in points.items()}

    def _share_of(self, name: str, which: int) -> bytes:
        both = self._shares()[name] if name == self.name else self._opened(name, self.sealed[name])
        return both[which * secure_keys.SHARE :][: secure_keys.SHARE]

    def _opened(self, name: str, sealed: bytes) -> bytes:
        text = secure_keys.unseal(self._sealing(name, sends=False), sealed, self.terms.digest)
        if len(text) != 2 * secure_keys.SHARE:
            raise MessageError("secure aggregation: shares of another length")
        return text

    def _sealing(self, name: str, *, sends: bool) -> bytes:
        """The key of what is sent to somebody, or by it."""
        common = secure_keys.agree(self._secret("sealing"), self.roster[name][:KEY])
        sender, receiver = (self.name, name) if sends else (name, self.name)
        return secure_keys.derive(common, "seal", self.terms.digest, sender, receiver)

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
    key = secure_keys.derive(secure_keys.agree(private, public), "mask", terms.digest, *sorted(pair))
    return secure_keys.mask(key, terms.entries, terms.word)
