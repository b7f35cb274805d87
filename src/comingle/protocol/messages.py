"""Messages between clients and server, and their compression.

Nothing else passes between the two halves: a :class:`Download` from the server, an :class:`Upload` back.

int8: of each row ``x`` (the last dimension) ``scale = max |x| / 127`` and ``q = round(x / scale)`` are sent, 1 byte an
entry and 4 a row. What rounding took away, ``x - q scale``, stays with the user and is added before the next upload
(Seide et al. 2014; Karimireddy et al. 2019), so that over the rounds nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from comingle.protocol import Format
from comingle.utils.errors import MessageError
from comingle.utils.trees import Layout, Tree

LOSS, COUNT = "loss", "count"
"""Reports of every user: its mean training loss in nats, and where means are weighted by it, its amount of data."""

VALIDATION = "validation_loss"
"""Report of every user, without tensors, in runs that end with the models of the best round."""
LOWEST = "lowest_loss"
"""The server's answer to validation losses: whether their mean is the lowest so far."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """What the server sends to ``users``: models, of which each user makes one.

    Tensors are ``(users, models, *shape)``: one model that all have in common (a view: it is not copied), one for each
    user, candidates to choose from, or what ``senders`` have uploaded, in their order. ``version`` is the
    number of rounds after which the server last aggregated, 0 before the first. ``ranks`` are the users' LoRA ranks, to
    which what travels is cut; 0 where there are none.
    """

    version: int
    users: tuple[str, ...]
    tensors: Tree
    ranks: Int[Tensor, " users"]
    senders: tuple[str, ...] = ()

    def of(self, at: int) -> Download:
        """One user's own message; its tensors are views."""
        name = self.users[at : at + 1]
        return replace(self, users=name, tensors=_row(self.tensors, at), ranks=self.ranks[at : at + 1])

    def split(self) -> list[Download]:
        """Each user's own."""
        return [self.of(at) for at in range(len(self.users))]


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What ``users`` send after their local steps of a round: shared tensors ``(users, *shape)``, and numbers.

    Tensors are copies of users' rows, never views. ``reports`` are the few numbers ``(users, ...)`` that the method
    declares, and :data:`LOSS` and :data:`COUNT`. ``ranks`` are the users' LoRA ranks, 0 where there are none: tensors
    of a smaller rank than others are filled up with zeros.
    """

    round: int
    users: tuple[str, ...]
    tensors: Tree
    ranks: Int[Tensor, " users"]
    reports: Tree = field(default_factory=dict)

    def of(self, at: int) -> Upload:
        """One user's own message; its tensors are views."""
        of_user = {"users": self.users[at : at + 1], "ranks": self.ranks[at : at + 1]}
        return replace(self, **of_user, tensors=_row(self.tensors, at), reports=_row(self.reports, at))

    def split(self) -> list[Upload]:
        """Each user's own."""
        return [self.of(at) for at in range(len(self.users))]


def no_uploads(done: int) -> Upload:
    """What the server has after round ``done`` if nobody takes part in it."""
    return Upload(round=done, users=(), tensors={}, ranks=torch.zeros(0, dtype=torch.int64))


def validation_report(losses: Mapping[str, float], done: int) -> Upload:
    """What users say of their models after ``done`` rounds: each its mean validation loss, and no tensors."""
    return Upload(
        round=done,
        users=tuple(losses),
        tensors={},
        ranks=torch.zeros(len(losses), dtype=torch.int64),
        reports={VALIDATION: torch.tensor(list(losses.values()), dtype=torch.float64)},
    )


def verdict(users: Sequence[str], done: int, *, lowest: bool) -> Download:
    """What users hear of that: whether their mean validation loss after ``done`` rounds is the lowest so far."""
    return Download(
        version=done,
        users=tuple(users),
        tensors={LOWEST: torch.full((len(users), 1), int(lowest))},
        ranks=torch.zeros(len(users), dtype=torch.int64),
    )


Message = TypeVar("Message", Upload, Download)


def join_uploads(parts: Sequence[Upload]) -> Upload:
    """Several users' uploads of one round as one, tensors of a smaller rank filled up with zeros."""
    first = parts[0]
    assert all(part.round == first.round for part in parts)
    reports = {name: torch.cat([part.reports[name] for part in parts]) for name in first.reports}
    return replace(_join(parts), reports=reports)


def join_downloads(parts: Sequence[Download]) -> Download:
    """Several users' downloads of one version as one, tensors of a smaller rank filled up with zeros."""
    assert all(part.version == parts[0].version for part in parts)
    return _join(parts)


def _join(parts: Sequence[Message]) -> Message:
    """The first, with what all messages have of every user."""
    return replace(
        parts[0],
        users=tuple(user for part in parts for user in part.users),
        tensors={name: _together([part.tensors[name] for part in parts]) for name in parts[0].tensors},
        ranks=torch.cat([part.ranks for part in parts]),
    )


def fill_ranks(tensors: Tree, layout: Layout) -> Tree:
    """LoRA factors ``(..., rank, width)`` filled up with zeros to the largest rank that a user may have."""
    wanted = {slot.name: slot.shape[-2] for slot in layout.slots if slot.name.endswith((".a", ".b"))}
    return {name: _filled(t, wanted[name]) if name in wanted else t for name, t in tensors.items()}


def insert_own(models: Tree, own: Tree, at: Sequence[int]) -> Tree:
    """Models ``(users, others, *shape)`` with each user's own ``(users, *shape)`` among them, at its place."""
    parts = {
        name: [torch.cat([t[i, :k], own[name][i : i + 1], t[i, k:]]) for i, k in enumerate(at)]
        for name, t in models.items()
    }
    return {name: torch.stack(part) for name, part in parts.items()}


def _filled(factor: Tensor, rank: int) -> Tensor:
    missing = rank - factor.shape[-2]
    return torch.nn.functional.pad(factor, (0, 0, 0, missing)) if missing > 0 else factor


def _row(tree: Tree, at: int) -> Tree:
    return {name: t[at : at + 1] for name, t in tree.items()}


def _together(parts: Sequence[Tensor]) -> Tensor:
    """``(users, ..., rank, width)`` of different ranks, one after the other."""
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    most = max(part.shape[-2] for part in parts)
    return torch.cat([_filled(part, most) for part in parts])


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
