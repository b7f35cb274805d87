"""Archives of finished runs: JSON lines compressed with xz, one run per line, by name.

An archive holds every user's results and digests of the data and base model that the run read. Reading it needs neither
the data nor the run folders. Events and models are not kept, so curves cannot be drawn.
"""

from __future__ import annotations

import errno
import json
import lzma
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from comingle.utils.errors import RecipeError, RunError
from comingle.utils.inputs import read_inputs
from comingle.utils.records import measure_of, number, read_metrics, write_bytes
from comingle_papers.recipes import RUNS_SUFFIX, published_runs
from comingle_papers.reproduce.plan import Cell, Plan, RunSelection, name_of, plan
from comingle_papers.reproduce.published import ANYWHERE
from comingle_papers.reproduce.runner import (
    RUNS,
    Outcome,
    Shelf,
    Waiting,
    check_same,
    is_measured,
    read_diverged,
    read_measured,
    run_cells,
    said,
    title_of,
    unique,
)

ROUNDING = 0.005
"""Largest accepted relative difference between a run's mean here and on another machine.

Other machines sum in another order; a hundred training steps amplify the rounding.
"""
_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished run: what it computes, digests of its inputs (:func:`said`), how it was made, and its results."""

    run: str
    computed: dict[str, Any]
    inputs: dict[str, str]
    made: dict[str, str]
    metrics: dict[str, Any] | None
    diverged: str = ""


Records = Mapping[str, Record]
"""Records by the run's name."""


def record_of(folder: Path) -> Record:
    """Return the archive record of a finished run.

    Raises:
        RunError: The run folder is damaged.
    """
    diverged = read_diverged(folder)
    # The base model's local path is private to this machine.
    metrics = None if diverged else {k: v for k, v in read_metrics(folder).items() if k != "base"}
    inputs = said(read_inputs(folder))
    return Record(run=folder.name, **read_measured(folder), inputs=inputs, metrics=metrics, diverged=diverged)


def difference(was: dict[str, Any] | None, now: dict[str, Any] | None) -> float:
    """Return the relative difference of two results; infinite where only one of them is a number."""
    one, two = (None if found is None else found[f"mean_test_{measure_of(found)}"] for found in (was, now))
    if one == two:
        return 0.0
    return math.inf if not one or two is None else abs(two / one - 1)


# -------------------------------------------------------------------- the file


def find_archive(path: Path) -> Path:
    """Return the path of an archive: a given path, or an archive that comes with comingle.

    An archive of comingle is found from any folder by its name, ``comigs-cpu``, or by its path in the repository.

    Raises:
        RunError: There is no such file and no such archive.
    """
    known = published_runs()
    if path.exists():
        return path
    if path.parent in (Path(), Path("papers", "measured")):
        found = known.get(path.name.removesuffix(RUNS_SUFFIX))
        if found is not None:
            return found
    raise RunError(
        f"--measured {path}: {os.strerror(errno.ENOENT)}; give a path, or one of those that come with comingle: "
        f"{', '.join(known)}"
    )


def read_archive(path: Path) -> dict[str, Record]:
    """Read all runs of an archive.

    Raises:
        RunError: The file is missing or damaged.
    """
    try:
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        records = [Record(**json.loads(line)) for line in lines]
        if wrong := [one.run for one in records if name_of(one.computed) != one.run]:
            raise ValueError(f"{wrong[0]} has a name that does not match its content")
    except OSError as error:
        raise RunError(f"--measured {path}: {error.strerror or error}") from None
    except (lzma.LZMAError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"--measured {path}: damaged, or of another version ({error})") from None
    return {record.run: record for record in records}


def write_archive(path: Path, records: Iterable[Record]) -> None:
    """Write runs to an archive; equal runs give equal bytes."""
    lines = [json.dumps(asdict(one), sort_keys=True) + "\n" for one in sorted(records, key=lambda one: one.run)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, lzma.compress("".join(lines).encode(), preset=9))


