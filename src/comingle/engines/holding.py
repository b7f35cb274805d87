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
def holding(held: Held | None, cohort: Members, trainers: int) -> Iterator[Bool[Tensor, "users columns"] | None]:
    """What of each user does not move in a step, which is as it was before it at the end of the block."""
    if held is None or cohort.round_number >= held.rounds:
        yield None
        return
    firsts = torch.tensor([row < trainers for row in cohort.rows], device=cohort.part.rows.device)
    still = firsts.unsqueeze(1) & held.columns.to(firsts.device)
    before = cohort.part.rows[still]
    yield still
    cohort.part.rows[still] = before  # which decay and running statistics would change without any gradient
