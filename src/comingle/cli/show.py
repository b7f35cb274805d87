"""``comingle show``, ``report`` and ``plot``: results of runs in the terminal, on an HTML page or as figures."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from comingle.cli.options import AllUsers, console, parse_path, status
from comingle.utils.errors import RecipeError, RunError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from comingle.reports.canvas import Panels
    from comingle.reports.comparisons import ComparisonTable
    from comingle.reports.page import Sheet
    from comingle.reports.runs import Entry


Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="Run folders, or folders of comparisons with all their runs.")
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", help="Route this text or text file (repeatable; default: the users' test text)."),
]
Users = Annotated[
    str | None, typer.Option("--users", help="Show these users' tokens, separated by commas (default: the first 6).")
]
Length = Annotated[int, typer.Option("--tokens", min=1, help="Route the first N tokens of each text.")]
Replace = Annotated[bool, typer.Option("--force", help="Replace existing files.")]


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="<path>", parser=parse_path, help="Write to this file (default: RUN/report.html)."
        ),
    ] = None,
    text: Texts = None,
    users: Users = None,
    tokens: Length = 120,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="METHODS", help="Use the best of these as the baseline (default: local)."),
    ] = None,
    no_tokens: Annotated[
        bool, typer.Option("--no-tokens", help="Omit the token view; load no model and show no text.")
    ] = False,
    force: Replace = False,
) -> None:
    """Write one self-contained HTML page about runs: curves, gains, costs, expert scores, and a token view.

    Unless --text or --no-tokens is given, the page contains the beginning of each user's test text, which may be
    private.
    """
    from comingle.utils.files import check_target, require_packages

    require_packages("comingle report")
    from comingle.cli.compare import split_names
    from comingle.reports.page import render_page
    from comingle.reports.runs import baseline_comparison, read_entries
    from comingle.runs.views import route_texts
    from comingle.utils.records import write_text

    path = out or runs[0] / "report.html"
    entries = read_entries(runs)
    check_target(path, force=force)
    baseline_comparison(entries, against)  # reports a wrong --against before anything is drawn
    token_views = []  # the experts to which routers send each token of some texts
    if not no_tokens:
        user_names = None if users is None else split_names(users)
        with status("loading models and routing texts"):
            token_views = route_texts(entries, text, user_names, tokens)
    with status("drawing"):
        page = render_page(entries, token_views, baseline=against)
    try:
        write_text(path, page)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
    warn_if_incomparable(entries)
    console.print(f"{path}  {len(page.encode()) / 1e6:.2f} MB; open it in a browser", highlight=False)
    shown_texts = [shown_text for view in token_views for shown_text in view.texts]
    has_private_text = any(shown_text.owner for shown_text in shown_texts)  # texts of --text have no owner
    if has_private_text:
        console.print("the page shows the beginning of each user's test text; --no-tokens omits it", style="dim")


def warn_if_incomparable(entries: Sequence[Entry]) -> None:
    """Print a warning for each reason why numbers of these runs should not be compared, such as different test data.

    Args:
        entries: The runs; an entry has the runs of one method, which differ in their seeds.
    """
    from comingle.reports.page import comparability_warnings
    from comingle.utils.terminal import errors, literal_text

    for warning in comparability_warnings(entries):
        errors.print(Text.assemble(("warning: ", "yellow"), literal_text(warning)), highlight=False, soft_wrap=True)


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a folder with several runs.")],
    all_users: AllUsers = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="METHODS", help="Use the best of these as a comparison's baseline; also in --latex."
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="<path>", parser=parse_path, help="Write one row per user and run to a CSV file."
        ),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option("--parquet", metavar="<path>", parser=parse_path, help="Write the same rows to a Parquet file."),
    ] = None,
    latex: Annotated[
        Path | None,
        typer.Option(
            "--latex",
            metavar="<path>",
            parser=parse_path,
            help="Write the table and the verdicts to a LaTeX file (booktabs).",
        ),
    ] = None,
    force: Replace = False,
) -> None:
    """Print the results of a run or of a comparison, or write each user's results to a file."""
    from comingle.reports.tables import render_client, render_runs
    from comingle.utils.files import check_target, is_locked
    from comingle.utils.records import client_models, client_runs, numbered_runs, plural

    target_by_option = {"--csv": csv, "--parquet": parquet, "--latex": latex}
    given_options = [option for option, path in target_by_option.items() if path is not None]
    for option, path in target_by_option.items():
        if path is not None:
            check_target(path, force=force, option=option)
    record_options = [option for option in given_options if option != "--latex"]
    if against is not None and record_options:
        raise RecipeError(
            f"--against: got it with {' and '.join(record_options)}, whose rows are results of single runs; allowed: "
            "the printed tables, or --latex"
        )
    if not given_options:
        if runs := client_runs(run):
            console.print(render_client(run, is_running=is_locked(runs[-1].parent)))
            models = client_models(run)
            if not models:
                return
            run = models[-1]
            console.print(Text(f"\n{run}"), soft_wrap=True)
        runs = numbered_runs(run)
        if runs:  # of a continuous federation or of `comingle live`
            console.print(render_runs(runs, title=f"{run}: {plural(len(runs), 'run')}"))
            finished = [folder for folder in runs if (folder / "metrics.json").exists()]
            if not finished:
                return
            run = finished[-1]
            console.print(Text(f"\n{run}"), soft_wrap=True)
        for table in _run_tables(run, against, all_users=all_users):
            console.print(table)
    if record_options:
        _write_records(run, csv, parquet)
    if latex is not None:
        _write_latex(run, latex, against, all_users=all_users)


