"""What stands still of somebody who joins a federation that is over, while what is its own is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from comingle.engines.members import Members


@dataclass(frozen=True, kw_only=True)
class Held:
    """Columns of the first copy of a user's tensors that no step moves, for so many rounds."""

    columns: Bool[Tensor, " columns"]
    rounds: int


@contextmanager
def holding(
    joins: Held | None, cohort: Members, trainers: int, beside: Bool[Tensor, " columns"] | None
) -> Iterator[Bool[Tensor, "users columns"] | None]:
    """What of each user does not move in a step, which is as it was before it at the end of the block.

    Of the first ``trainers`` rows that is what ``joins`` holds, of all rows what stands ``beside`` the trained roles.
    """
    joins = None if joins is None or cohort.round_number >= joins.rounds else joins
    if joins is None and beside is None:
        yield None
        return
    held = torch.zeros_like(cohort.part.rows, dtype=torch.bool)
    if beside is not None:
        held |= beside.to(held.device)
    if joins is not None:
        firsts = torch.tensor([row < trainers for row in cohort.rows], device=held.device)
        held |= firsts.unsqueeze(1) & joins.columns.to(held.device)
    before = cohort.part.rows[held]
    yield held
    cohort.part.rows[held] = before  # which decay and running statistics would change without any gradient
