"""Tables of our numbers beside the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from comingle.reports import comparisons
from comingle.reports.comparisons import (
    BASELINE,
    BaselineComparison,
    BaselineComparisonRecord,
    Results,
    baseline_methods,
    baseline_of,
    baseline_text,
    compare_with_baseline,
)
from comingle.reports.formatting import Table
from comingle.reports.tables import (
    escape_latex,
    latex_label,
    latex_number,
    latex_verdicts,
    table_environment,
    tabular,
)
from comingle.utils.records import MEASURES, write_json, write_text
from comingle.utils.terminal import words
from comingle_papers.reproduce.plan import Plan
from comingle_papers.reproduce.published import Note, parse_printed

_LISTED = 8
"""Largest number of pairs of rows that a sentence lists."""
_MOSTLY = 0.8
"""Share of pairs in the paper's order above which a sentence says that the order is mostly reproduced."""

Entry = tuple[float, float | None]
"""Mean and standard deviation over seeds; the deviation is None where unknown."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Comparison of the paper's order of some rows with ours.

    ``tau`` is Kendall's tau-b and ``p_value`` tests the hypothesis of independent orders; both are None for fewer than
    two rows, or where all values of one side are equal. ``swapped`` are pairs (the better one in the paper first) whose
    order is reversed here by more than the sum of their deviations; in ``unclear`` pairs the difference is smaller, in
    the paper or here.
    """

    rows: int
    pairs: int
    agreeing: int
    tau: float | None
    p_value: float | None
    swapped: tuple[tuple[str, str], ...]
    unclear: tuple[tuple[str, str], ...]
    deviations: bool
    """Whether our deviations are known; with one seed they are not."""


def ranks(means: Mapping[str, float], *, lower_is_better: bool = True) -> dict[str, int]:
    """Return the rank of each row, 1 for the best; equal numbers share the better rank."""
    sign = 1 if lower_is_better else -1
    num_better = {name: sum(sign * other < sign * mean for other in means.values()) for name, mean in means.items()}
    return {name: 1 + count for name, count in num_better.items()}


def compare_orders(paper: Mapping[str, Entry], ours: Mapping[str, Entry], *, lower_is_better: bool = True) -> Order:
    """Compare the paper's order of rows with ours, pair by pair, for the rows that both have.

    A pair agrees if its difference has the same sign in the paper and here, or is zero in both. Any other pair is
    swapped if both differences exceed the sum of the two rows' standard deviations, and unclear otherwise.

    Args:
        paper: The paper's numbers by row.
        ours: Our numbers by row.
        lower_is_better: Whether the smallest mean is the best.
    """
    names = [name for name in paper if name in ours]
    pairs = list(combinations(names, 2))
    sign = 1.0 if lower_is_better else -1.0
    agreeing = 0
    swapped: list[tuple[str, str]] = []
    unclear: list[tuple[str, str]] = []
    for first, second in pairs:
        paper_difference, our_difference = paper[second][0] - paper[first][0], ours[second][0] - ours[first][0]
        if paper_difference * our_difference > 0 or paper_difference == our_difference == 0:
            agreeing += 1
            continue
        better, worse = (first, second) if sign * paper_difference >= 0 else (second, first)
        is_clear_in_paper = abs(paper_difference) > _summed_deviations(paper, first, second)
        is_clear_here = abs(our_difference) > _summed_deviations(ours, first, second)
        (swapped if is_clear_in_paper and is_clear_here else unclear).append((better, worse))
    tau, p_value = _kendall([paper[n][0] for n in names], [ours[n][0] for n in names])
    return Order(
        rows=len(names),
        pairs=len(pairs),
        agreeing=agreeing,
        tau=tau,
        p_value=p_value,
        swapped=tuple(swapped),
        unclear=tuple(unclear),
        deviations=any(ours[name][1] is not None for name in names),
    )


