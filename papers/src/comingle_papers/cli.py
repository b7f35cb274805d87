"""``comingle reproduce`` and ``comingle theory``; heavy imports are inside the functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comingle.cli.compare import split_names, split_seeds
from comingle.cli.options import Force, Out, Quiet, Resume, Sets, console, out_option, parse_path, parse_sets, status
from comingle.utils.errors import ComingleError, RecipeError, RunError
from comingle.utils.files import check_target

if TYPE_CHECKING:
    from rich.text import Text

    from comingle.reports.formatting import Table
    from comingle.training.client import Clients
    from comingle.training.events import Observer
    from comingle_papers.recipes import TheoryRecipe
    from comingle_papers.reproduce.plan import Cell, Plan, RunSelection
    from comingle_papers.reproduce.runner import Outcome
    from comingle_papers.reproduce.tables import PaperTable
    from comingle_papers.theory.claims import Row


def run_all(cells: list[Cell], out: Path, jobs: int, *, force: bool, quiet: bool) -> Iterator[Outcome]:
    """Run the cells of a table, ``jobs`` at a time; yield the outcome of each when it has ended.

    Args:
        cells: The runs, one for each row, column and seed of the table.
        out: The folder that contains ``runs``.
        jobs: The number of parallel runs.
        force: Repeat finished runs.
        quiet: Show no progress.
    """
    from comingle.runs.progress import reporting
    from comingle_papers.reproduce.runner import run_cells, run_parallel, title_of

    if jobs > 1 and len(cells) > 1:
        yield from run_parallel(cells, out, jobs=jobs, force=force, quiet=quiet)
        return
    with reporting(quiet=quiet) as reporter:

        def observers(cell: Cell, clients: Clients) -> list[Observer]:
            reporter.clear()  # remove the progress bar of the run before
            return [reporter.watch(clients, title_of(cell))]

        yield from run_cells(cells, out, force=force, observers=observers, waiting=reporter.waiting)


def table_of(planned: Plan, outcomes: dict[str, Outcome], baseline: str | None) -> PaperTable:
    """Return the paper's table with the numbers of the runs that have finished so far.

    Args:
        planned: The plan of all runs.
        outcomes: The runs that have ended, by run name, with their metrics or the reason why they diverged.
        baseline: A row or a method to compare the others with; None for the default.
    """
    from comingle_papers.reproduce.runner import results, scores
    from comingle_papers.reproduce.tables import build_table

    diverged = [
        f"{outcome.cell.column}, {outcome.cell.row}: {outcome.diverged}"  # with the reason
        for outcome in outcomes.values()
        if outcome.diverged
    ]
    metric = planned.experiment.metric
    mean_scores = scores(outcomes, planned.cells, metric)  # means over users, which papers print
    results_by_user = results(outcomes, planned.cells, metric)  # for the comparison with the baseline
    return build_table(planned, mean_scores, diverged=diverged, results=results_by_user, baseline=baseline)


def print_table(table: PaperTable) -> None:
    """Print a table, its remarks, and its comparisons with a baseline."""
    from comingle.reports.comparisons import render as render_comparison
    from comingle.utils.terminal import literal_text
    from comingle_papers.reproduce.tables import column_verdicts, remarks, render

    console.print(render(table))
    for remark in remarks(table):
        console.print(f"· {remark}", highlight=False)
    for label, comparison in column_verdicts(table):
        console.print()
        console.print(literal_text(label, "bold"))
        for part in render_comparison(comparison):
            console.print(part)


def show_measured(path: Path, name: str, selection: RunSelection, out: Path, *, baseline: str | None) -> PaperTable:
    """Print, write and return a table of runs that were measured before and are in an archive; run nothing.

    Args:
        path: The archive, the file with the runs' results.
        name: The table or figure, such as ``comigs/table1``.
        selection: The rows, columns, seeds and scale that were given on the command line.
        out: The folder below which the table gets a folder, such as ``table1-measured``.
        baseline: A row or a method to compare the others with; None for the default.
    """
    from comingle.utils.terminal import literal_text
    from comingle_papers.reproduce.archive import find_archived, plan_of, read_archive
    from comingle_papers.reproduce.tables import write_tables

    records = read_archive(path)
    full_plan = plan_of(records, name, selection)
    archived_plan, outcomes, remarks = find_archived(full_plan, records, path)
    table = table_of(archived_plan, outcomes, baseline)
    table["measured"] = remarks
    table_name = name.partition("/")[2]
    folder = out / f"{table_name}-measured"
    write_tables(folder, table)
    print_table(table)
    console.print(literal_text(f"{folder}/  table.md · table.json", "dim"))
    return table


def check_measured(
    path: Path,
    name: str,
    selection: RunSelection,
    out: Path,
    max_runs: int,
    jobs: int | None,
    *,
    force: bool,
    quiet: bool,
) -> None:
    """Repeat some of an archive's runs on this machine, and print the archived and the new result of each.

    Args:
        path: Path of the archive.
        name: The table or figure, such as ``comigs/table1``.
        selection: The rows, columns, seeds and scale that were given on the command line.
        out: The folder for the repeated runs.
        max_runs: The largest number of runs to repeat.
        jobs: The number of parallel runs; None for the plan's.
        force: Repeat finished runs.
        quiet: Show no progress.

    Raises:
        RunError: The data or the base model differ from those of the archived runs, or a result differs.
    """
    from comingle_papers.reproduce.archive import ROUNDING, choose_cells, compare_run, read_archive
    from comingle_papers.reproduce.plan import plan

    planned = plan(name, selection)
    records = read_archive(path)
    cells = choose_cells(planned, records, path, max_runs)
    num_different = 0
    for outcome in run_all(cells, out, jobs or planned.jobs, force=force, quiet=quiet):
        archived_record = records[outcome.cell.folder]
        comparison, is_same = compare_run(archived_record, outcome)
        console.print(comparison, highlight=False)
        if not is_same:
            num_different += 1
    if num_different:
        raise RunError(f"--check {path}: {num_different} of {len(cells)} runs differ by more than {ROUNDING:.1%}")


def add_measured(path: Path, name: str, selection: RunSelection, out: Path, *, quiet: bool) -> None:
    """Add finished runs to an archive.

    Args:
        path: Path of the archive.
        name: The table or figure, such as ``comigs/table1``.
        selection: The rows, columns, seeds and scale that were given on the command line.
        out: The folder of the finished runs.
        quiet: Show no progress.
    """
    from comingle.runs.progress import reporting
    from comingle_papers.reproduce.archive import add_runs

    with reporting(quiet=quiet) as reporter:
        summary = add_runs(path, name, selection, out, reporter.waiting)
    console.print(summary, highlight=False)


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table or figure, as comigs/table1 (default: list all).")
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="Use this scale: smoke, cpu or paper; comigs: also cpu-smollm2.")
    ] = "paper",
    methods: Annotated[str | None, typer.Option("--methods", help="Run only these rows or methods.")] = None,
    columns: Annotated[str | None, typer.Option("--columns", help="Run only these columns.")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Use these seeds (default: the scale's).")] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Use this base model (default: the scale's or the paper's).")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Read text and images from this folder (default: $COMINGLE_DATA, or the hub)."),
    ] = None,
    sets: Sets = None,
    out: Annotated[Path | None, out_option("Write to this folder (default: runs/PAPER-SCALE).")] = None,
    resume: Resume = False,
    force: Force = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Run N runs in parallel (default: the scale's; cpu: one per core)."),
    ] = None,
    quiet: Quiet = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="ROWS",
            help="Use the best of these rows or methods as the baseline (default: local, or the first).",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            metavar="FILE",
            help="Use published runs of FILE (or comigs-cpu); start none.",
        ),
    ] = None,
    check: Annotated[
        int | None, typer.Option("--check", min=1, metavar="N", help="Repeat N of FILE's runs here, and compare.")
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="Add finished runs in --out to FILE; start none.")] = False,
    latex: Annotated[
        Path | None,
        typer.Option(
            "--latex", metavar="<path>", parser=parse_path, help="Also write the table to a LaTeX file (booktabs)."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs; start none.")] = False,
) -> None:
    """Reproduce a published table or figure, and compare the numbers and the order of methods with the paper's."""
    if name is None:
        return _list_experiments()
    if latex is not None:
        check_target(latex, force=True, option="--latex")  # raises before the runs if the file cannot be written
    from comingle_papers.reproduce.plan import RunSelection, plan

    selection = RunSelection(
        scale=scale,
        methods=split_names(methods) if methods is not None else None,
        columns=split_names(columns) if columns is not None else None,
        seeds=split_seeds(seeds) if seeds is not None else None,
        base=base,
        data=data,
        changes=parse_sets(sets),
    )
    folder = out or _default_folder(name, scale)
    if add and measured is None:
        raise RecipeError("--add: give a file with --measured FILE")
    if check is not None and measured is None:
        raise RecipeError("--check: give a file with --measured FILE")
    if add and check is not None:
        raise RecipeError("--add and --check: got both; --add uses finished runs, --check starts new ones")
    if measured is not None and not dry_run:
        from comingle_papers.reproduce.archive import find_archive

        if add:
            return add_measured(measured, name, selection, folder, quiet=quiet)
        archive = find_archive(measured)
        table = show_measured(archive, name, selection, folder, baseline=against)
        _write_latex(latex, table)
        if check is not None:
            check_measured(archive, name, selection, folder, check, jobs, force=force, quiet=quiet)
        return None
    planned = plan(name, selection)
    if dry_run:
        return _print_plan(planned)
    if planned.experiment.kind == "cost":
        if latex is not None:
            raise RecipeError(f"--latex {latex}: got {name}, a table of costs; allowed: tables of results")
        # There are no runs to resume: ``--resume`` replaces the table, as ``--force`` does.
        return _count_costs(planned, folder, force=force or resume)
    table = _run_plan(planned, folder, jobs, resume=resume, force=force, quiet=quiet, baseline=against)
    return _write_latex(latex, table)


