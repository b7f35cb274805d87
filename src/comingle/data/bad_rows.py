"""Rows that cannot be used: all of a source are collected, then refused together or left out.

A reader of rows reports what is wrong with a row by raising a ``ValueError`` (any ``DataError`` is one) within
:meth:`BadRows.row`; reading continues with the next row::

    for place, row in rows:
        with bad.row(f"chats.jsonl: {place}"):
            conversations.append(messages_of(row))
    bad.settle()
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Literal

from comingle.utils.errors import DataError

OnBadRow = Literal["refuse", "skip"]

MOST_REFUSED = 1000
"""Reading ends after this many bad rows when they are refused."""

_LISTED, _REMARKS = 20, 8
ADVICE = "repair them, or leave them out with data.on_bad_row: skip"

logger = logging.getLogger("comingle")


class BadRowsError(DataError):
    """Rows that cannot be used; ``problems`` has a line for each, as far as they were collected."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()):
        super().__init__(message)
        self.problems = problems


class BadRows:
    """Rows of one source that cannot be used, and what is wrong with each.

    Args:
        policy: ``refuse`` raises an error that lists them when reading ends; ``skip`` leaves them out with a warning.
    """

    def __init__(self, policy: OnBadRow = "refuse"):
        self.policy, self.count = policy, 0
        self.skipped = 0
        """Number of rows left out so far, over all calls of :meth:`settle`."""
        self.problems: list[tuple[str, str]] = []
        """Where each row is, and what is wrong with it."""
        self.remarks: dict[str, tuple[int, str]] = {}

    @contextmanager
    def row(self, where: str) -> Iterator[None]:
        """Collect a ``ValueError`` raised in the block as the problem of the row at ``where``."""
        try:
            yield
        except BadRowsError:
            raise
        except ValueError as error:
            self.add(where, str(error))

    def add(self, where: str, problem: str) -> None:
        """Collect the problem of one row.

        Raises:
            BadRowsError: rows are refused, and 1,000 have been collected.
        """
        self.count += 1
        if self.count <= MOST_REFUSED:
            self.problems.append((where, problem))
        if self.policy == "refuse" and self.count == MOST_REFUSED:
            self.settle()

    def remark(self, where: str, what: str) -> None:
        """Count a row that is used, but has something that its owner should know of."""
        count, first = self.remarks.get(what, (0, where))
        self.remarks[what] = count + 1, first

    def settle(self) -> None:
        """Refuse the rows collected so far, or warn that they are left out; warn of remarks; then forget them.

        Raises:
            BadRowsError: rows are refused, and there are some.
        """
        count, found = self.count, self.problems
        problems = tuple(f"{where}: {problem}" for where, problem in found)
        self.count, self.problems = 0, []
        remarks, self.remarks = self.remarks, {}
        for what, (times, first) in list(remarks.items())[:_REMARKS]:
            logger.warning("%d %s: %s (first: %s)", times, "rows" if times > 1 else "row", what, first)
        if not count:
            return
        listed = "; ".join(_merge_equal(found[:_LISTED])) + (f"; and {count - _LISTED} more" if count > _LISTED else "")
        if self.policy == "skip":
            self.skipped += count
            logger.warning("data.on_bad_row: %d rows that cannot be used are left out: %s", count, listed)
        elif count == 1:
            raise BadRowsError(f"{listed}; {ADVICE.replace('them', 'it')}", problems)
        else:
            raise BadRowsError(f"{count} rows cannot be used: {listed}; {ADVICE}", problems)


def _merge_equal(problems: list[tuple[str, str]]) -> list[str]:
    """Return a line for each problem; rows of one source with the same problem one after another share a line."""
    lines = list[str]()
    for (source, problem), group in groupby(problems, key=lambda one: (one[0].rpartition(": ")[0], one[1])):
        places = ", ".join(where.removeprefix(f"{source}: ") for where, _ in group)
        lines.append(f"{source}: {places}: {problem}" if source else f"{places}: {problem}")
    return lines
