"""Whom a figure shows of a population: the best and the worst users."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from comingle.reports.runs import Entry
from comingle.reports.series import baselines, compared, final
from comingle.utils.records import MEASURES

MAX_PANELS = 24
"""How many users have a panel; more are a population, of which the best and the worst have one."""


def is_population(users: Sequence[str]) -> bool:
    """Whether there are too many users to show each of them."""
    return len(users) > MAX_PANELS


def extremes(entries: Sequence[Entry], most: int, baseline: Entry | None = None) -> dict[str, str]:
    """Up to ``most`` users, and how their panels or rows are called.

    All of them where there are no more; else the better half and then the worse half of ``most``, by their mean change
    against ``baseline`` (default: the first there is) over the other trained entries, or by their mean test results
    where there is no baseline. A user without a finite number is among the worst.
    """
    users = list(entries[0].first.users)
    if len(users) <= most:
        return {user: user for user in users}
    lists = _by_change(entries, baseline) or _by_result(entries)
    sign = -1 if MEASURES[entries[0].first.measure] == "higher" else 1
    order = sorted(users, key=lambda user: (user not in lists, sign * lists.get(user, 0.0)))
    best, worst = order[: -(-most // 2)], order[len(order) - most // 2 :]
    named = {user: f"best {number}: {user}" for number, user in enumerate(best, 1)}
    return named | {user: f"worst {len(worst) - number}: {user}" for number, user in enumerate(worst)}


def _by_change(entries: Sequence[Entry], baseline: Entry | None) -> dict[str, float]:
    baseline = baseline or next(iter(baselines(entries)), None)
    rows = [] if baseline is None else compared(entries, baseline)
    by_entry = [{gain.user: gain.change.mean for gain in gains_of_entry} for _, gains_of_entry in rows]
    known = [user for user in entries[0].first.users if by_entry and all(user in one for one in by_entry)]
    return {user: statistics.fmean(one[user] for one in by_entry) for user in known}


def _by_result(entries: Sequence[Entry]) -> dict[str, float]:
    entries = [entry for entry in entries if entry.trained] or entries
    by_user = {user: [final(entry, user) for entry in entries] for user in entries[0].first.users}
    known = {user: [value.mean for value in values if value] for user, values in by_user.items()}
    return {user: statistics.fmean(values) for user, values in known.items() if len(values) == len(entries)}
