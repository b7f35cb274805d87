"""Planned seconds and money on machines (``comingle cost --machines``) as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comingle.tables.framing import Table

_SPENT = ("compute", "server", "network", "disk")
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


def render_times(times: dict[str, Any]) -> Iterator[Table | str]:
    """Each method's rounds for populations of several sizes, and what was measured."""
    yield _times_head(times)
    for method in times["methods"]:
        yield _times_table(method, priced=times["price"] is not None)
        yield f"  {_measured(method['parts'])}\n"
    yield from _notes(times)


def _times_head(times: dict[str, Any]) -> str:
    machines, processes = times["machines"], times["processes"]
    what = f"{processes} GPUs" if times["gpus"] else f"{processes} processes on {times['cores']} cores"
    each = " each" if machines > 1 else ""
    price = "" if times["price"] is None else f", {times['price']:g} an hour{each}"
    link = f"; {times['link'] / 1e9:g} GB/s and {seconds(times['latency'])} between them" if machines > 1 else ""
    return f"Time on {machines} machine{'s' if machines > 1 else ''} with {what}{each}{price}{link}\n"


def _times_table(method: dict[str, Any], *, priced: bool) -> Table:
    table = Table(title=f"{method['method']}: seconds of a round", title_justify="left", box=None)
    names = ["users", "in a round", *_SPENT, "round", "run", *(["money"] if priced else []), "binds", "users' bytes"]
    for name in names:
        table.add_column(name, justify="right")
    for row in method["rows"]:
        spent = [seconds(row[f"{name}_seconds"]) for name in _SPENT]
        cost = [f"{row['money']:,.2f}"] if priced else []
        times = [seconds(row["round_seconds"]), seconds(row["run_seconds"])]
        held = f"{row['state_bytes'] / 1e9:,.3g} GB"
        table.add_row(f"{row['users']:,}", f"{row['present']:,}", *spent, *times, *cost, row["binds"], held)
    return table


def _measured(parts: dict[str, Any]) -> str:
    given = f"a user's local steps {seconds(parts['user_seconds'])} of a core"
    more = f", its messages {seconds(parts['handling_seconds'])}, its evaluation {seconds(parts['evaluation_seconds'])}"
    disk = f"; disk {parts['disk'] / 1e6:,.0f} MB/s"
    if parts["bus"] is None:
        return given + more + disk
    wires = f"; between processes {parts['bus'] / 1e6:,.0f} MB/s, {parts['hops']:,.0f} small messages a round of "
    return given + more + disk + wires + seconds(parts["hop_seconds"])


def _notes(times: dict[str, Any]) -> Iterator[str]:
    step = "Local steps are as given" if times["step_given"] else "Steps were measured here"
    yield f"{step}; a process with more cores is taken to be as many times as fast, at best. Start-up is left out."
    yield "Users' bytes: their tensors and moments on each machine, in memory or with runtime.store: disk there."


def seconds(value: float) -> str:
    """With a unit that a person reads."""
    for size, unit in _UNITS:
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value * 1e6:,.3g} us" if value else "0"
