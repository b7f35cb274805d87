"""Keys, pairwise masks and Shamir shares of secure aggregation.

X25519 (RFC 7748), HKDF-SHA256 (RFC 5869) with a text that says what for, ChaCha20 (RFC 8439) as the stream of masks,
and ChaCha20-Poly1305 for shares; all of them from the package ``cryptography``. Every key is for one purpose and one
message, so nonces are zero.

The secret is the value at 0 of a polynomial of degree ``threshold - 1`` over the integers modulo a prime, whose other
coefficients are uniform; a share is its value at a user's point. For any ``threshold - 1`` shares and any secret there
is exactly one such polynomial.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from comingle.privacy.secure_sum import KEY, SHARE
from comingle.utils.errors import MessageError, RecipeError

_NO_NONCE, _NO_COUNTER = bytes(12), bytes(16)
_TYPES = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


@cache
def _part(name: str) -> Any:
    """A module of ``cryptography``, which needs not be there where nothing is sent over a network.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        return importlib.import_module(f"cryptography.hazmat.primitives.{name}")
    except ImportError:
        raise RecipeError(
            "privacy.secure_aggregation: needs the package cryptography: pip install 'comingle[flower]'"
        ) from None


def derive(secret: bytes, *purpose: str | int) -> bytes:
    """A key for one purpose out of a secret."""
    made = _part("kdf.hkdf").HKDF(_part("hashes").SHA256(), KEY, None, json.dumps(purpose).encode())
    return made.derive(secret)


def public_of(private: bytes) -> bytes:
    """The public half of a key of 32 random bytes."""
    return _part("asymmetric.x25519").X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """What two users have in common, each of its own private and the other's public key.

    Raises:
        MessageError: the public key is none.
    """
    x25519 = _part("asymmetric.x25519")
    try:
        other = x25519.X25519PublicKey.from_public_bytes(public)
        return x25519.X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError:
        raise MessageError("secure aggregation: a public key that is none") from None


def mask(key: bytes, entries: int, word: int) -> np.ndarray:
    """``entries`` numbers that are uniform modulo ``2^word`` for whoever has not the key."""
    kind = _TYPES[word]
    return np.frombuffer(stream(key, entries * kind.itemsize), dtype=kind)


def stream(key: bytes, count: int) -> bytes:
    """So many bytes of a key's stream."""
    ciphers = _part("ciphers")
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, _NO_COUNTER), None)
    return cipher.encryptor().update(bytes(count))


def seal(key: bytes, text: bytes, about: str) -> bytes:
    """A text for who has the key: encrypted, and bound to what it is about. A key seals one text."""
    return _part("ciphers.aead").ChaCha20Poly1305(key).encrypt(_NO_NONCE, text, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes:
    """The text.

    Raises:
        MessageError: it was sealed with another key, for something else, or has changed on the way.
    """
    invalid = importlib.import_module("cryptography.exceptions").InvalidTag
    try:
        return _part("ciphers.aead").ChaCha20Poly1305(key).decrypt(_NO_NONCE, sealed, about.encode())
    except invalid:
        raise MessageError("secure aggregation: a share that its sender has not sealed") from None


PRIME = 2**256 + 297
"""The smallest prime above all secrets of 32 bytes."""

_WIDE = 48
"""Bytes of which a coefficient is made: modulo the prime they are uniform to one part in 2^127."""


def split(secret: bytes, points: Sequence[int], threshold: int, key: bytes) -> dict[int, bytes]:
    """The shares of a secret of 32 bytes at some points from 1; the coefficients are those of a secret key's stream."""
    assert len(secret) == KEY
    assert all(0 < point < PRIME for point in points)
    drawn = stream(key, _WIDE * (threshold - 1))
    wide = [drawn[at : at + _WIDE] for at in range(0, len(drawn), _WIDE)]
    coefficients = [int.from_bytes(secret), *(int.from_bytes(one) % PRIME for one in wide)]
    return {point: _value(coefficients, point).to_bytes(SHARE) for point in points}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, out of at least ``threshold`` shares by their points.

    Raises:
        MessageError: they are fewer, or are shares of no secret.
    """
    if len(shares) < threshold:
        raise MessageError(f"secure aggregation: {len(shares)} shares; needed: {threshold}")
    points = sorted(shares)[:threshold]
    values = {point: int.from_bytes(shares[point]) for point in points}
    secret = 0
    for point in points:  # Lagrange's polynomials at 0
        above = below = 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        secret = (secret + values[point] * above * pow(below, -1, PRIME)) % PRIME
    if any(value >= PRIME for value in values.values()) or secret >= 1 << 8 * KEY:
        raise MessageError("secure aggregation: shares of no secret")
    return secret.to_bytes(KEY)


def _value(coefficients: Sequence[int], point: int) -> int:
    """Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value