def _summed_deviations(entries: Mapping[str, Entry], first: str, second: str) -> float:
    """Return the sum of two rows' standard deviations; unknown ones count as zero.

    Args:
        entries: Mean and deviation, by row.
        first: A row.
        second: Another row.
    """
    return (entries[first][1] or 0.0) + (entries[second][1] or 0.0)


def _kendall(paper: list[float], ours: list[float]) -> tuple[float | None, float | None]:
    """Return Kendall's tau-b, which compares the orders of two lists of numbers, and its p-value.

    Tau and p-value are None for fewer than two rows, or where all numbers of one side are equal.

    Args:
        paper: The paper's numbers, by row.
        ours: Our numbers, in the same order of rows.
    """
    if len(paper) < 2:
        return None, None
    from scipy.stats import kendalltau  # takes half a second to import

    result: Any = kendalltau(paper, ours)
    tau, p_value = float(result.statistic), float(result.pvalue)
    return (None, None) if math.isnan(tau) else (tau, p_value)


def sentence(label: str, order: Order, reference: str = "paper") -> str:
    """Return a sentence that says whether our results have the published order of rows.

    Args:
        label: The column's label, with which the sentence begins.
        order: The comparison of the two orders: the number of pairs of rows that agree, the pairs that are ``swapped``
            by more than their deviations, the pairs that are ``unclear`` as their deviations are larger, and Kendall's
            tau.
        reference: The name of the source of the numbers that ours are compared with.
    """
    if order.rows < 2:
        return f"{label}: {order.rows} row with numbers on both sides, so there is no order to compare."
    if order.tau is None:
        return f"{label}: all numbers of one side are equal, so there is no order to compare."
    head = f"{label}: tau = {order.tau:.2f} (p = {order.p_value:.2g}) over {order.rows} rows; "
    if order.agreeing == order.pairs:
        return head + f"the {reference}'s order is reproduced."
    agreement = f"{order.agreeing} of {order.pairs} pairs are in the {reference}'s order"
    if not order.swapped:
        return (
            f"{head}{agreement}, and the others differ by no more than their deviations: {_list_pairs(order.unclear)}."
        )
    is_mostly_reproduced = order.agreeing > _MOSTLY * order.pairs
    verdict = "the order is mostly reproduced" if is_mostly_reproduced else "the order is not reproduced"
    beyond = "beyond the deviations" if order.deviations else "with one seed, so that our deviations are unknown"
    clear = f"reversed, {beyond}: {_list_pairs(order.swapped)}"
    rest = f"; within the deviations: {_list_pairs(order.unclear)}" if order.unclear else ""
    return f"{head}{verdict}: {agreement}; {clear}{rest}."


def _list_pairs(pairs: tuple[tuple[str, str], ...]) -> str:
    """Return pairs of rows as text, ``A before B, ...``; only the first 8, as ``table.json`` has all."""
    shown = [f"{better} before {worse}" for better, worse in pairs[:_LISTED]]
    return ", ".join(shown) + (f" and {len(pairs) - _LISTED} more" if len(pairs) > _LISTED else "")


_NUMBER_FORMATS = {"mean_test_accuracy": ",.1f", "mean_test_rouge1": ".3f", "mean_test_loss": ",.3g"}
_DEFAULT_FORMAT = ",.2f"

Scores = Mapping[tuple[str, str], Sequence[float]]
"""Every seed's score, by (row, column)."""


CellNumbers = Mapping[str, float | int | None]
"""``mean``, ``std`` and ``rank`` of a cell."""


class CellRecord(TypedDict):
    """A cell of a table: our scores, the paper's, and the numbers of its notes."""

    ours: CellNumbers | None
    scores: list[float]
    paper: CellNumbers | None
    notes: list[int]


class _Column(TypedDict):
    name: str
    label: str
    seeds: list[int]
    base: list[str]
    cells: dict[str, CellRecord]
    order: dict[str, object]
    sentence: str  # whether our results have the paper's order of rows; empty if they are not compared


