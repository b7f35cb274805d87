"""Uploads in fewer bytes: bfloat16, or int8 with error feedback.

int8: of each row ``x`` (the last dimension) ``scale = max |x| / 127`` and ``q = round(x / scale)`` are sent, 1 byte an
entry and 4 a row. What rounding took away, ``x - q scale``, stays with the user and is added before the next upload
(Seide et al. 2014; Karimireddy et al. 2019), so that over the rounds nothing is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comingle.protocol.formats import Format
from comingle.utils.errors import MessageError
from comingle.utils.trees import Tree

SCALE = ".scale"
RESIDUAL = "residual/"
"""Under which names a user keeps what rounding took away."""

_LEVELS = 127


def compress(tensors: Tree, form: Format, left: Tree) -> tuple[Tree, Tree]:
    """What is sent, and what is left for the next time; ``left`` is what was left the last time."""
    if form == "float32":
        return tensors, {}
    if form == "bfloat16":
        return {name: t.to(torch.bfloat16) for name, t in tensors.items()}, {}
    sent: Tree = {}
    kept: Tree = {}
    for name, t in tensors.items():
        whole = t + left[name]
        scale = whole.abs().amax(-1, keepdim=True) / _LEVELS
        levels = (whole / scale.clamp(min=torch.finfo(whole.dtype).tiny)).round().clamp(-_LEVELS, _LEVELS)
        sent[name], sent[name + SCALE] = levels.to(torch.int8), scale.float()
        kept[name] = whole - _expanded(sent[name], sent[name + SCALE])
    return sent, kept


def compress_kept(tensors: Tree, form: Format, kept: Tree, users: list[int], *, remembers: bool = True) -> Tree:
    """Some users' tensors as they are sent; what is left for the next time is in ``kept``, and put there."""
    left = {name: kept[RESIDUAL + name][users] for name in tensors} if form == "int8" else {}
    sent, rest = compress(tensors, form, left)
    for name, t in rest.items() if remembers else ():
        kept[RESIDUAL + name][users] = t
    return sent


def expand(tensors: Tree, form: Format) -> Tree:
    """What was sent, as the server computes with it.

    Raises:
        MessageError: tensors of another format.
    """
    if form == "float32":
        return tensors
    wanted = torch.bfloat16 if form == "bfloat16" else torch.int8
    found = {name: t for name, t in tensors.items() if not name.endswith(SCALE)}
    for name, t in found.items():
        if t.dtype != wanted:
            raise MessageError(f"upload: tensor {name!r} is of {t.dtype}; allowed: {wanted}, as training.uploads says")
    if form == "bfloat16":
        return {name: t.float() for name, t in found.items()}
    for name, t in found.items():
        scale = tensors.get(name + SCALE)
        if scale is None or scale.shape != (*t.shape[:-1], 1) or bool((scale < 0).any()):
            raise MessageError(f"upload: tensor {name!r} has no scales that fit")
    return {name: _expanded(t, tensors[name + SCALE]) for name, t in found.items()}


def _expanded(levels: Tensor, scale: Tensor) -> Tensor:
    return levels.to(torch.float32) * scale
