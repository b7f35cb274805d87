"""Clipping and noise, for users' updates and for gradients of single examples.

A stream is derived from the key, what it is for, and what it is added to. So the same release made again, by a run
that goes on after a stop, has the same noise, which reveals nothing new; and another one never has, as the difference
of two releases with one noise would be the difference of what was to be hidden. Generators as torch's are for
simulation: their state can be computed from what they have drawn.
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
    """L2 norm of everything that a user would send, float64, so that a cohort's are those of its users alone."""
    return torch.stack([t.double().reshape(len(t), -1).square().sum(1) for t in changes.values()]).sum(0).sqrt()


def scaled(changes: Tree, factors: Float[Tensor, " users"]) -> Tree:
    """Each user's tensors times a number of its own, float64."""
    return {name: t.double() * factors.view(-1, *[1] * (t.dim() - 1)).to(t.device) for name, t in changes.items()}


def capped_weights(counts: Sequence[int], cap: int | None) -> Float[Tensor, " users"]:
    """Return ``min(1, count / cap)`` of amounts of data, float64; without a cap all weights are 1."""
    return torch.tensor([1.0 if cap is None else min(1.0, count / cap) for count in counts], dtype=torch.float64)


def clipped(changes: Tree, bound: Float[Tensor, " users"] | float) -> Tree:
    """``change * min(1, bound / norm)``, float64; what is not finite becomes zero."""
    lengths = norms(changes)
    factors = (bound / lengths.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    kept = scaled(changes, torch.where(lengths.isfinite(), factors, 0.0))
    return {name: t.nan_to_num_(0.0, 0.0, 0.0) for name, t in kept.items()}  # of finite changes nothing is changed


def without_padding(tree: Tree, ranks: Tensor) -> Tree:
    """LoRA factors ``(users, ..., rank, width)`` with zeros beyond each user's rank; 0 stands for no LoRA."""
    if not bool(ranks.any()):
        return tree
    return {name: t * _real(t, ranks) if name.endswith((".a", ".b")) else t for name, t in tree.items()}


def _real(factor: Tensor, ranks: Tensor) -> Tensor:
    within = torch.arange(factor.shape[-2], device=factor.device) < ranks.to(factor.device).unsqueeze(1)
    return within.view(len(ranks), *[1] * (factor.dim() - 3), factor.shape[-2], 1).to(factor)


_BITS = 53


def gaussian(shape: tuple[int, ...], key: str, *parts: str | int) -> Tensor:
    """Standard normal numbers, float64, by Box and Muller's transform of a keyed stream."""
    count = int(np.prod(shape, dtype=np.int64))
    half = (count + 1) // 2
    first, second = uniform(2 * half, key, *parts).reshape(2, half)
    radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
    drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(drawn).view(shape)


def uniform(count: int, key: str, *parts: str | int) -> np.ndarray:
    """Numbers in (0, 1), float64."""
    stream = hashlib.shake_256(json.dumps([key, *parts]).encode("ascii")).digest(8 * count)
    return ((np.frombuffer(stream, dtype="<u8") >> np.uint64(64 - _BITS)) + 0.5) * 2.0**-_BITS


def add_noise(tree: Tree, deviation: float, key: str, *parts: str | int) -> Tree:
    """Each tensor, float64, with noise of its own."""
    stamp = digest(tree)
    return {
        name: t + deviation * gaussian(tuple(t.shape), key, *parts, name, stamp).to(t.device)
        for name, t in tree.items()
    }


def digest(tree: Tree) -> str:
    """A name of what a tree holds."""
    seen = hashlib.sha256()
    for name in sorted(tree):
        seen.update(name.encode() + tree[name].detach().cpu().contiguous().numpy().tobytes())
    return seen.hexdigest()


def new_key() -> str:
    """A key that nobody knows."""
    return secrets.token_hex(32)


def kept_key(folder: Path, *, begun: bool = False) -> str:
    """The key in a folder, readable by its owner alone; made where there is none, unless a run has ``begun`` with one.

    Raises:
        RunError: it is there and is no key, or is gone.
    """
    path, key = folder / KEY, new_key()
    if begun and not path.exists():
        raise RunError(f"{path}: gone; another key would draw other noise, so restore it, or begin anew elsewhere")
    try:
        write_new(path, key.encode("ascii"), private=True)
    except FileExistsError:
        key = path.read_text(encoding="ascii", errors="replace").strip()
        if len(key) != len(new_key()):
            raise RunError(f"{path}: damaged; noise would not be what it was, so the run cannot go on") from None
    return key