class ColumnRecord(_Column):
    """A column of a table, with each row compared to the baseline where the baseline was run."""

    against: BaselineComparisonRecord | None


class _TableNotes(TypedDict):
    missing: list[str]
    left_out: dict[str, str]
    diverged: list[str]
    about: list[str]
    notes: list[str]


class _PaperTable(_TableNotes):
    name: str
    title: str
    source: str
    metric: str
    reference: str
    better: str
    scale: str
    about_scale: str
    seeds: list[int]
    rows: dict[str, str]
    columns: list[ColumnRecord]


class PaperTable(_PaperTable, total=False):
    """A table of a paper beside ours, the content of ``table.json``."""

    measured: Sequence[str]
    repeats: dict[str, str]
    """Labels of columns by the label of a column that has the same runs."""


def build_table(
    plan: Plan,
    scores: Scores,
    *,
    diverged: Sequence[str] = (),
    results: Mapping[str, Results] = MappingProxyType({}),
    baseline: str | None = None,
) -> PaperTable:
    """Return a table as plain data, the content of ``table.json``.

    Its key ``about`` has the experiment's notes on the whole table, ``notes`` those on single cells, to which the cells
    refer by index. A column's ``against`` compares each row with the baseline.

    Args:
        plan: The table.
        scores: Every seed's score, by (row, column).
        diverged: Descriptions of runs that diverged.
        results: Each user's metric, nested by column, row, seed and user; without a column's results its ``against`` is
            None.
        baseline: A row or a method to compare the others with.

    Raises:
        RecipeError: No row is the baseline.
    """
    experiment = plan.experiment
    chosen = baseline_row(plan, baseline)
    columns: list[ColumnRecord] = [
        {**_column_record(plan, name, scores), "against": _compare_with_baseline(plan, results.get(name, {}), chosen)}
        for name in plan.columns
    ]
    return {
        "name": plan.name,
        "title": experiment.title,
        "source": f"{plan.study.source}; {experiment.source}",
        "metric": experiment.metric,
        "reference": experiment.reference,
        "better": experiment.better,
        "scale": plan.scale,
        "about_scale": plan.scaled.about,
        "seeds": list(plan.seeds),
        "rows": {row: experiment.rows[row].label or row for row in experiment.rows if row not in plan.missing},
        "columns": columns,
        "missing": list(plan.missing),
        "left_out": dict(plan.left_out),
        "diverged": list(diverged),
        "about": [note.text for note in experiment.notes if not _on_cells(note)],
        "notes": [note.text for note in experiment.notes if _on_cells(note)],
        "repeats": {plan.label(column): plan.label(first) for column, first in repeated_columns(plan).items()},
    }


def repeated_columns(plan: Plan) -> dict[str, str]:
    """Find columns that have exactly the runs of an earlier column; return the earlier column by the later one."""
    first: dict[frozenset[tuple[str, str]], str] = {}  # the first column with these runs
    repeated: dict[str, str] = {}
    for column in plan.columns:
        runs = frozenset((cell.row, cell.folder) for cell in plan.cells if cell.column == column)
        if runs and first.setdefault(runs, column) != column:
            repeated[column] = first[runs]
    return repeated


def baseline_row(plan: Plan, wanted: str | None) -> str:
    """Return the baseline row: the wanted row or method; else ``local``, else the first row.

    Several names with commas between them are one baseline: others are compared with the best of these rows.

    Args:
        plan: The table.
        wanted: A row or a method, or several with commas between them; None for the default.

    Raises:
        RecipeError: No row matches.
    """
    by_method = {plan.experiment.rows[row].method: row for row in reversed(plan.rows)}  # a method's first row
    if wanted is None:
        return baseline_of(plan.rows, by_method.get(BASELINE))
    names = [name if name in plan.rows else by_method.get(name, name) for name in baseline_methods(wanted)]
    return baseline_of(plan.rows, ",".join(names))


