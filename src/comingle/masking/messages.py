"""What the four steps say, as messages: bytes in tensors of int8, in the order of names that both sides know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from comingle.privacy.secure.quantising import DTYPES, as_tensor, as_words
from comingle.privacy.secure.sizes import KEYS, PUBLIC, SEALED, SHARE, SHARES, VECTOR, download, upload
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
