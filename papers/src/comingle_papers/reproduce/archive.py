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
    """Record of a finished run: the settings that determine its result (``computed``), input digests and metrics.

    ``run`` is its name; ``made`` says when, where and by which version it was made, ``diverged`` why it has no metrics.
    """

    run: str
    computed: dict[str, Any]
    inputs: dict[str, str]
    made: dict[str, str]
    metrics: dict[str, Any] | None
    diverged: str = ""


Records = Mapping[str, Record]
"""Records by the run's name."""


def record_of(folder: Path) -> Record:
    """Read the folder of a finished run, and return the run's record for an archive, which does without the folder.

    Raises:
        RunError: The run folder is damaged.
    """
    diverged = read_diverged(folder)
    metrics = None
    if not diverged:
        metrics = read_metrics(folder)
        metrics.pop("base", None)  # a path on this machine
    measured = read_measured(folder)
    return Record(
        run=folder.name,
        computed=measured["computed"],
        made=measured["made"],
        inputs=digest_inputs(read_inputs(folder)),
        metrics=metrics,
        diverged=diverged,
    )


def relative_difference(first: dict[str, Any] | None, second: dict[str, Any] | None) -> float:
    """Return the relative difference of the mean test results of two runs; 0 if both diverged.

    The difference is infinite if one of the runs diverged, or if only the first result is zero.

    Args:
        first: Metrics of the first run; None if it diverged.
        second: Metrics of the second run; None if it diverged.
    """
    first_result = _mean_test_result(first)
    second_result = _mean_test_result(second)
    if first_result == second_result:
        return 0.0
    if not first_result or second_result is None:
        return math.inf
    return abs(second_result / first_result - 1)


def _mean_test_result(metrics: dict[str, Any] | None) -> float | None:
    """Return the mean of a run's test results over users; None if the run diverged."""
    if metrics is None:
        return None
    return metrics[f"mean_test_{measure_of(metrics)}"]


# -------------------------------------------------------------------- the file


