"""Shamir's secret sharing (1979): any ``threshold`` shares give the secret, and fewer say nothing about it.

The secret is the value at 0 of a polynomial of degree ``threshold - 1`` over the integers modulo a prime, whose other
coefficients are uniform; a share is its value at a user's point. For any ``threshold - 1`` shares and any secret there
is exactly one such polynomial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comingle.masking.keys import stream
from comingle.privacy.secure.sizes import KEY, SHARE
from comingle.utils.errors import MessageError

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
