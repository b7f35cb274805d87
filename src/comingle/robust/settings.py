"""What a recipe says of aggregation, as the inside has it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rule = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-bound", "bulyan"]


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How the server puts uploads together, where some users may mean harm.

    ``hostile`` is the share of a round's uploads that is assumed to be hostile, below a half. ``bound`` is the largest
    L2 norm of a user's change with "norm-bound": a number, or the "median" of the round's norms.
    """

    rule: Rule = "mean"
    hostile: float = 0.2
    bound: float | Literal["median"] = "median"

    def hostile_among(self, users: int) -> int:
        """How many of so many uploads are assumed to be hostile: their share, rounded up."""
        return math.ceil(self.hostile * users - 1e-9)

    def enough(self, users: int) -> bool:
        """Whether the rule can do with so many uploads what it promises."""
        return users >= self.needed(self.hostile_among(users))

    def needed(self, hostile: int) -> int:
        """How many uploads the rule needs with so many hostile ones among them."""
        if self.rule == "mean" or (self.rule == "norm-bound" and self.bound != "median"):
            return 1
        if self.rule in ("krum", "multi-krum"):
            return 2 * hostile + 3
        return 4 * hostile + 3 if self.rule == "bulyan" else 2 * hostile + 1