def _compare_with_baseline(plan: Plan, results: Results, baseline: str) -> BaselineComparisonRecord | None:
    """Test each row of one column for a difference from the baseline row.

    Args:
        plan: The table.
        results: The column's results, each user's metric, nested by row, seed and user.
        baseline: Key of the baseline row, or keys of several rows separated by commas; the best of these is used.

    Returns:
        The verdicts for ``table.json``, in which the rows have the labels that the table shows. None if the table's
        metric is not in :data:`MEASURES`, if the baseline was not run, or if no other row has enough seeds.
    """
    measure = plan.experiment.metric.removeprefix("mean_test_")
    baseline_rows = baseline_methods(baseline)
    was_run = results.keys() >= {*baseline_rows}
    if measure not in MEASURES or not was_run:
        return None
    comparison = compare_with_baseline(results, measure, baseline)  # a row of the table is a method here
    if comparison is None:
        return None
    labels = {row: plan.experiment.rows[row].label or row for row in results}
    verdicts = tuple(replace(verdict, method=labels[verdict.method]) for verdict in comparison.verdicts)
    baseline_label = baseline_text([labels[row] for row in baseline_rows])
    return replace(comparison, baseline=baseline_label, verdicts=verdicts).as_dict()


def _column_record(plan: Plan, name: str, scores: Scores) -> _Column:
    """Return a column of ``table.json``: numbers and ranks of all rows, and how well their order fits the paper's.

    Only rows with both our number and the paper's are ranked, and only their order is compared.

    Args:
        plan: The table.
        name: The column.
        scores: Every seed's score, by (row, column).
    """
    lower = plan.experiment.better == "lower"
    paper = _paper_numbers(plan, name)
    ours: dict[str, Entry] = {row: _mean_and_deviation(scores[row, name]) for row in plan.rows if (row, name) in scores}
    rows_of_both = [row for row in plan.rows if row in paper and row in ours]
    paper_of_both, ours_of_both = ({row: side[row] for row in rows_of_both} for side in (paper, ours))
    paper_ranks = ranks({row: mean for row, (mean, _) in paper_of_both.items()}, lower_is_better=lower)
    our_ranks = ranks({row: mean for row, (mean, _) in ours_of_both.items()}, lower_is_better=lower)
    order = compare_orders(paper_of_both, ours_of_both, lower_is_better=lower)
    label = plan.label(name)
    # Models of the scale "smoke", a quick test, are too small for their order to mean anything.
    describes_order = bool(paper) and plan.scale != "smoke"
    return {
        "name": name,
        "label": label,
        "seeds": sorted({cell.seed for cell in plan.cells if cell.column == name}),
        "base": sorted({cell.recipe.base for cell in plan.cells if cell.column == name}),
        "cells": {
            row: {
                "ours": _cell_numbers(ours.get(row), our_ranks.get(row)),
                "scores": list(scores.get((row, name), [])),
                "paper": _cell_numbers(paper.get(row), paper_ranks.get(row)),
                "notes": _note_indices(plan, row, name),
            }
            for row in plan.rows
        },
        "order": asdict(order),
        "sentence": sentence(label, order, plan.experiment.reference) if describes_order else "",
    }


def _paper_numbers(plan: Plan, column: str) -> dict[str, Entry]:
    """Return the numbers that the paper printed in a column, by row; rows without one are left out."""
    index = plan.experiment.column_names.index(column)
    cells = {name: row.paper[index] for name, row in plan.experiment.rows.items() if row.paper is not None}
    return {name: parse_printed(cell) for name, cell in cells.items() if cell is not None}


def _note_indices(plan: Plan, row: str, column: str) -> list[int]:
    """Return the indices of the notes on a cell, in the list ``notes`` of ``table.json``.

    That list has the experiment's notes that name rows and columns, and not those on the whole table.

    Args:
        plan: The table.
        row: Row of the cell.
        column: Column of the cell.
    """
    notes = [note for note in plan.experiment.notes if _on_cells(note)]
    return [i for i, note in enumerate(notes) if row in note.rows and column in note.columns]


