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
    """Return the L2 norm of each user's change, over all of its tensors together; float64.

    Args:
        changes: Tensors ``(users, *shape)``.
    """
    squared_norms = [t.double().reshape(len(t), -1).square().sum(1) for t in changes.values()]
    return torch.stack(squared_norms).sum(0).sqrt()


def scaled(changes: Tree, factors: Float[Tensor, " users"]) -> Tree:
    """Return each user's tensors ``(users, *shape)`` times the user's factor, float64."""
    products: Tree = {}
    for name, t in changes.items():
        trailing_ones = [1] * (t.dim() - 1)
        products[name] = t.double() * factors.view(-1, *trailing_ones).to(t.device)
    return products


def capped_weights(counts: Sequence[int], cap: int | None) -> Float[Tensor, " users"]:
    """Return users' weights ``min(1, count / cap)`` from their amounts of data, float64; 1 without a cap."""
    if cap is None:
        return torch.ones(len(counts), dtype=torch.float64)
    return torch.tensor([min(1.0, count / cap) for count in counts], dtype=torch.float64)


def clipped(changes: Tree, bound: Float[Tensor, " users"] | float) -> Tree:
    """Clip each user's change to an L2 norm: return ``change * min(1, bound / norm)``, float64.

    A change with a NaN or an infinite value becomes zero.

    Args:
        changes: Tensors ``(users, *shape)``.
        bound: Clip norm, of all users or of each.
    """
    lengths = norms(changes)
    tiny = torch.finfo(torch.float64).tiny  # avoids a division by zero
    factors = (bound / lengths.clamp(min=tiny)).clamp(max=1.0)
    factors = torch.where(lengths.isfinite(), factors, 0.0)
    clipped_changes = scaled(changes, factors)
    for t in clipped_changes.values():
        t.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # 0 times NaN or infinity is NaN
    return clipped_changes


def without_padding(tree: Tree, ranks: Tensor) -> Tree:
    """Return tensors in which the rows of LoRA factors beyond each user's rank, which are padding, are zero.

    Args:
        tree: Tensors by name. Names of LoRA factors ``(users, ..., rank, width)`` end in ".a" or ".b".
        ranks: LoRA rank of each user; 0 for users without LoRA.
    """
    has_no_lora = not bool(ranks.any())
    if has_no_lora:
        return tree
    unpadded: Tree = {}
    for name, t in tree.items():
        is_factor = name.endswith((".a", ".b"))
        unpadded[name] = t * _rank_mask(t, ranks) if is_factor else t
    return unpadded


def _rank_mask(factor: Tensor, ranks: Tensor) -> Tensor:
    """Return 1 for rows of a LoRA factor ``(users, ..., rank, width)`` within each user's rank, 0 for padding.

    The mask has the shape ``(users, 1, ..., rank, 1)``.
    """
    max_rank = factor.shape[-2]
    rows = torch.arange(max_rank, device=factor.device)
    is_within = rows < ranks.to(factor.device).unsqueeze(1)  # (users, rank)
    middle_ones = [1] * (factor.dim() - 3)
    return is_within.view(len(ranks), *middle_ones, max_rank, 1).to(factor)


_BITS = 53
"""Bits of a uniform number: the precision of float64."""


def gaussian(shape: tuple[int, ...], key: str, *purpose: str | int) -> Tensor:
    """Return standard normal numbers, float64, by the Box-Muller transform of uniform numbers.

    The same key and purpose always give the same numbers; without the key they cannot be predicted.

    Args:
        shape: Shape of the tensor.
        key: Secret key.
        purpose: Purpose of the numbers, such as user, round and kind of noise.
    """
    count = int(np.prod(shape, dtype=np.int64))
    num_pairs = (count + 1) // 2  # Each pair of uniform numbers gives a pair of normal numbers.
    first, second = uniform(2 * num_pairs, key, *purpose).reshape(2, num_pairs)
    radius = np.sqrt(-2.0 * np.log(first))
    angle = 2.0 * np.pi * second
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(normal).view(shape)


def uniform(count: int, key: str, *purpose: str | int) -> np.ndarray:
    """Return uniform numbers in (0, 1), float64, from a SHAKE-256 stream of a key and a purpose.

    Args:
        count: Number of uniform numbers.
        key: Secret key.
        purpose: Purpose of the numbers, such as user, round and kind of draw.
    """
    stream = hashlib.shake_256(json.dumps([key, *purpose]).encode("ascii")).digest(8 * count)
    # m are integers of 53 bits, the upper ones of each 64 bits; (m + 0.5) / 2^53 is never 0 or 1.
    m = np.frombuffer(stream, dtype="<u8") >> np.uint64(64 - _BITS)
    return (m + 0.5) * 2.0**-_BITS


def add_noise(tree: Tree, deviation: float, key: str, *purpose: str | int) -> Tree:
    """Return tensors plus Gaussian noise, float64.

    The noise depends on the tensors' values, too. If a repeated round with other values drew the same noise, the noise
    would cancel in the difference of both results.

    Args:
        tree: Tensors, float64.
        deviation: Standard deviation of the noise.
        key: Secret key.
        purpose: Purpose of the noise.
    """
    values_digest = digest(tree)
    noisy: Tree = {}
    for name, t in tree.items():
        standard_noise = gaussian(tuple(t.shape), key, *purpose, name, values_digest)
        noisy[name] = t + deviation * standard_noise.to(t.device)
    return noisy


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
    """Return the key of a run's noise from its folder; create it if the run has not begun.

    Args:
        folder: Folder of the run.
        begun: Whether the run has begun, so that a missing key is an error.

    Raises:
        RunError: The key is damaged, or the run has begun and its key is missing.
    """
    path = folder / KEY
    if begun and not path.exists():
        raise RunError(
            f"{path}: missing; another key would draw different noise; restore it, or start a new run elsewhere"
        )
    key = new_key()
    try:
        write_new(path, key.encode("ascii"), private=True)  # readable by its owner only
    except FileExistsError:
        stored_key = path.read_text(encoding="ascii", errors="replace").strip()
        if len(stored_key) != len(key):
            raise RunError(
                f"{path}: damaged; the noise would differ, so the run cannot be resumed; restore it"
            ) from None
        return stored_key
    return key