def merge_records(path: Path, was: Records, new: Iterable[Record]) -> dict[str, Record]:
    """Merge new runs into the records of an archive; records that exist stay as they are.

    Args:
        path: The archive, for error messages.
        was: The records of the archive.
        new: The runs to add.

    Raises:
        RunError: A run is in the archive with a result that differs beyond rounding, or was measured with other inputs.
    """
    merged = dict(was)
    for record in new:
        known = merged.setdefault(record.run, record)
        check_same(f"{path}: {record.run}", known.inputs, record.inputs)
        if not (apart := difference(known.metrics, record.metrics)) <= ROUNDING:
            raise RunError(f"{path}: {record.run}: differs by {apart:.2%} from the run in the archive")
    return merged


# -------------------------------------------------------------------- tables out of a file


def plan_of(records: Records, name: str, wanted: RunSelection) -> Plan:
    """Return the plan whose runs an archive holds.

    Text comes from a folder, wherever that is, or from the hub.

    Args:
        records: The records of the archive.
        name: The experiment, as ``comigs/table1``.
        wanted: The options of the command line.

    Raises:
        RecipeError: As :func:`comingle_papers.reproduce.plan.plan`.
    """
    planned = plan(name, replace(wanted, data=ANYWHERE))
    if planned.experiment.kind == "cost":
        raise RecipeError(f"--measured: {name} is counted without runs; omit --measured")
    if not any(cell.folder in records for cell in planned.cells):
        with suppress(RecipeError):
            return plan(name, wanted)
    return planned