def _on_cells(note: Note) -> bool:
    """Return whether a note refers to some cells, not to the whole table."""
    return bool(note.rows or note.columns)


def _mean_and_deviation(values: Sequence[float]) -> Entry:
    """Return mean and sample standard deviation over seeds; the deviation is None for one seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _cell_numbers(mean_and_deviation: Entry | None, rank: int | None) -> CellNumbers | None:
    """Return our numbers or the paper's of a cell, for ``table.json``; None without a mean.

    Args:
        mean_and_deviation: Mean and standard deviation, which may be None; None if there is no number.
        rank: Rank of the row; None if we or the paper have no number for it.
    """
    if mean_and_deviation is None:
        return None
    mean, deviation = mean_and_deviation
    return {"mean": mean, "std": deviation, "rank": rank}


# -------------------------------------------------------------------- as text


def write_tables(folder: Path, table: PaperTable) -> None:
    """Write ``table.md`` and ``table.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", dict(table))
    write_text(folder / "table.md", markdown(table))


def markdown(table: PaperTable) -> str:
    """Return a table as Markdown: our numbers and the paper's with ranks, remarks, and comparisons with a baseline."""
    head, rows = _text_grid(table)
    lines = [f"# {table['title']}", "", *_subtitle_lines(table), "", table_line(head), "|" + "---|" * len(head)]
    lines += [table_line(row) for row in rows]
    lines += ["", *(f"- {remark}" for remark in remarks(table))]
    for label, comparison in column_verdicts(table):
        lines += ["", f"## {label}: better, level or worse", "", *comparisons.markdown(comparison)]
    return "\n".join(lines) + "\n"


def latex(table: PaperTable) -> str:
    """Return a table in LaTeX: our numbers beside the paper's, then comparisons of the methods with a baseline.

    The comparisons are a ``table`` environment for each column that has them. They say whether each method is better
    than the baseline, level with it or worse.
    """
    head, rows = _text_grid(table)
    body = tabular(
        [escape_latex(name) for name in head],
        [[escape_latex(row), *map(latex_number, cells)] for row, *cells in rows],
    )
    label = latex_label(table["name"])
    caption = " ".join([f"{table['title']}.", *_subtitle_lines(table)])
    environments = [table_environment(caption, [body], " ".join(remarks(table)), label=label)]
    for column in table["columns"]:
        if record := column.get("against"):
            of_column = latex_label(table["name"], column["name"])
            environments.append(latex_verdicts(BaselineComparison.read(record), of_column, prefix=column["label"]))
    return "% needs \\usepackage{booktabs}\n" + "\n".join(environments)


def column_verdicts(table: PaperTable) -> list[tuple[str, BaselineComparison]]:
    """Return label and comparison with the baseline of each column that has such a comparison."""
    records = ((column["label"], column.get("against")) for column in table["columns"])
    return [(label, BaselineComparison.read(record)) for label, record in records if record]


def render(table: PaperTable) -> Table:
    """Return a table for the terminal. The published numbers are dimmed, ours are not."""
    head, rows = _text_grid(table)
    rendered = Table(title="\n".join([table["title"], *_subtitle_lines(table)]), title_justify="left", box=None)
    for i, name in enumerate(head):
        is_ours = i == 0 or name != table["reference"]
        rendered.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0, style="" if is_ours else "dim")
    for row in rows:
        rendered.add_row(*map(words, row))
    return rendered


