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
from comingle_papers.reproduce.published import ASSUMED_FOLDER
from comingle_papers.reproduce.runner import (
    RUNS,
    InputCache,
    Outcome,
    Waiting,
    check_same_inputs,
    digest_inputs,
    is_finished,
    read_diverged,
    read_measured,
    run_cells,
    title_of,
    unique_cells,
)

ROUNDING = 0.005
"""Largest accepted relative difference between a run's mean here and on another machine.

Other machines sum in another order; a hundred training steps amplify the rounding.
"""
_LISTED = 5
"""Largest number of absent runs that a remark names."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished run: what it computes, digests of its inputs (:func:`digest_inputs`), its origin and its results."""

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
    # Without the base model's path, which has a meaning on this machine only.
    metrics = None if diverged else {key: value for key, value in read_metrics(folder).items() if key != "base"}
    inputs = digest_inputs(read_inputs(folder))
    measured = read_measured(folder)  # the settings, "computed", and the origin, "made"
    return Record(run=folder.name, **measured, inputs=inputs, metrics=metrics, diverged=diverged)


def relative_difference(first: dict[str, Any] | None, second: dict[str, Any] | None) -> float:
    """Return the relative difference of the mean test results of two runs; 0 if both diverged.

    The difference is infinite if one of the runs diverged, or if only the first result is zero.

    Args:
        first: Metrics of the first run; None if it diverged.
        second: Metrics of the second run; None if it diverged.
    """
    first_result, second_result = (
        None if metrics is None else metrics[f"mean_test_{measure_of(metrics)}"] for metrics in (first, second)
    )
    if first_result == second_result:
        return 0.0
    if not first_result or second_result is None:
        return math.inf
    return abs(second_result / first_result - 1)


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
        for record in records:
            if name_of(record.computed) != record.run:
                raise ValueError(f"{record.run} has a name that does not match its content")
    except OSError as error:
        raise RunError(f"--measured {path}: {error.strerror or error}") from None
    except (lzma.LZMAError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"--measured {path}: damaged, or of another version ({error})") from None
    return {record.run: record for record in records}


def write_archive(path: Path, records: Iterable[Record]) -> None:
    """Write runs to an archive, a compressed file with one line of JSON per run.

    Runs and keys are sorted, so equal runs give equal bytes.
    """
    by_name = sorted(records, key=lambda record: record.run)
    lines = [json.dumps(asdict(record), sort_keys=True) + "\n" for record in by_name]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, lzma.compress("".join(lines).encode(), preset=9))


def merge_records(path: Path, archived: Records, new: Iterable[Record]) -> dict[str, Record]:
    """Merge new runs into the records of an archive; records that exist stay as they are.

    Args:
        path: The archive, for error messages.
        archived: The records of the archive.
        new: The runs to add.

    Raises:
        RunError: A run is in the archive with a result that differs beyond rounding, or was measured with other inputs.
    """
    merged = dict(archived)
    for record in new:
        known = merged.setdefault(record.run, record)
        check_same_inputs(f"{path}: {record.run}", known.inputs, record.inputs)
        difference = relative_difference(known.metrics, record.metrics)
        if not difference <= ROUNDING:  # also if it is NaN
            raise RunError(f"{path}: {record.run}: differs by {difference:.2%} from the run in the archive")
    return merged


# -------------------------------------------------------------------- tables out of a file


def plan_of(records: Records, name: str, selection: RunSelection) -> Plan:
    """Return the plan of a table's runs, with runs named as in an archive. No data is read.

    A run's name depends on whether its data came from a local folder or from the hub. The plan first names all runs as
    if their data came from a folder. If the archive has none of these names, the plan is made with the source of data
    that the selection gives, so that runs on the hub's data are found.

    Args:
        records: The records of the archive.
        name: The experiment, as ``comigs/table1``.
        selection: The options of the command line.

    Raises:
        RecipeError: As :func:`comingle_papers.reproduce.plan.plan`.
    """
    planned = plan(name, replace(selection, data=ASSUMED_FOLDER))  # as from a folder, wherever it is
    if planned.experiment.kind == "cost":
        raise RecipeError(f"--measured: {name} is counted without runs; omit --measured")
    if not any(cell.folder in records for cell in planned.cells):
        with suppress(RecipeError):  # raised where nothing can be run here; the plan above then says what is missing
            return plan(name, selection)
    return planned


