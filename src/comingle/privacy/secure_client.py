"""The client's side of secure aggregation: messages, session, keys, pairwise masks and Shamir shares.

A session only moves forward. It answers a repeated request with the same bytes and refuses a different one: two answers
under the same masks would let the server remove the masks. Therefore each request is recorded with ``save`` before the
answer is sent, and the record stays when a user's other state is rolled back.

Keys are X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869) with a text for their purpose. Masks are a ChaCha20 stream
(RFC 8439), shares are sealed with ChaCha20-Poly1305; all come from the package ``cryptography``. Each key is used for
one purpose and one message, so nonces are zero.

The secret is the value at 0 of a polynomial of degree ``threshold - 1`` over the integers modulo a prime, whose other
coefficients are uniform; a share is its value at a user's point. For any ``threshold - 1`` shares and any secret there
is exactly one such polynomial.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from comingle.config.settings import Terms
from comingle.privacy.secure_sum import (
    DTYPES,
    KEY_BYTES,
    KEYS,
    PUBLIC_KEYS_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    SHARES,
    VECTOR,
    as_tensor,
    as_words,
    make_download,
    make_upload,
)
from comingle.protocol.messages import Download, Upload
from comingle.utils.errors import MessageError, RecipeError
from comingle.utils.trees import Tree

# ---------------------------------------------------------------- messages from a user


def keys_message(name: str, round_number: int, public_keys: bytes) -> Upload:
    """Return the message with which a user sends its public keys to the server.

    Args:
        name: The user.
        round_number: Number of the round, from 1.
        public_keys: The two keys, one after the other.
    """
    return make_upload(name, round_number, {KEYS: _as_byte_tensor([public_keys])})


def shares_message(name: str, round_number: int, shares: Mapping[str, bytes]) -> Upload:
    """Return the message with which a user sends secret shares to the server.

    They are sealed shares of its own secrets for the other users, or, to unmask the sum, its shares of their secrets.

    Args:
        name: The user.
        round_number: Number of the round, from 1.
        shares: Shares by user, in the order in which the server expects them.
    """
    return make_upload(name, round_number, {SHARES: _as_byte_tensor(list(shares.values()))})


def masked_message(name: str, round_number: int, masked: np.ndarray) -> Upload:
    """Return the message with which a user sends its masked upload to the server.

    Args:
        name: The user.
        round_number: Number of the round.
        masked: The upload, integers modulo ``2^word``.
    """
    return make_upload(name, round_number, {VECTOR: as_tensor(masked).unsqueeze(0)})


def read_keys(message: Upload | Download | None, name: str, round_number: int) -> bytes:
    """Return the public keys in a user's message to the server.

    Args:
        message: The message.
        name: The user.
        round_number: Number of the round.

    Raises:
        MessageError: The message is not of this user and round, or has other contents.
    """
    keys = _single_tensor(message, name, round_number, KEYS)
    return _byte_strings(keys, 1, PUBLIC_KEYS_BYTES)[0]  # both keys of the user in a single byte string


def read_shares(
    message: Upload | Download | None, name: str, round_number: int, others: Sequence[str], *, sealed: bool
) -> dict[str, bytes]:
    """Return the secret shares in a user's message to the server, by the name of the other user that they belong to.

    Args:
        message: The message.
        name: The user.
        round_number: Number of the round, from 1.
        others: The other users, in the order of the message.
        sealed: True in step "share": shares of the user's own secrets, encrypted for each of the others. False in step
            "unmask": plain shares of the others' secrets.

    Raises:
        MessageError: The message is not of this user and round, or has other contents.
    """
    parts = _byte_strings(
        _single_tensor(message, name, round_number, SHARES), len(others), SEALED_BYTES if sealed else SHARE_BYTES
    )
    return dict(zip(others, parts, strict=True))


def read_masked(message: Upload | Download | None, name: str, round_number: int, entries: int, word: int) -> np.ndarray:
    """Return the masked upload in a user's message to the server, as unsigned integers.

    Args:
        message: The message.
        name: The user.
        round_number: Number of the round.
        entries: Number of entries of the upload.
        word: Bits of an entry.

    Raises:
        MessageError: The message is not of this user and round, or has other contents.
    """
    t = _single_tensor(message, name, round_number, VECTOR)
    if t.dtype != DTYPES[word] or tuple(t.shape) != (1, entries):
        raise MessageError(
            f"secure aggregation: got {t.dtype} of shape {tuple(t.shape)}; allowed: {DTYPES[word]}, {(1, entries)}"
        )
    return as_words(t[0])


# ---------------------------------------------------------------- messages from the server


def roster_message(name: str, round_number: int, roster: Mapping[str, bytes]) -> Download:
    """Return the server's message to a user with the users who advertised and their public keys.

    Args:
        name: The receiving user. Its own keys are dropped when the message is packed, as it knows them.
        round_number: Number of the round, from 1.
        roster: Public keys by user.
    """
    return make_download(name, round_number, roster, {KEYS: _as_byte_tensor(list(roster.values()))})


def sealed_message(name: str, round_number: int, sealed: Mapping[str, bytes]) -> Download:
    """Return the server's message to a user with the shares that other users sealed (encrypted) for it.

    Args:
        name: The receiving user.
        round_number: Number of the round.
        sealed: Sealed shares by the user that sealed them, who is named as a sender in the message.
    """
    senders = list(sealed)
    return make_download(name, round_number, senders, {SHARES: _as_byte_tensor(list(sealed.values()))})


def survivors_message(name: str, round_number: int, survivors: Sequence[str]) -> Download:
    """Return the server's message to a user with the names of the users whose masked uploads are in the sum.

    With these names the user knows which secrets to reveal, so that the server can remove the masks from the sum.

    Args:
        name: The receiving user.
        round_number: Number of the round.
        survivors: Users in the sum.
    """
    return make_download(name, round_number, survivors, {})


def read_roster(message: Upload | Download | None, name: str, round_number: int, own_keys: bytes) -> dict[str, bytes]:
    """Return the public keys of all users who advertised, by name, from the server's message.

    Args:
        message: The message.
        name: The receiving user.
        round_number: Number of the round.
        own_keys: Public keys of the receiving user, which the message leaves out because the user knows them.

    Raises:
        MessageError: The message is not for this user and round, or has other contents.
    """
    senders, tensors = _senders_and_tensors(message, name, round_number)
    others = [sender for sender in senders if sender != name]
    keys = dict(zip(others, _byte_strings(tensors.get(KEYS), len(others), PUBLIC_KEYS_BYTES), strict=True))
    return {sender: own_keys if sender == name else keys[sender] for sender in senders}


def read_sealed(message: Upload | Download | None, name: str, round_number: int) -> dict[str, bytes]:
    """Return the shares that others sealed for this user, by sender, from the server's message.

    Args:
        message: The message.
        name: The receiving user.
        round_number: Number of the round.

    Raises:
        MessageError: The message is not for this user and round, or has other contents.
    """
    senders, tensors = _senders_and_tensors(message, name, round_number)
    return dict(zip(senders, _byte_strings(tensors.get(SHARES), len(senders), SEALED_BYTES), strict=True))


def read_survivors(message: Upload | Download | None, name: str, round_number: int) -> list[str]:
    """Return the names of the users in the sum from the server's message.

    Args:
        message: The message.
        name: The receiving user.
        round_number: Number of the round.

    Raises:
        MessageError: The message is not for this user and round.
    """
    survivors, _ = _senders_and_tensors(message, name, round_number)  # this message names them as its senders
    return list(survivors)


# ---------------------------------------------------------------- messages as tensors


def _as_byte_tensor(parts: Sequence[bytes]) -> Tensor:
    """Return byte strings of equal length as an int8 tensor ``(1, strings, length)``."""
    width = len(parts[0]) if parts else 0
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int8).view(1, len(parts), width)


def _byte_strings(t: Tensor | None, count: int, width: int) -> list[bytes]:
    """Return the byte strings in an int8 tensor, the inverse of :func:`_as_byte_tensor`.

    Args:
        t: The tensor.
        count: Expected number of strings.
        width: Expected length of each string.

    Raises:
        MessageError: The tensor is missing, or has another type or size.
    """
    if t is None or t.dtype != torch.int8 or t.numel() != count * width:
        raise MessageError(f"secure aggregation: wrong size; allowed: {count} times {width} bytes")
    return [row.tobytes() for row in t.reshape(count, width).numpy()]


def _single_tensor(message: Upload | Download | None, name: str, round_number: int, tensor_name: str) -> Tensor:
    """Return the only tensor of a user's upload.

    Args:
        message: The message.
        name: The user.
        round_number: Number of the round.
        tensor_name: Required name of the tensor.

    Raises:
        MessageError: The message is not of this user and round, or has other tensors.
    """
    if not isinstance(message, Upload) or message.users != (name,) or message.round != round_number or message.reports:
        raise MessageError(f"secure aggregation: not a message from user {name!r} in round {round_number}")
    if message.tensors.keys() != {tensor_name}:
        raise MessageError(f"secure aggregation: got tensors {sorted(message.tensors)[:3]}; allowed: {tensor_name}")
    return message.tensors[tensor_name]


def _senders_and_tensors(
    message: Upload | Download | None, name: str, round_number: int
) -> tuple[tuple[str, ...], Tree]:
    """Return the names of the users that a download's contents come from, and its tensors.

    Args:
        message: The message.
        name: The receiving user.
        round_number: Number of the round.

    Raises:
        MessageError: The message is not for this user and round, or names a user twice.
    """
    if not isinstance(message, Download) or message.users != (name,) or message.version != round_number:
        raise MessageError(f"secure aggregation: not a message for user {name!r} in round {round_number}")
    if twice := [sender for sender, count in Counter(message.senders).items() if count > 1]:
        raise MessageError(
            f"secure aggregation: user {twice[0][:70]!r} occurs twice in round {round_number}; allowed: once"
        )
    return message.senders, message.tensors


Record = dict[str, Any]
"""Record of a session, as in JSON."""


@dataclass(kw_only=True)
class Session:
    """A user's side of one secure sum, with steps in fixed order: advertise keys, share secrets, mask, unmask.

    A user adds its own mask and masks that it has in common with each other user to its upload. The common ones cancel
    in the sum. Secret shares let the server remove the own masks, and the common masks of users that drop out.

    Args:
        terms: Public terms of the sum, such as its round, users and threshold.
        name: The user.
        seed: 32 random bytes from which all secrets are derived.
        save: Called with the record before an answer is sent.
        roster: Public keys of all users who advertised, in the server's order.
        sealed: Sealed shares from the users who have shared.
        request_digests: Digest of the request in each step taken.
    """

    terms: Terms
    name: str
    seed: bytes
    save: Callable[[Record], None]
    roster: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, bytes] = field(default_factory=dict)
    request_digests: dict[str, str] = field(default_factory=dict)

    # ---------------------------------------------------------------- record

    @property
    def record(self) -> Record:
        """Complete state of the session, for JSON; ``done`` has the digest of the request in each step taken."""
        return {
            "terms": asdict(self.terms),
            "name": self.name,
            "seed": self.seed.hex(),
            "roster": {name: key.hex() for name, key in self.roster.items()},
            "sealed": {name: text.hex() for name, text in self.sealed.items()},
            "done": dict(self.request_digests),
        }

    @classmethod
    def of(cls, record: Record, save: Callable[[Record], None]) -> Session:
        """Restore a session that was saved, for example after a restart of the client.

        Args:
            record: The last :attr:`record` of the session, with all bytes as hexadecimal text; ``done`` has the digest
                of the request in each step taken.
            save: Called with the new record before an answer is sent.
        """
        terms = Terms(**{**record["terms"], "users": tuple(record["terms"]["users"])})
        return cls(
            terms=terms,
            name=record["name"],
            seed=bytes.fromhex(record["seed"]),
            save=save,
            roster={name: bytes.fromhex(key) for name, key in record["roster"].items()},
            sealed={name: bytes.fromhex(text) for name, text in record["sealed"].items()},
            request_digests=dict(record["done"]),
        )

    # ---------------------------------------------------------------- steps

    def advertise(self) -> bytes:
        """Return the user's public keys: one for sealing shares, then one for common masks."""
        self._record_step("advertise", "")
        return public_of(self._derive_secret("sealing")) + public_of(self._derive_secret("masking"))

    def share(self, roster: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return for each other user sealed shares of this user's two secrets: seed of its own mask, and masking key.

        The step is recorded. A repeated request with the same roster is answered again, one with another roster is
        refused.

        Args:
            roster: Public keys of all users who advertised.

        Raises:
            MessageError: The roster has other users than the round or too few, or differs from an earlier one.
        """
        self._check_roster(roster)
        request = {name: key.hex() for name, key in roster.items()}
        self._record_step("share", request, after="advertise", roster=dict(roster))
        return {
            name: seal(self._sealing_key(name, sends=True), both_shares, self.terms.digest)
            for name, both_shares in self._all_shares().items()
            if name != self.name
        }

    def mask(self, sealed: Mapping[str, bytes], upload: np.ndarray) -> np.ndarray:
        """Return the upload plus this user's own mask and its common masks with all users who have shared.

        Args:
            sealed: Shares that others sealed for this user, by sender: the users who have shared.
            upload: Integers modulo ``2^word``.

        Raises:
            MessageError: There are too few users, or another upload was masked before.
        """
        if not set(sealed) <= set(self.roster) - {self.name}:
            raise MessageError("secure aggregation: shares from a user who has not advertised")
        self._require_threshold(len(sealed) + 1, "share")  # the others and this user
        for name, shares in sealed.items():
            self._unseal_shares(name, shares)  # raises before anything is sent
        request = {name: shares.hex() for name, shares in sealed.items()}
        self._record_step("mask", request, after="share", sealed=dict(sealed))
        masked = upload + mask(self._derive_secret("own mask"), self.terms.entries, self.terms.word)
        for name in sealed:
            pair = pair_mask(
                self._derive_secret("masking"), self.roster[name][KEY_BYTES:], (self.name, name), self.terms
            )
            masked = masked + pair if self.name < name else masked - pair
        # Fails if another upload was masked before: the difference of both would not be hidden.
        self._record_step("masked", hashlib.sha256(masked.tobytes()).hexdigest(), after="mask")
        return masked

    def unmask(self, survivors: Sequence[str]) -> dict[str, bytes]:
        """Return one share for each user who has shared, with which the server removes masks from the sum.

        For a user in the sum it is a share of the seed of its own mask, for a user that dropped out a share of its
        masking key. It is never both: with both secrets of a user the server could read its upload.

        Args:
            survivors: Users in the sum.

        Raises:
            MessageError: There are too few survivors, this user is not among them, or they differ from earlier ones.
        """
        sharers = self.sharers
        if len(set(survivors)) != len(survivors) or not {self.name} <= set(survivors) <= set(sharers):
            raise MessageError("secure aggregation: the sum has a user who has not shared, or lacks this user")
        self._require_threshold(len(survivors), "mask")
        self._record_step("unmask", sorted(survivors), after="masked")
        return {name: self._share_of(name, "own mask" if name in survivors else "masking") for name in sharers}

    @property
    def sharers(self) -> list[str]:
        """Users who have shared, in the roster's order."""
        return [name for name in self.roster if name == self.name or name in self.sealed]

    # ---------------------------------------------------------------- secrets

    def _derive_secret(self, purpose: str, *context: str) -> bytes:
        """Derive a secret of this user and sum from its seed; the same purpose always gives the same secret."""
        return derive(self.seed, "secret", purpose, self.terms.digest, self.name, *context)

    def _all_shares(self) -> dict[str, bytes]:
        """Split this user's two secrets; return each user's share of the own mask's seed and of the masking key.

        Both shares are concatenated. The polynomials' coefficients are derived from the roster too: if two rosters had
        one polynomial, colluding users could collect more of its shares than the threshold allows.
        """
        points = {name: point for point, name in enumerate(self.roster, start=1)}
        roster_text = json.dumps({name: key.hex() for name, key in self.roster.items()})

        def split_secret(purpose: str) -> dict[int, bytes]:
            coefficients_key = self._derive_secret("shares of", purpose, roster_text)
            return split(self._derive_secret(purpose), list(points.values()), self.terms.threshold, coefficients_key)

        seed_shares, masking_key_shares = split_secret("own mask"), split_secret("masking")
        return {name: seed_shares[point] + masking_key_shares[point] for name, point in points.items()}

    def _share_of(self, name: str, secret: Literal["own mask", "masking"]) -> bytes:
        """Return this user's share of a secret of the user ``name``.

        Args:
            name: The user, who may be this user itself.
            secret: The seed of its own mask ("own mask"), or its masking key ("masking").
        """
        both = self._all_shares()[name] if name == self.name else self._unseal_shares(name, self.sealed[name])
        return both[:SHARE_BYTES] if secret == "own mask" else both[SHARE_BYTES:]

    def _unseal_shares(self, name: str, sealed: bytes) -> bytes:
        """Decrypt the shares that the user ``name`` sealed for this user: of its own mask and of its masking key.

        Args:
            name: The user who sealed the shares.
            sealed: Both shares, encrypted together.

        Raises:
            MessageError: They were not sealed by that user for this sum, or have a wrong length.
        """
        both_shares = unseal(self._sealing_key(name, sends=False), sealed, self.terms.digest)
        if len(both_shares) != 2 * SHARE_BYTES:
            raise MessageError("secure aggregation: shares of the wrong length")
        return both_shares

    def _sealing_key(self, name: str, *, sends: bool) -> bytes:
        """Return the key that seals shares between this user and the user ``name``; each direction has its own key."""
        # The first of a user's two public keys is for sealing.
        common = shared_secret(self._derive_secret("sealing"), self.roster[name][:KEY_BYTES], name)
        sender, receiver = (self.name, name) if sends else (name, self.name)
        return derive(common, "seal", self.terms.digest, sender, receiver)

    # ---------------------------------------------------------------- checks

    def _record_step(self, step: str, request: object, *, after: str = "", **updates: object) -> None:
        """Record a step's request and save the session; accept a repeated request, refuse a different one.

        Answers to two different requests could together reveal a single user's upload.

        Args:
            step: Name of the step.
            request: Contents of the request, for JSON; only their digest is stored.
            after: Step that must have been recorded before; empty for none.
            updates: Attributes of the session to set when the step is recorded.

        Raises:
            MessageError: The step before is missing, or the step was requested before with other contents.
        """
        if after and after not in self.request_digests:
            raise MessageError(f"secure aggregation: {step} requested before {after}")
        digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        if self.request_digests.get(step, digest) != digest:
            raise MessageError(
                f"secure aggregation: {step} of round {self.terms.round} requested again with other contents; a sum is "
                "computed only once"
            )
        if step not in self.request_digests:
            for name, value in updates.items():
                setattr(self, name, value)
            self.request_digests[step] = digest
            self.save(self.record)

    def _require_threshold(self, num_users: int, step: str) -> None:
        """Raise a ``MessageError`` if fewer users than the threshold have completed a step."""
        if num_users < self.terms.threshold:
            raise MessageError(
                f"secure aggregation: got {num_users} users who completed step {step!r}; allowed: at least "
                f"{self.terms.threshold}"
            )

    def _check_roster(self, roster: Mapping[str, bytes]) -> None:
        """Check the public keys from the server.

        They must be of known users and differ, include this user's own keys, and be neither too few nor too many.

        Raises:
            MessageError: A check fails.
        """
        if not set(roster) <= set(self.terms.users) or len(set(roster.values())) != len(roster):
            raise MessageError("secure aggregation: the roster has unknown users, or two users with one key")
        if roster.get(self.name) != self.advertise():
            raise MessageError(f"secure aggregation: the roster lacks the key of user {self.name!r}")
        if len(roster) > self.terms.expected:
            raise MessageError(
                f"secure aggregation: {len(roster)} users in the roster; allowed: up to {self.terms.expected}"
            )
        self._require_threshold(len(roster), "advertise")


def pair_mask(private: bytes, public: bytes, pair: tuple[str, str], terms: Terms) -> np.ndarray:
    """Return the common mask of two users; the first by name adds it, the other subtracts it.

    Args:
        private: Private masking key of one user.
        public: Public masking key of the other.
        pair: Names of the two users, the owner of the private key first.
        terms: Public terms of the sum: its round, users, threshold, number of entries and bits of each.
    """
    key = derive(shared_secret(private, public, pair[1]), "mask", terms.digest, *sorted(pair))
    return mask(key, terms.entries, terms.word)


# ---------------------------------------------------------------- keys, masks and shares

_NO_NONCE, _NO_COUNTER = bytes(12), bytes(16)
_TYPES = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


@cache
def _primitives(name: str) -> Any:
    """Import a module of ``cryptography``, which is only needed for secure sums.

    Raises:
        RecipeError: The package is not installed.
    """
    try:
        return importlib.import_module(f"cryptography.hazmat.primitives.{name}")
    except ImportError:
        raise RecipeError(
            "privacy.secure_aggregation: needs the package cryptography: pip install 'comingle[flower]'"
        ) from None


def derive(secret: bytes, *purpose: str | int) -> bytes:
    """Derive a key of 32 bytes for one purpose from a secret (HKDF-SHA256)."""
    hkdf = _primitives("kdf.hkdf").HKDF(_primitives("hashes").SHA256(), KEY_BYTES, None, json.dumps(purpose).encode())
    return hkdf.derive(secret)


def public_of(private: bytes) -> bytes:
    """Return the public key of a private key of 32 random bytes."""
    return _primitives("asymmetric.x25519").X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_secret(private: bytes, public: bytes, owner: str) -> bytes:
    """Return the X25519 secret that two users share, from the private key of one and the public key of the other.

    Args:
        private: Private key of one user.
        public: Public key of the other.
        owner: Name of the other, for the message.

    Raises:
        MessageError: The public key is invalid.
    """
    x25519 = _primitives("asymmetric.x25519")
    try:
        other = x25519.X25519PublicKey.from_public_bytes(public)
        return x25519.X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError:
        raise MessageError(f"secure aggregation: invalid public key of user {owner!r}") from None


def mask(key: bytes, entries: int, word: int) -> np.ndarray:
    """Return the mask of a key: unsigned integers that look uniform modulo ``2^word`` to all without the key.

    Args:
        key: Key of the mask.
        entries: Number of integers.
        word: Bits of an integer, 32 or 64.
    """
    dtype = _TYPES[word]
    return np.frombuffer(stream(key, entries * dtype.itemsize), dtype=dtype)


def stream(key: bytes, count: int) -> bytes:
    """Return the first ``count`` bytes of a key's ChaCha20 stream, which is the encryption of zeros."""
    ciphers = _primitives("ciphers")
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, _NO_COUNTER), None)
    return cipher.encryptor().update(bytes(count))