def _write_latex(path: Path | None, table: PaperTable) -> None:
    """Write a table to a LaTeX file, unless ``path`` is None."""
    if path is None:
        return
    from comingle.utils.records import write_text
    from comingle_papers.reproduce.tables import latex

    write_text(path, latex(table))
    console.print(f"{path}  {len(table['rows'])} rows", highlight=False)


def _default_folder(name: str, scale: str) -> Path:
    """Return the folder of an experiment without ``--out``: ``runs/comigs-cpu`` for ``comigs/table1`` at scale cpu."""
    paper = name.partition("/")[0]
    return Path("runs") / f"{paper}-{scale}"


def _list_experiments() -> None:
    """Print name, title and source of every published table and figure."""
    from rich.table import Table

    from comingle_papers.reproduce.published import list_experiments

    table = Table("name", "what", "source", box=None, pad_edge=False)
    for name, experiment in list_experiments().items():
        table.add_row(name, experiment.title, experiment.source)
    console.print(table)


def _print_plan(planned: Plan) -> None:
    """Print the runs of a plan with their run names, then the columns and rows that are not run."""
    from comingle_papers.reproduce.runner import unique_cells
    from comingle_papers.reproduce.tables import repeated_columns

    for cell in unique_cells(planned.cells):
        console.print(f"{cell.column}  {cell.row}  seed {cell.seed}  {cell.folder}", highlight=False)
    for column, first_column in repeated_columns(planned).items():
        console.print(f"repeats the runs of {first_column}: {column}", highlight=False)
    for column, reason in planned.left_out.items():
        console.print(f"left out: {column} ({reason})", highlight=False)
    for row in planned.missing:
        console.print(f"missing: {row} (no such method yet)", highlight=False)


