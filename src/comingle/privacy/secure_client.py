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
        name: Name of the user.
        round_number: Number of the round, from 1.
        public_keys: The two keys, one after the other.
    """
    return make_upload(name, round_number, {KEYS: _as_byte_tensor([public_keys])})


def shares_message(name: str, round_number: int, shares: Mapping[str, bytes]) -> Upload:
    """Return the message with which a user sends secret shares to the server.

    In step "share" these are encrypted shares of its own secrets, one for each other user. In step "unmask" they are
    its shares of a secret of each user, itself included.

    Args:
        name: Name of the user.
        round_number: Number of the round, from 1.
        shares: Shares by the user who can decrypt them (step "share") or whose secret they are of (step "unmask"), in
            the order in which the server expects them.
    """
    return make_upload(name, round_number, {SHARES: _as_byte_tensor(list(shares.values()))})


def masked_message(name: str, round_number: int, masked: np.ndarray) -> Upload:
    """Return the message with which a user sends its masked upload to the server.

    Args:
        name: Name of the user.
        round_number: Number of the round.
        masked: The upload, integers modulo ``2^word``.
    """
    return make_upload(name, round_number, {VECTOR: as_tensor(masked).unsqueeze(0)})


def read_keys(message: Upload | Download | None, name: str, round_number: int) -> bytes:
    """Return the two public keys, one after the other, in a user's message to the server.

    Args:
        message: The message, which may be missing or malformed.
        name: Name of the user.
        round_number: Number of the round.

    Raises:
        MessageError: The message is not of this user and round, or has other contents.
    """
    keys = _single_tensor(message, name, round_number, KEYS)
    (both_keys,) = _byte_strings(keys, count=1, width=PUBLIC_KEYS_BYTES)
    return both_keys


def read_shares(
    message: Upload | Download | None, name: str, round_number: int, users: Sequence[str], *, sealed: bool
) -> dict[str, bytes]:
    """Return the secret shares in a user's message to the server, by user.

    The user of a share is the one who can decrypt it (step "share"), or the one whose secret it is of (step "unmask").

    Args:
        message: The message, which may be missing or malformed.
        name: The user who sent it.
        round_number: Number of the round, from 1.
        users: The users of the shares, in the order of the message. In step "unmask" they include the sender.
        sealed: Whether the shares are encrypted (step "share") or plain (step "unmask").

    Raises:
        MessageError: The message is not of this user and round, or has other contents.
    """
    tensor = _single_tensor(message, name, round_number, SHARES)
    share_bytes = SEALED_BYTES if sealed else SHARE_BYTES
    shares = _byte_strings(tensor, count=len(users), width=share_bytes)
    return dict(zip(users, shares, strict=True))


def read_masked(message: Upload | Download | None, name: str, round_number: int, entries: int, word: int) -> np.ndarray:
    """Return the masked upload in a user's message to the server, as unsigned integers.

    Args:
        message: The message, which may be missing or malformed.
        name: Name of the user.
        round_number: Number of the round.
        entries: Number of entries of the upload.
        word: Bits of an entry, 32 or 64.

    Raises:
        MessageError: The message is not of this user and round, or has other contents.
    """
    masked = _single_tensor(message, name, round_number, VECTOR)
    dtype, shape = DTYPES[word], (1, entries)
    if masked.dtype != dtype or tuple(masked.shape) != shape:
        raise MessageError(
            f"secure aggregation: got {masked.dtype} of shape {tuple(masked.shape)}; allowed: {dtype}, {shape}"
        )
    return as_words(masked[0])


# ---------------------------------------------------------------- messages from the server


def all_keys_message(name: str, round_number: int, public_keys: Mapping[str, bytes]) -> Download:
    """Return the server's message to a user with the public keys of all users who advertised.

    Args:
        name: The receiving user. Its own keys are dropped when the message is packed.
        round_number: Number of the round, from 1.
        public_keys: Public keys by user.
    """
    tensor = _as_byte_tensor(list(public_keys.values()))
    return make_download(name, round_number, senders=list(public_keys), tensors={KEYS: tensor})


def sealed_shares_message(name: str, round_number: int, sealed_shares: Mapping[str, bytes]) -> Download:
    """Return the server's message to a user with the shares that other users sealed (encrypted) for it.

    Args:
        name: Name of the user who receives the message.
        round_number: Number of the round.
        sealed_shares: Sealed shares by the user who sealed them.
    """
    tensor = _as_byte_tensor(list(sealed_shares.values()))
    return make_download(name, round_number, senders=list(sealed_shares), tensors={SHARES: tensor})


def survivors_message(name: str, round_number: int, survivors: Sequence[str]) -> Download:
    """Return the server's message to a user with the names of the users whose masked uploads are in the sum.

    With these names the user knows which secrets to reveal, so that the server can remove the masks from the sum.

    Args:
        name: Name of the user who receives the message.
        round_number: Number of the round.
        survivors: Users in the sum.
    """
    return make_download(name, round_number, survivors, {})


def read_all_keys(message: Upload | Download | None, name: str, round_number: int, own_keys: bytes) -> dict[str, bytes]:
    """Return the public keys of all users who advertised, by name, from the server's message.

    Args:
        message: The message, which may be missing or malformed.
        name: Name of the user who receives the message.
        round_number: Number of the round.
        own_keys: Public keys of the receiving user, which the message leaves out.

    Raises:
        MessageError: The message is not for this user and round, or has other contents.
    """
    advertisers, tensors = _senders_and_tensors(message, name, round_number)
    others = [user for user in advertisers if user != name]
    keys_of_others = _byte_strings(tensors.get(KEYS), count=len(others), width=PUBLIC_KEYS_BYTES)
    public_keys = dict(zip(others, keys_of_others, strict=True))
    public_keys[name] = own_keys
    return {user: public_keys[user] for user in advertisers}  # in the order of the message


def read_sealed_shares(message: Upload | Download | None, name: str, round_number: int) -> dict[str, bytes]:
    """Return the shares that others sealed for this user, by sender, from the server's message.

    Args:
        message: The message, which may be missing or malformed.
        name: Name of the user who receives the message.
        round_number: Number of the round.

    Raises:
        MessageError: The message is not for this user and round, or has other contents.
    """
    senders, tensors = _senders_and_tensors(message, name, round_number)
    sealed_shares = _byte_strings(tensors.get(SHARES), count=len(senders), width=SEALED_BYTES)
    return dict(zip(senders, sealed_shares, strict=True))


def read_survivors(message: Upload | Download | None, name: str, round_number: int) -> list[str]:
    """Return the names of the users whose uploads are in the sum, from the server's message.

    Args:
        message: The message, which may be missing or malformed.
        name: Name of the user who receives the message.
        round_number: Number of the round.

    Raises:
        MessageError: The message is not for this user and round.
    """
    survivors, _no_tensors = _senders_and_tensors(message, name, round_number)
    return list(survivors)


# ---------------------------------------------------------------- messages as tensors


def _as_byte_tensor(strings: Sequence[bytes]) -> Tensor:
    """Return byte strings of equal length as an int8 tensor ``(1, strings, length)``."""
    length = len(strings[0]) if strings else 0
    joined = bytearray(b"".join(strings))
    return torch.frombuffer(joined, dtype=torch.int8).view(1, len(strings), length)


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
        message: The message, which may be missing or malformed.
        name: Name of the user.
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
    """Return the names of a download's senders (the users that its contents come from) and its tensors.

    Args:
        message: The message, which may be missing or malformed.
        name: Name of the user who receives the message.
        round_number: Number of the round.

    Raises:
        MessageError: The message is not for this user and round, or names a user twice.
    """
    if not isinstance(message, Download) or message.users != (name,) or message.version != round_number:
        raise MessageError(f"secure aggregation: not a message for user {name!r} in round {round_number}")
    repeated = [sender for sender, count in Counter(message.senders).items() if count > 1]
    if repeated:
        raise MessageError(
            f"secure aggregation: user {repeated[0][:70]!r} occurs twice in round {round_number}; allowed: once"
        )
    return message.senders, message.tensors


Record = dict[str, Any]
"""Record of a session, as in JSON."""


@dataclass(kw_only=True)
class Session:
    """A user's side of one secure sum, with steps in fixed order: advertise keys, share secrets, mask, unmask.

    A user adds its own mask to its upload, and a common mask with each other user, which cancels in the sum. Secret
    shares let the server remove the own masks, and the common masks of users that drop out.

    Args:
        terms: Public terms of the sum, such as its round, users and threshold.
        name: Name of the user.
        seed: 32 random bytes from which all secrets are derived.
        save: Called with the record before an answer is sent.
        public_keys: Public keys of all users who advertised, in the server's order.
        sealed_shares: Shares that other users sealed for this user, by sender.
        request_digests: Digest of the server's request in each step so far.
    """

    terms: Terms
    name: str
    seed: bytes
    save: Callable[[Record], None]
    public_keys: dict[str, bytes] = field(default_factory=dict)
    sealed_shares: dict[str, bytes] = field(default_factory=dict)
    request_digests: dict[str, str] = field(default_factory=dict)

    # ---------------------------------------------------------------- record

    @property
    def record(self) -> Record:
        """State of the session as JSON data, with which :meth:`of` continues it after a restart of the client."""
        return {
            "terms": asdict(self.terms),
            "name": self.name,
            "seed": self.seed.hex(),
            "roster": {name: keys.hex() for name, keys in self.public_keys.items()},
            "sealed": {name: shares.hex() for name, shares in self.sealed_shares.items()},
            "done": dict(self.request_digests),  # SHA-256 of the request of each completed step
        }

    @classmethod
    def of(cls, record: Record, save: Callable[[Record], None]) -> Session:
        """Restore a session that was saved, for example after a restart of the client.

        Args:
            record: The last :attr:`record` of the session, with bytes as hexadecimal text.
            save: Called with the new record before an answer is sent.
        """
        terms = {**record["terms"], "users": tuple(record["terms"]["users"])}  # JSON has a list of users
        return cls(
            terms=Terms(**terms),
            name=record["name"],
            seed=bytes.fromhex(record["seed"]),
            save=save,
            public_keys={name: bytes.fromhex(keys) for name, keys in record["roster"].items()},
            sealed_shares={name: bytes.fromhex(shares) for name, shares in record["sealed"].items()},
            request_digests=dict(record["done"]),
        )

    # ---------------------------------------------------------------- steps

    def advertise(self) -> bytes:
        """Return the user's public keys: one for sealing shares, then one for common masks."""
        self._record_step("advertise", request="")
        return public_of(self._derive_secret("sealing")) + public_of(self._derive_secret("masking"))

    def share(self, public_keys: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return sealed (encrypted) shares of this user's two secrets, by the other user who can unseal them.

        The secrets are the seed of its own mask, and its masking key.

        Args:
            public_keys: Public keys of all users who advertised.

        Raises:
            MessageError: The keys are of other users than the round's or of too few, or differ from an earlier request.
        """
        self._check_public_keys(public_keys)
        request = {name: keys.hex() for name, keys in public_keys.items()}
        # Raises a MessageError if an earlier request differs.
        self._record_step("share", request, after="advertise", public_keys=dict(public_keys))
        sealed_shares: dict[str, bytes] = {}
        for name, both_shares in self._all_shares().items():
            if name != self.name:
                sealing_key = self._sealing_key(name, sends=True)
                sealed_shares[name] = seal(sealing_key, both_shares, self.terms.digest)
        return sealed_shares

    def mask(self, sealed_shares: Mapping[str, bytes], upload: np.ndarray) -> np.ndarray:
        """Return the upload plus this user's own mask, plus or minus its common mask with each sender of shares.

        Args:
            sealed_shares: Shares that other users sealed for this user, by sender.
            upload: Integers modulo ``2^word``.

        Raises:
            MessageError: There are too few senders, a share is invalid, or another upload was masked before.
        """
        if not set(sealed_shares) <= set(self.public_keys) - {self.name}:
            raise MessageError("secure aggregation: shares from a user who has not advertised")
        num_sharers = len(sealed_shares) + 1  # the senders and this user
        self._require_threshold(num_sharers, "share")
        for name, shares in sealed_shares.items():
            self._unseal_shares(name, shares)  # raises a MessageError if the shares are invalid
        request = {name: shares.hex() for name, shares in sealed_shares.items()}
        # Raises a MessageError if an earlier request differs.
        self._record_step("mask", request, after="share", sealed_shares=dict(sealed_shares))
        masked = upload + mask(self._derive_secret("own mask"), self.terms.entries, self.terms.word)
        private_key = self._derive_secret("masking")
        for name in sealed_shares:
            public_key = self.public_keys[name][KEY_BYTES:]  # the second of two, for masks
            common_mask = pair_mask(private_key, public_key, (self.name, name), self.terms)
            is_first_by_name = self.name < name  # of two users the first adds the mask and the second subtracts it
            if is_first_by_name:
                masked += common_mask
            else:
                masked -= common_mask
        # This raises an error for a second upload: the difference of both would have no masks.
        self._record_step("masked", hashlib.sha256(masked.tobytes()).hexdigest(), after="mask")
        return masked

    def unmask(self, survivors: Sequence[str]) -> dict[str, bytes]:
        """Return this user's share of one secret of each sharer, with which the server removes masks from the sum.

        For a user in the sum the secret is the seed of its own mask; for a user that dropped out it is its masking key.
        It is never both: with both the server could read the user's upload.

        Args:
            survivors: Users in the sum.

        Raises:
            MessageError: There are too few survivors, this user is not among them, or an earlier request had others.
        """
        sharers = self.sharers
        has_duplicates = len(set(survivors)) != len(survivors)
        if has_duplicates or self.name not in survivors or not set(survivors) <= set(sharers):
            raise MessageError("secure aggregation: the sum has a user who has not shared, or lacks this user")
        self._require_threshold(len(survivors), "mask")
        self._record_step("unmask", sorted(survivors), after="masked")  # raises an error if an earlier request differs
        shares: dict[str, bytes] = {}
        for name in sharers:
            if name in survivors:
                shares[name] = self._share_of(name, "own mask")
            else:
                shares[name] = self._share_of(name, "masking")
        return shares

    @property
    def sharers(self) -> list[str]:
        """Users who have shared: this user, and the senders of its sealed shares, in the order of ``public_keys``."""
        return [name for name in self.public_keys if name == self.name or name in self.sealed_shares]

    # ---------------------------------------------------------------- secrets

    def _derive_secret(self, purpose: str, *context: str) -> bytes:
        """Derive a secret of this user and sum from its seed; the same purpose always gives the same secret."""
        return derive(self.seed, "secret", purpose, self.terms.digest, self.name, *context)

    def _all_shares(self) -> dict[str, bytes]:
        """Split this user's two secrets into shares; return the two shares for each user, by the user's name.

        A value is the concatenation of a share of the seed of the own mask and a share of the masking key.
        """
        points = {name: point for point, name in enumerate(self.public_keys, start=1)}
        # Names and keys of the users are part of the polynomials' seed. Shares for two different sets of users are then
        # of different polynomials, so that they cannot be combined.
        users_and_keys = json.dumps({name: keys.hex() for name, keys in self.public_keys.items()})

        def split_secret(purpose: str) -> dict[int, bytes]:
            """Return the shares of one secret by the users' points."""
            secret = self._derive_secret(purpose)
            coefficients_key = self._derive_secret("shares of", purpose, users_and_keys)
            return split(secret, list(points.values()), self.terms.threshold, coefficients_key)

        seed_shares = split_secret("own mask")
        masking_key_shares = split_secret("masking")
        return {name: seed_shares[point] + masking_key_shares[point] for name, point in points.items()}

    def _share_of(self, name: str, secret: Literal["own mask", "masking"]) -> bytes:
        """Return this user's share of a secret of the user ``name``.

        Args:
            name: Another user, or this user itself.
            secret: The seed of that user's own mask ("own mask"), or its masking key ("masking").
        """
        if name == self.name:
            both_shares = self._all_shares()[name]
        else:
            both_shares = self._unseal_shares(name, self.sealed_shares[name])
        seed_share, masking_key_share = both_shares[:SHARE_BYTES], both_shares[SHARE_BYTES:]
        return seed_share if secret == "own mask" else masking_key_share

    def _unseal_shares(self, name: str, sealed: bytes) -> bytes:
        """Decrypt the two shares (of its own mask's seed and masking key) that the user ``name`` sealed for this user.

        Args:
            name: The user who sealed the shares.
            sealed: Both shares, encrypted together.

        Raises:
            MessageError: They were not sealed by that user for this sum, or have a wrong length.
        """
        sealing_key = self._sealing_key(name, sends=False)
        both_shares = unseal(sealing_key, sealed, self.terms.digest)
        if len(both_shares) != 2 * SHARE_BYTES:
            raise MessageError("secure aggregation: shares of the wrong length")
        return both_shares

    def _sealing_key(self, name: str, *, sends: bool) -> bytes:
        """Return the key that encrypts shares between this user and the user ``name``.

        Args:
            name: Name of the other user.
            sends: Whether this user is the sender; each direction has its own key.
        """
        private_key = self._derive_secret("sealing")
        public_key = self.public_keys[name][:KEY_BYTES]  # the first of two, for sealing
        common_secret = shared_secret(private_key, public_key, name)
        sender_and_receiver = (self.name, name) if sends else (name, self.name)
        return derive(common_secret, "seal", self.terms.digest, *sender_and_receiver)

    # ---------------------------------------------------------------- checks

    def _record_step(self, step: str, request: object, *, after: str = "", **updates: object) -> None:
        """Record a step's request and save the session, before the answer is sent; accept the same request again.

        Answers to two different requests in one step would let the server remove the masks.

        Args:
            step: Name of the step.
            request: Contents of the request, for JSON; only their digest is stored.
            after: Step that must have been recorded before; empty for none.
            updates: Attributes of the session to set when the step is recorded.

        Raises:
            MessageError: The step ``after`` is missing, or another request for ``step`` was recorded before.
        """
        if after and after not in self.request_digests:
            raise MessageError(f"secure aggregation: {step} requested before {after}")
        digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        if step in self.request_digests:
            if self.request_digests[step] != digest:
                raise MessageError(
                    f"secure aggregation: {step} of round {self.terms.round} requested again with other contents; a "
                    "sum is computed only once"
                )
            return
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

    def _check_public_keys(self, public_keys: Mapping[str, bytes]) -> None:
        """Check the public keys from the server: the number of users, and that this user's own keys are among them.

        Raises:
            MessageError: A check fails, a user is not of this sum, or two users have the same keys.
        """
        has_unknown_users = not set(public_keys) <= set(self.terms.users)
        has_equal_keys = len(set(public_keys.values())) != len(public_keys)
        if has_unknown_users or has_equal_keys:
            raise MessageError(
                "secure aggregation: the server sent public keys of unknown users, or of two users with one key"
            )
        own_keys = self.advertise()
        if public_keys.get(self.name) != own_keys:
            raise MessageError(
                f"secure aggregation: the server did not send the right public key of user {self.name!r}"
            )
        if len(public_keys) > self.terms.expected:
            raise MessageError(
                f"secure aggregation: the server sent public keys of {len(public_keys)} users; allowed: up to "
                f"{self.terms.expected}"
            )
        self._require_threshold(len(public_keys), "advertise")


def pair_mask(private: bytes, public: bytes, pair: tuple[str, str], terms: Terms) -> np.ndarray:
    """Return the common mask of two users, which one of them adds to its upload and the other subtracts.

    Args:
        private: Private masking key of one user.
        public: Public masking key of the other.
        pair: Names of the two users, the owner of the private key first.
        terms: Public terms of the sum, with the number of entries and the bits of each.
    """
    _owner_of_private, owner_of_public = pair
    common_secret = shared_secret(private, public, owner_of_public)
    key = derive(common_secret, "mask", terms.digest, *sorted(pair))  # sorted: the same key for both users
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
    hashes, hkdf = _primitives("hashes"), _primitives("kdf.hkdf")
    info = json.dumps(purpose).encode()
    return hkdf.HKDF(hashes.SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def public_of(private: bytes) -> bytes:
    """Return the public key of a private key of 32 random bytes."""
    private_key = _primitives("asymmetric.x25519").X25519PrivateKey.from_private_bytes(private)
    return private_key.public_key().public_bytes_raw()


def shared_secret(private: bytes, public: bytes, owner: str) -> bytes:
    """Return the X25519 secret that two users share, from the private key of one and the public key of the other.

    Args:
        private: Private key of one user.
        public: Public key of the other.
        owner: Name of the user with the public key, for the error message.

    Raises:
        MessageError: The public key is invalid.
    """
    x25519 = _primitives("asymmetric.x25519")
    try:
        public_key = x25519.X25519PublicKey.from_public_bytes(public)
        return x25519.X25519PrivateKey.from_private_bytes(private).exchange(public_key)
    except ValueError:
        raise MessageError(f"secure aggregation: invalid public key of user {owner!r}") from None


def mask(key: bytes, entries: int, word: int) -> np.ndarray:
    """Return the mask of a key: pseudorandom integers, uniform modulo ``2^word``.

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
        context: Associated data, which must be given again to :func:`unseal`.
    """
    cipher = _primitives("ciphers.aead").ChaCha20Poly1305(key)
    return cipher.encrypt(_NO_NONCE, text, context.encode())


def unseal(key: bytes, sealed: bytes, context: str) -> bytes:
    """Decrypt a text that was encrypted by :func:`seal`.

    Args:
        key: Key of the text.
        sealed: The encrypted text.
        context: Associated data that were given to :func:`seal`.

    Raises:
        MessageError: It was sealed with another key or context, or was changed.
    """
    invalid_tag = importlib.import_module("cryptography.exceptions").InvalidTag
    cipher = _primitives("ciphers.aead").ChaCha20Poly1305(key)
    try:
        return cipher.decrypt(_NO_NONCE, sealed, context.encode())
    except invalid_tag:
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
    random_bytes = stream(key, _COEFFICIENT_BYTES * (threshold - 1))
    coefficients = [int.from_bytes(secret)]  # the constant coefficient first
    for start in range(0, len(random_bytes), _COEFFICIENT_BYTES):
        coefficient_bytes = random_bytes[start : start + _COEFFICIENT_BYTES]
        coefficients.append(int.from_bytes(coefficient_bytes) % PRIME)
    return {point: _evaluate_polynomial(coefficients, point).to_bytes(SHARE_BYTES) for point in points}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Reconstruct a secret from Shamir shares, the inverse of :func:`split`.

    It is ``sum_i y_i prod_{j != i} x_j / (x_j - x_i)`` modulo ``PRIME`` (Lagrange interpolation at 0), where ``y_i`` is
    the share of the point ``x_i``.

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
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        inverse_denominator = pow(denominator, -1, PRIME)
        secret = (secret + values[point] * numerator * inverse_denominator) % PRIME
    has_invalid_share = any(value >= PRIME for value in values.values())
    is_too_long = secret >= 1 << 8 * KEY_BYTES
    if has_invalid_share or is_too_long:
        raise MessageError("secure aggregation: the shares belong to no secret")
    return secret.to_bytes(KEY_BYTES)


def _evaluate_polynomial(coefficients: Sequence[int], point: int) -> int:
    """Evaluate a polynomial modulo ``PRIME`` by Horner's rule; the constant coefficient is the first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value