def seal(key: bytes, text: bytes, context: str) -> bytes:
    """Encrypt and authenticate bytes with ChaCha20-Poly1305. The nonce is constant, so use a key for one text only.

    Args:
        key: Key of this text.
        text: The bytes to encrypt.
        context: Not encrypted; without it the text cannot be decrypted. Here the digest of the sum's terms.
    """
    return _primitives("ciphers.aead").ChaCha20Poly1305(key).encrypt(_NO_NONCE, text, context.encode())


def unseal(key: bytes, sealed: bytes, context: str) -> bytes:
    """Decrypt a sealed text.

    Args:
        key: Key of the text.
        sealed: The sealed text.
        context: Context that it was sealed with.

    Raises:
        MessageError: It was sealed with another key or context, or was changed.
    """
    invalid = importlib.import_module("cryptography.exceptions").InvalidTag
    try:
        # A constant nonce is safe, as each key seals a single text.
        return _primitives("ciphers.aead").ChaCha20Poly1305(key).decrypt(_NO_NONCE, sealed, context.encode())
    except invalid:
        raise MessageError("secure aggregation: a share was not sealed by its sender") from None


PRIME = 2**256 + 297
"""Smallest prime above all secrets of 32 bytes."""

_COEFFICIENT_BYTES = 48
"""Random bytes per coefficient, more than the prime's 33: modulo the prime they are uniform to one part in 2^127."""