def _run_plan(
    planned: Plan, out: Path, jobs: int | None, *, resume: bool, force: bool, quiet: bool, baseline: str | None
) -> PaperTable:
    """Run a plan, write its table after every run, and print and return the table at the end.

    Args:
        planned: The plan of a table: its rows, columns and runs.
        out: The folder for the table's folder and ``runs``.
        jobs: The number of parallel runs; None for the plan's.
        resume: Accept that the table's folder exists, and run only what is missing.
        force: Replace an existing table and repeat finished runs.
        quiet: Show no progress.
        baseline: A row or a method to compare the others with; None for the default.
    """
    from comingle.utils.terminal import errors, literal_text
    from comingle_papers.reproduce.runner import Estimate, check_hub, experiment_folder, unique_cells
    from comingle_papers.reproduce.tables import baseline_row, write_tables

    baseline_row(planned, baseline)  # raises before the first run if there is no such row
    check_hub(planned)
    folder = experiment_folder(out, planned.name, resume=resume, force=force)
    cells = unique_cells(planned.cells)
    jobs = jobs or planned.jobs
    estimate = Estimate()
    outcomes: dict[str, Outcome] = {}
    table: PaperTable | None = None
    for outcome in run_all(cells, out, jobs, force=force, quiet=quiet):
        outcomes[outcome.cell.folder] = outcome
        estimate.learn(outcome)
        seconds_of_runs_left = estimate.seconds_left(_remaining_cells(cells, outcomes, out, force))
        seconds_left = None if seconds_of_runs_left is None else seconds_of_runs_left / jobs
        if not quiet:
            line = _progress_line(outcome, len(outcomes), len(cells), seconds_left)
            errors.print(line, soft_wrap=True)  # one line per run, also when written to a file
        table = table_of(planned, outcomes, baseline)
        write_tables(folder, table)
    files = "table.md · table.json"
    has_figure = planned.experiment.plot is not None
    if has_figure:
        from comingle_papers.reproduce.runner import draw

        draw(planned, outcomes, folder)
        files += " · figures as .png and .svg"
    assert table is not None  # a plan has at least one cell
    print_table(table)
    console.print(literal_text(f"{folder}/  {files}; the runs are in {out}/runs", "dim"))
    return table


