"""Messages between clients and server, and their compression.

Clients and server exchange nothing but these messages: a :class:`Download` from the server, an :class:`Upload` to it.

int8 quantises each row ``x`` (the last dimension): ``scale = max |x| / 127``, ``q = round(x / scale)``. An upload has 1
byte per entry and 4 per row. The client keeps the rounding error ``x - q scale`` and adds it to the next upload (error
feedback: Seide et al. 2014; Karimireddy et al. 2019), so that no part of an update is lost over the rounds.
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
"""Reports of every user: mean training loss in nats and, where means are weighted by it, amount of data."""

STEPS = "local_steps"
"""Report of every user, with a time limit or normalised steps: number of local steps that it took in the round."""

VALIDATION = "validation_loss"
"""Report that every user sends, without tensors, in runs that end with the models of the best round."""
LOWEST = "lowest_loss"
"""Tensor with which the server replies to validation losses: 1 if their mean is the lowest so far, else 0."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """Message from the server to ``users``: models, from which each user makes one.

    Args:
        version: Number of rounds after which the server last aggregated; 0 before the first.
        users: The receivers.
        tensors: ``(users, models, *shape)``: one model common to all (a view, not a copy), one for each user,
            candidates to choose from, or the uploads of ``senders``, in their order.
        ranks: The users' LoRA ranks, to which tensors are cut before they are sent; 0 without LoRA.
        senders: Users whose uploads ``tensors`` contains; empty otherwise.
    """

    version: int
    users: tuple[str, ...]
    tensors: Tree
    ranks: Int[Tensor, " users"]
    senders: tuple[str, ...] = ()

    def of_user(self, index: int) -> Download:
        """Return one user's message, whose tensors are views.

        Args:
            index: Index of the user in ``users``.
        """
        one = slice(index, index + 1)
        return replace(self, users=self.users[one], tensors=_slice_users(self.tensors, one), ranks=self.ranks[one])

    def split(self) -> list[Download]:
        """Return one message per user."""
        return [self.of_user(index) for index in range(len(self.users))]


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Message from ``users`` to the server after their local steps of a round.

    Args:
        round: The round.
        users: The senders.
        tensors: Shared tensors ``(users, *shape)``: copies of the users' rows, never views. Those of a smaller rank are
            padded with zeros.
        ranks: The users' LoRA ranks; 0 without LoRA.
        reports: Numbers ``(users, ...)`` that the method declares, and :data:`LOSS`, :data:`COUNT` and :data:`STEPS`.
    """

    round: int
    users: tuple[str, ...]
    tensors: Tree
    ranks: Int[Tensor, " users"]
    reports: Tree = field(default_factory=dict)

    def of_user(self, index: int) -> Upload:
        """Return one user's message, whose tensors are views.

        Args:
            index: Index of the user in ``users``.
        """
        one = slice(index, index + 1)
        return replace(
            self,
            users=self.users[one],
            tensors=_slice_users(self.tensors, one),
            ranks=self.ranks[one],
            reports=_slice_users(self.reports, one),
        )

    def split(self) -> list[Upload]:
        """Return one message per user."""
        return [self.of_user(index) for index in range(len(self.users))]


def no_uploads(round_number: int) -> Upload:
    """Return an upload of no users, for a round without participants.

    Args:
        round_number: The round, counted from 1.
    """
    return Upload(round=round_number, users=(), tensors={}, ranks=torch.zeros(0, dtype=torch.int64))


def validation_report(losses: Mapping[str, float], done: int) -> Upload:
    """Return an upload without tensors that reports each user's mean validation loss after ``done`` rounds.

    Args:
        losses: Mean validation loss, in nats, by user.
        done: Number of rounds after which the losses were computed.
    """
    loss_values = torch.tensor(list(losses.values()), dtype=torch.float64)
    return Upload(
        round=done,
        users=tuple(losses),
        tensors={},
        ranks=torch.zeros(len(losses), dtype=torch.int64),
        reports={VALIDATION: loss_values},
    )


