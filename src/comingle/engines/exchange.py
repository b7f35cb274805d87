"""What leaves a user: the one place where uploads are built and their bytes counted.

An upload is the shared tensors, what the method reports, which model a user took, and, where means are weighted by it,
how much data it trains on. Nothing else is needed by any server. Losses in the log are the simulation's own record, and
between peers each user scores the others' models for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comingle.methods.base import Context, Method
from comingle.trees import Layout, Tree, assign, restrict

WIRE_DTYPE = torch.float32
"""Tensors travel as they are kept, so an exchange loses nothing."""


def build_uploads(method: Method, layout: Layout, rows: Float[Tensor, "users columns"]) -> Tree:
    """The stacked tensors that leave their users: the roles that the method shares, nothing else."""
    return restrict(layout.views(rows), layout, method.shared)


def build_reports(method: Method, layout: Layout, rows: Float[Tensor, "users columns"], members: Sequence[int]) -> Tree:
    """What members say to the server besides their shared tensors; zeros for the absent."""
    if method.report is None:
        return {}
    absent = torch.tensor(absentees(members, len(rows)), dtype=torch.int64, device=rows.device)
    return {name: t.index_fill(0, absent, 0) for name, t in method.report(layout.views(rows)).items()}


def absentees(members: Sequence[int], users: int) -> list[int]:
    """Who of so many users sits the round out."""
    present = set(members)
    return [user for user in range(users) if user not in present]


def exchange(
    method: Method, layout: Layout, rows: Float[Tensor, "users columns"], context: Context, members: Sequence[int]
) -> None:
    """Members upload, the server answers, everybody downloads: in place on ``rows``.

    Of the absent the server sees zeros, whatever they hold. Between peers they keep what they have.
    """
    if not method.shared:
        return
    uploads = build_uploads(method, layout, rows)
    absent = absentees(members, len(rows))
    own = {name: t[absent] for name, t in uploads.items()} if method.peers else {}
    for t in uploads.values() if absent else ():
        t[absent] = 0  # which may be their rows: all that is shared is downloaded
    downloads = method.server(uploads, context)
    for name, t in own.items():
        downloads[name][absent] = t
    assign(layout.views(rows), layout, method.shared, downloads)


def upload_bytes(
    method: Method, layout: Layout, mask: Bool[Tensor, "users columns"], *, weighted: bool = False
) -> list[int]:
    """Bytes of one upload of each user: real parameters of shared roles, no padding, and what it says besides."""
    shared = layout.mask(method.shared).to(mask.device)
    said = said_bytes(method, layout, weighted=weighted)
    return [int(n) * WIRE_DTYPE.itemsize + said for n in (mask & shared).sum(1)]


def said_bytes(method: Method, layout: Layout, *, weighted: bool) -> int:
    """Bytes of the numbers beside the tensors of an upload: see the head of this page."""
    if not layout.mask(method.shared).any():
        return 0
    reports = build_reports(method, layout, torch.zeros(1, layout.columns), [0])
    numbers = sum(t.numel() for t in reports.values()) + bool(method.picks) + (weighted and not method.peers)
    return numbers * WIRE_DTYPE.itemsize


def download_bytes(method: Method, own: int, everything: int, *, said: int) -> int:
    """Bytes that a user receives who sends ``own`` of ``everything`` that is sent, ``said`` of it beside the tensors.

    An answer is as large as the tensors of an upload. Between peers everybody receives what everybody else sends; who
    picks receives every model.
    """
    if method.peers:
        return everything - own
    return max(1, method.picks) * (own - said)


def averaging_weights(
    participants: Sequence[int], train_tokens: Sequence[int], *, weighted: bool
) -> Float[Tensor, " users"]:
    """Weight of each user in the mean: equal among participants, or by training tokens; 0 for the absent."""
    weights = torch.zeros(len(train_tokens), dtype=torch.float64)
    for user in participants:
        weights[user] = train_tokens[user] if weighted else 1
    return weights / weights.sum()