def remarks(table: PaperTable) -> list[str]:
    """Return the remarks below a table.

    First come remarks that say for each column whether our results have the paper's order of rows. Then come remarks on
    seeds and runs that are lacking, and on where an archive's numbers were measured. The last ones are notes on cells:
    each begins with its letter, "(a)", which is also printed in the cells that the note is about.
    """
    order_remarks = [column["sentence"] for column in table["columns"]]
    lines = [remark for remark in order_remarks if remark]
    with_fewer_seeds = [column for column in table["columns"] if column["seeds"] != table["seeds"]]
    lines += [f"{column['label']}: seeds {', '.join(map(str, column['seeds']))} only." for column in with_fewer_seeds]
    lines += [f"{text}." for text in table["about"]]  # notes on the whole table, whereas "notes" are on cells
    if table["missing"]:
        lines.append(f"Missing, since the method is not implemented: {', '.join(table['missing'])}.")
    lines += [f"{label} repeats the runs of {first}." for label, first in table.get("repeats", {}).items()]
    lines += [f"Left out: {column} ({why})." for column, why in table["left_out"].items()]
    lines += [f"Diverged: {run}" for run in table["diverged"]]
    lines += table.get("measured", ())  # sentences on the archive; only in a table of archived runs
    used_notes = {note for column in table["columns"] for cell in column["cells"].values() for note in cell["notes"]}
    return lines + [f"({_note_letter(i)}) {table['notes'][i]}." for i in sorted(used_notes)]


def _subtitle_lines(table: PaperTable) -> list[str]:
    """Return the lines below the title: source, scale and base models, and how to read the numbers."""
    seeds = table["seeds"]
    spread = f"mean (std) over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    bases = sorted({base for column in table["columns"] for base in column["base"]})
    base_names = ", ".join(Path(base).name or base for base in bases)
    ranked = "; #: rank among the rows with numbers on both sides" if _has_reference(table) else ""
    return [
        f"{table['source']}.",
        f"Scale {table['scale']}: {table['about_scale']}. Base: {base_names}.",
        f"Ours: {spread}, {table['better']} is better{ranked}.",
    ]


def _has_reference(table: PaperTable) -> bool:
    """Return whether any cell of the table has a number of the paper."""
    return any(cell["paper"] for column in table["columns"] for cell in column["cells"].values())


def _text_grid(table: PaperTable) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table as text; rows without any number are left out.

    Each column has our numbers and, if the table has any of the paper's, the paper's beside them. The letters of the
    cell's notes follow the last number.
    """
    head = ["method"]
    has_reference = _has_reference(table)
    for column in table["columns"]:
        head += [column["label"], table["reference"]] if has_reference else [column["label"]]
    rows: list[list[str]] = []
    number_format = _NUMBER_FORMATS.get(table["metric"], _DEFAULT_FORMAT)
    for row, label in table["rows"].items():
        cells = [label]
        for column in table["columns"]:
            cell = column["cells"].get(row)
            note_marks = "" if cell is None else "".join(f" ({_note_letter(i)})" for i in cell["notes"])
            ours, paper = (None, None) if cell is None else (cell["ours"], cell["paper"])
            our_text, paper_text = _format_numbers(ours, number_format), _format_numbers(paper, number_format)
            cells += [our_text, paper_text + note_marks] if has_reference else [our_text + note_marks]
        if any(cells[1:]):
            rows.append(cells)
    return head, rows


def _format_numbers(numbers: CellNumbers | None, number_format: str) -> str:
    """Return a cell as text, ``46.36 (0.16) #2``: mean, deviation and rank, as far as they are known.

    Args:
        numbers: The numbers; None for an empty cell.
        number_format: Format specification of mean and deviation.
    """
    if numbers is None:
        return ""
    spread = "" if numbers["std"] is None else f" ({numbers['std']:{number_format}})"
    rank = "" if numbers["rank"] is None else f" #{numbers['rank']}"
    return f"{numbers['mean']:{number_format}}{spread}{rank}"


def _note_letter(index: int) -> str:
    """Return the letter that marks a note: "a" for the first."""
    return "abcdefghijklmnopqrstuvwxyz"[index]


def table_line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