def _count_costs(planned: Plan, out: Path, *, force: bool) -> None:
    """Compute a published table of costs (parameters, memory, FLOPs), print it and write it; nothing is trained.

    Args:
        planned: The plan of a table of kind ``cost``.
        out: The folder for the table's folder.
        force: Replace an existing table.
    """
    from comingle.cost.planning import plan as plan_costs
    from comingle.utils.terminal import literal_text
    from comingle_papers.reproduce.counted import count_cells, write_costs
    from comingle_papers.reproduce.runner import experiment_folder

    folder = experiment_folder(out, planned.name, resume=False, force=force)
    any_recipe = planned.cells[-1].recipe
    is_comigs_table3 = any_recipe.data.kind == "text"  # the only table of costs on text
    with status("counting"):
        costs = None
        if is_comigs_table3:
            methods = [cell.recipe.method.name for cell in planned.cells]
            costs = plan_costs(any_recipe, methods, users=4)  # as many as in the paper
        counts = count_cells(planned, costs)
    for line in write_costs(folder, planned, counts, costs):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(literal_text(f"{folder}/  table.md · table.json", "dim"))


def _remaining_cells(cells: Sequence[Cell], outcomes: dict[str, Outcome], out: Path, force: bool) -> list[Cell]:
    """Return the runs of a table that still have to be trained, for an estimate of the time left.

    Args:
        cells: All runs of the table, without duplicates.
        outcomes: The outcomes so far, by run name.
        out: The folder that contains ``runs``.
        force: Whether finished runs are repeated.
    """
    from comingle_papers.reproduce.runner import RUNS, is_finished

    without_outcome = [cell for cell in cells if cell.folder not in outcomes]
    if force:
        return without_outcome
    return [cell for cell in without_outcome if not is_finished(out / RUNS / cell.folder)]


def _progress_line(outcome: Outcome, num_done: int, num_runs: int, seconds_left: float | None) -> Text:
    """Return one line about a finished run, "3/8 news · fedavg · seed 0: 46.36 · 12 s · about 2 min left".

    Args:
        outcome: The outcome of the run.
        num_done: The number of finished runs, this one included.
        num_runs: The number of all runs.
        seconds_left: Estimated seconds for the remaining runs; None if unknown.
    """
    from rich.text import Text

    from comingle.reports.formatting import format_duration
    from comingle.utils.records import measure_of, number

    cell = outcome.cell
    if outcome.diverged:
        result = "diverged"
    else:
        measure = measure_of(outcome.metrics)
        result = number(outcome.metrics[f"mean_test_{measure}"], measure)
    duration = f"{outcome.seconds:.0f} s" if outcome.ran else "already done"
    line = f" {cell.column} · {cell.row} · seed {cell.seed}: {result} · {duration}"
    if seconds_left is not None and num_done < num_runs:
        line += f" · about {format_duration(seconds_left)} left"
    return Text.assemble((f"{num_done}/{num_runs}", "dim"), line)


