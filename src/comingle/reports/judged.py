"""Whose uploads counted, where the server put them together by a rule that some hostile users cannot carry off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from comingle.reports.runs import Entry

MOST = 12
"""The page names so many users of each entry: those who counted least."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Of one user over the rounds and seeds of an entry: uploads judged, left out, and the mean of what counted."""

    user: str
    uploads: int
    left_out: int
    mean: float


def counted(entry: Entry) -> list[Counted]:
    """Every user whose uploads a rule has judged, those first who counted least."""
    shares: dict[str, list[float]] = {}
    for run in entry.runs:
        for event in run.judged:
            for user, share in event.get("counted", {}).items():
                shares.setdefault(user, []).append(share)
    found = [
        Counted(user=user, uploads=len(of_user), left_out=of_user.count(0), mean=fmean(of_user))
        for user, of_user in shares.items()
    ]
    return sorted(found, key=lambda one: (one.mean, -one.left_out))


def judged_tables(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """For the page: of each entry with a rule the users who counted least, and how many more there are."""
    tables = []
    for entry in entries:
        if users := counted(entry):
            rule = entry.first.judged[0]["rule"]
            cells = [(one.user, f"{one.left_out} of {one.uploads}", f"{one.mean:.2f}") for one in users[:MOST]]
            tables.append({"label": entry.label, "rule": rule, "rows": cells, "more": len(users) - len(cells)})
    return tables
