"""Clipping and noise, for users' updates and for gradients of single examples.

Noise is drawn from a stream derived from the key, a purpose, and the values that the noise is added to. A resumed run
that repeats a release therefore adds the same noise, which reveals nothing new. Different values never get the same
noise: the difference of two such releases would reveal the difference of the values. Generators such as torch's are
not safe here, as their state can be computed from their output.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from comingle.config.settings import KEY
from comingle.utils.errors import RunError
from comingle.utils.records import write_new
from comingle.utils.trees import Tree


def norms(changes: Tree) -> Float[Tensor, " users"]:
    """Return the L2 norm of all tensors of each user together, ``(users,)``, float64.

    In float64 a cohort's norms are equal to those computed for each user alone.

    Args:
        changes: Tensors ``(users, *shape)``.
    """
    squared_norms = [t.double().reshape(len(t), -1).square().sum(1) for t in changes.values()]
    return torch.stack(squared_norms).sum(0).sqrt()


def scaled(changes: Tree, factors: Float[Tensor, " users"]) -> Tree:
    """Return each user's tensors ``(users, *shape)`` times the user's factor, float64."""
    return {name: t.double() * factors.view(-1, *[1] * (t.dim() - 1)).to(t.device) for name, t in changes.items()}


def capped_weights(counts: Sequence[int], cap: int | None) -> Float[Tensor, " users"]:
    """Return ``min(1, count / cap)`` of amounts of data, float64; without a cap all weights are 1."""
    return torch.tensor([1.0 if cap is None else min(1.0, count / cap) for count in counts], dtype=torch.float64)


def clipped(changes: Tree, bound: Float[Tensor, " users"] | float) -> Tree:
    """Clip each user's change to an L2 norm: return ``change * min(1, bound / norm)``, float64.

    A change with a NaN or an infinite value becomes zero, as its norm is unknown.

    Args:
        changes: Tensors ``(users, *shape)``.
        bound: Clip norm, of all users or of each.
    """
    lengths = norms(changes)
    factors = (bound / lengths.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    shortened = scaled(changes, torch.where(lengths.isfinite(), factors, 0.0))
    # 0 times NaN or infinity is NaN. Finite changes stay as they are.
    return {name: t.nan_to_num_(0.0, 0.0, 0.0) for name, t in shortened.items()}


def without_padding(tree: Tree, ranks: Tensor) -> Tree:
    """Return LoRA factors ``(users, ..., rank, width)`` with zeros in the rows beyond each user's rank.

    In a cohort, users of smaller ranks have padding there. Padding must not count in norms or get noise.

    Args:
        tree: Tensors by name; those that end in ".a" or ".b" are factors.
        ranks: Rank of each user; 0 stands for no LoRA.
    """
    if not bool(ranks.any()):
        return tree
    return {name: t * _rank_mask(t, ranks) if name.endswith((".a", ".b")) else t for name, t in tree.items()}


def _rank_mask(factor: Tensor, ranks: Tensor) -> Tensor:
    """Return 1 for rows of a LoRA factor ``(users, ..., rank, width)`` within each user's rank, 0 for padding."""
    within = torch.arange(factor.shape[-2], device=factor.device) < ranks.to(factor.device).unsqueeze(1)
    return within.view(len(ranks), *[1] * (factor.dim() - 3), factor.shape[-2], 1).to(factor)


_BITS = 53
"""Bits of a uniform number: the precision of float64."""


def gaussian(shape: tuple[int, ...], key: str, *parts: str | int) -> Tensor:
    """Return standard normal numbers, float64, by the Box-Muller transform of uniform numbers.

    The same key and parts always give the same numbers; without the key they cannot be predicted.

    Args:
        shape: Shape of the tensor.
        key: Secret key.
        parts: Purpose of the numbers, such as user, round and kind of noise.
    """
    count = int(np.prod(shape, dtype=np.int64))
    half = (count + 1) // 2
    first, second = uniform(2 * half, key, *parts).reshape(2, half)
    radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
    drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(drawn).view(shape)


def uniform(count: int, key: str, *parts: str | int) -> np.ndarray:
    """Return uniform numbers in (0, 1), float64, from a SHAKE-256 stream of the key and the parts.

    Args:
        count: How many.
        key: Secret key.
        parts: Purpose of the numbers, such as user, round and kind of draw.
    """
    stream = hashlib.shake_256(json.dumps([key, *parts]).encode("ascii")).digest(8 * count)
    # The upper 53 of each 64 bits are an integer m; (m + 0.5) / 2^53 is neither 0, whose logarithm is infinite, nor 1.
    return ((np.frombuffer(stream, dtype="<u8") >> np.uint64(64 - _BITS)) + 0.5) * 2.0**-_BITS


def add_noise(tree: Tree, deviation: float, key: str, *parts: str | int) -> Tree:
    """Return tensors with Gaussian noise, from a separate stream for each tensor, float64.

    The stream depends on the tensors' values. If a step is repeated with other values, it gets other noise. The same
    noise would cancel in the difference of both results.

    Args:
        tree: Tensors, float64.
        deviation: Standard deviation of the noise.
        key: Secret key.
        parts: Purpose of the noise.
    """
    value_digest = digest(tree)
    return {
        name: t + deviation * gaussian(tuple(t.shape), key, *parts, name, value_digest).to(t.device)
        for name, t in tree.items()
    }


def digest(tree: Tree) -> str:
    """Return the SHA-256 digest of the names and values of tensors."""
    hasher = hashlib.sha256()
    for name in sorted(tree):
        hasher.update(name.encode() + tree[name].detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def new_key() -> str:
    """Return a new random key."""
    return secrets.token_hex(32)


def load_or_create_key(folder: Path, *, begun: bool = False) -> str:
    """Return the key of a run's noise from its folder; create it if there is none and the run has not begun.

    The file is readable by its owner only.

    Args:
        folder: Folder of the run.
        begun: Whether the run has begun, so that a missing key is an error.

    Raises:
        RunError: The key is damaged, or a run that has begun has lost it.
    """
    path, key = folder / KEY, new_key()
    if begun and not path.exists():
        raise RunError(
            f"{path}: missing; another key would draw different noise; restore it, or start a new run elsewhere"
        )
    try:
        write_new(path, key.encode("ascii"), private=True)
    except FileExistsError:
        key = path.read_text(encoding="ascii", errors="replace").strip()
        if len(key) != len(new_key()):
            raise RunError(
                f"{path}: damaged; the noise would differ, so the run cannot be resumed; restore it"
            ) from None
    return key
