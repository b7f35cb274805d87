"""What entries of a report have cost, as a table: parameters, bytes, memory and time."""

from __future__ import annotations

from collections.abc import Sequence

from comingle.reports.series import Cost, Spread
from comingle.tables.run_tables import sizes


def ledger(costs: Sequence[Cost]) -> list[list[str]]:
    """The ledger, a row for each entry; a column of bytes has one unit."""

    def bytes_of(key: str) -> list[str]:
        return sizes([getattr(one, key) for one in costs])

    columns = [
        [one.label for one in costs],
        [str(one.rounds) for one in costs],
        ["–" if one.trainable_parameters is None else f"{one.trainable_parameters:,}" for one in costs],
        bytes_of("upload_bytes_per_user_round"),
        bytes_of("download_bytes_per_user_round"),
        bytes_of("upload_bytes"),
        bytes_of("download_bytes"),
        ["–" if one.peak_memory_bytes is None else f"{one.peak_memory_bytes / 1e9:,.2f} GB" for one in costs],
        [_measured(one.per_second) for one in costs],
        [_measured(one.wall_seconds) for one in costs],
        [one.place for one in costs],
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _measured(value: Spread | None) -> str:
    if value is None:
        return "–"
    digits = 0 if value.mean >= 10 else 1
    return f"{value.mean:,.{digits}f}" + ("" if value.std is None else f" ({value.std:,.{digits}f})")