def split(secret: bytes, points: Sequence[int], threshold: int, key: bytes) -> dict[int, bytes]:
    """Return Shamir shares of a secret: values of a polynomial of degree ``threshold - 1`` that is the secret at 0.

    Args:
        secret: The secret, 32 bytes.
        points: Points of the users, from 1.
        threshold: Number of shares that reveal the secret; fewer reveal nothing.
        key: Key of the pseudorandom coefficients.

    Returns:
        The share of each point.
    """
    assert len(secret) == KEY_BYTES
    assert all(0 < point < PRIME for point in points)
    # More bytes per coefficient than the prime has, so that the remainder modulo the prime is close to uniform.
    random_bytes = stream(key, _COEFFICIENT_BYTES * (threshold - 1))
    coefficients = [int.from_bytes(secret)]
    for start in range(0, len(random_bytes), _COEFFICIENT_BYTES):
        coefficients.append(int.from_bytes(random_bytes[start : start + _COEFFICIENT_BYTES]) % PRIME)
    return {point: _evaluate_polynomial(coefficients, point).to_bytes(SHARE_BYTES) for point in points}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Reconstruct a secret from Shamir shares, the inverse of :func:`split`.

    Args:
        shares: Shares by point, at least ``threshold``.
        threshold: Number of shares that reveal the secret.

    Raises:
        MessageError: There are too few shares, or they are not of one secret of 32 bytes.
    """
    if len(shares) < threshold:
        raise MessageError(f"secure aggregation: got {len(shares)} shares; needed: {threshold}")
    points = sorted(shares)[:threshold]
    values = {point: int.from_bytes(shares[point]) for point in points}
    secret = 0
    for point in points:  # sum of values times Lagrange polynomials at 0
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        secret = (secret + values[point] * numerator * pow(denominator, -1, PRIME)) % PRIME
    if any(value >= PRIME for value in values.values()) or secret >= 1 << 8 * KEY_BYTES:
        raise MessageError("secure aggregation: the shares belong to no secret")
    return secret.to_bytes(KEY_BYTES)


def _evaluate_polynomial(coefficients: Sequence[int], point: int) -> int:
    """Evaluate a polynomial modulo ``PRIME`` by Horner's rule; the constant coefficient is the first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value
