"""What a secure sum sends: under which names, and how many bytes; nothing here makes a key or a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from comingle.config.settings import Terms
from comingle.privacy.secure.quantising import DTYPES
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import packed_bytes

KEYS, SHARES, VECTOR = "keys", "shares", "sum"
"""By which names tensors travel: public keys, shares, and what is summed."""

KEY = 32
"""Bytes of every key and seed."""
PUBLIC = 2 * KEY
"""Bytes of a user's two public keys: that for sealing, that for masks."""
SHARE = KEY + 1
"""Bytes of a share."""
SEALED = 2 * SHARE + 16
"""Bytes of what one user sends another: two shares, encrypted and authenticated."""

_NOBODYS = torch.zeros(1, dtype=torch.int64)
"""No LoRA rank: padding is masked too."""


def upload(name: str, done: int, tensors: dict[str, Tensor]) -> Upload:
    """What a user sends of round ``done``."""
    return Upload(round=done, users=(name,), tensors=tensors, ranks=_NOBODYS)


def download(
    name: str, done: int, senders: Mapping[str, bytes] | Sequence[str], tensors: dict[str, Tensor]
) -> Download:
    """What it receives, of these others."""
    return Download(version=done, users=(name,), tensors=tensors, ranks=_NOBODYS, senders=tuple(senders))


def sent_bytes(terms: Terms, name: str, count: int) -> int:
    """What a user sends for a sum of ``count`` users, if nobody is lost."""
    done = terms.round
    vector = torch.empty((1, terms.entries), dtype=DTYPES[terms.word], device="meta")
    sealed, opened = (_empty(rows, width) for rows, width in ((count - 1, SEALED), (count, SHARE)))
    contents = ({KEYS: _empty(1, PUBLIC)}, {SHARES: sealed}, {VECTOR: vector}, {SHARES: opened})
    return sum(packed_bytes(upload(name, done, tensors))[0] for tensors in contents)


def keys_bytes(terms: Terms, name: str) -> int:
    """What a user sends for a sum of which nothing came."""
    return packed_bytes(upload(name, terms.round, {KEYS: _empty(1, PUBLIC)}))[0]


def received_bytes(terms: Terms, name: str, names: Sequence[str]) -> int:
    """What it receives for a sum of these users, besides the model."""
    done, others = terms.round, [other for other in names if other != name]
    messages = (
        download(name, done, names, {KEYS: _empty(len(names), PUBLIC)}),
        download(name, done, others, {SHARES: _empty(len(others), SEALED)}),
        download(name, done, names, {}),
    )
    return sum(packed_bytes(message)[0] for message in messages)


def _empty(rows: int, width: int) -> Tensor:
    return torch.empty((1, rows, width), dtype=torch.int8, device="meta")
