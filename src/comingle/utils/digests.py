"""Digests of what users have: equal if and only if the data is."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor


def digest_split(part: Any) -> str:
    """The digest of a stream of tokens, or of what says what its ``contents`` are."""
    return digest_all(*getattr(part, "contents", (part,)))


def digest_all(*parts: Tensor | Any) -> str:
    """SHA-256 over tensors (kind, shape and content) and what JSON can hold, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        if not isinstance(part, Tensor):
            digest.update(json.dumps(part, sort_keys=True).encode())
            continue
        plain = part.detach().cpu().contiguous()
        digest.update(json.dumps([str(plain.dtype), *plain.shape]).encode())
        if plain.numel():
            digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