def validation_reply(users: Sequence[str], done: int, *, lowest: bool) -> Download:
    """Return the server's reply to :func:`validation_report`: whether the models of this round are the best so far.

    If they are, each client keeps its own, to return it at the end of the run (``evaluation.select: best``).

    Args:
        users: Names of the users who receive it.
        done: The number of rounds after which the models were validated.
        lowest: Whether the mean validation loss over all users of the run is the lowest so far.
    """
    return Download(
        version=done,
        users=tuple(users),
        tensors={LOWEST: torch.full((len(users), 1), int(lowest))},
        ranks=torch.zeros(len(users), dtype=torch.int64),  # LoRA ranks: the message has no model tensors
    )


Message = TypeVar("Message", Upload, Download)


def join_uploads(uploads: Sequence[Upload]) -> Upload:
    """Join the uploads of several users in one round; pad LoRA factors of a smaller rank with zeros."""
    first = uploads[0]
    assert all(upload.round == first.round for upload in uploads)
    reports = {name: torch.cat([upload.reports[name] for upload in uploads]) for name in first.reports}
    joined = _join(uploads)
    return replace(joined, reports=reports)


def join_downloads(downloads: Sequence[Download]) -> Download:
    """Join the downloads of several users, of the same version; pad LoRA factors of a smaller rank with zeros."""
    assert all(download.version == downloads[0].version for download in downloads)
    return _join(downloads)


def _join(messages: Sequence[Message]) -> Message:
    """Return one message with the users, tensors and ranks of all messages, and everything else from the first."""
    first = messages[0]
    users: list[str] = []
    for message in messages:
        users += message.users
    tensors: Tree = {}
    for name in first.tensors:
        tensors[name] = _join_padded([message.tensors[name] for message in messages])
    ranks = torch.cat([message.ranks for message in messages])
    return replace(first, users=tuple(users), tensors=tensors, ranks=ranks)


def fill_ranks(tensors: Tree, layout: Layout) -> Tree:
    """Pad LoRA factors ``(..., rank, width)`` with zeros to the ranks in ``layout``, the largest of all users.

    Messages contain each user's factors cut to its own rank.

    Args:
        tensors: Tensors of messages; names that end in ".a" or ".b" are LoRA factors.
        layout: Layout of the model's tensors.
    """
    rank_by_factor = {slot.name: slot.shape[-2] for slot in layout.slots if slot.name.endswith((".a", ".b"))}
    filled: Tree = {}
    for name, t in tensors.items():
        is_factor = name in rank_by_factor
        filled[name] = _pad_rank(t, rank_by_factor[name]) if is_factor else t
    return filled


def insert_own(downloaded_models: Tree, own_models: Tree, own_indices: Sequence[int]) -> Tree:
    """Insert each user's own model among the models of other users that it has downloaded.

    A download leaves out the receiver's own model, which the receiver has already.

    Args:
        downloaded_models: Models of the other users, ``(users, others, *shape)`` by name.
        own_models: The users' own models, ``(users, *shape)`` by name.
        own_indices: Index of each user's own model among all models of the result, from 0 to ``others``.

    Returns:
        Tensors ``(users, others + 1, *shape)``.
    """
    complete: Tree = {}
    for name, downloaded in downloaded_models.items():
        models_by_user = []
        for user, index in enumerate(own_indices):
            own_model = own_models[name][user : user + 1]  # (1, *shape)
            models_by_user.append(torch.cat([downloaded[user, :index], own_model, downloaded[user, index:]]))
        complete[name] = torch.stack(models_by_user)
    return complete


def _pad_rank(factor: Tensor, rank: int) -> Tensor:
    """Pad a LoRA factor ``(..., rank, width)`` with zeros to ``rank``; a factor of at least that rank is unchanged."""
    num_missing = rank - factor.shape[-2]
    if num_missing <= 0:
        return factor
    return torch.nn.functional.pad(factor, (0, 0, 0, num_missing))


def _slice_users(tree: Tree, users: slice) -> Tree:
    """Return the tensors ``(users, ...)`` of some users, as views."""
    return {name: t[users] for name, t in tree.items()}


