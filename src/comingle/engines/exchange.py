"""What leaves a user: the one place where uploads are built and their bytes counted."""

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


def build_reports(method: Method, layout: Layout, rows: Float[Tensor, "users columns"]) -> Tree:
    """What users say to the server besides their shared tensors."""
    return method.report(layout.views(rows)) if method.report is not None else {}


def exchange(method: Method, layout: Layout, rows: Float[Tensor, "users columns"], context: Context) -> None:
    """Upload, let the server answer, download: in place on ``rows``."""
    if method.shared:
        downloads = method.server(build_uploads(method, layout, rows), context)
        assign(layout.views(rows), layout, method.shared, downloads)


def upload_bytes(method: Method, layout: Layout, mask: Bool[Tensor, "users columns"]) -> list[int]:
    """Bytes of one upload of each user: real parameters of shared roles, no padding, what it reports and picks."""
    shared = layout.mask(method.shared).to(mask.device)
    reports = build_reports(method, layout, torch.zeros(1, layout.columns))
    said = sum(t.numel() for t in reports.values()) + bool(method.picks)
    return [(int(n) + said) * WIRE_DTYPE.itemsize for n in (mask & shared).sum(1)]


def download_bytes(method: Method, own: int, everything: int) -> int:
    """Bytes that a user receives who sends ``own`` of ``everything`` that is sent.

    An answer is as large as an upload. Between peers everybody receives what everybody else sends; who picks receives
    every model, without anybody's choice.
    """
    if method.peers:
        return everything - own
    return method.picks * (own - WIRE_DTYPE.itemsize) if method.picks else own


def averaging_weights(
    participants: Sequence[int], train_tokens: Sequence[int], *, weighted: bool
) -> Float[Tensor, " users"]:
    """Weight of each user in the mean: equal among participants, or by training tokens; 0 for the absent."""
    weights = torch.zeros(len(train_tokens), dtype=torch.float64)
    for user in participants:
        weights[user] = train_tokens[user] if weighted else 1
    return weights / weights.sum()