def _run_tables(run: Path, against: str | None, *, all_users: bool) -> list[RenderableType]:
    """Return what ``comingle show`` prints of a run (its results and learning curve) or of a comparison (its tables).

    Args:
        run: Folder of the run or of the comparison.
        against: Value of ``--against``, such as "local" or "local,fedavg"; None for the baseline in ``table.json``.
        all_users: Whether to list all users.

    Raises:
        RecipeError: ``against`` is given for a single run.
    """
    from comingle.reports.runs import continuation_line, forgetting_lines, served_lines
    from comingle.reports.tables import render_curve, render_run, render_with_verdicts
    from comingle.utils.records import read_events, read_metrics
    from comingle.utils.terminal import literal_text

    if _is_comparison(run):
        return list(render_with_verdicts(_read_comparison(run, against), all_users=all_users))
    _require_no_baseline(run, against)
    metrics = read_metrics(run)
    tables: list[RenderableType] = [render_run(metrics, all_users=all_users)]
    all_results_are_private = not metrics["users"] and "untold" in metrics  # untold: users that report no results
    events = list(read_events(run))
    for event in events:
        if event["event"] == "start" and "continues" in event:
            tables.append(literal_text(continuation_line(event["continues"]), "dim"))
    tables += [literal_text(line, "dim") for line in [*forgetting_lines(metrics), *served_lines(metrics)]]
    num_evaluations = sum(event["event"] == "evaluation" for event in events)  # a federation's client has one
    if num_evaluations > 1 and not all_results_are_private:
        tables.append(render_curve(events))
    return tables


def _is_comparison(folder: Path) -> bool:
    """Return whether a folder is that of a comparison, rather than of a single run."""
    return (folder / "table.json").exists()


def _read_comparison(folder: Path, against: str | None) -> ComparisonTable:
    """Return the table of a comparison; ``against`` replaces the baseline with which its methods are compared.

    Args:
        folder: Folder of the comparison.
        against: Value of ``--against``, such as "local" or "local,fedavg"; None for the baseline in ``table.json``.

    Raises:
        RunError: The folder has the table of a reproduced publication, or an unreadable one.
        RecipeError: The comparison does not have these methods.
    """
    from comingle.reports.comparisons import read_comparison, with_baseline

    table = read_comparison(folder)
    if "methods" not in table:
        raise RunError(
            f"{folder}: has a table of `comingle reproduce`, not of `comingle compare`; print it, or write it as "
            f"LaTeX, with {_reproduce_command(folder, table)}"
        )
    return table if against is None else with_baseline(table, against)


def _reproduce_command(folder: Path, table: Mapping[str, Any]) -> str:
    """Return the command that prints a reproduced table again, as text for a message.

    Args:
        folder: The table's folder.
        table: Content of its ``table.json``.
    """
    if "counted" in table:  # costs, which are counted and not run; they have no LaTeX table
        return f"its `comingle reproduce` command again, or read {folder / 'table.md'}"
    name, scale = table.get("name", "NAME"), table.get("scale", "SCALE")
    results_option = "--measured FILE" if "measured" in table else "--resume"
    return (
        f"`comingle reproduce {name} --scale {scale} --out {folder.parent} {results_option} [--latex FILE]` and the "
        "same --methods, --columns and --seeds"
    )


def _require_no_baseline(run: Path, against: str | None) -> None:
    """Raise a :class:`RecipeError` if ``--against`` is given for a single run, which has no baseline to choose."""
    if against is not None:
        raise RecipeError(f"--against {against!r}: {run} is not the folder of a comparison")


