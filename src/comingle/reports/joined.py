"""What joining a federation that is over was worth, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comingle.tables.framing import Table
from comingle.tables.measures import rule
from comingle.utils.records import number
from comingle.utils.terminal import printable, words

_ROWS = {
    "pretrained": "the base as it is",
    "local": "trained alone, from scratch",
    "shared": "what the federation shares, before any training",
    "joined": "after joining",
}


def render_joined(name: str, measure: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A newcomer's test results, with the training data that each took."""
    unit = next(key for key in rows["joined"] if key.startswith("train_"))
    title = f"{printable(name)}: test {measure} ({rule(measure)})"
    table = Table("model", title=title, title_justify="left", box=None)
    table.add_column(measure, justify="right", style="bold")
    table.add_column(f"training {unit.removeprefix('train_')}", justify="right")
    table.add_column("")
    for row, what in _ROWS.items():
        value = rows[row]
        table.add_row(row, number(value[f"test_{measure}"], measure), f"{value[unit]:,}", words(what, "dim"))
    return table