def find_archived(planned: Plan, records: Records, path: Path) -> tuple[Plan, dict[str, Outcome], list[str]]:
    """Split a plan into the runs that an archive holds and the rest.

    Args:
        planned: The plan.
        records: The records of the archive.
        path: The archive, for messages.

    Returns:
        The plan reduced to the archive's runs, their outcomes, and remarks on where they come from.

    Raises:
        RunError: The archive holds none of the runs.
    """
    cells = tuple(cell for cell in planned.cells if cell.folder in records)
    some = {(cell.row, cell.column) for cell in cells}
    absent = [cell for cell in unique(planned.cells) if cell.folder not in records]
    # First the rows with fewer seeds than their neighbours, which are easy to miss.
    lacking = [title_of(cell) for cell in sorted(absent, key=lambda cell: (cell.row, cell.column) not in some)]
    if not cells:
        raise RunError(
            f"--measured {path}: none of the {len(lacking)} runs that are asked for is in it, as {lacking[0]}; "
            f"it has {len(records)} others, maybe of another --scale or other settings"
        )
    found = {cell.folder: _outcome(cell, records[cell.folder]) for cell in cells}
    shown = replace(
        planned,
        cells=cells,
        rows=tuple(row for row in planned.rows if any(cell.row == row for cell in cells)),
        columns=tuple(column for column in planned.columns if any(cell.column == column for cell in cells)),
        seeds=tuple(dict.fromkeys(cell.seed for cell in cells)),
    )
    told = [f"No run was started: our numbers are from {path.name}, {_made([records[run] for run in found])}."]
    if lacking:
        names = ", ".join(lacking[:_LISTED]) + (f" and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else "")
        told.append(f"{path.name} lacks {len(lacking)} of {len(lacking) + len(found)} runs: {names}.")
    if planned.experiment.plot:
        told.append(f"No figure: {path.name} has results alone, not how they came about.")
    return shown, found, told


def _outcome(cell: Cell, record: Record) -> Outcome:
    metrics = record.metrics and {**record.metrics, "base": cell.recipe.base}
    return Outcome(cell=cell, folder=Path(), seconds=0.0, ran=False, diverged=record.diverged, published=metrics)


def _made(records: Sequence[Record]) -> str:
    """Describe when, with which versions and on what machines runs were made."""
    dates = sorted({record.made["date"] for record in records})
    makers = Counter(f"{_version(record.made)} on {record.made['machine']}" for record in records).most_common()
    told = "; ".join(f"{count} with {maker}" for maker, count in makers)
    return f"measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}: {told}"


def _version(made: Mapping[str, str]) -> str:
    return f"comingle {made['version']}" + (f" (commit {made['commit']})" if made["commit"] else "")


# -------------------------------------------------------------------- runs that are made here


def choose(planned: Plan, records: Records, path: Path, most: int) -> list[Cell]:
    """Choose at most ``most`` runs of an archive, evenly spaced over the plan, to run again.

    Args:
        planned: The plan.
        records: The records of the archive.
        path: The archive, for error messages.
        most: The largest number of runs.

    Raises:
        RunError: The archive holds none of the plan's runs.
    """
    cells = [cell for cell in unique(planned.cells) if cell.folder in records]
    if not cells:
        raise RunError(f"--check: {path} has none of the {len(planned.cells)} runs that are asked for")
    most = min(most, len(cells))
    return [cells[i * len(cells) // most] for i in range(most)]


def compare(record: Record, outcome: Outcome) -> tuple[str, bool]:
    """Compare an archived run with the same run made here.

    Returns:
        A description of both results, and whether they are equal up to rounding.

    Raises:
        RunError: The two runs read different inputs.
    """
    check_same(f"{title_of(outcome.cell)}: {record.run}", record.inputs, said(read_inputs(outcome.folder)))
    here = record_of(outcome.folder)
    apart = difference(record.metrics, here.metrics)
    told = f"{title_of(outcome.cell)}: published {_result(record)}, here {_result(here)}"
    return f"{told} ({apart:.3%} apart)", apart <= ROUNDING


def _result(record: Record) -> str:
    if record.metrics is None:
        return "diverged"
    measure = measure_of(record.metrics)
    return number(record.metrics[f"mean_test_{measure}"], measure)


def add_runs(path: Path, name: str, wanted: RunSelection, out: Path, waiting: Waiting) -> str:
    """Add the finished runs of a plan to an archive; start no run.

    Runs and archive must have been measured with the inputs that are here: this is checked for one archived run of each
    column, whatever its seed.

    Args:
        path: The archive.
        name: The experiment, as ``comigs/table1``.
        wanted: The options of the command line.
        out: The folder with the finished runs.
        waiting: Shows what is being waited for.

    Returns:
        A sentence that says how many runs were added.

    Raises:
        RunError: No run is finished; some runs were measured with other inputs; or a run is in the archive with another
            result.
    """
    planned, was = plan(name, wanted), read_archive(path) if path.exists() else {}
    asked = unique(planned.cells)
    done = [cell for cell in asked if is_measured(out / RUNS / cell.folder)]
    if not done:
        raise RunError(f"{out / RUNS}: none of the {len(asked)} runs that are asked for is finished there")
    outcomes = list(run_cells(done, out, waiting=waiting))
    _check_columns(path, was, name, replace(wanted, columns=sorted({cell.column for cell in done})), Shelf(waiting))
    merged = merge_records(path, was, (record_of(outcome.folder) for outcome in outcomes))
    write_archive(path, merged.values())
    added = len(merged) - len(was)
    return (
        f"{path}: {added} runs added, {len(done) - added} were in it, {len(merged)} now; "
        f"{len(asked) - len(done)} of the {len(asked)} that are asked for are not finished"
    )


def _check_columns(path: Path, records: Records, name: str, wanted: RunSelection, shelf: Shelf) -> None:
    """Check that the archived runs of some columns read the inputs that are here; check one run per column."""
    seeds = sorted({record.computed["seed"] for record in records.values()})
    cells = plan(name, replace(wanted, methods=None, seeds=seeds)).cells if seeds else ()
    for cell in {cell.column: cell for cell in cells if cell.folder in records}.values():
        check_same(f"{path}: {cell.folder}", records[cell.folder].inputs, shelf.said(cell))