def _join_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along users; LoRA factors ``(users, ..., rank, width)`` are padded to the largest rank."""
    have_equal_shapes = len({t.shape[1:] for t in tensors}) == 1  # besides the number of users
    if have_equal_shapes:
        return torch.cat(list(tensors))
    largest_rank = max(t.shape[-2] for t in tensors)
    return torch.cat([_pad_rank(t, largest_rank) for t in tensors])


SCALE = ".scale"
RESIDUAL = "residual/"
"""Prefix of the names under which a client keeps the rounding error."""

_MAX_LEVEL = 127


def compress(tensors: Tree, number_format: Format, residuals: Tree) -> tuple[Tree, Tree]:
    """Compress tensors for an upload.

    int8 adds the residual (rounding error) of the previous upload to each row (error feedback), and stores the sum
    ``x`` as ``round(x / scale)`` with ``scale = max |x| / 127``.

    Args:
        tensors: ``(..., width)`` by name.
        number_format: The number format of uploads.
        residuals: The residuals of the previous upload, by name; used by int8 only.

    Returns:
        The tensors to send and the new residuals. int8 sends the levels ``round(x / scale)`` as ``NAME`` and the
        scales ``(..., 1)`` as ``NAME.scale``; other formats have no residuals.
    """
    no_residuals: Tree = {}
    if number_format == "float32":
        return tensors, no_residuals
    if number_format == "bfloat16":
        return {name: t.to(torch.bfloat16) for name, t in tensors.items()}, no_residuals
    sent: Tree = {}
    new_residuals: Tree = {}
    for name, t in tensors.items():
        x = t + residuals[name]
        scale = x.abs().amax(-1, keepdim=True) / _MAX_LEVEL
        nonzero_scale = scale.clamp(min=torch.finfo(x.dtype).tiny)
        levels = (x / nonzero_scale).round().clamp(-_MAX_LEVEL, _MAX_LEVEL)
        sent[name] = levels.to(torch.int8)
        sent[name + SCALE] = scale.float()
        new_residuals[name] = x - _dequantise(sent[name], sent[name + SCALE])
    return sent, new_residuals


def compress_with_feedback(
    tensors: Tree, number_format: Format, client_state: Tree, users: list[int], *, store_residuals: bool = True
) -> Tree:
    """Compress uploads with error feedback: add the residuals of the previous uploads, and store the new residuals.

    A residual is the rounding error of an int8 upload. Other formats have none and do not use the client state.

    Args:
        tensors: ``(users, ..., width)`` by name.
        number_format: The number format of uploads.
        client_state: Tensors that clients keep, with a row for each user; residuals are named ``residual/NAME`` and
            updated in place.
        users: Rows of ``client_state`` to which the tensors belong.
        store_residuals: Store the new residuals. False for an upload that is never sent, only made to count its bytes.

    Returns:
        The tensors to send.
    """
    residuals: Tree = {}
    if number_format == "int8":
        residuals = {name: client_state[RESIDUAL + name][users] for name in tensors}
    sent, new_residuals = compress(tensors, number_format, residuals)
    if store_residuals:
        for name, t in new_residuals.items():
            client_state[RESIDUAL + name][users] = t
    return sent


def decompress(tensors: Tree, number_format: Format) -> Tree:
    """Return uploaded tensors in float32, the inverse of :func:`compress` up to rounding.

    Args:
        tensors: Uploaded tensors by name. For int8 they are the levels ``round(x / scale)`` as ``NAME`` and the scales
            ``(..., 1)`` as ``NAME.scale``.
        number_format: The number format of uploads.

    Raises:
        MessageError: The tensors are of another format, or int8 levels have no scales that fit.
    """
    if number_format == "float32":
        return tensors
    dtype_of_format = torch.bfloat16 if number_format == "bfloat16" else torch.int8
    compressed = {name: t for name, t in tensors.items() if not name.endswith(SCALE)}
    for name, t in compressed.items():
        if t.dtype != dtype_of_format:
            raise MessageError(f"upload: tensor {name!r}: got {t.dtype}; allowed: {dtype_of_format} (training.uploads)")
    if number_format == "bfloat16":
        return {name: t.float() for name, t in compressed.items()}
    values: Tree = {}
    for name, levels in compressed.items():
        scale = tensors.get(name + SCALE)
        if scale is None or scale.shape != (*levels.shape[:-1], 1) or bool((scale < 0).any()):
            raise MessageError(f"upload: tensor {name!r} has no matching scales")
        values[name] = _dequantise(levels, scale)
    return values


def _dequantise(levels: Tensor, scale: Tensor) -> Tensor:
    """Return float32 values from int8 levels ``(..., width)`` and their scales ``(..., 1)``."""
    return levels.to(torch.float32) * scale