def theory(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A theory recipe (default: comigs/theory.yaml).")
    ] = None,
    out: Out = None,
    force: Force = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Use this random seed (default: the recipe's).")] = None,
) -> None:
    """Run the schemes of CoMiGS and FLoRAL on small problems, and compare them with the bounds of their theory."""
    path, theory_recipe = _load_recipe(recipe, seed)
    _require_packages()
    from comingle.utils.terminal import literal_text
    from comingle_papers.theory.checks import (
        LinearSettings,
        QuadraticSettings,
        as_json,
        check_all,
        check_folder,
        write_folder,
    )
    from comingle_papers.theory.claims import summarise
    from comingle_papers.theory.clusters import ClusterSettings
    from comingle_papers.theory.quadratics import CoupledSettings

    folder = out or Path("runs") / path.stem
    check_folder(folder, force=force)
    with status("running gradient descent"):
        curves = check_all(
            theory_recipe.seed,
            QuadraticSettings(**theory_recipe.quadratic.model_dump()),
            LinearSettings(**theory_recipe.linear.model_dump()),
            CoupledSettings(**theory_recipe.coupled.model_dump()),
            ClusterSettings(**theory_recipe.clusters.model_dump()),
        )
        write_folder(folder, theory_recipe.as_yaml(), as_json(theory_recipe.seed, curves), curves)
    console.print(render(summarise(curves)))
    console.print(literal_text(f"{folder}/  residuals.png · residuals.svg · theory.json · recipe.yaml", "dim"))


def _load_recipe(recipe: Path | None, seed: int | None) -> tuple[Path, TheoryRecipe]:
    """Load the recipe of ``comingle theory``; return its path and content.

    Args:
        recipe: The file; None for ``comigs/theory.yaml``.
        seed: Seed that replaces the recipe's; None keeps it.
    """
    from comingle_papers.recipes import load_theory_recipe, parse_theory_recipe, published_recipes

    path = recipe or published_recipes() / "comigs" / "theory.yaml"
    loaded = load_theory_recipe(path)
    if seed is None:
        return path, loaded
    with_seed = {**loaded.model_dump(), "seed": seed}
    return path, parse_theory_recipe(with_seed, where="--seed")


def _require_packages() -> None:
    """Check that the packages of the theory's computations and figures are installed.

    Raises:
        ComingleError: One is missing; the message names it.
    """
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
        import threadpoolctl  # noqa: F401
    except ImportError as error:
        raise ComingleError(f"comingle theory needs {error.name}: pip install 'comingle[reports]'") from None


def render(rows: list[Row]) -> Table:
    """Return the terminal table of ``comingle theory``: the papers' statements with measured values and bounds.

    Each kind of problem ("scheme") has a heading, then a line for each statement about it, such as
    ``Theorem F.1, experts   0.41   ≤   0.43   20 of 20``.

    Args:
        rows: The statements; rows of the same scheme follow each other.
    """
    from comingle.reports.formatting import Table
    from comingle.utils.terminal import literal_text

    table = Table("", title="tightest instance: measured and predicted", title_justify="left", box=None)
    for name in ("measured", "", "bound", "holds for"):
        table.add_column(name, justify="right")
    scheme = None
    for row in rows:
        if row.scheme != scheme:
            scheme = row.scheme
            table.add_row(literal_text(scheme, "bold"))
        if row.bound is None:
            relation, bound = "", "none"
        else:
            relation = "≥" if row.at_least else "≤"
            bound = number(row.bound)
        holds_where_it_applies = row.held == row.covered
        style = "" if holds_where_it_applies else "red"
        table.add_row(f"  {row.statement}", number(row.measured), relation, bound, _count_instances(row), style=style)
    table.caption = (
        "CoMiGS: largest share of the residual left by one step. Clusters: the instance closest to its bound.\n"
        "No bound: the conditions do not hold. 'As printed' is the paper's inequality, which need not hold "
        "(papers/docs/papers.md)."
    )
    table.caption_justify = "left"
    return table


def _count_instances(row: Row) -> str:
    """Return how many random problems obey a statement, as "3 of 5, 2 without bound".

    A problem is without bound if the statement's conditions do not hold for it.
    """
    parts = []
    if row.covered:
        parts.append(f"{row.held} of {row.covered}")
    num_without_bound = row.instances - row.covered
    if num_without_bound:
        parts.append(f"{num_without_bound} without bound")
    return ", ".join(parts)


def number(value: float) -> str:
    """Format a number with four digits; one just below 1, as many rates of convergence, as ``1 - 2e-05``."""
    if 0.9999 < value < 1:
        return f"1 - {1 - value:.0e}"
    return f"{value:.4g}"
