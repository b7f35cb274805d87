"""Random streams derived from seed, user, round and purpose.

A run that stops and resumes, a user trained alone and a user trained in a cohort all draw the same numbers, because
the seed of every stream is a function of (seed, user, round, purpose) and nothing else.
"""

from __future__ import annotations

import hashlib
import json

import torch


def derive(*parts: str | int) -> int:
    """Return a seed in ``[0, 2**63)``: the first 63 bits of SHA-256 of the parts as a JSON list.

    JSON distinguishes types and boundaries: ``("a", "b")``, ``("ab",)``, ``("1",)`` and ``(1,)`` give four seeds.

    Args:
        *parts: The run's seed, the user, the round and the purpose of the stream, for example.
    """
    digest = hashlib.sha256(json.dumps(parts).encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: str | int, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a new generator, seeded with :func:`derive` of the parts."""
    return torch.Generator(device=device).manual_seed(derive(*parts))