def _write_records(run: Path, csv: Path | None, parquet: Path | None) -> None:
    """Write the results of a run, or of all runs of a comparison, with a row for each user of each run.

    Args:
        run: Folder of the run or of the comparison.
        csv: CSV file to write; None for none.
        parquet: Parquet file to write; None for none.
    """
    from comingle.reports.page import csv_text, sheet_of, user_records
    from comingle.reports.runs import find_runs
    from comingle.utils.records import write_bytes, write_text

    records = user_records(find_runs([run]))
    if csv is not None:
        write_text(csv, csv_text(sheet_of(records)))
        console.print(f"{csv}  {len(records)} rows", highlight=False)
    if parquet is not None:
        write_bytes(parquet, _parquet(records))
        console.print(f"{parquet}  {len(records)} rows", highlight=False)


def _write_latex(run: Path, path: Path, against: str | None, *, all_users: bool) -> None:
    """Write the table of a run or of a comparison as LaTeX, with a table of the verdicts if there are any.

    Args:
        run: Folder of the run or of the comparison.
        path: The file to write.
        against: Value of ``--against``, such as "local" or "local,fedavg"; None for the baseline in ``table.json``.
        all_users: Whether to list all users.

    Raises:
        RecipeError: ``against`` is given for a single run, or there are no verdicts.
    """
    from comingle.reports.comparisons import compare_metrics
    from comingle.reports.tables import latex
    from comingle.utils.records import read_metrics, write_text

    if _is_comparison(run):
        table = _read_comparison(run, against)
    else:
        _require_no_baseline(run, against)
        metrics = read_metrics(run)
        table = compare_metrics([(metrics["method"], metrics)])
    name = run.resolve().name
    require_verdicts = against is not None  # else the table has them if there are several methods and seeds
    write_text(path, latex(table, name=name, all_users=all_users, require_verdicts=require_verdicts))
    console.print(f"{path}  {len(table['methods'])} rows", highlight=False)


