"""Whether a message is what it says: from whom, of which round, with the right tensors, all of them finite."""

from __future__ import annotations

import torch
from torch import Tensor

from comingle.errors import MessageError
from comingle.protocol.messages import Download, Upload
from comingle.trees import Layout, Tree, restrict

_FACTORS = (".a", ".b")


def check_upload(upload: Upload, layout: Layout, shared: frozenset[str], *, user: str, number: int) -> None:
    """Whether an upload is a user's own of round ``number`` (from 1).

    Raises:
        MessageError: it is not; says what is wrong.
    """
    if upload.users != (user,):
        raise MessageError(f"upload: from user {user!r}, in the name of {upload.users[0]!r}")
    if upload.round != number:
        raise MessageError(f"upload: of round {upload.round}; now it is round {number}")
    _check_tensors("upload", upload.tensors, layout, shared, leading=0, rank=int(upload.ranks[0]))
    for name, t in upload.reports.items():
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise MessageError(f"upload: {name} is not finite")


def check_download(download: Download, layout: Layout, shared: frozenset[str], *, user: str) -> None:
    """Whether a download is for this user, of what its method shares.

    Raises:
        MessageError: it is not.
    """
    if download.users != (user,):
        raise MessageError(f"download: for {download.users[0]!r}, and this is user {user!r}")
    _check_tensors("download", download.tensors, layout, shared, leading=1, rank=int(download.ranks[0]))


def _check_tensors(
    what: str, tensors: Tree, layout: Layout, shared: frozenset[str], *, leading: int, rank: int
) -> None:
    """Every shared tensor and no other, ``(1, [models,] *shape)``, LoRA factors of the user's rank."""
    wanted = _shapes(layout, shared, rank)
    for name in sorted(wanted.keys() | tensors.keys()):
        got = tuple(tensors[name].shape[1 + leading :]) if name in tensors else None
        if name not in wanted or got not in wanted[name]:
            allowed = wanted[name][0] if name in wanted else "none of this name"
            raise MessageError(f"{what}: tensor {name!r} has shape {got}; allowed: {allowed}")
        if not _is_finite(tensors[name]):
            raise MessageError(f"{what}: tensor {name!r} is not finite")


def _shapes(layout: Layout, shared: frozenset[str], rank: int) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that each shared tensor may have: cut to the rank, or as wide as the widest user's."""
    whole = {name: tuple(t.shape[1:]) for name, t in restrict(_empty(layout), layout, shared).items()}
    return {name: [_cut(name, shape, rank), shape] for name, shape in whole.items()}


def _empty(layout: Layout) -> Tree:
    return layout.views(torch.zeros(1, layout.columns, device="meta"))


def _cut(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if not rank or not name.endswith(_FACTORS):
        return shape
    return (*shape[:-2], min(rank, shape[-2]), shape[-1])


def _is_finite(t: Tensor) -> bool:
    return not t.is_floating_point() or bool(t.isfinite().all())