def find_archived(planned: Plan, records: Records, path: Path) -> tuple[Plan, dict[str, Outcome], list[str]]:
    """Find the archived runs of a plan.

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
    archived_pairs = {(cell.row, cell.column) for cell in cells}
    absent = [cell for cell in unique_cells(planned.cells) if cell.folder not in records]
    # First the cells of which other seeds are archived: that a seed is missing is easy to overlook.
    absent.sort(key=lambda cell: (cell.row, cell.column) not in archived_pairs)
    lacking = [title_of(cell) for cell in absent]
    if not cells:
        raise RunError(
            f"--measured {path}: none of the {len(lacking)} runs that are asked for is in it, as {lacking[0]}; "
            f"it has {len(records)} others, maybe of another --scale or other settings"
        )
    outcomes = {cell.folder: _archived_outcome(cell, records[cell.folder]) for cell in cells}
    reduced = replace(
        planned,
        cells=cells,
        rows=tuple(row for row in planned.rows if any(cell.row == row for cell in cells)),
        columns=tuple(column for column in planned.columns if any(cell.column == column for cell in cells)),
        seeds=tuple(dict.fromkeys(cell.seed for cell in cells)),
    )
    remarks = [
        f"No run was started: our numbers are from {path.name}, {_describe_origin([records[run] for run in outcomes])}."
    ]
    if lacking:
        more = f" and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else ""
        names = ", ".join(lacking[:_LISTED]) + more
        remarks.append(f"{path.name} lacks {len(lacking)} of {len(lacking) + len(outcomes)} runs: {names}.")
    if planned.experiment.plot:
        remarks.append(f"No figure: {path.name} has results alone, not how they came about.")
    return reduced, outcomes, remarks


def _archived_outcome(cell: Cell, record: Record) -> Outcome:
    """Return a cell's archived result as an outcome; it has no folder, and its metrics name the cell's base model."""
    metrics = record.metrics and {**record.metrics, "base": cell.recipe.base}
    return Outcome(cell=cell, folder=Path(), seconds=0.0, ran=False, diverged=record.diverged, archived_metrics=metrics)


def _describe_origin(records: Sequence[Record]) -> str:
    """Describe when, with which versions of comingle and on what machines runs were made."""
    dates = sorted({record.made["date"] for record in records})
    period = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    origins = Counter(f"{_describe_version(record.made)} on {record.made['machine']}" for record in records)
    counts = "; ".join(f"{count} with {origin}" for origin, count in origins.most_common())
    return f"measured {period}: {counts}"


def _describe_version(made: Mapping[str, str]) -> str:
    """Return "comingle" with version and, if known, commit, from a record's ``made``."""
    return f"comingle {made['version']}" + (f" (commit {made['commit']})" if made["commit"] else "")


# -------------------------------------------------------------------- runs that are made here


def choose_cells(planned: Plan, records: Records, path: Path, max_runs: int) -> list[Cell]:
    """Choose at most ``max_runs`` runs of an archive, evenly spaced over the plan, to run again.

    Args:
        planned: The plan.
        records: The records of the archive.
        path: The archive, for error messages.
        max_runs: The largest number of runs.

    Raises:
        RunError: The archive holds none of the plan's runs.
    """
    cells = [cell for cell in unique_cells(planned.cells) if cell.folder in records]
    if not cells:
        raise RunError(f"--check: {path} has none of the {len(planned.cells)} runs that are asked for")
    max_runs = min(max_runs, len(cells))
    return [cells[i * len(cells) // max_runs] for i in range(max_runs)]


def compare_run(record: Record, outcome: Outcome) -> tuple[str, bool]:
    """Compare an archived run with the same run made here.

    Returns:
        A description of both results, and whether they are equal up to rounding.

    Raises:
        RunError: The two runs read different inputs.
    """
    check_same_inputs(
        f"{title_of(outcome.cell)}: {record.run}", record.inputs, digest_inputs(read_inputs(outcome.folder))
    )
    repeated = record_of(outcome.folder)
    difference = relative_difference(record.metrics, repeated.metrics)
    description = f"{title_of(outcome.cell)}: published {_describe_result(record)}, here {_describe_result(repeated)}"
    return f"{description} ({difference:.3%} apart)", difference <= ROUNDING


def _describe_result(record: Record) -> str:
    """Return the mean test result of an archived run as text, or "diverged"."""
    if record.metrics is None:
        return "diverged"
    measure = measure_of(record.metrics)
    return number(record.metrics[f"mean_test_{measure}"], measure)


def add_runs(path: Path, name: str, selection: RunSelection, out: Path, waiting: Waiting) -> str:
    """Add the finished runs of a plan to an archive; start no run.

    All runs must have read the same data and base models. Finished runs are checked against the inputs on this machine,
    and so is one archived run of each column.

    Args:
        path: The archive.
        name: The experiment, as ``comigs/table1``.
        selection: The options of the command line.
        out: The folder with the finished runs.
        waiting: Shows what is being waited for.

    Returns:
        A sentence that says how many runs were added.

    Raises:
        RunError: No run is finished; some runs were measured with other inputs; or a run is in the archive with another
            result.
    """
    planned = plan(name, selection)
    archived = read_archive(path) if path.exists() else {}
    cells = unique_cells(planned.cells)
    finished = [cell for cell in cells if is_finished(out / RUNS / cell.folder)]
    if not finished:
        raise RunError(f"{out / RUNS}: none of the {len(cells)} runs that are asked for is finished there")
    outcomes = list(run_cells(finished, out, waiting=waiting))  # only checks the inputs of runs that are finished
    columns = sorted({cell.column for cell in finished})
    _check_columns(path, archived, name, replace(selection, columns=columns), InputCache(waiting))
    merged = merge_records(path, archived, (record_of(outcome.folder) for outcome in outcomes))
    write_archive(path, merged.values())
    added = len(merged) - len(archived)
    return (
        f"{path}: {added} runs added, {len(finished) - added} were in it, {len(merged)} now; "
        f"{len(cells) - len(finished)} of the {len(cells)} that are asked for are not finished"
    )


def _check_columns(path: Path, records: Records, name: str, selection: RunSelection, cache: InputCache) -> None:
    """Check that archived runs read the base model and data that are on this machine.

    To save time, only one archived run of each column of the table is checked.

    Args:
        path: The archive, for error messages.
        records: The records of the archive.
        name: The experiment, as ``comigs/table1``.
        selection: Options that determine the runs. Its columns are checked; rows and seeds are those of the archive.
        cache: Cache of the inputs on this machine.

    Raises:
        RunError: The inputs of an archived run differ.
    """
    seeds = sorted({record.computed["seed"] for record in records.values()})
    if not seeds:  # the archive is empty
        return
    cells = plan(name, replace(selection, methods=None, seeds=seeds)).cells
    one_per_column = {cell.column: cell for cell in cells if cell.folder in records}
    for cell in one_per_column.values():
        check_same_inputs(f"{path}: {cell.folder}", records[cell.folder].inputs, cache.input_digests(cell))