def _parquet(records: Sequence[Mapping[str, object]]) -> bytes:
    """Return the records as a Parquet file.

    Raises:
        RunError: pandas or pyarrow is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
        return pandas.DataFrame.from_records(records).to_parquet(index=False)
    except ImportError:
        message = "--parquet needs the packages pandas and pyarrow: pip install pandas pyarrow; --csv needs neither"
        raise RunError(message) from None


Figures = Iterator[tuple[str, "Figure", "Sheet"]]
"""For each figure a name for its files, the figure, and its numbers as a table (a header and rows)."""
KINDS = ("curves", "scores", "users", "bytes", "mixtures", "tokens")
"""Kinds of figures that ``comingle plot`` draws."""


def plot(
    runs: Runs,
    figure: Annotated[
        list[str] | None,
        typer.Option("--figure", help=f"Draw {', '.join(KINDS)} (repeatable; default: all but tokens)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="<path>", parser=parse_path, help="Write to this folder (default: RUN/figures)."),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", help="Show this layer's tokens (default: first, middle, last).")
    ] = None,
    text: Texts = None,
    users: Users = None,
    tokens: Length = 120,
    force: Replace = False,
) -> None:
    """Write figures of runs as PNG, SVG and CSV. The figure tokens shows the users' test text, or --text."""
    from comingle.utils.files import check_target, require_packages

    require_packages("comingle plot")
    from comingle.reports.canvas import save
    from comingle.reports.page import csv_text
    from comingle.reports.runs import read_entries
    from comingle.utils.records import write_text

    kinds = figure or [kind for kind in KINDS if kind != "tokens"]
    for kind in kinds:
        if kind not in KINDS:
            raise RecipeError(f"--figure {kind!r}: allowed: {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    entries = read_entries(runs)
    folder = out or runs[0] / "figures"
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out must be a folder")
    with status("drawing"):
        drawn = []  # name, figure and its numbers, of each figure
        for kind in kinds:
            if kind == "tokens":
                drawn += _token_figures(entries, text, users, tokens, layer)
            else:
                drawn += _draw_figures(kind, entries)
    if not drawn:
        raise RunError(
            f"{runs[0]}: nothing to draw for {', '.join(kinds)}: no token routers, or nothing to compare with"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, _, _ in drawn:
        for ending in (".png", ".svg", ".csv"):
            check_target(folder / f"{name}{ending}", force=force)
    warn_if_incomparable(entries)
    for name, image, sheet in drawn:
        save(image, folder, name)
        write_text(folder / f"{name}.csv", csv_text(sheet))
        console.print(f"{folder / name}.png  {folder / name}.svg  {folder / name}.csv", highlight=False)


def _draw_figures(kind: str, entries: list[Entry]) -> Figures:
    """Draw the figures of one kind. Figures that would be empty are left out.

    Args:
        kind: Kind of figure, an element of :data:`KINDS` other than "tokens".
        entries: The runs; an entry has the runs of one method, which differ in their seeds.

    Yields:
        For each figure a name for its files, the figure, and its numbers as a table (a header and rows).
    """
    if kind == "mixtures":
        yield from _mixtures_figures(entries)
    else:
        for name, panels in _panels_of_kind(kind, entries):
            if panels is not None:
                yield name, panels.figure(), panels.sheet


def _panels_of_kind(kind: str, entries: list[Entry]) -> Iterator[tuple[str, Panels | None]]:
    """Yield the figures of one kind that consist of several panels, each with a name for its files.

    Args:
        kind: "curves" (test results during training), "bytes" (final results against uploaded bytes), "scores" (of the
            experts, for each method with routers) or "users" (changes of users' results against a baseline).
        entries: The runs; an entry has the runs of one method, which differ in their seeds.

    Yields:
        The name and the figure; None in place of a figure that would be empty.
    """
    from comingle.reports.figures import (
        bytes_panels,
        curves_panels,
        is_population,
        population_panels,
        scores_panels,
        users_panels,
    )
    from comingle.reports.runs import baselines

    if kind == "curves":
        yield "curves", curves_panels(entries)
        yield "curves-late", curves_panels(entries, start=False)  # without the first evaluation
    elif kind == "bytes":
        yield "bytes", bytes_panels(entries)
    elif kind == "scores":
        for entry in entries:
            if entry.first.has_routers:
                yield f"scores-{file_name(entry.label)}", scores_panels(entry, entries)
    else:  # "users"
        for baseline in baselines(entries):
            yield f"users-against-{file_name(baseline.label)}", users_panels(entries, baseline)
            if is_population(entries[0].first.users):
                yield f"population-against-{file_name(baseline.label)}", population_panels(entries, baseline)


def _mixtures_figures(entries: list[Entry]) -> Figures:
    """Draw each user's mixture weights over the rounds, for each run of a method with client-level mixtures.

    Args:
        entries: The runs; an entry has the runs of one method, which differ in their seeds.

    Yields:
        For each such run a name for the files, the figure, and its numbers as a table (a header and rows).
    """
    from comingle.reports.figures import mixtures_figure, read_mixtures
    from comingle.reports.page import mixtures_sheet

    for entry in entries:
        for run in entry.runs:
            mixtures = read_mixtures(run.folder)
            if mixtures is None:
                continue
            name = f"mixtures-{file_name(entry.label)}"
            if len(entry.runs) > 1:
                name += f"-seed{run.seed}"
            yield name, mixtures_figure(mixtures), mixtures_sheet(mixtures)


def _token_figures(
    entries: list[Entry], texts: list[str] | None, users: str | None, length: int, layers: list[int] | None
) -> Figures:
    """Draw the top expert of each token of texts, in a figure for each method and layer.

    Args:
        entries: The runs; an entry has the runs of one method. Its run with the lowest seed is drawn.
        texts: Texts or names of text files; None for the users' test texts.
        users: Names of users, separated by commas; None for the first few.
        length: Number of tokens of each text.
        layers: Layers to draw, from 0; None for the first, the middle and the last one.

    Yields:
        A name for the files, the figure, and its numbers as a table (a header and rows).

    Raises:
        RecipeError: A model has no such layer.
    """
    from comingle.cli.compare import split_names
    from comingle.reports.page import tokens_figure, tokens_sheet
    from comingle.runs.views import route_texts

    user_names = None if users is None else split_names(users)
    for view in route_texts(entries, texts, user_names, length):  # one for each method with routers
        last_layer = view.layers - 1
        first_middle_last = sorted({0, last_layer // 2, last_layer})  # such as [0, 5, 11]
        for layer in layers or first_middle_last:
            if not 0 <= layer <= last_layer:
                raise RecipeError(f"--layer {layer}: {view.label} has layers 0 to {last_layer}")
            name = f"tokens-{file_name(view.label)}-layer{layer}"
            yield name, tokens_figure(view, layer), tokens_sheet(view, layer)


def file_name(label: str) -> str:
    """Return a label as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", label).strip("-")
