"""What a rule has made of a round's uploads, and what makes it of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a rule has made of a round's uploads, for the events of a run.

    ``counted`` is how much of each user's upload counts, from 0 to 1: :class:`comingle.robust.rules.Combined`, and with
    norm-bound by what its change was shortened. Empty where the uploads were too few, as ``reason`` says.
    """

    rule: str
    counted: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def left_out(self) -> list[str]:
        """Whose uploads changed nothing."""
        return [name for name, share in self.counted.items() if share == 0]

    def as_event(self, done: int) -> dict[str, Any]:
        """After round ``done`` (from 1)."""
        said = {"left_out": self.left_out, "counted": self.counted} if self.counted else {"reason": self.reason}
        return {"event": "aggregation", "round": done, "rule": self.rule, **said}