def find_archive(path: Path) -> Path:
    """Return the path of an archive: a given path, or an archive that comes with comingle.

    An archive of comingle is found from any folder by its name, ``comigs-cpu``, or by its path in the repository.

    Raises:
        RunError: There is no such file and no such archive.
    """
    if path.exists():
        return path
    archive_by_name = published_runs()
    if path.parent in (Path(), Path("papers", "measured")):
        archive = archive_by_name.get(path.name.removesuffix(RUNS_SUFFIX))
        if archive is not None:
            return archive
    raise RunError(
        f"--measured {path}: {os.strerror(errno.ENOENT)}; give a path, or one of those that come with comingle: "
        f"{', '.join(archive_by_name)}"
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
    """Add new runs to the records of an archive; a run that it has already stays as it is.

    Args:
        path: The archive, for error messages.
        archived: The records of the archive.
        new: The runs to add.

    Raises:
        RunError: A run is in the archive with a result that differs beyond rounding, or was measured with other inputs.
    """
    merged = dict(archived)
    for record in new:
        kept = merged.setdefault(record.run, record)  # a run that is new to the archive is compared with itself
        check_same_inputs(f"{path}: {record.run}", kept.inputs, record.inputs)
        difference = relative_difference(kept.metrics, record.metrics)
        is_same = difference <= ROUNDING  # False if it is NaN
        if not is_same:
            raise RunError(f"{path}: {record.run}: differs by {difference:.2%} from the run in the archive")
    return merged


# -------------------------------------------------------------------- tables out of a file


def plan_of(records: Records, name: str, selection: RunSelection) -> Plan:
    """Return the plan of a table whose runs are in an archive; no data is read.

    A run's name depends on whether its data came from a local folder or from the hub. So runs are first looked for
    under the names that they have with a folder, then under those that follow from the command line's options.

    Args:
        records: The archive's runs by name, with their results and the digests of their inputs.
        name: The table or figure, such as ``comigs/table1``.
        selection: The rows, columns, seeds and scale that were given on the command line.

    Raises:
        RecipeError: There is no such experiment, scale, row or column, or it is a table of costs, which has no runs.
    """
    plan_with_folder = plan(name, replace(selection, data=ASSUMED_FOLDER))
    if plan_with_folder.experiment.kind == "cost":
        raise RecipeError(f"--measured: {name} is counted without runs; omit --measured")
    if any(cell.folder in records for cell in plan_with_folder.cells):
        return plan_with_folder
    try:
        return plan(name, selection)
    except RecipeError:  # nothing can be run here
        return plan_with_folder  # for the message that says which runs the archive lacks


def find_archived(planned: Plan, records: Records, path: Path) -> tuple[Plan, dict[str, Outcome], list[str]]:
    """Find the archived runs of a plan.

    Args:
        planned: The plan of a table: its rows, columns and runs.
        records: The archive's runs by name, with their results and the digests of their inputs.
        path: The archive, for error messages.

    Returns:
        The plan reduced to the archive's runs, their outcomes by run name, and remarks on where they come from.

    Raises:
        RunError: The archive holds none of the runs.
    """
    cells = tuple(cell for cell in planned.cells if cell.folder in records)
    absent = [cell for cell in unique_cells(planned.cells) if cell.folder not in records]
    # Name absent runs first if the archive has the same cell with another seed: one missing seed is easy to overlook.
    archived_pairs = {(cell.row, cell.column) for cell in cells}
    absent.sort(key=lambda cell: (cell.row, cell.column) not in archived_pairs)
    absent_titles = [title_of(cell) for cell in absent]
    if not cells:
        raise RunError(
            f"--measured {path}: none of the {len(absent)} runs that are asked for is in it, as {absent_titles[0]}; "
            f"it has {len(records)} others, maybe of another --scale or other settings"
        )
    outcomes = {cell.folder: _archived_outcome(cell, records[cell.folder]) for cell in cells}
    archived_rows = {cell.row for cell in cells}
    archived_columns = {cell.column for cell in cells}
    reduced = replace(
        planned,
        cells=cells,
        rows=tuple(row for row in planned.rows if row in archived_rows),
        columns=tuple(column for column in planned.columns if column in archived_columns),
        seeds=tuple(dict.fromkeys(cell.seed for cell in cells)),
    )
    origin = _describe_origin([records[run] for run in outcomes])
    remarks = [f"No run was started: our numbers are from {path.name}, {origin}."]
    if absent:
        names = ", ".join(absent_titles[:_LISTED])
        if len(absent) > _LISTED:
            names += f" and {len(absent) - _LISTED} more"
        remarks.append(f"{path.name} lacks {len(absent)} of {len(absent) + len(outcomes)} runs: {names}.")
    if planned.experiment.plot:
        remarks.append(f"No figure: {path.name} has results alone, not how they came about.")
    return reduced, outcomes, remarks


def _archived_outcome(cell: Cell, record: Record) -> Outcome:
    """Return a cell's archived result as an outcome without a folder."""
    metrics = None
    if record.metrics is not None:
        metrics = {**record.metrics, "base": cell.recipe.base}  # archives do not have the base model's path
    return Outcome(cell=cell, folder=Path(), seconds=0.0, ran=False, diverged=record.diverged, archived_metrics=metrics)


def _describe_origin(records: Sequence[Record]) -> str:
    """Describe when and where runs were made: "measured 2026-11-20: 12 with comingle 0.9 on x86_64, torch 2.7"."""
    dates = sorted({record.made["date"] for record in records})
    period = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    counts = Counter(f"{_describe_version(record.made)} on {record.made['machine']}" for record in records)
    origins = "; ".join(f"{count} with {origin}" for origin, count in counts.most_common())
    return f"measured {period}: {origins}"


def _describe_version(made: Mapping[str, str]) -> str:
    """Return "comingle 0.9 (commit 1f5a0c8e2b7d)" from a record's ``made``; the commit may be unknown."""
    version = f"comingle {made['version']}"
    if made["commit"]:
        version += f" (commit {made['commit']})"
    return version


# -------------------------------------------------------------------- runs that are made here


def choose_cells(planned: Plan, records: Records, path: Path, max_runs: int) -> list[Cell]:
    """Choose at most ``max_runs`` of a plan's runs that are in an archive, evenly spaced, to run them again.

    Args:
        planned: The plan of a table: its rows, columns and runs.
        records: The archive's runs by name, with their results and the digests of their inputs.
        path: The archive, for error messages.
        max_runs: The largest number of runs.

    Raises:
        RunError: The archive holds none of the plan's runs.
    """
    cells = [cell for cell in unique_cells(planned.cells) if cell.folder in records]
    if not cells:
        raise RunError(f"--check: {path} has none of the {len(planned.cells)} runs that are asked for")
    num_chosen = min(max_runs, len(cells))
    return [cells[i * len(cells) // num_chosen] for i in range(num_chosen)]


def compare_run(record: Record, outcome: Outcome) -> tuple[str, bool]:
    """Compare an archived run with the same run made here, to check that published results can be reproduced.

    Args:
        record: The archived run.
        outcome: The run made here, with its folder.

    Returns:
        A description of both results, and whether they are equal up to rounding.

    Raises:
        RunError: The two runs read different inputs.
    """
    title = title_of(outcome.cell)
    record_here = record_of(outcome.folder)
    check_same_inputs(f"{title}: {record.run}", record.inputs, record_here.inputs)
    difference = relative_difference(record.metrics, record_here.metrics)
    results = f"published {_describe_result(record)}, here {_describe_result(record_here)}"
    return f"{title}: {results} ({difference:.3%} apart)", difference <= ROUNDING


def _describe_result(record: Record) -> str:
    """Return the mean test result of an archived run as text, or "diverged"."""
    if record.metrics is None:
        return "diverged"
    measure = measure_of(record.metrics)
    return number(record.metrics[f"mean_test_{measure}"], measure)


def add_runs(path: Path, name: str, selection: RunSelection, out: Path, waiting: Waiting) -> str:
    """Add the finished runs of an experiment to an archive, the file with all its runs' results; start no run.

    All runs of a column must have read the same data and base model. So every finished run, and one archived run of
    each column, is checked against the data and base models on this machine.

    Args:
        path: The archive, which is created if it does not exist.
        name: The table or figure, such as ``comigs/table1``.
        selection: The rows, columns, seeds and scale that were given on the command line.
        out: The folder with the finished runs.
        waiting: Shows which inputs are being read.

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
    finished_columns = sorted({cell.column for cell in finished})
    _check_columns(path, archived, name, replace(selection, columns=finished_columns), InputCache(waiting))
    new_records = (record_of(outcome.folder) for outcome in outcomes)
    merged = merge_records(path, archived, new_records)
    write_archive(path, merged.values())
    num_added = len(merged) - len(archived)
    num_unfinished = len(cells) - len(finished)
    return (
        f"{path}: {num_added} runs added, {len(finished) - num_added} were in it, {len(merged)} now; "
        f"{num_unfinished} of the {len(cells)} that are asked for are not finished"
    )


def _check_columns(path: Path, records: Records, name: str, selection: RunSelection, cache: InputCache) -> None:
    """Check that an archive's runs read the base model and data that are on this machine; check one run per column.

    Args:
        path: The archive, for error messages.
        records: The archive's runs by name, with their results and the digests of their inputs.
        name: The table or figure, such as ``comigs/table1``.
        selection: Options of the command line. Its columns are checked; rows and seeds are those of the archive.
        cache: Cache of the inputs on this machine.

    Raises:
        RunError: The inputs of an archived run differ.
    """
    archived_seeds = sorted({record.computed["seed"] for record in records.values()})
    if not archived_seeds:  # the archive is empty
        return
    cells = plan(name, replace(selection, methods=None, seeds=archived_seeds)).cells
    cell_by_column = {cell.column: cell for cell in cells if cell.folder in records}
    for cell in cell_by_column.values():
        check_same_inputs(f"{path}: {cell.folder}", records[cell.folder].inputs, cache.input_digests(cell))
