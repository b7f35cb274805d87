"""What is known of a user's model besides its weights, and what an export of it has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

Losses = Callable[[Sequence[int], Tensor], Float[Tensor, "slots batch context"]]
Gates = Callable[[], Float[Tensor, "layers slots n experts"]]


@dataclass(frozen=True, kw_only=True)
class About:
    """What a run knows of a user's model besides its weights.

    ``counts`` are amounts of data by split and unit, as ``train_tokens``; ``scores`` are measured, as
    ``test_perplexity``. ``validate`` scores losses on the user's validation data, which is read only then.
    """

    method: str
    kind: str
    users: int
    counts: Mapping[str, int]
    scores: Mapping[str, float]
    validate: Callable[[Losses, Gates | None], Any]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written. ``lost`` has the perplexities of the user's validation data where the form is approximate."""

    folder: Path
    format: str
    form: str
    lost: Mapping[str, float] = field(default_factory=dict)
