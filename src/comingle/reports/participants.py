"""The participants of a federation as a table, out of its run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import table as rich_table

from comingle.tables.crowds import MOST_ROWS
from comingle.tables.measures import byte_unit
from comingle.utils.records import PARTICIPANTS, number
from comingle.utils.terminal import words

_STYLES = {"here": "green", "away": "red", "expected": "dim"}


def render_participants(folder: Path, *, everybody: bool = False) -> rich_table.Table:
    """Who is in, in which round, last seen when, bytes, and what users tell of losses and scores; those first who fail.

    Where the recipe has them also epsilon, and how much of the last upload of each counted.

    Before anything is known, and while the file cannot be read, the table is empty.
    """
    content = _read(folder)
    users: Mapping[str, Mapping[str, Any]] = content.get("users", {})
    measure = content.get("measure") or "test"
    table = rich_table.Table("user", "", title=_participants_title(content), title_justify="left", box=None)
    more = [
        *(["epsilon"] if "privacy" in content else []),
        *(["counted"] if any(user.get("counted") is not None for user in users.values()) else []),
    ]
    for name in ("round", "last seen", "sent", "received", "loss", measure, *more):
        table.add_column(name, justify="right")
    table.add_column("")
    order = sorted(users, key=lambda name: ("away", "expected", "here").index(users[name]["state"]))
    shown = order if everybody or len(order) <= MOST_ROWS else order[:MOST_ROWS]
    for name in shown if len(shown) < len(users) else users:
        *cells, why = _row(name, users[name], measure)
        table.add_row(*cells, *(_known(users[name].get(column)) for column in more), why)
    if len(shown) < len(users):
        table.caption, table.caption_justify = words(f"and {len(users) - len(shown):,} more", "table.caption"), "left"
    return table


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / PARTICIPANTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _participants_title(content: Mapping[str, Any]) -> str:
    if not content:
        return "waiting for the coordinator"
    states = [user["state"] for user in content["users"].values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in _STYLES if state in states)
    spent = content.get("privacy")
    at = f" · epsilon {spent['epsilon']:.3g} at delta {spent['delta']:g}" if spent else ""
    return f"{content['round']} of {content['rounds']} rounds are done · {counts}{at}"


def _row(name: str, user: Mapping[str, Any], measure: str) -> tuple[Any, ...]:
    seen, loss, test = user["seen"], user["train_loss_nats"], user["test"]
    return (
        words(name),
        words(user["state"], _STYLES[user["state"]]),
        str(user["round"] or "–"),
        f"{_ago(time.time() - seen)}" if seen is not None else "never",
        _size(user["upload_bytes"]),
        _size(user["download_bytes"]),
        "–" if loss is None else f"{loss:.3f}",
        "–" if test is None else number(test, measure),
        words(user["why"], "dim"),
    )


def _known(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _size(count: int) -> str:
    unit, name = byte_unit(count)
    return f"{count / unit:,.1f} {name}" if unit > 1 else f"{count} B"


def _ago(seconds: float) -> str:
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} s ago"
